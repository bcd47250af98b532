//! `info`, `pull`, `completions`, help, and `chat` from a pipe.

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
fn models_with_latent_attention_and_experts_generate_and_info_tells_of_them() {
    for (model, words) in [
        (
            "tiny/glm4_moe_lite",
            &["latent_row", "64 + 16 values", "2 of 8 of width 32 in 2 layers", "width 32"][..],
        ),
        ("tiny/youtu/youtu.q8_0.gguf", &["latent_row", "YoutuForCausalLM"]),
        ("tiny/qwen3_moe", &["2 of 8", "shared_experts", "none"]),
    ] {
        let text = tinyvllm("info").model(fixture(model)).run().success();
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
fn info_tells_configuration_types_and_memory() {
    let text = tinyvllm("info").model(fixture("kquant/llama/llama.q4_k_mix.gguf")).run().success();
    for word in ["vocab_size", "Q4_K", "Q6_K", "KV cache", "context", "none"] {
        assert!(text.contains(word), "{text} should say {word}");
    }
    let object = tinyvllm("info --json demo").run().json().remove(0);
    assert_eq!(object["name"], "demo");
    assert_eq!(object["has_chat_template"], true);
    assert!(object["tokenizer_vocab_size"].as_u64().unwrap() > 256);
    assert!(object["plan"]["kv_cache_tokens"].as_u64().unwrap() >= 1_024);
    let small = tinyvllm("info --json --max-model-len 64 --max-num-seqs 1").model(tiny_llama()).run().json();
    assert_eq!(small[0]["plan"]["max_model_len"], 64);
    assert_eq!(small[0]["plan"]["kv_cache_tokens"], 64);
    assert!(small[0]["tokenizer_vocab_size"].is_null());
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
    assert!(stderr.contains("forgotten"), "{stderr}");
    let (unknown, stderr) = chat("/help\n/nonsense\n");
    assert_eq!(unknown, "");
    assert!(stderr.contains("/reset") && stderr.contains("no command /nonsense"), "{stderr}");
}

#[test]
fn a_question_that_cannot_be_answered_does_not_end_the_chat() {
    let long = "word ".repeat(500);
    let words = "run demo --temperature 0 --max-model-len 128 --max-tokens 8";
    let outcome = tinyvllm(words).stdin(format!("{long}\nHello\n")).run();
    assert!(outcome.stderr.contains("error: ") && outcome.stderr.contains("/reset"), "{}", outcome.stderr);
    let answer = tinyvllm(words).stdin("Hello\n").run().success();
    assert_eq!(outcome.success(), answer);
}
