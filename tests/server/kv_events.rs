//! Events of the prefix cache, read as a router reads them.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Server, TIMEOUT};
use super::zmq::{self, Peer};

/// With ports of the system's choice, so that tests do not meet.
const FLAGS: &str = "--max-model-len 256 --block-size 32 --kv-events-config \
    {\"enable_kv_cache_events\":true,\"endpoint\":\"tcp://127.0.0.1:0\",\"replay_endpoint\":\"tcp://127.0.0.1:0\",\"topic\":\"kv@demo\"}";
const BLOCK_SIZE: usize = 32;
const END: u64 = u64::MAX;

fn source(server: &Server) -> Value {
    server.get("/kv_event_sources").success()[0].clone()
}

fn replay_endpoint(server: &Server) -> String {
    source(server)["replay_endpoint"].as_str().unwrap().to_owned()
}

/// Topic, number and payload.
fn read(mut parts: Vec<Vec<u8>>) -> (Vec<u8>, u64, Option<Value>) {
    let payload = parts.pop().unwrap();
    let number = u64::from_be_bytes(parts.pop().unwrap()[..].try_into().unwrap());
    let topic = parts.pop().unwrap();
    (topic, number, (!payload.is_empty()).then(|| rmp_serde::from_slice(&payload).unwrap()))
}

/// Everything from this number on.
fn replay(server: &Server, start: u64) -> Vec<(u64, Value)> {
    let mut socket = Peer::connect(&replay_endpoint(server), "DEALER");
    socket.send(&[b"", &start.to_be_bytes()]);
    replayed(&mut socket)
}

/// The answer to a request.
fn replayed(socket: &mut Peer) -> Vec<(u64, Value)> {
    let mut batches = Vec::new();
    loop {
        let message = socket.receive();
        assert_eq!(message.len(), 4, "an empty part, topic, number and payload");
        match read(message) {
            (topic, END, payload) => {
                assert_eq!((topic.len(), payload), (0, None));
                return batches;
            }
            (topic, number, payload) => {
                assert_eq!(topic, b"kv@demo");
                batches.push((number, payload.unwrap()));
            }
        }
    }
}

/// What a router knows after these batches: parent and tokens of each block.
fn blocks(batches: &[(u64, Value)]) -> HashMap<u64, (Option<u64>, Vec<u64>)> {
    let mut blocks = HashMap::new();
    for event in batches.iter().flat_map(|(_, batch)| batch[1].as_array().unwrap()) {
        let hashes =
            event["block_hashes"].as_array().into_iter().flatten().map(|hash| hash.as_u64().unwrap());
        match event["type"].as_str().unwrap() {
            "AllBlocksCleared" => blocks.clear(),
            "BlockRemoved" => hashes.for_each(|hash| assert!(blocks.remove(&hash).is_some())),
            "BlockStored" => {
                assert_eq!((&event["block_size"], &event["medium"]), (&json!(BLOCK_SIZE), &json!("GPU")));
                let tokens: Vec<u64> =
                    event["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
                let mut parent = event["parent_block_hash"].as_u64();
                for (hash, tokens) in hashes.zip(tokens.chunks_exact(BLOCK_SIZE)) {
                    blocks.insert(hash, (parent, tokens.to_vec()));
                    parent = Some(hash);
                }
            }
            other => panic!("{other}"),
        }
    }
    blocks
}

fn prompt(number: u64, len: u64) -> Vec<u64> {
    (0..len).map(|i| (i * (7 + number) + number * 13) % 200 + 20).collect()
}

fn complete(server: &Server, prompt: &[u64], salt: Option<&str>) -> u64 {
    let body = json!({"prompt": prompt, "max_tokens": 1, "ignore_eos": true, "cache_salt": salt});
    let answer = server.post("/v1/completions", &body).success();
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

#[test]
fn a_router_knows_each_prefix_from_the_events() {
    let server = Server::start(FLAGS);
    let prompts: Vec<Vec<u64>> = (0..9).map(|number| prompt(number, 64 + 5 * number)).collect();
    prompts.iter().for_each(|prompt| assert_eq!(complete(&server, prompt, None), 0));
    complete(&server, &prompt(50, 100), Some("secret"));
    let batches = replay(&server, 0);
    assert!((0..).zip(&batches).all(|(wanted, (number, _))| wanted == *number), "{batches:?}");
    assert_eq!(batches[0].1[1], json!([{"type": "AllBlocksCleared"}]));
    let time = batches[1].1[0].as_f64().unwrap();
    assert!(time > 1.7e9 && batches[1].1[2] == 0, "{time}");
    let known = blocks(&batches);
    for prompt in &prompts {
        // Along the chain of parents, nothing but what the events said.
        let (mut parent, mut num_found) = (None, 0);
        for tokens in prompt[..prompt.len() - 1].chunks_exact(BLOCK_SIZE) {
            let wanted = (parent, tokens.to_vec());
            let Some((hash, _)) = known.iter().find(|(_, block)| **block == wanted) else { break };
            (parent, num_found) = (Some(*hash), num_found + BLOCK_SIZE as u64);
        }
        assert_eq!(complete(&server, prompt, None), num_found);
        assert!(num_found >= 32);
    }
    let secret = prompt(50, 100)[..BLOCK_SIZE].to_vec();
    assert!(known.values().all(|(_, tokens)| *tokens != secret), "a salted block was reported");
    // A peer that missed some requests those only.
    let missed = batches.len() as u64 - 2;
    assert_eq!(replay(&server, missed), batches[missed as usize..]);
    assert_eq!(replay(&server, missed + 1_000), []);
    assert_eq!(server.metric("tinyvllm_kv_event_batches_total"), batches.len() as f64);
    assert_eq!(server.metric("tinyvllm_kv_event_batches_lost_total"), 0.0);
}

#[test]
fn subscribers_hear_of_each_batch() {
    let server = Server::start(FLAGS);
    let endpoint = source(&server)["endpoint"].as_str().unwrap().to_owned();
    let mut socket = Peer::connect(&endpoint, "SUB");
    socket.subscribe("kv@");
    let mut other = Peer::connect(&endpoint, "SUB");
    other.subscribe("elsewhere");
    // A subscription takes effect when it arrives; until then nothing is heard.
    let mut number = 0;
    socket.stream().set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    while socket.stream().peek(&mut [0]).is_err() {
        number += 1;
        complete(&server, &prompt(number, 64), None);
    }
    socket.stream().set_read_timeout(Some(TIMEOUT)).unwrap();
    let first = read(socket.receive());
    complete(&server, &prompt(number + 1, 64), None);
    let second = read(socket.receive());
    assert_eq!((&*first.0, second.1), (&b"kv@demo"[..], first.1 + 1));
    assert_eq!(second.2.unwrap()[1][0]["token_ids"].as_array().unwrap().len(), 64);
    other.stream().set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(other.try_receive().is_none(), "another topic");
    // A peer that requests nothing does no harm.
    let mut asking = Peer::connect(&replay_endpoint(&server), "DEALER");
    for part in [&b""[..], b"x", &[0; 100]] {
        asking.send(&[part]);
    }
    asking.send(&[b"", &0_u64.to_be_bytes()]);
    assert!(!replayed(&mut asking).is_empty());
    drop(zmq::connect(&endpoint));
    assert!(!replay(&server, 0).is_empty());
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn many_come_and_ask_and_leave() {
    let server = Server::start(FLAGS);
    let endpoint = replay_endpoint(&server);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let mut stream = zmq::raw_peer(&endpoint, "DEALER");
                    stream.write_all(&zmq::request(0)).unwrap();
                    // The hello of the other side, and the beginning of an answer.
                    stream.read_exact(&mut [0; 100]).unwrap();
                }
            });
        }
    });
    assert!(!replay(&server, 0).is_empty());
}

/// Waits until the log has a line with these words, and returns how many there are.
#[track_caller]
fn wait_for_line(server: &Server, words: &str) -> usize {
    let start = Instant::now();
    loop {
        let log = server.log();
        let found = log.iter().filter(|line| line.contains("KV events") && line.contains(words)).count();
        if found > 0 {
            return found;
        }
        assert!(start.elapsed() < TIMEOUT, "{words:?} is not in {log:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until the other side has closed.
#[track_caller]
fn wait_for_close(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// The length word of one frame ended the whole server.
#[test]
fn a_frame_that_announces_a_terabyte_closes_its_connection() {
    let server = Server::start(FLAGS);
    for endpoint in [source(&server)["endpoint"].as_str().unwrap(), &replay_endpoint(&server)] {
        for (hello, head) in [
            // Before and after the other side says what it is; a command and a message.
            (zmq::greeting(), &[6_u8][..]),
            ([zmq::greeting(), zmq::ready("SUB")].concat(), &[2]),
            ([zmq::greeting(), zmq::ready("DEALER")].concat(), &[3]),
        ] {
            for length in [1_u64 << 40, u64::MAX, 1 << 31, 4097] {
                let mut stream = zmq::connect(endpoint);
                let bytes = [&hello[..], head, &length.to_be_bytes()].concat();
                stream.write_all(&bytes).unwrap();
                wait_for_close(&mut stream);
            }
        }
    }
    wait_for_line(&server, "the limit is 4096");
    server.wait_for_metric("tinyvllm_kv_event_peers_closed_total", 24.0);
    assert!(!replay(&server, 0).is_empty());
    assert_eq!(server.get("/health").status, 200);
}

#[cfg(target_os = "linux")]
fn resident_bytes(server: &Server) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Each of them had its own queue for its requests, over and over.
#[cfg(target_os = "linux")]
#[test]
fn peers_that_read_nothing_cost_little_and_others_are_answered() {
    let server = Server::start(&FLAGS.replace("--max-model-len 256", "--max-model-len 1024"));
    for number in 0..30 {
        complete(&server, &prompt(number, 1_000), None);
    }
    let num_batches = replay(&server, 0).len();
    let before = resident_bytes(&server);
    // Each of them requests some 33 MB, of which the system may buffer ten.
    let peers: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut stream = zmq::raw_peer(&replay_endpoint(&server), "DEALER");
            stream.write_all(&zmq::request(0).repeat(500)).unwrap();
            stream
        })
        .collect();
    let start = Instant::now();
    let mut most = 0;
    while start.elapsed() < Duration::from_secs(3) {
        most = most.max(resident_bytes(&server).saturating_sub(before));
        assert_eq!(replay(&server, 0).len(), num_batches, "those that read are not held up");
    }
    assert!(most < 16 << 20, "{} peers took {} MB", peers.len(), most >> 20);
    assert_eq!(server.get("/health").status, 200);
}

/// They had all descriptors of the process, for ever.
#[test]
fn peers_are_counted_and_must_send_a_handshake() {
    const MAX_PER_ADDRESS: usize = 128;
    let server = Server::start(FLAGS);
    let endpoint = source(&server)["endpoint"].as_str().unwrap().to_owned();
    let start = Instant::now();
    let mut half_open: Vec<TcpStream> = (0..MAX_PER_ADDRESS + 20)
        .map(|_| {
            let mut stream = zmq::connect(&endpoint);
            // Those beyond the limit may be closed before.
            let _ = stream.write_all(b"\xff");
            stream
        })
        .collect();
    half_open.iter_mut().rev().take(20).for_each(wait_for_close);
    assert_eq!(
        wait_for_line(&server, "the limit of 128 peers from its address"),
        1,
        "a line for all of them"
    );
    assert!(start.elapsed() < Duration::from_secs(8), "the others are still there");
    #[cfg(target_os = "linux")]
    {
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", server.id())).unwrap().count();
        assert!((MAX_PER_ADDRESS..MAX_PER_ADDRESS + 60).contains(&descriptors), "{descriptors}");
    }
    assert_eq!(server.get("/health").status, 200);
    // Of the limit both sockets are part.
    wait_for_close(&mut zmq::connect(&replay_endpoint(&server)));
    half_open.iter_mut().take(MAX_PER_ADDRESS).for_each(wait_for_close);
    assert!(start.elapsed() >= Duration::from_secs(9));
    wait_for_line(&server, "within 10 s");
    assert!(!replay(&server, 0).is_empty(), "the limit is free again");
}

#[cfg(unix)]
#[test]
fn public_endpoints_are_warned_about() {
    let warnings = |flags: &str| {
        let server = Server::start(flags);
        server.signal(nix::sys::signal::Signal::SIGTERM);
        let (_, log) = server.wait();
        log.into_iter().filter(|line| line.contains("warning: KV events")).collect::<Vec<_>>()
    };
    assert_eq!(warnings(FLAGS), [""; 0]);
    let open = warnings(&FLAGS.replace("replay_endpoint\":\"tcp://127.0.0.1", "replay_endpoint\":\"tcp://*"));
    assert_eq!(open.len(), 1, "{open:?}");
    assert!(open[0].contains("tcp://0.0.0.0:0") && open[0].contains("--kv-events-config"), "{open:?}");
}

#[test]
fn without_a_configuration_there_are_no_events() {
    let server = Server::start("--max-model-len 256");
    assert_eq!(server.get("/kv_event_sources").success(), json!([]));
    assert_eq!(server.metric("tinyvllm_kv_event"), 0.0);
}

#[test]
fn what_a_request_is_for_the_engine_can_be_asked() {
    let server = Server::start("--max-model-len 256");
    let mut body = json!({"messages": [{"role": "user", "content": "Hello"}]});
    let tokens = server.post("/tokenize", &body).success()["tokens"].clone();
    let rendered = server.post("/v1/chat/completions/render", &body).success();
    assert_eq!((&rendered["token_ids"], &rendered["model"]), (&tokens, &json!("demo")));
    let left = 256 - tokens.as_array().unwrap().len();
    assert_eq!(rendered["sampling_params"]["max_tokens"], left);
    body["temperature"] = json!(0.7);
    body["stop"] = json!(["x"]);
    body["max_tokens"] = json!(5);
    body["stream"] = json!(true);
    let rendered = server.post("/v1/chat/completions/render", &body).success();
    let params = &rendered["sampling_params"];
    assert_eq!((&params["temperature"], &params["max_tokens"]), (&json!(0.7), &json!(5)));
    assert_eq!((&params["stop"], &rendered["stream"]), (&json!(["x"]), &json!(true)));

    let body = json!({"prompt": ["Once", "Once upon"], "logit_bias": {"3": 1.5}, "cache_salt": "s"});
    let rendered = server.post("/v1/completions/render", &body).success();
    let rendered = rendered.as_array().unwrap();
    assert_eq!(rendered.len(), 2);
    for (one, prompt) in rendered.iter().zip(["Once", "Once upon"]) {
        let tokens = server.post("/tokenize", &json!({"prompt": prompt})).success()["tokens"].clone();
        assert_eq!((&one["token_ids"], &one["cache_salt"]), (&tokens, &json!("s")));
        assert_eq!(one["sampling_params"]["logit_bias"], json!({"3": 1.5}));
    }
    let wrong = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 7});
    assert_eq!(server.post("/v1/chat/completions/render", &wrong).status, 400);
    assert_eq!(server.metric("vllm:generation_tokens_total"), 0.0, "nothing is generated");
}

#[test]
fn events_of_a_cache_that_is_off_are_refused() {
    let flags = FLAGS.split_whitespace();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_tinyvllm"))
        .args(["serve", "--port", "0", "--no-enable-prefix-caching"])
        .args(flags)
        .output();
    let output = output.unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(
        message.contains("--kv-events-config") && message.contains("--no-enable-prefix-caching"),
        "{message}"
    );
}
