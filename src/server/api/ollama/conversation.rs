//! Converts the conversation of a request into messages for a template.

use std::collections::VecDeque;

use serde_json::Value;

use super::super::super::error::ApiError;
use super::super::super::json::{Fields, describe};
use super::super::messages::{self, call, missing, not_text};
use super::super::options::says_nothing;
use tinyvllm::chat::{Content, Message};

/// The messages for the template.
#[derive(Debug, Default)]
pub(super) struct OllamaTurns {
    pub(super) messages: Vec<Message>,
    /// The first path with tools.
    pub(super) about_tools: Option<String>,
    /// Whether the answer continues the last turn.
    pub(super) is_begun: bool,
    num_calls: usize,
    /// Names and ids of calls without a result.
    unanswered: VecDeque<(String, String)>,
}

/// Parses the conversation.
pub(super) fn parse(fields: &mut Fields) -> Result<OllamaTurns, ApiError> {
    let mut turns = OllamaTurns::default();
    for message in messages::items(fields)? {
        turns.add(message?)?;
    }
    turns.is_begun = turns.messages.last().is_some_and(|last| {
        last.role == "assistant" && !last.content.is_empty() && !last.extra.contains_key("tool_calls")
    });
    Ok(turns)
}

/// 400 if there are images.
pub(super) fn refuse_images(fields: &mut Fields) -> Result<(), ApiError> {
    match fields.take("images")? {
        Some(images) if !says_nothing(&images) => Err(not_text(fields.path("images"), "image")),
        _ => Ok(()),
    }
}

impl OllamaTurns {
    fn add(&mut self, mut fields: Fields) -> Result<(), ApiError> {
        refuse_images(&mut fields)?;
        let role = fields.string("role")?.ok_or_else(|| missing(fields.path("role")))?;
        if !["system", "user", "assistant", "tool"].contains(&role.as_str()) {
            let path = fields.path("role");
            let message =
                format!("{path} is {}, expected system, user, assistant or tool", describe(&role.into()));
            return Err(ApiError::invalid(path, message));
        }
        let mut message = Message::new(&role, fields.string("content")?.unwrap_or_default());
        if let Some(thinking) = fields.string("thinking")?.filter(|text| !text.is_empty()) {
            message.extra.insert("reasoning_content".to_owned(), thinking.into());
        }
        let calls = self.calls(&mut fields, &role)?;
        if !calls.is_empty() {
            self.about_tools.get_or_insert_with(|| fields.own_path().to_owned());
            message.extra.insert("tool_calls".to_owned(), calls.into());
            if message.content.is_empty() {
                message.content = Content::Missing;
            }
        }
        let (newer, older) = (fields.string("tool_name")?, fields.string("name")?);
        let id = fields.string("tool_call_id")?;
        if role != "tool" {
            let given = [("tool_name", &newer), ("name", &older), ("tool_call_id", &id)];
            given.iter().filter(|(_, value)| value.is_some()).for_each(|(name, _)| fields.report(name));
        } else {
            let name = newer.or(older);
            self.about_tools.get_or_insert_with(|| fields.own_path().to_owned());
            let id = self.answered(id, name.as_deref());
            message.extra.insert("tool_call_id".to_owned(), id.into());
            if let Some(name) = name {
                message.extra.insert("name".to_owned(), name.into());
            }
        }
        self.messages.push(message);
        Ok(())
    }

    /// The calls of an assistant, in the format that templates expect.
    fn calls(&mut self, fields: &mut Fields, role: &str) -> Result<Vec<Value>, ApiError> {
        let path = fields.path("tool_calls");
        let Some(items) = fields.list("tool_calls", "a list of calls")? else { return Ok(Vec::new()) };
        if !items.is_empty() && role != "assistant" {
            let message = format!("{path} is given, but the role is {role}; only an assistant calls tools");
            return Err(ApiError::invalid(path, message));
        }
        let calls = fields.objects("tool_calls", items).map(|item| {
            let mut item = item?;
            item.pass(&["type"]);
            let id = item.string("id")?.filter(|id| !id.is_empty());
            let mut function = item.object("function")?.ok_or_else(|| missing(item.path("function")))?;
            function.pass(&["index"]);
            let name = function.string("name")?.ok_or_else(|| missing(function.path("name")))?;
            let arguments = messages::as_object(function.take("arguments")?.unwrap_or_default())?;
            // Older clients send no id, and some templates need one. The strictest ones need nine letters and
            // digits.
            let id = id.unwrap_or_else(|| format!("call{:05}", self.num_calls));
            self.num_calls += 1;
            self.unanswered.push_back((name.clone(), id.clone()));
            Ok(call(Some(id), name, arguments))
        });
        calls.collect()
    }

    /// The id of the call that a tool's result belongs to: the call that it names, otherwise the first
    /// unanswered one of its tool, otherwise the first unanswered one.
    fn answered(&mut self, id: Option<String>, name: Option<&str>) -> String {
        let index = match (&id, name) {
            (Some(id), _) => self.unanswered.iter().position(|(_, other)| other == id),
            (None, Some(name)) => self.unanswered.iter().position(|(other, _)| other == name),
            (None, None) => None,
        };
        let found = self.unanswered.remove(index.unwrap_or(0)).filter(|_| index.is_some() || id.is_none());
        id.or(found.map(|(_, id)| id)).unwrap_or_else(|| format!("call{:05}", self.num_calls))
    }
}
