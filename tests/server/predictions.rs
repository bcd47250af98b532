//! Predicted outputs and drafts: an answer is the same with all of it, and its effect is reported.

use serde_json::{Value, json};

use super::client::Server;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn chat(change: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Tell me a story about a ship."}]});
    change.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

fn with(body: &Value, field: &str, value: Value) -> Value {
    let mut body = body.clone();
    body[field] = value;
    body
}

#[test]
fn a_prediction_changes_nothing_but_the_time() {
    let server = Server::start(r#"--max-model-len 256 --speculative-config={"adaptive":false}"#);
    let params =
        json!({"max_tokens": 40, "logprobs": true, "top_logprobs": 2, "seed": 5, "temperature": 0.7});
    let plain = Server::start("--max-model-len 256 --no-speculation").post(CHAT, &chat(&params)).success();
    assert!(plain["usage"].get("completion_tokens_details").is_none());
    assert_eq!(plain["timings"]["draft_tokens"], 0);
    let (right, half) =
        (text(&plain).to_owned(), format!("{} and then", &text(&plain)[..text(&plain).len() / 2]));
    let parts = json!([{"type": "text", "text": &right[..8]}, {"type": "text", "text": &right[8..]}]);
    for (content, is_right) in
        [(json!(right), true), (parts, true), (json!(half), false), (json!("no such words"), false)]
    {
        let prediction = json!({"type": "content", "content": content});
        let answer = server.post(CHAT, &with(&chat(&params), "prediction", prediction)).success();
        assert_eq!(answer["choices"], plain["choices"]);
        let details = &answer["usage"]["completion_tokens_details"];
        let [accepted, rejected] = ["accepted_prediction_tokens", "rejected_prediction_tokens"]
            .map(|name| details[name].as_u64().unwrap());
        assert!(!is_right || accepted > 20, "{details}");
        assert!(is_right || rejected > 0, "{details}");
        assert_eq!(answer["timings"]["draft_tokens"], accepted + rejected);
        assert_eq!(answer["timings"]["accepted_draft_tokens"], accepted);
        let id = answer["id"].as_str().unwrap();
        let kept = server.get(&format!("/v1/requests/{id}")).success();
        assert_eq!(kept["prompts"][0]["sequences"][0]["accepted_draft_tokens"], accepted);
    }
    let page = server.get("/metrics").text();
    let count = |name: &str| server.metric(name);
    let accepted = count("vllm:spec_decode_num_accepted_tokens_total");
    assert!(accepted > 40.0 && accepted < count("vllm:spec_decode_num_draft_tokens_total"), "{page}");
    assert!(count("vllm:spec_decode_num_drafts_total") > 0.0);
    assert!(page.contains("vllm:spec_decode_num_accepted_tokens_per_pos_total{"));
    assert!(page.contains("position=\"7\"") && !page.contains("position=\"8\""));
}

#[test]
fn completions_take_predictions_too_and_what_is_none_is_named() {
    let server = Server::start("--max-model-len 256");
    let body = json!({"prompt": "Once", "temperature": 0, "max_tokens": 24});
    let plain = server.post(COMPLETIONS, &body).success();
    let content = plain["choices"][0]["text"].clone();
    let predicted = with(&body, "prediction", json!({"content": content}));
    assert_eq!(server.post(COMPLETIONS, &predicted).success()["choices"], plain["choices"]);
    // One that is longer than any answer is cut.
    let long = with(&body, "prediction", json!({"type": "content", "content": "a b ".repeat(100_000)}));
    assert_eq!(server.post(COMPLETIONS, &long).success()["choices"], plain["choices"]);
    assert_eq!(
        server.post(COMPLETIONS, &with(&body, "prediction", Value::Null)).success()["choices"],
        plain["choices"]
    );
    let refuse = |prediction: Value, words: &str| {
        let answer = server.post(CHAT, &with(&chat(&json!({})), "prediction", prediction.clone()));
        assert_eq!(answer.status, 400);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(words), "{prediction}: {message}");
    };
    refuse(json!("text"), "prediction");
    refuse(json!({"type": "image", "content": "a"}), "prediction.type is \"image\"");
    refuse(json!({"type": "content"}), "prediction.content must be a text");
    refuse(json!({"type": "content", "content": 3}), "prediction.content must be a text");
    refuse(
        json!({"type": "content", "content": [{"type": "image_url"}]}),
        "prediction.content must be a text",
    );
}
