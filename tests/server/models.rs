//! Models of every family over the server, from folders and from GGUF files.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::client::Server;

/// Those with latent attention or experts.
const NAMES: [&str; 5] = ["youtu", "deepseek_v2_lite", "glm4_moe_lite", "qwen3_moe", "mixtral"];

fn folder(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny")).join(name)
}

/// Eight tokens of a prompt and the 32 that an independent implementation continues with.
fn golden(name: &str) -> Vec<u64> {
    let bytes = std::fs::read(folder(name).join("golden.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let greedy = file.tensor("greedy").unwrap();
    greedy.data().as_chunks::<8>().0.iter().map(|id| u64::from_le_bytes(*id)).collect()
}

fn answer(model: &Path, prompt: &[u64], max_tokens: usize) -> Vec<u64> {
    let server = Server::start_with("--kv-cache-dtype f32 --max-model-len 64", |command| {
        command.arg("--model").arg(model);
    });
    let body = json!({
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
    });
    let answer = server.post("/v1/completions", &body).success();
    assert_eq!(answer["usage"]["completion_tokens"], max_tokens, "{answer}");
    let ids = answer["choices"][0]["token_ids"].as_array().unwrap();
    ids.iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn folders_give_the_tokens_of_an_independent_implementation() {
    for name in NAMES {
        let golden = golden(name);
        let (prompt, expected) = golden.split_at(8);
        assert_eq!(answer(&folder(name), prompt, expected.len()), expected, "{name}");
    }
}

#[test]
fn files_are_served_too() {
    for name in NAMES {
        let golden = golden(name);
        let (prompt, expected) = golden.split_at(8);
        let file = folder(name).join(format!("{name}.q8_0.gguf"));
        // Eight bits are enough for the first token.
        assert_eq!(answer(&file, prompt, 4)[0], expected[0], "{name}");
    }
}
