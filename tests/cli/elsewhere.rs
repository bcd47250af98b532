//! Command lines of users of ollama, llama.cpp and vLLM.

use serde_json::json;

use crate::program::tinyvllm;

const GREEDY: &str = "--temp 0 -t 1 -n 12";

#[test]
fn run_answers_the_prompt_after_the_model() {
    let answer = tinyvllm(&format!("generate {GREEDY} --prompt Hello")).run().success();
    for words in ["run demo Hello", "run demo:latest Hello", "run demo -p Hello", "run -m demo -p Hello"] {
        assert_eq!(tinyvllm(&format!("{words} {GREEDY}")).run().success(), answer, "{words}");
    }
    let two = tinyvllm(&format!("generate {GREEDY}")).args(["--prompt", "Tell me"]).run().success();
    assert_eq!(tinyvllm(&format!("run demo Tell me {GREEDY}")).run().success(), two);
    // Standard input is the prompt, or goes after it.
    assert_eq!(tinyvllm(&format!("run demo {GREEDY}")).stdin("Hello\n").run().success(), answer);
    tinyvllm("run").run().error(2, &["which model?"]);
    // A wrong name is known before anything is waited for.
    tinyvllm("run llama3.2:2b").run().error(1, &["no model is known as `llama3.2:2b`"]);
    let hint = tinyvllm("run llama3.2:2b").run().stderr;
    assert!(hint.contains("did you mean llama3.2:1b or llama3.2:3b?"), "{hint}");
}

#[test]
fn flags_of_llama_cpp_do_what_they_do_there() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompt.txt");
    std::fs::write(&file, "Hello\n").unwrap();
    let own = "generate --temperature 0 --threads 1 --max-tokens 12 --max-model-len 256 --prompt Hello";
    let answer = tinyvllm(own).run().success();
    let words = "-m demo --temp 0 -t 1 -n 12 -c 256 -ngl 99 -fa on --no-mmap --jinja -cnv -f";
    let outcome = tinyvllm(words).args([&file]).run();
    let notice = outcome.stderr.lines().next().unwrap().to_owned();
    assert_eq!(notice, "ignored: -ngl, -fa, --no-mmap, --jinja, -cnv");
    assert_eq!(outcome.success(), answer);
    let quiet = tinyvllm("-hf demo -q --mlock --repeat-penalty 1.0 -s 1 --n-predict 3 -p Hi").run();
    assert_eq!((quiet.stderr.as_str(), quiet.code), ("", Some(0)));
    tinyvllm("-m demo -f nosuch.txt").run().error(1, &["cannot read `nosuch.txt`"]);
    tinyvllm("-m demo -c 0 -n 2 -p Hi").run().success();
    // No layers on a GPU is the processor.
    tinyvllm("-m demo -ngl 0 -n 2 -p Hi").run().success();
    tinyvllm("-m demo -ngl 0 --device metal -p Hi").run().error(2, &["--device"]);
}

#[test]
fn flags_of_vllm_are_taken_or_refused_by_name() {
    let info = |words: &str| tinyvllm(&format!("info demo --json {words}")).run().json().remove(0);
    let len = |words: &str| info(words)["plan"]["max_model_len"].clone();
    assert_eq!(len("--max-model-len 1k --dtype bfloat16 --enforce-eager"), json!(1_000));
    assert_eq!(len("--max-model-len 1K --trust-remote-code"), json!(1_024));
    for words in ["", "--max-model-len auto", "--max-model-len -1", "-c 0"] {
        assert_eq!(len(words), json!(1_024), "{words}");
    }
    tinyvllm("serve demo --quantization awq").run().error(2, &["awq", "omit it"]);
    tinyvllm("info demo --max-model-len 1kb").run().error(2, &["4k (4000)"]);
    tinyvllm("serve --tensor-parallel-size 2")
        .run()
        .error(2, &["--tensor-parallel-size is \"2\"", "one device"]);
}

#[test]
fn a_chat_answers_programs_in_json() {
    let answers = tinyvllm("chat demo --json -q -n 5 --temp 0").stdin("Hello\nAgain\n").run().json();
    assert_eq!(answers.len(), 2);
    for answer in &answers {
        assert!(!answer["content"].as_str().unwrap().is_empty(), "{answer}");
        assert_eq!((&answer["finish_reason"], &answer["reasoning"]), (&json!("length"), &json!("")));
        assert_eq!(answer["usage"]["completion_tokens"], 5);
    }
    assert!(answers[1]["usage"]["prompt_tokens"].as_u64() > answers[0]["usage"]["prompt_tokens"].as_u64());
}

#[test]
fn a_self_test_takes_threads() {
    let text = tinyvllm("self-test --device cpu --only gather_rows --threads 1").run().success();
    assert!(text.lines().next().unwrap().ends_with(", 1 thread)"), "{text}");
    tinyvllm("self-test --threads 0").run().error(1, &["--threads is 0"]);
    tinyvllm("self-test --kernels reference -t 2").run().error(1, &["--threads has no effect"]);
}
