//! What the operator, and the programs in front of the server, see.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::json;

use super::bad_inputs::check_error;
use super::client::{Server, send};

#[test]
fn routers_get_facts_of_the_model_and_the_server() {
    let server = Server::start("--max-model-len 64 --served-model-name small --max-num-seqs 3");
    let model = server.get("/model_info").success();
    assert_eq!(server.get("/get_model_info").success(), model);
    assert_eq!((&model["is_generation"], &model["served_model_name"]), (&json!(true), &json!("small")));
    assert!(model["model_path"].is_string() && model["tokenizer_path"].is_string(), "{model}");
    // What a request gets that says nothing: the model's own values, or this program's.
    let preferred = &model["preferred_sampling_params"];
    let answer = server.post("/v1/completions", &json!({"prompt": "Hi", "max_tokens": 1})).success();
    let used = server.get(&format!("/v1/requests/{}", answer["id"].as_str().unwrap())).success();
    let names = [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ];
    for name in names {
        assert!(preferred[name].is_number(), "{name}: {preferred}");
        assert_eq!(preferred[name], used["sampling_params"][name], "{name}");
    }
    for path in ["/server_info", "/get_server_info"] {
        let info = server.get(path).success();
        assert_eq!((&info["served_model_name"], &info["max_running_requests"]), (&json!("small"), &json!(3)));
        assert_eq!(info["context_length"], 64);
        assert!(info["max_total_tokens"].as_u64().unwrap() >= 64, "{info}");
    }
}

#[test]
fn answers_and_requests_are_counted() {
    let server = Server::start("--max-model-len 64");
    let body = json!({"prompt": "Hi", "max_tokens": 3, "n": 2, "ignore_eos": true});
    server.post("/v1/completions", &body).success();
    assert_eq!(server.post("/v1/completions", &json!({})).status, 400);
    for path in ["/a", "/b", "/c?d"] {
        assert_eq!(server.get(path).status, 404);
    }
    let page = server.get("/metrics").text();
    let value = |name: &str, labels: &str| {
        let line = page.lines().find(|line| line.starts_with(name) && line.contains(labels));
        line.unwrap_or_else(|| panic!("{name} {labels}: {page}"))
            .rsplit_once(' ')
            .unwrap()
            .1
            .parse::<f64>()
            .unwrap()
    };
    let count = |labels: &str| value("tinyvllm_http_requests_total{", labels);
    assert_eq!(count("path=\"/v1/completions\",status=\"200\""), 1.0);
    assert_eq!(count("path=\"/v1/completions\",status=\"400\""), 1.0);
    assert_eq!(count("path=\"other\",status=\"404\""), 3.0);
    assert_eq!(value("vllm:request_params_n_sum", ""), 2.0);
    assert_eq!(value("vllm:request_params_max_tokens_sum", ""), 3.0);
    assert_eq!(value("vllm:request_max_num_generation_tokens_sum", ""), 3.0);
    for name in [
        "vllm:gpu_cache_usage_perc",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_queries_total",
    ] {
        value(name, "");
    }
    assert!(value("vllm:lora_requests_info", "max_lora=\"0\"") > 1.7e9);
}

#[cfg(unix)]
#[test]
fn the_log_has_the_reason_of_a_cut_answer() {
    let server = Server::start("--max-model-len 1024");
    let body = json!({"prompt": "Hi", "max_tokens": 1000, "ignore_eos": true, "stream": true}).to_string();
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(super::client::post_bytes("/v1/completions", "", &body).as_bytes()).unwrap();
    let mut first = [0; 64];
    stream.read_exact(&mut first).unwrap();
    drop(stream);
    server.wait_until_idle();
    let whole =
        send(server.address(), "GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    assert_eq!(whole.status, 200);
    server.signal(nix::sys::signal::Signal::SIGTERM);
    let (_, log) = server.wait();
    let line = log.iter().find(|line| line.contains("/v1/completions")).unwrap();
    assert!(line.contains("cut: the client disconnected before the end"), "{log:?}");
    assert!(!log.iter().any(|line| line.contains("/version") && line.contains("cut")), "{log:?}");
}

/// A request whose body is packed in this way.
fn packed(encoding: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-encoding: {encoding}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn packed_bodies_are_understood_within_the_limits() {
    let server = Server::start("--max-model-len 64 --max-body-bytes 100K");
    let body = json!({"prompt": "Hi", "max_tokens": 2, "seed": 1}).to_string();
    let plain = send(server.address(), packed("identity", body.as_bytes())).success();
    for encoding in ["gzip", "GZIP", "x-gzip"] {
        let answer = send(server.address(), packed(encoding, &gzip(body.as_bytes()))).success();
        assert_eq!(answer["choices"], plain["choices"], "{encoding}");
    }
    // In two members.
    let (one, other) = body.split_at(10);
    let members = [gzip(one.as_bytes()), gzip(other.as_bytes())].concat();
    assert_eq!(send(server.address(), packed("gzip", &members)).success()["choices"], plain["choices"]);
    let unpacked = |what: &str, bytes: &[u8], status: u16, words: &str| {
        check_error(what, &send(server.address(), packed("gzip", bytes)), status, None, None, words);
    };
    // Twenty megabytes in less than the limit.
    let bomb = gzip(&vec![b' '; 20 << 20]);
    assert!(bomb.len() < 100 << 10);
    unpacked("a bomb", &bomb, 413, "102400 bytes");
    unpacked("no gzip", body.as_bytes(), 400, "not valid gzip");
    unpacked("half of it", &gzip(body.as_bytes())[..20], 400, "not valid gzip");
    for encoding in ["br", "deflate", "zstd", "gzip, gzip", "\"x"] {
        let answer = send(server.address(), packed(encoding, body.as_bytes()));
        check_error(encoding, &answer, 415, None, None, "gzip");
    }
}

#[test]
fn what_is_no_http_gets_json_too() {
    let server = Server::start("--max-model-len 64");
    let long = "x".repeat(200 << 10);
    for (what, bytes, status) in [
        ("a word", "hello\r\n\r\n".to_owned(), 400),
        ("a bad version", "GET / HTTP/7\r\n\r\n".to_owned(), 400),
        ("a bad header", "GET / HTTP/1.1\r\nhost: localhost\r\na b: c\r\n\r\n".to_owned(), 400),
        ("a large head", format!("GET / HTTP/1.1\r\nhost: localhost\r\na: {long}\r\n\r\n"), 431),
        ("a long path", format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", &long[..100 << 10]), 414),
    ] {
        let answer = send(server.address(), bytes);
        assert_eq!(answer.header("content-type"), Some("application/json"), "{what}: {}", answer.head);
        check_error(what, &answer, status, None, None, "");
    }
    server.get("/health").success();
}
