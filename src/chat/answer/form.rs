//! What a form of calls consists of. A form is data; [`super::calls`] reads texts by it, [`super::grammar`] writes
//! grammars of it, and [`super::forms`] has those that are known.
//!
//! The texts of a form are what a model writes, with white space. In them, [`LINE_END`] is a line end that may be left
//! out, and [`NUMBER`] stands for digits. Who reads is less strict than who writes: white space around a mark never counts.

use std::borrow::Cow;

/// A line end that may be left out.
pub(super) const LINE_END: char = '¶';
/// Some digits.
pub(super) const NUMBER: char = '#';
/// The types that a value may have for which a mark is written; those of this name, or all others.
pub(super) const ANY_TYPE: &str = "any";

/// How calls are written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Form {
    /// Its name for people.
    pub(super) name: String,
    /// Other names that it is known by.
    pub(super) aliases: Vec<&'static str>,
    /// Before and behind a group of calls; empty if there is nothing.
    pub(super) group: [String; 2],
    /// Each call is a group of its own.
    pub(super) is_each: bool,
    /// Between two calls, or between two groups if each call is one.
    pub(super) separator: String,
    /// The answer may begin with a call, without what else comes before it. Nothing but its form tells such a call from
    /// an answer, so it must name a tool of the request.
    pub(super) is_bare: bool,
    /// Before the name.
    pub(super) open: String,
    /// Belongs to the name and is no part of it, such as `functions.`.
    pub(super) prefix: &'static str,
    /// What else is told of a call beside its name.
    pub(super) id: Id,
    /// Between the name and the arguments.
    pub(super) after_name: String,
    /// Behind the arguments.
    pub(super) close: String,
    /// What stands in the place of a name if the text behind it is no call.
    pub(super) no_name: Option<&'static str>,
    /// Objects or a list of them may stand in the place of a name.
    pub(super) takes_objects: bool,
    /// What clients know a call by.
    pub(super) call_ids: CallIds,
    pub(super) body: Body,
}

/// An identifier of a call, or what else is written beside its name. It is read over.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Id {
    #[default]
    None,
    /// Before the name: how it is written, and the mark behind it.
    Before { written: &'static str, mark: String },
    /// Behind the name: how it is written, with its mark, and the marks with which it may begin.
    After { written: String, marks: Vec<String> },
}

/// What identifiers of calls look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum CallIds {
    #[default]
    Any,
    /// Nine letters and digits.
    Nine,
    /// `functions.name:0`.
    Numbered,
}

/// What a call consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Body {
    /// An object in JSON with the name and the arguments: what stands before each of the two, and behind them.
    Object(ObjectText),
    /// An object in JSON whose only key is the name.
    Keyed,
    /// The name, and then the arguments in JSON.
    Json,
    /// The name, and then keys and values without quotes.
    Pairs(Pairs),
    /// `name(key=value, …)`, with values as in Python.
    Python,
    /// `name{key:value, …}`, with values as in Python and texts in quotes of their own.
    Braces { quote: &'static str },
}

/// The text of an object around a name and arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ObjectText {
    pub(super) before_name: Cow<'static, str>,
    pub(super) before_arguments: Cow<'static, str>,
    pub(super) end: Cow<'static, str>,
    /// It may have more keys than are known to mean nothing.
    pub(super) has_more: bool,
}

impl ObjectText {
    pub(super) const fn new(before_name: &'static str, before_arguments: &'static str) -> Self {
        Self {
            before_name: Cow::Borrowed(before_name),
            before_arguments: Cow::Borrowed(before_arguments),
            end: Cow::Borrowed("}"),
            has_more: false,
        }
    }

    /// The keys of the name and of the arguments.
    pub(super) fn keys(&self) -> [&str; 2] {
        [&self.before_name, &self.before_arguments].map(|text| text.rsplit('"').nth(1).unwrap_or_default())
    }
}

impl Default for Body {
    fn default() -> Self {
        Self::Object(ObjectText::new("{\"name\": ", ", \"arguments\": "))
    }
}

/// Keys and values without quotes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Pairs {
    /// Before a key.
    pub(super) key: String,
    /// Between a key and its value: for values of a type, or of any.
    pub(super) between: Vec<(&'static str, String)>,
    /// Behind a value.
    pub(super) end: String,
    /// Around the texts of some values.
    pub(super) quotes: Option<[&'static str; 2]>,
    /// Values consist of further marks: parts of objects are as arguments, and those of lists have this key.
    pub(super) item: Option<&'static str>,
}

impl Form {
    /// Whether a call is a whole object in JSON.
    pub(super) fn has_objects(&self) -> bool {
        matches!(self.body, Body::Object(_) | Body::Keyed)
    }

    /// The marks around a group as they are looked for: brackets of lists are read by the way.
    pub(super) fn group_marks(&self) -> [String; 2] {
        let [begin, end] = [&self.group[0], &self.group[1]].map(|mark| bare(mark));
        if !self.has_objects() && self.body != Body::Python {
            return [begin, end];
        }
        let begin = begin.strip_suffix('[').map_or(begin.as_str(), str::trim_end).to_owned();
        let end = end.strip_prefix(']').map_or(end.as_str(), str::trim_start).to_owned();
        [begin, end]
    }

    /// What must not vanish from a text for calls to be found in it.
    pub(super) fn marks(&self) -> Vec<&str> {
        let mut marks: Vec<&str> = vec![&self.open, &self.after_name, &self.close];
        marks.extend(self.group.iter().map(String::as_str));
        match &self.id {
            Id::None => {}
            Id::Before { mark, .. } => marks.push(mark),
            Id::After { marks: begins, .. } => marks.extend(begins.iter().map(String::as_str)),
        }
        if let Body::Pairs(pairs) = &self.body {
            marks.extend([pairs.key.as_str(), &pairs.end]);
            marks.extend(pairs.between.iter().map(|(_, text)| text.as_str()));
            marks.extend(pairs.quotes.iter().flatten());
        }
        if let Body::Braces { quote } = self.body {
            marks.push(quote);
        }
        marks
    }
}

/// A mark as it is looked for: without white space around it, and in parts where a line end may be left out.
pub(super) fn parts(text: &str) -> Vec<String> {
    text.split(LINE_END).map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

/// The same for a mark of one part; empty if there is none.
pub(super) fn bare(text: &str) -> String {
    text.replace(LINE_END, "").trim().to_owned()
}
