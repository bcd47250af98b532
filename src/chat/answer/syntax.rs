//! The syntax of tool calls. A syntax is data; [`super::calls`] parses texts with it, [`super::grammar`] writes
//! grammars from it, and [`super::syntaxes`] has the known ones.
//!
//! The texts of a syntax are a model's output, with white space. In them, [`LINE_END`] is an optional line end, and
//! [`NUMBER`] means digits. The parser is less strict than the grammar: it ignores white space around a mark.

use std::borrow::Cow;

/// An optional line end.
pub(super) const LINE_END: char = '¶';
/// Some digits.
pub(super) const NUMBER: char = '#';
/// The types that a value may have for which a mark is written; those of this name, or all others.
pub(super) const ANY_TYPE: &str = "any";

/// How calls are written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct CallSyntax {
    /// Its name for people.
    pub(super) name: String,
    /// Alternative names.
    pub(super) aliases: Vec<&'static str>,
    /// Before and after a group of calls; empty if there is none.
    pub(super) group: [String; 2],
    /// Each call is a separate group.
    pub(super) is_each: bool,
    /// Between two calls, or between two groups if each call is one.
    pub(super) separator: String,
    /// The answer may begin with a call, without other text before it. Only its syntax distinguishes such a call from
    /// an answer, so it must name a tool of the request.
    pub(super) is_bare: bool,
    /// Before the name.
    pub(super) open: String,
    /// A prefix of the name that is not in it, such as `functions.`.
    pub(super) prefix: &'static str,
    /// A call's fields in addition to its name.
    pub(super) id: Id,
    /// Between the name and the arguments.
    pub(super) after_name: String,
    /// After the arguments.
    pub(super) close: String,
    /// The replacement for a name if the text after it is not a call.
    pub(super) no_name: Option<&'static str>,
    /// Objects or a list of them may replace a name.
    pub(super) takes_objects: bool,
    /// The identifier of calls for clients.
    pub(super) call_ids: CallIds,
    pub(super) body: Body,
}

/// An identifier of a call, or other text next to its name. It is skipped.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Id {
    #[default]
    None,
    /// Before the name: how it is written, and the mark after it.
    Before { written: &'static str, mark: String },
    /// After the name: how it is written, with its mark, and the marks with which it may begin.
    After { written: String, marks: Vec<String> },
}

/// The format of calls' identifiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum CallIds {
    #[default]
    Any,
    /// Nine letters and digits.
    Nine,
    /// `functions.name:0`.
    Numbered,
}

/// The elements of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Body {
    /// An object in JSON with the name and the arguments: the text before each of the two, and after them.
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
    /// It may have further keys that are not known to be ignorable.
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
    /// After a value.
    pub(super) end: String,
    /// Around the texts of some values.
    pub(super) quotes: Option<[&'static str; 2]>,
    /// Values consist of further marks: elements of objects are like arguments, and those of lists have this key.
    pub(super) item: Option<&'static str>,
}

impl CallSyntax {
    /// Whether a call is a whole object in JSON.
    pub(super) fn has_objects(&self) -> bool {
        matches!(self.body, Body::Object(_) | Body::Keyed)
    }

    /// The marks around a group, for the search: brackets of lists are parsed elsewhere.
    pub(super) fn group_marks(&self) -> [String; 2] {
        let [begin, end] = [&self.group[0], &self.group[1]].map(|mark| bare(mark));
        if !self.has_objects() && self.body != Body::Python {
            return [begin, end];
        }
        let begin = begin.strip_suffix('[').map_or(begin.as_str(), str::trim_end).to_owned();
        let end = end.strip_prefix(']').map_or(end.as_str(), str::trim_start).to_owned();
        [begin, end]
    }

    /// Marks whose tokens must not be omitted from a text, so that calls are found in it.
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

/// A mark for the search: without white space around it, and split at optional line ends.
pub(super) fn parts(text: &str) -> Vec<String> {
    text.split(LINE_END).map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

/// The same for a mark without optional line ends; empty if there is none.
pub(super) fn bare(text: &str) -> String {
    text.replace(LINE_END, "").trim().to_owned()
}
