//! The format of a model's answers, by name or found by `detect.rs`.

use std::str::FromStr;
use std::sync::{Arc, LazyLock};

use super::syntax::{CallIds, CallSyntax, LINE_END};
use super::syntaxes;
use super::thoughts::{self, Thoughts};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The format of Mistral's models whose vocabulary has no mark between a name and its arguments.
const MISTRAL: [&str; 2] = ["mistral", "mistral_list"];
/// Characters of an id in the templates of Mistral, which take no other.
const NINE: usize = 9;

/// The format of models that always reason.
const FROM_START: &str = "deepseek_r1";

static KNOWN: LazyLock<Vec<ToolCallFormat>> =
    LazyLock::new(|| syntaxes::known().into_iter().map(|syntax| ToolCallFormat(Arc::new(syntax))).collect());

/// The formats of reasoning and tool calls in an answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AnswerFormat {
    /// None if calls are not looked for.
    pub tool_calls: Option<ToolCallFormat>,
    /// None if reasoning is not split off.
    pub reasoning: Option<ReasoningFormat>,
}

/// How a family of models calls tools.
///
#[doc = include_str!("forms.md")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCallFormat(pub(super) Arc<CallSyntax>);

/// How a model thinks before it answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningFormat {
    pub(super) thoughts: Arc<Thoughts>,
    /// It always reasons, and the beginning may be missing.
    pub(super) is_from_start: bool,
}

/// How a format is chosen: by detection, none, or this one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum FormatChoice<T> {
    /// From the template and the vocabulary.
    #[default]
    Auto,
    /// The text is unchanged.
    None,
    /// This one.
    Named(T),
}

impl ToolCallFormat {
    /// All known formats. Formats of one family are adjacent.
    #[must_use]
    pub fn known() -> &'static [Self] {
        &KNOWN
    }

    /// The names of the known formats, which are vLLM's where it has one.
    #[must_use]
    pub fn names() -> Vec<&'static str> {
        KNOWN.iter().map(|format| format.0.name.as_str()).collect()
    }

    /// The known format with a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let is_called = |syntax: &CallSyntax| syntax.name == name || syntax.aliases.contains(&name);
        KNOWN.iter().find(|format| is_called(&format.0)).cloned()
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// A call's identifier for a client, of random letters and digits.
    #[must_use]
    pub fn call_id(&self, name: &str, index: usize, random: &str) -> String {
        match self.0.call_ids {
            CallIds::Any => format!("call_{random}"),
            // The end of an id has the most random bits.
            CallIds::Nine => random.get(random.len().saturating_sub(NINE)..).unwrap_or(random).to_owned(),
            CallIds::Numbered => format!("{}{name}:{index}", self.0.prefix),
        }
    }

    /// The variant of a family that fits a vocabulary and a template.
    pub(in super::super) fn fitting(self, source: &str, tokenizer: &Tokenizer) -> Self {
        let has_mark = || tokenizer.token_id("[ARGS]").is_some() || source.contains("[ARGS]");
        match self.name() == MISTRAL[0] && !has_mark() {
            true => Self::named(MISTRAL[1]).unwrap_or(self),
            false => self,
        }
    }
}

impl ReasoningFormat {
    /// `<think>…</think>`, if the model thinks.
    #[must_use]
    pub fn think() -> Self {
        Self { thoughts: Arc::new(thoughts::think()), is_from_start: false }
    }

    /// The same for a model that thinks always.
    #[must_use]
    pub fn think_from_start() -> Self {
        Self { is_from_start: true, ..Self::think() }
    }

    /// The names of the known formats, which are vLLM's where it has one.
    #[must_use]
    pub fn names() -> Vec<&'static str> {
        let known = thoughts::known();
        known.into_iter().map(|thoughts| thoughts.name).chain([FROM_START]).collect()
    }

    /// The known format with a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            FROM_START => return Some(Self::think_from_start()),
            "glm45" => return Some(Self::think()),
            _ => {}
        }
        let found = thoughts::known().into_iter().find(|thoughts| thoughts.name == name)?;
        Some(Self { thoughts: Arc::new(found), is_from_start: false })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        if self.is_from_start { FROM_START } else { self.thoughts.name }
    }

    /// The text that begins reasoning, and the one that ends it.
    #[must_use]
    pub fn markers(&self) -> (&str, &str) {
        (&self.thoughts.open, &self.thoughts.close)
    }

    /// Whether the model always reasons, so that the beginning may be missing.
    #[must_use]
    pub fn is_from_start(&self) -> bool {
        self.is_from_start
    }
}

impl AnswerFormat {
    /// The format of calls, for people.
    #[must_use]
    pub fn tool_calls_line(&self) -> String {
        self.tool_calls.as_ref().map_or("none", ToolCallFormat::name).to_owned()
    }

    /// The marks around reasoning, for display.
    #[must_use]
    pub fn reasoning_line(&self) -> String {
        let marks =
            |format: &ReasoningFormat| format!("{} … {}", format.thoughts.open, format.thoughts.close);
        self.reasoning.as_ref().map_or_else(|| "none".to_owned(), marks)
    }

    /// Tokens whose text a parser needs, although they are otherwise omitted from the text; ascending.
    #[must_use]
    pub fn marker_token_ids(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let calls = self.tool_calls.iter().flat_map(|format| format.0.marks());
        let reasoning = self.reasoning.iter().flat_map(|format| format.thoughts.marks());
        let mut ids: Vec<u32> = Vec::new();
        for mark in calls.chain(reasoning) {
            for part in mark.split(LINE_END) {
                let spans = tokenizer.find_special(part);
                ids.extend(spans.into_iter().filter_map(|span| tokenizer.token_id(&part[span])));
            }
        }
        ids.retain(|id| tokenizer.is_special(*id));
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

impl FromStr for FormatChoice<ToolCallFormat> {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "auto" => Self::Auto,
            "none" => Self::None,
            _ => match ToolCallFormat::named(name) {
                Some(format) => Self::Named(format),
                None => return Err(unknown(name, "a tool-call format", &ToolCallFormat::names())),
            },
        })
    }
}

impl FromStr for FormatChoice<ReasoningFormat> {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "auto" => Self::Auto,
            "none" => Self::None,
            _ => match ReasoningFormat::named(name) {
                Some(format) => Self::Named(format),
                None => return Err(unknown(name, "a reasoning format", &ReasoningFormat::names())),
            },
        })
    }
}

fn unknown(name: &str, what: &str, names: &[&str]) -> Error {
    Error::invalid_request(format!("{name:?} is not {what}"))
        .with_hint(format!("use auto, none, {}", names.join(", ")))
}

/// Whether a tool's name may have this character.
pub(super) fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | ':')
}
