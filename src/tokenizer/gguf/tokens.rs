//! The tokens of a GGUF header and their kinds, corrected where converters are known to be wrong.

use std::collections::{BTreeSet, HashSet};

use tokenizers::models::bpe::Vocab;

use super::super::END_TEXTS;
use super::super::added::{AddedToken, AddedTokens};
use super::super::vocabulary::{TokenKind, Vocabulary};
use super::template_entries;
use crate::weights::gguf::{Metadata, Value};
use crate::{Error, Result};

/// Beginnings of turns and texts that are spelled like no others.
const BEGIN_TEXTS: [&str; 2] = ["<start_of_turn>", "<bos>"];
/// Beginnings and ends that can be plain text too, as a tag of a web page.
const AMBIGUOUS: [&str; 3] = ["</s>", "<s>", "<eos>"];
/// Most tokens that a line names.
const MAX_NAMED: usize = 8;

/// `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// All tokens of a file.
#[derive(Debug)]
pub(super) struct Tokens<'m> {
    texts: &'m [String],
    types: Vec<TokenType>,
    /// Notices for the operator.
    pub(super) notices: Vec<String>,
}

impl<'m> Tokens<'m> {
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if there are none, or the types do not fit.
    pub(super) fn read(metadata: &'m Metadata) -> Result<Self> {
        let texts = metadata
            .checked("tokenizer.ggml.tokens", Metadata::strings, "a list of strings")?
            .filter(|tokens| !tokens.is_empty())
            .ok_or_else(|| {
                Error::invalid_model("tokenizer.ggml.tokens is missing or empty, expected a list of strings")
            })?;
        if u32::try_from(texts.len()).is_err() {
            return Err(Error::invalid_model(format!("tokenizer.ggml.tokens has {} entries", texts.len())));
        }
        let types = token_types(metadata, texts.len())?;
        let mut tokens = Self { texts, types, notices: Vec::new() };
        tokens.set_control(metadata)?;
        Ok(tokens)
    }

    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &'m String, TokenType)> + '_ {
        self.texts.iter().zip(0u32..).zip(&self.types).map(|((text, id), kind)| (id, text, *kind))
    }

    /// The tokens that end a turn, and those with which the template begins one, are control tokens, for every type in
    /// the file: as text they would be split into letters, and the model would never be seen to stop.
    fn set_control(&mut self, metadata: &Metadata) -> Result<()> {
        let mut ends = BTreeSet::new();
        for name in ["eos", "eot", "eom"] {
            ends.extend(metadata.checked_token_id(&format!("tokenizer.ggml.{name}_token_id"))?);
        }
        let bos = metadata.checked_token_id("tokenizer.ggml.bos_token_id")?;
        let templates: Vec<&str> = templates(metadata).collect();
        let in_template = |text: &str| templates.iter().any(|template| template.contains(text));
        let is_marker = |id: u32, text: &str| {
            let looks_special = text.len() > 4
                && (text.starts_with("<|") && text.ends_with("|>")
                    || text.starts_with("<｜") && text.ends_with("｜>"));
            ends.contains(&id)
                || bos == Some(id) && text.starts_with('<') && text.ends_with('>')
                || END_TEXTS.contains(&text) && !AMBIGUOUS.contains(&text)
                || (looks_special || BEGIN_TEXTS.contains(&text) || AMBIGUOUS.contains(&text))
                    && in_template(text)
        };
        let mut named = Vec::new();
        for ((text, id), kind) in self.texts.iter().zip(0u32..).zip(&mut self.types) {
            if *kind == TokenType::Normal && !text.is_empty() && is_marker(id, text) {
                *kind = TokenType::Control;
                named.push(format!("{text:?}"));
            }
        }
        if !named.is_empty() {
            let (are, them) = if named.len() == 1 { ("token is", "it") } else { ("tokens are", "them") };
            let names = list(named);
            self.notices.push(format!(
                "{names}: in the file the {are} ordinary text, but the chat template or the metadata ends or begins \
                 turns with {them}; taken as control"
            ));
        }
        Ok(())
    }

    /// Token text → id. Of tokens with the same text, text becomes a control token before another, and otherwise the
    /// last one, as in the libraries that vocabularies are made with. No text becomes an empty token.
    pub(super) fn vocab(&mut self) -> Vocab {
        let mut ids = Vocab::with_capacity(self.texts.len());
        let mut twice = Vec::new();
        for ((text, id), kind) in self.texts.iter().zip(0u32..).zip(&self.types) {
            if text.is_empty() {
                continue;
            }
            let other = ids.get(text).copied();
            if other.is_none_or(|other| {
                self.types[other as usize] != TokenType::Control || *kind == TokenType::Control
            }) {
                ids.insert(text.clone(), id);
            }
            if let Some(other) = other {
                twice.push(format!("{text:?} ({other} and {id})"));
            }
        }
        if !twice.is_empty() {
            self.notices.push(format!(
                "the file has several tokens with the same text, of which text becomes one: {}",
                list(twice)
            ));
        }
        ids
    }

    /// Texts that no piece may become.
    pub(super) fn control_texts(&self) -> HashSet<String> {
        let control = self.iter().filter(|(_, _, kind)| *kind == TokenType::Control);
        control.map(|(_, text, _)| text.clone()).collect()
    }

    /// Tokens that are matched before text is split into pieces. `vocab` decides between tokens of the same text.
    ///
    /// # Errors
    /// If one is too long.
    pub(super) fn added(&self, vocab: &Vocab, is_control: impl Fn(TokenType) -> bool) -> Result<AddedTokens> {
        let added = self
            .iter()
            .filter(|(id, text, _)| vocab.get(*text) == Some(id))
            .filter_map(|(id, text, kind)| match kind {
                kind if is_control(kind) => Some(AddedToken::control(id, text)),
                TokenType::UserDefined => Some(AddedToken::user_defined(id, text)),
                _ => None,
            })
            .collect();
        AddedTokens::new(added, |text| Ok(text.to_owned()))
    }

    /// The meaning of each id; `decode` is for ordinary tokens.
    ///
    /// # Errors
    /// If there are too many.
    pub(super) fn vocabulary(&self, decode: impl Fn(&str, TokenType) -> Vec<u8>) -> Result<Vocabulary> {
        Vocabulary::new(self.iter().map(|(id, text, kind)| match kind {
            TokenType::Control | TokenType::Unknown => (id, text.as_bytes().to_vec(), TokenKind::Control),
            TokenType::UserDefined => (id, text.as_bytes().to_vec(), TokenKind::Text),
            TokenType::Normal | TokenType::Unused | TokenType::Byte => {
                (id, decode(text, kind), TokenKind::Text)
            }
        }))
    }
}

/// The sources of all chat templates.
fn templates(metadata: &Metadata) -> impl Iterator<Item = &str> {
    template_entries(metadata).filter_map(|(_, value)| match value {
        Value::String(source) => Some(source.as_str()),
        _ => None,
    })
}

fn list(mut names: Vec<String>) -> String {
    let num_more = names.len().saturating_sub(MAX_NAMED);
    names.truncate(MAX_NAMED);
    let more = if num_more > 0 { format!(" and {num_more} more") } else { String::new() };
    format!("{}{more}", names.join(", "))
}

fn token_types(metadata: &Metadata, num_tokens: usize) -> Result<Vec<TokenType>> {
    // Files without types exist; all their tokens are text.
    let Some(types) =
        metadata.checked("tokenizer.ggml.token_type", Metadata::integers, "a list of whole numbers")?
    else {
        return Ok(vec![TokenType::Normal; num_tokens]);
    };
    if types.len() != num_tokens {
        return Err(Error::invalid_model(format!(
            "tokenizer.ggml.token_type has {} entries, expected one for each of the {num_tokens} tokens",
            types.len()
        )));
    }
    let parse = |(id, kind): (usize, &i64)| match kind {
        // 0 is "undefined", which some converters write for ordinary tokens.
        0 | 1 => Ok(TokenType::Normal),
        2 => Ok(TokenType::Unknown),
        3 => Ok(TokenType::Control),
        4 => Ok(TokenType::UserDefined),
        5 => Ok(TokenType::Unused),
        6 => Ok(TokenType::Byte),
        other => Err(Error::invalid_model(format!("token {id} has the type {other}, expected 1 to 6"))),
    };
    types.iter().enumerate().map(parse).collect()
}
