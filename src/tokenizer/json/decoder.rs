//! From a token's spelling to the bytes it adds to a text, by the `decoder` of a `tokenizer.json`.

use serde_json::Value;
use tokenizers::decoders::wordpiece::cleanup;
use tokenizers::utils::SysRegex;

use super::super::added::AddedToken;
use super::super::allowance::{Allowance, check_steps};
use super::super::{byte_level, spm};
use super::steps;
use crate::{Error, Result};

/// The steps for each token.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    byte_level: bool,
    byte_fallback: bool,
    /// In order.
    steps: Vec<Step>,
    /// Each token but the first is a separate word.
    separates: bool,
    num_leading_spaces: usize,
}

#[derive(Debug)]
enum Step {
    Replace(String, String),
    ReplaceMatches(SysRegex, String),
    /// Takes up to this many of a character off the beginning and the end.
    Strip(char, usize, usize),
    /// A blank before each token that does not begin with this, which goes.
    Words {
        continued: String,
        cleans_up: bool,
    },
}

impl Decoder {
    pub(super) fn from_json(decoder: &Value) -> Result<Self> {
        let mut rules = Self::default();
        let unsupported = |step: &Value| {
            Error::unsupported(format!("tokenizer.json has the decoder step {step}, which is not supported"))
        };
        // Without one, the library writes tokens with blanks between them.
        if decoder.is_null() {
            rules.add_words(String::new(), false);
        }
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let not_empty = |value: &Value| text(value).filter(|text| !text.is_empty());
        let count = |value: &Value| value.as_u64().and_then(|count| usize::try_from(count).ok());
        let mut is_fused = false;
        let steps = steps(decoder, "decoders");
        check_steps("decoder", steps.len())?;
        for step in steps {
            let added = match step["type"].as_str() {
                Some("ByteLevel") => {
                    rules.byte_level = true;
                    Some(())
                }
                Some("ByteFallback") => {
                    rules.byte_fallback = true;
                    Some(())
                }
                Some("Fuse") => {
                    is_fused = true;
                    Some(())
                }
                Some("Replace") => rules.add_replace(step, is_fused),
                Some("Strip") => (|| {
                    let content = text(&step["content"])?;
                    let (start, stop) = (count(&step["start"])?, count(&step["stop"])?);
                    let mut chars = content.chars();
                    match (chars.next()?, chars.next(), is_fused) {
                        (' ', None, true) if stop == 0 => rules.num_leading_spaces = start,
                        (c, None, false) => rules.steps.push(Step::Strip(c, start, stop)),
                        _ => return None,
                    }
                    Some(())
                })(),
                Some("Metaspace") => not_empty(&step["replacement"]).map(|replacement| {
                    rules.steps.push(Step::Replace(replacement, " ".to_owned()));
                    let keeps_space = step["prepend_scheme"] == "never" || step["add_prefix_space"] == false;
                    rules.num_leading_spaces = usize::from(!keeps_space);
                }),
                Some("WordPiece") => text(&step["prefix"]).map(|prefix| {
                    rules.add_words(prefix, step["cleanup"] != false);
                }),
                // The blank after the last word stays, because the last word is unknown while streaming.
                Some("BPEDecoder") => not_empty(&step["suffix"]).map(|suffix| {
                    rules.steps.push(Step::Replace(suffix, " ".to_owned()));
                }),
                _ => None,
            };
            added.ok_or_else(|| unsupported(step))?;
        }
        Ok(rules)
    }

    /// None if the step is not one that can be done token by token.
    fn add_replace(&mut self, step: &Value, is_fused: bool) -> Option<()> {
        let content = step["content"].as_str()?.to_owned();
        let added = match (&step["pattern"]["String"], &step["pattern"]["Regex"]) {
            (Value::String(text), _) if !text.is_empty() => Step::Replace(text.clone(), content),
            (_, Value::String(regex)) if !is_fused => {
                Step::ReplaceMatches(SysRegex::new(regex).ok()?, content)
            }
            _ => return None,
        };
        self.steps.push(added);
        Some(())
    }

    fn add_words(&mut self, continued: String, cleans_up: bool) {
        self.steps.push(Step::Words { continued, cleans_up });
        self.separates = true;
        self.num_leading_spaces = 1;
    }

    pub(super) fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    pub(super) fn num_leading_spaces(&self) -> usize {
        self.num_leading_spaces
    }

    /// # Errors
    /// If the steps make too much of the token, or take too long.
    pub(super) fn decode(&self, token: &str, allowance: &mut Allowance) -> Result<Vec<u8>> {
        let invalid = |error: Error| {
            let token: String = token.chars().take(100).collect();
            Error::invalid_model(format!("the decoder of tokenizer.json, at {token:?}: {}", error.message()))
        };
        if self.byte_level {
            return Ok(byte_level::decode_token(token));
        }
        if let Some(byte) = spm::byte_of_token(token).filter(|_| self.byte_fallback) {
            return Ok(vec![byte]);
        }
        let mut text = token.to_owned();
        for step in &self.steps {
            text = step.apply(&text, allowance).map_err(invalid)?;
        }
        allowance.take(text.len());
        Ok(text.into_bytes())
    }

    /// Added tokens are written as their text, except that a character for a space becomes one in them too, and that
    /// all tokens may be words.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub(super) fn decode_added(&self, token: &AddedToken, allowance: &mut Allowance) -> Result<Vec<u8>> {
        if self.byte_level || token.control && !self.separates {
            return Ok(token.content.as_bytes().to_vec());
        }
        self.decode(&token.content, allowance)
    }
}

impl Step {
    fn apply(&self, text: &str, allowance: &mut Allowance) -> Result<String> {
        Ok(match self {
            Self::Replace(from, to) => {
                let more = text.matches(from).count().saturating_mul(to.len());
                allowance.check(text.len().saturating_add(more))?;
                text.replace(from, to)
            }
            Self::ReplaceMatches(regex, to) => {
                let mut replaced = String::new();
                let mut done = 0;
                for (start, end) in regex.find_iter(text) {
                    allowance.look()?;
                    replaced.push_str(&text[done..start]);
                    allowance.check(replaced.len() + to.len())?;
                    replaced.push_str(to);
                    done = end;
                }
                replaced.push_str(&text[done..]);
                replaced
            }
            Self::Strip(c, start, stop) => {
                let is_stripped = |other: &char| other == c;
                let num_start = text.chars().take(*start).take_while(is_stripped).count();
                let num_stop = text.chars().rev().take(*stop).take_while(is_stripped).count();
                let num_kept = text.chars().count().saturating_sub(num_start + num_stop);
                text.chars().skip(num_start).take(num_kept).collect()
            }
            Self::Words { continued, cleans_up } => {
                let text = match text.strip_prefix(continued).filter(|_| !continued.is_empty()) {
                    Some(rest) => rest.to_owned(),
                    None => format!(" {text}"),
                };
                if *cleans_up { cleanup(&text) } else { text }
            }
        })
    }
}
