//! Finds calls in content, by the data of a call syntax.
//!
//! A call is an object in JSON, or a name with arguments after it; `pairs.rs` reads arguments without quotes, and
//! `literal_call.rs` those of Python. Text that looks like a call but is not stays content, unchanged.

use std::sync::Arc;

use super::Tool;
use super::format::is_name_char;
use super::json_call::{JsonCall, Status, ValueScan, ValueStep};
use super::literal_call::{LiteralCall, LiteralStep};
use super::marker::MarkerScan;
use super::output::Output;
use super::pairs::{PairStep, PairsCall};
use super::repr_call::ReprCall;
use super::syntax::{Body, CallSyntax, Id, bare};

/// Characters between a name and its arguments.
const MAX_ID: usize = 256;

/// The calls of one answer.
#[derive(Debug)]
pub(super) struct Calls {
    syntax: Arc<CallSyntax>,
    marks: Marks,
    scan: MarkerScan,
    state: State,
}

/// The state of the search.
#[derive(Debug)]
struct Marks {
    /// The possible starts of a call in a text.
    start: String,
    begin: String,
    end: String,
    open: String,
    after_name: String,
    close: String,
    /// Before an argument.
    key: String,
    ids: Vec<String>,
}

#[derive(Debug)]
enum State {
    Text,
    /// Before a call, with all since the mark, or after one.
    Group {
        raw: String,
        has_calls: bool,
    },
    Object(JsonCall),
    /// In an object as Python writes it.
    Repr(ReprCall),
    /// In a name, with all since the mark.
    Name {
        raw: String,
        name: String,
    },
    /// Between a name and its arguments.
    Id {
        raw: String,
        name: String,
    },
    BeforeJson,
    Json(ValueScan),
    Pairs(PairsCall),
    Literal(LiteralCall),
    /// In a broken call: the rest is its arguments, unchanged.
    Rest,
}

impl State {
    /// Whether this text is before a call whose name is not known yet.
    fn is_beginning_after(&self, start: &str) -> bool {
        let is_after = |raw: &str| raw.trim_start().starts_with(start);
        match self {
            Self::Group { raw, .. } | Self::Name { raw, .. } | Self::Id { raw, .. } => is_after(raw),
            Self::Object(call) => !call.has_begun() && is_after(call.raw()),
            Self::Repr(call) => call.is_after(start),
            Self::Text
            | Self::BeforeJson
            | Self::Json(_)
            | Self::Pairs(_)
            | Self::Literal(_)
            | Self::Rest => false,
        }
    }
}

impl Marks {
    fn new(syntax: &CallSyntax) -> Self {
        let [begin, end] = syntax.group_marks();
        let open = bare(&syntax.open);
        let key = match &syntax.body {
            Body::Pairs(pairs) => bare(&pairs.key),
            _ => String::new(),
        };
        let ids = match &syntax.id {
            Id::None => Vec::new(),
            Id::Before { mark, .. } => vec![bare(mark)],
            Id::After { marks, .. } => marks.iter().map(|mark| bare(mark)).collect(),
        };
        Self {
            start: if begin.is_empty() { open.clone() } else { begin.clone() },
            begin,
            end,
            open,
            after_name: bare(&syntax.after_name),
            close: bare(&syntax.close),
            key,
            ids,
        }
    }
}

impl Calls {
    pub(super) fn new(syntax: Arc<CallSyntax>) -> Self {
        let marks = Marks::new(&syntax);
        let state = match (syntax.is_bare, marks.open.is_empty()) {
            (false, _) => State::Text,
            (true, true) => State::Group { raw: String::new(), has_calls: false },
            // The prompt has the mark already.
            (true, false) => State::Name { raw: String::new(), name: String::new() },
        };
        Self { syntax, marks, scan: MarkerScan::default(), state }
    }

    pub(super) fn step(&mut self, c: char, tools: &[Tool], output: &mut Output) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => {
                let mut released = String::new();
                let found = self.scan.push(c, &[&self.marks.start], &mut released);
                output.content(&released);
                if found.is_some() {
                    self.state = self.started(String::new());
                }
            }
            State::Group { raw, has_calls } => self.group(c, raw, has_calls, tools, output),
            State::Object(call) => self.object(call, c, tools, output),
            State::Repr(mut call) => match call.step(c, self.syntax.is_bare.then_some(tools), output) {
                Status::Open => self.state = State::Repr(call),
                Status::Done => self.state = after_call(),
                Status::Broken => output.content(&call.into_raw()),
            },
            State::Name { raw, name } => self.name(c, raw, name, tools, output),
            State::Id { mut raw, name } => {
                let mut released = String::new();
                let found = self.scan.push(c, &[&self.marks.after_name], &mut released);
                raw.push_str(&released);
                if found.is_some() {
                    self.named(&raw, &name, tools, output);
                } else if raw.len() > MAX_ID || released.contains(['\n', '{']) {
                    self.no_call(&raw, tools, output);
                } else {
                    self.state = State::Id { raw, name };
                }
            }
            State::BeforeJson if c.is_whitespace() => self.state = State::BeforeJson,
            State::BeforeJson if c == '{' => {
                let mut scan = ValueScan::default();
                scan.step(c);
                output.argument(c);
                self.state = State::Json(scan);
            }
            State::BeforeJson => self.rest(&String::from(c), tools, output),
            State::Json(mut scan) => match scan.step(c) {
                ValueStep::Broken => self.rest(&String::from(c), tools, output),
                step => {
                    output.argument(c);
                    self.state = if step == ValueStep::Last { after_call() } else { State::Json(scan) };
                }
            },
            State::Pairs(mut call) => match call.step(c, tools, output) {
                PairStep::Open => self.state = State::Pairs(call),
                PairStep::Broken(text) => self.rest(&text, tools, output),
                PairStep::Done(text) => {
                    // The mark after the call is read again, as one.
                    output.argument('}');
                    self.state = after_call();
                    text.chars().for_each(|c| self.step(c, tools, output));
                }
            },
            State::Literal(mut call) => match call.step(c, tools, output) {
                LiteralStep::Open => self.state = State::Literal(call),
                LiteralStep::Done => self.state = after_call(),
                LiteralStep::Broken(text) => self.rest(&text, tools, output),
            },
            State::Rest => {
                let mut released = String::new();
                let ends: [&str; 2] = match self.marks.close.is_empty() && self.marks.end.is_empty() {
                    true => [&self.marks.begin, &self.marks.open],
                    false => [&self.marks.close, &self.marks.end],
                };
                let has_ends = !(self.marks.close.is_empty() && self.marks.end.is_empty());
                let found = self.scan.push(c, &ends, &mut released);
                output.arguments(&released);
                self.state = match found {
                    None => State::Rest,
                    Some(_) if !has_ends => self.started(String::new()),
                    Some(0) => after_call(),
                    Some(_) => State::Text,
                };
            }
        }
    }

    /// The text is over. If it was cut off, the beginning of a call is dropped.
    pub(super) fn finish(&mut self, is_cut_off: bool, output: &mut Output) {
        let held = self.scan.take();
        let state = std::mem::replace(&mut self.state, State::Text);
        // Without a mark, the text may as well be an answer in JSON.
        let (start, has_mark) = (&self.marks.start, self.marks.start.len() > 3);
        let is_call = has_mark
            && match &state {
                // A single character of a mark is too common in texts.
                State::Text => held.chars().nth(1).is_some(),
                state => state.is_beginning_after(start),
            };
        if is_cut_off && (is_call || output.has_calls() && state.is_beginning_after("")) {
            output.drop_spaces();
            return;
        }
        match state {
            State::Text => output.content(&held),
            // The beginning of the end, or of another call.
            State::Group { has_calls: true, .. } | State::BeforeJson | State::Json(_) => {}
            State::Group { raw, .. } | State::Name { raw, .. } | State::Id { raw, .. } => {
                output.content(&(raw + &held));
            }
            State::Object(call) => call.finish(output),
            State::Repr(call) => output.content(&call.into_raw()),
            State::Pairs(call) => call.finish(output),
            State::Literal(call) => call.finish(output),
            State::Rest => output.arguments(&held),
        }
    }

    /// After the mark with which calls begin.
    fn started(&self, raw: String) -> State {
        let raw = raw + &self.marks.start;
        match self.marks.begin.is_empty() {
            true => State::Name { raw, name: String::new() },
            false => State::Group { raw, has_calls: false },
        }
    }

    fn group(&mut self, c: char, mut raw: String, has_calls: bool, tools: &[Tool], output: &mut Output) {
        let mut released = String::new();
        let marks = [&self.marks.open, &self.marks.end, &self.marks.begin, &self.marks.close];
        let marks = marks.map(String::as_str);
        let found = self.scan.push(c, &marks, &mut released);
        let mark = found.map(|found| marks[found].to_owned());
        let is_space = released.chars().all(char::is_whitespace);
        if !is_space {
            let text = released + mark.as_deref().unwrap_or_default() + &self.scan.take();
            return self.unmarked(&text, raw, has_calls, tools, output);
        }
        raw.push_str(&released);
        let Some(mark) = mark else {
            self.state = State::Group { raw, has_calls };
            return;
        };
        if has_calls {
            raw.clear();
        }
        self.state = match found {
            Some(0) => State::Name { raw: raw + &mark, name: String::new() },
            Some(1) if has_calls => State::Text,
            Some(1) => {
                output.content(&(raw + &mark));
                State::Text
            }
            Some(2) => {
                output.content(&raw);
                State::Group { raw: mark, has_calls: false }
            }
            _ if has_calls => after_call(),
            _ => State::Group { raw: raw + &mark, has_calls },
        };
    }

    /// In a group, text that begins with something else than a mark.
    fn unmarked(
        &mut self,
        text: &str,
        mut raw: String,
        has_calls: bool,
        tools: &[Tool],
        output: &mut Output,
    ) {
        let has_objects = self.syntax.has_objects() || self.syntax.takes_objects;
        let is_python = self.syntax.body == Body::Python;
        let mut rest = text.chars();
        let Some(first) = rest.next() else {
            self.state = State::Group { raw, has_calls };
            return;
        };
        match first {
            '{' if has_objects => {
                let call = match &self.syntax.body {
                    Body::Keyed => JsonCall::keyed(raw),
                    Body::Object(object) => JsonCall::with_keys(raw, object),
                    _ => JsonCall::new(raw),
                };
                self.object(call, first, tools, output);
            }
            ',' | ';' | '[' | ']' if has_objects || is_python => {
                raw.push(first);
                if first == ']' && has_calls {
                    raw.clear();
                }
                self.state = State::Group { raw, has_calls };
            }
            _ if is_python && is_name_char(first) => {
                raw.push(first);
                self.state = State::Name { raw, name: first.to_string() };
            }
            _ => {
                output.content(&raw);
                self.state = State::Text;
                self.step(first, tools, output);
            }
        }
        rest.for_each(|c| self.step(c, tools, output));
    }

    fn object(&mut self, mut call: JsonCall, c: char, tools: &[Tool], output: &mut Output) {
        let known = self.syntax.is_bare.then_some(tools);
        match call.step(c, known, output) {
            Status::Open => self.state = State::Object(call),
            Status::Done => self.state = after_call(),
            Status::Broken => {
                let has_begun = call.has_begun();
                let raw = call.into_raw();
                match has_begun {
                    true => self.rest(&raw, tools, output),
                    false => {
                        let keys = match &self.syntax.body {
                            Body::Object(object) => object.keys(),
                            _ => ["name", "arguments"],
                        };
                        self.state = match ReprCall::begun(&raw, keys) {
                            Some(call) => State::Repr(call),
                            None => {
                                output.content(&raw);
                                State::Text
                            }
                        };
                    }
                }
            }
        }
    }

    fn name(&mut self, c: char, mut raw: String, mut name: String, tools: &[Tool], output: &mut Output) {
        let has_name = !name.trim().is_empty();
        let ends_name = match self.syntax.body {
            Body::Json => c == '{' || self.marks.after_name.is_empty() && c.is_whitespace(),
            Body::Python => c == '(',
            Body::Braces { .. } => c == '{',
            _ => false,
        };
        if ends_name && has_name && !self.scan.is_holding() {
            raw.push(c);
            self.named(&raw, &name, tools, output);
            if c == '{' && matches!(self.state, State::BeforeJson) {
                self.step(c, tools, output);
            }
            return;
        }
        if self.syntax.takes_objects && !has_name && matches!(c, '{' | '[') && !self.scan.is_holding() {
            return self.unmarked(&c.to_string(), raw, false, tools, output);
        }
        let mut released = String::new();
        let is_pairs = matches!(self.syntax.body, Body::Pairs(_));
        let only = |mark: &'_ String| if is_pairs { mark.clone() } else { String::new() };
        let mut marks = vec![self.marks.after_name.clone()];
        marks.extend([&self.marks.key, &self.marks.close, &self.marks.end].map(only));
        marks.extend(self.marks.ids.iter().cloned());
        let marks: Vec<&str> = marks.iter().map(String::as_str).collect();
        let found = self.scan.push(c, &marks, &mut released);
        name.push_str(&released);
        raw.push_str(&released);
        let trimmed = name.trim();
        let is_name = trimmed.chars().all(is_name_char);
        let Some(found) = found else {
            match is_name {
                true => self.state = State::Name { raw, name },
                false => self.no_call(&raw, tools, output),
            }
            return;
        };
        let mark = marks[found].to_owned();
        let is_id = found >= 4;
        raw.push_str(&mark);
        if is_id && matches!(self.syntax.id, Id::Before { .. }) && is_name {
            self.state = State::Name { raw, name: String::new() };
        } else if !is_name || trimmed.is_empty() {
            self.no_call(&raw, tools, output);
        } else if is_id {
            self.state = State::Id { raw, name };
        } else {
            self.named(&raw, &name, tools, output);
            if found > 0 && matches!(self.state, State::Pairs(_)) {
                mark.chars().for_each(|c| self.step(c, tools, output));
            }
        }
    }

    /// The name is complete.
    fn named(&mut self, raw: &str, name: &str, tools: &[Tool], output: &mut Output) {
        let name = name.trim();
        let name = name.strip_prefix(self.syntax.prefix).unwrap_or(name);
        if self.syntax.no_name == Some(name) {
            self.state = State::Text;
            return;
        }
        if name.is_empty() || self.syntax.is_bare && !tools.iter().any(|tool| tool.name == name) {
            return self.no_call(raw, tools, output);
        }
        output.begin_call(name);
        self.state = match &self.syntax.body {
            Body::Pairs(pairs) => {
                output.argument('{');
                let ends = [&self.marks.close, &self.marks.end, &self.marks.open, &self.marks.begin];
                State::Pairs(PairsCall::new(pairs, name, ends.map(String::clone)))
            }
            Body::Python => State::Literal(LiteralCall::new(name, ['=', ')'], "", output)),
            Body::Braces { quote } => State::Literal(LiteralCall::new(name, [':', '}'], quote, output)),
            Body::Json | Body::Object(_) | Body::Keyed => State::BeforeJson,
        };
    }

    /// The candidate is not a call.
    fn no_call(&mut self, raw: &str, tools: &[Tool], output: &mut Output) {
        let held = self.scan.take();
        output.content(raw);
        self.state = State::Text;
        held.chars().for_each(|c| self.step(c, tools, output));
    }

    fn rest(&mut self, text: &str, tools: &[Tool], output: &mut Output) {
        let held = self.scan.take();
        self.state = State::Rest;
        text.chars().chain(held.chars()).for_each(|c| self.step(c, tools, output));
    }
}

fn after_call() -> State {
    State::Group { raw: String::new(), has_calls: true }
}
