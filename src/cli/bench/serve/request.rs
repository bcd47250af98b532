//! One request: its body, and the times at which the events of its answer arrived.
//!
//! The time of an event is the time at which its bytes were read from the connection. Several events can come
//! in one chunk. They have the same time, and the intervals between them are 0. The number of tokens is what
//! the server reports (`usage`), not the number of events.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use http_body_util::BodyExt as _;
use hyper::body::Bytes;
use serde_json::{Map, Value, json};

use super::sse::SseParser;
use super::workload::{Prompt, Sample};
use crate::http::{HttpClient, causes, error_message, read_success};

/// Size limit of an error's body.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// The interface of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    Completions,
    Chat,
}

/// The common fields of all requests.
#[derive(Debug, Clone)]
pub(super) struct Template {
    pub(super) api: Api,
    pub(super) model: String,
    pub(super) ignore_eos: bool,
    /// Parameters for every body. They override those that are set here.
    pub(super) extra: Map<String, Value>,
}

impl Template {
    /// The body of a request.
    pub(super) fn body(&self, sample: &Sample) -> Bytes {
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(self.model));
        match self.api {
            Api::Completions => {
                let prompt = match &sample.prompt {
                    Prompt::Text(text) => json!(text),
                    Prompt::Ids(ids) => json!(ids),
                };
                body.insert("prompt".to_owned(), prompt);
                body.insert("max_tokens".to_owned(), json!(sample.output_len));
            }
            Api::Chat => {
                // A workload for this interface has no token ids.
                let Prompt::Text(text) = &sample.prompt else { return Bytes::new() };
                body.insert("messages".to_owned(), json!([{"role": "user", "content": text}]));
                body.insert("max_completion_tokens".to_owned(), json!(sample.output_len));
            }
        }
        body.insert("stream".to_owned(), json!(true));
        body.insert("stream_options".to_owned(), json!({"include_usage": true}));
        if self.ignore_eos {
            body.insert("ignore_eos".to_owned(), json!(true));
        }
        body.extend(self.extra.clone());
        Value::Object(body).to_string().into()
    }
}

/// The outcome of a request. It succeeded if there is no error.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Outcome {
    /// When it was sent, from the start of the run.
    pub(super) start: Duration,
    /// How long it waited for a permit.
    pub(super) queue_time: Duration,
    /// Time from sending to the first token.
    pub(super) ttft: Duration,
    /// Intervals between events with output.
    pub(super) itls: Vec<Duration>,
    /// Time from sending to the last token.
    pub(super) latency: Duration,
    pub(super) text: String,
    pub(super) num_prompt_tokens: usize,
    pub(super) num_output_tokens: usize,
    /// Whether the server reported the number of tokens.
    pub(super) has_usage: bool,
    pub(super) error: Option<String>,
}

/// Sends a request and reads its answer to the end.
pub(super) async fn send(
    client: &HttpClient,
    api: Api,
    path: &str,
    body: Bytes,
    run_start: Instant,
) -> Outcome {
    let sent = Instant::now();
    let mut answer = Answer::new(api, sent);
    let error = receive(client, path, body, &mut answer).await.err().map(|error| format!("{error:#}"));
    let mut outcome = answer.into_outcome(error);
    outcome.start = sent.saturating_duration_since(run_start);
    outcome
}

async fn receive(client: &HttpClient, path: &str, body: Bytes, answer: &mut Answer) -> anyhow::Result<()> {
    let response = client.post(path, body).await?;
    if !response.status().is_success() {
        read_success(response, MAX_ERROR_BYTES).await?;
        return Ok(());
    }
    let mut body = response.into_body();
    let mut parser = SseParser::default();
    while let Some(frame) = body.frame().await {
        let now = Instant::now();
        let frame = frame.map_err(|error| anyhow!("the stream was cut off: {}", causes(&error)))?;
        let Ok(data) = frame.into_data() else { continue };
        parser.push(&data, |event| answer.add(event, now)).map_err(|reason| anyhow!(reason))?;
    }
    parser.finish(|event| answer.add(event, Instant::now()));
    Ok(())
}

/// The answer so far.
#[derive(Debug)]
struct Answer {
    api: Api,
    sent: Instant,
    last_output: Option<Instant>,
    num_events: usize,
    /// Whether there was `[DONE]` or a finish reason.
    is_complete: bool,
    outcome: Outcome,
}

impl Answer {
    fn new(api: Api, sent: Instant) -> Self {
        let outcome = Outcome::default();
        Self { api, sent, last_output: None, num_events: 0, is_complete: false, outcome }
    }

    fn add(&mut self, event: &[u8], now: Instant) {
        if event.trim_ascii() == b"[DONE]" {
            self.is_complete = true;
            return;
        }
        let Ok(event) = serde_json::from_slice::<Value>(event) else {
            self.fail(|| format!("an event of the stream is not JSON: {}", excerpt(event)));
            return;
        };
        if let Some(message) = error_message(&event) {
            self.fail(|| message);
        }
        if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
            let count = |name: &str| usage[name].as_u64().and_then(|count| usize::try_from(count).ok());
            if let (Some(prompt), Some(output)) = (count("prompt_tokens"), count("completion_tokens")) {
                self.outcome.num_prompt_tokens = prompt;
                self.outcome.num_output_tokens = output;
                self.outcome.has_usage = true;
            }
        }
        if let Some(choice) = event["choices"].get(0) {
            self.add_choice(choice, now);
        }
    }

    fn add_choice(&mut self, choice: &Value, now: Instant) {
        let is_end = choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
        self.is_complete |= is_end;
        let text_of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (text, is_announcement) = match self.api {
            Api::Completions => (text_of(&choice["text"]), false),
            Api::Chat => {
                let delta = &choice["delta"];
                let mut text = text_of(&delta["reasoning_content"]);
                text.push_str(&text_of(&delta["reasoning"]));
                text.push_str(&text_of(&delta["content"]));
                if let Some(calls) = delta["tool_calls"].as_array() {
                    calls.iter().for_each(|call| text.push_str(&text_of(&call["function"]["arguments"])));
                }
                // The first chunk has the role, often before there is a token.
                (text, delta.get("role").is_some() && delta["tool_calls"].is_null())
            }
        };
        // A token can have no text: a special one, or the first bytes of a character. A final event without
        // text has no token of its own, unless it is the only event.
        let has_token = match (text.is_empty(), is_end) {
            (false, _) => true,
            (true, true) => self.last_output.is_none(),
            (true, false) => !is_announcement,
        };
        if !has_token {
            return;
        }
        self.num_events += 1;
        match self.last_output {
            None => self.outcome.ttft = now.saturating_duration_since(self.sent),
            Some(last) => self.outcome.itls.push(now.saturating_duration_since(last)),
        }
        self.last_output = Some(now);
        self.outcome.latency = now.saturating_duration_since(self.sent);
        self.outcome.text.push_str(&text);
    }

    fn fail(&mut self, message: impl FnOnce() -> String) {
        if self.outcome.error.is_none() {
            self.outcome.error = Some(message());
        }
    }

    /// Ends the answer. `error` is the error of the connection.
    fn into_outcome(mut self, error: Option<String>) -> Outcome {
        if let Some(error) = error {
            self.fail(|| error);
        }
        if !self.is_complete {
            self.fail(|| "the stream ended before the answer did".to_owned());
        } else if self.last_output.is_none() {
            self.fail(|| "the answer has no token".to_owned());
        }
        if !self.outcome.has_usage {
            self.outcome.num_output_tokens = self.num_events;
        }
        self.outcome
    }
}

fn excerpt(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events, each with its time in milliseconds after sending.
    fn outcome(api: Api, events: &[(u64, &str)]) -> Outcome {
        let sent = Instant::now();
        let mut answer = Answer::new(api, sent);
        for (millis, event) in events {
            answer.add(event.as_bytes(), sent + Duration::from_millis(*millis));
        }
        answer.into_outcome(None)
    }

    fn millis(times: &[Duration]) -> Vec<u128> {
        times.iter().map(Duration::as_millis).collect()
    }

    #[test]
    fn times_of_completions() {
        let outcome = outcome(
            Api::Completions,
            &[
                (20, r#"{"choices":[{"text":"","finish_reason":null}]}"#),
                (30, r#"{"choices":[{"text":"a","finish_reason":null}]}"#),
                (30, r#"{"choices":[{"text":"b","finish_reason":null}]}"#),
                (50, r#"{"choices":[{"text":"","finish_reason":"length"}]}"#),
                (51, r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}"#),
                (52, "[DONE]"),
            ],
        );
        assert_eq!(outcome.error, None);
        assert_eq!((outcome.ttft.as_millis(), outcome.latency.as_millis()), (20, 30));
        assert_eq!(millis(&outcome.itls), [10, 0]);
        assert_eq!((outcome.num_prompt_tokens, outcome.num_output_tokens), (7, 5));
        assert_eq!(outcome.text, "ab");
    }

    #[test]
    fn the_role_is_no_token() {
        let outcome = outcome(
            Api::Chat,
            &[
                (5, r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#),
                (20, r#"{"choices":[{"delta":{"reasoning_content":"hm"},"finish_reason":null}]}"#),
                (25, r#"{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}"#),
                (26, r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#),
                (27, "[DONE]"),
            ],
        );
        assert_eq!((outcome.error.as_deref(), outcome.ttft.as_millis()), (None, 20));
        assert_eq!((millis(&outcome.itls), outcome.text.as_str()), (vec![5], "hma"));
        // Without `usage`, events are counted.
        assert_eq!((outcome.num_output_tokens, outcome.has_usage), (2, false));
    }

    #[test]
    fn what_is_no_success() {
        let check = |events: &[(u64, &str)], wanted: &str| {
            let error = outcome(Api::Completions, events).error.unwrap_or_default();
            assert!(error.contains(wanted), "{error} should say {wanted}");
        };
        let token = (1, r#"{"choices":[{"text":"a","finish_reason":null}]}"#);
        check(&[], "ended before the answer");
        check(&[token], "ended before the answer");
        check(&[(1, "[DONE]")], "no token");
        check(&[token, (2, r#"{"error":{"message":"out of memory"}}"#), (3, "[DONE]")], "out of memory");
        check(&[token, (2, "{"), (3, "[DONE]")], "not JSON");
    }

    #[test]
    fn an_answer_of_nothing_but_its_end_has_a_time() {
        let end = r#"{"choices":[{"text":"","finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#;
        let outcome = outcome(Api::Completions, &[(9, end)]);
        assert_eq!((outcome.error.as_deref(), outcome.ttft.as_millis(), outcome.itls.len()), (None, 9, 0));
    }

    #[test]
    fn bodies() {
        let mut extra = Map::new();
        extra.insert("temperature".to_owned(), json!(0));
        let mut template = Template { api: Api::Completions, model: "m".to_owned(), ignore_eos: true, extra };
        let ids = Sample { prompt: Prompt::Ids(vec![1, 2]), num_prompt_tokens: 2, output_len: 5 };
        let body: Value = serde_json::from_slice(&template.body(&ids)).unwrap();
        let options = json!({"include_usage": true});
        let wanted = json!({"model": "m", "prompt": [1, 2], "max_tokens": 5, "stream": true,
            "stream_options": options, "ignore_eos": true, "temperature": 0});
        assert_eq!(body, wanted);
        template = Template { api: Api::Chat, ignore_eos: false, ..template };
        let text = Sample { prompt: Prompt::Text("hi".to_owned()), ..ids };
        let body: Value = serde_json::from_slice(&template.body(&text)).unwrap();
        assert_eq!(body["messages"], json!([{"role": "user", "content": "hi"}]));
        assert_eq!((body.get("ignore_eos"), body["max_completion_tokens"].as_u64()), (None, Some(5)));
    }
}
