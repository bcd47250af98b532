//! The tokenizer inside a GGUF header (`tokenizer.ggml.*`).

mod tokens;

use std::collections::{BTreeSet, HashSet};
use std::sync::OnceLock;

use serde_json::Map;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper};

use self::tokens::{TokenType, Tokens};
use super::added::AddedTokens;
use super::bpe::{BpeModelData, PieceModel};
use super::dropped::Alphabet;
use super::pipeline::{LibraryStep, PiecePipeline, Pieces};
use super::pre::{self, PreTokenizer, Writing};
use super::spm::{self, SpmModel, SpmModelData};
use super::templates::{self, ChatTemplates};
use super::vocabulary::Vocabulary;
use super::{Pipeline, Tokenizer, byte_level};
use crate::weights::gguf::{Metadata, Value};
use crate::{Error, ErrorKind, Result};

const PRE_KEY: &str = "tokenizer.ggml.pre";
const TEMPLATE_KEY: &str = "tokenizer.chat_template";
/// A longer token is never merged from others. The vocabularies in question have tokens of at most 128 bytes.
const MAX_RANKED_CHARS: usize = 128;
/// Longer words are one unknown token of BERT's.
const MAX_WORDPIECE_CHARS: usize = 100;

/// The defaults of each kind of tokenizer for missing keys.
#[derive(Debug, Clone, Copy)]
struct Defaults {
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
}

impl Tokenizer {
    /// Reads the tokenizer of a GGUF file.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the file has none, [`ErrorKind::Unsupported`] for an unknown type or pre-tokenizer,
    /// [`ErrorKind::InvalidModel`] if its contents contradict each other.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self> {
        Self::from_gguf_with(metadata, None)
    }

    /// The same with a pre-tokenizer that was chosen by hand, for files that name none or a wrong one.
    ///
    /// # Errors
    /// As [`Self::from_gguf`], and [`ErrorKind::InvalidRequest`] if a tokenizer of this type has no pre-tokenizer.
    pub fn from_gguf_with(metadata: &Metadata, pre_tokenizer: Option<&str>) -> Result<Self> {
        let Some(model) = metadata.checked("tokenizer.ggml.model", Metadata::str, "a text")? else {
            return Err(Error::new(
                ErrorKind::NotFound,
                "the file has no tokenizer: the key tokenizer.ggml.model is missing",
            )
            .with_hint("pass token ids instead of text"));
        };
        let mut tokens = Tokens::read(metadata)?;
        let is_bpe = matches!(model, "gpt2" | "gemma4" | "whitespace");
        if let (Some(name), false) = (pre_tokenizer, is_bpe) {
            return Err(Error::invalid_request(format!(
                "--pre-tokenizer {name} is for byte-pair vocabularies, and the tokenizer of the file is of the type \
                 {model:?}"
            ))
            .with_hint("leave --pre-tokenizer out"));
        }
        let mut tokenizer = match model {
            "gpt2" | "gemma4" | "whitespace" => byte_pairs(metadata, model, pre_tokenizer, &mut tokens)?,
            "llama" => sentencepiece(metadata, &mut tokens)?,
            "bert" => wordpiece(metadata, &mut tokens)?,
            other => {
                return Err(Error::unsupported(format!("the tokenizer type \"{}\" is not known", crate::shortened(other))).with_hint(
                    "known ones are gpt2 and gemma4 (byte pairs), llama (SentencePiece) and bert (WordPiece); a \
                     folder \
                     of the model with tokenizer.json is the way out",
                ));
            }
        };
        tokenizer.template_tokens = template_tokens(metadata, &tokens);
        tokenizer.notices.extend(tokens.notices);
        for (name, key) in [("eos", "add_eos_token"), ("seperator", "add_sep_token")] {
            if flag(metadata, key)? == Some(true)
                && let Some(id) = special_id(metadata, name, tokenizer.vocab_size())?
            {
                let text = format!("{:?}", tokenizer.token_text(id));
                tokenizer.note_suffix(&format!("tokenizer.ggml.{key} is true, which"), &text);
            }
        }
        Ok(tokenizer)
    }
}

/// The special tokens that templates may write in addition to the first and the last, as far as the file has them.
fn template_tokens(metadata: &Metadata, tokens: &Tokens<'_>) -> Map<String, serde_json::Value> {
    const NAMES: [(&str, &str); 5] =
        [("unk", "unknown"), ("sep", "seperator"), ("pad", "padding"), ("cls", "cls"), ("mask", "mask")];
    let named = NAMES.iter().filter_map(|(name, key)| {
        // An id that is none is of no interest to a model that needs no such token.
        let id = special_id(metadata, key, tokens.len()).ok().flatten()?;
        let (_, text, _) = tokens.iter().nth(id as usize)?;
        Some((format!("{name}_token"), text.as_str().into()))
    });
    named.collect()
}

/// Which pre-tokenizer the file means.
fn pre_tokenizer(
    metadata: &Metadata,
    model: &str,
    chosen: Option<&str>,
    notices: &mut Vec<String>,
) -> Result<PreTokenizer> {
    let named = metadata.checked(PRE_KEY, Metadata::str, "a text")?.filter(|name| !name.is_empty());
    let name = match (chosen, model, named) {
        (Some(name), _, _) => name,
        (None, "gemma4", _) => "gemma4",
        (None, _, Some(name)) if name != pre::DEFAULT => name,
        (None, "whitespace", _) => "whitespace",
        (None, _, name) => {
            let why = match name {
                None => format!("{PRE_KEY} is missing"),
                Some(_) => format!("{PRE_KEY} is {:?}", pre::DEFAULT),
            };
            notices.push(format!(
                "WARNING: the file does not say how its tokenizer splits text ({why}): a general rule is used, with \
                 which answers can be worse without an error; if you know the right one, give --pre-tokenizer NAME"
            ));
            pre::DEFAULT
        }
    };
    PreTokenizer::from_name(name)
}

fn byte_pairs(
    metadata: &Metadata,
    model: &str,
    chosen: Option<&str>,
    tokens: &mut Tokens<'_>,
) -> Result<Tokenizer> {
    let pre = pre_tokenizer(metadata, model, chosen, &mut tokens.notices)?;
    let vocab = tokens.vocab();
    let merges = metadata
        .checked("tokenizer.ggml.merges", Metadata::strings, "a list of strings")?
        .or(metadata.get("tokenizer.ggml.merges").map(|_| &[] as &[String]));
    let merges = match merges {
        Some(merges) => merges.iter().enumerate().map(parse_merge).collect::<Result<_>>()?,
        None if pre.ranks_by_id => merges_by_id(tokens, &vocab),
        None => {
            return Err(Error::invalid_model("tokenizer.ggml.merges is missing, expected a list of strings")
                .with_hint("convert the model again, or use a folder of it with tokenizer.json"));
        }
    };
    // The unknown token is never looked for in text.
    let added = tokens.added(&vocab, |kind| kind == TokenType::Control)?;
    let alphabet = match pre.writing {
        Writing::Bytes => Alphabet::Bytes,
        Writing::Marked | Writing::Words => Alphabet::Characters,
    };
    let parts = BpeModelData {
        vocab,
        merges,
        ignore_merges: pre.ignore_merges,
        byte_fallback: pre.writing == Writing::Marked,
        alphabet,
        ..BpeModelData::default()
    };
    let model = PieceModel::bpe(parts, &tokens.control_texts())?;
    let vocabulary = tokens.vocabulary(|token, kind| match pre.writing {
        Writing::Bytes => byte_level::decode_token(token),
        Writing::Marked => marked_bytes(token, kind),
        Writing::Words => token.as_bytes().to_vec(),
    })?;
    let pieces = match pre.writing {
        Writing::Bytes => Pieces::ByteLevel { splits: pre.splits, byte_splits: pre.byte_splits },
        Writing::Marked => Pieces::Marked,
        Writing::Words => Pieces::Library(vec![LibraryStep::new(
            PreTokenizerWrapper::WhitespaceSplit(WhitespaceSplit),
            None,
        )?]),
    };
    let pipeline = Pipeline::Pieces(Box::new(PiecePipeline { normalizer: None, pieces, model }));
    let defaults = Defaults { bos: None, eos: None, add_bos: pre.add_bos };
    let mut tokenizer = finish(metadata, defaults, vocabulary, added, pipeline)?;
    // The first GGUF files of these models have false, and the makers' own files have true.
    if pre.always_adds_bos && tokenizer.prefix_token_ids.is_empty() && tokenizer.bos_token_id.is_some() {
        tokenizer.prefix_token_ids.extend(tokenizer.bos_token_id);
        tokens.notices.push(
            "tokenizer.ggml.add_bos_token is false, but prompts of this kind of model begin with a token of their \
             own; \
             it is added"
                .to_owned(),
        );
    }
    Ok(tokenizer)
}

/// The merges of a vocabulary whose ids are the order of its merges: each token is merged from the two tokens that
/// remain after all earlier merges.
fn merges_by_id(tokens: &Tokens<'_>, vocab: &Vocab) -> Vec<(String, String)> {
    let mut merges = Vec::new();
    for (id, text, kind) in tokens.iter() {
        let num_chars = text.chars().count();
        if kind != TokenType::Normal || !(2..=MAX_RANKED_CHARS).contains(&num_chars) {
            continue;
        }
        // The start of each segment, and the end.
        let mut bounds: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        while bounds.len() > 3 {
            let merged = bounds.windows(3).enumerate().filter_map(|(index, parts)| {
                let id_of = vocab.get(&text[parts[0]..parts[2]]).filter(|other| **other < id)?;
                Some((*id_of, index + 1))
            });
            let Some((_, bound)) = merged.min() else { break };
            bounds.remove(bound);
        }
        if let [start, middle, end] = bounds[..] {
            merges.push((text[start..middle].to_owned(), text[middle..end].to_owned()));
        }
    }
    merges
}

fn sentencepiece(metadata: &Metadata, tokens: &mut Tokens<'_>) -> Result<Tokenizer> {
    let scores = scores(metadata, tokens.len())?;
    let vocab = tokens.vocab();
    let with_type = |wanted: TokenType| {
        tokens.iter().filter(move |(_, _, kind)| *kind == wanted).map(|(id, text, _)| (text, id))
    };
    let unknown = special_id(metadata, "unknown", tokens.len())?
        .or_else(|| with_type(TokenType::Unknown).next().map(|(_, id)| id));
    let add_space_prefix = flag(metadata, "add_space_prefix")?.unwrap_or(true);
    let model = SpmModel::new(SpmModelData {
        tokens: with_type(TokenType::Normal)
            .filter(|(text, id)| vocab.get(*text) == Some(id))
            .map(|(text, id)| (text.clone(), id, scores[id as usize]))
            .collect(),
        bytes: with_type(TokenType::Byte).map(|(text, id)| (text.clone(), id)).collect(),
        unknown,
        add_space_prefix,
    })?;
    let is_control = |kind| matches!(kind, TokenType::Control | TokenType::Unknown);
    let added = tokens.added(&vocab, is_control)?;
    let vocabulary = tokens.vocabulary(marked_bytes)?;
    let exists = |id: u32| ((id as usize) < tokens.len()).then_some(id);
    let defaults = Defaults { bos: exists(1), eos: exists(2), add_bos: true };
    let mut tokenizer = finish(metadata, defaults, vocabulary, added, Pipeline::Spm(model))?;
    tokenizer.num_leading_spaces = usize::from(add_space_prefix);
    Ok(tokenizer)
}

/// BERT's words: tokens that begin one are marked with SentencePiece's blank in these files.
fn wordpiece(metadata: &Metadata, tokens: &mut Tokens<'_>) -> Result<Tokenizer> {
    const CONTINUED: &str = "##";
    let vocab = tokens.vocab();
    let added = tokens.added(&vocab, |kind| kind == TokenType::Control)?;
    let control: HashSet<u32> =
        tokens.iter().filter(|(_, _, kind)| *kind == TokenType::Control).map(|(id, ..)| id).collect();
    let unknown = special_id(metadata, "unknown", tokens.len())?;
    let unk_token = unknown.and_then(|id| tokens.iter().find(|(other, ..)| *other == id));
    let (unknown, unk_token, _) = unk_token.ok_or_else(|| {
        Error::invalid_model(
            "tokenizer.ggml.unknown_token_id is missing, which tokenizers of the type bert need",
        )
    })?;
    let words = tokens.iter().filter(|(id, ..)| !control.contains(id) || *id == unknown);
    let words = words.map(|(id, text, _)| match text.strip_prefix(spm::SPACE) {
        _ if id == unknown => (text.clone(), id),
        Some(word) => (word.to_owned(), id),
        None => (format!("{CONTINUED}{text}"), id),
    });
    let model = WordPiece::builder()
        .vocab(words.collect::<tokenizers::models::bpe::Vocab>())
        .unk_token(unk_token.clone())
        .continuing_subword_prefix(CONTINUED.to_owned())
        .max_input_chars_per_word(MAX_WORDPIECE_CHARS)
        .build()
        .map_err(|error| Error::invalid_model(format!("the vocabulary is not BERT's: {error}")))?;
    let lowercase = flag(metadata, "normalizer.lowercase")?.unwrap_or(true);
    let strip_accents = flag(metadata, "normalizer.strip_accents")?.unwrap_or(lowercase);
    let normalizer = BertNormalizer::new(true, true, Some(strip_accents), lowercase);
    let pipeline = Pipeline::Pieces(Box::new(PiecePipeline {
        normalizer: Some(NormalizerWrapper::BertNormalizer(normalizer).into()),
        pieces: Pieces::Library(vec![LibraryStep::new(
            PreTokenizerWrapper::BertPreTokenizer(BertPreTokenizer),
            None,
        )?]),
        model: PieceModel::other(model.into(), HashSet::new()),
    }));
    let vocabulary = tokens.vocabulary(marked_bytes)?;
    let cls = special_id(metadata, "cls", tokens.len())?;
    let defaults = Defaults { bos: cls, eos: None, add_bos: cls.is_some() };
    let mut tokenizer = finish(metadata, defaults, vocabulary, added, pipeline)?;
    tokenizer.num_leading_spaces = 1;
    Ok(tokenizer)
}

/// The bytes of a token with a character for the blank, and other characters for bytes.
fn marked_bytes(token: &str, kind: TokenType) -> Vec<u8> {
    match (kind, spm::byte_of_token(token)) {
        (TokenType::Byte, Some(byte)) => vec![byte],
        _ => token.replace(spm::SPACE, " ").into_bytes(),
    }
}

fn scores(metadata: &Metadata, num_tokens: usize) -> Result<Vec<f32>> {
    const KEY: &str = "tokenizer.ggml.scores";
    let whole = metadata.integers(KEY).map(|scores| scores.iter().map(|score| *score as f32).collect());
    let scores: Option<Vec<f32>> = match whole {
        Some(whole) => Some(whole),
        None => metadata.checked(KEY, Metadata::floats, "a list of numbers")?.map(<[f32]>::to_vec),
    };
    let scores = scores
        .ok_or_else(|| Error::invalid_model("tokenizer.ggml.scores is missing, expected a list of floats"))?;
    if scores.len() != num_tokens {
        return Err(Error::invalid_model(format!(
            "tokenizer.ggml.scores has {} entries, expected one for each of the {num_tokens} tokens",
            scores.len()
        )));
    }
    Ok(scores)
}

fn finish(
    metadata: &Metadata,
    defaults: Defaults,
    vocabulary: Vocabulary,
    added: AddedTokens,
    pipeline: Pipeline,
) -> Result<Tokenizer> {
    let num_tokens = vocabulary.len();
    let bos_token_id = special_id(metadata, "bos", num_tokens)?.or(defaults.bos);
    let eos_token_id = special_id(metadata, "eos", num_tokens)?.or(defaults.eos);
    let mut eos_token_ids: BTreeSet<u32> = eos_token_id.into_iter().collect();
    for key in ["eot", "eom"] {
        eos_token_ids.extend(special_id(metadata, key, num_tokens)?);
    }
    let add_bos = flag(metadata, "add_bos_token")?.unwrap_or(defaults.add_bos);
    let chat_templates = chat_templates(metadata);
    let notices = chat_templates.notices().collect();
    Ok(Tokenizer {
        vocabulary,
        added,
        pipeline,
        bos_token_id,
        eos_token_id,
        eos_token_ids: eos_token_ids.into_iter().collect(),
        prefix_token_ids: bos_token_id.filter(|_| add_bos).into_iter().collect(),
        template_tokens: Map::new(),
        chat_templates,
        num_leading_spaces: 0,
        notices,
        single: OnceLock::new(),
        longest: OnceLock::new(),
    })
}

/// A merge is two tokens with a blank between them; the first token may itself be a blank.
fn parse_merge((rank, merge): (usize, &String)) -> Result<(String, String)> {
    let blank = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
    blank
        .map(|at| (merge[..at].to_owned(), merge[at + 1..].to_owned()))
        .filter(|(_, right)| !right.is_empty())
        .ok_or_else(|| {
            Error::invalid_model(format!("merge {rank} is {merge:?}, expected two tokens and a blank"))
        })
}

fn flag(metadata: &Metadata, name: &str) -> Result<Option<bool>> {
    metadata.checked(&format!("tokenizer.ggml.{name}"), Metadata::bool, "true or false")
}

fn special_id(metadata: &Metadata, name: &str, num_tokens: usize) -> Result<Option<u32>> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    match metadata.checked_token_id(&key)? {
        Some(id) if id as usize >= num_tokens => {
            Err(Error::invalid_model(format!("{key} is {id}, but there are only {num_tokens} tokens")))
        }
        id => Ok(id),
    }
}

/// The chat templates and entries in their place.
fn chat_templates(metadata: &Metadata) -> ChatTemplates {
    let mut templates = ChatTemplates::default();
    for (name, value) in template_entries(metadata) {
        match value {
            Value::String(source) => templates.insert(name, source),
            other => {
                let key =
                    if name == templates::DEFAULT { "" } else { &format!(".{}", crate::shortened(name)) };
                templates
                    .refuse(name, format!("{TEMPLATE_KEY}{key} is {}, expected a text", other.describe()));
            }
        }
    }
    templates
}

/// The values under a key and under its dotted suffixes, with names; that of the key itself is `default`.
fn template_entries(metadata: &Metadata) -> impl Iterator<Item = (&str, &Value)> {
    let named = metadata.entries.range(TEMPLATE_KEY.to_owned()..);
    let named = named.map(|(key, value)| (key.strip_prefix(TEMPLATE_KEY), value));
    named.map_while(|(name, value)| Some((name?, value))).filter_map(|(name, value)| match name {
        "" => Some((templates::DEFAULT, value)),
        _ => Some((name.strip_prefix('.')?, value)),
    })
}

#[cfg(test)]
mod tests;
