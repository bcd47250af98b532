//! Several clients: admission, service, identity, and monitoring.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Answer, Server, connect, post_bytes, read_answer, send};

const COMPLETIONS: &str = "/v1/completions";
const GENERATED: &str = "vllm:generation_tokens_total";
/// Running and waiting ones.
const UNFINISHED: &str = "vllm:num_requests_";

fn body(prompt: &Value, num_tokens: usize, more: &Value) -> String {
    let mut body = json!({"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": true, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

/// A request that was sent, and whose answer will be read later.
fn begin(server: &Server, client: &str, body: &str) -> TcpStream {
    let mut stream = connect(server.address());
    let header = format!("x-client-id: {client}\r\n");
    stream.write_all(post_bytes(COMPLETIONS, &header, body).as_bytes()).unwrap();
    stream
}

fn ask(server: &Server, client: &str, body: &str) -> Answer {
    read_answer(begin(server, client, body))
}

/// What was generated in all until a short answer for another client was complete.
fn generated_under_load(server: &Server, others: &[TcpStream], num_there: usize) -> f64 {
    server.wait_for_metric("vllm:num_requests_running", num_there as f64);
    let before = server.metric(GENERATED);
    let answer = ask(server, "other", &body(&json!("Once upon"), 4, &json!({})));
    assert_eq!(answer.success()["usage"]["completion_tokens"], 4);
    let generated = server.metric(GENERATED) - before;
    // They were there all the time.
    for stream in others {
        stream.set_nonblocking(true).unwrap();
        let mut byte = [0];
        assert!(stream.peek(&mut byte).is_err(), "an answer of the crowd is there already");
        stream.set_nonblocking(false).unwrap();
    }
    generated
}

/// So slow that the crowd's answers are not there before anybody has looked. Each test has its own: what a crowd that
/// has left still takes is given back a little later.
fn slow_server() -> Server {
    Server::start("--trust-client-ids --max-num-seqs 4 --max-waiting 8 --kernels reference")
}

#[test]
fn many_requests_of_one_client_leave_permits_and_blocks_for_another() {
    let server = slow_server();
    let long = body(&json!("A crowd"), 480, &json!({}));
    let crowd: Vec<TcpStream> = (0..12).map(|_| begin(&server, "crowd", &long)).collect();
    server.wait_for_metric("vllm:num_requests_waiting", 8.0);
    let refused = ask(&server, "crowd", &long);
    assert_eq!(refused.status, 429);
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("12 of them this client's"), "{message}");
    // Twelve answers of 480 tokens are 5,760; four sequences at once have not generated a tenth of it.
    let generated = generated_under_load(&server, &crowd, 4);
    assert!(generated < 500.0, "{generated} tokens came first");
    assert!(server.metric("vllm:num_preemptions_total") >= 1.0);
}

/// Neither requests of which only a part came nor complete ones of two clients keep a third one out.
#[test]
fn requests_of_two_clients_leave_permits_for_a_third() {
    let server = Server::start("--trust-client-ids --max-num-seqs 4 --max-waiting 4");
    let short = body(&json!("Once upon"), 2, &json!({}));
    let halves: Vec<TcpStream> = (0..24)
        .map(|number| {
            let mut stream = connect(server.address());
            let header = format!("x-client-id: {}\r\n", if number < 16 { "first" } else { "second" });
            let bytes = post_bytes(COMPLETIONS, &header, &short);
            stream.write_all(&bytes.as_bytes()[..bytes.len() - short.len() + 1]).unwrap();
            stream
        })
        .collect();
    ask(&server, "third", &short).success();
    // The limit of eight is for all requests that are there, and the second client has its share beyond it.
    let long = body(&json!("A crowd"), 480, &json!({"stream": true}));
    let first: Vec<TcpStream> = (0..8).map(|_| begin(&server, "first", &long)).collect();
    server.wait_for_metric(UNFINISHED, 8.0);
    let second: Vec<TcpStream> = (0..4).map(|_| begin(&server, "second", &long)).collect();
    server.wait_for_metric(UNFINISHED, 12.0);
    for client in ["first", "second"] {
        assert_eq!(ask(&server, client, &long).status, 429, "{client}");
    }
    ask(&server, "third", &short).success();
    drop((halves, first, second));
}

/// The engine has no limit of its own that one client could reach first.
#[test]
fn a_long_queue_of_one_client_keeps_nobody_out() {
    let server = Server::start("--trust-client-ids --max-num-seqs 2 --max-waiting 2000 --max-model-len 64");
    let prompts = vec!["Once upon"; 128];
    let lists: Vec<TcpStream> = (0..9)
        .map(|_| begin(&server, "crowd", &body(&json!(prompts), 50, &json!({"stream": true}))))
        .collect();
    let start = Instant::now();
    while server.metric("vllm:num_requests_waiting") < 1_100.0 {
        assert!(start.elapsed() < super::client::TIMEOUT, "they are not all waiting");
    }
    ask(&server, "other", &body(&json!("Once upon"), 2, &json!({}))).success();
    drop(lists);
}

#[test]
fn a_request_with_as_many_sequences_as_permits_leaves_one_for_another() {
    let server = slow_server();
    let group = [begin(&server, "crowd", &body(&json!("A crowd"), 480, &json!({"n": 4})))];
    let generated = generated_under_load(&server, &group, 4);
    assert!(generated < 500.0, "{generated} tokens came first");
}

/// `user` names a client too.
#[test]
fn a_list_of_prompts_leaves_a_permit_for_another() {
    let server = slow_server();
    let prompts: Vec<String> = (0..12).map(|index| format!("Prompt {index}")).collect();
    let mut stream = connect(server.address());
    let list = body(&json!(prompts), 480, &json!({"user": "crowd"}));
    stream.write_all(post_bytes(COMPLETIONS, "", &list).as_bytes()).unwrap();
    let generated = generated_under_load(&server, &[stream], 4);
    assert!(generated < 500.0, "{generated} tokens came first");
}

#[test]
fn each_of_n_and_of_a_list_needs_a_permit() {
    let server = Server::start("--trust-client-ids --max-num-seqs 4 --max-waiting 4");
    let long = |n: usize| body(&json!("A crowd"), 480, &json!({"n": n}));
    let crowd = [begin(&server, "crowd", &long(4)), begin(&server, "crowd", &long(4))];
    server.wait_for_metric("vllm:num_requests_waiting", 1.0);
    let start = Instant::now();
    let refused = ask(&server, "crowd", &long(1));
    // Clients that retry at once are slowed down.
    assert!(start.elapsed() >= Duration::from_millis(250), "{:?}", start.elapsed());
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(refused.status == 429 && message.contains("8 of them this client's, and 1 more"), "{message}");
    // Half of eight is another client's share.
    assert_eq!(ask(&server, "other", &body(&json!(["a", "b", "c"]), 1, &json!({"n": 2}))).status, 429);
    ask(&server, "other", &body(&json!(["a", "b"]), 1, &json!({"n": 2}))).success();
    let never = ask(&server, "other", &body(&json!(["a", "b", "c"]), 1, &json!({"n": 3})));
    assert_eq!((never.status, &never.json()["error"]["param"]), (400, &json!("prompt")));
    assert!(never.json()["error"]["message"].as_str().unwrap().contains("9 answers together; at most 8"));
    drop(crowd);
    drop(server);

    // A finished prompt frees its permit for others, though its list is not finished.
    let server = Server::start("--max-num-seqs 1 --max-waiting 1");
    let mut list = begin(&server, "a", &body(&json!(["a", "b"]), 480, &json!({"stream": true})));
    super::client::read_until(&mut list, "\"index\":1");
    ask(&server, "a", &body(&json!("x"), 1, &json!({}))).success();
}

#[test]
fn names_count_only_where_they_are_trusted() {
    let server = Server::start("--max-num-seqs 1 --max-waiting 0");
    let first = begin(&server, "a", &body(&json!("x"), 480, &json!({})));
    server.wait_for_metric("vllm:num_requests_running", 1.0);
    let refused = ask(&server, "b", &body(&json!("x"), 1, &json!({"user": "c"})));
    assert_eq!(refused.status, 429, "one address is one client");
    drop(first);
}

#[test]
fn priority_is_a_number() {
    let server = Server::start("--max-model-len 64");
    for priority in [json!(0), json!(-5), json!(i32::MAX), json!(null)] {
        ask(&server, "a", &body(&json!("x"), 1, &json!({"priority": priority}))).success();
    }
    for priority in [json!("high"), json!(1.5), json!(1_u64 << 31)] {
        let answer = ask(&server, "a", &body(&json!("x"), 1, &json!({"priority": priority})));
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, &error["param"]), (400, &json!("priority")), "{error}");
    }
}

#[test]
fn monitoring_works_at_the_limit_of_connections() {
    let server = Server::start("--max-connections 3");
    let idle: Vec<TcpStream> = (0..3).map(|_| connect(server.address())).collect();
    // Accepted in the order in which they came, so these are beyond.
    for _ in 0..100 {
        assert_eq!(server.get("/health").success(), json!({"status": "ok"}));
        assert_eq!(server.get("/metrics").status, 200);
    }
    for path in ["/v1/models", "/", "/metrics/"] {
        let answer = server.get(path);
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{path}");
        assert!(answer.json()["error"]["message"].as_str().unwrap().contains("--max-connections"));
    }
    assert_eq!(ask(&server, "a", &body(&json!("x"), 1, &json!({}))).status, 503);
    drop(idle);
    while server.get("/v1/models").status == 503 {}
}

#[test]
fn connections_of_one_address_are_limited() {
    let server = Server::start("--max-connections-per-address 2");
    let idle: Vec<TcpStream> = (0..2).map(|_| connect(server.address())).collect();
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/v1/models").status, 503);
    drop(idle);
    while server.get("/v1/models").status == 503 {}
}

#[cfg(unix)]
#[test]
fn keys_are_read_again_and_what_runs_goes_on() {
    use nix::sys::signal::Signal;

    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "\u{feff}# of the first team\r\nfirst weight=2\r\n#second\r\n").unwrap();
    let server = Server::start_with("", |command| {
        command.arg("--api-key-file").arg(file.path()).env("TINYVLLM_API_KEY", "\u{feff}typed\r\n");
    });
    let status = |key: &str| {
        let request = format!(
            "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\r\n"
        );
        send(server.address(), request).status
    };
    for (key, expected) in [
        ("first", 200),
        ("typed", 200),
        ("# of the first team", 401),
        ("#second", 401),
        ("second", 401),
        ("first weight=2", 401),
    ] {
        assert_eq!(status(key), expected, "{key}");
    }
    let mut running = connect(server.address());
    let long = body(&json!("x"), 480, &json!({"stream": true}));
    let request = post_bytes(COMPLETIONS, "authorization: Bearer first\r\n", &long);
    running.write_all(request.as_bytes()).unwrap();
    super::client::read_until(&mut running, "data: ");
    std::fs::write(file.path(), "second\n").unwrap();
    server.signal(Signal::SIGHUP);
    while status("second") != 200 {}
    assert_eq!((status("first"), status("typed")), (401, 200));
    // A file without keys changes nothing.
    std::fs::write(file.path(), "# none\n").unwrap();
    server.signal(Signal::SIGHUP);
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut running, &mut rest).unwrap();
    assert!(String::from_utf8_lossy(&rest).contains("data: [DONE]"), "the request was cut off");
    assert_eq!((status("second"), status("first")), (200, 401));
    server.signal(Signal::SIGTERM);
    let (exit, log) = server.wait();
    assert!(exit.success());
    let log = log.join("\n");
    assert!(log.contains("reloaded 2 keys"), "{log}");
    assert!(log.contains("keeping the previous keys") && log.contains("has no key"), "{log}");
    assert!(!log.contains("Bearer") && !log.contains("second\n"), "{log}");
}

/// A pipe without a writer. The first signal to stop ends the server, whether the keys are refused by then or not.
#[cfg(unix)]
#[test]
fn a_pipe_of_keys_does_not_keep_the_server_from_ending() {
    use nix::sys::signal::Signal;

    for waits in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "first\n").unwrap();
        let server = Server::start_with("", |command| {
            command.arg("--api-key-file").arg(&path);
        });
        std::fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        server.signal(Signal::SIGHUP);
        let start = std::time::Instant::now();
        let is_kept = |log: &[String]| log.join("\n").contains("keeping the previous keys");
        while waits && !is_kept(&server.log()) {
            assert!(start.elapsed() < super::client::TIMEOUT, "{:?}", server.log());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        server.signal(Signal::SIGTERM);
        let (exit, log) = server.wait();
        assert!(exit.success(), "{log:?}");
        assert!(start.elapsed() < super::client::TIMEOUT, "{log:?}");
    }
}
