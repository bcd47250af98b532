//! `tokenizer.json`, the format of the `tokenizers` library.
//!
//! Its parts are checked here before the library sees them, and only what a language model's decoder
//! needs is accepted: byte-pair models and decoders that work token by token.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::bpe::Vocab;
use tokenizers::{NormalizedString, Normalizer as _, NormalizerWrapper, PreTokenizerWrapper};

use super::added::{AddedToken, AddedTokens};
use super::bpe::{BpeModel, BpeParts};
use super::pipeline::{BpePipeline, Pieces};
use super::split::Splitter;
use super::vocabulary::{TokenKind, Vocabulary};
use super::{Pipeline, Tokenizer, byte_level, spm};
use crate::{Error, Result};

#[derive(Deserialize)]
struct File {
    model: Model,
    #[serde(default)]
    normalizer: Option<NormalizerWrapper>,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Model {
    /// Old files leave the type out; they are byte-pair models.
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    vocab: Value,
    #[serde(default)]
    merges: Vec<Merge>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Joined(String),
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

impl Tokenizer {
    /// Reads a `tokenizer.json` alone. What only its neighbours say (which token begins and ends a
    /// sequence, the chat template) is then unknown; [`Self::from_dir`] reads those too.
    ///
    /// # Errors
    /// If the file cannot be read, is damaged, or describes a kind of tokenizer that is not supported.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes =
            std::fs::read(path).map_err(|error| Error::io(format!("reading {}", path.display()), error))?;
        Self::from_json(&bytes).map_err(|error| error.context(path.display()))
    }

    /// Reads the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let file: File = serde_json::from_slice(json).map_err(|error| {
            Error::invalid_model(format!("not a valid tokenizer.json: {error}")).with_source(error)
        })?;
        let vocab = vocab(&file.model)?;
        let decoder = Decoder::from_json(&file.decoder)?;
        let pieces = pieces(&file.pre_tokenizer)?;
        let added: Vec<AddedToken> = file.added_tokens.into_iter().map(AddedToken::from).collect();
        let ids: HashMap<&str, u32> = added.iter().map(|token| (token.content.as_str(), token.id)).collect();
        let prefix_token_ids = prefix_token_ids(&file.post_processor, |text| {
            ids.get(text).or_else(|| vocab.get(text)).copied()
        })?;
        let control: HashSet<String> =
            added.iter().filter(|token| token.control).map(|token| token.content.clone()).collect();
        let plain = vocab.iter().map(|(text, id)| (*id, decoder.decode(text), TokenKind::Text));
        let vocabulary = Vocabulary::new(plain.chain(added.iter().map(|token| {
            let kind = if token.control { TokenKind::Control } else { TokenKind::Text };
            (token.id, decoder.decode_added(token), kind)
        })))?;
        let model = BpeModel::new(
            BpeParts {
                vocab,
                merges: file.model.merges.into_iter().enumerate().map(split_merge).collect::<Result<_>>()?,
                ignore_merges: file.model.ignore_merges,
                byte_fallback: file.model.byte_fallback,
                unk_token: file.model.unk_token,
                fuse_unk: file.model.fuse_unk,
            },
            &control,
        )?;
        let normalizer = file.normalizer;
        let added = AddedTokens::new(added, |text| match &normalizer {
            None => Ok(text.to_owned()),
            Some(normalizer) => {
                let mut normalized = NormalizedString::from(text);
                normalizer.normalize(&mut normalized).map_err(|error| {
                    Error::invalid_model(format!("the added token {text:?} cannot be normalised: {error}"))
                })?;
                Ok(normalized.get().to_owned())
            }
        })?;
        Ok(Self {
            vocabulary,
            added,
            pipeline: Pipeline::Bpe(Box::new(BpePipeline { normalizer, pieces, model })),
            bos_token_id: prefix_token_ids.first().copied(),
            eos_token_id: None,
            eos_token_ids: Vec::new(),
            prefix_token_ids,
            chat_templates: BTreeMap::new(),
            num_leading_spaces: decoder.num_leading_spaces(),
        })
    }
}

impl From<Added> for AddedToken {
    fn from(token: Added) -> Self {
        Self {
            id: token.id,
            content: token.content,
            control: token.special,
            single_word: token.single_word,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
            normalized: token.normalized,
        }
    }
}

fn vocab(model: &Model) -> Result<Vocab> {
    let unsupported =
        |what: &str| Error::unsupported(format!("tokenizer.json has {what}, which is not supported"));
    if let Some(kind) = model.kind.as_deref().filter(|kind| *kind != "BPE") {
        return Err(unsupported(&format!("a model of type {kind:?}")).with_hint("the supported type is BPE"));
    }
    let is_set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    if is_set(&model.continuing_subword_prefix) {
        return Err(unsupported("a continuing_subword_prefix"));
    }
    if is_set(&model.end_of_word_suffix) {
        return Err(unsupported("an end_of_word_suffix"));
    }
    let entries = model.vocab.as_object().filter(|entries| !entries.is_empty()).ok_or_else(|| {
        Error::invalid_model("model.vocab is missing or empty, expected an object of tokens and ids")
    })?;
    let mut texts = HashMap::with_capacity(entries.len());
    let mut vocab = Vocab::with_capacity(entries.len());
    for (text, id) in entries {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            Error::invalid_model(format!("the id of token {text:?} is {id}, expected a whole number"))
        })?;
        if let Some(other) = texts.insert(id, text) {
            return Err(Error::invalid_model(format!(
                "the tokens {other:?} and {text:?} have the same id {id}"
            )));
        }
        vocab.insert(text.clone(), id);
    }
    Ok(vocab)
}

fn split_merge((rank, merge): (usize, Merge)) -> Result<(String, String)> {
    match merge {
        Merge::Pair(left, right) => Ok((left, right)),
        Merge::Joined(joined) => match joined.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => Ok((left.to_owned(), right.to_owned())),
            _ => Err(Error::invalid_model(format!(
                "merge {rank} is {joined:?}, expected two tokens with a blank between them"
            ))),
        },
    }
}

/// The special tokens that the post-processor puts before a single text.
fn prefix_token_ids(post_processor: &Value, id_of: impl Fn(&str) -> Option<u32>) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for step in steps(post_processor, "processors") {
        if step["type"] != "TemplateProcessing" {
            continue;
        }
        for item in step["single"].as_array().into_iter().flatten() {
            let Some(name) = item["SpecialToken"]["id"].as_str() else { break };
            let listed = step["special_tokens"][name]["ids"].as_array();
            match listed {
                Some(listed) => {
                    ids.extend(
                        listed.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()),
                    );
                }
                None => ids.push(id_of(name).ok_or_else(|| {
                    Error::invalid_model(format!("the post-processor adds {name:?}, which is not a token"))
                })?),
            }
        }
    }
    Ok(ids)
}

/// A part of the file as the list of its steps; a `Sequence` has several.
fn steps<'v>(part: &'v Value, list: &str) -> Vec<&'v Value> {
    if part.is_null() {
        return Vec::new();
    }
    match part[list].as_array() {
        Some(nested) if part["type"] == "Sequence" => {
            nested.iter().flat_map(|step| steps(step, list)).collect()
        }
        _ => vec![part],
    }
}

fn pieces(pre_tokenizer: &Value) -> Result<Pieces> {
    if pre_tokenizer.is_null() {
        return Ok(Pieces::Whole);
    }
    match byte_level_splits(&steps(pre_tokenizer, "pretokenizers"))? {
        Some(splits) => Ok(Pieces::ByteLevel { splits, byte_splits: Vec::new() }),
        None => PreTokenizerWrapper::deserialize(pre_tokenizer).map(Pieces::Library).map_err(|error| {
            Error::invalid_model(format!("the pre_tokenizer of tokenizer.json is not valid: {error}"))
        }),
    }
}

/// The expressions, if the steps are splits by expressions followed by the byte-level step.
fn byte_level_splits(steps: &[&Value]) -> Result<Option<Vec<Splitter>>> {
    const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    let Some((last, before)) = steps.split_last() else { return Ok(None) };
    if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
        return Ok(None);
    }
    let mut patterns = Vec::new();
    for step in before {
        let pattern = match step["type"].as_str() {
            Some("Split") if step["behavior"] == "Isolated" && step["invert"] == false => {
                step["pattern"]["Regex"].as_str()
            }
            Some("Digits") if step["individual_digits"] == true => Some(r"\p{N}"),
            Some("Digits") => Some(r"\p{N}+"),
            _ => None,
        };
        let Some(pattern) = pattern else { return Ok(None) };
        patterns.push(pattern);
    }
    if last["use_regex"] != false {
        patterns.push(GPT2);
    }
    patterns.into_iter().map(Splitter::at).collect::<Result<_>>().map(Some)
}

/// From a token's spelling to its bytes.
#[derive(Debug, Default)]
struct Decoder {
    byte_level: bool,
    byte_fallback: bool,
    /// Texts to replace, in order.
    replace: Vec<(String, String)>,
    num_leading_spaces: usize,
}

impl Decoder {
    fn from_json(decoder: &Value) -> Result<Self> {
        let mut rules = Self::default();
        let unsupported = |step: &Value| {
            Error::unsupported(format!("tokenizer.json has the decoder step {step}, which is not supported"))
        };
        if decoder.is_null() {
            return Err(Error::unsupported(
                "tokenizer.json has no decoder, so its tokens cannot become text",
            ));
        }
        for step in steps(decoder, "decoders") {
            match step["type"].as_str() {
                Some("ByteLevel") => rules.byte_level = true,
                Some("ByteFallback") => rules.byte_fallback = true,
                Some("Fuse") => {}
                Some("Replace") => {
                    let pattern = step["pattern"]["String"].as_str().filter(|text| !text.is_empty());
                    let (Some(from), Some(to)) = (pattern, step["content"].as_str()) else {
                        return Err(unsupported(step));
                    };
                    rules.replace.push((from.to_owned(), to.to_owned()));
                }
                Some("Strip") if step["content"] == " " && step["stop"] == 0 => {
                    let start = step["start"].as_u64().and_then(|start| usize::try_from(start).ok());
                    rules.num_leading_spaces = start.ok_or_else(|| unsupported(step))?;
                }
                Some("Metaspace") => {
                    let replacement = step["replacement"].as_str().filter(|text| !text.is_empty());
                    rules
                        .replace
                        .push((replacement.ok_or_else(|| unsupported(step))?.to_owned(), " ".to_owned()));
                    let keeps_space = step["prepend_scheme"] == "never" || step["add_prefix_space"] == false;
                    rules.num_leading_spaces = usize::from(!keeps_space);
                }
                _ => return Err(unsupported(step)),
            }
        }
        Ok(rules)
    }

    fn num_leading_spaces(&self) -> usize {
        self.num_leading_spaces
    }

    fn decode(&self, token: &str) -> Vec<u8> {
        if self.byte_level {
            return byte_level::decode_token(token);
        }
        if let Some(byte) = spm::byte_of_token(token).filter(|_| self.byte_fallback) {
            return vec![byte];
        }
        let mut text = token.to_owned();
        for (from, to) in &self.replace {
            text = text.replace(from, to);
        }
        text.into_bytes()
    }

    /// Added tokens are written as the text they stand for, except that where a character stands for a
    /// space it does so in them too.
    fn decode_added(&self, token: &AddedToken) -> Vec<u8> {
        if self.byte_level || token.control {
            token.content.as_bytes().to_vec()
        } else {
            self.decode(&token.content)
        }
    }
}

#[cfg(test)]
mod tests;
