//! The tokenizer inside a GGUF header (`tokenizer.ggml.*`).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use tokenizers::models::bpe::Vocab;

use super::added::{AddedToken, AddedTokens};
use super::bpe::{BpeModel, BpeParts};
use super::pipeline::{BpePipeline, Pieces};
use super::pre::PreTokenizer;
use super::spm::{self, SpmModel, SpmParts};
use super::vocabulary::{TokenKind, Vocabulary};
use super::{Pipeline, Tokenizer, byte_level};
use crate::weights::gguf::{Metadata, Value};
use crate::{Error, ErrorKind, Result};

/// `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// What the two kinds of tokenizer assume when a key is missing.
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
    /// [`ErrorKind::NotFound`] if the file has none, [`ErrorKind::Unsupported`] for a type or
    /// pre-tokenizer that is not known, [`ErrorKind::InvalidModel`] if its parts contradict each other.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self> {
        let Some(model) = metadata.str("tokenizer.ggml.model") else {
            return Err(Error::new(
                ErrorKind::NotFound,
                "the file has no tokenizer: the key tokenizer.ggml.model is missing",
            )
            .with_hint("pass token ids instead of text"));
        };
        let tokens = metadata
            .strings("tokenizer.ggml.tokens")
            .filter(|tokens| !tokens.is_empty())
            .ok_or_else(|| {
                Error::invalid_model("tokenizer.ggml.tokens is missing or empty, expected a list of strings")
            })?;
        if u32::try_from(tokens.len()).is_err() {
            return Err(Error::invalid_model(format!("tokenizer.ggml.tokens has {} entries", tokens.len())));
        }
        let types = token_types(metadata, tokens.len())?;
        let vocab = distinct(tokens)?;
        match model {
            "gpt2" => byte_level_bpe(metadata, tokens, &types, vocab),
            "llama" => sentencepiece(metadata, tokens, &types),
            other => Err(Error::unsupported(format!("the tokenizer type {other:?} is not known"))
                .with_hint("known ones are gpt2 (byte-level BPE) and llama (SentencePiece BPE)")),
        }
    }
}

fn byte_level_bpe(
    metadata: &Metadata,
    tokens: &[String],
    types: &[TokenType],
    vocab: Vocab,
) -> Result<Tokenizer> {
    let pre = metadata.str("tokenizer.ggml.pre").ok_or_else(|| {
        Error::unsupported("tokenizer.ggml.pre is missing, so how the tokenizer splits text is not known")
            .with_hint("use a file made by a newer converter, or the original folder")
    })?;
    let pre = PreTokenizer::from_name(pre)?;
    let merges = metadata.strings("tokenizer.ggml.merges").ok_or_else(|| {
        Error::invalid_model("tokenizer.ggml.merges is missing, expected a list of strings")
    })?;
    let merges = merges.iter().enumerate().map(parse_merge).collect::<Result<_>>()?;
    let control: HashSet<String> = special_texts(tokens, types);
    let parts = BpeParts { vocab, merges, ignore_merges: pre.ignore_merges, ..BpeParts::default() };
    let model = BpeModel::new(parts, &control)?;
    // The unknown token is never looked for in text.
    let added = added_tokens(tokens, types, |kind| kind == TokenType::Control)?;
    let vocabulary = vocabulary(tokens, types, |token, _| byte_level::decode_token(token))?;
    finish(
        metadata,
        Defaults { bos: None, eos: None, add_bos: pre.add_bos },
        vocabulary,
        added,
        Pipeline::Bpe(Box::new(BpePipeline {
            normalizer: None,
            pieces: Pieces::ByteLevel { splits: pre.splits, byte_splits: pre.byte_splits },
            model,
        })),
    )
}

fn sentencepiece(metadata: &Metadata, tokens: &[String], types: &[TokenType]) -> Result<Tokenizer> {
    let scores = metadata
        .floats("tokenizer.ggml.scores")
        .ok_or_else(|| Error::invalid_model("tokenizer.ggml.scores is missing, expected a list of floats"))?;
    if scores.len() != tokens.len() {
        return Err(Error::invalid_model(format!(
            "tokenizer.ggml.scores has {} entries, expected one for each of the {} tokens",
            scores.len(),
            tokens.len()
        )));
    }
    let with_type = |wanted: TokenType| {
        tokens.iter().zip(0u32..).zip(types).filter(move |(_, kind)| **kind == wanted).map(|(token, _)| token)
    };
    let unknown = special_id(metadata, "unknown", tokens.len())?
        .or_else(|| with_type(TokenType::Unknown).next().map(|(_, id)| id));
    let add_space_prefix = metadata.bool("tokenizer.ggml.add_space_prefix").unwrap_or(true);
    let model = SpmModel::new(SpmParts {
        tokens: with_type(TokenType::Normal)
            .map(|(token, id)| (token.clone(), id, scores[id as usize]))
            .collect(),
        bytes: with_type(TokenType::Byte).map(|(token, id)| (token.clone(), id)).collect(),
        unknown,
        add_space_prefix,
    })?;
    let added = added_tokens(tokens, types, |kind| matches!(kind, TokenType::Control | TokenType::Unknown))?;
    let vocabulary = vocabulary(tokens, types, |token, kind| match (kind, spm::byte_of_token(token)) {
        (TokenType::Byte, Some(byte)) => vec![byte],
        _ => token.replace(spm::SPACE, " ").into_bytes(),
    })?;
    let exists = |id: u32| ((id as usize) < tokens.len()).then_some(id);
    let defaults = Defaults { bos: exists(1), eos: exists(2), add_bos: true };
    let mut tokenizer = finish(metadata, defaults, vocabulary, added, Pipeline::Spm(model))?;
    tokenizer.num_leading_spaces = usize::from(add_space_prefix);
    Ok(tokenizer)
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
    let add_bos = metadata.bool("tokenizer.ggml.add_bos_token").unwrap_or(defaults.add_bos);
    Ok(Tokenizer {
        vocabulary,
        added,
        pipeline,
        bos_token_id,
        eos_token_id,
        eos_token_ids: eos_token_ids.into_iter().collect(),
        prefix_token_ids: bos_token_id.filter(|_| add_bos).into_iter().collect(),
        chat_templates: chat_templates(metadata),
        num_leading_spaces: 0,
    })
}

fn token_types(metadata: &Metadata, num_tokens: usize) -> Result<Vec<TokenType>> {
    // Files without types exist; all their tokens are text.
    let Some(types) = metadata.integers("tokenizer.ggml.token_type") else {
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

/// Token text → id.
fn distinct(tokens: &[String]) -> Result<Vocab> {
    let mut ids = Vocab::with_capacity(tokens.len());
    for (token, id) in tokens.iter().zip(0..) {
        if let Some(other) = ids.insert(token.clone(), id) {
            return Err(Error::invalid_model(format!("tokens {other} and {id} are both {token:?}")));
        }
    }
    Ok(ids)
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

fn special_texts(tokens: &[String], types: &[TokenType]) -> HashSet<String> {
    let special = tokens.iter().zip(types).filter(|(_, kind)| **kind == TokenType::Control);
    special.map(|(token, _)| token.clone()).collect()
}

fn added_tokens(
    tokens: &[String],
    types: &[TokenType],
    is_control: impl Fn(TokenType) -> bool,
) -> Result<AddedTokens> {
    let added = tokens
        .iter()
        .zip(0u32..)
        .zip(types)
        .filter_map(|((token, id), kind)| match kind {
            kind if is_control(*kind) => Some(AddedToken::control(id, token)),
            TokenType::UserDefined => Some(AddedToken::user_defined(id, token)),
            _ => None,
        })
        .collect();
    AddedTokens::new(added, |text| Ok(text.to_owned()))
}

fn vocabulary(
    tokens: &[String],
    types: &[TokenType],
    decode: impl Fn(&str, TokenType) -> Vec<u8>,
) -> Result<Vocabulary> {
    Vocabulary::new(tokens.iter().zip(0u32..).zip(types).map(|((token, id), kind)| match kind {
        TokenType::Control | TokenType::Unknown => (id, token.as_bytes().to_vec(), TokenKind::Control),
        TokenType::UserDefined => (id, token.as_bytes().to_vec(), TokenKind::Text),
        TokenType::Normal | TokenType::Unused | TokenType::Byte => {
            (id, decode(token, *kind), TokenKind::Text)
        }
    }))
}

fn special_id(metadata: &Metadata, name: &str, num_tokens: usize) -> Result<Option<u32>> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    match metadata.token_id(&key) {
        Some(id) if id as usize >= num_tokens => {
            Err(Error::invalid_model(format!("{key} is {id}, but there are only {num_tokens} tokens")))
        }
        id => Ok(id),
    }
}

fn chat_templates(metadata: &Metadata) -> BTreeMap<String, String> {
    const KEY: &str = "tokenizer.chat_template";
    let named = metadata.entries.range(KEY.to_owned()..).take_while(|(key, _)| key.starts_with(KEY));
    named
        .filter_map(|(key, value)| {
            let name = match key[KEY.len()..].strip_prefix('.') {
                Some(name) => name,
                None if key == KEY => "default",
                None => return None,
            };
            match value {
                Value::String(source) => Some((name.to_owned(), source.clone())),
                _ => None,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn strings(values: &[&str]) -> Value {
        Value::Strings(values.iter().map(|value| (*value).to_owned()).collect())
    }

    fn metadata(entries: Vec<(&str, Value)>) -> Metadata {
        let entry = |(key, value): (&str, Value)| match key {
            "template" => ("tokenizer.chat_template".to_owned(), value),
            key if key.starts_with("template.") => (format!("tokenizer.chat_{key}"), value),
            key => (format!("tokenizer.ggml.{key}"), value),
        };
        Metadata { entries: entries.into_iter().map(entry).collect() }
    }

    fn bpe(changes: Vec<(&'static str, Value)>) -> Metadata {
        let mut entries = vec![
            ("model", Value::String("gpt2".into())),
            ("pre", Value::String("qwen2".into())),
            ("tokens", strings(&["a", "b", "ab", "<e>", "<u>"])),
            ("merges", strings(&["a b"])),
            ("token_type", Value::Integers(vec![1, 1, 1, 3, 4])),
        ];
        entries.extend(changes);
        metadata(entries)
    }

    fn spm(changes: Vec<(&'static str, Value)>) -> Metadata {
        let mut entries = vec![
            ("model", Value::String("llama".into())),
            ("tokens", strings(&["<unk>", "<s>", "</s>", "▁", "a"])),
            ("scores", Value::Floats(vec![0.0, 0.0, 0.0, -1.0, -2.0])),
            ("token_type", Value::Integers(vec![2, 3, 3, 1, 1])),
        ];
        entries.extend(changes);
        metadata(entries)
    }

    #[test]
    fn defaults_follow_the_type() {
        let tokenizer = Tokenizer::from_gguf(&spm(vec![])).unwrap();
        assert_eq!(tokenizer.encode_prompt("a", tokenizer.add_bos()).unwrap(), [1, 3, 4]);
        assert_eq!((tokenizer.bos_token_id(), tokenizer.stop_token_ids(&[])), (Some(1), vec![2]));
        let tokenizer = Tokenizer::from_gguf(&bpe(vec![("bos_token_id", Value::Unsigned(3))])).unwrap();
        assert_eq!((tokenizer.bos_token_id(), tokenizer.add_bos()), (Some(3), false));
        let tokenizer = Tokenizer::from_gguf(&bpe(vec![
            ("bos_token_id", Value::Unsigned(3)),
            ("pre", Value::String("llama-bpe".into())),
        ]))
        .unwrap();
        assert_eq!(tokenizer.encode_prompt("ab", true).unwrap(), [3, 2]);
        assert_eq!(tokenizer.encode_prompt("<e>ab", true).unwrap(), [3, 2]);
    }

    #[test]
    fn types_decide_what_text_may_become() {
        let tokenizer = Tokenizer::from_gguf(&bpe(vec![
            ("tokens", strings(&["a", "b", "ab", "<e>", "<u>", "<", "e", ">"])),
            ("token_type", Value::Integers(vec![1, 1, 1, 3, 4, 1, 1, 1])),
        ]))
        .unwrap();
        use super::super::SpecialTokens::{AsText, Parse};
        assert_eq!(tokenizer.encode("a<e><u>", Parse).unwrap(), [0, 3, 4]);
        assert_eq!(tokenizer.encode("a<e><u>", AsText).unwrap(), [0, 5, 6, 7, 4]);
        assert_eq!(tokenizer.decode(&[0, 3, 4], true), "a<u>");
        assert_eq!(tokenizer.decode(&[0, 3, 4, 99], false), "a<e><u>");
    }

    #[test]
    fn chat_templates_are_found_by_name() {
        let text = |text: &str| Value::String(text.into());
        let tokenizer = Tokenizer::from_gguf(&bpe(vec![
            ("template", text("main")),
            ("template.tool_use", text("tools")),
        ]))
        .unwrap();
        assert_eq!(tokenizer.chat_template(), Some("main"));
        assert_eq!(tokenizer.named_chat_template("tool_use"), Some("tools"));
        assert_eq!(tokenizer.chat_template_names().collect::<Vec<_>>(), ["default", "tool_use"]);
    }

    #[test]
    fn stop_tokens_are_the_union_of_all_sources() {
        let tokens = strings(&["a", "<e>", "<|eot_id|>", "<|im_end|>", "</s>"]);
        let tokenizer = Tokenizer::from_gguf(&bpe(vec![
            ("tokens", tokens),
            ("merges", strings(&[])),
            ("token_type", Value::Integers(vec![1, 3, 3, 3, 1])),
            ("eos_token_id", Value::Signed(1)),
            ("eot_token_id", Value::Unsigned(2)),
        ]))
        .unwrap();
        assert_eq!(tokenizer.eos_token_ids(), [1, 2]);
        // "</s>" is ordinary text in this file, so it does not stop.
        assert_eq!(tokenizer.stop_token_ids(&[0]), [0, 1, 2, 3]);
    }

    #[test]
    fn contradictions_are_errors_that_name_them() {
        let check = |metadata: Metadata, expected: &str| {
            let error = Tokenizer::from_gguf(&metadata).unwrap_err();
            assert!(error.message().contains(expected), "{error:?} should contain {expected:?}");
        };
        check(Metadata::default(), "tokenizer.ggml.model is missing");
        check(bpe(vec![("model", Value::String("bert".into()))]), "\"bert\"");
        check(bpe(vec![("pre", Value::String("future".into()))]), "\"future\"");
        check(bpe(vec![("pre", Value::Unsigned(1))]), "pre is missing");
        check(bpe(vec![("tokens", strings(&[]))]), "missing or empty");
        check(bpe(vec![("tokens", Value::Unsigned(5))]), "missing or empty");
        check(bpe(vec![("tokens", strings(&["a", "b", "ab", "<e>", "a"]))]), "tokens 0 and 4 are both");
        check(bpe(vec![("merges", Value::Unsigned(5))]), "merges is missing");
        check(bpe(vec![("merges", strings(&["ab"]))]), "merge 0 is \"ab\"");
        check(bpe(vec![("merges", strings(&["a "]))]), "merge 0 is \"a \"");
        check(bpe(vec![("merges", strings(&["a b", "b a"]))]), "merge 1");
        check(bpe(vec![("token_type", Value::Integers(vec![1]))]), "has 1 entries");
        check(bpe(vec![("token_type", Value::Integers(vec![1, 1, 1, 3, 9]))]), "token 4 has the type 9");
        check(bpe(vec![("eos_token_id", Value::Unsigned(5))]), "eos_token_id is 5, but there are only 5");
        check(bpe(vec![("bos_token_id", Value::Unsigned(99))]), "bos_token_id is 99");
        check(spm(vec![("scores", Value::Unsigned(1))]), "scores is missing");
        check(spm(vec![("scores", Value::Floats(vec![1.0]))]), "scores has 1 entries");
        check(spm(vec![("scores", Value::Floats(vec![f32::NAN; 5]))]), "not a number");
        check(spm(vec![("token_type", Value::Integers(vec![2, 3, 3, 6, 1]))]), "byte token");
        check(spm(vec![("unknown_token_id", Value::Unsigned(77))]), "unknown_token_id is 77");
    }

    fn value() -> impl Strategy<Value = Value> {
        let word = prop::sample::select(vec![
            "a", "b", "ab", "a b", " ", "", "▁", "<0x41>", "<s>", "gpt2", "llama", "qwen2",
        ]);
        prop_oneof![
            any::<u64>().prop_map(Value::Unsigned),
            (0u64..6).prop_map(Value::Unsigned),
            any::<bool>().prop_map(Value::Bool),
            word.clone().prop_map(|word| Value::String(word.into())),
            prop::collection::vec(word.prop_map(String::from), 0..6).prop_map(Value::Strings),
            prop::collection::vec(-1i64..8, 0..6).prop_map(Value::Integers),
            prop::collection::vec(any::<f32>(), 0..6).prop_map(Value::Floats),
        ]
    }

    proptest! {
        #[test]
        fn damaged_metadata_never_panics(
            changes in prop::collection::vec(
                (prop::sample::select(vec![
                    "model", "pre", "tokens", "merges", "scores", "token_type", "bos_token_id", "eos_token_id",
                    "unknown_token_id", "add_bos_token", "add_space_prefix", "template",
                ]), value()),
                0..4,
            ),
            is_spm in any::<bool>(),
            text in any::<String>(),
        ) {
            let metadata = if is_spm { spm(changes) } else { bpe(changes) };
            if let Ok(tokenizer) = Tokenizer::from_gguf(&metadata)
                && let Ok(ids) = tokenizer.encode_prompt(&text, true)
            {
                prop_assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
            }
        }
    }
}
