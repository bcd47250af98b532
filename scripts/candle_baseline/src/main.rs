//! How fast candle's own quantised Llama is on a GGUF file: a baseline for tinyvllm and llama.cpp.
//!
//! `candle_baseline MODEL.gguf [--prompt 512] [--depth 128] [--generate 64]` prints one JSON object.
//! Two threads or eight is decided by `RAYON_NUM_THREADS`, as in every program on candle.

use std::fs::File;
use std::io::BufReader;
use std::time::Instant;

use candle_core::quantized::gguf_file;
use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

struct Arguments {
    model: String,
    prompt: usize,
    depth: usize,
    generate: usize,
}

fn arguments() -> Result<Arguments> {
    let mut parsed = Arguments { model: String::new(), prompt: 512, depth: 128, generate: 64 };
    let mut rest = std::env::args().skip(1);
    while let Some(argument) = rest.next() {
        let mut number =
            || -> Result<usize> { Ok(rest.next().ok_or(format!("{argument} needs a number"))?.parse()?) };
        match argument.as_str() {
            "--prompt" => parsed.prompt = number()?,
            "--depth" => parsed.depth = number()?,
            "--generate" => parsed.generate = number()?,
            model => parsed.model = model.to_owned(),
        }
    }
    if parsed.model.is_empty() {
        return Err("usage: candle_baseline MODEL.gguf [--prompt N] [--depth N] [--generate N]".into());
    }
    Ok(parsed)
}

/// Pseudo-random token ids of a vocabulary: the same for the same seed.
fn ids(count: usize, seed: u32, num_tokens: u32) -> Vec<u32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % num_tokens
    };
    (0..count).map(|_| next()).collect()
}

/// Computes `ids` from position `start` and returns the most likely next token.
fn step(model: &mut ModelWeights, ids: &[u32], start: usize) -> Result<u32> {
    let input = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
    let logits = model.forward(&input, start)?;
    Ok(logits.squeeze(0)?.argmax(0)?.to_scalar::<u32>()?)
}

fn main() -> Result<()> {
    let arguments = arguments()?;
    let begin = Instant::now();
    let mut reader = BufReader::new(File::open(&arguments.model)?);
    let content = gguf_file::Content::read(&mut reader)?;
    let embedding = content.tensor_infos.get("token_embd.weight").ok_or("no token_embd.weight")?;
    let num_tokens = u32::try_from(embedding.shape.dims2()?.0)?;
    let mut model = ModelWeights::from_gguf(content, &mut reader, &Device::Cpu)?;
    let load_seconds = begin.elapsed().as_secs_f64();

    // The first pass repacks weights and touches every page: it is not what is measured.
    step(&mut model, &ids(arguments.prompt.clamp(1, 32), 1, num_tokens), 0)?;

    let mut report = serde_json::json!({ "engine": "candle", "load_seconds": load_seconds });
    if arguments.prompt > 0 {
        model.clear_kv_cache();
        let prompt = ids(arguments.prompt, 2, num_tokens);
        let begin = Instant::now();
        step(&mut model, &prompt, 0)?;
        report["prompt"] = (arguments.prompt as f64 / begin.elapsed().as_secs_f64()).into();
    }
    if arguments.generate > 0 {
        model.clear_kv_cache();
        let mut token = step(&mut model, &ids(arguments.depth.max(1), 3, num_tokens), 0)?;
        let begin = Instant::now();
        for position in 0..arguments.generate {
            token = step(&mut model, &[token], arguments.depth.max(1) + position)?;
        }
        report["generation"] = (arguments.generate as f64 / begin.elapsed().as_secs_f64()).into();
    }
    println!("{report}");
    Ok(())
}
