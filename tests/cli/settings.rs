//! Settings that models bring along: sampling, rotary positions and their window, heads, and the range of keys.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::program::{Outcome, fixture, tinyvllm};

/// A small model's folder whose `config.json` is changed, `null` removing a key.
fn folder(name: &str, changes: &Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("tiny").join(name);
    fs::copy(source.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let config = fs::read(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
            value => config[key] = value.clone(),
        }
    }
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn generate(folder: &TempDir, words: &str) -> Outcome {
    tinyvllm(&format!("generate --threads 1 --json --ignore-eos {words}")).model(folder.path()).run()
}

fn ids(folder: &TempDir, words: &str) -> Value {
    generate(folder, words).json().remove(0)["output_token_ids"].clone()
}

/// A prompt that is longer than the windows and original contexts below.
fn long_prompt(words: &str) -> String {
    let ids: Vec<String> = (0..200).map(|index| (3 + index * 7 % 280).to_string()).collect();
    format!("--temperature 0 --max-tokens 8 --prompt-ids {} {words}", ids.join(","))
}

#[test]
fn sampling_follows_the_folder_unless_a_flag_overrides_it() {
    let folder = folder("llama", &json!({}));
    let sampled = |words: &str| {
        ["1", "2", "3"].map(|seed| ids(&folder, &format!("--prompt-ids 5,6,7 --seed {seed} {words}")))
    };
    let write = |values: Value| {
        fs::write(folder.path().join("generation_config.json"), values.to_string()).unwrap();
    };
    let greedy = ids(&folder, "--prompt-ids 5,6,7 --max-tokens 4 --temperature 0");
    let all_greedy = [greedy.clone(), greedy.clone(), greedy];
    write(json!({"eos_token_id": 2}));
    let free = sampled("--max-tokens 4");
    assert_ne!(free, all_greedy);
    for values in [
        json!({"do_sample": true, "top_k": 1, "temperature": 0.6}),
        json!({"do_sample": false}),
        json!({"do_sample": false, "temperature": 0.9}),
        json!({"temperature": 0, "top_p": "most"}),
    ] {
        write(values.clone());
        assert_eq!(sampled("--max-tokens 4"), all_greedy, "{values}");
        assert_eq!(sampled("--max-tokens 4 --generation-config vllm"), free, "{values}");
        assert_eq!(sampled("--max-tokens 4 --top-k 0 --temperature 0.7"), free, "{values}");
    }
    // The start says what was taken and what was not.
    let notes = generate(&folder, "--prompt-ids 5 --max-tokens 1").stderr;
    assert!(notes.contains("generation_config.json: temperature 0; --generation-config vllm"), "{notes}");
    assert!(notes.contains("top_p = \"most\" in generation_config.json is ignored"), "{notes}");
    write(json!({"max_new_tokens": 3}));
    assert_eq!(ids(&folder, "--prompt-ids 5,6,7").as_array().unwrap().len(), 3);
    assert_eq!(ids(&folder, "--prompt-ids 5,6,7 --max-tokens 5").as_array().unwrap().len(), 5);
    let other = folder.path().to_str().unwrap();
    assert_eq!(
        ids(&folder, &format!("--generation-config {other} --prompt-ids 5")).as_array().unwrap().len(),
        3
    );
    generate(&folder, "--prompt-ids 5 --generation-config ./no-such-folder")
        .error(1, &["./no-such-folder/generation_config.json", "hint: ", "--generation-config auto"]);
}

#[test]
fn the_older_spelling_of_the_rope_counts_and_scaling_extends_the_window() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let with_theta = |theta: f64| {
        let mut yarn = yarn.clone();
        yarn["rope_theta"] = json!(theta);
        yarn
    };
    let read = |changes: Value| folder("qwen3", &changes);
    let answer = |changes: Value| ids(&read(changes), &long_prompt(""));
    let plain = answer(json!({}));
    let scaled = answer(json!({"rope_parameters": with_theta(1e6)}));
    assert_ne!(plain, scaled);
    // Without a base of its own, the scaling has the one of the class, as in transformers.
    let both = answer(json!({"rope_scaling": yarn}));
    assert_eq!(both, answer(json!({"rope_parameters": with_theta(1e4)})));
    assert_eq!(answer(json!({"rope_scaling": yarn, "rope_theta": 1e6})), scaled);
    let notes = generate(&read(json!({"rope_scaling": yarn})), &long_prompt("")).stderr;
    assert!(notes.contains("note: config.json has rope_scaling and rope_parameters"), "{notes}");

    let short = read(json!({"max_position_embeddings": 64, "rope_parameters": with_theta(1e6)}));
    assert_eq!(ids(&short, &long_prompt("--max-model-len 256")), scaled);
    assert_eq!(ids(&short, &long_prompt("")), scaled);
    generate(&short, &long_prompt("--max-model-len 257"))
        .error(1, &["--max-model-len is 257", "made for 256 tokens", "hint: give at most 256"]);
    let dynamic = json!({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6});
    let dynamic = read(json!({"rope_parameters": dynamic}));
    assert_eq!(ids(&dynamic, &long_prompt("")), plain);
    generate(&dynamic, &long_prompt("--max-model-len 513")).error(1, &["made for 512 tokens", "\"dynamic\""]);
    // Divisors of long sequences count as soon as longer ones are requested than before scaling.
    let long = json!({
        "rope_type": "longrope", "rope_theta": 1e6, "attention_factor": 1.0,
        "short_factor": vec![1.0; 16], "long_factor": vec![2.0; 16], "original_max_position_embeddings": 256,
    });
    let long = read(json!({"rope_parameters": long}));
    let linear = json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}});
    assert_eq!(ids(&long, &long_prompt("")), plain);
    assert_eq!(ids(&long, &long_prompt("--max-model-len 257")), answer(linear));
}

#[test]
fn a_sliding_window_is_off_until_it_is_switched_on() {
    for model in ["qwen2", "qwen3"] {
        let answer = |changes: Value| ids(&folder(model, &changes), &long_prompt(""));
        let whole = answer(json!({}));
        let silent = json!({"sliding_window": 8, "use_sliding_window": null, "layer_types": null});
        assert_eq!(answer(silent), whole, "{model}");
        let on = json!({"sliding_window": 8, "use_sliding_window": true, "layer_types": null, "max_window_layers": 0});
        assert_ne!(answer(on), whole, "{model}");
    }
}

#[test]
fn a_head_of_its_own_counts_and_the_only_matrix_is_both() {
    let trained = folder("llama", &json!({}));
    let tied = folder("llama", &json!({"tie_word_embeddings": true}));
    let words = "--prompt-ids 5,6,7 --temperature 0 --max-tokens 8";
    let outcome = generate(&tied, words);
    assert!(outcome.stderr.contains("note: config.json ties lm_head.weight"), "{}", outcome.stderr);
    assert_eq!(outcome.json()[0]["output_token_ids"], ids(&trained, words));

    // One matrix under either name.
    let tied = folder("qwen3", &json!({}));
    let expected = ids(&tied, words);
    let path = tied.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let name = b"\"model.embed_tokens.weight\":";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    // As long, with blanks where JSON does not mind them.
    let other = format!("{:<width$}", "\"lm_head.weight\":", width = name.len());
    fs::write(&path, [&bytes[..at], other.as_bytes(), &bytes[at + name.len()..]].concat()).unwrap();
    assert_eq!(ids(&tied, words), expected);
    let split = folder("qwen3", &json!({"tie_word_embeddings": false}));
    generate(&split, words).error(1, &["tie_word_embeddings is false", "lm_head.weight", "hint: "]);
}

#[test]
fn biases_of_projections_are_computed_where_a_class_may_have_them() {
    let words = "--prompt-ids 5,6,7 --temperature 0 --max-tokens 8";
    let qwen = folder("qwen2", &json!({}));
    let llama = folder("qwen2", &json!({"architectures": ["LlamaForCausalLM"], "attention_bias": true}));
    assert_eq!(ids(&llama, words), ids(&qwen, words));
    let silent = folder("qwen2", &json!({"architectures": null}));
    assert_eq!(ids(&silent, words), ids(&qwen, words));
}

#[test]
fn keys_beyond_half_precision_have_a_cache_that_holds_them() {
    let folder = folder("qwen2", &json!({}));
    let path = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let words = "--prompt-ids 5,6,7 --temperature 0 --max-tokens 8";
    let quiet = generate(&folder, words).stderr;
    assert!(!quiet.contains("half precision"), "{quiet}");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let bias = &header["model.layers.0.self_attn.k_proj.bias"];
    assert_eq!(bias["dtype"], "F32");
    let offset = |index: usize| 8 + header_len + bias["data_offsets"][index].as_u64().unwrap() as usize;
    for value in bytes[offset(0)..offset(1)].chunks_exact_mut(4) {
        value.copy_from_slice(&1e5_f32.to_le_bytes());
    }
    fs::write(&path, bytes).unwrap();
    let exact = ids(&folder, &format!("{words} --kv-cache-dtype bf16"));
    let outcome = generate(&folder, words);
    assert!(outcome.stderr.contains("keys or values of layer 0 may be as large as"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("the KV cache has bf16"), "{}", outcome.stderr);
    assert_eq!(outcome.json()[0]["output_token_ids"], exact);
    generate(&folder, &format!("{words} --kv-cache-dtype f16"))
        .error(1, &["--kv-cache-dtype f16 is for values up to 65504", "hint: ", "--kv-cache-dtype bf16"]);
}
