//! The log in JSON: one object a line, whatever clients send.

use serde_json::{Value, json};

use super::client::{Server, post_bytes, send};

#[cfg(unix)]
#[test]
fn every_line_of_the_log_is_a_json_object() {
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "right-key\n").unwrap();
    let server = Server::start_with("--log-format json --verbose", |command| {
        command.arg("--api-key-file").arg(keys.path());
    });
    let request = |method: &str, path: &str, headers: &str| {
        let bytes =
            format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n");
        send(server.address(), bytes)
    };
    const KEY: &str = "authorization: Bearer right-key\r\n";
    // 30: an id twice, one that is too long, one that would end the string, the line or the object.
    for id in ["twice", "twice", &"x".repeat(10_000), "a\"}", "a\\nb", "{\"b\":1}"] {
        request("GET", "/version", &format!("{KEY}x-request-id: {id}\r\n"));
    }
    request("GET", "/a%0a%22b?secret-query=1", "authorization: Bearer wrong-key\r\n");
    request("DELETE", "/health", "");
    request("GET", &format!("/{}", "p".repeat(60_000)), KEY);
    request(&"M".repeat(1_000), "/version", KEY);
    let body = json!({"prompt": "secret prompt", "max_tokens": 3, "ignore_eos": true, "temperature": 0});
    let answer = send(server.address(), post_bytes("/v1/completions", KEY, &body.to_string()));
    let text = answer.success()["choices"][0]["text"].as_str().unwrap().to_owned();
    let id = answer.header("x-request-id").unwrap().to_owned();
    server.signal(nix::sys::signal::Signal::SIGHUP);
    let start = std::time::Instant::now();
    while !server.log().join("\n").contains("reloaded 1 keys") {
        assert!(start.elapsed() < super::client::TIMEOUT, "{:?}", server.log());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    server.signal(nix::sys::signal::Signal::SIGTERM);
    let (status, log) = server.wait();
    assert!(status.success());
    let whole = log.join("\n");
    for secret in ["right-key", "wrong-key", "secret", text.trim()] {
        assert!(!whole.contains(secret), "{secret:?} is in the log: {whole}");
    }
    let lines: Vec<Value> = log
        .iter()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    for (line, text) in lines.iter().zip(&log) {
        assert!(line["time"].as_f64().is_some_and(|time| time > 1.7e9) && text.len() < 1_000, "{text}");
    }
    let (notices, records): (Vec<&Value>, Vec<&Value>) =
        lines.iter().partition(|line| line["notice"].is_string());
    for notice in ["ready: http://", "reloaded 1 keys", "stopping"] {
        let is_it = |line: &&Value| line["notice"].as_str().unwrap().contains(notice);
        assert!(notices.iter().any(is_it), "{notice:?} is not in {notices:?}");
    }
    assert_eq!(records.len(), 11, "{whole}");
    for record in records.iter().copied() {
        for (name, is_right) in [
            ("request_id", record["request_id"].as_str().is_some_and(|id| !id.is_empty() && id.len() <= 128)),
            ("method", record["method"].is_string()),
            ("path", record["path"].is_string()),
            ("status", record["status"].is_u64()),
            ("duration_ms", record["duration_ms"].as_f64().is_some_and(|time| time >= 0.0)),
        ] {
            assert!(is_right, "{name} of {record}");
        }
    }
    assert_eq!(records.iter().filter(|record| record["request_id"] == "twice").count(), 2);
    let generated = records.iter().find(|record| record["request_id"] == *id).unwrap();
    assert_eq!((&generated["status"], &generated["completion_tokens"]), (&json!(200), &json!(3)));
    assert!(records.iter().any(|record| record["status"] == 401 && record["path"] == "/a%0a%22b"));
    // Of long ones the beginning.
    for (name, length) in [("path", "… (60001 bytes)"), ("method", "… (1000 bytes)")] {
        let ends = |record: &&Value| record[name].as_str().unwrap().ends_with(length);
        assert!(records.iter().any(ends), "{name} in {whole}");
    }
}

#[test]
fn an_error_that_ends_the_program_is_a_json_object_too() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_tinyvllm"))
        .args(["serve", "--port", "0", "--log-format", "json", "--model", "missing/model.gguf"])
        .output()
        .unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = lines.last().unwrap();
    assert!(last["error"].as_str().unwrap().contains("missing/model.gguf"), "{log}");
    assert!(lines.iter().all(|line| line["time"].is_f64()), "{log}");
}
