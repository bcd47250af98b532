//! The messages of a conversation out of a body.

use serde_json::{Map, Value};

use super::super::error::ApiError;
use super::super::json::{Fields, describe, wrong_type};
use crate::chat::Message;

/// What parts of text have beside it: marks of where a cache is worth having, which there is everywhere, and what an
/// answer tells of itself.
const PART_EXTRAS: &[&str] = &["annotations", "cache_control", "citations", "logprobs"];

/// Takes the conversation out of the body.
pub(super) fn parse(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    items(fields)?.map(|fields| message(fields?)).collect()
}

/// Takes the list of messages, which has at least one.
pub(super) fn items(
    fields: &mut Fields,
) -> Result<impl Iterator<Item = Result<Fields, ApiError>> + use<>, ApiError> {
    let items = match fields.take("messages") {
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong_type("messages".to_owned(), &other, "a list of messages")),
        None => return Err(ApiError::invalid("messages", "messages is missing")),
    };
    if items.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty; there must be at least one message"));
    }
    Ok(fields.objects("messages", items))
}

/// Whether messages tell of tools that were called.
pub(super) fn speak_of_tools(messages: &[Message]) -> Option<usize> {
    messages.iter().position(|message| message.role == "tool" || message.extra.contains_key("tool_calls"))
}

/// Bytes of text in the messages.
pub(super) fn num_bytes(messages: &[Message]) -> usize {
    let extra = |message: &Message| message.extra.values().map(value_bytes).sum::<usize>();
    messages.iter().map(|message| message.content.len() + extra(message)).sum()
}

/// Bytes of text in a value, names included.
pub(super) fn value_bytes(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 1,
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(value_bytes).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + value_bytes(value)).sum(),
    }
}

fn message(mut fields: Fields) -> Result<Message, ApiError> {
    let role = match fields.string("role")?.as_deref() {
        // What OpenAI calls the system message of newer models; templates know it under its old name.
        Some("system" | "developer") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        Some("tool") => "tool",
        Some("function") => {
            let path = fields.path("role");
            let message =
                format!("{path} is \"function\", which is not supported; the role of answers is tool");
            return Err(ApiError::unsupported(path, message));
        }
        Some(other) => {
            let message = format!(
                "{} is {}, expected system, developer, user, assistant or tool",
                fields.path("role"),
                describe(&other.into())
            );
            return Err(ApiError::invalid(fields.path("role"), message));
        }
        None => return Err(missing(fields.path("role"))),
    };
    for name in ["function_call", "audio"] {
        if fields.take(name).is_some() {
            let path = fields.path(name);
            let message = format!("{path} is not supported here; leave it out");
            return Err(ApiError::unsupported(path, message));
        }
    }
    // What clients send back of an answer, beside what it says.
    fields.pass(&["annotations", "refusal"]);
    let mut extra = Map::new();
    let calls = tool_calls(&mut fields, role)?;
    let content = match calls.is_empty() {
        true => content(&mut fields)?,
        // An assistant that calls need not say anything.
        false => optional_content(&mut fields)?.unwrap_or_default(),
    };
    if !calls.is_empty() {
        extra.insert("tool_calls".to_owned(), calls.into());
    }
    match (fields.string("tool_call_id")?, role) {
        (Some(id), "tool") => drop(extra.insert("tool_call_id".to_owned(), id.into())),
        (None, "tool") => return Err(missing(fields.path("tool_call_id"))),
        (_, _) => {}
    }
    if let Some(name) = fields.string("name")? {
        extra.insert("name".to_owned(), name.into());
    }
    // vLLM's newer name and its older one. Templates read the older one.
    let newer = fields.string("reasoning")?;
    if let Some(text) = fields.string("reasoning_content")?.or(newer) {
        extra.insert("reasoning_content".to_owned(), text.into());
    }
    Ok(Message { extra, ..Message::new(role, content) })
}

/// The calls of an assistant, in the form that templates expect: arguments are an object.
fn tool_calls(fields: &mut Fields, role: &str) -> Result<Vec<Value>, ApiError> {
    let path = fields.path("tool_calls");
    let items = match fields.take("tool_calls") {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong_type(path, &other, "a list of calls")),
    };
    if !items.is_empty() && role != "assistant" {
        let message = format!("{path} is given, but the role is {role}; only an assistant calls tools");
        return Err(ApiError::invalid(path, message));
    }
    fields.objects("tool_calls", items).map(|call| tool_call(call?)).collect()
}

/// The arguments of a call as templates expect them: an object. What is none stays as the model wrote it.
pub(super) fn call_arguments(text: String) -> Value {
    match serde_json::from_str(&text) {
        Ok(Value::Object(arguments)) => Value::Object(arguments),
        _ if text.trim().is_empty() => Value::Object(Map::new()),
        _ => Value::String(text),
    }
}

/// A call in the form that templates expect.
pub(super) fn call(id: Option<String>, name: String, arguments: Value) -> Value {
    let mut call = Map::new();
    if let Some(id) = id {
        call.insert("id".to_owned(), id.into());
    }
    call.insert("type".to_owned(), "function".into());
    let function = Map::from_iter([("name".to_owned(), name.into()), ("arguments".to_owned(), arguments)]);
    call.insert("function".to_owned(), function.into());
    call.into()
}

fn tool_call(mut call: Fields) -> Result<Value, ApiError> {
    // Of a call that came in a stream.
    call.pass(&["index"]);
    if let Some(kind) = call.string("type")?.filter(|kind| kind != "function") {
        let path = call.path("type");
        let message = format!("{path} is {}, expected \"function\"", describe(&kind.into()));
        return Err(ApiError::unsupported(path, message));
    }
    let id = call.string("id")?;
    let mut function = call.object("function")?.ok_or_else(|| missing(call.path("function")))?;
    let name = function.string("name")?.ok_or_else(|| missing(function.path("name")))?;
    let arguments = match function.take("arguments") {
        None => Value::Object(Map::new()),
        Some(Value::Object(arguments)) => Value::Object(arguments),
        // Clients send back what the model wrote.
        Some(Value::String(text)) => call_arguments(text),
        Some(other) => return Err(wrong_type(function.path("arguments"), &other, "a string with JSON")),
    };
    Ok(self::call(id, name, arguments))
}

fn content(fields: &mut Fields) -> Result<String, ApiError> {
    optional_content(fields)?.ok_or_else(|| {
        let path = fields.path("content");
        let message = format!("{path} is missing or null, expected a string or a list of parts");
        ApiError::invalid(path, message)
    })
}

/// A string, or parts of text, which become lines.
fn optional_content(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let path = fields.path("content");
    let parts = match fields.take("content") {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text)),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong_type(path, &other, "a string or a list of parts")),
    };
    parts_of_text(fields.objects("content", parts), &["text"]).map(Some)
}

/// The text of parts of these types, as lines.
pub(super) fn parts_of_text(
    parts: impl Iterator<Item = Result<Fields, ApiError>>,
    types: &[&str],
) -> Result<String, ApiError> {
    let texts = parts.map(|part| {
        let mut part = part?;
        part.pass(PART_EXTRAS);
        match part.string("type")? {
            Some(kind) if types.contains(&kind.as_str()) => {
                part.string("text")?.ok_or_else(|| missing(part.path("text")))
            }
            Some(kind) => Err(not_text(part.place().to_owned(), &kind)),
            None => Err(missing(part.path("type"))),
        }
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// 400: there is something that the model cannot read.
pub(super) fn not_text(path: String, kind: &str) -> ApiError {
    let kind = describe(&kind.into());
    let message = format!("{path} is of type {kind}, which is not supported: the model reads text only");
    ApiError::unsupported(path, message)
}

/// 400: a field that must be there is not.
pub(super) fn missing(path: String) -> ApiError {
    let message = format!("{path} is missing");
    ApiError::invalid(path, message)
}
