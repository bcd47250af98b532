//! Settings that can be changed during a chat, under the names of the HTTP interfaces.

use std::str::FromStr;

use tinyvllm::Error;
use tinyvllm::sampling::SamplingParams;

use crate::value::at_most_a_sequence;

/// Changes a parameter, and returns its name and what it is now. A stop string is added to the others; `none` removes
/// all.
///
/// # Errors
/// If the name is unknown, or the value is invalid or out of range. Nothing is changed then.
pub(super) fn set(params: &mut SamplingParams, name: &str, value: &str) -> tinyvllm::Result<String> {
    let name = full_name(name);
    let mut changed = params.clone();
    match name {
        "temperature" => changed.temperature = number(name, value)?,
        "top_k" => changed.top_k = number(name, value)?,
        "top_p" => changed.top_p = number(name, value)?,
        "min_p" => changed.min_p = number(name, value)?,
        "repetition_penalty" => changed.repetition_penalty = number(name, value)?,
        "presence_penalty" => changed.presence_penalty = number(name, value)?,
        "frequency_penalty" => changed.frequency_penalty = number(name, value)?,
        "seed" => changed.seed = optional(name, value)?,
        "max_tokens" => {
            let wrong = |message| Error::invalid_request(format!("max_tokens cannot be {value}: {message}"));
            let given: Option<usize> = optional(name, value)?;
            changed.max_tokens = given.map(at_most_a_sequence).transpose().map_err(wrong)?;
        }
        "stop" if is_none(value) => changed.stop.clear(),
        "stop" => changed.stop.push(value.to_owned()),
        _ => {
            return Err(Error::invalid_request(format!("unknown setting {name}"))
                .with_hint("/show lists all settings"));
        }
    }
    // None of these depends on the size of the vocabulary.
    changed.validate(usize::MAX)?;
    *params = changed;
    let value = rows(params).into_iter().find_map(|(row, value)| (row == name).then_some(value));
    Ok(format!("{name} is {}", value.unwrap_or_default()))
}

/// The name in [`rows`] of a setting that has several.
fn full_name(name: &str) -> &str {
    match name {
        "temp" => "temperature",
        "repeat_penalty" => "repetition_penalty",
        "num_predict" => "max_tokens",
        name => name,
    }
}

/// The settings, one a line.
pub(super) fn list(params: &SamplingParams) -> String {
    rows(params).map(|(name, value)| format!("{name:20}{value}")).join("\n")
}

fn rows(params: &SamplingParams) -> [(&'static str, String); 10] {
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
    let stop = match params.stop.as_slice() {
        [] => "none".to_owned(),
        stop => format!("{stop:?}"),
    };
    [
        ("temperature", params.temperature.to_string()),
        ("top_k", params.top_k.to_string()),
        ("top_p", params.top_p.to_string()),
        ("min_p", params.min_p.to_string()),
        ("repetition_penalty", params.repetition_penalty.to_string()),
        ("presence_penalty", params.presence_penalty.to_string()),
        ("frequency_penalty", params.frequency_penalty.to_string()),
        ("seed", or_none(params.seed.map(|seed| seed.to_string()))),
        ("max_tokens", or_none(params.max_tokens.map(|number| number.to_string()))),
        ("stop", stop),
    ]
}

fn number<T: FromStr>(name: &str, value: &str) -> tinyvllm::Result<T> {
    value.parse().map_err(|_| Error::invalid_request(format!("{name} cannot be {value}")))
}

/// A number, or `none`.
fn optional<T: FromStr>(name: &str, value: &str) -> tinyvllm::Result<Option<T>> {
    match value {
        value if is_none(value) || value == "-1" => Ok(None),
        value => number(name, value).map(Some),
    }
}

/// Whether the value removes what was set.
pub(super) fn is_none(value: &str) -> bool {
    ["none", "\"\"", "''"].contains(&value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_changed_or_stay() {
        let mut params = SamplingParams::greedy();
        for (name, value) in
            [("temperature", "0.5"), ("top_k", "40"), ("seed", "7"), ("num_predict", "9"), ("stop", "a b")]
        {
            set(&mut params, name, value).unwrap();
        }
        let list = list(&params);
        for words in
            ["temperature         0.5", "top_k               40", "seed                7", "[\"a b\"]"]
        {
            assert!(list.contains(words), "{list}");
        }
        assert_eq!(set(&mut params, "max_tokens", "none").unwrap(), "max_tokens is none");
        assert_eq!(set(&mut params, "temp", "0.70").unwrap(), "temperature is 0.7");
        assert_eq!(set(&mut params, "stop", "c").unwrap(), "stop is [\"a b\", \"c\"]");
        for none in ["none", "\"\"", "''"] {
            set(&mut params, "stop", "c").unwrap();
            assert_eq!(set(&mut params, "stop", none).unwrap(), "stop is none");
        }
        assert_eq!((params.seed, params.max_tokens), (Some(7), None));
        let before = params.clone();
        for (name, value, words) in [
            ("temperature", "hot", "temperature cannot be hot"),
            ("temperature", "9", "temperature"),
            ("top_k", "-3", "top_k cannot be -3"),
            ("max_tokens", "18446744073709551615", "at most 16777216"),
            ("warmth", "1", "unknown setting warmth"),
        ] {
            let error = set(&mut params, name, value).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(params, before);
    }
}
