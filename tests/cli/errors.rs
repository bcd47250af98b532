//! Wrong usage (exit status 2) and what cannot be done (exit status 1): the message names the value,
//! the limit and the way out.

use crate::program::{fixture, tiny_llama, tinyvllm};

#[test]
fn wrong_usage() {
    let check = |words: &str, expected: &[&str]| tinyvllm(words).run().error(2, expected);
    check("--no-such-flag", &["--no-such-flag"]);
    check("no-such-command", &["no-such-command"]);
    check("--prompt-ids 5,x", &["'5,x'", "--prompt-ids", "\"x\" is not a token id", "5,6,7"]);
    check("--prompt-ids -1", &["-1"]);
    check("--prompt-ids 4294967296", &["4294967296"]);
    check("--dtype int3", &["int3", "auto, f32, f16, bf16"]);
    check("--kv-cache-dtype fp8_e5m2", &["fp8_e5m2", "fp8_e4m3", "q8_0"]);
    check("--quantization q3", &["q3", "q4_0, q4_1, q5_0, q5_1, q8_0, q4_k"]);
    check("--expert-weights disk", &["disk", "auto, memory, file"]);
    check("--device gpu", &["gpu", "auto, cpu, metal, cuda or cuda:N"]);
    check("--kernels fast", &["fast", "fused, reference"]);
    check("--gpu-memory-utilization most", &["most", "--gpu-memory-utilization"]);
    check("--kv-cache-memory-bytes 2X", &["2X", "512M or 2G"]);
    check("--logit-bias 5", &["ID=BIAS"]);
    check("--max-tokens -3", &["-3"]);
    check("--max-tokens 18446744073709551615", &["--max-tokens", "18446744073709551615", "at most 16777216"]);
    check("--max-model-len 18446744073709551615", &["--max-model-len", "at most 16777216"]);
    check("--top-k -2", &["-2"]);
    check("--temperature hot", &["hot", "--temperature"]);
    check("--seed 1.5", &["1.5"]);
    check("--prompt a --prompt-ids 5", &["--prompt", "--prompt-ids"]);
    check("--raw --system a", &["--raw", "--system"]);
    check("--logprobs 2 --prompt a", &["--json"]);
    check("--quiet --verbose", &["--quiet", "--verbose"]);
    check("verify", &["--reference"]);
    check("pull", &["tinyvllm pull tinyllama"]);
    check("completions cmd", &["cmd"]);
    check("chat --prompt a", &["--prompt"]);
}

#[test]
fn a_device_that_is_not_there_is_an_error_before_anything_is_loaded() {
    for (device, command) in [("metal", ""), ("cuda:99", ""), ("cuda:98", "info"), ("metal", "chat")] {
        // The model does not exist either, but that is not the first error.
        let words = format!("{command} --device {device} --model ./no-such-model");
        let words = if command.is_empty() { format!("{words} --prompt a") } else { words };
        tinyvllm(&words).run().error(1, &[&format!("--device {device}"), "hint: ", "cpu"]);
    }
}

#[test]
fn models_that_are_not_there() {
    let check = |model: &str, expected: &[&str]| {
        let expected = [expected, &["hint: "]].concat();
        tinyvllm("--prompt a").model(model).run().error(1, &expected);
    };
    check("./no-such-file.gguf", &["./no-such-file.gguf"]);
    check("/no/such/folder", &["/no/such/folder"]);
    check("tinylama", &["tinylama", "tinyllama"]);
    check("", &["empty"]);
    check("org/na me", &["org/na me"]);
    check("https://models.example/org/name", &["org/name"]);
    check(fixture("tiny/llama/config.json").to_str().unwrap(), &["config.json", "folder"]);
    let empty = tempfile::tempdir().unwrap();
    tinyvllm("--prompt a").model(empty.path()).run().error(1, &[empty.path().to_str().unwrap()]);
    tinyvllm("info demo --model other").run().error(1, &["demo", "other"]);
    tinyvllm("info demo --revision v1").run().error(1, &["v1", "--revision"]);
}

#[test]
fn offline_without_the_model_in_the_cache() {
    let home = tempfile::tempdir().unwrap();
    for command in ["pull tinyllama", "info tinyllama", "generate --model tinyllama --prompt a"] {
        let program = tinyvllm(command).env("HF_HOME", home.path()).env("HF_HUB_OFFLINE", "1");
        program.run().error(1, &["TinyLlama/TinyLlama-1.1B-Chat-v1.0", "HF_HUB_OFFLINE", "hint: "]);
    }
}

#[test]
fn impossible_parameters_are_named_with_their_limit() {
    let check = |words: &str, expected: &[&str]| {
        tinyvllm(&format!("{words} --prompt-ids 5,6")).model(tiny_llama()).run().error(1, expected);
    };
    check("--temperature 3", &["temperature is 3", "at most 2"]);
    check("--temperature NaN", &["temperature is NaN"]);
    check("--top-p 0", &["top_p is 0", "above 0"]);
    check("--min-p 2", &["min_p is 2"]);
    check("--repetition-penalty 0", &["repetition_penalty is 0"]);
    check("--presence-penalty -3", &["presence_penalty is -3", "-2"]);
    check("--frequency-penalty 3", &["frequency_penalty is 3"]);
    check("--n 0", &["n is 0"]);
    check("--n 1000", &["n is 1000", "128"]);
    check("--logprobs 100 --json", &["logprobs is 100", "20"]);
    check("--max-tokens 0", &["max_tokens is 0"]);
    check("--max-tokens 2 --min-tokens 3", &["min_tokens is 3", "max_tokens is 2"]);
    check("--logit-bias 288=1", &["288", "288 tokens"]);
    check("--stop-token-ids 4000000000", &["4000000000"]);
    check("--stop a", &["tokenizer", "hint: "]);
    check("--max-num-seqs 0", &["--max-num-seqs is 0"]);
    check("--max-num-seqs 2 --n 3", &["n is 3", "2 sequences"]);
    check("--max-num-batched-tokens 0", &["--max-num-batched-tokens is 0"]);
    check("--block-size 0", &["--block-size is 0"]);
    check("--block-size 18446744073709551615", &["--block-size is 18446744073709551615", "at most 1024"]);
    check(
        "--no-speculation --speculative-config {\"method\":\"ngram\"}",
        &["--speculative-config and --no-speculation contradict", "hint: "],
    );
    let program = tinyvllm("--no-speculation --prompt-ids 5 --max-tokens 1").model(tiny_llama());
    program.env("TINYVLLM_SPECULATIVE_CONFIG", "{\"method\":\"ngram\"}").run().success();
    check("--num-scheduler-steps 0", &["--num-scheduler-steps is 0"]);
    check("--threads 0", &["--threads is 0"]);
    check("--kernels reference --threads 2", &["--threads has no effect", "RAYON_NUM_THREADS"]);
    check("--kernels reference --cpu-level portable", &["--cpu-level has no effect", "hint: "]);
    check("--max-model-len 513", &["513", "512"]);
    check("--max-model-len 0", &["0"]);
    check("--expert-weights file", &["--expert-weights file", "models with experts", "hint: "]);
    check("--kv-cache-memory-bytes 1", &["KV cache", "hint: "]);
    check("--kv-cache-memory-bytes 100000G", &["--kv-cache-memory-bytes", "MiB", "hint: "]);
    for share in ["0", "-0.5", "1.01", "90", "NaN"] {
        let flag = format!("--gpu-memory-utilization {share}");
        let message = format!("--gpu-memory-utilization is {share}; it must be more than 0 and at most 1");
        check(&flag, &[&message, "hint: ", "0.9"]);
    }
}

#[test]
fn a_server_that_would_refuse_everything_does_not_start() {
    for (flag, limit) in [
        ("--max-body-bytes 0", "at least 1024"),
        ("--max-connections 0", "at least 1"),
        ("--header-timeout 0", "more than 0"),
        ("--body-timeout 0", "more than 0"),
        ("--write-timeout 0", "more than 0"),
    ] {
        let name = flag.split(' ').next().unwrap();
        tinyvllm(&format!("serve demo --port 0 {flag}")).run().error(1, &[&format!("{name} is 0"), limit]);
    }
}

#[test]
fn an_empty_name_is_no_name_and_an_empty_variable_is_none() {
    for (command, flag) in [
        ("serve demo --port 0", "--served-model-name"),
        ("serve demo --port 0", "--host"),
        ("bench serve", "--model"),
        ("bench serve", "--host"),
        ("info tinyllama", "--revision"),
        ("--prompt a", "--pre-tokenizer"),
        ("stop", ""),
    ] {
        let arguments = if flag.is_empty() { vec![""] } else { vec![flag, ""] };
        tinyvllm(command).args(arguments).run().error(2, &[flag, "value is required"]);
    }
    tinyvllm("pull").args([""]).run().error(1, &["name of the model is empty", "hint: "]);
    tinyvllm("serve demo --port 0 --api-key").args([""]).run().error(1, &["an API key is empty", "hint: "]);
    let variables = ["MODEL", "REVISION", "MAX_MODEL_LEN", "SEED", "STOP", "PRE_TOKENIZER"];
    let program = tinyvllm("info --json --memory-bandwidth 10");
    let program =
        variables.iter().fold(program, |program, name| program.env(&format!("TINYVLLM_{name}"), ""));
    assert_eq!(program.run().json()[0]["name"], "demo");
}

/// It is no fact of the model that a value is wrong.
#[test]
fn info_refuses_what_no_machine_could_run_with() {
    for (flag, limit) in [
        ("--block-size 18446744073709551615", "at most 1024"),
        ("--threads 0", "at least 1"),
        ("--max-num-seqs 0", "at least 1"),
        ("--max-num-batched-tokens 0", "at least 1"),
        ("--max-model-len 0", "at least 2"),
        ("--max-model-len 2000", "1024 tokens"),
    ] {
        tinyvllm(&format!("info demo --memory-bandwidth 10 {flag}"))
            .run()
            .error(1, &[flag.split(' ').next().unwrap(), limit]);
    }
}

#[test]
fn prompts_that_do_not_fit() {
    let check = |words: &str, expected: &[&str]| {
        tinyvllm(words).model(tiny_llama()).run().error(1, expected);
    };
    let long = vec!["5"; 600].join(",");
    check(&format!("--prompt-ids {long}"), &["600 input tokens", "512 tokens", "hint: "]);
    check("--prompt-ids 1,2,3,4 --max-model-len 4", &["4 tokens", "--max-model-len"]);
    check("--prompt-ids 5 --max-tokens 1000", &["1000", "512"]);
    check("--prompt-ids 5,288", &["288"]);
    check("--prompt-ids 5 --prompt-ids 4294967295", &["prompt 2", "4294967295", "288"]);
    check("--prompt hello", &["tokenizer", "--prompt-ids"]);
    check("--prompt-ids 5 --prompt-ids 6 --max-tokens 1000", &["prompt 1"]);
}

#[test]
fn standard_input_that_is_no_prompt() {
    let model = tiny_llama();
    tinyvllm("").model(&model).run().error(1, &["standard input", "--prompt"]);
    tinyvllm("generate").run().error(1, &["standard input", "--prompt"]);
    tinyvllm("--max-tokens 1")
        .stdin(b"ab\n\xff".to_vec())
        .run()
        .error(1, &["standard input", "UTF-8", "line 2"]);
    // One character a million times: not an endless computation but too long.
    tinyvllm("").stdin("a".repeat(1 << 20)).run().error(1, &["1024 tokens", "reduce the length"]);
    let long = "\u{1f980}".repeat(100_000);
    tinyvllm("").stdin(long).run().error(1, &["1024 tokens"]);
}

#[test]
fn odd_text_is_still_text() {
    for text in ["\0", "a\0b", "\u{1f980}\u{1f980}", "\u{fffd}", "<|im_end|>", "\u{feff}x", "\r\n\r\n."] {
        let outcome = tinyvllm("--max-tokens 4 --json").stdin(text).run();
        assert_eq!(outcome.json().len(), 1, "{text:?}");
    }
}

#[test]
fn a_template_that_refuses_is_named_with_its_words() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("strict.jinja");
    let source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ \
                  messages[-1].content }}";
    std::fs::write(&file, source).unwrap();
    let file = file.display();
    let words = format!("the chat template {file} refuses the messages: no system here");
    tinyvllm(&format!("--prompt a --system b --chat-template {file}")).run().error(1, &[&words]);
}

#[test]
fn a_system_message_needs_a_chat_template() {
    let gguf = fixture("tiny/llama/llama.f32.gguf");
    tinyvllm("--prompt a --system b").model(&gguf).run().error(1, &["hint: "]);
    tinyvllm("chat").model(&gguf).run().error(1, &["chat template", "hint: ", "--raw"]);
}
