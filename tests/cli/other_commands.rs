//! `info`, `pull`, `completions`, help, and `chat` from a pipe.

use std::path::Path;

use crate::program::{fixture, tiny_llama, tinyvllm};

#[test]
fn help_names_every_command_and_fits_a_newcomer() {
    let help = tinyvllm("--help").run().success();
    for word in
        ["generate", "chat", "bench", "pull", "info", "verify", "completions", "Examples:", "TINYVLLM_"]
    {
        assert!(help.contains(word), "--help should say {word}");
    }
    for flag in
        ["--prompt-ids", "--max-model-len", "--temperature", "--block-size", "--logit-bias", "--device"]
    {
        assert!(help.contains(flag), "--help should explain {flag}");
    }
    let short = tinyvllm("-h").run().success();
    assert!(short.lines().count() < help.lines().count() / 2, "-h is short");
    assert!(short.contains("Examples:"));
    for command in ["generate", "chat", "run", "bench", "pull", "info", "verify", "completions"] {
        assert!(tinyvllm(&format!("{command} --help")).run().success().contains("Usage:"), "{command}");
    }
    assert!(tinyvllm("--version").run().success().starts_with("tinyvllm "));
}

#[test]
fn completions_for_every_shell_know_the_flags() {
    for shell in ["bash", "zsh", "fish", "powershell"] {
        let script = tinyvllm(&format!("completions {shell}")).run().success();
        for word in ["tinyvllm", "verify", "max-model-len"] {
            assert!(script.contains(word), "{shell} should know {word}");
        }
    }
}

#[test]
fn a_self_test_does_the_wanted_checks_only() {
    let text = tinyvllm("self-test --device cpu --only gather_rows").run().success();
    let lines: Vec<&str> = text.lines().skip(1).collect();
    assert!(
        matches!(lines[..], [check, count] if check.starts_with("pass  gather_rows: ") && count.starts_with("1 passed, 0 failed: 1 check in ")),
        "{text}"
    );
    // Of models, too, whose tokens come with their logits.
    let text = tinyvllm("self-test --device cpu --only tiny/llama:").run().success();
    assert_eq!(text.lines().filter(|line| line.starts_with("pass  tiny/llama: ")).count(), 3, "{text}");
    let outcome = tinyvllm("self-test --device cpu --only gather_cows").run();
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stderr.contains("no check has `gather_cows` in its name"), "{}", outcome.stderr);
}

#[test]
fn models_with_latent_attention_and_experts_generate_and_info_shows_them() {
    for (model, words) in [
        (
            "tiny/glm4_moe_lite",
            &["latent_row", "64 + 16 values", "2 of 8 of width 32 in 2 layers", "width 32"][..],
        ),
        ("tiny/youtu/youtu.q8_0.gguf", &["latent_row", "YoutuForCausalLM"]),
        ("tiny/qwen3_moe", &["2 of 8", "shared_experts", "none"]),
    ] {
        let text = tinyvllm("info --memory-bandwidth 20").model(fixture(model)).run().success();
        for word in words {
            assert!(text.contains(word), "{word} in:\n{text}");
        }
        let run = |kernels: &str| {
            let words = format!("--prompt-ids 1,2,3 --max-tokens 4 --ignore-eos --temperature 0 {kernels}");
            tinyvllm(&words).model(fixture(model)).run().success()
        };
        assert_eq!(run("--num-scheduler-steps 3"), run(""), "{model}");
        assert!(!run("--kernels reference").is_empty());
    }
}

#[test]
fn a_model_with_an_mtp_block_reports_it_and_drafts_on_request() {
    let (model, mtp) = (fixture("tiny/mtp"), r#"--speculative-config={"method":"mtp"}"#);
    let info = |flags: &str| tinyvllm(&format!("info --json {flags}")).model(&model).run().json().remove(0);
    let (without, with) = (info(""), info(mtp));
    let block = |info: &serde_json::Value| info["config"]["mtp_block"].as_str().unwrap().to_owned();
    assert!(block(&without).starts_with("left out; --speculative-config"), "{without}");
    assert_eq!(block(&with), "drafts");
    // 48 halves for each token in each of two layers and in the block.
    assert_eq!((&without["kv_bytes_per_token"], &with["kv_bytes_per_token"]), (&192.into(), &288.into()));

    let generate = "generate --prompt-ids 5,6,7 --max-tokens 12 --ignore-eos --temperature 0";
    let plain = tinyvllm(generate).model(&model).run();
    assert!(plain.stderr.contains("without its MTP block"), "{}", plain.stderr);
    let drafted = tinyvllm(&format!("{generate} {mtp}")).model(&model).run();
    assert!(drafted.stderr.contains("drafts with its MTP block"), "{}", drafted.stderr);
    assert_eq!(drafted.success(), plain.success());
    // In files, too, its experts are with the others, and its part of the cache is with that of the layers.
    let (folder, prompt) =
        (tempfile::tempdir().unwrap(), (3..93).map(|id| id.to_string()).collect::<Vec<_>>());
    let run = |flags: &str| {
        let words = format!("generate --max-tokens 12 --ignore-eos --temperature 0 {flags}");
        let program = tinyvllm(&words).args(["--prompt-ids", &prompt.join(",")]).model(&model);
        let program = program.args([Path::new("--prefix-cache-dir"), folder.path()]);
        program.args([Path::new("--expert-weights-dir"), folder.path()]).run()
    };
    let plain = run("--no-speculation").success();
    let drafting = format!("--expert-weights file {mtp}");
    for (flags, is_cached) in [(&drafting[..], false), (&drafting, true), ("--expert-weights file", true)] {
        // What is measured decides whether so short a prefix is read, so a busy machine may compute it now and then.
        let mut outcomes = (0..if is_cached { 10 } else { 1 }).map(|_| run(flags));
        let is_read = outcomes.any(|outcome| {
            let is_read = outcome.stderr.contains("64 of them cached");
            assert_eq!(outcome.success(), plain, "{flags}");
            is_read
        });
        assert_eq!(is_read, is_cached, "{flags}");
    }

    let refused = tinyvllm(&format!("{generate} {mtp}")).model(tiny_llama()).run();
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("LlamaForCausalLM has none"), "{}", refused.stderr);
    assert!(refused.stderr.contains("suffix"), "{}", refused.stderr);
}

#[test]
fn info_shows_configuration_types_and_memory() {
    let info = tinyvllm("info --memory-bandwidth 20").model(fixture("kquant/llama/llama.q4_k_mix.gguf"));
    let text = info.run().success();
    for word in ["vocab_size", "Q4_K", "Q6_K", "in f16, or in bf16", "context", "none", "20.0 GB/s (given)"] {
        assert!(text.contains(word), "{text} should say {word}");
    }
    assert!(
        tinyvllm("info demo --memory-bandwidth 20 --kv-cache-dtype q8_0")
            .run()
            .success()
            .contains("in q8_0\n")
    );
    let object = tinyvllm("info --json demo").run().json().remove(0);
    assert_eq!(object["kv_cache_dtype"], "f16");
    let config = &object["config"];
    for number in ["vocab_size", "rope_theta", "rms_norm_eps"] {
        assert!(config[number].is_number(), "{config}");
    }
    assert!(config["tie_word_embeddings"].is_boolean() && config["eos_token_ids"].is_array(), "{config}");
    assert!(config["sliding_window"].is_null() && config["rms_norm_eps"].to_string().len() < 8, "{config}");
    assert_eq!(object["name"], "demo");
    assert_eq!(object["has_chat_template"], true);
    assert!(object["tokenizer_vocab_size"].as_u64().unwrap() > 256);
    assert!(object["plan"]["kv_cache_tokens"].as_u64().unwrap() >= 1_024);
    assert!((1e8..1e13).contains(&object["memory_bandwidth"].as_f64().unwrap()), "{object}");
    let flags = "info --json --max-model-len 64 --max-num-seqs 1 --memory-bandwidth 20";
    let small = tinyvllm(flags).model(tiny_llama()).run().json();
    assert_eq!(small[0]["plan"]["max_model_len"], 64);
    assert_eq!(small[0]["plan"]["kv_cache_tokens"], 64);
    assert!(small[0]["tokenizer_vocab_size"].is_null());
}

/// No row of this model is a multiple of 256.
#[test]
fn the_result_of_quantisation_is_reported() {
    let notice = "--quantization q4_k: 23 of 23 matrices have rows that are no multiple of 256 values";
    let info = tinyvllm("info --memory-bandwidth 20 --quantization q4_k").model(tiny_llama()).run().success();
    for word in ["F32", "weights as loaded", "Q5_0  22 tensors", "Q8_0  1 tensor", notice] {
        assert!(info.contains(word), "{info} should say {word}");
    }
    let object = tinyvllm("info --json --quantization q4_1").model(tiny_llama()).run().json().remove(0);
    assert_eq!(object["loaded_weight_types"][0]["type"], "Q4_1");
    assert_eq!(object["notices"], serde_json::json!([]));
    let words = "generate --prompt-ids 5 --max-tokens 1 --ignore-eos --quantization q4_k";
    let run = tinyvllm(words).model(tiny_llama()).run();
    assert_eq!(run.stderr.matches(notice).count(), 1, "{}", run.stderr);
}

/// Types without kernels, that is; the reference leaves all weights in the file.
#[test]
fn repacked_types_are_reported_with_their_cost() {
    let model = fixture("dynamic/llama.dynamic.gguf");
    let kept = "IQ2_XXS is kept as Q8_S: 2.06 -> 8.56 bits a weight, 0.1 MB more";
    let text = tinyvllm("info --memory-bandwidth 20 --device cpu").model(&model).run().success();
    let line = text.lines().find(|line| line.contains("repacked, with the same values: ")).unwrap();
    assert!(line.contains(kept) && !line.contains("IQ4_XS is"), "{text}");
    let reference = tinyvllm("info --kernels reference --device cpu").model(&model).run().success();
    assert!(!reference.contains("is kept as"), "{reference}");
    let run = tinyvllm("--prompt-ids 5,6 --max-tokens 2 --device cpu").model(&model).run();
    assert_eq!(run.stderr.matches(kept).count(), 1, "{}", run.stderr);
}

/// Without a folder given, the file lies in the user's cache folder.
#[test]
fn experts_in_a_file_are_reported_before_and_after_loading() {
    let (model, cache) = (fixture("tiny/qwen3_moe/qwen3_moe.q8_0.gguf"), tempfile::tempdir().unwrap());
    let run = |words: &str| tinyvllm(words).model(&model).env("XDG_CACHE_HOME", cache.path()).run();
    let folder = cache.path().join("tinyvllm/experts");
    let location = format!("stay in {}/qwen3_moe.q8_0-", folder.display());

    let text = run("info --memory-bandwidth 20 --expert-weights file").success();
    assert!(text.contains(&location), "{text}");
    let object = run("info --json --memory-bandwidth 20 --expert-weights file").json().remove(0);
    assert!(object["expert_file"].as_str().unwrap().starts_with(folder.to_str().unwrap()), "{object}");
    assert_eq!(object["expert_bytes"], 8 * 3 * 3 * 32 * 64 / 32 * 34);
    assert!(!folder.exists(), "nothing is made");
    assert!(run("info --memory-bandwidth 20").success().contains("in memory"));
    assert!(run("info --json --memory-bandwidth 20").json()[0]["expert_file"].is_null());

    let generate = "--prompt-ids 5,6,7 --max-tokens 8 --temperature 0 --ignore-eos --json";
    let expected = run(generate);
    assert!(!expected.stderr.contains("experts: "), "{}", expected.stderr);
    let expected = expected.json()[0]["output_token_ids"].clone();
    for _ in 0..2 {
        let outcome = run(&format!("{generate} --expert-weights file"));
        for words in ["experts: ", &location, "in memory now (--expert-weights memory keeps all there)"] {
            assert!(outcome.stderr.contains(words), "{words} in:\n{}", outcome.stderr);
        }
        assert_eq!(outcome.json()[0]["output_token_ids"], expected);
    }
    assert!(object["expert_file"].as_str().is_some_and(|path| std::path::Path::new(path).exists()));
}

/// Qwen 3 MoE of three layers: width 64, four heads of 32 over two, eight experts of width 32 of which two are chosen,
/// a vocabulary of 288.
#[test]
fn info_shows_the_bytes_read_and_the_bandwidth_limit() {
    let model = fixture("tiny/qwen3_moe");
    let object = tinyvllm("info --json --memory-bandwidth 20").model(&model).run().json().remove(0);
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    let attention = 3 * (2 * 128 * 64 + 2 * 64 * 64 + 64 + 2 * 32);
    let (router, expert) = (3 * (8 * 64 + 64), 3 * 3 * 32 * 64);
    let head = 288 * 64 + 64;
    assert_eq!(object["num_parameters"], attention + router + 8 * expert + head + 288 * 64);
    assert_eq!(object["num_active_parameters"], attention + router + 2 * expert + head);
    let bytes = &object["weight_bytes_per_token"];
    assert_eq!(bytes["attention"], 4 * attention);
    assert_eq!(bytes["feed_forward"], 4 * router);
    assert_eq!(bytes["experts"], 4 * 2 * expert);
    assert_eq!(bytes["head"], 4 * head);
    assert_eq!(bytes["total"], 4 * (attention + router + 2 * expert + head));
    for (limit, batch_size) in object["limits"].as_array().unwrap().iter().zip([1, 8]) {
        assert_eq!((&limit["batch_size"], &limit["context_len"]), (&batch_size.into(), &512.into()));
        let experts = 8.0 * f64::from(expert) * (1.0 - 0.75_f64.powi(batch_size));
        let weights = 4.0 * (f64::from(attention + router + head) + experts);
        let cache = 512.0 * number(&object["kv_bytes_per_token"]) * f64::from(batch_size);
        let expected = f64::from(batch_size) * 20e9 / (weights + cache);
        assert!((number(&limit["tokens_per_second"]) / expected - 1.0).abs() < 1e-3, "{limit} {expected}");
    }
    let quantized =
        tinyvllm("info --json --memory-bandwidth 20 --quantization q8_0").model(&model).run().json();
    assert_eq!(quantized[0]["weight_bytes_per_token"]["experts"], 2 * expert / 32 * 34);

    let text = tinyvllm("info --memory-bandwidth 20").model(&model).run().success();
    for words in
        ["active for a token", "2 of 8", "limit of 1 sequence", "limit of 8 at once", "at context 512"]
    {
        assert!(text.contains(words), "{words} in:\n{text}");
    }
    let reference = tinyvllm("info --kernels reference").model(&model).run().success();
    assert!(reference.contains("not measured on this device"), "{reference}");
    tinyvllm("info --memory-bandwidth 0").model(&model).run().error(2, &["at least 0.001"]);
}

#[test]
fn pull_prints_where_a_local_model_is() {
    assert_eq!(tinyvllm("pull").args([tiny_llama()]).run().success(), format!("{}\n", tiny_llama()));
    let demo = tinyvllm("pull demo").run();
    assert!(demo.stderr.contains("nothing to download"), "{}", demo.stderr);
    assert_eq!(demo.success(), "");
}

#[test]
fn chat_from_a_pipe_answers_line_by_line_and_keeps_the_history() {
    let chat = |lines: &str| {
        let outcome = tinyvllm("chat demo --temperature 0 --max-tokens 12 --verbose").stdin(lines).run();
        let stderr = outcome.stderr.clone();
        (outcome.success(), stderr)
    };
    let (first, _) = chat("Hello\n");
    let (both, stderr) = chat("Hello\n\nHello\n");
    assert!(both.starts_with(&first) && both.len() > first.len(), "{both}");
    let prompts: Vec<usize> = stderr
        .lines()
        .filter_map(|line| line.strip_prefix("prompt: ")?.split(' ').next()?.parse().ok())
        .collect();
    assert!(prompts.len() == 2 && prompts[1] > prompts[0], "the second prompt has the first turn: {stderr}");
    let (reset, stderr) = chat("Hello\n/reset\nHello\n/quit\nHello\n");
    assert_eq!(reset, first.repeat(2), "a forgotten conversation begins anew, and /quit ends it");
    assert!(stderr.contains("the conversation is empty"), "{stderr}");
    let (unknown, stderr) = chat("/help\n/nonsense\n");
    assert_eq!(unknown, "");
    assert!(stderr.contains("/reset") && stderr.contains("unknown command /nonsense"), "{stderr}");
}

/// The built-in model does not reason; a template that begins a block for it makes all that it says reasoning, and one
/// that ends the block makes it content.
#[test]
fn chat_separates_reasoning_and_no_thinking_switches_it_off() {
    let template = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tok/chat/glm.jinja");
    let chat = |words: &str| {
        let words = format!("{words} --temperature 0 --max-tokens 12 --chat-template {template}");
        tinyvllm(&words).stdin("Hi\n").run().success()
    };
    let reasoned = chat("chat demo");
    assert!(reasoned.starts_with("<think>\n") && !reasoned.contains("</think>"), "{reasoned}");
    let answer = chat("chat demo --no-thinking");
    assert!(answer.len() > 1 && !answer.contains("think>"), "{answer}");
    // What is a prompt of its own is switched as well.
    let prompt = |words: &str| {
        let words = format!("--json --max-tokens 1 --chat-template {template} --prompt Hello {words}");
        tinyvllm(&words).run().json()[0]["prompt_token_ids"].as_array().unwrap().clone()
    };
    assert_ne!(prompt("--no-thinking"), prompt(""));
}

#[test]
fn no_thinking_without_a_switch_is_an_error_with_a_way_out() {
    for words in ["chat demo --no-thinking", "--prompt Hello --no-thinking"] {
        tinyvllm(words).run().error(1, &["no switch for reasoning", "enable_thinking", "omit --no-thinking"]);
    }
    for line in ["/set think\n", "/set think off\n"] {
        let outcome = tinyvllm("chat demo").stdin(line).run();
        for words in ["no switch for reasoning", "/system"] {
            assert!(outcome.stderr.contains(words), "{line}: {}", outcome.stderr);
        }
        assert!(!outcome.stderr.contains("think is"), "{}", outcome.stderr);
    }
    let words = "--no-thinking --prompt Hello";
    tinyvllm(words).model(tiny_llama()).run().error(1, &["no chat template", "omit --no-thinking"]);
    for words in ["--raw --prompt Hello --no-thinking", "--prompt-ids 5 --no-thinking"] {
        tinyvllm(words).run().error(2, &["--no-thinking"]);
    }
}

#[test]
fn a_question_that_cannot_be_answered_does_not_end_the_chat() {
    let long = "word ".repeat(500);
    let words = "chat demo --temperature 0 --max-model-len 128 --max-tokens 8";
    let outcome = tinyvllm(words).stdin(format!("{long}\nHello\n")).run();
    assert!(outcome.stderr.contains("error: ") && outcome.stderr.contains("/reset"), "{}", outcome.stderr);
    let answer = tinyvllm(words).stdin("Hello\n").run().success();
    assert_eq!(outcome.success(), answer);
}

#[test]
fn the_built_in_model_is_in_the_program_once() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_tinyvllm")).unwrap();
    let model = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../src/demo/model.gguf")).unwrap();
    // From the middle of its weights.
    let sample = &model[model.len() / 2..][..64];
    assert_eq!(program.windows(64).filter(|window| *window == sample).count(), 1);
}
