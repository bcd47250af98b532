//! The conversation of a request, as messages for a template.

use serde_json::Value;

use super::super::super::error::ApiError;
use super::super::super::json::{Fields, describe, wrong_type};
use super::super::messages::{self, call, missing, not_text, parts_of_text};
use crate::chat::Message;

/// The messages for the template.
#[derive(Debug, Default)]
pub(super) struct Turns {
    pub(super) messages: Vec<Message>,
    /// The first place that speaks of tools.
    pub(super) about_tools: Option<String>,
    /// The last turn is the beginning of the answer.
    pub(super) is_begun: bool,
}

/// What blocks have that changes nothing here: marks of where a cache is worth having, which there is everywhere, and
/// what only their writer can read.
const BLOCK_EXTRAS: &[&str] = &["cache_control", "citations", "data", "signature"];

/// Takes the system prompt and the conversation out of the body.
pub(super) fn parse(fields: &mut Fields) -> Result<Turns, ApiError> {
    let mut turns = Turns::default();
    if let Some(system) = text(fields, "system")?.filter(|text| !text.is_empty()) {
        turns.messages.push(Message::new("system", system));
    }
    for message in messages::items(fields)? {
        let mut message = message?;
        let role = message.string("role")?.ok_or_else(|| missing(message.path("role")))?;
        let is_answer = match role.as_str() {
            "user" => false,
            "assistant" => true,
            other => {
                let path = message.path("role");
                let other = describe(&other.into());
                let message =
                    format!("{path} is {other}, expected user or assistant; system is a field of its own");
                return Err(ApiError::invalid(path, message));
            }
        };
        let path = message.path("content");
        let blocks = match message.take("content") {
            Some(Value::String(text)) => vec![serde_json::json!({"type": "text", "text": text})],
            Some(Value::Array(blocks)) if !blocks.is_empty() => blocks,
            Some(Value::Array(_)) => {
                return Err(ApiError::invalid(
                    path.clone(),
                    format!("{path} is empty; it must have a block"),
                ));
            }
            Some(other) => return Err(wrong_type(path, &other, "a string or a list of blocks")),
            None => return Err(missing(path)),
        };
        let blocks = message.objects("content", blocks);
        match is_answer {
            true => turns.add_assistant(blocks)?,
            false => turns.add_user(blocks)?,
        }
    }
    turns.is_begun = turns.ends_with_answer()?;
    Ok(turns)
}

impl Turns {
    /// What the user says and what tools answered, in their order.
    fn add_user(&mut self, blocks: impl Iterator<Item = Result<Fields, ApiError>>) -> Result<(), ApiError> {
        for block in blocks {
            let mut block = block?;
            block.pass(BLOCK_EXTRAS);
            match block.string("type")?.as_deref() {
                Some("text") => {
                    let text = block.string("text")?.ok_or_else(|| missing(block.path("text")))?;
                    // Turns of the same side that follow each other are one.
                    match self.messages.last_mut().filter(|message| message.role == "user") {
                        Some(message) => append_line(&mut message.content, &text),
                        None => self.messages.push(Message::new("user", text)),
                    }
                }
                Some("tool_result") => {
                    self.about_tools.get_or_insert_with(|| block.place().to_owned());
                    let id =
                        block.string("tool_use_id")?.ok_or_else(|| missing(block.path("tool_use_id")))?;
                    let mut message = Message::new("tool", text(&mut block, "content")?.unwrap_or_default());
                    message.extra.insert("tool_call_id".to_owned(), id.into());
                    if block.bool("is_error")?.unwrap_or(false) {
                        message.extra.insert("is_error".to_owned(), true.into());
                    }
                    self.messages.push(message);
                }
                Some(kind) => return Err(not_text(block.place().to_owned(), kind)),
                None => return Err(missing(block.path("type"))),
            }
        }
        Ok(())
    }

    fn add_assistant(
        &mut self,
        blocks: impl Iterator<Item = Result<Fields, ApiError>>,
    ) -> Result<(), ApiError> {
        let before = self.messages.pop_if(|message| message.role == "assistant");
        let mut message = before.unwrap_or_else(|| Message::new("assistant", ""));
        for block in blocks {
            let mut block = block?;
            block.pass(BLOCK_EXTRAS);
            match block.string("type")?.as_deref() {
                Some("text") => {
                    let text = block.string("text")?.ok_or_else(|| missing(block.path("text")))?;
                    append_line(&mut message.content, &text);
                }
                Some("thinking") => {
                    let text = block.string("thinking")?.ok_or_else(|| missing(block.path("thinking")))?;
                    let so_far = message.extra.entry("reasoning_content").or_insert_with(|| "".into());
                    if let Value::String(so_far) = so_far {
                        append_line(so_far, &text);
                    }
                }
                // Nobody but its writer can read it.
                Some("redacted_thinking") => {}
                Some("tool_use") => {
                    let id = block.string("id")?.ok_or_else(|| missing(block.path("id")))?;
                    let name = block.string("name")?.ok_or_else(|| missing(block.path("name")))?;
                    let input = match block.take("input") {
                        Some(input @ Value::Object(_)) => input,
                        Some(other) => return Err(wrong_type(block.path("input"), &other, "an object")),
                        None => return Err(missing(block.path("input"))),
                    };
                    let calls = message.extra.entry("tool_calls").or_insert_with(|| Value::Array(Vec::new()));
                    if let Value::Array(calls) = calls {
                        calls.push(call(Some(id), name, input));
                    }
                    self.about_tools.get_or_insert_with(|| block.place().to_owned());
                }
                Some(kind) => return Err(not_text(block.place().to_owned(), kind)),
                None => return Err(missing(block.path("type"))),
            }
        }
        self.messages.push(message);
        Ok(())
    }

    /// Whether the last turn is one of the assistant, which then has to be text that a model can go on with.
    fn ends_with_answer(&self) -> Result<bool, ApiError> {
        let Some(last) = self.messages.last().filter(|message| message.role == "assistant") else {
            return Ok(false);
        };
        let what = if last.extra.contains_key("tool_calls") {
            "calls tools; add a turn of the user with a tool_result for each call"
        } else if last.content.is_empty() {
            "has no text to go on with; leave it out"
        } else if last.content.ends_with(char::is_whitespace) {
            "ends with white space, after which models go on badly; trim it"
        } else {
            return Ok(true);
        };
        let message = format!("messages ends with a turn of the assistant that {what}");
        Err(ApiError::invalid("messages", message))
    }
}

/// A string or blocks of text, which become lines.
fn text(fields: &mut Fields, name: &str) -> Result<Option<String>, ApiError> {
    let path = fields.path(name);
    match fields.take(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Array(blocks)) => parts_of_text(fields.objects(name, blocks), &["text"]).map(Some),
        Some(other) => Err(wrong_type(path, &other, "a string or a list of blocks")),
    }
}

fn append_line(to: &mut String, text: &str) {
    if !to.is_empty() {
        to.push('\n');
    }
    to.push_str(text);
}
