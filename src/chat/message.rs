//! One turn of a conversation, as a template gets it.

use serde_json::{Map, Value};

/// The content of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// This text.
    Text(String),
    /// Empty, because the client sent `null`: the template gets `none`, which some templates render differently from an
    /// empty text.
    Null,
    /// Empty, because the turn has no such field.
    Missing,
}

impl Content {
    /// The text; empty if there is none.
    #[must_use]
    pub fn as_text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Null | Self::Missing => "",
        }
    }

    /// Whether there is no text, or an empty one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.as_text().is_empty()
    }

    /// The text, to add to it. Where there was none it is an empty one from now on.
    pub fn text_mut(&mut self) -> &mut String {
        loop {
            match self {
                Self::Text(text) => return text,
                Self::Null | Self::Missing => *self = Self::Text(String::new()),
            }
        }
    }
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role of the template.
    pub role: String,
    /// The text.
    pub content: Content,
    /// Further fields that the template may read, such as `reasoning_content` or `tool_calls`.
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message with text only.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Content::Text(content.into()), extra: Map::new() }
    }
}
