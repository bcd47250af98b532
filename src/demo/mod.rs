//! The model in the program itself, so that the first run needs no network.
//!
//! `MODEL_CARD.md` next to this file describes its training data; `scripts/demo/train.py` trains it.

/// A GGUF file with a small Llama model, its tokenizer and its chat template. A constant would be in the program once for
/// each chunk that it is compiled in.
pub static MODEL: &[u8] = include_bytes!("model.gguf");

/// The beginning of a story, for a first run without a prompt.
pub const PROMPT: &str = "Once upon a time, in a small village by the sea,";
