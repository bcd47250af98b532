//! The server among its clients: keys, crowds, clients that leave or do not read, and the end.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Server, TIMEOUT, connect, events, post_bytes, read_answer, read_until, send};

const CHAT: &str = "/v1/chat/completions";
const WAITING: &str = "vllm:num_requests_waiting";
const RUNNING: &str = "vllm:num_requests_running";
const BLOCKS: &str = "vllm:kv_cache_usage_perc";
const GENERATED: &str = "vllm:generation_tokens_total";
const ABORTED: &str = "vllm:request_success_total{model_name=\"demo\",engine=\"0\",finished_reason=\"abort\"";

/// A request that takes its time: `n` sequences of almost 500 tokens.
fn long(n: usize, is_stream: bool) -> String {
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "n": n, "max_tokens": 490, "ignore_eos": true, "stream": is_stream,
    });
    post_bytes(CHAT, "", &body.to_string())
}

#[test]
fn everything_but_health_and_the_page_requires_the_key() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "from-file\n\n  second  \n").unwrap();
    let server = Server::start_with("--api-key typed --log-format json", |command| {
        command.arg("--api-key-file").arg(file.path());
    });
    let get = |path: &str, header: &str| {
        let bytes = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{header}\r\n");
        send(server.address(), bytes)
    };
    assert_eq!(get("/health", "").status, 200);
    assert_eq!(get("/", "").status, 200);
    // 9: also paths that do not exist, and those that only look like the open one.
    for path in [
        "/v1/models",
        "/metrics",
        "/version",
        "//",
        "/index.html",
        "/nope",
        "/health/",
        "//health",
        "/v1/../health",
        CHAT,
    ] {
        for header in
            ["", "authorization: Bearer wrong\r\n", "authorization: Bearer \r\n", "authorization: typed\r\n"]
        {
            let answer = get(path, header);
            assert_eq!(answer.status, 401, "{path} {header}");
            assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        }
    }
    // 8: a key that is no ASCII.
    let mut bytes =
        b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer ".to_vec();
    bytes.extend_from_slice(b"\xff\xfe\r\n\r\n");
    assert_eq!(send(server.address(), bytes).status, 401);
    for key in ["typed", "from-file", "second"] {
        assert_eq!(get("/version", &format!("authorization: Bearer {key}\r\n")).status, 200, "{key}");
    }
    #[cfg(unix)]
    {
        server.signal(nix::sys::signal::Signal::SIGTERM);
        let (status, log) = server.wait();
        assert!(status.success());
        let log = log.join("\n");
        assert!(log.contains("\"path\":\"/version\",\"status\":200"), "{log}");
        for secret in ["typed", "from-file", "wrong"] {
            assert!(!log.contains(secret), "{secret} is in the log");
        }
    }
}

#[test]
fn keys_come_from_the_environment_too() {
    let server = Server::start_with("", |command| {
        command.env("TINYVLLM_API_KEY", "hidden");
    });
    assert_eq!(server.get("/v1/models").status, 401);
    let request = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer \
                   hidden\r\n\r\n";
    assert_eq!(send(server.address(), request).status, 200);
}

#[test]
fn a_crowd_is_turned_away_and_those_inside_are_unhurt() {
    let server = Server::start("--max-num-seqs 1 --max-waiting 1");
    let mut inside: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = connect(server.address());
            stream.write_all(long(1, true).as_bytes()).unwrap();
            stream
        })
        .collect();
    server.wait_for_metric(WAITING, 1.0);
    // 28: the third is one too many; so are two prompts in one request.
    for body in [json!({"prompt": "x"}), json!({"prompt": ["x", "y"]})] {
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 429, "{}", answer.text());
        assert_eq!(answer.header("retry-after"), Some("1"));
        let error = &answer.json()["error"];
        assert_eq!(
            (&error["code"], &error["type"]),
            (&json!("rate_limit_exceeded"), &json!("invalid_request_error"))
        );
        assert!(error["message"].as_str().unwrap().contains("--max-waiting"));
    }
    for stream in inside.drain(..) {
        let answer = read_answer(stream);
        assert_eq!(answer.events().last().unwrap()["choices"][0]["finish_reason"], "length");
    }
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "x"})).status, 200);
}

#[test]
fn a_client_that_disconnects_frees_everything() {
    let server = Server::start("");
    // 29: after the first token, while waiting for the whole, and before the request is even complete.
    let mut stream = connect(server.address());
    stream.write_all(long(32, true).as_bytes()).unwrap();
    read_until(&mut stream, "\"content\":");
    assert!(server.metric(BLOCKS) > 0.0);
    drop(stream);
    server.wait_for_metric(RUNNING, 0.0);

    let mut stream = connect(server.address());
    stream.write_all(long(32, false).as_bytes()).unwrap();
    while server.metric(RUNNING) == 0.0 {}
    drop(stream);
    server.wait_for_metric(RUNNING, 0.0);

    let mut stream = connect(server.address());
    stream.write_all(&long(32, true).as_bytes()[..100]).unwrap();
    drop(stream);

    assert_eq!((server.metric(WAITING), server.metric(BLOCKS)), (0.0, 0.0));
    server.wait_for_metric(ABORTED, 64.0);
    let generated = server.metric(GENERATED);
    assert!(generated < 64.0 * 490.0, "all {generated} tokens were generated without a reader");
}

/// As `nc -N` does and some proxies do. Whether anybody is left is found out by an interim answer.
#[test]
fn a_client_that_closes_its_half_after_a_request_is_answered() {
    let server = Server::start("");
    for is_stream in [false, true] {
        let mut stream = connect(server.address());
        stream.write_all(long(1, is_stream).as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let answer = answer.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(&answer);
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        assert!(answer.contains("\"finish_reason\":\"length\""), "{answer}");
    }
    // Older clients know no interim answers; neither need short answers any.
    let older = |request: &str| {
        let mut stream = connect(server.address());
        stream.write_all(request.replace("HTTP/1.1", "HTTP/1.0").as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let short =
        post_bytes(CHAT, "", r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60}"#);
    for request in ["GET /health HTTP/1.0\r\n\r\n", "GET /v1/models HTTP/1.0\r\n\r\n", &short] {
        let answer = older(request);
        assert!(answer.starts_with("HTTP/1.0 200 OK"), "{answer}");
    }
    // A partial request is dropped, and the rest is not awaited.
    let mut stream = connect(server.address());
    let request = long(1, false);
    stream.write_all(&request.as_bytes()[..request.len() - 1]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let start = Instant::now();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5) && !answer.contains(" 200 "), "{answer}");
    // One that has gone altogether is found out before its answer is done.
    let mut stream = connect(server.address());
    stream.write_all(long(20, false).as_bytes()).unwrap();
    server.wait_for_metric(RUNNING, 20.0);
    drop(stream);
    server.wait_for_metric(RUNNING, 0.0);
    assert_eq!(server.metric(ABORTED), 20.0);
}

#[test]
fn a_client_that_leaves_the_queue_is_dropped_while_others_run() {
    let server = Server::start("--max-num-seqs 16");
    let mut running = connect(server.address());
    running.write_all(long(16, true).as_bytes()).unwrap();
    read_until(&mut running, "\"content\":");
    let mut waiting = connect(server.address());
    waiting.write_all(long(2, false).as_bytes()).unwrap();
    while server.metric(WAITING) == 0.0 {}
    drop(waiting);
    while server.metric(WAITING) > 0.0 {}
    // Had it waited for its turn, the others would have ended.
    assert_eq!(server.metric(RUNNING), 16.0);
    server.wait_for_metric(ABORTED, 2.0);
}

#[test]
fn a_client_that_does_not_read_is_aborted() {
    let server = Server::start("");
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "n": 32, "max_tokens": 490, "ignore_eos": true, "stream": true, "logprobs": true, "top_logprobs": 20,
    });
    let mut stream = connect(server.address());
    stream.write_all(post_bytes(CHAT, "", &body.to_string()).as_bytes()).unwrap();
    while server.metric(RUNNING) == 0.0 {}
    // Meanwhile another client is answered.
    server.post(CHAT, &json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})).success();
    server.wait_for_metric(RUNNING, 0.0);
    assert_eq!(server.metric(BLOCKS), 0.0);
    let answer = read_answer(stream);
    let last = answer.events().pop().unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains("too slowly"), "{last}");
    assert!(server.metric(GENERATED) < 32.0 * 490.0);
}

#[test]
fn a_client_that_stalls_is_cut_off() {
    let server = Server::start("--write-timeout 0.2");
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "n": 32, "max_tokens": 490, "ignore_eos": true, "stream": true, "logprobs": true, "top_logprobs": 20,
    });
    let mut stream = connect(server.address());
    stream.write_all(post_bytes(CHAT, "", &body.to_string()).as_bytes()).unwrap();
    server.wait_for_metric(ABORTED, 32.0);
    // What had been sent is still there; then the connection is gone, and the end never came.
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    assert!(!String::from_utf8_lossy(&bytes).contains("[DONE]"));
}

#[test]
fn many_at_once_are_each_answered_as_alone() {
    let server = Server::start("--max-num-seqs 8");
    let body = |seed: usize| json!({"prompt": "Once upon a time", "seed": seed, "max_tokens": 30, "stream": seed % 2 == 1});
    let text = |answer: super::client::Answer, is_stream: bool| -> String {
        let values = if is_stream { answer.events() } else { vec![answer.success()] };
        let texts = values.iter().filter_map(|value| value["choices"][0]["text"].as_str());
        texts.collect()
    };
    let alone: Vec<String> =
        (0..24).map(|seed| text(server.post("/v1/completions", &body(seed)), seed % 2 == 1)).collect();
    let together: Vec<String> = std::thread::scope(|scope| {
        let (server, body, text) = (&server, &body, &text);
        let ask = move |seed| text(server.post("/v1/completions", &body(seed)), seed % 2 == 1);
        let threads: Vec<_> = (0..24).map(|seed| scope.spawn(move || ask(seed))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
    server.wait_for_metric(RUNNING, 0.0);
    assert_eq!(server.metric(BLOCKS), 0.0);
}

/// A server with a stream that has begun, after a first SIGTERM.
#[cfg(unix)]
fn stopping(flags: &str) -> (Server, TcpStream, String) {
    let server = Server::start(flags);
    let mut stream = connect(server.address());
    stream.write_all(long(32, true).as_bytes()).unwrap();
    let begin = read_until(&mut stream, "\"content\":");
    server.signal(nix::sys::signal::Signal::SIGTERM);
    (server, stream, begin)
}

/// The rest of a stream whose beginning was read.
#[cfg(unix)]
fn rest(mut stream: TcpStream, begin: &str) -> Vec<Value> {
    let mut bytes = begin.as_bytes().to_vec();
    stream.read_to_end(&mut bytes).unwrap();
    // Where chunks of the transfer meet lines of events, lines that are neither are skipped.
    let text = String::from_utf8(bytes).unwrap();
    events(&text)
}

#[cfg(unix)]
#[test]
fn a_signal_lets_running_requests_end_and_others_wait_elsewhere() {
    // More than a busy machine needs.
    let (server, stream, begin) = stopping("--shutdown-timeout 600");
    // 37: until the last answer is complete, the server says that it goes.
    loop {
        let answer = server.get("/health");
        if answer.status == 503 {
            assert_eq!(answer.json()["status"], "shutting down");
            break;
        }
    }
    let answer = server.post(CHAT, &json!({"messages": [{"role": "user", "content": "Hi"}]}));
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert_eq!(answer.json()["error"]["type"], "server_error");
    let events = rest(stream, &begin);
    let num_finished = events.iter().filter(|event| event["choices"][0]["finish_reason"] == "length").count();
    assert_eq!(num_finished, 32);
    let (status, log) = server.wait();
    assert!(status.success(), "{log:?}");
}

#[cfg(unix)]
#[test]
fn an_idle_server_ends_at_once() {
    let time = || {
        let server = Server::start("");
        // An idle connection is not awaited.
        let mut idle = connect(server.address());
        idle.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        read_until(&mut idle, "ok");
        server.signal(nix::sys::signal::Signal::SIGTERM);
        let start = Instant::now();
        let (status, log) = server.wait();
        assert!(status.success(), "{log:?}");
        start.elapsed()
    };
    // The fastest, because the machine may be busy; what is waited for in vain takes 2 s every time.
    let fastest = (0..3).map(|_| time()).min().unwrap();
    assert!(fastest < Duration::from_millis(1_500), "{fastest:?}");
}

/// Connections that are ending hold the engine too: the end waits for the files nevertheless.
#[cfg(unix)]
#[test]
fn prefixes_are_in_files_when_the_server_ends() {
    for round in 0..6 {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start_with("--max-num-seqs 8 --max-num-batched-tokens 64", |command| {
            command.arg("--prefix-cache-dir").arg(folder.path());
        });
        let words = ["once", "upon", "a", "time", "there", "was", "girl", "forest", "near", "with"];
        std::thread::scope(|scope| {
            for seed in 0..16_usize {
                let server = &server;
                let words = (0..140).map(move |i| words[(i * i + seed * 31 + i / 7) % words.len()]);
                let prompt = words.collect::<Vec<_>>().join(" ");
                let body = json!({"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": true});
                scope.spawn(move || assert_eq!(server.post("/v1/completions", &body).status, 200));
            }
        });
        std::thread::sleep(Duration::from_millis(round * 200));
        server.signal(nix::sys::signal::Signal::SIGTERM);
        let (status, log) = server.wait();
        assert!(status.success(), "{log:?}");
        let files = std::fs::read_dir(folder.path()).unwrap();
        let names: Vec<String> =
            files.map(|file| file.unwrap().file_name().to_string_lossy().into_owned()).collect();
        assert!(names.iter().any(|name| name.ends_with(".pack")), "{names:?} {log:?}");
        assert!(!names.iter().any(|name| name.ends_with(".unfinished")), "{names:?} {log:?}");
    }
}

#[cfg(unix)]
#[test]
fn late_clients_are_answered_or_refused() {
    let server = Server::start("");
    let address = server.address();
    server.signal(nix::sys::signal::Signal::SIGTERM);
    let request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    // A connection that the system had, but not the server, is reset.
    while let Ok(mut stream) = TcpStream::connect(address) {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut bytes = Vec::new();
        if stream.write_all(request).is_err() || stream.read_to_end(&mut bytes).is_err() {
            break;
        }
        let text = String::from_utf8(bytes).unwrap();
        let status = text.get(..12).unwrap_or_else(|| panic!("the answer is {text:?}"));
        assert!(["HTTP/1.1 200", "HTTP/1.1 503"].contains(&status), "{text}");
        assert!(text.ends_with('}'), "{text}");
    }
    assert!(server.wait().0.success());
}

#[cfg(unix)]
#[test]
fn when_the_time_is_over_answers_end_with_an_error() {
    let (server, stream, begin) = stopping("--shutdown-timeout 0");
    let events = rest(stream, &begin);
    let error = &events.last().unwrap()["error"];
    assert_eq!(error["type"], "server_error");
    assert!(error["message"].as_str().unwrap().contains("shutting down"), "{error}");
    assert!(server.wait().0.success());
}

#[cfg(unix)]
#[test]
fn a_second_signal_ends_the_program_at_once() {
    let (server, stream, _) = stopping("");
    server.signal(nix::sys::signal::Signal::SIGINT);
    assert_eq!(server.wait().0.code(), Some(130));
    drop(stream);
}

#[test]
fn a_port_in_use_is_known_before_the_model_is_loaded() {
    let server = Server::start("");
    // 38, 39: one line and a hint.
    for (flags, words) in [
        (format!("--port {}", server.address().port()), "choose one with --port"),
        ("--port 0 --host 203.0.113.7".to_owned(), "203.0.113.7"),
        ("--port 0 --device cuda:99".to_owned(), "--device cuda:99"),
        ("--port 0 --model no-such-file.gguf".to_owned(), "no-such-file.gguf"),
        ("--port 0 --api-key-file no-such-file".to_owned(), "no-such-file"),
        ("--port 0 --shutdown-timeout -1".to_owned(), "86400"),
    ] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_tinyvllm"))
            .arg("serve")
            .args(flags.split_whitespace())
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(matches!(output.status.code(), Some(1 | 2)), "{flags}: {stderr}");
        assert!(stderr.contains("error: ") && stderr.contains(words), "{flags}: {stderr}");
    }
}
