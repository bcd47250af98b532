//! `top`: of a server under load, and of what is no server.

use std::process::{Output, Stdio};

use serde_json::Value;

use crate::bench::program;
use crate::client::Server;
use crate::fake;

fn top(flags: &str) -> Output {
    program(&format!("top {flags}")).output().unwrap()
}

#[test]
fn a_server_under_load() {
    let server = Server::start("--max-model-len 256 --max-num-seqs 4");
    let url = format!("http://{}", server.address());
    let load = "--num-prompts 20000 --max-concurrency 3 --input-len 16 --output-len 24 --seed 5";
    let words = format!("bench serve --base-url {url} {load}");
    let mut load = program(&words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while server.metric("vllm:request_success_total") < 3.0 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let json = top(&format!("--once --json --interval 2 --url {url}"));
    let screen = top(&format!("--once --interval 1 --url {url}/v1"));
    let _ = load.kill();
    let _ = load.wait();

    assert!(json.status.success(), "{json:?}");
    let readings: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(readings["models"], serde_json::json!(["demo"]));
    for key in ["prompt_throughput", "generation_throughput", "num_kv_cache_blocks", "prefix_cache_hit_rate"]
    {
        assert!(readings[key].as_f64().is_some_and(|number| number >= 0.0), "{key}: {readings}");
    }
    assert!(readings["generation_throughput"].as_f64().unwrap() > 0.0, "{readings}");
    assert!(readings["finished_per_s"]["length"].as_f64().unwrap() > 0.0, "{readings}");
    for latency in ["ttft_ms", "itl_ms", "e2e_ms"] {
        let of = |name: &str| readings[latency][name].as_f64().unwrap();
        assert!(0.0 < of("median") && of("median") <= of("p95"), "{latency}: {readings}");
    }
    let text = String::from_utf8(screen.stdout).unwrap();
    for wanted in ["demo", "running", "KV cache", "prefix cache", "length ", "whole request"] {
        assert!(text.contains(wanted), "{wanted} is missing in\n{text}");
    }
    assert!(!text.contains('\x1b'), "{text:?}");
}

#[test]
fn what_is_no_server_is_an_error() {
    let check = |flags: &str, words: &[&str]| {
        let output = top(&format!("--once --interval 0.1 {flags}"));
        let output_text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{flags}: {output:?}");
        words.iter().for_each(|word| assert!(output_text.contains(word), "{flags}: {output_text}"));
    };
    let page = fake::start(|_, _, stream| fake::whole(stream, "200 OK", "go_goroutines 8\n"));
    check(&format!("--url http://{page}"), &["no metrics of a model server"]);
    let locked = fake::start(|_, _, stream| {
        fake::whole(stream, "401 Unauthorized", r#"{"error":{"message":"a key is needed"}}"#);
    });
    check(&format!("--url http://{locked}"), &["401", "a key is needed", "--api-key"]);
    check("--url http://127.0.0.1:1", &["127.0.0.1:1", "--url"]);
    check("--url nonsense", &["nonsense", "http://127.0.0.1:8000"]);
}
