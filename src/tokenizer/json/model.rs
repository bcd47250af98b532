//! The `model` of a `tokenizer.json`, of any of the four kinds that the library has.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::unigram::Unigram;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::models::wordpiece::WordPiece;

use super::super::bpe::{BpeModelData, PieceModel};
use super::super::dropped::Alphabet;
use crate::{Error, Result};

/// The longest word that is looked up substring by substring, which takes quadratic time.
const MAX_WORD_CHARS: usize = 1_000;

#[derive(Deserialize)]
pub(super) struct Model {
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
    unk_id: Option<usize>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    max_input_chars_per_word: Option<usize>,
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

/// The contents of the file.
pub(super) struct ReadModel {
    pub(super) model: PieceModel,
    /// All tokens of the model, by their spelling.
    pub(super) tokens: Vocab,
}

impl Model {
    /// `control` are the tokens that no text may become.
    ///
    /// # Errors
    /// If the contents contradict each other, or the kind is unknown.
    pub(super) fn read(self, alphabet: Alphabet, control: &HashMap<String, u32>) -> Result<ReadModel> {
        match self.kind.as_deref() {
            None | Some("BPE") => self.byte_pairs(alphabet, control),
            Some("WordPiece") => self.wordpiece(control),
            Some("WordLevel") => self.wordlevel(control),
            Some("Unigram") => self.unigram(control),
            Some(kind) => Err(Error::unsupported(format!(
                "tokenizer.json has a model of type {kind:?}, which is not supported"
            ))
            .with_hint("known types are BPE, WordPiece, WordLevel and Unigram")),
        }
    }

    fn byte_pairs(self, alphabet: Alphabet, control: &HashMap<String, u32>) -> Result<ReadModel> {
        let tokens = vocab(&self.vocab)?;
        let not_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
        let parts = BpeModelData {
            vocab: tokens.clone(),
            merges: self.merges.into_iter().enumerate().map(split_merge).collect::<Result<_>>()?,
            ignore_merges: self.ignore_merges,
            byte_fallback: self.byte_fallback,
            unk_token: self.unk_token,
            fuse_unk: self.fuse_unk,
            continuing_subword_prefix: not_empty(self.continuing_subword_prefix),
            end_of_word_suffix: not_empty(self.end_of_word_suffix),
            alphabet,
        };
        let model = PieceModel::bpe(parts, &control.keys().cloned().collect())?;
        Ok(ReadModel { model, tokens })
    }

    fn wordpiece(self, control: &HashMap<String, u32>) -> Result<ReadModel> {
        let tokens = vocab(&self.vocab)?;
        let unknown = self.unk_token.unwrap_or_else(|| "[UNK]".to_owned());
        let words = words(&tokens, &unknown, control)?;
        let max_chars = self.max_input_chars_per_word.unwrap_or(100).min(MAX_WORD_CHARS);
        let model = WordPiece::builder()
            .vocab(words)
            .unk_token(unknown)
            .continuing_subword_prefix(self.continuing_subword_prefix.unwrap_or_else(|| "##".to_owned()))
            .max_input_chars_per_word(max_chars)
            .build()
            .map_err(|error| Error::invalid_model(format!("the WordPiece model is not valid: {error}")))?;
        Ok(ReadModel { model: PieceModel::other(model.into(), HashSet::new()), tokens })
    }

    fn wordlevel(self, control: &HashMap<String, u32>) -> Result<ReadModel> {
        let tokens = vocab(&self.vocab)?;
        let unknown = self.unk_token.unwrap_or_else(|| "<unk>".to_owned());
        let words = words(&tokens, &unknown, control)?;
        let model =
            WordLevel::builder().vocab(words).unk_token(unknown).build().map_err(|error| {
                Error::invalid_model(format!("the WordLevel model is not valid: {error}"))
            })?;
        Ok(ReadModel { model: PieceModel::other(model.into(), HashSet::new()), tokens })
    }

    fn unigram(self, control: &HashMap<String, u32>) -> Result<ReadModel> {
        let invalid = |what: String| Error::invalid_model(format!("the Unigram model is not valid: {what}"));
        let entries = self.vocab.as_array().filter(|entries| !entries.is_empty()).ok_or_else(|| {
            Error::invalid_model("model.vocab is missing or empty, expected a list of tokens and scores")
        })?;
        let mut tokens = Vocab::with_capacity(entries.len());
        let mut scored = Vec::with_capacity(entries.len());
        let mut reserved = HashSet::new();
        for (entry, id) in entries.iter().zip(0u32..) {
            let (Some(text), Some(score)) = (entry[0].as_str(), entry[1].as_f64()) else {
                return Err(invalid(format!("entry {id} is {entry}, expected a token and a score")));
            };
            tokens.insert(text.to_owned(), id);
            let is_unknown = self.unk_id == Some(id as usize);
            let is_control = control.get(text) == Some(&id) && !is_unknown;
            // The model finds tokens by their spelling. This one, in private-use characters, is in no ordinary text; if
            // a text has it nevertheless, its token is dropped.
            let spelling = if is_control { format!("\u{10FFFF}\u{10FFFE}{id}") } else { text.to_owned() };
            reserved.extend(is_control.then_some(id));
            scored.push((spelling, score));
        }
        let model = Unigram::from(scored, self.unk_id, self.byte_fallback)
            .map_err(|error| invalid(error.to_string()))?;
        Ok(ReadModel { model: PieceModel::other(model.into(), reserved), tokens })
    }
}

/// The words that text may become; the unknown one has to be there.
fn words(tokens: &Vocab, unknown: &str, control: &HashMap<String, u32>) -> Result<Vocab> {
    if !tokens.contains_key(unknown) {
        return Err(Error::invalid_model(format!("the unknown token {unknown:?} is not in the vocabulary")));
    }
    let is_word = |text: &&String| !control.contains_key(*text) || *text == unknown;
    Ok(tokens.iter().filter(|(text, _)| is_word(text)).map(|(text, id)| (text.clone(), *id)).collect())
}

fn vocab(json: &Value) -> Result<Vocab> {
    let entries = json.as_object().filter(|entries| !entries.is_empty()).ok_or_else(|| {
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
