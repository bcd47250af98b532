//! Events of the prefix cache, read as a router reads them.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use super::client::{PATIENCE, Server, get};

/// With ports of the system's choice, so that tests do not meet.
const FLAGS: &str = "--max-model-len 256 --block-size 32 --kv-events-config \
    {\"enable_kv_cache_events\":true,\"endpoint\":\"tcp://127.0.0.1:0\",\"replay_endpoint\":\"tcp://127.0.0.1:0\",\"topic\":\"kv@demo\"}";
const BLOCK_SIZE: usize = 32;
const END: u64 = u64::MAX;

/// Waits in a test that is not asynchronous.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { timeout(PATIENCE, future).await.unwrap() })
}

fn source(server: &Server) -> Value {
    server.get("/kv_event_sources").success()[0].clone()
}

/// Topic, number and payload.
fn read(message: ZmqMessage) -> (Vec<u8>, u64, Option<Value>) {
    let mut parts = message.into_vec();
    let payload = parts.pop().unwrap();
    let number = u64::from_be_bytes(parts.pop().unwrap()[..].try_into().unwrap());
    let topic = parts.pop().unwrap().to_vec();
    (topic, number, (!payload.is_empty()).then(|| rmp_serde::from_slice(&payload).unwrap()))
}

/// Everything from this number on.
fn replay(server: &Server, start: u64) -> Vec<(u64, Value)> {
    let endpoint = source(server)["replay_endpoint"].as_str().unwrap().to_owned();
    wait(async {
        let mut socket = DealerSocket::new();
        socket.connect(&endpoint).await.unwrap();
        let mut request = ZmqMessage::from(Vec::new());
        request.push_back(start.to_be_bytes().to_vec().into());
        socket.send(request).await.unwrap();
        let mut batches = Vec::new();
        loop {
            let message = socket.recv().await.unwrap();
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
    })
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
    assert!(known.values().all(|(_, tokens)| *tokens != secret), "a salted block was told of");
    // Whoever missed some asks for those only.
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
    let address = server.address();
    wait(async {
        let mut socket = SubSocket::new();
        socket.connect(&endpoint).await.unwrap();
        socket.subscribe("kv@").await.unwrap();
        let mut other = SubSocket::new();
        other.connect(&endpoint).await.unwrap();
        other.subscribe("elsewhere").await.unwrap();
        // A subscription takes effect when it arrives; until then nothing is heard.
        let mut number = 0;
        let first = loop {
            number += 1;
            complete(&server, &prompt(number, 64), None);
            if let Ok(message) = timeout(Duration::from_millis(100), socket.recv()).await {
                break read(message.unwrap());
            }
        };
        complete(&server, &prompt(number + 1, 64), None);
        let second = read(socket.recv().await.unwrap());
        assert_eq!((&*first.0, second.1), (&b"kv@demo"[..], first.1 + 1));
        assert_eq!(second.2.unwrap()[1][0]["token_ids"].as_array().unwrap().len(), 64);
        assert!(timeout(Duration::from_millis(50), other.recv()).await.is_err(), "another topic");
        // Whoever breaks the protocol or asks for nothing does no harm.
        let mut asking = DealerSocket::new();
        asking.connect(source(&server)["replay_endpoint"].as_str().unwrap()).await.unwrap();
        for part in [&b""[..], b"x", &[0; 100]] {
            asking.send(ZmqMessage::from(part.to_vec())).await.unwrap();
        }
    });
    drop(std::net::TcpStream::connect(endpoint.trim_start_matches("tcp://")).unwrap());
    assert!(!replay(&server, 0).is_empty());
    assert_eq!(get(address, "/health").status, 200);
}

/// A connection that has said hello as ZeroMQ's sockets do, and does nothing by itself.
fn raw_dealer(endpoint: &str) -> TcpStream {
    let mut stream = TcpStream::connect(endpoint.trim_start_matches("tcp://")).unwrap();
    let mut hello = vec![0; 64];
    hello[..12].copy_from_slice(&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0]);
    hello[12..16].copy_from_slice(b"NULL");
    hello.extend(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER");
    stream.write_all(&hello).unwrap();
    stream
}

/// Where the library had two threads, four such clients stopped it within 20,000 connections.
#[test]
fn many_come_and_ask_and_leave() {
    let server = Server::start(FLAGS);
    let endpoint = source(&server)["replay_endpoint"].as_str().unwrap().to_owned();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let mut stream = raw_dealer(&endpoint);
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    // Everything from number 0 on.
                    stream.write_all(b"\x01\0\0\x08\0\0\0\0\0\0\0\0").unwrap();
                    // The hello of the other side, and the beginning of an answer.
                    stream.read_exact(&mut [0; 100]).unwrap();
                }
            });
        }
    });
    assert!(!replay(&server, 0).is_empty());
}

#[cfg(unix)]
#[test]
fn whoever_lets_others_listen_is_warned() {
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
