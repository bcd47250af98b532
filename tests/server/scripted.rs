//! A model that answers by a script.
//!
//! It is a real Llama, with weights that make it a table: the embedding of a token is a direction of its own, the
//! layer adds nothing to it, and the output matrix leads from each direction to the next token of the script. So
//! every token depends on the one before it alone, and each chunk of a script is a token of its own.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// Ends every script.
const END: &str = "<|end|>";

/// Writes a model that says `scripts[i].1` after a prompt that ends with the token `scripts[i].0`. The tokens in
/// `special` are omitted from text, as special tokens are.
pub(crate) fn scripted_model(template: &str, special: &[&str], scripts: &[(&str, &str)]) -> TempDir {
    let mut vocab: Vec<String> = (0..=255u8).map(char_of_byte).map(String::from).collect();
    let mut ids: HashMap<String, usize> = HashMap::new();
    let mut control: BTreeSet<&str> = special.iter().copied().collect();
    control.insert(END);
    control.extend(scripts.iter().map(|(start, _)| *start));
    let mut id_of = |chunk: &str| {
        *ids.entry(chunk.to_owned()).or_insert_with(|| {
            vocab.push(chunk.to_owned());
            vocab.len() - 1
        })
    };
    let mut next: BTreeMap<usize, usize> = BTreeMap::new();
    let mut used = BTreeSet::new();
    for (start, text) in scripts {
        let mut last = id_of(start);
        for chunk in chunks_of(text, &control, &mut used) {
            let id = id_of(&chunk);
            assert_eq!(next.insert(last, id), None, "{chunk:?} comes twice in a script");
            last = id;
        }
        assert_eq!(next.insert(last, id_of(END)), None);
    }
    let end = id_of(END);
    let folder = TempDir::new().unwrap();
    write_tokenizer(folder.path(), &vocab, &control, template);
    write_weights(folder.path(), vocab.len(), end, &next);
    folder
}

/// Cuts a text into chunks that no script has used yet, at special tokens and in varying lengths.
fn chunks_of(text: &str, control: &BTreeSet<&str>, used: &mut BTreeSet<String>) -> Vec<String> {
    let mut chunks_of: Vec<String> = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let special = control.iter().find(|special| rest.starts_with(**special));
        let end = control.iter().filter_map(|special| rest.find(special)).min().unwrap_or(rest.len());
        let chunk = match special {
            Some(special) => (*special).to_owned(),
            None => {
                // A chunk of one letter would be a token of the byte alphabet, and a short rest might be used up.
                let leaves_enough = |len: &usize| *len == end || end - len >= 4;
                let lengths = (2 + chunks_of.len() % 3..=end)
                    .chain([end])
                    .filter(|len| rest.is_char_boundary(*len))
                    .filter(leaves_enough);
                let mut new = lengths.map(|len| &rest[..len]).filter(|chunk| !used.contains(*chunk));
                match (new.next(), chunks_of.pop()) {
                    (Some(chunk), last) => {
                        chunks_of.extend(last);
                        chunk.to_owned()
                    }
                    // All of them are used up; with the one before, it is new.
                    (None, Some(last)) if !control.contains(last.as_str()) => {
                        let start = text.len() - rest.len() - last.len();
                        used.remove(&last);
                        let longer = &text[start..start + last.len() + end];
                        assert!(!used.contains(longer), "{longer:?} comes twice");
                        rest = &text[start..];
                        longer.to_owned()
                    }
                    (None, _) => panic!("{rest:?} has no new piece"),
                }
            }
        };
        rest = &rest[chunk.len()..];
        used.insert(chunk.clone());
        chunks_of.push(chunk);
    }
    chunks_of
}

fn write_tokenizer(folder: &Path, vocab: &[String], control: &BTreeSet<&str>, template: &str) {
    let bytes: Map<String, Value> =
        vocab[..256].iter().enumerate().map(|(id, text)| (text.clone(), id.into())).collect();
    let added: Vec<Value> = vocab[256..]
        .iter()
        .zip(256..)
        .map(|(content, id)| {
            json!({
                "id": id, "content": content, "special": control.contains(content.as_str()),
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": bytes, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({"eos_token": END, "chat_template": template});
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

fn write_weights(folder: &Path, vocab_size: usize, end: usize, next: &BTreeMap<usize, usize>) {
    let hidden_size = next.len().next_multiple_of(64);
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden_size, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": vocab_size,
        "eos_token_id": end,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut embeddings = vec![0.0; vocab_size * hidden_size];
    let mut output = embeddings.clone();
    for (direction, (token, next)) in next.iter().enumerate() {
        embeddings[token * hidden_size + direction] = 1.0;
        output[next * hidden_size + direction] = 10.0;
    }
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab_size, hidden_size], embeddings),
        ("lm_head.weight".to_owned(), vec![vocab_size, hidden_size], output),
        ("model.norm.weight".to_owned(), vec![hidden_size], vec![1.0; hidden_size]),
    ];
    for name in ["input_layernorm", "post_attention_layernorm"] {
        tensors.push((format!("model.layers.0.{name}.weight"), vec![hidden_size], vec![1.0; hidden_size]));
    }
    for name in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"] {
        let shape = vec![64, hidden_size];
        tensors.push((format!("model.layers.0.{name}.weight"), shape, vec![0.0; 64 * hidden_size]));
    }
    for name in ["self_attn.o_proj", "mlp.down_proj"] {
        let shape = vec![hidden_size, 64];
        tensors.push((format!("model.layers.0.{name}.weight"), shape, vec![0.0; 64 * hidden_size]));
    }
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, shape, values)| {
            (name, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
        })
        .collect();
    let views = bytes
        .iter()
        .map(|(name, shape, bytes)| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// How byte-level vocabularies spell a byte.
fn char_of_byte(byte: u8) -> char {
    match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        0..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap(),
        0x7F..=0xA0 => char::from_u32(0x121 + u32::from(byte) - 0x7F).unwrap(),
        0xAD => '\u{143}',
    }
}
