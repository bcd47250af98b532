//! Prompts in, text or JSON out.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::program::{Program, fixture, tiny_llama, tinyvllm};

const GREEDY: &str = "--temperature 0 --ignore-eos";

/// The ids that a run must have generated, sequence by sequence.
fn output_ids(objects: &[Value]) -> Vec<Value> {
    objects.iter().map(|object| object["output_token_ids"].clone()).collect()
}

#[test]
fn json_has_the_promised_fields_in_the_order_of_the_prompts() {
    let words = format!("generate {GREEDY} --prompt-ids 5,6,7 --prompt-ids 8 --max-tokens 4 --json");
    let objects = tinyvllm(&words).model(tiny_llama()).run().json();
    assert_eq!(objects.len(), 2);
    for (index, (object, prompt)) in objects.iter().zip([json!([5, 6, 7]), json!([8])]).enumerate() {
        assert_eq!(object["prompt_index"], index);
        assert_eq!(object["index"], 0);
        assert_eq!(object["prompt_token_ids"], prompt);
        assert_eq!(object["output_token_ids"].as_array().unwrap().len(), 4);
        assert_eq!(object["text"], Value::Null, "the model has no tokenizer");
        assert_eq!(object["finish_reason"], "length");
        let usage = &object["usage"];
        assert_eq!(usage["prompt_tokens"], prompt.as_array().unwrap().len());
        assert_eq!(usage["completion_tokens"], 4);
        assert_eq!((&usage["cached_tokens"], &usage["preemptions"]), (&json!(0), &json!(0)));
        for name in
            ["queue_ms", "prefill_ms", "decode_ms", "prompt_tokens_per_second", "output_tokens_per_second"]
        {
            assert!(object["timings"][name].as_f64().unwrap() >= 0.0, "{name}");
        }
    }
}

#[test]
fn minus_one_is_all_there_is() {
    let words =
        "--prompt-ids 5,6 --max-model-len 32 --max-tokens -1 --top-k -1 --seed -1 --ignore-eos --json";
    let objects = tinyvllm(words).model(tiny_llama()).run().json();
    assert_eq!(objects[0]["output_token_ids"].as_array().unwrap().len(), 30);
}

#[test]
fn greedy_ids_are_those_of_the_reference() {
    // The first 8 of `greedy` in golden.safetensors are the prompt.
    let words = format!("{GREEDY} --prompt-ids 168,190,169,239,181,120,50,62 --max-tokens 10 --json");
    for model in ["tiny/llama", "tiny/llama/llama.f32.gguf"] {
        let objects = tinyvllm(&words).model(fixture(model)).run().json();
        assert_eq!(output_ids(&objects), [json!([165, 80, 189, 0, 87, 80, 0, 87, 97, 92])], "{model}");
    }
}

#[test]
fn a_batch_gives_what_each_prompt_gives_alone() {
    let sampled = "--temperature 1 --seed 7 --max-tokens 24 --json --ignore-eos";
    for sampling in [format!("{GREEDY} --max-tokens 24 --json"), sampled.to_owned()] {
        let prompts = ["5,6,7", "8", "100,101,102,103,104,105", "5,6,7"];
        let run = |prompts: &[&str], more: &str| {
            let words = prompts.iter().map(|ids| format!(" --prompt-ids {ids}")).collect::<String>();
            tinyvllm(&format!("{sampling}{words}{more}")).model(tiny_llama()).run().json()
        };
        let alone: Vec<_> = prompts.iter().flat_map(|prompt| output_ids(&run(&[prompt], ""))).collect();
        assert_eq!(output_ids(&run(&prompts, "")), alone);
        let tight = " --max-num-batched-tokens 4 --max-num-seqs 2 --block-size 2 --num-scheduler-steps 3";
        assert_eq!(output_ids(&run(&prompts, tight)), alone);
        assert_eq!(output_ids(&run(&prompts, " --no-enable-prefix-caching --threads 1")), alone);
    }
}

#[test]
fn a_seed_makes_every_request_reproducible_by_itself() {
    let run = |words: &str| {
        let words = format!("--prompt-ids 5,6 --max-tokens 16 --ignore-eos --temperature 1 --json {words}");
        output_ids(&tinyvllm(&words).model(tiny_llama()).run().json())
    };
    let once = run("--seed 1");
    assert_eq!(run("--seed 1"), once);
    assert_ne!(run("--seed 2"), once);
    assert_ne!(run(""), run(""), "without a seed every run is another");
    assert_eq!(run("--seed 1 --prompt-ids 5,6"), [once.clone(), once].concat());
}

#[test]
fn n_sequences_are_numbered_and_differ() {
    let words = "--prompt-ids 5,6 --n 3 --max-tokens 16 --ignore-eos --temperature 1 --seed 3 --json";
    let objects = tinyvllm(words).model(tiny_llama()).run().json();
    let indices: Vec<_> = objects.iter().map(|object| object["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2]);
    let ids = output_ids(&objects);
    assert!(ids[0] != ids[1] && ids[1] != ids[2]);
}

#[test]
fn logprobs_name_the_token_and_its_alternatives() {
    let words = format!("{GREEDY} --raw --prompt Once --max-tokens 3 --logprobs 2 --json");
    let object = tinyvllm(&words).run().json().remove(0);
    let logprobs = object["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 3);
    for (entry, token_id) in logprobs.iter().zip(object["output_token_ids"].as_array().unwrap()) {
        assert_eq!(&entry["token_id"], token_id);
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
        assert!(entry["token"].is_string());
        let top = entry["top"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        assert_eq!(&top[0]["token_id"], token_id, "greedy takes the most likely one");
    }
}

#[test]
fn logit_bias_and_stop_tokens_decide() {
    let run = |words: &str| {
        let words = format!("{GREEDY} --prompt-ids 5,6 --json {words}");
        tinyvllm(&words).model(tiny_llama()).run().json().remove(0)
    };
    let object = run("--logit-bias 42=100 --max-tokens 3");
    assert_eq!(object["output_token_ids"], json!([42, 42, 42]));
    let object = run("--logit-bias 42=100 --stop-token-ids 42 --max-tokens 3");
    assert_eq!((&object["output_token_ids"], &object["finish_reason"]), (&json!([42]), &json!("stop")));
    let object = run("--logit-bias 42=100 --stop-token-ids 42 --max-tokens 9 --min-tokens 5");
    assert!(object["usage"]["completion_tokens"].as_u64().unwrap() >= 5);
}

#[test]
fn an_immediate_end_is_an_empty_text() {
    // 1 is the built-in model's end token.
    let words = "--raw --prompt Once --logit-bias 1=100 --temperature 0";
    let object = tinyvllm(&format!("{words} --json")).run().json().remove(0);
    assert_eq!((&object["text"], &object["finish_reason"]), (&json!(""), &json!("stop")));
    assert_eq!(object["output_token_ids"], json!([1]));
    assert_eq!(tinyvllm(words).run().success(), "\n");
}

#[test]
fn no_part_of_a_stop_string_is_printed() {
    let run = |stop: &[&str]| {
        let program = tinyvllm("--raw --temperature 0 --max-tokens 60 --json --prompt Once");
        program.args(stop).run().json().remove(0)
    };
    let whole = run(&[])["text"].as_str().unwrap().to_owned();
    // Across the border of words, and so of tokens.
    let (start, stop) = (20, &whole[20..32]);
    let object = run(&["--stop", "never said by anyone", "--stop", stop]);
    assert_eq!(object["text"], whole[..whole.find(stop).unwrap()]);
    assert!(whole.find(stop).unwrap() <= start);
    assert_eq!((&object["finish_reason"], &object["matched_stop"]), (&json!("stop"), &json!(stop)));
}

#[test]
fn without_arguments_the_built_in_model_tells_a_story() {
    let run = || tinyvllm("").run();
    let outcome = run();
    let (stderr, story) = (outcome.stderr.clone(), outcome.success());
    assert!(story.starts_with("Once upon a time, in a small village by the sea,"), "{story}");
    assert!(story.split_whitespace().count() > 50, "{story}");
    let lines: Vec<_> = stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{stderr}");
    for word in ["demo", "cpu", "threads", "KV cache", "tokens"] {
        assert!(lines[0].contains(word), "{} should say {word}", lines[0]);
    }
    // It ends by itself, and nothing says that it was cut.
    assert!(story.trim_end().ends_with('.'), "{story}");
    assert_eq!(lines[1].matches("tokens/s").count(), 2, "{}", lines[1]);
    assert_eq!(run().success(), story, "the first run is the same for all users");
}

/// The definitions in candle's tensors, and the start line says that they run.
#[test]
fn the_reference_tells_the_story() {
    let story = |kernels: &str| {
        let words = format!("--device cpu --kernels {kernels} --raw --temperature 0 --max-tokens 40");
        let outcome = tinyvllm(&words).args(["--prompt", tinyvllm::demo::PROMPT]).run();
        (outcome.stderr.clone(), outcome.success())
    };
    let (notice, text) = story("reference");
    assert!(notice.contains("on cpu (reference kernels: candle in f32)"), "{notice}");
    assert_eq!(text, story("fused").1);
}

#[test]
fn text_from_standard_input_is_the_prompt() {
    let greedy = format!("--max-tokens 12 --json {GREEDY}");
    let piped = tinyvllm(&greedy).stdin("Tell me a story.\n").run().json();
    let given = tinyvllm(&greedy).args(["--prompt", "Tell me a story."]).run().json();
    assert_eq!(piped[0]["prompt_token_ids"], given[0]["prompt_token_ids"]);
    assert_eq!(output_ids(&piped), output_ids(&given));
    // After a prompt on the command line.
    let ids = |prompts: &[&str], input: &str| {
        let prompts = prompts.iter().flat_map(|prompt| ["--prompt", prompt]);
        tinyvllm(&greedy).args(prompts).stdin(input).run().json()[0]["prompt_token_ids"].clone()
    };
    assert_eq!(ids(&["Summarise this:"], "One.\nTwo.\n"), ids(&["Summarise this:\n\nOne.\nTwo."], ""));
}

#[test]
fn the_chat_template_is_used_unless_raw() {
    let prompt = |words: &str| {
        let words = format!("--prompt Hello --max-tokens 1 --json {words}");
        tinyvllm(&words).run().json()[0]["prompt_token_ids"].as_array().unwrap().len()
    };
    assert!(prompt("") > prompt("--raw"));
    assert!(prompt("--system Brief") > prompt(""));
}

#[test]
fn several_prompts_are_printed_in_order_under_headers() {
    let words = "--raw --temperature 0 --max-tokens 8";
    let run = |prompts: &[&str]| {
        let prompts = prompts.iter().flat_map(|prompt| ["--prompt", prompt]);
        tinyvllm(words).args(prompts).run().success()
    };
    let (one, two) = (run(&["Once upon a time"]), run(&["The fox"]));
    let expected = format!("[1] Once upon a time\n{one}\n[2] The fox\n{two}");
    assert_eq!(run(&["Once upon a time", "The fox"]), expected);
}

#[test]
fn a_model_without_tokenizer_prints_ids() {
    let words = format!("{GREEDY} --prompt-ids 168,190,169,239,181,120,50,62 --max-tokens 4");
    assert_eq!(tinyvllm(&words).model(tiny_llama()).run().success(), "165,80,189,0\n");
}

#[test]
fn messages_go_to_standard_error_and_quiet_silences_them() {
    let words = "--raw --prompt Once --max-tokens 4 --temperature 0";
    let normal = tinyvllm(words).run();
    assert!(normal.stderr.contains("KV cache") && normal.stderr.contains("tokens/s"));
    let quiet = tinyvllm(&format!("{words} --quiet")).run();
    assert_eq!(quiet.stderr, "");
    assert_eq!(quiet.success(), normal.success());
}

#[test]
fn flags_can_come_from_the_environment_and_the_command_line_wins() {
    let run = |words: &str| {
        let program = tinyvllm(&format!("--prompt-ids 5,6 {words}"));
        program
            .env("TINYVLLM_MODEL", tiny_llama())
            .env("TINYVLLM_JSON", "1")
            .env("TINYVLLM_MAX_TOKENS", "3")
            .env("TINYVLLM_IGNORE_EOS", "yes")
            .run()
            .json()
            .remove(0)
    };
    assert_eq!(run("")["usage"]["completion_tokens"], 3);
    assert_eq!(run("--max-tokens 5")["usage"]["completion_tokens"], 5);
    // An empty one counts as unset.
    let empty = tinyvllm("--prompt-ids 5,6 --json --max-tokens 2 --ignore-eos").model(tiny_llama());
    let empty = ["SEED", "KV_CACHE_DTYPE", "STOP_TOKEN_IDS", "QUIET", "SYSTEM", "CHAT_TEMPLATE"]
        .iter()
        .fold(empty, |program, name| program.env(&format!("TINYVLLM_{name}"), ""));
    assert_eq!(empty.run().json()[0]["usage"]["completion_tokens"], 2);
    tinyvllm("serve").env("TINYVLLM_API_KEY", "").run().error(1, &["an API key is empty"]);
    tinyvllm("--prompt a").env("TINYVLLM_SEED", "x").run().error(2, &["'x'", "--seed"]);
    let info = tinyvllm("info demo").env("TINYVLLM_MODEL", tiny_llama()).run().success();
    assert!(info.contains("demo"), "{info}");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let command = || tinyvllm("--prompt-ids 5,6 --ignore-eos --n 16").model(tiny_llama()).into_command();
    let mut child = command().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert_eq!(first, "[1] 5,6\n");
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(!stderr.contains("panicked") && !stderr.contains("error"), "{stderr}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_sequences_and_sets_the_exit_code() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    // Slow enough to be interrupted: a long prompt again and again, and no end token.
    let mut program = Program::new().args(["--json", "--ignore-eos", "--raw", "--verbose"]);
    for _ in 0..64 {
        program = program.args(["--prompt", &"Once upon a time there was a fox. ".repeat(20)]);
    }
    let mut child = program.into_command().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut messages = BufReader::new(child.stderr.take().unwrap()).lines();
    // From here on the batch takes seconds.
    messages.find(|line| line.as_ref().unwrap().contains("generating from")).unwrap().unwrap();
    kill(Pid::from_raw(child.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let objects: Vec<Value> = output
        .stdout
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect();
    assert_eq!(objects.len(), 64, "every sequence is reported");
    assert!(objects.iter().any(|object| object["finish_reason"] == "abort"));
}
