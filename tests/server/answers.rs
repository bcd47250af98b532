//! Answers, which do not depend on the way of the request.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::client::Server;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn chat(change: &Value) -> Value {
    let mut body = json!({
        "messages": [
            {"role": "system", "content": "You tell stories."},
            {"role": "user", "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}]},
        ],
        "max_tokens": 24,
        "seed": 5,
    });
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// Text and end of each choice of a stream, put together by a client's rules.
pub(super) fn joined(events: &[Value]) -> BTreeMap<u64, (String, String)> {
    let mut choices: BTreeMap<u64, (String, String)> = BTreeMap::new();
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let entry = choices.entry(choice["index"].as_u64().unwrap()).or_default();
        let text = choice["delta"]["content"].as_str().or_else(|| choice["text"].as_str());
        assert!(entry.1.is_empty(), "something came after the end: {choice}");
        entry.0.push_str(text.unwrap_or_default());
        if let Some(reason) = choice["finish_reason"].as_str() {
            reason.clone_into(&mut entry.1);
        }
    }
    choices
}

pub(super) fn whole(answer: &Value) -> BTreeMap<u64, (String, String)> {
    let choices = answer["choices"].as_array().unwrap().iter().map(|choice| {
        let text = choice["message"]["content"].as_str().or_else(|| choice["text"].as_str()).unwrap();
        let reason = choice["finish_reason"].as_str().unwrap();
        (choice["index"].as_u64().unwrap(), (text.to_owned(), reason.to_owned()))
    });
    choices.collect()
}

#[test]
fn a_stream_equals_the_answer_as_a_whole() {
    let server = Server::start("--max-model-len 256 --served-model-name first --served-model-name second");
    let prompts = json!(["Once upon a time", "The little robot"]);
    for (path, body) in [
        (CHAT, chat(&json!({}))),
        (CHAT, chat(&json!({"n": 3, "temperature": 1.3, "logprobs": true, "top_logprobs": 2}))),
        (CHAT, chat(&json!({"stop": [".", "tim"], "max_tokens": 60, "n": 2}))),
        (CHAT, chat(&json!({"temperature": 0, "return_token_ids": true, "logit_bias": {"264": -100}}))),
        (COMPLETIONS, json!({"prompt": prompts, "n": 2, "seed": 1, "max_tokens": 20, "logprobs": 1})),
        (COMPLETIONS, json!({"prompt": "Once upon", "echo": true, "seed": 1, "stop": "a"})),
        (COMPLETIONS, json!({"prompt": [589, 657], "echo": true, "max_tokens": 0, "n": 2})),
        (COMPLETIONS, json!({"prompt": [[589], [657, 264]], "temperature": 0, "return_token_ids": true})),
        (CHAT, chat(&json!({"n": 2, "prompt_logprobs": 3}))),
        (COMPLETIONS, json!({"prompt": prompts, "n": 2, "seed": 1, "echo": true, "logprobs": 2})),
        (COMPLETIONS, json!({"prompt": prompts, "seed": 1, "echo": true, "logprobs": 1, "max_tokens": 0})),
        (COMPLETIONS, json!({"prompt": "Once upon", "seed": 1, "logprobs": 4, "prompt_logprobs": 0})),
        (
            COMPLETIONS,
            json!({"prompt": "Once", "min_tokens": 30, "max_tokens": 40, "repetition_penalty": 1.3,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_p": 0.05, "top_k": 20, "top_p": 0.9,
            "seed": -3, "stop_token_ids": [50], "include_stop_str_in_output": true, "stop": ["e"]}),
        ),
    ] {
        let answer = server.post(path, &body).success();
        // 47 and "same seed, same text": the same again, whatever ran before.
        assert_eq!(whole(&server.post(path, &body).success()), whole(&answer), "{body}");
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        streamed["stream_options"] = json!({"include_usage": true});
        let events = server.post(path, &streamed).events();
        assert_eq!(joined(&events), whole(&answer), "{body}");
        let (last, chunks) = events.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        for name in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(last["usage"][name], answer["usage"][name], "{body}");
        }
        assert!(chunks.iter().all(|chunk| chunk["usage"].is_null() && chunk["id"] == last["id"]));
        assert!(chunks.iter().all(|chunk| chunk["model"] == "first" && chunk["choices"][0].is_object()));
        for (pointer, name) in [
            ("/logprobs/content", "logprobs"),
            ("/logprobs/tokens", "logprobs"),
            ("/logprobs/token_logprobs", "logprobs"),
            ("/logprobs/top_logprobs", "logprobs"),
            ("/logprobs/text_offset", "logprobs"),
            ("/prompt_logprobs", "prompt_logprobs"),
            ("/token_ids", ""),
        ] {
            let concat = |choices: Vec<&Value>| -> Vec<Value> {
                let lists = choices.into_iter().filter(|choice| choice["index"] == 0);
                lists.filter_map(|choice| choice.pointer(pointer)?.as_array().cloned()).flatten().collect()
            };
            let streamed =
                concat(chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()).collect());
            let wanted = concat(answer["choices"].as_array().unwrap().iter().collect());
            assert_eq!(streamed, wanted, "{name} of {body}");
        }
        assert_eq!(chunks[0].get("prompt_logprobs"), answer.get("prompt_logprobs"), "{body}");
    }
}

#[test]
fn a_chat_stream_has_openais_chunks() {
    let server = Server::start("--max-model-len 256");
    let events = server.post(CHAT, &chat(&json!({"stream": true}))).events();
    let deltas: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
    assert_eq!(*deltas[0], json!({"role": "assistant", "content": ""}));
    for delta in &deltas[1..deltas.len() - 1] {
        assert_eq!(delta.as_object().unwrap().keys().collect::<Vec<_>>(), ["content"]);
    }
    assert_eq!(**deltas.last().unwrap(), json!({}));
    let (last, others) = events.split_last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert!(others.iter().all(|event| event["choices"][0]["finish_reason"].is_null()));
    assert!(
        events.iter().all(|event| event["object"] == "chat.completion.chunk" && event.get("usage").is_none())
    );
    assert!(last["timings"]["decode_ms"].as_f64().unwrap() > 0.0);
    // vLLM's benchmarks need the usage in each chunk.
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let events = server.post(CHAT, &chat(&json!({"stream": true, "stream_options": options}))).events();
    let counts: Vec<u64> =
        events.iter().map(|event| event["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts.last() == Some(&24), "{counts:?}");
}

#[test]
fn stops_logprobs_and_counts_are_right() {
    let server = Server::start("--max-model-len 256 --block-size 8");
    let body = chat(&json!({"temperature": 0, "max_tokens": 40}));
    let answer = server.post(CHAT, &body).success();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    // 47: text before a stop string, nothing of it, and the reason.
    let stop: String = text.chars().skip(10).take(6).collect();
    let stopped =
        server.post(CHAT, &chat(&json!({"temperature": 0, "max_tokens": 40, "stop": stop}))).success();
    let choice = &stopped["choices"][0];
    assert_eq!(choice["message"]["content"].as_str(), text.split_once(&stop).map(|(before, _)| before));
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!(stop)));
    // The prompt is in the cache by now, up to its last block; another salt shares nothing.
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!(cached(&answer), 0);
    assert!(cached(&stopped) > 0);
    assert_eq!(stopped["timings"]["cached_tokens"].as_u64(), Some(cached(&stopped)));
    let salted = server.post(CHAT, &chat(&json!({"temperature": 0, "cache_salt": "s"}))).success();
    assert_eq!(cached(&salted), 0);
    // Log-probabilities: greedy tokens are the most likely ones, and their texts make up the answer.
    let body = chat(&json!({"temperature": 0, "max_tokens": 12, "logprobs": true, "top_logprobs": 3}));
    let answer = server.post(CHAT, &body).success();
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 12);
    let joined: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(answer["choices"][0]["message"]["content"], joined);
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(
            (top.len(), &top[0]["token"], &top[0]["logprob"]),
            (3, &token["token"], &token["logprob"])
        );
        assert_eq!(token["bytes"], json!(token["token"].as_str().unwrap().as_bytes()));
    }
    let body = json!({"prompt": "Once", "temperature": 0, "max_tokens": 8, "logprobs": 2});
    let choice = server.post(COMPLETIONS, &body).success()["choices"][0].clone();
    let text = choice["text"].as_str().unwrap();
    for index in 0..8 {
        let offset = choice["logprobs"]["text_offset"][index].as_u64().unwrap() as usize;
        let token = choice["logprobs"]["tokens"][index].as_str().unwrap();
        assert!(text.chars().skip(offset).collect::<String>().starts_with(token), "{choice}");
        assert_eq!(
            choice["logprobs"]["top_logprobs"][index][token],
            choice["logprobs"]["token_logprobs"][index]
        );
    }
    // What the defaults are.
    let answer = server.post(COMPLETIONS, &json!({"prompt": "Once", "ignore_eos": true})).success();
    assert_eq!(answer["usage"]["completion_tokens"], 16);
}

#[test]
fn models_tokens_and_versions() {
    let server = Server::start("--max-model-len 200 --served-model-name org/a --served-model-name b");
    let list = server.get("/v1/models").success();
    let names: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|card| &card["id"]).collect();
    assert_eq!(names, ["org/a", "b"]);
    assert_eq!(list["data"][0]["max_model_len"], 200);
    assert_eq!(server.get("/v1/models/org/a").success()["id"], "org/a");
    assert_eq!(server.get("/version").success(), json!({"version": env!("CARGO_PKG_VERSION")}));
    let answer = server.post("/tokenize", &json!({"prompt": "Once upon", "model": "b"})).success();
    assert_eq!(
        answer,
        json!({"count": 3, "max_model_len": 200, "tokens": [0, 589, 657], "token_strs": null})
    );
    let answer = server.post("/detokenize", &json!({"tokens": [589, 657]})).success();
    assert_eq!(answer, json!({"prompt": "Once upon"}));
}

#[test]
fn metrics_have_vllms_names() {
    let server = Server::start("--max-model-len 256");
    server.post(CHAT, &chat(&json!({"n": 2}))).success();
    let page = server.get("/metrics");
    assert_eq!(page.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let page = page.text();
    for (name, kind) in [
        ("vllm:num_requests_running", "gauge"),
        ("vllm:num_requests_waiting", "gauge"),
        ("vllm:kv_cache_usage_perc", "gauge"),
        ("vllm:cache_config_info", "gauge"),
        ("vllm:prompt_tokens_total", "counter"),
        ("vllm:generation_tokens_total", "counter"),
        ("vllm:request_success_total", "counter"),
        ("vllm:num_preemptions_total", "counter"),
        ("vllm:prefix_cache_queries_total", "counter"),
        ("vllm:prefix_cache_hits_total", "counter"),
        ("vllm:time_to_first_token_seconds", "histogram"),
        ("vllm:inter_token_latency_seconds", "histogram"),
        ("vllm:request_time_per_output_token_seconds", "histogram"),
        ("vllm:e2e_request_latency_seconds", "histogram"),
        ("vllm:request_queue_time_seconds", "histogram"),
        ("vllm:request_prefill_time_seconds", "histogram"),
        ("vllm:request_decode_time_seconds", "histogram"),
        ("vllm:request_inference_time_seconds", "histogram"),
        ("vllm:request_prompt_tokens", "histogram"),
        ("vllm:request_generation_tokens", "histogram"),
        ("vllm:iteration_tokens_total", "histogram"),
        ("tinyvllm_build_info", "gauge"),
    ] {
        assert!(page.contains(&format!("# TYPE {name} {kind}\n")), "{name}");
        let sample = if kind == "histogram" { format!("{name}_bucket") } else { name.to_owned() };
        assert!(page.contains(&format!("\n{sample}{{model_name=\"demo\",engine=\"0\"")), "{name}");
    }
    assert_eq!(server.metric("vllm:generation_tokens_total"), 48.0);
    assert_eq!(server.metric("vllm:request_success_total"), 2.0);
    assert_eq!(server.metric("vllm:time_to_first_token_seconds_count"), 2.0);
    assert_eq!(server.metric("vllm:inter_token_latency_seconds_count"), 46.0);
    assert_eq!(server.metric("vllm:kv_cache_usage_perc"), 0.0);
}

#[test]
fn prompts_are_reported_as_in_vllm_and_openai() {
    let server = Server::start("--max-model-len 256");
    let ask = |change: Value| {
        let mut body = json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 3});
        for (name, value) in change.as_object().unwrap() {
            body[name] = value.clone();
        }
        server.post(COMPLETIONS, &body).success()["choices"][0].clone()
    };
    let plain = ask(json!({}));
    assert_eq!(plain.get("prompt_logprobs"), None);
    // As in OpenAI's API: the prompt's tokens, then the output's, with null where nothing comes before.
    let choice = ask(json!({"echo": true, "logprobs": 2}));
    let text = choice["text"].as_str().unwrap();
    assert_eq!(text, format!("Once upon a time{}", plain["text"].as_str().unwrap()));
    let list = &choice["logprobs"];
    let tokens: Vec<&str> = list["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens[1..].concat(), text, "the first token is the beginning of a text, which has no text");
    assert_eq!((&list["token_logprobs"][0], &list["top_logprobs"][0]), (&Value::Null, &Value::Null));
    for index in 1..tokens.len() {
        let offset = list["text_offset"][index].as_u64().unwrap() as usize;
        assert!(text.chars().skip(offset).collect::<String>().starts_with(tokens[index]), "{choice}");
        let top = list["top_logprobs"][index].as_object().unwrap();
        assert!(top.len() == 2 || top.len() == 3, "{top:?}");
        assert_eq!(top[tokens[index]], list["token_logprobs"][index]);
        assert!(list["token_logprobs"][index].as_f64().unwrap() <= 0.0);
    }
    // The prompt alone, as in evaluations.
    let alone = ask(json!({"echo": true, "logprobs": 2, "max_tokens": 0}));
    assert_eq!((&alone["text"], &alone["finish_reason"]), (&json!("Once upon a time"), &json!("length")));
    let num_prompt = alone["logprobs"]["tokens"].as_array().unwrap().len();
    assert_eq!(num_prompt + 3, tokens.len());
    assert_eq!(
        alone["logprobs"]["token_logprobs"].as_array().unwrap()[..],
        list["token_logprobs"].as_array().unwrap()[..num_prompt]
    );
    // vLLM's fields say the same.
    let listed = ask(json!({"prompt_logprobs": 2, "return_token_ids": true}));
    let positions = listed["prompt_logprobs"].as_array().unwrap();
    assert_eq!((positions.len(), &positions[0]), (num_prompt, &Value::Null));
    for (index, position) in positions.iter().enumerate().skip(1) {
        let position = position.as_object().unwrap();
        assert!(position.len() == 2 || position.len() == 3, "{position:?}");
        let (first, own) = position.iter().next().unwrap();
        assert_eq!(*first, listed["prompt_token_ids"][index].to_string());
        assert_eq!(own["decoded_token"], tokens[index]);
        assert_eq!(own["logprob"], list["token_logprobs"][index]);
        assert!(position.values().any(|token| token["rank"] == 1));
    }
    // A chat has them in addition to its choices; the whole prompt was computed.
    let answer = server.post(CHAT, &chat(&json!({"prompt_logprobs": 0, "n": 2}))).success();
    let num_tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), num_tokens);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}
