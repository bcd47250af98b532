//! Parses the messages of a conversation.

use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::json::{Fields, describe, wrong_type};
use super::super::values::{self, ReadError};
use tinyvllm::chat::{Content, Message};

/// Fields of text parts besides the text: cache marks, which have no effect because every prefix is cached,
/// and reports of an answer.
const PART_EXTRAS: &[&str] = &["annotations", "cache_control", "citations", "logprobs"];

/// Types of parts that are text. Clients of several interfaces mix their names.
const TEXT_PARTS: [&str; 4] = ["input_text", "output_text", "refusal", "text"];

/// Parses the conversation.
pub(super) fn parse(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    items(fields)?.map(|fields| message(fields?)).collect()
}

/// Takes the list of messages, which must not be empty.
pub(super) fn items(
    fields: &mut Fields,
) -> Result<impl Iterator<Item = Result<Fields, ApiError>> + use<>, ApiError> {
    let items = fields.list("messages", "a list of messages")?;
    let items = items.ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
    if items.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty; there must be at least one message"));
    }
    Ok(fields.objects("messages", items))
}

/// The index of the first message with tool calls or a tool's result.
pub(super) fn speak_of_tools(messages: &[Message]) -> Option<usize> {
    messages.iter().position(|message| message.role == "tool" || message.extra.contains_key("tool_calls"))
}

/// Bytes of text in the messages.
pub(super) fn num_bytes(messages: &[Message]) -> usize {
    let extra = |message: &Message| message.extra.values().map(value_bytes).sum::<usize>();
    messages.iter().map(|message| message.content.as_text().len() + extra(message)).sum()
}

/// Bytes of text in a value, including names.
pub(super) fn value_bytes(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 1,
        Value::String(text) => text.len(),
        Value::Array(items) => 1 + items.iter().map(value_bytes).sum::<usize>(),
        Value::Object(fields) => {
            1 + fields.iter().map(|(name, value)| name.len() + value_bytes(value)).sum::<usize>()
        }
    }
}

fn message(mut fields: Fields) -> Result<Message, ApiError> {
    let role = match fields.string("role")?.as_deref() {
        // OpenAI's role for the system message of newer models. Templates know the old name.
        Some("system" | "developer") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        // `function` is the old name, from when a message had one call without an id.
        Some("tool" | "function") => "tool",
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
    // Fields of an answer that clients send back besides its text.
    fields.pass(&["annotations", "audio"]);
    let refusal = if role == "assistant" { fields.string("refusal")? } else { None };
    fields.pass(&["refusal"]);
    let mut extra = Map::new();
    let mut calls = tool_calls(&mut fields, role)?;
    if let Some(older) = fields.object("function_call")?.filter(|_| role == "assistant") {
        calls.push(called_function(older, None)?);
    }
    let content = match role {
        // An answer may have only reasoning, only calls, or nothing. Templates would write null as `None`; those that need
        // it next to calls get it for an empty text.
        "assistant" => match (content(&mut fields)?, refusal.filter(|text| !text.is_empty())) {
            (Content::Null, None) => Content::Text(String::new()),
            (content, None) => content,
            (Content::Text(text), Some(refusal)) if !text.is_empty() => {
                Content::Text(format!("{text}\n{refusal}"))
            }
            // The answer was a refusal.
            (_, Some(refusal)) => Content::Text(refusal),
        },
        // Some tools return nothing.
        "tool" => match content(&mut fields)? {
            Content::Missing => return Err(no_content(&fields)),
            Content::Null => Content::Text(String::new()),
            content => content,
        },
        _ => match content(&mut fields)? {
            Content::Text(text) => Content::Text(text),
            Content::Null | Content::Missing => return Err(no_content(&fields)),
        },
    };
    if !calls.is_empty() {
        extra.insert("tool_calls".to_owned(), calls.into());
    }
    let name = fields.string("name")?;
    if role == "tool" {
        let id = fields.string("tool_call_id")?;
        let id = id.or_else(|| name.clone()).ok_or_else(|| missing(fields.path("tool_call_id")))?;
        extra.insert("tool_call_id".to_owned(), id.into());
    }
    if let Some(name) = name {
        extra.insert("name".to_owned(), name.into());
    }
    // vLLM's newer name and its older one. Templates read the older one.
    let newer = fields.string("reasoning")?;
    if let Some(text) = fields.string("reasoning_content")?.or(newer) {
        extra.insert("reasoning_content".to_owned(), text.into());
    }
    Ok(Message { role: role.to_owned(), content, extra })
}

/// The calls of an assistant, in the format that templates expect: arguments are an object.
fn tool_calls(fields: &mut Fields, role: &str) -> Result<Vec<Value>, ApiError> {
    let path = fields.path("tool_calls");
    let Some(items) = fields.list("tool_calls", "a list of calls")? else { return Ok(Vec::new()) };
    if !items.is_empty() && role != "assistant" {
        let message = format!("{path} is given, but the role is {role}; only an assistant calls tools");
        return Err(ApiError::invalid(path, message));
    }
    fields.objects("tool_calls", items).map(|call| tool_call(call?)).collect()
}

/// The arguments of a call as an object, as templates and tools expect them. Text that is not an object,
/// because the model made an error or was cut off, is wrapped into one. Otherwise it would look like a call
/// without arguments.
///
/// # Errors
/// 429 or 413 if there is no memory for them.
pub(super) fn call_arguments(text: &str) -> Result<Value, ApiError> {
    match values::read(text.as_bytes()) {
        Ok(value @ (Value::Object(_) | Value::Null)) => as_object(value),
        Err(ReadError::Refused(refusal)) => Err(refusal),
        _ if text.trim().is_empty() => Ok(Value::Object(Map::new())),
        _ => Ok(json!({"INVALID_JSON": text})),
    }
}

/// The same for a parsed value.
pub(super) fn as_object(value: Value) -> Result<Value, ApiError> {
    match value {
        Value::Object(arguments) => Ok(Value::Object(arguments)),
        Value::Null => Ok(Value::Object(Map::new())),
        Value::String(text) => call_arguments(&text),
        other => Ok(json!({"INVALID_JSON": other.to_string()})),
    }
}

/// A call in the format that templates expect.
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
    // Part of a call in a stream.
    call.pass(&["index"]);
    let id = call.string("id")?;
    match call.string("type")?.as_deref() {
        // Its input is arbitrary text.
        Some("custom") => {
            let mut custom = call.object("custom")?.ok_or_else(|| missing(call.path("custom")))?;
            let name = custom.string("name")?.ok_or_else(|| missing(custom.path("name")))?;
            let input = custom.string("input")?.unwrap_or_default();
            Ok(self::call(id, name, json!({"input": input})))
        }
        Some(kind) if kind != "function" => {
            let path = call.path("type");
            let message =
                format!("{path} is {}, expected \"function\" or \"custom\"", describe(&kind.into()));
            Err(ApiError::unsupported(path, message))
        }
        _ => {
            let function = call.object("function")?.ok_or_else(|| missing(call.path("function")))?;
            called_function(function, id)
        }
    }
}

fn called_function(mut function: Fields, id: Option<String>) -> Result<Value, ApiError> {
    let name = function.string("name")?.ok_or_else(|| missing(function.path("name")))?;
    // Clients send back what the model wrote, which may be invalid.
    let arguments = as_object(function.take("arguments")?.unwrap_or_default())?;
    Ok(call(id, name, arguments))
}

fn no_content(fields: &Fields) -> ApiError {
    let path = fields.path("content");
    let message = format!("{path} is missing or null, expected a string or a list of parts");
    ApiError::invalid(path, message)
}

/// A string, or text parts, which are joined as lines.
fn content(fields: &mut Fields) -> Result<Content, ApiError> {
    let path = fields.path("content");
    let is_null = fields.is_null("content");
    let parts = match fields.take_unread("content") {
        None if is_null => return Ok(Content::Null),
        None => return Ok(Content::Missing),
        Some(parts) if parts.is_list() => parts.into_items()?,
        Some(other) => match other.read()? {
            Value::String(text) => return Ok(Content::Text(text)),
            other => return Err(wrong_type(path, &other, "a string or a list of parts")),
        },
    };
    text_parts(fields.objects("content", parts), &TEXT_PARTS).map(Content::Text)
}

/// The text of parts with these types, joined as lines.
pub(super) fn text_parts(
    parts: impl Iterator<Item = Result<Fields, ApiError>>,
    types: &[&str],
) -> Result<String, ApiError> {
    let texts = parts.map(|part| {
        let mut part = part?;
        part.pass(PART_EXTRAS);
        match part.string("type")? {
            Some(kind) if types.contains(&kind.as_str()) => {
                let field = if kind == "refusal" { "refusal" } else { "text" };
                part.string(field)?.ok_or_else(|| missing(part.path(field)))
            }
            Some(kind) => Err(not_text(part.own_path().to_owned(), &kind)),
            None => Err(missing(part.path("type"))),
        }
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// 400: the content is not text.
pub(super) fn not_text(path: String, kind: &str) -> ApiError {
    let kind = describe(&kind.into());
    let message = format!("{path} is of type {kind}, which is not supported: the model reads text only");
    ApiError::unsupported(path, message)
}

/// 400: a required field is missing.
pub(super) fn missing(path: String) -> ApiError {
    let message = format!("{path} is missing");
    ApiError::invalid(path, message)
}

#[cfg(test)]
mod tests {
    use super::super::super::json::parse_object;
    use super::*;

    #[test]
    fn a_missing_content_differs_from_an_empty_text() {
        let check = |message: Value, expected: Option<Content>| {
            let body = json!({"messages": [message]}).to_string();
            let parsed = parse(&mut parse_object(body.as_bytes()).unwrap());
            assert_eq!(parsed.ok().map(|messages| messages[0].content.clone()), expected, "{message}");
        };
        let text = |text: &str| Some(Content::Text(text.to_owned()));
        let call = json!([{"id": "1", "function": {"name": "f", "arguments": "{}"}}]);
        check(json!({"role": "assistant", "content": "", "tool_calls": call}), text(""));
        check(json!({"role": "assistant", "content": [], "tool_calls": call}), text(""));
        check(json!({"role": "assistant", "content": null, "tool_calls": call}), text(""));
        check(json!({"role": "assistant", "tool_calls": call}), Some(Content::Missing));
        check(json!({"role": "assistant", "content": null, "reasoning_content": "x"}), text(""));
        check(json!({"role": "tool", "tool_call_id": "1", "content": null}), text(""));
        check(json!({"role": "assistant", "content": null, "refusal": "No."}), text("No."));
        check(json!({"role": "assistant", "content": "So", "refusal": "No."}), text("So\nNo."));
        check(json!({"role": "assistant", "content": "So", "refusal": null}), text("So"));
        let parts = ["text", "input_text", "output_text"].map(|kind| json!({"type": kind, "text": kind}));
        check(json!({"role": "user", "content": parts}), text("text\ninput_text\noutput_text"));
        check(json!({"role": "tool", "tool_call_id": "1"}), None);
        for role in ["user", "system", "developer"] {
            check(json!({"role": role, "content": null}), None);
            check(json!({"role": role, "content": "x"}), text("x"));
        }
    }
}
