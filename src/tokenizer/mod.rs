//! Text to token ids and back.
//!
//! A [`Tokenizer`] is read from a `tokenizer.json`, a model folder or a GGUF header and behaves the same
//! from then on. Invariants: the same file gives the same ids as its reference implementation; only text
//! that the caller declares a template may produce special tokens; decoding is the joining of each
//! token's bytes, so [`Detokenizer`] can stream it. It knows nothing of conversations and templates (it
//! only carries the template's source) and nothing of the engine.

mod added;
mod allowance;
mod bpe;
mod byte_level;
mod charsmap;
mod detokenizer;
mod dropped;
mod folder;
mod gguf;
mod json;
mod normalizer;
mod pipeline;
mod pre;
mod split;
mod spm;
mod stop;
mod templates;
mod vocabulary;

use std::collections::{BTreeSet, HashSet};
use std::sync::OnceLock;

use serde_json::{Map, Value};

use self::added::AddedTokens;
use self::pipeline::{PiecePipeline, Source, Span};
use self::spm::SpmModel;
use self::templates::ChatTemplates;
use self::vocabulary::{TokenKind, Vocabulary};
use crate::Result;

pub use self::detokenizer::Detokenizer;
pub use self::dropped::dropped_in;
pub use self::stop::{StopMatcher, StopOutcome};

/// What to do with text that spells a special token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Make it that token: for templates and for prompts that the user writes out in full.
    Parse,
    /// Encode its letters like any other text.
    AsText,
}

/// Tokens whose text ends an answer in every model that has them. Files often fail to list them.
const END_TEXTS: [&str; 16] = [
    "</s>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "<EOT>",
    "[EOT]",
    "[e~[",
    "<｜end▁of▁sentence｜>",
];
/// With all of these, an answer has several messages, and `<|end|>` ends only one of them.
const END_OF_MESSAGE: (&str, [&str; 2]) = ("<|end|>", ["<|return|>", "<|call|>"]);

/// A tokenizer with the special tokens and chat templates that came with it.
#[derive(Debug)]
pub struct Tokenizer {
    vocabulary: Vocabulary,
    added: AddedTokens,
    pipeline: Pipeline,
    bos_token_id: Option<u32>,
    /// The end-of-sequence token alone, as templates name it.
    eos_token_id: Option<u32>,
    /// The same and the other tokens that end a turn or message, ascending.
    eos_token_ids: Vec<u32>,
    /// What encoding a prompt puts before it, usually the BOS token alone.
    prefix_token_ids: Vec<u32>,
    /// The special tokens that the files name, as templates know them: `unk_token`, `image_token` and so on.
    template_tokens: Map<String, Value>,
    chat_templates: ChatTemplates,
    /// Leading spaces that decoding takes off, because encoding puts them there.
    num_leading_spaces: usize,
    /// Notices about the file for the operator.
    notices: Vec<String>,
    /// The texts of tokens of at most one character, listed at first use.
    single: OnceLock<HashSet<Vec<u8>>>,
    /// The bytes of the longest token, counted at first use.
    longest: OnceLock<usize>,
}

/// From text without added tokens to ids.
#[derive(Debug)]
enum Pipeline {
    /// Each piece on its own.
    Pieces(Box<PiecePipeline>),
    /// Merging by score.
    Spm(SpmModel),
}

impl Tokenizer {
    /// Encodes text, without adding anything to it. Characters without a token are dropped where there is no unknown
    /// token; [`dropped_in`] returns them.
    ///
    /// # Errors
    /// If the text cannot be normalised or split as the file says.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>> {
        match special {
            SpecialTokens::Parse => self.encode_protected(text, &[]),
            SpecialTokens::AsText => self.encode_protected(text, std::slice::from_ref(&(0..text.len()))),
        }
    }

    /// Encodes a prompt as it is, special tokens included. With `add_bos` the tokens that the model
    /// expects at the beginning come first, unless the text already begins with them.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_prompt(&self, text: &str, add_bos: bool) -> Result<Vec<u32>> {
        let ids = self.encode(text, SpecialTokens::Parse)?;
        Ok(if add_bos { self.with_prefix(ids) } else { ids })
    }

    /// Encodes text in which the spans of `protected` (sorted, disjoint, in bytes) are plain text and the
    /// rest may spell special tokens.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub(crate) fn encode_protected(&self, text: &str, protected: &[Span]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let mut source = Source::new(text, protected);
        for fragment in source.split(&self.added) {
            match (fragment.id, &self.pipeline) {
                (Some(id), _) => ids.push(id),
                (None, Pipeline::Spm(model)) => model.encode(&text[fragment.range], &mut ids),
                (None, Pipeline::Pieces(pipeline)) => {
                    pipeline.encode(&mut source, fragment.range, &self.added, &mut ids)?;
                }
            }
        }
        Ok(ids)
    }

    /// Puts the tokens that the model expects at the beginning before `ids`, unless they are there.
    pub(crate) fn with_prefix(&self, ids: Vec<u32>) -> Vec<u32> {
        if ids.starts_with(&self.prefix_token_ids) {
            return ids;
        }
        let mut prefixed = self.prefix_token_ids.clone();
        prefixed.extend(ids);
        prefixed
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD; an id without a token stands for no
    /// text. With `skip_special`, control tokens are omitted.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        let mut num_leading_spaces = self.num_leading_spaces;
        for &id in ids {
            let mut token = self.emitted_bytes(id, skip_special);
            if num_leading_spaces > 0 {
                token = strip_leading_spaces(token, &mut num_leading_spaces);
            }
            bytes.extend_from_slice(token);
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }

    /// One more than the highest token id. The model's embedding may have more rows.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// The bytes that a token stands for; none for an id without a token. They need not be UTF-8.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocabulary.bytes(id)
    }

    /// The bytes of the longest token.
    pub(crate) fn longest_token(&self) -> usize {
        *self.longest.get_or_init(|| {
            let ids = 0..u32::try_from(self.vocab_size()).unwrap_or(u32::MAX);
            ids.map(|id| self.token_bytes(id).len()).max().unwrap_or(1)
        })
    }

    /// The text that a token stands for, with U+FFFD for what is not UTF-8.
    #[must_use]
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// The id of a token by its spelling in the file (byte-level files write a space as `Ġ`).
    #[must_use]
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.added.id(text).or_else(|| match &self.pipeline {
            Pipeline::Pieces(pipeline) => pipeline.model.id(text),
            Pipeline::Spm(model) => model.id(text),
        })
    }

    /// Whether the token is a control token, which is no part of the text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.vocabulary.kind(id) == TokenKind::Control
    }

    /// The token at the beginning of a sequence, if the model has one.
    #[must_use]
    pub fn bos_token_id(&self) -> Option<u32> {
        self.bos_token_id
    }

    /// The token that templates call `eos_token`, if the model has one; [`Self::eos_token_ids`] are all that end an answer.
    #[must_use]
    pub fn eos_token_id(&self) -> Option<u32> {
        self.eos_token_id
    }

    /// Whether prompts are to begin with tokens that their text does not spell.
    #[must_use]
    pub fn add_bos(&self) -> bool {
        !self.prefix_token_ids.is_empty()
    }

    /// The tokens that the file itself calls end of sequence, turn or message, ascending.
    #[must_use]
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// All tokens that end an answer, ascending: the file's own, those of the generation config, and
    /// those known by their text.
    #[must_use]
    pub fn stop_token_ids(&self, generation_config: &[u32]) -> Vec<u32> {
        let (end_of_message, ends) = END_OF_MESSAGE;
        let has_messages = ends.iter().all(|text| self.added.id(text).is_some());
        let is_end = |text: &&&str| !has_messages || **text != end_of_message;
        let by_text = END_TEXTS.iter().filter(is_end).filter_map(|text| self.added.id(text));
        let all: BTreeSet<u32> =
            self.eos_token_ids.iter().chain(generation_config).copied().chain(by_text).collect();
        all.into_iter().collect()
    }

    /// The source of the chat template, if the files contain one.
    #[must_use]
    pub fn chat_template(&self) -> Option<&str> {
        self.named_chat_template(templates::DEFAULT)
    }

    /// The source of a further chat template, such as `tool_use`.
    #[must_use]
    pub fn named_chat_template(&self, name: &str) -> Option<&str> {
        self.chat_templates.get(name)
    }

    /// Why there is no template of this name, if the files have an entry for it that is none.
    #[must_use]
    pub fn chat_template_problem(&self, name: &str) -> Option<String> {
        self.chat_templates.problem(name)
    }

    /// Why the model's own template for chats is none, if the files have one.
    #[must_use]
    pub fn default_chat_template_problem(&self) -> Option<String> {
        self.chat_template_problem(templates::DEFAULT)
    }

    /// The names of all chat templates.
    pub fn chat_template_names(&self) -> impl Iterator<Item = &str> {
        self.chat_templates.names()
    }

    /// What was found in the files that is not as it should be, and what was made of it; a line each.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Whether there is a token for this character alone, or tokens for its bytes.
    pub(crate) fn can_write(&self, c: char) -> bool {
        let mut buffer = [0; 4];
        let bytes = c.encode_utf8(&mut buffer).as_bytes();
        let single = self.single.get_or_init(|| {
            let ids = 0..u32::try_from(self.vocab_size()).unwrap_or(u32::MAX);
            let text = ids.filter(|id| !self.is_special(*id)).map(|id| self.token_bytes(id));
            text.filter(|bytes| (1..=4).contains(&bytes.len())).map(<[u8]>::to_vec).collect()
        });
        single.contains(bytes) || bytes.iter().all(|byte| single.contains(std::slice::from_ref(byte)))
    }

    /// The spans of `text` that spell special tokens.
    pub(crate) fn find_special(&self, text: &str) -> Vec<Span> {
        self.added.find_guarded(text)
    }

    /// The special tokens as variables of a template.
    pub(crate) fn template_tokens(&self) -> Map<String, Value> {
        let ends = [("bos_token", self.bos_token_id), ("eos_token", self.eos_token_id)];
        let known =
            ends.into_iter().filter_map(|(name, id)| Some((name.to_owned(), self.token_text(id?).into())));
        known.chain(self.template_tokens.clone()).collect()
    }

    /// Notes once that the files' suffix after every text is omitted: an answer continues its prompt.
    fn note_suffix(&mut self, file: &str, suffix: &str) {
        const SUFFIX_NOTICE: &str =
            "after every text; prompts are without it, because an answer continues them";
        if !self.notices.iter().any(|notice| notice.ends_with(SUFFIX_NOTICE)) {
            self.notices.push(format!("{file} puts {suffix} {SUFFIX_NOTICE}"));
        }
    }

    pub(crate) fn num_leading_spaces(&self) -> usize {
        self.num_leading_spaces
    }

    /// The bytes that a token adds to the output.
    pub(crate) fn emitted_bytes(&self, id: u32, skip_special: bool) -> &[u8] {
        if skip_special && self.is_special(id) { &[] } else { self.token_bytes(id) }
    }
}

/// Takes up to `remaining` spaces off the front. Once something else was seen, none are taken any more.
pub(crate) fn strip_leading_spaces<'b>(bytes: &'b [u8], remaining: &mut usize) -> &'b [u8] {
    let num_spaces = bytes.iter().take(*remaining).take_while(|byte| **byte == b' ').count();
    *remaining = if num_spaces == bytes.len() { *remaining - num_spaces } else { 0 };
    &bytes[num_spaces..]
}

#[cfg(test)]
pub(crate) mod tests;
