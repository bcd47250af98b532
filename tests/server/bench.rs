//! `bench serve`: against the program itself, and against servers that fail.

use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::client::Server;
use crate::fake;

/// Every key of a result, of which those in the second list are there with `--save-detailed`.
const KEYS: &[&str] = &[
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "std_itl_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "median_e2el_ms",
    "std_e2el_ms",
    "p99_e2el_ms",
];
const DETAILS: &[&str] =
    &["input_lens", "output_lens", "ttfts", "itls", "start_times", "latencies", "generated_texts", "errors"];

/// The program, without anything of the surroundings that would change what it does.
pub(crate) fn program(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tinyvllm"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("TINYVLLM_") || name == "OPENAI_API_KEY" {
            command.env_remove(name);
        }
    }
    command.args(words.split_whitespace()).stdin(Stdio::null());
    command
}

fn bench(address: SocketAddr, flags: &str) -> Output {
    program(&format!("bench serve --base-url http://{address} --json {flags}")).output().unwrap()
}

#[track_caller]
fn result(output: &Output) -> Value {
    let error = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|problem| panic!("{problem}: {error}"))
}

#[track_caller]
fn success(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    result(output)
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// README's command against README's server, with fewer requests.
#[test]
fn prompts_fit_the_servers_context() {
    let server = Server::start("");
    let output = bench(server.address(), "--num-prompts 2 --save-detailed");
    let result = success(&output);
    assert_eq!((&result["completed"], &result["input_lens"]), (&json!(2), &json!([896, 896])));
    let notes = String::from_utf8_lossy(&output.stderr);
    assert!(notes.contains("896 tokens instead of 1024") && notes.contains("has 1024"), "{notes}");
}

#[test]
fn a_result_has_vllms_keys_and_counts_what_was_served() {
    let server = Server::start("--max-model-len 256 --max-num-seqs 4 --api-key secret");
    let folder = tempfile::tempdir().unwrap();
    let flags = format!(
        "--api-key secret --num-prompts 8 --random-input-len 24 --random-output-len 6 --request-rate 50 --seed 3 \
         --num-warmups 1 --goodput ttft:100000 tpot:100000 --save-result --save-detailed --metadata machine=x \
         --result-dir {} --result-filename result.json",
        folder.path().join("new").display()
    );
    let output = bench(server.address(), &flags);
    let result = success(&output);
    for key in KEYS.iter().chain(DETAILS) {
        assert!(result.get(key).is_some(), "{key} is missing in {result}");
    }
    for (key, wanted) in [
        ("backend", json!("openai")),
        ("model_id", json!("demo")),
        ("tokenizer_id", json!("demo")),
        ("num_prompts", json!(8)),
        ("request_rate", json!(50.0)),
        ("completed", json!(8)),
        ("failed", json!(0)),
        ("total_input_tokens", json!(8 * 24)),
        ("total_output_tokens", json!(8 * 6)),
        ("input_lens", json!(vec![24; 8])),
        ("output_lens", json!(vec![6; 8])),
        ("machine", json!("x")),
    ] {
        assert_eq!(result[key], wanted, "{key}");
    }
    // Everybody keeps levels of minutes.
    assert_eq!(result["request_goodput"], result["request_throughput"]);
    let (ttfts, latencies) = (numbers(&result["ttfts"]), numbers(&result["latencies"]));
    assert!(ttfts.iter().zip(&latencies).all(|(ttft, latency)| 0.0 < *ttft && ttft <= latency), "{result}");
    let mean = ttfts.iter().sum::<f64>() / 8.0 * 1e3;
    assert!((result["mean_ttft_ms"].as_f64().unwrap() - mean).abs() < 1e-6);
    let duration = result["duration"].as_f64().unwrap();
    let rate = result["output_throughput"].as_f64().unwrap();
    assert!((rate * duration - 48.0).abs() < 1e-6 && duration >= 8.0 / 50.0, "{duration} {rate}");

    let saved = std::fs::read(folder.path().join("new/result.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&saved).unwrap(), result);
    let key = "authorization: Bearer secret\r\n";
    let page = crate::client::send(
        server.address(),
        format!("GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{key}\r\n"),
    );
    let line =
        page.text().lines().find(|line| line.starts_with("vllm:prompt_tokens_total")).unwrap().to_owned();
    assert!(line.ends_with(&format!(" {}", 9 * 24)), "eight and one to warm up: {line}");

    let output = bench(server.address(), "--num-prompts 1");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("401"), "{output:?}");
}

#[test]
fn chats_have_the_length_that_was_asked_for_with_the_template() {
    let server = Server::start("--max-model-len 256 --max-num-seqs 4");
    let flags = "--backend openai-chat --num-prompts 6 --input-len 60 --output-len 5 --save-detailed";
    let result = success(&bench(server.address(), flags));
    assert_eq!(result["backend"], "openai-chat");
    assert_eq!((&result["input_lens"], &result["output_lens"]), (&json!(vec![60; 6]), &json!(vec![5; 6])));
    let flags = "--endpoint /v1/chat/completions --num-prompts 2 --input-len 40 --output-len 200 --goodput ttft:0 \
                 --percentile-metrics ttft --metric-percentiles 50,99.9";
    let result = success(&bench(server.address(), flags));
    assert_eq!((&result["completed"], &result["request_goodput"]), (&json!(2), &json!(0.0)));
    assert!(result["p99.9_ttft_ms"].is_f64() && result["p50_ttft_ms"] == result["median_ttft_ms"]);
    assert!(result.get("mean_itl_ms").is_none() && result.get("ttfts").is_none());
}

#[test]
fn shared_prefixes_are_found_in_the_cache() {
    let server = Server::start("--max-model-len 512 --block-size 32");
    let flags = "--dataset-name prefix_repetition --prefix-repetition-prefix-len 128 --num-prompts 8 --max-concurrency 1 \
                 --prefix-repetition-suffix-len 16 --prefix-repetition-num-prefixes 2 --prefix-repetition-output-len 2";
    let result = success(&bench(server.address(), flags));
    assert_eq!((&result["completed"], &result["total_input_tokens"]), (&json!(8), &json!(8 * 144)));
    assert_eq!(server.metric("vllm:prefix_cache_queries_total"), f64::from(8 * 144));
    // All but the first request with each prefix find its four blocks.
    assert_eq!(server.metric("vllm:prefix_cache_hits_total"), f64::from(6 * 128));
}

#[test]
fn the_seed_decides_what_is_sent() {
    let server = Server::start("--max-model-len 256");
    let texts = |seed: u32| {
        let flags = format!(
            "--seed {seed} --temperature 0 --num-prompts 3 --input-len 16 --output-len 8 --save-detailed"
        );
        let result = success(&bench(server.address(), &format!("{flags} --random-range-ratio 0.5")));
        (result["generated_texts"].clone(), result["input_lens"].clone())
    };
    assert_eq!(texts(1), texts(1));
    assert_ne!(texts(1), texts(2));
}

#[test]
fn a_file_of_prompts() {
    let server = Server::start("--max-model-len 256");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompts.jsonl");
    std::fs::write(&path, "{\"prompt\": \"Once upon a time\", \"output_tokens\": 3}\n\"Hello\"\n").unwrap();
    let flags = format!(
        "--dataset-name custom --dataset-path {} --num-prompts 3 --custom-output-len 4 --ignore-eos --save-detailed",
        path.display()
    );
    let result = success(&bench(server.address(), &flags));
    assert_eq!(result["output_lens"], json!([3, 4, 3]));
    for (flags, words) in [
        ("--dataset-name custom", "--dataset-path"),
        ("--dataset-path x", "--dataset-name custom"),
        ("--dataset-name custom --dataset-path /no/such/file", "/no/such/file"),
        ("--backend openai --endpoint /v1/chat/completions", "--backend openai"),
    ] {
        let output = bench(server.address(), flags);
        assert_eq!(output.status.code(), Some(1), "{flags}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{flags}: {output:?}");
    }
}

#[test]
fn failures_are_counted_and_shown() {
    let address = fake::start(|number, path, stream| match (path, number) {
        ("/v1/completions", 0) => fake::whole(
            stream,
            "429 Too Many Requests",
            r#"{"error":{"message":"the queue is full","type":"x","code":"rate_limit_exceeded"}}"#,
        ),
        ("/v1/completions", 1) => fake::whole(stream, "500 Internal Server Error", "<p>oh\nno</p>"),
        ("/v1/completions", 2) => {
            // The connection ends in the middle of a stream.
            fake::begin_stream(stream);
            fake::event(stream, r#"{"choices":[{"text":"one","finish_reason":null}]}"#);
        }
        ("/v1/completions", 3) => {
            fake::begin_stream(stream);
            fake::event(stream, r#"{"error":{"message":"out of memory"}}"#);
            fake::end_stream(stream);
        }
        ("/v1/completions", _) => fake::good_stream(stream, 11),
        _ => fake::whole(stream, "404 Not Found", "{}"),
    });
    let output = bench(address, "--num-prompts 6 --max-concurrency 1 --output-len 7 --save-detailed");
    let result = success(&output);
    assert_eq!((&result["completed"], &result["failed"]), (&json!(2), &json!(4)));
    // The server's count of tokens holds, not the number of events, and failures count for nothing.
    assert_eq!((&result["total_input_tokens"], &result["total_output_tokens"]), (&json!(18), &json!(22)));
    assert_eq!((&result["tokenizer_id"], &result["model_id"]), (&Value::Null, &json!("fake")));
    let errors: Vec<&str> = result["errors"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for (error, wanted) in errors.iter().zip([
        "429 Too Many Requests: the queue is full",
        "<p>oh no</p>",
        "cut off",
        "out of memory",
    ]) {
        assert!(error.contains(wanted), "{errors:?}");
    }
    assert_eq!(errors[4..], ["", ""]);
    let output_text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output_text.contains("failed: 1 × 429") && output_text.contains("lengths are approximate"),
        "{output_text}"
    );
}

#[test]
fn a_run_without_success_has_failed() {
    let address = fake::start(|_, _, stream| fake::whole(stream, "503 Service Unavailable", "{}"));
    let output = bench(address, "--num-prompts 3 --model given");
    assert_eq!(output.status.code(), Some(1));
    let result = result(&output);
    assert_eq!(
        (&result["completed"], &result["failed"], &result["model_id"]),
        (&json!(0), &json!(3), &json!("given"))
    );
    assert_eq!((&result["mean_ttft_ms"], &result["output_throughput"]), (&json!(0.0), &json!(0.0)));
    let slow = fake::start(|_, path, stream| match path {
        "/v1/completions" => std::thread::sleep(Duration::from_secs(60)),
        _ => fake::whole(stream, "404 Not Found", "{}"),
    });
    let output = bench(slow, "--num-prompts 1 --request-timeout 0.2");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("not finished after 0.2 s"), "{output:?}");
}

#[test]
fn a_slow_server_is_not_spared() {
    let address = fake::start(|_, path, stream| match path {
        "/v1/completions" => {
            std::thread::sleep(Duration::from_millis(600));
            fake::good_stream(stream, 2);
        }
        _ => fake::whole(stream, "404 Not Found", "{}"),
    });
    let flags = "--num-prompts 6 --request-rate 20 --burstiness inf --input-len 4 --save-detailed";
    let result = success(&bench(address, flags));
    let starts = numbers(&result["start_times"]);
    for (index, start) in starts.iter().enumerate() {
        assert!(*start >= 0.05 * (index + 1) as f64 - 0.001, "{starts:?}");
    }
    // Sent after one another they would take six times as long.
    assert!(result["max_concurrent_requests"].as_u64().unwrap() >= 3, "{result}");
    assert!(result["max_scheduling_delay_ms"].as_f64().unwrap() >= 0.0);
    let flags = format!("{flags} --max-concurrency 2 --percentile-metrics client_queue_time");
    let result = success(&bench(address, &flags));
    assert_eq!(result["max_concurrent_requests"], 2);
    // A wait for a permit is measured by itself.
    assert!(result["p99_client_queue_time_ms"].as_f64().unwrap() > 300.0, "{result}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_reports_what_was_done() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    let (sender, began) = mpsc::channel();
    let address = fake::start(move |number, path, stream| match (path, number) {
        ("/v1/completions", 0) => fake::good_stream(stream, 2),
        ("/v1/completions", _) => {
            sender.send(()).unwrap();
            std::thread::sleep(Duration::from_secs(60));
        }
        _ => fake::whole(stream, "404 Not Found", "{}"),
    });
    let words = format!("bench serve --base-url http://{address} --num-prompts 5 --max-concurrency 1");
    let child = program(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    began.recv_timeout(crate::client::TIMEOUT).unwrap();
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(130), "{table}");
    let rows: Vec<String> =
        table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for row in ["Successful requests: 1", "Failed requests: 0", "Not finished: 4"] {
        assert!(rows.iter().any(|found| found == row), "{row} is missing in {table}");
    }
}

/// Needs Python with the package `matplotlib`; prints a line if it is missing.
#[test]
fn results_can_be_plotted() {
    use std::io::Write as _;

    let python = std::env::var("TINYVLLM_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let has_package = Command::new(&python).args(["-c", "import matplotlib"]).output();
    if !has_package.is_ok_and(|output| output.status.success()) {
        let is_required = std::env::var_os("TINYVLLM_REQUIRE_MATPLOTLIB").is_some();
        assert!(!is_required, "{python} has no package matplotlib");
        // Past the capture of output, so that it is seen.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: {python} has no package matplotlib (pip install matplotlib)"
        );
        return;
    }
    let address = fake::start(|_, path, stream| match path {
        "/v1/completions" => fake::good_stream(stream, 2),
        _ => fake::whole(stream, "404 Not Found", "{}"),
    });
    let folder = tempfile::tempdir().unwrap();
    for rate in ["20", "40", "inf"] {
        let path = folder.path().display();
        let flags =
            format!("--num-prompts 5 --input-len 4 --save-result --save-detailed --result-dir {path}");
        success(&bench(address, &format!("{flags} --request-rate {rate} --result-filename {rate}.json")));
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/plot_serve.py");
    let files = ["20.json", "40.json", "inf.json"].map(|name| folder.path().join(name));
    let picture = folder.path().join("picture.png");
    let output =
        Command::new(&python).arg(script).args(&files).arg("--output").arg(&picture).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(std::fs::read(&picture).unwrap().starts_with(b"\x89PNG"));
    let output = Command::new(&python).arg(script).arg(&picture).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("picture.png"), "{output:?}");
}
