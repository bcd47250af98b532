//! Fields that mean nothing here: told, or refused.

use serde_json::{Value, json};

use super::bad_inputs::check_error;
use super::client::Server;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn body(path: &str, change: &Value) -> Value {
    let mut body = match path {
        CHAT => json!({"messages": [{"role": "user", "content": "Hi", "refusal": "x"}]}),
        _ => json!({"prompt": "Hi"}),
    };
    body["max_tokens"] = 2.into();
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[test]
fn ignored_fields_are_told_in_the_answer_and_once_in_the_log() {
    let server = Server::start("--max-model-len 64");
    let extras = json!({"metadata": {"a": 1}, "store": true, "nothing": null, "a\r\nb": 1});
    for path in [CHAT, COMPLETIONS] {
        for stream in [false, true] {
            let mut change = extras.clone();
            change["stream"] = stream.into();
            let answer = server.post(path, &body(path, &change));
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(answer.header("x-ignored-fields"), Some("a??b, metadata, store"));
        }
        let answer = server.post(path, &body(path, &json!({"temperature": 0})));
        assert_eq!(answer.header("x-ignored-fields"), None);
        let options = json!({"stream": true, "stream_options": {"include_usage": true, "other": 1}});
        let answer = server.post(path, &body(path, &options));
        assert_eq!(answer.header("x-ignored-fields"), Some("stream_options.other"));
    }
    let many: Value =
        (0..100).map(|index| (format!("x{index:02}"), json!(1))).collect::<serde_json::Map<_, _>>().into();
    let answer = server.post("/tokenize", &{
        let mut body = json!({"prompt": "Hi"});
        many.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        body
    });
    assert!(answer.header("x-ignored-fields").unwrap().ends_with(", and 84 more"), "{}", answer.head);
    #[cfg(unix)]
    {
        server.signal(nix::sys::signal::Signal::SIGTERM);
        let (_, log) = server.wait();
        let notes: Vec<&String> = log.iter().filter(|line| line.starts_with("note: ")).collect();
        assert_eq!(notes.iter().filter(|line| line.contains("metadata")).count(), 1, "{notes:?}");
        assert!(notes[0].contains("a??b, metadata, store") && notes.len() == 3, "{notes:?}");
    }
}

#[test]
fn strict_fields_are_refused() {
    let server = Server::start("--max-model-len 64 --strict-fields");
    for path in [CHAT, COMPLETIONS] {
        server.post(path, &body(path, &json!({"nothing": null}))).success();
        let answer = server.post(path, &body(path, &json!({"metadata": {}, "store": true})));
        let unsupported = Some("unsupported_parameter");
        check_error("extras", &answer, 400, Some("metadata"), unsupported, "metadata, store mean nothing");
    }
}

#[test]
fn constraints_of_other_engines_are_refused_with_the_way_out() {
    let server = Server::start("--max-model-len 64");
    for path in [CHAT, COMPLETIONS] {
        for (name, way_out) in [
            ("grammar", "structured_outputs.grammar"),
            ("json_schema", "response_format"),
            ("regex", "structured_outputs.regex"),
            ("n_predict", "max_tokens"),
            ("guided_decoding_backend", "leave it out"),
        ] {
            let answer = server.post(path, &body(path, &json!({name: "x"})));
            check_error(name, &answer, 400, Some(name), Some("unsupported_parameter"), way_out);
        }
        let unknown = json!({"structured_outputs": {"regex": "a", "backend": "x"}});
        let answer = server.post(path, &body(path, &unknown));
        let param = Some("structured_outputs.backend");
        check_error("unknown", &answer, 400, param, Some("unsupported_parameter"), "not known");
    }
}
