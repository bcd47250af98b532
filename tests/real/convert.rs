//! The file's weights as they decode, as a folder in the publisher's format: single precision,
//! `config.json` and `tokenizer.json`.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, View, serialize_to_file};
use serde_json::{Value, json};
use tinyvllm::weights::Checkpoint;
use tinyvllm::weights::gguf::Metadata;

/// The type of control tokens in GGUF files.
const CONTROL: i64 = 3;

/// The folder, in the build's folder for outputs of tests. It is 540 MB and takes seconds to make, so it stays for
/// the next run unless this code has changed.
pub(crate) fn f32_folder(gguf: &Path) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (include_str!("convert.rs"), gguf).hash(&mut hasher);
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = parent.join(format!("smollm2-{:016x}", hasher.finish()));
    if !folder.exists() {
        for entry in fs::read_dir(parent).unwrap().map(Result::unwrap) {
            // Another test may have come as far as this.
            if entry.file_name().to_string_lossy().starts_with("smollm2-") && entry.path() != folder {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let new = tempfile::Builder::new().prefix("new-smollm2-").tempdir_in(parent).unwrap();
        write(&Checkpoint::open(gguf).unwrap(), new.path());
        if fs::rename(new.path(), &folder).is_ok() {
            let _ = new.keep();
        }
    }
    folder
}

fn write(checkpoint: &Checkpoint, folder: &Path) {
    let metadata = checkpoint.gguf_metadata().unwrap();
    let config = config(metadata);
    let heads = |name: &str| config[name].as_u64().unwrap() as usize;
    let tensors = checkpoint.tensor_names().map(|name| {
        let tensor = checkpoint.tensor(name).unwrap();
        let (values, shape) = (tensor.to_f32().unwrap(), tensor.shape.to_vec());
        let values = match name {
            _ if name.ends_with("attn_q.weight") => halves(&values, heads("num_attention_heads"), &shape),
            _ if name.ends_with("attn_k.weight") => halves(&values, heads("num_key_value_heads"), &shape),
            _ => values,
        };
        (
            hub_name(name),
            Tensor { shape, bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect() },
        )
    });
    serialize_to_file(tensors.collect::<Vec<_>>(), None, &folder.join("model.safetensors")).unwrap();
    let files = [
        ("config.json", &config),
        ("tokenizer.json", &tokenizer(metadata)),
        ("tokenizer_config.json", &tokenizer_config(metadata)),
    ];
    for (name, content) in files {
        fs::write(folder.join(name), content.to_string()).unwrap();
    }
}

struct Tensor {
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for Tensor {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        (&self.bytes).into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Rows of heads whose rotary pairs are neighbours, with the first ones of all pairs before the second ones.
fn halves(values: &[f32], num_heads: usize, shape: &[usize]) -> Vec<f32> {
    let [rows, cols] = shape[..] else { panic!("{shape:?} is no matrix") };
    let head_dim = rows / num_heads;
    let source = |row: usize| {
        let (head, at) = (row / head_dim, row % head_dim);
        head * head_dim + at % (head_dim / 2) * 2 + at / (head_dim / 2)
    };
    (0..rows).flat_map(|row| &values[source(row) * cols..][..cols]).copied().collect()
}

fn hub_name(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    match parts[..] {
        ["token_embd", "weight"] => "model.embed_tokens.weight".to_owned(),
        ["output_norm", "weight"] => "model.norm.weight".to_owned(),
        ["blk", layer, part, "weight"] => {
            let part = match part {
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_output" => "self_attn.o_proj",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                "attn_norm" => "input_layernorm",
                "ffn_norm" => "post_attention_layernorm",
                _ => panic!("{name}"),
            };
            format!("model.layers.{layer}.{part}.weight")
        }
        _ => panic!("{name}"),
    }
}

fn config(metadata: &Metadata) -> Value {
    let number = |key: &str| metadata.f64(&format!("llama.{key}")).unwrap();
    let count = |key: &str| metadata.usize(&format!("llama.{key}")).unwrap();
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "float32",
        "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": true, "rope_scaling": null,
        "bos_token_id": metadata.token_id("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.token_id("tokenizer.ggml.eos_token_id"),
        "hidden_size": count("embedding_length"), "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"), "num_attention_heads": count("attention.head_count"),
        "num_key_value_heads": count("attention.head_count_kv"), "max_position_embeddings": count("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon") as f32, "rope_theta": number("rope.freq_base"),
        "vocab_size": metadata.strings("tokenizer.ggml.tokens").unwrap().len(),
    })
}

/// The vocabulary for the `tokenizers` library, cut as the publisher cuts texts: digits one by one, the rest as GPT-2.
pub(crate) fn tokenizer(metadata: &Metadata) -> Value {
    let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap();
    let types = metadata.integers("tokenizer.ggml.token_type").unwrap();
    let merges = metadata.strings("tokenizer.ggml.merges").unwrap();
    let added = tokens.iter().zip(types).enumerate().filter(|(_, (_, kind))| **kind == CONTROL).map(
        |(id, (token, _))| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
        },
    );
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        ]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect::<serde_json::Map<_, _>>(),
            "merges": merges.iter().map(|merge| merge.split(' ').collect()).collect::<Vec<Vec<_>>>(),
        },
    })
}

fn tokenizer_config(metadata: &Metadata) -> Value {
    json!({
        "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": false, "model_max_length": 8192,
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>", "chat_template": metadata.str("tokenizer.chat_template"),
    })
}
