//! An assistant's turn: the text of a choice, parsed into deltas.
//!
//! Each interface writes the deltas in its own way. A stream sends them, and a complete answer is their sum,
//! so the two cannot differ.

use std::sync::Arc;

use serde::de::IgnoredAny;

use super::super::access::new_id;
use super::super::generation::Totals;
use super::types::{Delta, FunctionDelta, Message, ToolCall, ToolCallDelta};
use tinyvllm::chat::{AnswerEvent, AnswerFormat, AnswerParser, PromptEnd, Tool};

/// How answers are parsed.
#[derive(Debug, Clone, Default)]
pub(super) struct TurnFormat {
    pub(super) answers: AnswerFormat,
    pub(super) prompt_end: PromptEnd,
    pub(super) tools: Arc<[Tool]>,
    /// Whether the client requested the reasoning.
    pub(super) includes_reasoning: bool,
    /// Whether the answer is a call after its reasoning.
    pub(super) requires_call: bool,
    /// Calls beyond this number are dropped.
    pub(super) max_calls: Option<usize>,
    /// Number of calls in earlier turns, for formats whose ids count them.
    pub(super) num_earlier_calls: usize,
}

/// An increment of a turn.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TurnDelta {
    /// Reasoning, for clients that requested it.
    Reasoning(String),
    /// Text.
    Content(String),
    /// The beginning of a call. `index` counts the calls of the turn.
    Call { index: usize, id: String, name: String },
    /// More of the arguments of the latest call.
    Arguments { index: usize, text: String },
}

/// A turn so far.
#[derive(Debug)]
pub(super) struct Turn {
    format: Arc<TurnFormat>,
    parser: AnswerParser,
    num_calls: usize,
    /// Of the latest call.
    arguments: String,
}

impl Turn {
    pub(super) fn new(format: &Arc<TurnFormat>) -> Self {
        let parser = AnswerParser::new(&format.answers, format.prompt_end, Arc::clone(&format.tools));
        Self { format: Arc::clone(format), parser, num_calls: 0, arguments: String::new() }
    }

    /// Parses the text of the next token, or of several events without a token.
    pub(super) fn push(&mut self, text: &str, has_token: bool, totals: &mut Totals) -> Vec<TurnDelta> {
        let was_reasoning = self.parser.is_reasoning();
        let events = self.parser.push(text);
        let has_reasoning = events.iter().any(|event| matches!(event, AnswerEvent::Reasoning(_)));
        if has_token && (was_reasoning || has_reasoning || self.parser.is_reasoning()) {
            totals.num_reasoning_tokens += 1;
        }
        self.deltas(events)
    }

    /// Parses the end of the text, for the same arguments as [`Self::finish_reason`].
    pub(super) fn finish(&mut self, reason: &'static str, has_matched_stop: bool) -> Vec<TurnDelta> {
        if reason == "stop" && !has_matched_stop {
            let events = self.parser.finish();
            return self.deltas(events);
        }
        let mut events = self.parser.cut_off();
        // Where a call is required, other text is the beginning of one.
        events.retain(|event| !(self.format.requires_call && matches!(event, AnswerEvent::Content(_))));
        self.deltas(events)
    }

    /// The finish reason for the client, from that of the sequence. A call in which a stop string was found is not to
    /// be executed.
    pub(super) fn finish_reason(&self, reason: &'static str, has_matched_stop: bool) -> &'static str {
        let is_broken = || has_matched_stop && serde_json::from_str::<IgnoredAny>(&self.arguments).is_err();
        if reason == "stop" && self.num_calls > 0 && !is_broken() { "tool_calls" } else { reason }
    }

    fn deltas(&mut self, events: Vec<AnswerEvent>) -> Vec<TurnDelta> {
        events.into_iter().filter_map(|event| self.delta(event)).collect()
    }

    fn delta(&mut self, event: AnswerEvent) -> Option<TurnDelta> {
        let is_wanted = |index: usize| self.format.max_calls.is_none_or(|max| index < max);
        match event {
            AnswerEvent::Reasoning(text) => {
                self.format.includes_reasoning.then_some(TurnDelta::Reasoning(text))
            }
            AnswerEvent::Content(text) => Some(TurnDelta::Content(text)),
            AnswerEvent::CallBegin { index, name } if is_wanted(index) => {
                self.num_calls = index + 1;
                self.arguments.clear();
                Some(TurnDelta::Call { index, id: self.new_call_id(index, &name), name })
            }
            AnswerEvent::CallArguments { index, text } if is_wanted(index) => {
                self.arguments.push_str(&text);
                Some(TurnDelta::Arguments { index, text })
            }
            AnswerEvent::CallBegin { .. } | AnswerEvent::CallArguments { .. } => None,
        }
    }

    fn new_call_id(&self, index: usize, name: &str) -> String {
        let id = new_id();
        match &self.format.answers.tool_calls {
            Some(format) => format.call_id(name, self.format.num_earlier_calls + index, &id),
            None => format!("call_{id}"),
        }
    }
}

impl From<TurnDelta> for Delta {
    fn from(delta: TurnDelta) -> Self {
        let call = |index, id: Option<String>, name, arguments| ToolCallDelta {
            index,
            kind: id.as_ref().map(|_| "function"),
            id,
            function: FunctionDelta { name, arguments },
        };
        match delta {
            TurnDelta::Reasoning(text) => {
                Self { reasoning_content: Some(text.clone()), reasoning: Some(text), ..Self::default() }
            }
            TurnDelta::Content(text) => Self { content: Some(text), ..Self::default() },
            TurnDelta::Call { index, id, name } => {
                Self { tool_calls: vec![call(index, Some(id), Some(name), String::new())], ..Self::default() }
            }
            TurnDelta::Arguments { index, text } => {
                Self { tool_calls: vec![call(index, None, None, text)], ..Self::default() }
            }
        }
    }
}

impl Message {
    /// Appends a delta.
    pub(super) fn add(&mut self, delta: Delta) {
        let append = |to: &mut Option<String>, text: Option<String>| {
            if let Some(text) = text {
                to.get_or_insert_default().push_str(&text);
            }
        };
        append(&mut self.content, delta.content);
        append(&mut self.reasoning_content, delta.reasoning_content);
        append(&mut self.reasoning, delta.reasoning);
        for ToolCallDelta { index, id, kind, function } in delta.tool_calls {
            if self.tool_calls.len() <= index {
                self.tool_calls.resize_with(index + 1, ToolCall::default);
            }
            let call = &mut self.tool_calls[index];
            call.id = id.unwrap_or(std::mem::take(&mut call.id));
            call.kind = kind.unwrap_or(call.kind);
            call.function.name.push_str(&function.name.unwrap_or_default());
            call.function.arguments.push_str(&function.arguments);
        }
    }

    /// The complete message. A message with calls may have no content.
    pub(super) fn complete(mut self) -> Self {
        if self.tool_calls.is_empty() {
            self.content.get_or_insert_default();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use tinyvllm::chat::{ReasoningFormat, ToolCallFormat};

    const TEXT: &str = "<think>\nRome?\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": \
        {\"city\": \"Rome\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";

    fn format() -> TurnFormat {
        TurnFormat {
            answers: AnswerFormat {
                tool_calls: ToolCallFormat::named("hermes"),
                reasoning: Some(ReasoningFormat::think()),
            },
            includes_reasoning: true,
            ..TurnFormat::default()
        }
    }

    /// Parses the text in chunks of this size. Returns the message, the finish reason, the number of
    /// reasoning tokens, and the deltas.
    fn run(format: TurnFormat, text: &str, size: usize) -> (Value, &'static str, usize, Vec<Value>) {
        let (mut turn, mut totals) = (Turn::new(&Arc::new(format)), Totals::default());
        let mut message = Message::new();
        let mut deltas = Vec::new();
        let characters: Vec<char> = text.chars().collect();
        for delta in characters.chunks(size) {
            deltas.extend(turn.push(&delta.iter().collect::<String>(), true, &mut totals));
        }
        deltas.extend(turn.finish("stop", false));
        let deltas: Vec<Delta> = deltas.into_iter().map(Delta::from).collect();
        let sent = deltas.iter().map(|delta| serde_json::to_value(delta).unwrap()).collect();
        deltas.into_iter().for_each(|delta| message.add(delta));
        let message = serde_json::to_value(message.complete()).unwrap();
        (message, turn.finish_reason("stop", false), totals.num_reasoning_tokens, sent)
    }

    #[test]
    fn a_turn_is_taken_apart() {
        for size in [1, 3, 7, 1_000] {
            let (mut message, finish_reason, num_reasoning, deltas) = run(format(), TEXT, size);
            assert_eq!(finish_reason, "tool_calls");
            assert!(num_reasoning > 0 && num_reasoning <= "<think>\nRome?\n</think>".len());
            let ids: Vec<Value> = message["tool_calls"]
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .map(|call| call["id"].take())
                .collect();
            assert!(ids.iter().all(|id| id.as_str().unwrap().starts_with("call_")) && ids[0] != ids[1]);
            let call = |name: &str, arguments: &str| json!({"id": null, "type": "function", "function": {"name": name, "arguments": arguments}});
            assert_eq!(
                message,
                json!({
                    "role": "assistant", "content": "Let me see.", "refusal": null,
                    "reasoning_content": "Rome?", "reasoning": "Rome?",
                    "tool_calls": [call("weather", "{\"city\": \"Rome\"}"), call("time", "{}")],
                })
            );
            // The first delta of a call has its name and no arguments, the others have only arguments.
            let calls: Vec<&Value> = deltas.iter().filter_map(|delta| delta.get("tool_calls")).collect();
            assert_eq!(calls[0][0]["function"], json!({"name": "weather", "arguments": ""}));
            assert_eq!((&calls[0][0]["index"], &calls[0][0]["type"]), (&json!(0), &json!("function")));
            assert!(calls[1][0].get("id").is_none() && calls[1][0]["function"].get("name").is_none());
        }
    }

    #[test]
    fn a_call_that_a_stop_string_breaks_off_is_not_to_be_executed() {
        let check = |text: &str, has_matched_stop: bool, expected: &str| {
            let (mut turn, mut totals) = (Turn::new(&Arc::new(format())), Totals::default());
            turn.push(text, true, &mut totals);
            turn.finish("stop", has_matched_stop);
            assert_eq!(turn.finish_reason("stop", has_matched_stop), expected, "{text}");
        };
        check(TEXT, false, "tool_calls");
        check(TEXT, true, "tool_calls");
        let broken = &TEXT[..TEXT.find("Rome\"").unwrap()];
        check(broken, true, "stop");
        check(broken, false, "tool_calls");
    }

    #[test]
    fn the_beginning_of_a_call_is_no_content_of_an_answer_that_is_cut_off() {
        let content = |format: TurnFormat, text: &str, reason: &'static str, has_matched_stop: bool| {
            let (mut turn, mut totals) = (Turn::new(&Arc::new(format)), Totals::default());
            let mut deltas = turn.push(text, true, &mut totals);
            deltas.extend(turn.finish(reason, has_matched_stop));
            let mut message = Message::new();
            deltas.into_iter().for_each(|delta| message.add(delta.into()));
            assert!(message.tool_calls.is_empty());
            message.content.unwrap_or_default()
        };
        let marked = "Let me see.\n<tool_call>\n{\"name\": \"weath";
        assert_eq!(content(format(), marked, "length", false), "Let me see.");
        assert_eq!(content(format(), marked, "stop", true), "Let me see.");
        assert_eq!(content(format(), marked, "stop", false), marked);
        // A call without a mark is one where it is required.
        let llama = AnswerFormat { tool_calls: ToolCallFormat::named("llama3_json"), reasoning: None };
        let bare = "{\"name\": \"weath";
        let of = |requires_call| TurnFormat { answers: llama.clone(), requires_call, ..format() };
        assert_eq!(content(of(false), bare, "length", false), bare);
        assert_eq!(content(of(true), bare, "length", false), "");
    }

    #[test]
    fn what_is_not_wanted_is_left_out() {
        let hidden = TurnFormat { includes_reasoning: false, max_calls: Some(1), ..format() };
        let (message, _, num_reasoning, _) = run(hidden, TEXT, 5);
        assert_eq!(message.get("reasoning_content"), None);
        assert!(num_reasoning > 0);
        assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
        let (message, finish_reason, num_reasoning, _) = run(TurnFormat::default(), TEXT, 5);
        assert_eq!((&message["content"], finish_reason, num_reasoning), (&json!(TEXT), "stop", 0));
        assert_eq!(message.get("tool_calls"), None);
        let (message, ..) = run(format(), "<tool_call>{\"name\": \"time\"}</tool_call>", 5);
        assert_eq!(message["content"], Value::Null);
        let mistral = AnswerFormat { tool_calls: ToolCallFormat::named("mistral"), reasoning: None };
        let (message, ..) = run(TurnFormat { answers: mistral, ..format() }, "[TOOL_CALLS]time[ARGS]{}", 5);
        let id = message["tool_calls"][0]["id"].as_str().unwrap();
        assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()), "{id}");
        let kimi = AnswerFormat { tool_calls: ToolCallFormat::named("kimi_k2"), reasoning: None };
        let text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}<|tool_call_end|>";
        let (message, ..) = run(TurnFormat { answers: kimi, num_earlier_calls: 2, ..format() }, text, 5);
        assert_eq!(message["tool_calls"][0]["id"], "functions.time:2");
    }
}
