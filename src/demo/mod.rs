//! The model that is part of the program, so that the first run needs no network.
//!
//! `MODEL_CARD.md` beside this file says what it was trained on; `scripts/train_demo_model.py` makes it.

/// A GGUF file with a small Llama model, its tokenizer and its chat template. A constant would be in the program once for
/// each piece that it is compiled in.
pub static MODEL: &[u8] = include_bytes!("model.gguf");

/// The beginning of a story, for a first run without a prompt.
pub const PROMPT: &str = "Once upon a time, in a small village by the sea,";
