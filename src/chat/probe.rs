//! Renders small conversations with a chat template when a model is loaded: whether it writes the messages at all, and
//! which kinds of conversations it does not accept.

use serde_json::{Value, json};

use super::template::REFUSES;
use super::{Chat, ChatOptions, Message};

const QUESTION: &str = "probing question 4711";
const SYSTEM: &str = "probing instruction 4712";
const ANSWER: &str = "probing answer 4713";
const RESULT: &str = "probing result 4714";
const TOOL: &str = "probing_tool_4715";
const NAME: &str = "probing_name_4716";
/// Characters of a template's own message that are repeated.
const MAX_MESSAGE: usize = 160;

/// The findings.
#[derive(Debug, Default)]
pub(super) struct Probe {
    /// Why this template cannot be used for chats.
    pub(super) problem: Option<String>,
    /// The kinds of conversations that it does not accept, and why.
    pub(super) refused: Vec<String>,
    /// Whether it accepts the content of a message only as a list of parts.
    pub(super) wants_content_parts: bool,
    /// Whether it writes calls only of a message whose content is null.
    pub(super) wants_null: bool,
    /// Whether it writes the names of those who speak.
    pub(super) writes_names: bool,
}

/// The result for one conversation.
enum Outcome {
    Written,
    LeftOut,
    Failed(String),
}

/// Tries each kind of conversation.
pub(super) fn probe(chat: &mut Chat) -> Probe {
    let question = || Message::new("user", QUESTION);
    let alone = [question()];
    let mut first = outcome(chat, &alone, None, &[QUESTION]);
    if !matches!(first, Outcome::Written) {
        chat.probe.wants_content_parts = true;
        match outcome(chat, &alone, None, &[QUESTION]) {
            Outcome::Written => first = Outcome::Written,
            _ => chat.probe.wants_content_parts = false,
        }
    }
    let system = [Message::new("system", SYSTEM), question()];
    let turns = [question(), Message::new("assistant", ANSWER), question()];
    let mut kinds = vec![
        ("a user message alone", first),
        ("a system message", outcome(chat, &system, None, &[SYSTEM, QUESTION])),
        ("several turns", outcome(chat, &turns, None, &[ANSWER, QUESTION])),
    ];
    // The reason why a template for tools is none is known.
    if chat.uses_tools() && chat.template_for_tools().is_ok() {
        let tools = json!([{"type": "function", "function": {
            "name": TOOL,
            "description": "Does nothing.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}, "required": ["x"]},
        }}]);
        kinds.push(("tools", outcome(chat, &alone, Some(&tools), &[TOOL, QUESTION])));
        kinds.push(("results of tools", outcome(chat, &round(), Some(&tools), &[RESULT, TOOL])));
    }
    // Where the content of a message with calls is empty, some write it instead of them.
    let is_written = |chat: &Chat| matches!(outcome(chat, &round(), None, &[TOOL]), Outcome::Written);
    if chat.template.source().contains("tool_calls") && !is_written(chat) {
        chat.probe.wants_null = true;
        chat.probe.wants_null = is_written(chat);
    }
    let turns = turns.map(|turn| with(turn, "name", json!(NAME)));
    let writes_names = chat.render(&turns, &ChatOptions::default()).is_ok_and(|text| text.contains(NAME));
    let Probe { wants_content_parts, wants_null, .. } = chat.probe;
    let mut found = Probe { wants_content_parts, wants_null, writes_names, ..Probe::default() };
    let mut is_usable = false;
    for (kind, outcome) in &kinds {
        match outcome {
            Outcome::Written => is_usable = true,
            Outcome::LeftOut => found.refused.push(format!("{kind} (it is left out)")),
            Outcome::Failed(message) => found.refused.push(format!("{kind} ({message})")),
        }
    }
    if !is_usable {
        found.problem = Some(match kinds.into_iter().next() {
            Some((_, Outcome::Failed(message))) => message,
            _ => "the chat template does not write the user's message".to_owned(),
        });
    }
    found
}

/// A question, a call and its result.
fn round() -> [Message; 3] {
    let call = json!([{"id": "call47150", "type": "function", "function": {
        "name": TOOL,
        "arguments": {"x": "y"},
    }}]);
    let result = with(Message::new("tool", RESULT), "tool_call_id", json!("call47150"));
    [
        Message::new("user", QUESTION),
        with(Message::new("assistant", ""), "tool_calls", call),
        with(result, "name", json!(TOOL)),
    ]
}

fn with(mut message: Message, name: &str, value: Value) -> Message {
    message.extra.insert(name.to_owned(), value);
    message
}

fn outcome(chat: &Chat, messages: &[Message], tools: Option<&Value>, expected: &[&str]) -> Outcome {
    let options = ChatOptions { tools: tools.cloned(), ..ChatOptions::default() };
    match chat.render(messages, &options) {
        Ok(text) if expected.iter().all(|part| text.contains(part)) => Outcome::Written,
        Ok(_) => Outcome::LeftOut,
        Err(error) => {
            let message = error.message();
            let message = message.split_once(REFUSES).map_or(message, |(_, words)| words);
            Outcome::Failed(message.lines().next().unwrap_or_default().chars().take(MAX_MESSAGE).collect())
        }
    }
}
