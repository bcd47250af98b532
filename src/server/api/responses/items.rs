//! Converts the items of an input into messages for a template.
//!
//! The reasoning, text and calls of an assistant are separate items. Consecutive ones become one message, as
//! the assistant wrote them in one turn.

use serde_json::{Value, json};

use super::super::super::error::ApiError;
use super::super::super::json::{Fields, describe, wrong_type};
use super::super::super::values::charge_copies;
use super::super::messages::{call, call_arguments, missing, text_parts};
use tinyvllm::chat::{Content, Message};

/// Types of message parts that are text.
const TEXT_PARTS: [&str; 5] = ["input_text", "output_text", "reasoning_text", "refusal", "text"];

/// Types of items without information for a text model: work at OpenAI or in a client, whose results only
/// their host can read, references to items that are not stored, and marks of clients.
const LEFT_OUT: [&str; 25] = [
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "compaction",
    "compaction_summary",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "context_compaction",
    "file_search_call",
    "ghost_snapshot",
    "image_generation_call",
    "item_reference",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
    "web_search_preview_call",
];

/// The messages for the template.
#[derive(Debug, Default)]
pub(super) struct ResponsesTurns {
    pub(super) messages: Vec<Message>,
    /// The first path with tools.
    pub(super) about_tools: Option<String>,
}

/// Takes the items of the input. A string is a message of the user.
pub(super) fn take(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    match fields.take("input")? {
        None => Err(missing("input".to_owned())),
        Some(Value::String(text)) => {
            let part = json!({"type": "input_text", "text": text});
            Ok(vec![json!({"type": "message", "role": "user", "content": [part]})])
        }
        Some(Value::Array(items)) if items.is_empty() => {
            Err(ApiError::invalid("input", "input is empty; there must be at least one item"))
        }
        Some(Value::Array(items)) => Ok(items),
        Some(other) => Err(wrong_type("input".to_owned(), &other, "a string or a list of items")),
    }
}

/// Converts all items into messages. The first `num_before` items belong to earlier responses, and their
/// ignored fields are not reported again.
pub(super) fn messages(
    instructions: Option<&str>,
    fields: &Fields,
    items: &[Value],
    num_before: usize,
) -> Result<ResponsesTurns, ApiError> {
    let mut turns = ResponsesTurns::default();
    if let Some(text) = instructions.filter(|text| !text.is_empty()) {
        turns.messages.push(Message::new("system", text));
    }
    charge_copies(items)?;
    let (before, new) = items.split_at(num_before);
    for item in before {
        turns.add(Fields::inside(item.clone(), "previous_response_id")?)?;
    }
    for item in fields.objects("input", new.to_vec()) {
        turns.add(item?)?;
    }
    Ok(turns)
}

impl ResponsesTurns {
    fn add(&mut self, mut item: Fields) -> Result<(), ApiError> {
        // Fields of an answer, and data that only its writer can read.
        item.pass(&["id", "status", "encrypted_content"]);
        match item.string("type")?.as_deref() {
            None | Some("message") => self.add_message(&mut item),
            Some("reasoning") => self.add_reasoning(&mut item),
            Some("function_call") => self.add_call(&mut item, "arguments", call_arguments),
            // The input of such a tool is arbitrary text.
            Some("custom_tool_call") => {
                self.add_call(&mut item, "input", |input| Ok(json!({"input": input})))
            }
            Some("function_call_output" | "custom_tool_call_output") => {
                self.about_tools.get_or_insert_with(|| item.own_path().to_owned());
                let id = item.string("call_id")?.ok_or_else(|| missing(item.path("call_id")))?;
                let output = text(&mut item, "output")?;
                item.pass(&["name"]);
                let mut message = Message::new("tool", output);
                message.extra.insert("tool_call_id".to_owned(), id.into());
                self.messages.push(message);
                Ok(())
            }
            Some(kind) if LEFT_OUT.contains(&kind) => {
                item.leave_out(kind);
                Ok(())
            }
            Some(kind) => Err(unknown(&item, kind)),
        }
    }

    /// Adds a call. `arguments` converts the text of the field into its arguments.
    fn add_call(
        &mut self,
        item: &mut Fields,
        field: &str,
        arguments: fn(&str) -> Result<Value, ApiError>,
    ) -> Result<(), ApiError> {
        self.about_tools.get_or_insert_with(|| item.own_path().to_owned());
        let id = item.string("call_id")?.ok_or_else(|| missing(item.path("call_id")))?;
        let name = item.string("name")?.ok_or_else(|| missing(item.path("name")))?;
        let text = item.string(field)?.ok_or_else(|| missing(item.path(field)))?;
        item.pass(&["namespace"]);
        let arguments = arguments(&text)?;
        let message = self.assistant(|_| true);
        if message.content.is_empty() {
            message.content = Content::Missing;
        }
        let calls = message.extra.entry("tool_calls").or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(calls) = calls {
            calls.push(call(Some(id), name, arguments));
        }
        Ok(())
    }

    fn add_message(&mut self, item: &mut Fields) -> Result<(), ApiError> {
        let role = item.string("role")?.ok_or_else(|| missing(item.path("role")))?;
        let content = text(item, "content")?;
        match role.as_str() {
            "user" => self.messages.push(Message::new("user", content)),
            "assistant" => {
                // Text before a call belongs to the call's message; text after one begins a new message.
                let message = self.assistant(|message| {
                    message.content.is_empty() && !message.extra.contains_key("tool_calls")
                });
                message.content = Content::Text(content);
            }
            // Merges system messages at the beginning. Many templates accept only one, and only there.
            "system" | "developer" => match &mut self.messages[..] {
                [message] if message.role == "system" => {
                    message.content.text_mut().push_str(&format!("\n\n{content}"));
                }
                _ => self.messages.push(Message::new("system", content)),
            },
            other => {
                let path = item.path("role");
                let other = describe(&other.into());
                let message = format!("{path} is {other}, expected user, assistant, system or developer");
                return Err(ApiError::invalid(path, message));
            }
        }
        Ok(())
    }

    /// Adds the reasoning, or its summary if that is all there is.
    fn add_reasoning(&mut self, item: &mut Fields) -> Result<(), ApiError> {
        let mut thoughts = String::new();
        for (name, kind) in [("content", "reasoning_text"), ("summary", "summary_text")] {
            let path = item.path(name);
            let text = match item.take(name)? {
                None => String::new(),
                Some(Value::Array(parts)) => text_parts(item.objects(name, parts), &[kind])?,
                Some(other) => return Err(wrong_type(path, &other, "a list of parts")),
            };
            if thoughts.is_empty() {
                thoughts = text;
            }
        }
        // Encrypted reasoning has neither. Only its writer can read it.
        if !thoughts.is_empty() {
            let message = self.assistant(|message| message.extra.is_empty() && message.content.is_empty());
            message.extra.insert("reasoning_content".to_owned(), thoughts.into());
        }
        Ok(())
    }

    /// The last message if it is the assistant's and accepts more, otherwise a new one.
    fn assistant(&mut self, takes_more: impl Fn(&Message) -> bool) -> &mut Message {
        let last = self.messages.last().filter(|message| message.role == "assistant");
        if !last.is_some_and(takes_more) {
            self.messages.push(Message::new("assistant", ""));
        }
        let index = self.messages.len() - 1;
        &mut self.messages[index]
    }
}

/// 400: the type is unknown. Without the item, the conversation could have another meaning.
fn unknown(item: &Fields, kind: &str) -> ApiError {
    let (path, found) = (item.path("type"), describe(&kind.into()));
    let message = match TEXT_PARTS.contains(&kind) {
        true => format!(
            "{path} is {found}, which belongs inside a message; send {{\"type\": \"message\", \"role\": \"user\", \
             \"content\": [it]}}"
        ),
        false => format!(
            "{path} is {found}, expected message, reasoning, function_call, function_call_output, custom_tool_call \
             or custom_tool_call_output; left out are {}",
            LEFT_OUT.join(", ")
        ),
    };
    ApiError::invalid(path, message)
}

/// A string or parts of text, which become lines.
fn text(item: &mut Fields, name: &str) -> Result<String, ApiError> {
    let path = item.path(name);
    match item.take(name)? {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => text_parts(item.objects(name, parts), &TEXT_PARTS),
        Some(other) => Err(wrong_type(path, &other, "a string or a list of parts")),
        None => Err(missing(path)),
    }
}
