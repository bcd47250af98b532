//! `/v1/chat/completions`: a conversation through the model's own template.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;
use serde_json::{Map, Value};

use super::super::error::ApiError;
use super::super::json::{Fields, describe, wrong_type};
use super::super::state::{App, Model};
use super::form::{Form, Kind};
use super::options::Options;
use super::prompt_report::PromptReport;
use super::{Prepared, generate, sampling, structured};
use crate::chat::{ChatOptions, Message};
use crate::engine::Request;

/// Variables that a request may give to the template. None of them can make it do more work than the
/// conversation itself, or stand for something that the server decides.
const TEMPLATE_VARIABLES: [&str; 5] =
    ["enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string"];
/// Most bytes of such a variable.
const MAX_VARIABLE_BYTES: usize = 256;

/// Answers a conversation.
pub(in super::super) async fn handle(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    generate(app, request, parse).await
}

fn parse(model: &Model, mut fields: Fields) -> Result<Prepared, ApiError> {
    let mut params = sampling::parse(&mut fields)?;
    params.max_tokens = max_tokens(&mut fields)?;
    params.logprobs = logprobs(&mut fields)?;
    let options = Options::parse(&mut fields, &params.stop)?;
    if fields.bool("echo")?.unwrap_or(false) {
        return Err(ApiError::unsupported("echo", "echo is not supported in chats; use /v1/completions"));
    }
    let output = structured::parse(&mut fields)?;
    let prompt_token_ids = encode(model, &mut fields, true)?;
    let has_logprobs = params.logprobs.is_some();
    let mut request = Request::new(prompt_token_ids, params);
    request.cache_salt.clone_from(&options.cache_salt);
    request.prompt_logprobs = options.prompt_logprobs;
    request.constraint = output.map(|output| output.compile(model)).transpose()?;
    let engine = model.llm.engine();
    request
        .validate(engine.model_limits(), engine.config())
        .map_err(|error| ApiError::from(error).or_param("messages"))?;
    let mut requests = vec![request];
    let mut form = Form::new(Kind::Chat, model, &requests, &options, has_logprobs);
    form.set_prompt_report(PromptReport::prepare(&mut requests, options.prompt_logprobs, None)?);
    Ok(Prepared { requests, options, form })
}

/// The token ids of the conversation in `messages`.
pub(super) fn encode(
    model: &Model,
    fields: &mut Fields,
    add_generation_prompt: bool,
) -> Result<Vec<u32>, ApiError> {
    let messages = messages(fields)?;
    let options = ChatOptions {
        add_generation_prompt: fields.bool("add_generation_prompt")?.unwrap_or(add_generation_prompt),
        tools: None,
        variables: template_variables(fields)?,
    };
    let num_bytes: usize = messages.iter().map(|message| message.content.len()).sum();
    check_text_len(model, "messages", num_bytes)?;
    model.llm.encode_chat(&messages, &options).map_err(|error| ApiError::from(error).or_param("messages"))
}

/// Refuses a text that is too long for certain, before work is put into it.
pub(super) fn check_text_len(model: &Model, param: &'static str, num_bytes: usize) -> Result<(), ApiError> {
    if num_bytes <= model.max_text_bytes {
        return Ok(());
    }
    let message = format!(
        "{param} has {num_bytes} bytes of text, more than a context window of {} tokens can hold",
        model.llm.engine().config().max_model_len
    );
    Err(ApiError::from(crate::Error::new(crate::ErrorKind::ContextLength, message)).or_param(param))
}

/// The newer name wins; both may be given if they agree.
fn max_tokens(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let old = fields.unsigned("max_tokens")?;
    let new = fields.unsigned("max_completion_tokens")?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(ApiError::invalid(
            "max_tokens",
            format!("max_tokens is {old}, but max_completion_tokens is {new}; give one of them"),
        )),
        _ => Ok(new.or(old)),
    }
}

fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let num_top = fields.unsigned("top_logprobs")?;
    match num_top {
        Some(num_top) if !wanted && num_top > 0 => {
            let message = format!("top_logprobs is {num_top}, but logprobs is not true");
            Err(ApiError::invalid("top_logprobs", message))
        }
        Some(num_top) if num_top > 20 => {
            let message = format!("top_logprobs is {num_top}; it must be at most 20");
            Err(ApiError::invalid("top_logprobs", message))
        }
        _ => Ok(wanted.then(|| num_top.unwrap_or(0))),
    }
}

fn template_variables(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut variables = match fields.object("chat_template_kwargs")? {
        Some(variables) => variables.into_map(),
        None => Map::new(),
    };
    if let Some(effort) = fields.string("reasoning_effort")? {
        let other = variables.get("reasoning_effort").filter(|other| !other.is_null());
        if other.is_some_and(|other| *other != effort) {
            let message =
                "reasoning_effort and chat_template_kwargs.reasoning_effort differ; give one of them";
            return Err(ApiError::invalid("reasoning_effort", message));
        }
        variables.insert("reasoning_effort".to_owned(), effort.into());
    }
    for (name, value) in &variables {
        let param = format!("chat_template_kwargs.{name}");
        if !TEMPLATE_VARIABLES.contains(&name.as_str()) {
            let message =
                format!("{param} is not supported; a request may set {}", TEMPLATE_VARIABLES.join(", "));
            return Err(ApiError::unsupported(param, message));
        }
        let is_small = match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => true,
            Value::String(text) => text.len() <= MAX_VARIABLE_BYTES,
            Value::Array(_) | Value::Object(_) => false,
        };
        if !is_small {
            return Err(wrong_type(param, value, "true, false, a number or a short string"));
        }
    }
    Ok(variables)
}

fn messages(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let items = match fields.take("messages") {
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong_type("messages".to_owned(), &other, "a list of messages")),
        None => return Err(ApiError::invalid("messages", "messages is missing")),
    };
    if items.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty; there must be at least one message"));
    }
    items.into_iter().enumerate().map(|(index, item)| message(item, index)).collect()
}

fn message(item: Value, index: usize) -> Result<Message, ApiError> {
    let mut fields = Fields::inside(item, &format!("messages[{index}]"))?;
    let role = match fields.string("role")?.as_deref() {
        // What OpenAI calls the system message of newer models; templates know it under its old name.
        Some("system" | "developer") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        Some("tool" | "function") => {
            let message = format!("{} is a tool's answer; tools are not supported here", fields.path("role"));
            return Err(ApiError::unsupported(fields.path("role"), message));
        }
        Some(other) => {
            let message = format!(
                "{} is {}, expected system, developer, user or assistant",
                fields.path("role"),
                describe(&other.into())
            );
            return Err(ApiError::invalid(fields.path("role"), message));
        }
        None => {
            return Err(ApiError::invalid(
                fields.path("role"),
                format!("{} is missing", fields.path("role")),
            ));
        }
    };
    for name in ["tool_calls", "function_call", "audio"] {
        let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
        if fields.take(name).is_some_and(|value| !is_empty(&value)) {
            let path = fields.path(name);
            let message = format!("{path} is not supported here; leave it out");
            return Err(ApiError::unsupported(path, message));
        }
    }
    let content = content(&mut fields)?;
    let mut extra = Map::new();
    for name in ["name", "reasoning_content"] {
        if let Some(text) = fields.string(name)? {
            extra.insert(name.to_owned(), text.into());
        }
    }
    Ok(Message { extra, ..Message::new(role, content) })
}

/// A string, or parts of text, which become lines.
fn content(fields: &mut Fields) -> Result<String, ApiError> {
    let path = fields.path("content");
    let parts = match fields.take("content") {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong_type(path, &other, "a string or a list of parts")),
        None => {
            let message = format!("{path} is missing or null, expected a string or a list of parts");
            return Err(ApiError::invalid(path, message));
        }
    };
    let texts = parts.into_iter().enumerate().map(|(index, part)| {
        let path = format!("{path}[{index}]");
        let mut part = Fields::inside(part, &path)?;
        match part.string("type")?.as_deref() {
            Some("text") => part.string("text")?.ok_or_else(|| {
                let path = part.path("text");
                let message = format!("{path} is missing");
                ApiError::invalid(path, message)
            }),
            Some(kind) => {
                let message =
                    format!("{path} is of type {kind:?}, which is not supported: the model reads text only");
                Err(ApiError::unsupported(path, message))
            }
            None => Err(ApiError::invalid(part.path("type"), format!("{} is missing", part.path("type")))),
        }
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}
