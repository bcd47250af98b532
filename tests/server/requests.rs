//! What the server reports of requests afterwards, and to which key.

use std::io::Write;

use serde_json::{Value, json};

use super::client::{Answer, Server, connect, post_bytes, read_until, send};

const COMPLETIONS: &str = "/v1/completions";

/// Continues token ids greedily and returns the report.
fn explain(server: &Server, change: &Value) -> Value {
    let mut body = json!({"temperature": 0, "max_tokens": 2, "ignore_eos": true});
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    let answer = server.post(COMPLETIONS, &body).success();
    server.get(&format!("/v1/requests/{}", answer["id"].as_str().unwrap())).success()
}

fn why(request: &Value) -> &Value {
    &request["prompts"][0]["prefix_cache"]["reason"]
}

#[test]
fn a_request_is_explained_with_its_times_parameters_and_cache_miss() {
    let server =
        Server::start("--max-model-len 256 --block-size 8 --max-num-seqs 2 --kv-cache-memory-bytes 2M");
    let prompt: Vec<u32> = (100..130).collect();
    let first = explain(
        &server,
        &json!({"prompt": prompt, "n": 2, "seed": -1, "temperature": 0.7, "stop": "secret"}),
    );
    assert_eq!(
        (&first["object"], &first["state"], why(&first)),
        (&json!("request"), &json!("finished"), &json!("unseen"))
    );
    assert_eq!(first["usage"], json!({"prompt_tokens": 30, "completion_tokens": 4}));
    let params = &first["sampling_params"];
    assert_eq!((&params["temperature"], &params["seed"], &params["n"]), (&json!(0.7), &json!(-1), &json!(2)));
    assert_eq!((&params["max_tokens"], &params["num_stop_strings"]), (&json!(2), &json!(1)));
    assert!(!first.to_string().contains("secret"), "no text of the client");
    let sequences = first["prompts"][0]["sequences"].as_array().unwrap();
    assert_eq!(sequences.len(), 2);
    for sequence in sequences {
        assert_eq!(
            (&sequence["finish_reason"], &sequence["completion_tokens"]),
            (&json!("length"), &json!(2))
        );
        let time = |name: &str| sequence[name].as_f64().unwrap();
        assert!(time("prefill_ms") > 0.0 && time("decode_ms") >= 0.0);
        assert!((time("time_to_first_token_ms") - time("queue_ms") - time("prefill_ms")).abs() < 0.01);
    }
    // Found as far as can be; a token that differs; another salt; a short prompt; one that was computed on purpose.
    let again = explain(&server, &json!({"prompt": prompt}));
    assert_eq!((why(&again), &again["prompts"][0]["cached_tokens"]), (&json!("none"), &json!(24)));
    let mut other = prompt.clone();
    other[21] = 589;
    let differs = explain(&server, &json!({"prompt": other}));
    assert_eq!(
        (why(&differs), &differs["prompts"][0]["cached_tokens"]),
        (&json!("different_token"), &json!(16))
    );
    let difference = &differs["prompts"][0]["prefix_cache"]["first_difference"];
    assert_eq!(difference["position"], 21);
    assert_eq!(difference["token"], json!({"id": 589, "text": "Once"}));
    assert_eq!(difference["cached_token"]["id"], 121);
    assert_eq!(why(&explain(&server, &json!({"prompt": prompt, "cache_salt": "s"}))), "unseen");
    assert_eq!(why(&explain(&server, &json!({"prompt": prompt[..8]}))), "short_prompt");
    assert_eq!(why(&explain(&server, &json!({"prompt": prompt, "prompt_logprobs": 0}))), "prompt_logprobs");
    // Others until the memory is used up, and the end of the first prompt is gone.
    let mut evicted = Value::Null;
    for round in 0..8_u32 {
        for offset in [0, 3] {
            let others: Vec<u32> = (0..250).map(|i| 300 + (round * 7 + offset + i) % 500).collect();
            explain(&server, &json!({"prompt": others}));
        }
        evicted = explain(&server, &json!({"prompt": prompt}));
        if why(&evicted) == "evicted" {
            break;
        }
    }
    assert_eq!(why(&evicted), "evicted", "{evicted}");
}

#[test]
fn a_request_is_reported_while_it_runs_and_after_its_client_disconnects() {
    let server = Server::start("");
    let ask = |id: &str| server.get(&format!("/v1/requests/{id}")).success();
    let body = json!({"prompt": "Once", "n": 4, "max_tokens": 490, "ignore_eos": true, "stream": true});
    let mut stream = connect(server.address());
    stream
        .write_all(post_bytes(COMPLETIONS, "x-request-id: run-7\r\n", &body.to_string()).as_bytes())
        .unwrap();
    read_until(&mut stream, "\"text\":");
    let running = ask("run-7");
    assert_eq!((&running["state"], &running["request_id"]), (&json!("running"), &json!("run-7")));
    assert_eq!((&running["stream"], &running["prompts"][0]["prefix_cache"]), (&json!(true), &Value::Null));
    assert!(running["usage"]["completion_tokens"].as_u64().unwrap() > 0);
    assert_eq!(ask(running["id"].as_str().unwrap())["request_id"], "run-7");
    drop(stream);
    server.wait_until_idle();
    let start = std::time::Instant::now();
    while ask("run-7")["state"] == "running" {
        assert!(start.elapsed() < super::client::TIMEOUT);
    }
    assert_eq!(ask("run-7")["state"], "aborted");
}

/// An answer to a client with this key.
fn with_key(server: &Server, key: &str, path: &str, body: Option<&Value>) -> Answer {
    let header = format!("authorization: Bearer {key}\r\n");
    let bytes = match body {
        Some(body) => post_bytes(path, &header, &body.to_string()),
        None => format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{header}\r\n"),
    };
    send(server.address(), bytes)
}

#[test]
fn only_the_sender_sees_a_record_and_only_the_latest() {
    let server =
        Server::start("--max-model-len 256 --block-size 8 --request-history 2 --api-key a --api-key b");
    let mut prompt: Vec<u32> = (100..130).collect();
    let submit = |key: &str, prompt: &[u32]| {
        let body = json!({"prompt": prompt, "max_tokens": 1});
        let answer = with_key(&server, key, COMPLETIONS, Some(&body)).success();
        format!("/v1/requests/{}", answer["id"].as_str().unwrap())
    };
    let first = submit("a", &prompt);
    prompt[20] = 7;
    let second = submit("b", &prompt);
    let get = |key: &str, path: &str| with_key(&server, key, path, None);
    assert_eq!(get("a", &first).status, 200);
    for (key, path) in [("b", &*first), ("a", &*second), ("a", "/v1/requests/nothing")] {
        let answer = get(key, path);
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    }
    // The block in which another client's prompt differs is reported, as counts of cached tokens are, and not the
    // position in it.
    let cache = get("b", &second).success()["prompts"][0]["prefix_cache"].clone();
    let wanted = json!({"position": 16, "token": null, "cached_token": null});
    assert_eq!((&cache["reason"], &cache["first_difference"]), (&json!("different_token"), &wanted));
    let message = cache["message"].as_str().unwrap();
    assert!(message.contains("positions 16 to 23;") && !message.contains("20"), "{message}");
    submit("a", &prompt);
    assert_eq!(get("a", &first).status, 404, "the third has replaced it");
    assert_eq!(with_key(&server, "wrong", &second, None).status, 401);
    let server = Server::start("--request-history 0");
    let answer = server.post(COMPLETIONS, &json!({"prompt": "x", "max_tokens": 1})).success();
    assert_eq!(server.get(&format!("/v1/requests/{}", answer["id"].as_str().unwrap())).status, 404);
}

#[test]
fn what_a_request_does_not_say_is_as_the_models_files_say_on_every_interface() {
    let folder = tempfile::tempdir().unwrap();
    let values = json!({
        "temperature": 1.5, "top_k": 7, "top_p": 0.5, "min_p": 0.01, "repetition_penalty": 1.25, "max_new_tokens": 3,
        "do_sample": true, "num_beams": 4,
    });
    std::fs::write(folder.path().join("generation_config.json"), values.to_string()).unwrap();
    let server =
        Server::start(&format!("--max-model-len 256 --generation-config {}", folder.path().display()));
    let message = json!([{"role": "user", "content": "Hi"}]);
    for (path, body, limit) in [
        ("/v1/completions", json!({"prompt": "Once"}), 3),
        ("/v1/chat/completions", json!({"messages": message}), 3),
        ("/v1/responses", json!({"input": "Hi"}), 3),
        ("/v1/messages", json!({"messages": message, "max_tokens": 2}), 2),
    ] {
        let ask = |change: &Value| {
            let mut body = body.clone();
            for (name, value) in change.as_object().unwrap() {
                body[name] = value.clone();
            }
            let answer = server.post(path, &body).success();
            let reported = server.get(&format!("/v1/requests/{}", answer["id"].as_str().unwrap())).success();
            let params = &reported["sampling_params"];
            ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens"]
                .map(|name| params[name].as_f64().unwrap())
        };
        assert_eq!(ask(&json!({})), [1.5, 7.0, 0.5, 0.01, 1.25, f64::from(limit)], "{path}");
        let own = json!({"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1});
        assert_eq!(ask(&own), [0.0, 0.0, 1.0, 0.0, 1.0, f64::from(limit)], "{path}");
    }
    let longer = explain(&server, &json!({"prompt": "Once", "max_tokens": 5}));
    assert_eq!(longer["sampling_params"]["max_tokens"], 5);
    let log = server.log();
    let says = |text: &str| log.iter().any(|line| line.starts_with("note: ") && line.contains(text));
    assert!(says("temperature 1.5, top_k 7, top_p 0.5") && says("num_beams"), "{log:?}");
}

#[test]
fn how_far_a_prompt_is_can_be_heard_and_asked() {
    let server = Server::start("--max-num-batched-tokens 64 --block-size 16");
    let prompt: Vec<u32> = (0..200).map(|i| 300 + i).collect();
    let words = "word ".repeat(150);
    let chat = json!([{"role": "user", "content": words}]);
    for (path, name, value) in
        [(COMPLETIONS, "prompt", json!(prompt)), ("/v1/chat/completions", "messages", chat)]
    {
        let mut body = json!({"max_tokens": 2, "stream": true, "return_progress": true, "temperature": 0});
        body[name] = value;
        let events = server.post(path, &body).events();
        let (reported, rest): (Vec<&Value>, Vec<&Value>) =
            events.iter().partition(|event| event.get("prompt_progress").is_some());
        assert_eq!(
            reported.len(),
            events.iter().take_while(|event| event.get("prompt_progress").is_some()).count()
        );
        let number = |event: &Value, name: &str| event["prompt_progress"][name].as_u64().unwrap();
        let total = number(reported[0], "total");
        assert!(total > 64 * 2 && reported.len() as u64 == total.div_ceil(64), "{reported:?}");
        for (event, step) in reported.iter().zip(1..) {
            assert_eq!((number(event, "total"), number(event, "cache")), (total, 0));
            assert_eq!(number(event, "processed"), total.min(step * 64));
            assert!(event["prompt_progress"]["time_ms"].as_f64().unwrap() > 0.0);
            assert_eq!(event["choices"][0]["finish_reason"], Value::Null);
            assert!(event["choices"][0]["text"].as_str().unwrap_or_default().is_empty());
        }
        // It can be read afterwards, and meanwhile.
        let id = events[0]["id"].as_str().unwrap();
        let record = server.get(&format!("/v1/requests/{id}")).success();
        let last = &reported.last().unwrap()["prompt_progress"];
        assert_eq!(&record["prompts"][0]["prompt_progress"], last);
        // Without the field there is no progress, and the rest is the same.
        body["return_progress"] = json!(false);
        body["cache_salt"] = json!("another");
        let silent = server.post(path, &body).events();
        // On a busy machine two tokens may come in one event.
        let text = |event: &Value| {
            let choice = &event["choices"][0];
            [&choice["text"], &choice["delta"]["content"]]
                .map(|text| text.as_str().unwrap_or_default())
                .concat()
        };
        assert_eq!(
            silent.iter().map(text).collect::<String>(),
            rest.into_iter().map(text).collect::<String>()
        );
        assert!(silent.iter().all(|event| event.get("prompt_progress").is_none()));
        body["stream"] = json!(false);
        assert!(server.post(path, &body).status == 200);
        body["return_progress"] = json!(true);
        let error = server.post(path, &body);
        assert_eq!((error.status, &error.json()["error"]["param"]), (400, &json!("return_progress")));
    }
}

#[test]
fn the_progress_of_a_prompt_is_reported_while_it_is_computed() {
    // Each step computes one block, slowly.
    let server =
        Server::start("--max-num-seqs 2 --max-num-batched-tokens 16 --block-size 16 --kernels reference");
    let prompt: Vec<u32> = (0..900).map(|i| 300 + i % 500).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1, "stream": true, "return_progress": true});
    let mut stream = connect(server.address());
    stream.write_all(post_bytes(COMPLETIONS, "", &body.to_string()).as_bytes()).unwrap();
    let begin = read_until(&mut stream, "prompt_progress");
    let id = begin.split("\"id\":\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let record = server.get(&format!("/v1/requests/{id}")).success();
    assert_eq!(record["state"], "running");
    let progress = &record["prompts"][0]["prompt_progress"];
    assert_eq!(progress["total"], 900);
    assert!(progress["processed"].as_u64().unwrap() < 900, "{progress}");
}
