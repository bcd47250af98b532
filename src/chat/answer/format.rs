//! Which form a model's answers have, by name or from its template and vocabulary.

use std::str::FromStr;

use super::{glm, hermes, llama3, mistral, qwen3_coder, reasoning};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The forms of reasoning and tool calls in an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AnswerFormat {
    /// None if calls are not looked for.
    pub tool_calls: Option<ToolCallFormat>,
    /// None if reasoning is not split off.
    pub reasoning: Option<ReasoningFormat>,
}

/// How a family of models calls tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// `{"name": …, "parameters": …}`: Llama 3.
    Llama3,
    /// `[TOOL_CALLS]…`: Mistral.
    Mistral,
    /// `<tool_call>name<arg_key>…`: GLM.
    Glm,
    /// `<tool_call><function=name><parameter=…`: Qwen 3 Coder.
    Qwen3Coder,
}

/// How a model thinks before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>…</think>`, if it thinks.
    Think,
    /// `…</think>`: it thinks always, and the beginning may be left out.
    ThinkFromStart,
}

/// What to do about a form: find it out, ignore it, or take this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FormatChoice<T> {
    /// From the template and the vocabulary.
    #[default]
    Auto,
    /// The text stays as it is.
    None,
    /// This one.
    Named(T),
}

impl<T> FormatChoice<T> {
    pub(in super::super) fn resolve(self, detect: impl FnOnce() -> Option<T>) -> Option<T> {
        match self {
            Self::Auto => detect(),
            Self::None => None,
            Self::Named(format) => Some(format),
        }
    }
}

impl ToolCallFormat {
    /// The names of the forms, which are vLLM's.
    pub const NAMES: [&str; 5] = ["hermes", "llama3_json", "mistral", "glm45", "qwen3_coder"];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3 => "llama3_json",
            Self::Mistral => "mistral",
            Self::Glm => "glm45",
            Self::Qwen3Coder => "qwen3_coder",
        }
    }

    /// Recognises the form that a template writes earlier calls in.
    pub(in super::super) fn detect(source: &str, tokenizer: &Tokenizer) -> Option<Self> {
        let is_known = |marker: &str| source.contains(marker) || tokenizer.token_id(marker).is_some();
        if source.contains(glm::KEY) {
            Some(Self::Glm)
        } else if source.contains(qwen3_coder::PARAMETER) {
            Some(Self::Qwen3Coder)
        } else if source.contains(hermes::OPEN) {
            Some(Self::Hermes)
        } else if is_known(mistral::OPEN) {
            Some(Self::Mistral)
        } else if is_known(llama3::TAG) {
            Some(Self::Llama3)
        } else {
            None
        }
    }

    /// What must not vanish from the text, although it may be special tokens.
    fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Qwen3Coder => &[hermes::OPEN, hermes::CLOSE],
            Self::Llama3 => &[llama3::TAG],
            Self::Mistral => &[mistral::OPEN, mistral::CALL_ID, mistral::ARGS],
            Self::Glm => &[glm::OPEN, glm::CLOSE, glm::KEY, glm::KEY_END, glm::VALUE, glm::VALUE_END],
        }
    }
}

impl ReasoningFormat {
    /// The names of the forms, which are vLLM's.
    pub const NAMES: [&str; 3] = ["qwen3", "glm45", "deepseek_r1"];

    /// The text that begins reasoning, and the one that ends it.
    #[must_use]
    pub fn markers(self) -> (&'static str, &'static str) {
        (reasoning::OPEN, reasoning::CLOSE)
    }

    /// Recognises a model that thinks.
    pub(in super::super) fn detect(source: &str, tokenizer: &Tokenizer) -> Option<Self> {
        let is_known = |marker: &&str| source.contains(*marker) || tokenizer.token_id(marker).is_some();
        [reasoning::OPEN, reasoning::CLOSE].iter().any(is_known).then_some(Self::Think)
    }
}

impl AnswerFormat {
    /// The tokens whose text a parser needs, of those that are left out of the text otherwise; ascending.
    #[must_use]
    pub fn marker_token_ids(self, tokenizer: &Tokenizer) -> Vec<u32> {
        let calls = self.tool_calls.map_or(&[] as &[_], ToolCallFormat::markers);
        let reasoning = self.reasoning.map_or(&[] as &[_], |_| &[reasoning::OPEN, reasoning::CLOSE]);
        let ids = calls.iter().chain(reasoning).filter_map(|marker| tokenizer.token_id(marker));
        let mut ids: Vec<u32> = ids.filter(|id| tokenizer.is_special(*id)).collect();
        ids.sort_unstable();
        ids
    }
}

impl FromStr for FormatChoice<ToolCallFormat> {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "auto" => Self::Auto,
            "none" => Self::None,
            "hermes" => Self::Named(ToolCallFormat::Hermes),
            "llama3_json" => Self::Named(ToolCallFormat::Llama3),
            "mistral" => Self::Named(ToolCallFormat::Mistral),
            "glm45" | "glm47" => Self::Named(ToolCallFormat::Glm),
            "qwen3_coder" | "qwen3_xml" => Self::Named(ToolCallFormat::Qwen3Coder),
            _ => return Err(unknown(name, "a form of tool calls", &ToolCallFormat::NAMES)),
        })
    }
}

impl FromStr for FormatChoice<ReasoningFormat> {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "auto" => Self::Auto,
            "none" => Self::None,
            "qwen3" | "glm45" => Self::Named(ReasoningFormat::Think),
            "deepseek_r1" => Self::Named(ReasoningFormat::ThinkFromStart),
            _ => return Err(unknown(name, "a form of reasoning", &ReasoningFormat::NAMES)),
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
