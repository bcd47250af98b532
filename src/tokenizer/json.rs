//! `tokenizer.json`, the format of the `tokenizers` library.
//!
//! Its sections are checked here before the library sees them. A decoder has to work token by token, because text is
//! streamed while it is generated.

mod decoder;
mod model;

use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::{NormalizedString, PreTokenizerWrapper};

use self::decoder::Decoder;
use self::model::{Model, ReadModel};
use super::added::{AddedToken, AddedTokens};
use super::allowance::{Allowance, check_steps};
use super::dropped::Alphabet;
use super::normalizer::Normalizer;
use super::pipeline::{LibraryStep, PiecePipeline, Pieces};
use super::split::Splitter;
use super::templates::ChatTemplates;
use super::vocabulary::{TokenKind, Vocabulary};
use super::{Pipeline, Tokenizer};
use crate::{Error, Result, files, shortened};

/// Bytes of one of a tokenizer's files: known ones have up to 35 MB.
pub(super) const MAX_FILE_BYTES: u64 = 256 << 20;

/// Maximum total bytes of a vocabulary's tokens that are always allowed.
const MIN_VOCABULARY_BYTES: usize = 16 << 20;
/// Maximum tokens before every text. Known files have two.
const MAX_PREFIX: usize = 64;

#[derive(Deserialize)]
struct File {
    model: Model,
    #[serde(default)]
    normalizer: Value,
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
    /// Reads a `tokenizer.json` alone, without the neighbouring files that name the BOS and EOS tokens and the chat
    /// template; [`Self::from_dir`] reads those too.
    ///
    /// # Errors
    /// If the file cannot be read, is damaged, or describes a kind of tokenizer that is not supported.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = files::read(path, MAX_FILE_BYTES)
            .map_err(|error| Error::io(format!("cannot read {}", path.display()), error))?;
        Self::from_json(&bytes).map_err(|error| error.context(path.display()))
    }

    /// Reads the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let file: File = files::json(json).map_err(|error| {
            Error::invalid_model(format!("not a valid tokenizer.json: {error}")).with_source(error)
        })?;
        let decoder = Decoder::from_json(&file.decoder)?;
        let pieces = pieces(&file.pre_tokenizer)?;
        let added: Vec<AddedToken> = file.added_tokens.into_iter().map(AddedToken::from).collect();
        let alphabet = if decoder.is_byte_level() { Alphabet::Bytes } else { Alphabet::Characters };
        let control = added.iter().filter(|token| token.control);
        let control = control.map(|token| (token.content.clone(), token.id)).collect();
        let ReadModel { model, tokens } = file.model.read(alphabet, &control)?;
        let ids: HashMap<&str, u32> = added.iter().map(|token| (token.content.as_str(), token.id)).collect();
        let prefix_token_ids = prefix_token_ids(&file.post_processor, |text| {
            ids.get(text).or_else(|| tokens.get(text)).copied()
        })?;
        let num_bytes = tokens.keys().map(String::len).sum::<usize>()
            + added.iter().map(|token| token.content.len()).sum::<usize>();
        let mut allowance = Allowance::for_bytes(num_bytes, MIN_VOCABULARY_BYTES);
        let mut written = Vec::with_capacity(tokens.len() + added.len());
        for (text, id) in &tokens {
            written.push((*id, decoder.decode(text, &mut allowance)?, TokenKind::Text));
        }
        for token in &added {
            let kind = if token.control { TokenKind::Control } else { TokenKind::Text };
            written.push((token.id, decoder.decode_added(token, &mut allowance)?, kind));
        }
        let vocabulary = Vocabulary::new(written)?;
        let normalizer = Normalizer::from_json(&file.normalizer)?;
        // All together, since a file may have any number of them.
        let num_bytes = added.iter().map(|token| token.content.len()).sum();
        let mut allowance = Allowance::for_bytes(num_bytes, MIN_VOCABULARY_BYTES);
        let added = AddedTokens::new(added, |text| match &normalizer {
            None => Ok(text.to_owned()),
            Some(normalizer) => {
                let mut normalized = NormalizedString::from(text);
                normalizer.normalize(&mut normalized, &mut allowance).map_err(|error| {
                    Error::invalid_model(format!("the added token {text:?}: {}", error.message()))
                })?;
                Ok(normalized.get().to_owned())
            }
        })?;
        let mut tokenizer = Self {
            vocabulary,
            added,
            pipeline: Pipeline::Pieces(Box::new(PiecePipeline { normalizer, pieces, model })),
            bos_token_id: prefix_token_ids.first().copied(),
            eos_token_id: None,
            eos_token_ids: Vec::new(),
            prefix_token_ids,
            template_tokens: Map::new(),
            chat_templates: ChatTemplates::default(),
            num_leading_spaces: decoder.num_leading_spaces(),
            notices: Vec::new(),
            single: OnceLock::new(),
            longest: OnceLock::new(),
        };
        let suffix = suffix(&file.post_processor);
        if !suffix.is_empty() {
            tokenizer.note_suffix("the post-processor of tokenizer.json", &suffix.join(" and "));
        }
        Ok(tokenizer)
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

/// The special tokens that the post-processor puts before a single text.
fn prefix_token_ids(post_processor: &Value, id_of: impl Fn(&str) -> Option<u32>) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    let steps = steps(post_processor, "processors");
    check_steps("post_processor", steps.len())?;
    for step in steps {
        match step["type"].as_str() {
            Some("ByteLevel") => {}
            // They have the token at the beginning and its id.
            Some("BertProcessing" | "RobertaProcessing") => {
                ids.push(token_id(&step["cls"][1]).ok_or_else(|| unreadable("cls", &step["cls"]))?);
            }
            Some("TemplateProcessing") => template_prefix(step, &id_of, &mut ids)?,
            _ => return Err(unreadable("type", &step["type"])),
        }
    }
    Ok(ids)
}

/// Adds the tokens before the text of a template.
fn template_prefix(step: &Value, id_of: impl Fn(&str) -> Option<u32>, ids: &mut Vec<u32>) -> Result<()> {
    let single = &step["single"];
    for item in single.as_array().ok_or_else(|| unreadable("single", single))? {
        if item["Sequence"].is_object() {
            break;
        }
        let name =
            item["SpecialToken"]["id"].as_str().ok_or_else(|| unreadable("an entry of single", item))?;
        let listed = &step["special_tokens"][name]["ids"];
        let num_ids = ids.len() + listed.as_array().map_or(1, Vec::len);
        if num_ids > MAX_PREFIX {
            return Err(Error::invalid_model(format!(
                "the post-processor puts {num_ids} tokens before every text, more than the {MAX_PREFIX} that it may"
            )));
        }
        match listed {
            Value::Null => ids.push(id_of(name).ok_or_else(|| {
                Error::invalid_model(format!("the post-processor adds {name:?}, which is not a token"))
            })?),
            listed => {
                let all =
                    listed.as_array().and_then(|all| all.iter().map(token_id).collect::<Option<Vec<_>>>());
                ids.extend(all.ok_or_else(|| unreadable("ids", listed))?);
            }
        }
    }
    Ok(())
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// A prompt without the tokens that the model expects at its beginning would be worse without an error.
fn unreadable(key: &str, value: &Value) -> Error {
    let value = value.to_string();
    Error::invalid_model(format!(
        "{key} of the post-processor is {}, so the tokens before every text are not known",
        shortened(&value)
    ))
}

/// The tokens that the post-processor puts after a text.
fn suffix(post_processor: &Value) -> Vec<String> {
    const MAX_SHOWN: usize = 8;
    let mut suffix = Vec::new();
    for step in steps(post_processor, "processors") {
        let of_bert = step["sep"][0].as_str();
        let template = step["single"].as_array().into_iter().flatten();
        let suffixes = template.skip_while(|item| item["Sequence"].is_null());
        let suffixes = suffixes.filter_map(|item| item["SpecialToken"]["id"].as_str());
        let suffixes = of_bert.into_iter().chain(suffixes).take(MAX_SHOWN - suffix.len());
        suffix.extend(suffixes.map(|text| format!("{:?}", text.chars().take(100).collect::<String>())));
    }
    suffix
}

/// A section of the file as the list of its steps; a `Sequence` has several.
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
    let steps = steps(pre_tokenizer, "pretokenizers");
    check_steps("pre_tokenizer", steps.len())?;
    if let Some(splits) = byte_level_splits(&steps)? {
        return Ok(Pieces::ByteLevel { splits, byte_splits: Vec::new() });
    }
    steps.into_iter().map(library_step).collect::<Result<_>>().map(Pieces::Library)
}

fn library_step(step: &Value) -> Result<LibraryStep> {
    let invalid = |problem: &dyn std::fmt::Display| {
        Error::invalid_model(format!("the pre_tokenizer of tokenizer.json is not valid: {problem}"))
    };
    // The library would divide by it.
    if step["type"] == "FixedLength" && step["length"] == 0 {
        return Err(invalid(&"pieces of the length 0"));
    }
    let pre_tokenizer = PreTokenizerWrapper::deserialize(step).map_err(|error| invalid(&error))?;
    LibraryStep::new(pre_tokenizer, step["pattern"]["Regex"].as_str())
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

#[cfg(test)]
mod tests;
