//! Finds the formats of a model's answers by trying its template: it renders a conversation with calls, and the format that
//! reads them back, names, arguments and types, is the one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::{Chat, ChatOptions, Message};
use super::format::ToolCallFormat;
use super::syntax::{Body, CallSyntax, bare, parts};
use super::thoughts::Thoughts;
use super::{AnswerEvent, AnswerFormat, AnswerParser, PromptEnd, ReasoningFormat, Tool, learn, thoughts};
use crate::tokenizer::Tokenizer;

/// For a template that takes its time.
const MAX_TRIAL_TIME: Duration = Duration::from_secs(4);
const QUESTION: &str = "probing question 4721";
const ANSWER: &str = "probing answer 4722";
const THOUGHT: &str = "probing thought 4723";
const RESULT: &str = "probing result 4724";
const NAMES: [&str; 2] = ["probing_tool_4725", "probing_tool_4726"];
/// Identifiers of their calls: those that most templates accept, and those that Kimi's write instead of a name.
const IDS: [[&str; 2]; 2] =
    [["call47211", "call47212"], ["functions.probing_tool_4725:0", "functions.probing_tool_4726:1"]];
/// The fields in which templates look for reasoning.
const THOUGHT_FIELDS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// A template's rendering of calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Detected {
    /// In this format, which reads it back.
    Read(ToolCallFormat),
    /// It writes none, but it names this format, or the vocabulary has its marks.
    Named(ToolCallFormat),
    /// In an unknown format.
    Unread,
    /// No information on calls.
    Nothing,
}

/// A conversation that was tried.
struct Probe {
    calls: Vec<(&'static str, Value)>,
    /// The template's text after the question; and the common prefix with the prompt for an answer.
    texts: Vec<String>,
}

impl Detected {
    /// The format, if there is one.
    pub(in super::super) fn syntax(&self) -> Option<ToolCallFormat> {
        match self {
            Self::Read(syntax) | Self::Named(syntax) => Some(syntax.clone()),
            Self::Unread | Self::Nothing => None,
        }
    }
}

impl ToolCallFormat {
    /// Tries them all.
    pub(in super::super) fn detect(chat: &Chat, source: &str, tokenizer: &Tokenizer) -> Detected {
        let started = Instant::now();
        let may_try = || chat.problem().is_none() && started.elapsed() < MAX_TRIAL_TIME;
        let mut writes_calls = false;
        for probe in probes(chat).take_while(|_| may_try()) {
            writes_calls |= probe.texts.iter().any(|text| text.contains(NAMES[0]));
            let mut found: Vec<&Self> = Self::known().iter().filter(|syntax| syntax.reads(&probe)).collect();
            // Where several do, it is the one that writes the same.
            found.sort_by_key(|syntax| !syntax.0.is_written_in(&probe));
            if let Some(syntax) = found.first() {
                return Detected::Read((*syntax).clone());
            }
        }
        if writes_calls && may_try() {
            return learned(chat).map_or(Detected::Unread, Detected::Read);
        }
        let options = ChatOptions { tools: Some(tool_list(false)), ..ChatOptions::default() };
        let prompt = chat.render(&[Message::new("user", QUESTION)], &options).unwrap_or_default();
        let named = |is_known: &dyn Fn(&str) -> bool| {
            let is_named = |marks: Vec<String>| !marks.is_empty() && marks.iter().all(|mark| is_known(mark));
            Self::known().iter().find(|syntax| is_named(syntax.0.clear_marks())).cloned()
        };
        named(&|mark| prompt.contains(mark) || source.contains(mark))
            .or_else(|| named(&|mark| tokenizer.token_id(mark).is_some()))
            .map_or(Detected::Nothing, Detected::Named)
    }

    fn reads(&self, probe: &Probe) -> bool {
        let tools = tools();
        let format = AnswerFormat { tool_calls: Some(self.clone()), reasoning: None };
        // Only its position identifies a bare call.
        let texts = if self.0.is_bare { &probe.texts[1..] } else { &probe.texts[..] };
        let [begin, _] = self.0.group_marks();
        let start = if begin.is_empty() { bare(&self.0.open) } else { begin };
        texts.iter().filter(|text| self.0.is_bare || text.contains(&start)).any(|text| {
            let mut parser = AnswerParser::new(&format, PromptEnd::Plain, Arc::clone(&tools));
            let mut events = parser.push(text);
            events.extend(parser.finish());
            calls_of(events).is_some_and(|calls| {
                let calls: Vec<(&str, &Value)> =
                    calls.iter().map(|(name, value)| (name.as_str(), value)).collect();
                let expected: Vec<(&str, &Value)> =
                    probe.calls.iter().map(|(name, value)| (*name, value)).collect();
                calls == expected
            })
        })
    }
}

impl CallSyntax {
    /// The marks that no other text has.
    fn clear_marks(&self) -> Vec<String> {
        let mut marks: Vec<String> = self.group_marks().into();
        marks.extend([&self.open, &self.after_name].into_iter().flat_map(|mark| parts(mark)));
        if let Body::Pairs(pairs) = &self.body {
            marks.extend(parts(&pairs.key));
        }
        marks.retain(|mark| mark.len() > 3);
        marks
    }

    /// Whether the template writes all marks of the format.
    fn is_written_in(&self, probe: &Probe) -> bool {
        if self.is_bare {
            let begin = if self.group[0] == "[" {
                "["
            } else if self.has_objects() {
                "{"
            } else {
                ""
            };
            return probe.texts[1].trim_start().starts_with(begin);
        }
        let marks = [&self.group[0], &self.group[1], &self.open, &self.after_name, &self.close];
        let marks: Vec<&str> =
            marks.into_iter().flat_map(|mark| mark.split(super::syntax::LINE_END)).collect();
        probe.texts.iter().any(|text| marks.iter().all(|mark| text.contains(mark)))
    }
}

impl ReasoningFormat {
    /// Recognises a reasoning model: by its template's rendering of reasoning, by the marks in the template, and by
    /// those in its vocabulary.
    pub(in super::super) fn detect(chat: &Chat, source: &str, tokenizer: &Tokenizer) -> Option<Self> {
        let written = if chat.problem().is_none() { reasoned(chat) } else { Vec::new() };
        let found = |is_known: &dyn Fn(&str) -> bool| {
            thoughts::known()
                .into_iter()
                .find(|thoughts| is_known(&thoughts.close) && is_known(&thoughts.open))
        };
        let known = found(&|mark| written.iter().any(|text| text.contains(mark)))
            .or_else(|| written.iter().find_map(|text| learned_marks(chat, text)))
            .or_else(|| {
                found(&|mark| source.contains(mark) || written.iter().any(|text| text.contains(mark)))
            })
            .or_else(|| found(&|mark| tokenizer.token_id(mark).is_some()))
            .or_else(|| {
                let is_known = |mark: &str| source.contains(mark) || tokenizer.token_id(mark).is_some();
                let think = thoughts::think();
                (is_known(&think.open) || is_known(&think.close)).then_some(think)
            });
        known.map(|thoughts| Self { thoughts: Arc::new(thoughts), is_from_start: false })
    }
}

/// The marks around reasoning in a template's output, if they look like marks.
fn learned_marks(chat: &Chat, text: &str) -> Option<Thoughts> {
    let options = ChatOptions { add_generation_prompt: false, ..ChatOptions::default() };
    let plain = [Message::new("user", QUESTION), Message::new("assistant", ANSWER)];
    let plain = chat.render(&plain, &options).ok()?;
    let (_, plain) = plain.rsplit_once(QUESTION)?;
    let (_, after) = text.rsplit_once(QUESTION)?;
    let (open, rest) = after.split_once(THOUGHT)?;
    let (close, _) = rest.split_once(ANSWER)?;
    let open = &open[learn::shared_start(open, plain)..];
    let mark = |text: &str| {
        let text = text.trim();
        let end = text.find(['>', ']']).map(|end| end + 1)?;
        let is_mark = text.starts_with(['<', '[']) && (3..=64).contains(&end);
        (is_mark && !text[..end].contains(char::is_whitespace)).then(|| text[..end].to_owned())
    };
    let (open, close) = (mark(open)?, mark(close)?);
    (open != close).then(|| Thoughts::tags("as in the template", &open, &close))
}

fn tools() -> Arc<[Tool]> {
    NAMES.map(|name| Tool { name: name.to_owned(), parameters: Some(schema(true)) }).into()
}

/// The parser of the tools' format, complete or as far as every template can describe it.
fn schema(is_rich: bool) -> Value {
    let mut schema = json!({"type": "object", "required": ["text"], "properties": {
        "text": {"type": "string", "description": "Any."},
        "number": {"type": "integer", "description": "Any."},
        "yes": {"type": "boolean", "description": "Any."},
    }});
    if is_rich {
        schema["properties"]["none"] = json!({"type": "null", "description": "Any."});
        schema["properties"]["more"] = json!({"type": "object", "description": "Any.", "properties": {
            "list": {"type": "array", "items": {"type": ["string", "number"]}},
            "none": {"type": "null"},
        }});
    }
    schema
}

fn tool_list(is_rich: bool) -> Value {
    let tool = |name: &str| {
        json!({"type": "function", "function": {
            "name": name, "description": "Does nothing.", "parameters": schema(is_rich),
        }})
    };
    NAMES.map(tool).into_iter().collect()
}

/// Arguments of every kind, or of those that every template can write.
fn probe_arguments(is_rich: bool) -> Value {
    if !is_rich {
        return json!({"text": "probing text", "number": 3, "yes": true});
    }
    json!({"text": "probing text", "more": {"list": ["a", 1], "none": null}, "number": 3, "yes": true, "none": null})
}

/// Conversations with calls, the most specific one first; those that the template refuses are skipped.
fn probes(chat: &Chat) -> impl Iterator<Item = Probe> + use<'_> {
    let without_null = json!({"text": "probing text", "more": {"list": ["a", 1]}, "number": 3, "yes": true});
    let kinds = [(probe_arguments(true), true), (without_null, true), (probe_arguments(false), false)];
    kinds.into_iter().flat_map(move |(arguments, is_rich)| {
        let calls = [(NAMES[0], arguments), (NAMES[1], json!({"text": "beta", "number": 4}))];
        let tries = [(2, 0), (2, 1), (1, 0), (1, 1)];
        tries.into_iter().filter_map(move |(number, kind): (usize, usize)| {
            probe(chat, &calls[..number], &IDS[kind], is_rich)
        })
    })
}

/// A question, and an answer that calls.
fn asking(calls: &[(&'static str, Value)], ids: &[&str]) -> [Message; 2] {
    let call = |((name, arguments), id): (&(&str, Value), &&str)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let mut asked = Message::new("assistant", "");
    let list: Vec<Value> = calls.iter().zip(ids).map(call).collect();
    asked.extra.insert("tool_calls".to_owned(), list.into());
    [Message::new("user", QUESTION), asked]
}

fn probe(chat: &Chat, calls: &[(&'static str, Value)], ids: &[&str], is_rich: bool) -> Option<Probe> {
    let tools = Some(tool_list(is_rich));
    let options = ChatOptions { tools, add_generation_prompt: false, ..ChatOptions::default() };
    let mut messages: Vec<Message> = asking(calls, ids).into();
    for ((name, _), id) in calls.iter().zip(ids) {
        let mut result = Message::new("tool", RESULT);
        result.extra.insert("tool_call_id".to_owned(), (*id).into());
        result.extra.insert("name".to_owned(), (*name).into());
        messages.push(result);
    }
    let with_results = chat.render(&messages, &options);
    let all = with_results.or_else(|_| chat.render(&messages[..2], &options)).ok()?;
    let options = ChatOptions { add_generation_prompt: true, ..options };
    let prompt = chat.render(&messages[..1], &options).unwrap_or_default();
    let same: usize =
        prompt.chars().zip(all.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    let after = all.rfind(QUESTION).map_or("", |at| &all[at + QUESTION.len()..]);
    Some(Probe { calls: calls.to_vec(), texts: vec![after.to_owned(), all[same..].to_owned()] })
}

/// A format learned from the template, if no known one parses its output.
fn learned(chat: &Chat) -> Option<ToolCallFormat> {
    let kinds = [true, false].map(|is_rich| (probe_arguments(is_rich), is_rich));
    for ((arguments, is_rich), number) in kinds.iter().flat_map(|kind| [(kind, 2), (kind, 1)]) {
        let calls = [(NAMES[0], arguments.clone()), (NAMES[1], json!({"text": "beta", "number": 4}))];
        let Some(probe) = probe(chat, &calls[..number], &IDS[0], *is_rich) else { continue };
        let options = ChatOptions {
            tools: Some(tool_list(*is_rich)),
            add_generation_prompt: false,
            ..ChatOptions::default()
        };
        let answer = [Message::new("user", QUESTION), Message::new("assistant", ANSWER)];
        let said = chat.render(&answer, &options).unwrap_or_default();
        let said = said.rsplit_once(QUESTION).map_or("", |(_, after)| after);
        // Without it, the beginning of an answer is unknown.
        let Some(around) = said.split_once(ANSWER) else { continue };
        let asked = chat.render(&asking(&calls[..number], &IDS[0]), &options).ok();
        let text = asked.as_ref().and_then(|text| text.rsplit_once(QUESTION)).map_or("", |(_, after)| after);
        for syntax in learn::syntaxes(text, &probe.calls, &IDS[0], around) {
            let syntax = ToolCallFormat(Arc::new(syntax));
            if syntax.reads(&probe) {
                return Some(syntax);
            }
        }
    }
    None
}

/// The template's rendering of an answer with reasoning, under each field that it may read.
fn reasoned(chat: &Chat) -> Vec<String> {
    let options = ChatOptions { add_generation_prompt: false, ..ChatOptions::default() };
    let render = |field: &&str| {
        let mut answer = Message::new("assistant", ANSWER);
        answer.extra.insert((*field).to_owned(), THOUGHT.into());
        let text = chat.render(&[Message::new("user", QUESTION), answer], &options).ok()?;
        text.contains(THOUGHT).then_some(text)
    };
    let mut texts: Vec<String> = THOUGHT_FIELDS.iter().filter_map(render).collect();
    texts.extend(chat.render(&[Message::new("user", QUESTION)], &ChatOptions::default()).ok());
    texts
}

/// The calls of an answer, if their arguments are JSON.
fn calls_of(events: Vec<AnswerEvent>) -> Option<Vec<(String, Value)>> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for event in events {
        match event {
            AnswerEvent::CallBegin { name, .. } => calls.push((name, String::new())),
            AnswerEvent::CallArguments { text, .. } => calls.last_mut()?.1.push_str(&text),
            AnswerEvent::Reasoning(_) | AnswerEvent::Content(_) => {}
        }
    }
    let read = |(name, text): (String, String)| Some((name, serde_json::from_str(&text).ok()?));
    calls.into_iter().map(read).collect()
}
