//! `bench`: what it prints, and that a measurement that cannot be made is refused with its numbers.

use crate::program::tinyvllm;

#[test]
fn json_has_every_measurement_that_was_asked_for() {
    let flags = "--prompt-lens 16,40 --prompt-depths 0,24 --prompts-at-once 1,2 --batch-sizes 1,3 --context-lens 8,20 --output-len 5 --repeats 2 --json -q";
    let output = tinyvllm(&format!("bench {flags}")).run().success();
    let report: serde_json::Value = serde_json::from_str(&output).unwrap();
    let number = |value: &serde_json::Value, name: &str| value[name].as_f64().unwrap();
    assert!(number(&report, "memory_bandwidth") > 1e8 && report["memory_access"] == "reading");
    assert!(number(&report, "weight_bytes_per_step") > 1e5);

    let prompts = report["prompts"].as_array().unwrap();
    let shape =
        |prompt| ["depth", "num_prompt_tokens", "num_prompts"].map(|name| number(prompt, name) as usize);
    let expected = [0, 24].map(|depth| [16, 40].map(|len| [1, 2].map(|count| [depth, len, count])));
    assert_eq!(prompts.iter().map(shape).collect::<Vec<_>>(), expected.as_flattened().as_flattened());

    let generations = report["generations"].as_array().unwrap();
    let name = |run| (number(run, "batch_size") as usize, number(run, "context_len") as usize);
    assert_eq!(generations.iter().map(name).collect::<Vec<_>>(), [(1, 8), (3, 8), (1, 20), (3, 20)]);
    for run in generations.iter().chain(prompts) {
        let rate = &run["tokens_per_second"];
        assert_eq!(rate["samples"].as_array().unwrap().len(), 2);
        assert!(0.0 < number(rate, "min") && number(rate, "min") <= number(rate, "median"), "{run}");
        assert!(number(rate, "median") <= number(rate, "max"), "{run}");
    }
    let script = include_str!("../../scripts/benchmark.py");
    for field in ["bandwidth_fraction", "bytes_per_second", "tokens_per_second"] {
        assert!(script.contains(&format!("\"{field}\"")), "{field} is not what the script reads");
        assert!(generations.iter().all(|run| run.get(field).is_some()), "{field} is missing in {report}");
    }
    // A step is the same ops whatever the batch, so three sequences share them.
    let dispatches = |index: usize| number(&generations[index], "dispatches_per_token");
    assert!(dispatches(0) > 10.0 && dispatches(1) < 0.6 * dispatches(0), "{report}");
}

#[test]
fn the_table_has_a_row_for_each_measurement() {
    let flags = "--prompt-lens 16 --prompts-at-once 1,3 --context-lens 8 --output-len 4 --repeats 1 -q";
    let table = tinyvllm(&format!("bench {flags}")).run().success();
    for text in ["GB/s", "prompt of 16", "3 prompts of 16", "generate 1 × 4 at 8", "host µs/token"] {
        assert!(table.contains(text), "{text} is missing in\n{table}");
    }
}

/// An Apple GPU has none either.
#[test]
fn without_a_bandwidth_the_rest_is_reported() {
    let flags =
        "--device cpu --kernels reference --prompt-lens 16 --context-lens 8 --output-len 4 --repeats 1 -q";
    let table = tinyvllm(&format!("bench {flags}")).run().success();
    assert!(table.starts_with("weights ") && table.contains("generate 1 × 4 at 8"), "{table}");
    let report: serde_json::Value =
        serde_json::from_str(&tinyvllm(&format!("bench --json {flags}")).run().success()).unwrap();
    let generation = &report["generations"][0];
    assert_eq!(report.get("memory_bandwidth"), Some(&serde_json::Value::Null), "{report}");
    assert_eq!(generation.get("bandwidth_fraction"), Some(&serde_json::Value::Null), "{report}");
}

#[test]
fn what_cannot_be_measured_is_refused_with_its_numbers() {
    for (flags, words) in [
        ("--repeats 0", &["--repeats", "0"][..]),
        ("--prompts-at-once 0", &["--prompts-at-once", "0"]),
        ("--prompts-at-once 18446744073709551615", &["--prompts-at-once is 18446744073709551615", "4096"]),
        ("--repeats 4294967296", &["--repeats is 4294967296", "10000"]),
        ("--prompt-lens 18446744073709551615", &["18446744073709551615", "1024"]),
        ("--prompt-depths 10000000000", &["10000000000", "1024"]),
        ("--max-num-seqs 0", &["--max-num-seqs is 0"]),
        ("--batch-sizes 1,0", &["--batch-sizes", "0"]),
        ("--context-lens 60 --output-len 20 --max-model-len 64", &["60", "20", "64"]),
        ("--prompt-lens 64 --max-model-len 64", &["64"]),
        ("--prompt-lens 20 --prompt-depths 50 --max-model-len 64", &["20", "50", "64"]),
    ] {
        tinyvllm(&format!("bench -q {flags}")).run().error(1, words);
    }
}

#[test]
fn a_load_that_cannot_be_made_is_refused_before_it_is_made() {
    let huge = u64::MAX;
    for (flag, limit) in [
        (format!("--num-prompts={huge}"), "1000000"),
        (format!("--num-warmups={huge}"), "1000000"),
        (format!("--prefix-repetition-num-prefixes={huge}"), "1000000"),
        (format!("--random-input-len={huge}"), "16777216"),
        ("--request-rate=1e-20".to_owned(), "at least 0.0001"),
        ("--burstiness=1e300".to_owned(), "at most 1000000"),
        ("--temperature=NaN".to_owned(), "number such as 0.7"),
    ] {
        tinyvllm(&format!("bench serve {flag}")).run().error(2, &[flag.split_once('=').unwrap().0, limit]);
    }
}
