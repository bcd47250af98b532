//! Whatever the server says it takes back: every kind of answer, wherever it is cut off, whole and streamed, as what was
//! said before in each interface.

use std::collections::BTreeSet;
use std::sync::Mutex;

use serde_json::{Map, Value, json};

use super::client::{Server, named_events};
use super::scripted::scripted_model;
use super::{anthropic, ollama, responses, tools};

/// The request names the script. Earlier turns are written in this model's format.
const TEMPLATE: &str = r#"
{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}
{%- for message in messages -%}
  {{ message.role }}: {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
  {{ message.content or '' }}
  {%- for call in message.tool_calls or [] -%}
    <tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {
    {%- for name, value in call.function.arguments.items() -%}{{ name | tojson }}: {{ value | tojson }}{%- endfor -%}
    }}</tool_call>
  {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|{{ say }}|>{%- endif -%}
"#;

/// A template that takes what was said and what was called for texts, as many do.
const TEXTS: &str = r#"
{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}
{%- for message in messages -%}
  {{- message.role + ': ' + message.content -}}
  {%- for call in message.tool_calls or [] -%}
    {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}</tool_call>' -}}
  {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|{{ say }}|>{%- endif -%}
"#;

/// What can be said, by its name.
const ANSWERS: &[(&str, &str)] = &[
    ("nothing", ""),
    ("text", "Hello, it is <b>fine</b> \u{fffd} today.\n"),
    ("space", "\n \n "),
    ("thoughts", "<think>Only thoughts, \u{fffd} no more.</think>"),
    ("both", "<think>\nLet me see.\n</think>\n\nSo it is: sunny 🦙.\n"),
    ("twice", "<think>First.</think>One. <think>Second!</think>Two?"),
    (
        "call",
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rôme 🦙\", \"days\": [2, null, true]}}\n</tool_call>",
    ),
    (
        "everything",
        "<think>Rome, then? </think> I'll look. <tool_call>{\"name\": \"get_weather\", \"arguments\": {}}</tool_call>\n\
         <tool_call> {\"name\": \"get_time\",\"arguments\":{\"zone\": {\"a\": [1.5e3]}}} </tool_call> And then.",
    ),
    ("null", "<tool_call>{ \"name\":\"get_time\", \"arguments\": null }</tool_call>"),
    ("list", "<tool_call> {\"name\" : \"get_time\", \"arguments\": [1,2] }\n</tool_call>"),
    ("string", "<tool_call>\n {\"arguments\": \"[1,\", \"name\": \"get_time\"}</tool_call>"),
    (
        "quoted",
        "<tool_call>{\"name\":  \"get_time\", \"arguments\" : \"{\\\"a\\\": \\\"b\\\"}\"}</tool_call>",
    ),
    ("without", "<tool_call>{\"name\" :\"get_time\" }</tool_call>"),
    (
        "surrogate",
        "<tool_call>{\"name\":\"get_weather\", \"arguments\":{\"city\":\"\\ud83d\", \"\\udc00\": \"\u{fffd}\"}}</tool_call>",
    ),
    ("broken", "<tool_call>{\"name\": \"get_time\" , \"arguments\":  {\"a\": }, 5]}</tool_call>"),
    ("unknown", "<tool_call>{\"name\": \"no_such_tool\", \"arguments\": {\"b\": \"}\"}}</tool_call>"),
    ("nameless", "<tool_call>{\"name\": 5} </tool_call> and </think> <tool_call>[7, "),
    (
        "inside",
        "<think>I call. <tool_call>{\"name\": \"get_time\", \"arguments\": {\"in\": 1}}</tool_call> There.",
    ),
];

/// Arguments that other servers and other tool-call formats leave in a conversation that continues here.
const ODD_ARGUMENTS: &[&str] = &[
    "null",
    "[1,2]",
    "\"Rome\"",
    "\"{\\\"a\\\": 1}\"",
    "-5",
    "true",
    "",
    " ",
    "{\"city\": \"R",
    "Rome, please",
    "\u{fffd}",
];

/// The final turn.
const GO_ON: (&str, &str) = ("on", "Fine.");

/// An interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Interface {
    Chats,
    Responses,
    Messages,
    Ollama,
}

const INTERFACES: [Interface; 4] =
    [Interface::Chats, Interface::Responses, Interface::Messages, Interface::Ollama];

/// A part of an answer, in no interface's words.
#[derive(Debug, Clone)]
enum Part {
    Reasoning(String),
    Text(String),
    /// The id, the name and the arguments.
    Call(String, String, String),
}

impl Part {
    fn call_id(&self) -> Option<&String> {
        match self {
            Self::Call(id, ..) => Some(id),
            Self::Reasoning(_) | Self::Text(_) => None,
        }
    }
}

/// An answer as its client gets it.
struct Reply {
    /// As what was said before in its own interface: a list of messages or items.
    own: Value,
    parts: Vec<Part>,
    is_cut_off: bool,
    /// Under which it is kept.
    id: Option<String>,
}

impl Interface {
    fn path(self) -> &'static str {
        match self {
            Self::Chats => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::Ollama => "/api/chat",
        }
    }

    /// A request that continues this conversation, for an answer by its name.
    fn request(self, turns: Vec<Value>, say: &str, max_tokens: usize) -> Value {
        let schema = json!({"type": "object"});
        let tools: Vec<Value> = ["get_weather", "get_time"]
            .map(|name| match self {
                Self::Chats | Self::Ollama => {
                    json!({"type": "function", "function": {"name": name, "parameters": schema}})
                }
                Self::Responses => json!({"type": "function", "name": name, "parameters": schema}),
                Self::Messages => json!({"name": name, "input_schema": schema}),
            })
            .to_vec();
        let mut body = json!({"temperature": 0, "tools": tools, "chat_template_kwargs": {"say": say}});
        let (field, limit) = match self {
            Self::Ollama => {
                body["messages"] = turns.into();
                body["options"] = json!({"temperature": 0, "num_predict": max_tokens});
                body.as_object_mut().unwrap().remove("temperature");
                return body;
            }
            Self::Chats | Self::Messages => ("messages", "max_tokens"),
            Self::Responses => ("input", "max_output_tokens"),
        };
        body[field] = turns.into();
        body[limit] = max_tokens.into();
        body
    }

    /// What a client gets, at once or put together from a stream.
    fn ask(self, server: &Server, mut body: Value, is_stream: bool) -> Reply {
        body["stream"] = is_stream.into();
        let answer = server.post(self.path(), &body);
        assert_eq!(answer.status, 200, "{body}: {}", answer.text());
        match self {
            Self::Chats => {
                let (message, reason) = match is_stream {
                    true => tools::joined(&answer.events()),
                    false => {
                        let choice = answer.json()["choices"][0].clone();
                        (choice["message"].clone(), choice["finish_reason"].clone())
                    }
                };
                Reply {
                    parts: parts_of_message(&message),
                    own: json!([message]),
                    is_cut_off: reason == "length",
                    id: None,
                }
            }
            Self::Responses => {
                let response = match is_stream {
                    true => responses::joined(&named_events(&answer)),
                    false => answer.json(),
                };
                let own = response["output"].clone();
                Reply {
                    parts: list(&own).iter().map(part_of_item).collect(),
                    own,
                    is_cut_off: response["status"] == "incomplete",
                    id: Some(text(&response["id"])),
                }
            }
            Self::Messages => {
                let message = match is_stream {
                    true => anthropic::joined(&named_events(&answer)),
                    false => answer.json(),
                };
                let parts = list(&message["content"]).iter().map(part_of_block).collect();
                let own = json!([{"role": "assistant", "content": message["content"]}]);
                Reply { parts, own, is_cut_off: message["stop_reason"] == "max_tokens", id: None }
            }
            Self::Ollama => {
                let whole = match is_stream {
                    true => ollama::joined(self.path(), &ollama::lines(&answer)),
                    false => answer.json(),
                };
                let message = &whole["message"];
                Reply {
                    parts: parts_of_ollama(message),
                    own: json!([message]),
                    is_cut_off: whole["done_reason"] == "length",
                    id: None,
                }
            }
        }
    }

    /// An answer of another interface as clients write it for this one.
    fn translated(self, parts: &[Part]) -> Value {
        match self {
            Self::Chats => message_of(parts),
            Self::Responses => parts.iter().map(item_of).collect(),
            Self::Messages => {
                json!([{"role": "assistant", "content": parts.iter().map(block_of).collect::<Vec<_>>()}])
            }
            Self::Ollama => ollama_of(parts),
        }
    }

    /// What follows an answer: the results of its calls, or a word of the user, or both.
    fn reply(self, parts: &[Part], has_word: bool) -> Vec<Value> {
        let ids = parts.iter().filter_map(Part::call_id);
        let word = json!({"role": "user", "content": "Go on."});
        let word = Some(word).filter(|_| has_word || ids.clone().next().is_none());
        match self {
            Self::Messages => {
                let result =
                    |id: &String| json!({"type": "tool_result", "tool_use_id": id, "content": "done"});
                let mut content: Vec<Value> = ids.map(result).collect();
                content.extend(word.map(|word| json!({"type": "text", "text": word["content"]})));
                vec![json!({"role": "user", "content": content})]
            }
            Self::Chats | Self::Ollama => ids
                .map(|id| json!({"role": "tool", "tool_call_id": id, "content": "done"}))
                .chain(word)
                .collect(),
            Self::Responses => ids
                .map(|id| json!({"type": "function_call_output", "call_id": id, "output": "done"}))
                .chain(word)
                .collect(),
        }
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_owned()
}

fn parts_of_message(message: &Value) -> Vec<Part> {
    let mut parts = Vec::new();
    parts.extend(message["reasoning_content"].as_str().map(|text| Part::Reasoning(text.to_owned())));
    parts.extend(message["content"].as_str().map(|text| Part::Text(text.to_owned())));
    parts.extend(message["tool_calls"].as_array().into_iter().flatten().map(|call| {
        let function = &call["function"];
        Part::Call(text(&call["id"]), text(&function["name"]), text(&function["arguments"]))
    }));
    parts
}

fn parts_of_ollama(message: &Value) -> Vec<Part> {
    let mut parts = Vec::new();
    parts.extend(message["thinking"].as_str().map(|text| Part::Reasoning(text.to_owned())));
    parts.extend(message["content"].as_str().map(|text| Part::Text(text.to_owned())));
    parts.extend(message["tool_calls"].as_array().into_iter().flatten().map(|call| {
        let function = &call["function"];
        Part::Call(text(&call["id"]), text(&function["name"]), function["arguments"].to_string())
    }));
    parts
}

/// The same message as ollama has it: thoughts under another name, and arguments that are values.
fn ollama_of(parts: &[Part]) -> Value {
    let mut messages = message_of(parts);
    let message = messages[0].as_object_mut().unwrap();
    if let Some(thoughts) = message.remove("reasoning_content") {
        message.insert("thinking".to_owned(), thoughts);
    }
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let arguments = &mut call["function"]["arguments"];
        // What is no JSON stays the text that it is.
        if let Ok(value) = serde_json::from_str(&text(arguments)) {
            *arguments = value;
        }
    }
    messages
}

fn part_of_item(item: &Value) -> Part {
    match item["type"].as_str().unwrap() {
        "reasoning" => Part::Reasoning(text(&item["content"][0]["text"])),
        "message" => Part::Text(text(&item["content"][0]["text"])),
        "function_call" => Part::Call(text(&item["call_id"]), text(&item["name"]), text(&item["arguments"])),
        other => panic!("{other}"),
    }
}

fn part_of_block(block: &Value) -> Part {
    match block["type"].as_str().unwrap() {
        "thinking" => Part::Reasoning(text(&block["thinking"])),
        "text" => Part::Text(text(&block["text"])),
        "tool_use" => Part::Call(text(&block["id"]), text(&block["name"]), block["input"].to_string()),
        other => panic!("{other}"),
    }
}

fn message_of(parts: &[Part]) -> Value {
    let mut message = json!({"role": "assistant", "content": null});
    let mut calls = Vec::new();
    let append =
        |value: &Value, text: &str| Value::from(value.as_str().unwrap_or_default().to_owned() + text);
    for part in parts {
        match part {
            Part::Reasoning(text) => {
                message["reasoning_content"] = append(&message["reasoning_content"], text)
            }
            Part::Text(text) => message["content"] = append(&message["content"], text),
            Part::Call(id, name, arguments) => {
                calls.push(
                    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}),
                );
            }
        }
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    json!([message])
}

fn item_of(part: &Part) -> Value {
    match part {
        Part::Reasoning(text) => {
            json!({"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text}]})
        }
        Part::Text(text) => {
            let content = json!([{"type": "output_text", "text": text, "annotations": []}]);
            json!({"type": "message", "role": "assistant", "content": content})
        }
        Part::Call(id, name, arguments) => {
            json!({"type": "function_call", "call_id": id, "name": name, "arguments": arguments})
        }
    }
}

fn block_of(part: &Part) -> Value {
    match part {
        Part::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Part::Text(text) => json!({"type": "text", "text": text}),
        Part::Call(id, name, arguments) => {
            // What is no JSON stays the text that it is.
            let input: Value = serde_json::from_str(arguments).unwrap_or_else(|_| arguments.as_str().into());
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

/// The same without the ids, which differ each time.
fn without_ids(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(without_ids).collect(),
        Value::Object(fields) => {
            let kept = fields.iter().filter(|(name, _)| !["id", "call_id"].contains(&name.as_str()));
            kept.map(|(name, value)| (name.clone(), without_ids(value))).collect::<Map<_, _>>().into()
        }
        other => other.clone(),
    }
}

/// Servers and their inputs.
struct Round {
    /// Answers by a script, and stores responses.
    speaker: Server,
    /// With a template each.
    listeners: Vec<Server>,
    seen: Mutex<BTreeSet<String>>,
}

impl Round {
    /// Gets an answer in one interface, up to every token, and continues it in all of them.
    fn check(&self, from: Interface, name: &str) {
        let hello = vec![json!({"role": "user", "content": "Hello"})];
        for (max_tokens, is_stream) in (1..).flat_map(|max| [(max, false), (max, true)]) {
            let said = from.ask(&self.speaker, from.request(hello.clone(), name, max_tokens), is_stream);
            let translated = INTERFACES.map(|to| (to, to.translated(&said.parts)));
            let is_new =
                |to, turns| self.seen.lock().unwrap().insert(format!("{to:?} {}", without_ids(turns)));
            let is_first = is_new(from, &said.own);
            if is_first {
                self.go_on(from, list(&said.own), &said.parts);
            }
            for (to, turns) in translated.iter().filter(|(to, turns)| is_new(*to, turns)) {
                self.go_on(*to, list(turns), &said.parts);
            }
            if let Some(id) = said.id.as_ref().filter(|_| is_first) {
                let mut body = from.request(from.reply(&said.parts, false), GO_ON.0, 1);
                body["previous_response_id"] = id.as_str().into();
                accepted(&self.speaker, from.path(), &body);
            }
            if is_stream && !said.is_cut_off {
                return;
            }
        }
    }

    /// Goes on with an answer in an interface.
    fn go_on(&self, to: Interface, said: &[Value], parts: &[Part]) {
        let request = |has_word| {
            let hello = json!({"role": "user", "content": "Hello"});
            let reply = to.reply(parts, has_word);
            to.request([hello].iter().chain(said).chain(&reply).cloned().collect(), GO_ON.0, 1)
        };
        let body = request(false);
        self.listeners.iter().for_each(|server| accepted(server, to.path(), &body));
        // Clients may know of no tools any more, or count first.
        let mut body = request(true);
        body["tools"] = Value::Null;
        let path = match to {
            Interface::Chats => "/tokenize",
            Interface::Responses | Interface::Ollama => to.path(),
            Interface::Messages => "/v1/messages/count_tokens",
        };
        accepted(&self.listeners[0], path, &body);
    }
}

#[track_caller]
fn accepted(server: &Server, path: &str, body: &Value) {
    let answer = server.post(path, body);
    assert_eq!(answer.status, 200, "{path} refuses {body}: {}", answer.text());
    let ignored = answer.header("x-ignored-fields").unwrap_or_default();
    // What is counted has no limit.
    let is_left_out = |name: &&str| !["max_tokens", "temperature"].contains(name);
    assert_eq!(ignored.split(", ").filter(|name| !name.is_empty()).find(is_left_out), None, "{path} {body}");
}

/// A server that says these with this template.
fn serve(template: &str, answers: &[(&str, &str)]) -> Server {
    let all: Vec<(String, &str)> =
        answers.iter().map(|(name, text)| (format!("<|{name}|>"), *text)).collect();
    let scripts: Vec<(&str, &str)> = all.iter().map(|(start, text)| (start.as_str(), *text)).collect();
    let model = scripted_model(template, &[], &scripts);
    let flags = "--tool-call-parser hermes --reasoning-parser qwen3 --responses-memory 1000";
    Server::start(&format!("--model {} {flags}", model.path().display()))
}

#[test]
fn the_server_accepts_its_own_answers_as_history() {
    let listeners = [TEMPLATE, TEXTS].map(|template| serve(template, &[GO_ON])).into();
    let mut round = Round { speaker: serve(TEMPLATE, &[GO_ON]), listeners, seen: Mutex::default() };
    // A model has each chunk of text once.
    for answers in ANSWERS.chunks(3) {
        round.speaker = serve(TEMPLATE, &[answers, &[GO_ON]].concat());
        let round = &round;
        std::thread::scope(|scope| {
            for from in INTERFACES {
                scope.spawn(move || answers.iter().for_each(|(name, _)| round.check(from, name)));
            }
        });
    }
    for (to, arguments) in INTERFACES.iter().flat_map(|to| ODD_ARGUMENTS.iter().map(move |odd| (*to, *odd))) {
        let parts = [Part::Call("call_1".to_owned(), "get_time".to_owned(), arguments.to_owned())];
        round.go_on(to, list(&to.translated(&parts)), &parts);
    }
    // Answers that differ are distinguished, so that none is missed.
    let num_histories = round.seen.lock().unwrap().len();
    assert!(num_histories > 1600, "{num_histories}");
}
