//! Converts the conversation of a request into messages for a template.

use serde_json::{Value, json};

use super::super::super::error::ApiError;
use super::super::super::json::{Fields, describe, wrong_type};
use super::super::messages::{self, call, missing, not_text};
use tinyvllm::chat::{Content, Message};

/// The messages for the template.
#[derive(Debug, Default)]
pub(super) struct AnthropicTurns {
    pub(super) messages: Vec<Message>,
    /// The first path with tools.
    pub(super) about_tools: Option<String>,
    /// The first path that marks a result as an error.
    pub(super) error_mark: Option<String>,
    /// Whether the answer continues the last turn.
    pub(super) is_begun: bool,
}

/// Fields of blocks that have no effect here: cache marks, because every prefix is cached, and data that only
/// its writer can read.
const BLOCK_EXTRAS: &[&str] = &["cache_control", "caller", "citations", "data", "signature"];

/// Parses the system prompt and the conversation.
pub(super) fn parse(fields: &mut Fields) -> Result<AnthropicTurns, ApiError> {
    let mut turns = AnthropicTurns::default();
    if let Some(system) = text(fields, "system")? {
        turns.add_system(system);
    }
    for message in messages::items(fields)? {
        let mut message = message?;
        let role = message.string("role")?.ok_or_else(|| missing(message.path("role")))?;
        let path = message.path("content");
        let blocks = match message.take_unread("content") {
            None => return Err(missing(path)),
            Some(blocks) if blocks.is_list() => blocks.into_items()?,
            Some(other) => match other.read()? {
                Value::String(text) => vec![json!({"type": "text", "text": text}).into()],
                other => return Err(wrong_type(path, &other, "a string or a list of blocks")),
            },
        };
        let mut blocks = message.objects("content", blocks);
        match role.as_str() {
            "user" => turns.add_user(blocks)?,
            "assistant" => turns.add_assistant(blocks)?,
            // Agents insert updates.
            "system" | "developer" => turns.add_system(lines(&mut blocks)?),
            other => {
                let path = message.path("role");
                let other = describe(&other.into());
                let message = format!("{path} is {other}, expected user, assistant or system");
                return Err(ApiError::invalid(path, message));
            }
        }
    }
    // An empty answer has no text.
    let says_nothing = |message: &mut Message| {
        message.role == "assistant" && message.content.is_empty() && message.extra.is_empty()
    };
    turns.messages.pop_if(says_nothing);
    if turns.messages.is_empty() {
        let message = "messages has no text; at least one turn must have content";
        return Err(ApiError::invalid("messages", message));
    }
    turns.is_begun = turns.ends_with_answer()?;
    Ok(turns)
}

impl AnthropicTurns {
    /// Merges system messages at the beginning. Many templates accept only one, and only there.
    fn add_system(&mut self, text: String) {
        match &mut self.messages[..] {
            _ if text.is_empty() => {}
            [message] if message.role == "system" => {
                message.content.text_mut().push_str(&format!("\n\n{text}"));
            }
            _ => self.messages.push(Message::new("system", text)),
        }
    }

    /// Adds the user's text and results of tools, in their order.
    fn add_user(&mut self, blocks: impl Iterator<Item = Result<Fields, ApiError>>) -> Result<(), ApiError> {
        let mut blocks = blocks.peekable();
        // A turn without blocks is an empty one.
        if blocks.peek().is_none() {
            self.add_user_text("");
        }
        for block in blocks {
            let mut block = block?;
            block.pass(BLOCK_EXTRAS);
            let kind = block.string("type")?.ok_or_else(|| missing(block.path("type")))?;
            if kind == "tool_result" {
                self.about_tools.get_or_insert_with(|| block.own_path().to_owned());
                let id = block.string("tool_use_id")?.ok_or_else(|| missing(block.path("tool_use_id")))?;
                let mut message = Message::new("tool", text(&mut block, "content")?.unwrap_or_default());
                message.extra.insert("tool_call_id".to_owned(), id.into());
                if block.bool("is_error")?.unwrap_or(false) {
                    self.error_mark.get_or_insert_with(|| block.path("is_error"));
                    message.extra.insert("is_error".to_owned(), true.into());
                }
                self.messages.push(message);
                continue;
            }
            self.add_user_text(&in_words(&kind, block)?);
        }
        Ok(())
    }

    /// Consecutive turns of the user are merged.
    fn add_user_text(&mut self, text: &str) {
        match self.messages.last_mut().filter(|message| message.role == "user") {
            Some(message) => append_line(message.content.text_mut(), text),
            None => self.messages.push(Message::new("user", text)),
        }
    }

    /// Adds a turn of the assistant. It may contain everything that an answer can have.
    fn add_assistant(
        &mut self,
        blocks: impl Iterator<Item = Result<Fields, ApiError>>,
    ) -> Result<(), ApiError> {
        let before = self.messages.pop_if(|message| message.role == "assistant");
        let mut message = before.unwrap_or_else(|| Message::new("assistant", ""));
        for block in blocks {
            let mut block = block?;
            block.pass(BLOCK_EXTRAS);
            match &*block.string("type")?.ok_or_else(|| missing(block.path("type")))? {
                "thinking" => {
                    let text = block.string("thinking")?.unwrap_or_default();
                    let so_far = message.extra.entry("reasoning_content").or_insert_with(|| "".into());
                    if let Value::String(so_far) = so_far {
                        append_line(so_far, &text);
                    }
                }
                // Only its writer can read it.
                "redacted_thinking" => {}
                "tool_use" => {
                    let id = block.string("id")?.ok_or_else(|| missing(block.path("id")))?;
                    let name = block.string("name")?.ok_or_else(|| missing(block.path("name")))?;
                    let input = messages::as_object(block.take("input")?.unwrap_or_default())?;
                    let calls = message.extra.entry("tool_calls").or_insert_with(|| Value::Array(Vec::new()));
                    if let Value::Array(calls) = calls {
                        calls.push(call(Some(id), name, input));
                    }
                    self.about_tools.get_or_insert_with(|| block.own_path().to_owned());
                }
                kind => append_line(message.content.text_mut(), &in_words(kind, block)?),
            }
        }
        if message.content.is_empty() && message.extra.contains_key("tool_calls") {
            message.content = Content::Missing;
        }
        self.messages.push(message);
        Ok(())
    }

    /// Whether the last turn is the assistant's. It has to end with text that the model can continue.
    fn ends_with_answer(&self) -> Result<bool, ApiError> {
        let Some(last) = self.messages.last().filter(|message| message.role == "assistant") else {
            return Ok(false);
        };
        let what = if last.extra.contains_key("tool_calls") {
            "calls tools; add a turn of the user with a tool_result for each call"
        } else if last.content.is_empty() {
            "has reasoning and no text to continue; omit it"
        } else if last.content.as_text().ends_with(char::is_whitespace) {
            "ends with white space, which models continue badly; trim it"
        } else {
            return Ok(true);
        };
        let message = format!("messages ends with a turn of the assistant that {what}");
        Err(ApiError::invalid("messages", message))
    }
}

/// A string or blocks, which are joined as lines.
fn text(fields: &mut Fields, name: &str) -> Result<Option<String>, ApiError> {
    let path = fields.path(name);
    match fields.take_unread(name) {
        None => Ok(None),
        Some(blocks) if blocks.is_list() => {
            let blocks = blocks.into_items()?;
            lines(&mut fields.objects(name, blocks)).map(Some)
        }
        Some(other) => match other.read()? {
            Value::String(text) => Ok(Some(text)),
            other => Err(wrong_type(path, &other, "a string or a list of blocks")),
        },
    }
}

/// The text of blocks, joined as lines.
fn lines(blocks: &mut dyn Iterator<Item = Result<Fields, ApiError>>) -> Result<String, ApiError> {
    let mut lines = String::new();
    for block in blocks {
        let mut block = block?;
        block.pass(BLOCK_EXTRAS);
        let kind = block.string("type")?.ok_or_else(|| missing(block.path("type")))?;
        append_line(&mut lines, &in_words(&kind, block)?);
    }
    Ok(lines)
}

/// The text of a block of this type.
fn in_words(kind: &str, mut block: Fields) -> Result<String, ApiError> {
    match kind {
        "text" => block.string("text")?.ok_or_else(|| missing(block.path("text"))),
        "document" => {
            let mut words = String::new();
            for name in ["title", "context"] {
                append_line(&mut words, &block.string(name)?.unwrap_or_default());
            }
            let path = block.path("source");
            let mut source = block.object("source")?.ok_or_else(|| missing(path.clone()))?;
            let said = match source.string("type")?.as_deref() {
                Some("text") => source.string("data")?.ok_or_else(|| missing(source.path("data")))?,
                Some("content") => text(&mut source, "content")?.unwrap_or_default(),
                other => return Err(not_text(path, other.unwrap_or("document"))),
            };
            source.pass(&["media_type"]);
            append_line(&mut words, &said);
            Ok(words)
        }
        "server_tool_use" | "mcp_tool_use" => {
            let name = block.string("name")?.unwrap_or_default();
            let input = block.take("input")?.unwrap_or_default();
            block.pass(&["id", "server_name"]);
            Ok(format!("{name}: {input}"))
        }
        "search_result" | "tool_reference" => Ok(readable(&block.into_map()?.into())),
        kind if kind.ends_with("_tool_result") => Ok(readable(&block.into_map()?.into())),
        kind => Err(misplaced(block.own_path(), kind)),
    }
}

/// 400: a block of this type cannot be here.
fn misplaced(path: &str, kind: &str) -> ApiError {
    let problem = match kind {
        "redacted_thinking" | "thinking" | "tool_use" => {
            "which belongs to a turn of the assistant; send it in one"
        }
        "tool_result" => "which belongs to a turn of the user; send it in one",
        "compaction" => "which is not supported here; send its content as a block of text",
        _ => return not_text(path.to_owned(), kind),
    };
    ApiError::unsupported(path.to_owned(), format!("{path} is of type {kind:?}, {problem}"))
}

/// The readable text of a result from elsewhere, line by line.
fn readable(value: &Value) -> String {
    const READABLE: [&str; 12] = [
        "tool_name",
        "title",
        "source",
        "url",
        "text",
        "data",
        "stdout",
        "stderr",
        "error_code",
        "error_message",
        "content",
        "tool_references",
    ];
    let mut lines = String::new();
    match value {
        Value::String(text) => lines.push_str(text),
        Value::Array(items) => items.iter().for_each(|item| append_line(&mut lines, &readable(item))),
        Value::Object(fields) => {
            READABLE
                .iter()
                .filter_map(|name| fields.get(*name))
                .for_each(|value| append_line(&mut lines, &readable(value)));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    lines
}

fn append_line(to: &mut String, text: &str) {
    if !to.is_empty() && !text.is_empty() {
        to.push('\n');
    }
    to.push_str(text);
}
