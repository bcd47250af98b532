//! The sources and the numbers of drafted tokens.

use std::str::FromStr;

use serde_json::{Map, Value};

use crate::{Error, Result, quoted};

/// How drafts are made, with vLLM's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpeculativeMethod {
    /// Only text that a grammar forces, and a draft model if there is one.
    Forced,
    /// The continuation of the longest suffix that occurred before, in the sequence's own prompt and output.
    Suffix,
    /// The same, of suffixes of `prompt_lookup_min` to `prompt_lookup_max` tokens only.
    Ngram {
        /// Fewest tokens of a suffix.
        min: usize,
        /// Most tokens of it that are compared.
        max: usize,
    },
    /// The predictions of the model's MTP block.
    Mtp,
}

/// Speculation of an engine. Text that a grammar forces is drafted with every method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpeculativeConfig {
    /// How drafts are made.
    pub method: SpeculativeMethod,
    /// Most drafted tokens that are tried after the last token of a sequence in a step; 0 turns all of it off.
    pub num_speculative_tokens: usize,
    /// Fewer are tried, down to none, if more are not worth their time. Otherwise as many as there are, to measure or
    /// to test.
    pub is_adaptive: bool,
}

impl SpeculativeConfig {
    /// The default number of drafted tokens.
    pub const USUAL_TOKENS: usize = 8;
    /// The most that may be requested.
    pub const MAX_TOKENS: usize = 64;

    /// No speculation at all.
    #[must_use]
    pub const fn off() -> Self {
        Self { method: SpeculativeMethod::Forced, num_speculative_tokens: 0, is_adaptive: true }
    }

    /// This method with the usual number of tokens.
    #[must_use]
    pub const fn of(method: SpeculativeMethod) -> Self {
        Self { method, num_speculative_tokens: Self::USUAL_TOKENS, is_adaptive: true }
    }
}

/// Keys of the JSON object.
const METHOD: &str = "method";
const MODEL: &str = "model";
const NUM_TOKENS: &str = "num_speculative_tokens";
const LOOKUP_MIN: &str = "prompt_lookup_min";
const LOOKUP_MAX: &str = "prompt_lookup_max";
const ADAPTIVE: &str = "adaptive";

/// vLLM's names in the field of the model for methods without one.
const NO_MODEL: &str = "[ngram]";

/// Whether a draft model is meant: by the method, or as in vLLM by a model without a method.
fn has_draft_model(object: &Map<String, Value>) -> bool {
    match object.get(METHOD) {
        Some(method) => method == "draft_model",
        None => object.get(MODEL).and_then(Value::as_str).is_some_and(|name| name != NO_MODEL),
    }
}

impl SpeculativeConfig {
    /// The draft model that the JSON object names.
    #[must_use]
    pub fn draft_model(text: &str) -> Option<String> {
        let value: Value = serde_json::from_str(text).ok()?;
        let object = value.as_object().filter(|object| has_draft_model(object))?;
        object.get(MODEL)?.as_str().map(str::to_owned)
    }

    /// The names of methods, as in the JSON object.
    pub const METHODS: [&str; 5] = ["suffix", "ngram", "draft_model", "mtp", "forced"];
    /// Keys of the JSON object.
    pub const KEYS: [&str; 6] = [METHOD, MODEL, NUM_TOKENS, LOOKUP_MIN, LOOKUP_MAX, ADAPTIVE];
}

/// The JSON object of vLLM's `--speculative-config`.
impl FromStr for SpeculativeConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text).map_err(|error| {
            Error::invalid_request(format!("{} is not JSON: {error}", quoted(text)))
                .with_hint(r#"write it as in {"method": "suffix", "num_speculative_tokens": 8}"#)
        })?;
        let Value::Object(object) = value else {
            return Err(Error::invalid_request(format!("{} is not a JSON object", quoted(text))));
        };
        let is_drafting = has_draft_model(&object);
        match object.get(MODEL) {
            Some(Value::String(_)) if is_drafting => {}
            Some(Value::String(name)) if name == NO_MODEL => {}
            None | Some(Value::Null) if !is_drafting => {}
            _ if is_drafting => {
                return Err(Error::invalid_request("the method draft_model needs a model")
                    .with_hint(r#"give one with the same tokens: {"method": "draft_model", "model": "…"}"#));
            }
            _ => {
                return Err(Error::invalid_request("model is set, but the method is not draft_model")
                    .with_hint(r#"give the method "draft_model", or omit the model"#));
            }
        }
        if let Some(key) = object.keys().find(|key| !Self::KEYS.contains(&key.as_str())) {
            return Err(Error::invalid_request(format!("unknown key {}", quoted(key)))
                .with_hint(format!("the keys are {}", Self::KEYS.join(", "))));
        }
        let number = |key: &str, usual: usize, low: usize, high: usize| match object.get(key) {
            None | Some(Value::Null) => Ok(usual),
            Some(value) => {
                let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
                number.filter(|number| (low..=high).contains(number)).ok_or_else(|| {
                    Error::invalid_request(format!(
                        "{key} is {value}; it must be at least {low} and at most {high}"
                    ))
                })
            }
        };
        let num_speculative_tokens = number(NUM_TOKENS, Self::USUAL_TOKENS, 0, Self::MAX_TOKENS)?;
        let method = match object.get(METHOD).map(|method| (method, method.as_str())) {
            _ if is_drafting => SpeculativeMethod::Forced,
            None | Some((_, Some("suffix"))) => SpeculativeMethod::Suffix,
            Some((_, Some("forced"))) => SpeculativeMethod::Forced,
            Some((_, Some("mtp"))) => SpeculativeMethod::Mtp,
            // As in vLLM, one of the two is the other one if that is missing.
            Some((_, Some("ngram"))) => {
                let (min, max) = (object.get(LOOKUP_MIN), object.get(LOOKUP_MAX));
                let (most, usual) = (u32::MAX as usize, 5);
                let max = number(if max.is_some() { LOOKUP_MAX } else { LOOKUP_MIN }, usual, 1, most)?;
                let min = number(if min.is_some() { LOOKUP_MIN } else { LOOKUP_MAX }, usual, 1, most)?;
                if min > max {
                    return Err(Error::invalid_request(format!(
                        "{LOOKUP_MIN} is {min}, more than {LOOKUP_MAX}, which is {max}"
                    )));
                }
                SpeculativeMethod::Ngram { min, max }
            }
            Some((method, _)) => {
                return Err(Error::invalid_request(format!("unknown method {method}"))
                    .with_hint(format!("the methods are {}", Self::METHODS.join(", "))));
            }
        };
        let is_adaptive = match object.get(ADAPTIVE) {
            None | Some(Value::Null) => true,
            Some(Value::Bool(is_adaptive)) => *is_adaptive,
            Some(value) => {
                return Err(Error::invalid_request(format!(
                    "{ADAPTIVE} is {value}; it must be true or false"
                )));
            }
        };
        Ok(Self { method, num_speculative_tokens, is_adaptive })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_is_that_of_vllm() {
        let check = |text: &str, method, num_speculative_tokens| {
            assert_eq!(
                text.parse::<SpeculativeConfig>().unwrap(),
                SpeculativeConfig { method, num_speculative_tokens, is_adaptive: !text.contains("false") },
                "{text}"
            );
        };
        check("{}", SpeculativeMethod::Suffix, 8);
        check(r#"{"method": "suffix", "num_speculative_tokens": 3}"#, SpeculativeMethod::Suffix, 3);
        check(r#"{"adaptive": false}"#, SpeculativeMethod::Suffix, 8);
        check(r#"{"method": "forced", "num_speculative_tokens": null}"#, SpeculativeMethod::Forced, 8);
        let drafting = r#"{"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 4}"#;
        check(drafting, SpeculativeMethod::Forced, 4);
        assert_eq!(SpeculativeConfig::draft_model(drafting).as_deref(), Some("smollm2"));
        let without = r#"{"model": "smollm2", "num_speculative_tokens": 4}"#;
        check(without, SpeculativeMethod::Forced, 4);
        assert_eq!(SpeculativeConfig::draft_model(without).as_deref(), Some("smollm2"));
        assert_eq!(SpeculativeConfig::draft_model("{}"), None);
        assert_eq!(SpeculativeConfig::draft_model(r#"{"model": "[ngram]"}"#), None);
        check(r#"{"method": "mtp", "num_speculative_tokens": 1}"#, SpeculativeMethod::Mtp, 1);
        check(r#"{"method": "ngram", "model": "[ngram]"}"#, SpeculativeMethod::Ngram { min: 5, max: 5 }, 8);
        check(r#"{"method": "ngram"}"#, SpeculativeMethod::Ngram { min: 5, max: 5 }, 8);
        check(
            r#"{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}"#,
            SpeculativeMethod::Ngram { min: 4, max: 4 },
            5,
        );
        check(
            r#"{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}"#,
            SpeculativeMethod::Ngram { min: 2, max: 4 },
            8,
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, words) in [
            ("suffix", "is not JSON"),
            ("[]", "is not a JSON object"),
            (r#"{"method": "eagle"}"#, r#"unknown method "eagle""#),
            (r#"{"method": 3}"#, "unknown method 3"),
            (r#"{"method": "draft_model"}"#, "needs a model"),
            (r#"{"method": "draft_model", "model": 3}"#, "needs a model"),
            (r#"{"method": "suffix", "model": "a"}"#, "the method is not draft_model"),
            (r#"{"num_speculative_tokens": 65}"#, "is 65; it must be at least 0 and at most 64"),
            (r#"{"num_speculative_tokens": -1}"#, "is -1"),
            (r#"{"num_speculative_tokens": 1.5}"#, "is 1.5"),
            (r#"{"method": "ngram", "prompt_lookup_min": 0}"#, "prompt_lookup_min is 0"),
            (r#"{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}"#, "is 5, more than"),
            (r#"{"adaptive": 1}"#, "adaptive is 1"),
            (r#"{"tokens": 5}"#, r#"unknown key "tokens""#),
        ] {
            let error = text.parse::<SpeculativeConfig>().unwrap_err();
            assert!(error.message().contains(words), "{error}");
        }
    }
}
