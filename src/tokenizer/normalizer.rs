//! The normaliser of a `tokenizer.json`, step by step, so that the growth of a text stays bounded.
//!
//! Each step is the library's. A file may have any number of them, and each may multiply the text.

use serde_json::Value;
use tokenizers::utils::SysRegex;
use tokenizers::{NormalizedString, Normalizer as _, NormalizerWrapper};

use super::allowance::{Allowance, check_steps};
use super::charsmap;
use crate::{Error, Result};

/// Steps from a text to the one that is tokenized.
#[derive(Debug)]
pub(super) struct Normalizer(Vec<Step>);

#[derive(Debug)]
struct Step {
    normalizer: NormalizerWrapper,
    replacement: Option<Replacement>,
}

/// A step that writes a text for each match.
#[derive(Debug)]
struct Replacement {
    pattern: SysRegex,
    length: usize,
}

impl Normalizer {
    /// None for null.
    ///
    /// # Errors
    /// If the library does not support a step.
    pub(super) fn from_json(json: &Value) -> Result<Option<Self>> {
        let mut steps = Vec::new();
        add_steps(json, &mut steps)?;
        check_steps("normalizer", steps.len())?;
        Ok((!json.is_null()).then_some(Self(steps)))
    }

    /// Does all steps.
    ///
    /// # Errors
    /// If the text would become too long, or the library cannot normalise it.
    pub(super) fn normalize(&self, text: &mut NormalizedString, allowance: &mut Allowance) -> Result<()> {
        for step in &self.0 {
            if let Some(Replacement { pattern, length }) = &step.replacement {
                let mut num_bytes = text.get().len();
                for _ in pattern.find_iter(text.get()) {
                    allowance.look()?;
                    num_bytes = num_bytes.saturating_add(*length);
                }
                allowance.check(num_bytes)?;
            }
            allowance.look()?;
            step.normalizer
                .normalize(text)
                .map_err(|error| Error::invalid_request(format!("the text cannot be normalised: {error}")))?;
            allowance.check(text.get().len())?;
        }
        allowance.take(text.get().len());
        Ok(())
    }
}

impl From<NormalizerWrapper> for Normalizer {
    fn from(normalizer: NormalizerWrapper) -> Self {
        Self(vec![Step { normalizer, replacement: None }])
    }
}

fn add_steps(json: &Value, steps: &mut Vec<Step>) -> Result<()> {
    if json.is_null() {
        return Ok(());
    }
    if let (Some("Sequence"), Some(nested)) = (json["type"].as_str(), json["normalizers"].as_array()) {
        return nested.iter().try_for_each(|step| add_steps(step, steps));
    }
    let invalid = |error: &dyn std::fmt::Display| {
        Error::invalid_model(format!("the normalizer of tokenizer.json is not valid: {error}"))
    };
    if let (Some("Precompiled"), Some(table)) = (json["type"].as_str(), json["precompiled_charsmap"].as_str())
    {
        charsmap::check(table).map_err(|problem| invalid(&format!("its table is not valid: {problem}")))?;
    }
    let normalizer = serde_json::from_value(json.clone()).map_err(|error| invalid(&error))?;
    let pattern = match (&normalizer, &json["pattern"]["String"], &json["pattern"]["Regex"]) {
        (NormalizerWrapper::Replace(_), Value::String(text), _) => Some(escaped(text)),
        (NormalizerWrapper::Replace(_), _, Value::String(regex)) => Some(regex.clone()),
        _ => None,
    };
    let replacement = pattern
        .map(|pattern| {
            let length = json["content"].as_str().unwrap_or_default().len();
            SysRegex::new(&pattern).map(|pattern| Replacement { pattern, length })
        })
        .transpose()
        .map_err(|error| invalid(&error))?;
    steps.push(Step { normalizer, replacement });
    Ok(())
}

/// An expression for this text.
fn escaped(text: &str) -> String {
    let mut expression = String::with_capacity(text.len());
    for c in text.chars() {
        expression.extend(c.is_ascii_punctuation().then_some('\\'));
        expression.push(c);
    }
    expression
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn normalize(json: &Value, text: &str) -> Result<String> {
        let mut normalized = NormalizedString::from(text);
        let normalizer = Normalizer::from_json(json)?.unwrap();
        normalizer.normalize(&mut normalized, &mut Allowance::of(text))?;
        Ok(normalized.get().to_owned())
    }

    fn replace(pattern: &Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    fn sequence(steps: &[Value]) -> Value {
        json!({"type": "Sequence", "normalizers": steps})
    }

    #[test]
    fn steps_follow_one_another() {
        let steps = vec![
            json!({"type": "Lowercase"}),
            sequence(&[replace(&json!({"String": "."}), "!"), replace(&json!({"Regex": "b+"}), "c")]),
        ];
        assert_eq!(normalize(&sequence(&steps), "A.BB").unwrap(), "a!c");
        assert!(Normalizer::from_json(&Value::Null).unwrap().is_none());
        let error = Normalizer::from_json(&json!({"type": "New"})).unwrap_err();
        assert!(error.message().contains("normalizer of tokenizer.json"), "{error:?}");
    }

    #[test]
    fn what_a_text_becomes_is_bounded() {
        let tenfold = || replace(&json!({"String": "a"}), &"a".repeat(10));
        assert_eq!(normalize(&sequence(&[tenfold(), tenfold(), tenfold()]), "aaaa").unwrap().len(), 4_000);
        let many = sequence(&vec![tenfold(); 50]);
        assert!(normalize(&many, "aaaa").unwrap_err().message().contains("16 times"));
        let error = Normalizer::from_json(&sequence(&vec![tenfold(); 65])).unwrap_err();
        assert!(error.message().contains("65 steps"), "{error:?}");
        // The step that would be too much is not begun.
        let huge = replace(&json!({"Regex": ""}), &"a".repeat(1 << 16));
        assert!(normalize(&huge, &"b".repeat(1 << 16)).is_err());
        // Each match takes a hundred thousand steps.
        let slow = replace(&json!({"Regex": "(?:(?:(?!c)a?){13}b|)a"}), "a");
        assert!(normalize(&slow, &"a".repeat(20_000)).unwrap_err().message().contains("needs more time"));
        let table = json!({"type": "Precompiled", "precompiled_charsmap": "////"});
        assert!(Normalizer::from_json(&table).unwrap_err().message().contains("its table is not valid"));
        // A long text that grows as Unicode defines is fine, and so are many segments of one.
        let text = "\u{fdfa}".repeat(1 << 18);
        assert!(normalize(&json!({"type": "NFKD"}), &text).unwrap().len() > 8 * text.len());
        let normalizer = Normalizer::from_json(&tenfold()).unwrap().unwrap();
        let mut allowance = Allowance::of("aaaa");
        let mut normalize_part = || {
            let part = "a".repeat(40_000);
            normalizer.normalize(&mut NormalizedString::from(part), &mut allowance).is_ok()
        };
        assert_eq!([normalize_part(), normalize_part(), normalize_part()], [true, true, false]);
    }
}
