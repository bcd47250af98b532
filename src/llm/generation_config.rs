//! The sampling that a model's files recommend: `generation_config.json` of a folder, and the keys of a GGUF file.
//!
//! As in vLLM, its values are the defaults of requests. Invalid values are reported and ignored: they are
//! recommendations, and every model runs without them.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde_json::{Map, Value};

use crate::sampling::{SamplingDefaults, SamplingParams};
use crate::weights::Checkpoint;
use crate::weights::gguf;
use crate::{Error, Result, files};

/// The file of a folder.
const FILE: &str = "generation_config.json";
/// Its bytes.
const MAX_BYTES: u64 = 16 << 20;
/// Before the keys of a GGUF file.
const GGUF_PREFIX: &str = "general.sampling.";

/// Where the defaults of requests are from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum GenerationConfigChoice {
    /// The model's own files.
    #[default]
    Auto,
    /// Nowhere: the values of this program, which for requests over HTTP are vLLM's.
    Vllm,
    /// A folder with a `generation_config.json`, or that file.
    Folder(PathBuf),
}

impl FromStr for GenerationConfigChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "vllm" => Ok(Self::Vllm),
            "" => Err(Error::invalid_request("--generation-config is empty")
                .with_hint("use auto, vllm, or a folder with a generation_config.json")),
            path => Ok(Self::Folder(path.into())),
        }
    }
}

/// The values of the files.
#[derive(Debug, Default, PartialEq)]
pub(super) struct GenerationConfig {
    pub(super) defaults: SamplingDefaults,
    /// The tokens that end a text, where a folder with them was named.
    pub(super) eos_token_ids: Option<Vec<u32>>,
    /// Notices, a line each.
    pub(super) notices: Vec<String>,
}

/// Values for other decoding methods, with the value that disables each.
const NOT_TAKEN: [(&str, f64); 16] = [
    ("diversity_penalty", 0.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("forced_bos_token_id", -1.0),
    ("guidance_scale", 1.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("mirostat", 0.0),
    ("no_repeat_ngram_size", 0.0),
    ("num_beam_groups", 1.0),
    ("num_beams", 1.0),
    ("penalty_alpha", 0.0),
    ("typical_p", 1.0),
    ("xtc_probability", 0.0),
];

/// The same of lists and names.
const NOT_TAKEN_LISTS: [&str; 6] = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "sequence",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
];

impl GenerationConfig {
    /// Reads the file that `choice` names.
    ///
    /// # Errors
    /// If a folder is named that has no such file, or one that is not a JSON object.
    pub(super) fn read(choice: &GenerationConfigChoice, checkpoint: &Checkpoint) -> Result<Self> {
        match choice {
            GenerationConfigChoice::Vllm => Ok(Self::default()),
            GenerationConfigChoice::Folder(path) => {
                let (name, value) = read_file(path)?;
                let mut config = Self::from_values(&name, &value);
                config.eos_token_ids = eos_token_ids(&value);
                Ok(config)
            }
            GenerationConfigChoice::Auto => Ok(match checkpoint.gguf_metadata() {
                Some(metadata) => Self::from_values("the GGUF file", &gguf_values(metadata)),
                None => checkpoint
                    .generation_config_json()
                    .and_then(Value::as_object)
                    .map_or_else(Self::default, |values| Self::from_values(FILE, values)),
            }),
        }
    }

    /// From values under the names of `generation_config.json`.
    fn from_values(source: &str, values: &Map<String, Value>) -> Self {
        let mut reader = Reader { source, values, notices: Vec::new() };
        let mut defaults = SamplingDefaults {
            temperature: reader.number("temperature", |params, value| params.temperature = value),
            top_k: reader.top_k(),
            top_p: reader.number("top_p", |params, value| params.top_p = value),
            min_p: reader.number("min_p", |params, value| params.min_p = value),
            repetition_penalty: reader
                .number("repetition_penalty", |params, value| params.repetition_penalty = value),
            max_tokens: reader.integer("max_new_tokens").and_then(|value| {
                let value = usize::try_from(value).ok().filter(|value| *value > 0);
                value.or_else(|| reader.left_out("max_new_tokens", "it must be at least 1"))
            }),
        };
        // transformers samples only if this is true, so false means greedy decoding, for all other values. vLLM has no
        // such switch; without it the other values count, as in vLLM.
        let is_greedy = match reader.get("do_sample") {
            None | Some(Value::Bool(true)) => false,
            Some(Value::Bool(false)) => true,
            Some(_) => reader.left_out("do_sample", "it must be true or false").unwrap_or(false),
        };
        if is_greedy {
            defaults.temperature = Some(0.0);
        }
        reader.name_what_is_not_taken();
        let mut notices = Vec::new();
        if let Some(list) = defaults.describe() {
            let why = if is_greedy { " (do_sample is false)" } else { "" };
            notices.push(format!(
                "default sampling from {source}: {list}{why}; --generation-config vllm switches it off"
            ));
        }
        notices.append(&mut reader.notices);
        Self { defaults, eos_token_ids: None, notices }
    }
}

/// Values with their source, and notices.
struct Reader<'a> {
    source: &'a str,
    values: &'a Map<String, Value>,
    notices: Vec<String>,
}

impl<'a> Reader<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// Names a value that cannot be.
    fn left_out<T>(&mut self, key: &str, why: &str) -> Option<T> {
        let value = self.get(key).map(Value::to_string).unwrap_or_default();
        let value: String = value.chars().take(80).collect();
        self.notices.push(format!("{key} = {value} in {} is ignored: {why}", self.source));
        None
    }

    fn number(&mut self, key: &str, set: impl Fn(&mut SamplingParams, f32)) -> Option<f32> {
        let Some(value) = self.get(key)?.as_f64() else { return self.left_out(key, "it must be a number") };
        let mut params = SamplingParams::default();
        set(&mut params, value as f32);
        match params.validate(usize::MAX) {
            Ok(()) => Some(value as f32),
            Err(error) => {
                let why = error.message();
                let why = why.split_once("; ").map_or(why, |(_, range)| range).to_owned();
                self.left_out(key, &why)
            }
        }
    }

    fn integer(&mut self, key: &str) -> Option<i64> {
        let value = self.get(key)?;
        let whole = value.as_f64().filter(|value| value.fract() == 0.0 && value.abs() < 9.0e15);
        whole.map(|value| value as i64).or_else(|| self.left_out(key, "it must be an integer"))
    }

    /// −1 is all tokens, as 0.
    fn top_k(&mut self) -> Option<usize> {
        match self.integer("top_k")? {
            -1 => Some(0),
            value => usize::try_from(value).ok().or_else(|| self.left_out("top_k", "it must be at least 0")),
        }
    }

    /// One line for all that other engines would do and this one does not.
    fn name_what_is_not_taken(&mut self) {
        let numbers = NOT_TAKEN
            .iter()
            .filter(|(key, neutral)| self.get(key).is_some_and(|value| value.as_f64() != Some(*neutral)));
        let is_empty = |value: &Value| match value {
            Value::Array(items) => items.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            other => other == &Value::Bool(false),
        };
        let lists = NOT_TAKEN_LISTS.iter().filter(|key| self.get(key).is_some_and(|value| !is_empty(value)));
        let names: Vec<&str> = numbers.map(|(key, _)| *key).chain(lists.copied()).collect();
        if !names.is_empty() {
            let what = names.join(", ");
            self.notices.push(format!("{what} in {} is ignored: it is not supported", self.source));
        }
    }
}

/// The keys of a GGUF file under the names of the other format.
fn gguf_values(metadata: &gguf::Metadata) -> Map<String, Value> {
    let mut values = Map::new();
    for (key, value) in &metadata.entries {
        let Some(name) = key.strip_prefix(GGUF_PREFIX) else { continue };
        let name = match name {
            "temp" => "temperature",
            "penalty_repeat" => "repetition_penalty",
            other => other,
        };
        let value = match value {
            // The float of a file, with the digits that its author wrote.
            gguf::Value::Float(value) if value.is_finite() => {
                Value::from((*value as f32).to_string().parse().unwrap_or(*value))
            }
            gguf::Value::Float(value) => Value::from(value.to_string()),
            gguf::Value::Unsigned(value) => Value::from(*value),
            gguf::Value::Signed(value) => Value::from(*value),
            gguf::Value::Bool(value) => Value::from(*value),
            gguf::Value::String(value) => Value::from(value.clone()),
            _ => Value::Array(Vec::new()),
        };
        values.insert(name.to_owned(), value);
    }
    // There, everything up to 0 is the most likely token, and all tokens.
    for key in ["temperature", "top_k"] {
        if values.get(key).and_then(Value::as_f64).is_some_and(|value| value < 0.0) {
            values.insert(key.to_owned(), Value::from(0));
        }
    }
    // A penalty over no tokens is none.
    if values.get("penalty_last_n").and_then(Value::as_f64) == Some(0.0) {
        values.remove("repetition_penalty");
    }
    values
}

fn read_file(path: &Path) -> Result<(String, Map<String, Value>)> {
    let path = if path.extension().is_some_and(|ending| ending == "json") {
        path.to_owned()
    } else {
        path.join(FILE)
    };
    let name = path.display().to_string();
    let hint = "give --generation-config auto, vllm, or a folder with a generation_config.json";
    let text = files::read(&path, MAX_BYTES).map_err(|error| {
        Error::io(format!("cannot read {name}, for --generation-config"), error).with_hint(hint)
    })?;
    match files::json(&text) {
        Ok(Value::Object(values)) => Ok((name, values)),
        _ => Err(Error::invalid_request(format!("{name}, for --generation-config, is not a JSON object"))
            .with_hint(hint)),
    }
}

/// One id or a list of them.
fn eos_token_ids(values: &Map<String, Value>) -> Option<Vec<u32>> {
    let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
    match values.get("eos_token_id")? {
        Value::Array(ids) => ids.iter().map(id).collect(),
        value => Some(vec![id(value)?]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(values: &Value) -> GenerationConfig {
        GenerationConfig::from_values(FILE, values.as_object().unwrap())
    }

    #[test]
    fn values_are_taken_and_what_cannot_be_is_named() {
        let none = SamplingDefaults::default();
        let check = |values: Value, expected: SamplingDefaults, notices: &[&str]| {
            let config = read(&values);
            assert_eq!(config.defaults, expected, "{values}");
            assert_eq!(config.notices.len(), notices.len(), "{values}: {:?}", config.notices);
            for (notice, expected) in config.notices.iter().zip(notices) {
                assert!(notice.contains(expected), "{values}: {notice}");
            }
        };
        check(json!({}), none, &[]);
        check(json!({"eos_token_id": 2, "transformers_version": "5", "temperature": null}), none, &[]);
        check(
            json!({"num_beams": 1, "typical_p": 1.0, "suppress_tokens": [], "stop_strings": null}),
            none,
            &[],
        );
        check(
            json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0,
                "repetition_penalty": 1.05, "max_new_tokens": 100}),
            SamplingDefaults {
                temperature: Some(0.6),
                top_k: Some(20),
                top_p: Some(0.95),
                min_p: Some(0.0),
                repetition_penalty: Some(1.05),
                max_tokens: Some(100),
            },
            &["generation_config.json: temperature 0.6, top_k 20, top_p 0.95, min_p 0, repetition_penalty \
               1.05, max_tokens 100; --generation-config vllm"],
        );
        check(json!({"top_k": -1}), SamplingDefaults { top_k: Some(0), ..none }, &["top_k 0"]);
        check(json!({"top_k": 5.0}), SamplingDefaults { top_k: Some(5), ..none }, &["top_k 5"]);
        let greedy = SamplingDefaults { temperature: Some(0.0), ..none };
        check(json!({"do_sample": false}), greedy, &["temperature 0 (do_sample is false)"]);
        check(
            json!({"do_sample": false, "temperature": 0.6}),
            greedy,
            &["temperature 0 (do_sample is false)"],
        );
        check(json!({"temperature": 0.6}), SamplingDefaults { temperature: Some(0.6), ..none }, &["0.6"]);
        for (wrong, why) in [
            (
                json!({"temperature": 7}),
                "temperature = 7 in generation_config.json is ignored: it must be at least 0",
            ),
            (json!({"temperature": "hot"}), "temperature = \"hot\""),
            (json!({"top_p": 0}), "it must be above 0 and at most 1"),
            (json!({"min_p": 2}), "min_p = 2"),
            (json!({"top_k": -3}), "top_k = -3"),
            (json!({"top_k": 1.5}), "it must be an integer"),
            (json!({"repetition_penalty": [1]}), "repetition_penalty = [1]"),
            (json!({"max_new_tokens": 0}), "at least 1"),
            (json!({"do_sample": "no"}), "do_sample = \"no\""),
            (
                json!({"num_beams": 4, "suppress_tokens": [1]}),
                "num_beams, suppress_tokens in generation_config.json",
            ),
        ] {
            check(wrong, none, &[why]);
        }
        check(
            json!({"top_p": 5, "top_k": 3}),
            SamplingDefaults { top_k: Some(3), ..none },
            &["top_k 3", "top_p = 5"],
        );
    }

    #[test]
    fn keys_of_gguf_files_mean_what_they_mean_there() {
        let check = |keys: &[(&str, gguf::Value)], expected: SamplingDefaults| {
            let keys = keys.iter().map(|(key, value)| (format!("general.sampling.{key}"), value.clone()));
            let metadata = gguf::Metadata { entries: keys.collect() };
            assert_eq!(GenerationConfig::from_values("the file", &gguf_values(&metadata)).defaults, expected);
        };
        use gguf::Value::{Float, Signed};
        let none = SamplingDefaults::default();
        check(&[], none);
        check(
            &[
                ("temp", Float(f64::from(0.6_f32))),
                ("top_k", Signed(20)),
                ("top_p", Float(f64::from(0.95_f32))),
                ("min_p", Float(0.0)),
                ("penalty_repeat", Float(f64::from(1.1_f32))),
                ("penalty_last_n", Signed(64)),
            ],
            SamplingDefaults {
                temperature: Some(0.6),
                top_k: Some(20),
                top_p: Some(0.95),
                min_p: Some(0.0),
                repetition_penalty: Some(1.1),
                max_tokens: None,
            },
        );
        let all_likely = SamplingDefaults { temperature: Some(0.0), top_k: Some(0), ..none };
        check(&[("temp", Float(-1.0)), ("top_k", Signed(-1))], all_likely);
        check(&[("penalty_repeat", Float(1.5)), ("penalty_last_n", Signed(0))], none);
    }

    #[test]
    fn a_folder_may_be_named_and_has_to_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let choice = GenerationConfigChoice::from_str(folder.path().to_str().unwrap()).unwrap();
        let checkpoint = Checkpoint::from_static(crate::demo::MODEL).unwrap();
        let read = |choice: &GenerationConfigChoice| GenerationConfig::read(choice, &checkpoint);
        let error = read(&choice).unwrap_err();
        assert!(error.hint().unwrap().contains("--generation-config auto"), "{error:?}");
        std::fs::write(&path, "[]").unwrap();
        assert!(read(&choice).unwrap_err().message().contains("not a JSON object"));
        std::fs::write(&path, r#"{"top_k": 4, "eos_token_id": [1, 2]}"#).unwrap();
        for choice in [choice, GenerationConfigChoice::Folder(path)] {
            let config = read(&choice).unwrap();
            assert_eq!((config.defaults.top_k, config.eos_token_ids), (Some(4), Some(vec![1, 2])));
        }
        for choice in ["auto", "vllm"] {
            assert_eq!(read(&choice.parse().unwrap()).unwrap(), GenerationConfig::default());
        }
        assert!("".parse::<GenerationConfigChoice>().is_err());
    }
}
