//! Arguments as keys and values between marks, without quotes; `unquoted.rs` interprets such values.

use super::Tool;
use super::marker::MarkerScan;
use super::nested;
use super::output::Output;
use super::syntax::{Pairs, bare, parts};
use super::unquoted::{Types, escaped, quoted};

/// The arguments of one call.
#[derive(Debug)]
pub(super) struct PairsCall {
    marks: PairMarks,
    /// The end of the call.
    ends: [String; 4],
    scan: MarkerScan,
    state: State,
    name: String,
    key: String,
    num_arguments: usize,
}

/// The state of the search.
#[derive(Debug)]
struct PairMarks {
    key: String,
    /// The ends of a key, with the types of values and the text before the value in each case.
    key_ends: Vec<(&'static str, String, String)>,
    /// A line end before a value, or after it, belongs to its marks.
    has_line_ends: bool,
    value_end: String,
    quotes: Option<[&'static str; 2]>,
    item: Option<&'static str>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Between,
    Key(String),
    /// Between the end of a key and the mark before its value.
    AfterKey(&'static str, String),
    /// Before the first character of a value of this type; whether a line end may still come.
    BeforeValue(&'static str, bool),
    /// In a value that is text for certain, and whether it has quotes.
    Text(bool),
    /// In any other value.
    Value(String, bool),
}

/// The result of a character.
#[derive(Debug)]
pub(super) enum PairStep {
    Open,
    /// The call is over with this mark.
    Done(String),
    /// This is no argument.
    Broken(String),
}

impl PairsCall {
    pub(super) fn new(pairs: &Pairs, name: &str, ends: [String; 4]) -> Self {
        let key_ends = pairs.between.iter().map(|(kind, text)| {
            let mut parts = parts(text).into_iter();
            (*kind, parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
        });
        let marks = PairMarks {
            key: bare(&pairs.key),
            key_ends: key_ends.collect(),
            has_line_ends: pairs.between.iter().any(|(_, text)| text.ends_with('\n')),
            value_end: bare(&pairs.end),
            quotes: pairs.quotes,
            item: pairs.item,
        };
        Self {
            marks,
            ends,
            scan: MarkerScan::default(),
            state: State::Between,
            name: name.to_owned(),
            key: String::new(),
            num_arguments: 0,
        }
    }

    pub(super) fn step(&mut self, c: char, tools: &[Tool], output: &mut Output) -> PairStep {
        let mut released = String::new();
        match std::mem::take(&mut self.state) {
            State::Between => {
                // An end may begin as a key does.
                let is_end_first = self.ends.iter().any(|end| end.starts_with(&self.marks.key));
                let found = match is_end_first {
                    true => self.key_or_end(c, &mut released),
                    false => {
                        let [a, b, d, e] = &self.ends;
                        self.scan.push(c, &[a, b, d, e, &self.marks.key], &mut released)
                    }
                };
                if !released.trim().is_empty() {
                    let marks = self.ends.iter().chain([&self.marks.key]);
                    let mark =
                        found.and_then(|found| marks.into_iter().nth(found)).cloned().unwrap_or_default();
                    return PairStep::Broken(released + &mark + &self.scan.take());
                }
                match found {
                    None => {}
                    Some(4) => self.state = State::Key(String::new()),
                    Some(end) => return PairStep::Done(self.ends[end].clone()),
                }
            }
            State::Key(mut key) => {
                let ends: Vec<&str> = self.marks.key_ends.iter().map(|(_, end, _)| end.as_str()).collect();
                let found = self.scan.push(c, &ends, &mut released);
                key.push_str(&released);
                let Some(found) = found else {
                    if key.contains('\n') {
                        return PairStep::Broken(format!("{}{key}{}", self.marks.key, self.scan.take()));
                    }
                    self.state = State::Key(key);
                    return PairStep::Open;
                };
                if key.trim().is_empty() {
                    return PairStep::Broken(format!("{}{key}{}", self.marks.key, ends[found]));
                }
                let (kind, _, before) = &self.marks.key_ends[found];
                self.state = match before.is_empty() {
                    true => State::BeforeValue(kind, self.marks.has_line_ends),
                    false => State::AfterKey(kind, before.clone()),
                };
                self.begin_argument(key.trim(), output);
            }
            State::AfterKey(kind, mark) => {
                let found = self.scan.push(c, &[&mark], &mut released);
                if !released.trim().is_empty() {
                    return PairStep::Broken(released + &self.scan.take());
                }
                self.state = match found {
                    Some(_) => State::BeforeValue(kind, self.marks.has_line_ends),
                    None => State::AfterKey(kind, mark),
                };
            }
            State::BeforeValue(kind, true) if c == '\n' => self.state = State::BeforeValue(kind, false),
            State::BeforeValue(kind, may_break) => {
                let quote = self.marks.quotes.map_or("", |[begin, _]| begin);
                let found = self.scan.push(c, &[quote], &mut released);
                if found.is_none() && released.is_empty() {
                    self.state = State::BeforeValue(kind, may_break);
                    return PairStep::Open;
                }
                self.begin_value(kind, found.is_some(), tools, output);
                let text = released + &self.scan.take();
                for c in text.chars() {
                    self.value(c, tools, output);
                }
            }
            state @ (State::Text(_) | State::Value(..)) => {
                self.state = state;
                self.value(c, tools, output);
            }
        }
        PairStep::Open
    }

    /// The text is over.
    pub(super) fn finish(mut self, output: &mut Output) {
        let held = self.scan.take();
        match self.state {
            // The model ended its turn and left the end of the call out, or was cut in it.
            State::Between if self.ends.iter().any(|end| end.starts_with(&held)) => output.argument('}'),
            State::Between | State::AfterKey(..) | State::BeforeValue(..) => output.arguments(&held),
            State::Key(key) => output.arguments(&format!("{}{key}{held}", self.marks.key)),
            State::Text(_) => output.arguments(&escaped(&held)),
            State::Value(value, _) => output.arguments(&(value + &held)),
        }
    }

    /// The next mark where that of an end is longer than that of a key and begins with it.
    fn key_or_end(&mut self, c: char, released: &mut String) -> Option<usize> {
        let ends: Vec<&str> = self.ends.iter().map(String::as_str).collect();
        let held = self.scan.take() + c.encode_utf8(&mut [0; 4]);
        if let Some(rest) = held.strip_prefix(self.marks.key.as_str())
            && !rest.is_empty()
            && !ends.iter().any(|end| end.starts_with(&held))
        {
            self.state = State::Key(rest.to_owned());
            return None;
        }
        let mut found = None;
        for c in held.chars() {
            found = self.scan.push(c, &ends, released);
        }
        found
    }

    fn begin_argument(&mut self, key: &str, output: &mut Output) {
        if self.num_arguments > 0 {
            output.arguments(", ");
        }
        self.num_arguments += 1;
        output.arguments(&quoted(key));
        output.arguments(": ");
        key.clone_into(&mut self.key);
    }

    fn types(&self, tools: &[Tool]) -> Types {
        Types::of_argument(tools, &self.name, &self.key)
    }

    fn begin_value(&mut self, kind: &str, has_quotes: bool, tools: &[Tool], output: &mut Output) {
        let has_kinds = self.marks.key_ends.len() > 1;
        let is_text = match has_kinds {
            true => kind == "string",
            false => self.types(tools).is_text() && self.marks.item.is_none(),
        };
        self.state = match is_text {
            true => {
                output.argument('"');
                State::Text(has_quotes)
            }
            false => State::Value(String::new(), has_quotes),
        };
    }

    /// In a value, whose first character is none that belongs to its mark.
    fn value(&mut self, c: char, tools: &[Tool], output: &mut Output) {
        let mut released = String::new();
        let (State::Text(has_quotes) | State::Value(_, has_quotes)) = &self.state else { return };
        let quote = self.marks.quotes.filter(|_| *has_quotes).map_or("", |[_, end]| end);
        let mut end = format!("{quote}{}", self.marks.value_end);
        if self.marks.item.is_some() {
            end.push_str(&self.key);
            end.push('>');
        }
        let with_line = if self.marks.has_line_ends { format!("\n{end}") } else { String::new() };
        let found = self.scan.push(c, &[&with_line, &end], &mut released).is_some();
        match std::mem::take(&mut self.state) {
            State::Text(has_quotes) => {
                output.arguments(&escaped(&released));
                match found {
                    true => output.argument('"'),
                    false => self.state = State::Text(has_quotes),
                }
            }
            State::Value(mut value, has_quotes) => {
                value.push_str(&released);
                match (found, self.marks.item) {
                    (false, _) => self.state = State::Value(value, has_quotes),
                    (true, Some(item)) => {
                        let begin = format!("{}{}>", self.marks.key, self.key);
                        if value.matches(&begin).count() > value.matches(&end).count() {
                            // The end of a nested element of the same name.
                            self.state = State::Value(value + &end, has_quotes);
                            return;
                        }
                        let schema = super::unquoted::argument_schema(tools, &self.name, &self.key);
                        let marks = [self.marks.key.as_str(), &self.marks.value_end];
                        output.arguments(&nested::json(&value, marks, item, schema));
                    }
                    (true, None) if self.marks.key_ends.len() > 1 => {
                        // The mark declares it as JSON.
                        let is_json = serde_json::from_str::<serde_json::Value>(value.trim()).is_ok();
                        let json =
                            if is_json { value.trim().to_owned() } else { self.types(tools).json(&value) };
                        output.arguments(&json);
                    }
                    (true, None) => output.arguments(&self.types(tools).json(&value)),
                }
            }
            other => self.state = other,
        }
    }
}
