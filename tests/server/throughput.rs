//! Several clients together get much more than one.

use std::fs;
use std::io::Write;
use std::time::Instant;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;
use tempfile::TempDir;

use super::client::{Server, TIMEOUT, connect, post_bytes, read_answer};
use super::load::{Random, machine};

const NUM_LAYERS: usize = 8;
const HIDDEN: usize = 1024;
const KV: usize = 256;
const FEED_FORWARD: usize = 2816;
const VOCAB: usize = 512;

/// A Llama of 91 million random weights, more than a cache of the processor holds: generating is reading them.
fn random_model() -> TempDir {
    let folder = TempDir::new().unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": HIDDEN / 64,
        "num_key_value_heads": KV / 64, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": VOCAB, "eos_token_id": 1,
    });
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..NUM_LAYERS {
        let parts = [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.k_proj", vec![KV, HIDDEN]),
            ("self_attn.v_proj", vec![KV, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HIDDEN]),
            ("mlp.gate_proj", vec![FEED_FORWARD, HIDDEN]),
            ("mlp.up_proj", vec![FEED_FORWARD, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, FEED_FORWARD]),
        ];
        shapes.extend(parts.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    let mut random = Random(1);
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            // In bf16, from 0.015 to 0.06 of either sign.
            let mut value = || {
                let magnitude = 0x3C80 + random.below(0x100) as u16;
                magnitude | (random.below(2) as u16) << 15
            };
            let len: usize = shape.iter().product();
            (name, shape, (0..len).flat_map(|_| value().to_le_bytes()).collect())
        })
        .collect();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (name, TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

/// Tokens per second of all clients together.
fn rate(server: &Server, num_clients: usize, round: usize) -> f64 {
    const TOKENS: usize = 24;
    let requests: Vec<_> = (0..num_clients)
        .map(|client| {
            let body = json!({
                "prompt": [2 + client, 3 + round, 5], "max_tokens": TOKENS, "ignore_eos": true, "temperature": 0,
                "stream": true, "return_token_ids": true,
            });
            post_bytes("/v1/completions", "", &body.to_string())
        })
        .collect();
    let start = Instant::now();
    let streams: Vec<_> = requests
        .into_iter()
        .map(|request| {
            let mut stream = connect(server.address());
            stream.write_all(request.as_bytes()).unwrap();
            stream
        })
        .collect();
    for stream in streams {
        let events = read_answer(stream).events();
        assert!(events.len() >= TOKENS, "{events:?}");
    }
    (num_clients * TOKENS) as f64 / start.elapsed().as_secs_f64()
}

#[test]
fn eight_clients_get_twice_what_one_gets() {
    let _machine = machine();
    let model = random_model();
    // An answer alone, which repeats itself, would be drafted.
    let flags = "--quantization q8_0 --max-num-seqs 8 --disable-access-log --no-speculation";
    let server = Server::start_with(flags, |command| {
        command.arg("--model").arg(model.path());
    });
    // Whatever else the machine does makes some rounds slower, and those of eight clients are the longer ones.
    let (mut alone, mut together) = (0.0_f64, 0.0_f64);
    let start = Instant::now();
    for round in 0.. {
        alone = alone.max(rate(&server, 1, round));
        together = together.max(rate(&server, 8, round));
        if round > 2 && together >= 2.0 * alone {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "one client gets {alone} tokens/s, eight get {together}");
    }
}
