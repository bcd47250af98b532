//! Options that all interfaces share, and options that none supports.

use serde_json::Value;

use super::super::error::ApiError;
use super::super::json::Fields;
use tinyvllm::llm::TextOptions;

/// Most prompts in one request.
pub(super) const MAX_PROMPTS: usize = 128;

/// The options of a request, in addition to its prompt and its sampling parameters.
pub(super) struct Options {
    pub(super) text: TextOptions,
    /// Present if the answer is a stream.
    pub(super) stream: Option<StreamOptions>,
    /// Whether a stop string ends an answer in its reasoning too.
    pub(super) stops_in_reasoning: bool,
    pub(super) cache_salt: Option<String>,
    pub(super) return_token_ids: bool,
    /// Number of likely tokens to report at each position of the prompt.
    pub(super) prompt_logprobs: Option<usize>,
    /// Order among the requests of one client: the smallest value runs first.
    pub(super) priority: i32,
    /// The user whom the request names.
    pub(super) user: Option<String>,
}

/// The options of a stream.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StreamOptions {
    /// A last chunk with the usage, and `"usage": null` in the others.
    pub(super) include_usage: bool,
    /// The usage so far in every chunk.
    pub(super) continuous_usage: bool,
    /// Whether chunks report the progress of the prompt.
    pub(super) reports_progress: bool,
}

/// The values with which an unsupported field has no effect.
enum Harmless {
    /// None.
    Never,
    /// `false`.
    False,
    /// `true`.
    True,
    /// An empty list or object.
    Empty,
    /// This number.
    Number(f64),
    /// This text.
    Text(&'static str),
    /// The list `["text"]`.
    OnlyText,
}

impl Harmless {
    fn covers(&self, value: &Value) -> bool {
        match self {
            Self::Never => false,
            Self::False => value == &Value::Bool(false),
            Self::True => value == &Value::Bool(true),
            Self::Empty => match value {
                Value::Array(items) => items.is_empty(),
                Value::Object(fields) => fields.is_empty(),
                _ => false,
            },
            Self::Number(number) => value.as_f64() == Some(*number),
            Self::Text(text) => value.as_str() == Some(text),
            Self::OnlyText => value.as_array().is_some_and(|items| items == &["text"]),
        }
    }
}

/// Fields of OpenAI and vLLM that would change the answer, and that this server does not support.
const UNSUPPORTED: &[(&str, Harmless)] = &[
    ("allowed_token_ids", Harmless::Empty),
    ("audio", Harmless::Never),
    ("bad_words", Harmless::Empty),
    ("best_of", Harmless::Number(1.0)),
    ("chat_template", Harmless::Never),
    ("function_call", Harmless::Text("none")),
    ("functions", Harmless::Empty),
    ("guided_whitespace_pattern", Harmless::Never),
    ("kv_transfer_params", Harmless::Empty),
    ("length_penalty", Harmless::Number(1.0)),
    ("logits_processors", Harmless::Empty),
    ("modalities", Harmless::OnlyText),
    ("prediction", Harmless::Never),
    ("prompt_embeds", Harmless::Never),
    ("return_tokens_as_token_ids", Harmless::False),
    ("spaces_between_special_tokens", Harmless::True),
    ("suffix", Harmless::Text("")),
    ("tool_choice", Harmless::Text("none")),
    ("tools", Harmless::Empty),
    ("truncate_prompt_tokens", Harmless::Never),
    ("use_beam_search", Harmless::False),
    ("web_search_options", Harmless::Never),
];

/// The names that an interface has for common options.
pub(super) struct Words {
    /// The maximal number of tokens.
    limit: &'static str,
    /// The format of the answer.
    format: &'static str,
    /// Texts that end an answer.
    stop: &'static str,
}

impl Words {
    pub(super) const CHATS: Self = Self { limit: "max_tokens", format: "response_format", stop: "stop" };
    pub(super) const RESPONSES: Self =
        Self { limit: "max_output_tokens", format: "text.format", stop: "stop" };
    pub(super) const MESSAGES: Self =
        Self { limit: "max_tokens", format: "output_config.format", stop: "stop_sequences" };
    pub(super) const OLLAMA: Self =
        Self { limit: "options.num_predict", format: "format", stop: "options.stop" };

    /// A hint with the names of this interface.
    fn fill(&self, way_out: &str) -> String {
        way_out.replace("LIMIT", self.limit).replace("FORMAT", self.format).replace("STOP", self.stop)
    }
}

/// Fields of other interfaces and engines that constrain the answer or its length, each with the field to use
/// instead. `LIMIT`, `FORMAT` and `STOP` stand for the fields of `Words`. An interface takes its own fields
/// first.
const FOREIGN: &[(&str, &str)] = &[
    ("bad_words_ids", "logit_bias"),
    ("choice", "structured_outputs.choice"),
    ("custom_logit_processor", ""),
    ("ebnf", "structured_outputs.grammar, in Lark or GBNF"),
    ("extra_body", "the fields of this interface"),
    ("format", "FORMAT"),
    ("grammar", "structured_outputs.grammar, in Lark or GBNF"),
    ("grammar_lazy", "tool_choice"),
    ("grammar_triggers", "tool_choice"),
    ("guided_decoding", "structured_outputs"),
    ("guided_decoding_backend", ""),
    ("guided_json_object", "FORMAT of type json_object"),
    ("ignore_eos_token", "ignore_eos"),
    ("json", "structured_outputs.json"),
    ("json_object", "FORMAT of type json_object"),
    ("json_schema", "FORMAT"),
    ("max_completion_tokens", "LIMIT"),
    ("max_length", "LIMIT"),
    ("max_new_tokens", "LIMIT"),
    ("max_output_tokens", "LIMIT"),
    ("max_tokens", "LIMIT"),
    ("min_new_tokens", "min_tokens"),
    ("n_predict", "LIMIT"),
    ("no_stop_trim", "include_stop_str_in_output"),
    ("num_predict", "LIMIT"),
    ("options", "the fields of this interface"),
    ("output_config.format", "FORMAT"),
    ("output_format", "FORMAT"),
    ("parameters", "the fields of this interface"),
    ("previous_response_id", "/v1/responses"),
    ("regex", "structured_outputs.regex"),
    ("response_schema", "FORMAT"),
    ("sampling_params", "the fields of this interface"),
    ("stop_regex", "STOP"),
    ("stop_sequences", "STOP"),
    ("stop_words", "STOP"),
    ("structural_tag", ""),
    ("text.format", "FORMAT"),
    ("thinking_token_budget", ""),
];

impl Options {
    /// Takes these options from the body, and refuses unsupported fields.
    pub(super) fn parse(fields: &mut Fields, stop: &[String], words: &Words) -> Result<Self, ApiError> {
        refuse_unsupported(fields, words)?;
        pass_harmless(fields)?;
        let is_stream = fields.bool("stream")?.unwrap_or(false);
        let stream_options = match fields.object("stream_options")? {
            Some(_) if !is_stream => {
                let message = "stream_options is given, but stream is not true";
                return Err(ApiError::invalid("stream_options", message));
            }
            Some(mut options) => {
                // Padding of chunks to one length, against eavesdroppers.
                options.pass(&["include_obfuscation"]);
                StreamOptions {
                    include_usage: options.bool("include_usage")?.unwrap_or(false),
                    continuous_usage: options.bool("continuous_usage_stats")?.unwrap_or(false),
                    ..StreamOptions::default()
                }
            }
            None => StreamOptions::default(),
        };
        Ok(Self {
            text: TextOptions {
                stop: stop.to_vec(),
                include_stop: fields.bool("include_stop_str_in_output")?.unwrap_or(false),
                skip_special: fields.bool("skip_special_tokens")?.unwrap_or(true),
                ..TextOptions::default()
            },
            stream: is_stream.then_some(stream_options),
            stops_in_reasoning: fields.bool("stop_in_reasoning")?.unwrap_or(false),
            cache_salt: cache_salt(fields)?,
            return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
            prompt_logprobs: fields.unsigned("prompt_logprobs")?,
            priority: priority(fields)?,
            user: fields.string("user")?,
        })
    }
}

impl Options {
    /// Takes the option to report the progress of the prompt.
    pub(super) fn parse_progress(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        let is_wanted = fields.bool("return_progress")?.unwrap_or(false);
        match &mut self.stream {
            Some(stream) => stream.reports_progress = is_wanted,
            None if is_wanted => {
                let message = "return_progress is true, but stream is not: progress is part of a stream; GET \
                               /v1/requests/{id} has it for any request";
                return Err(ApiError::invalid("return_progress", message));
            }
            None => {}
        }
        Ok(())
    }

    /// Refuses reports for which the interface's answers have no fields.
    pub(super) fn refuse_reports(&self) -> Result<(), ApiError> {
        let given = [
            ("prompt_logprobs", self.prompt_logprobs.is_some()),
            ("return_token_ids", self.return_token_ids),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => {
                let message = format!("{name} is not supported here; use /v1/chat/completions");
                Err(ApiError::unsupported(name, message))
            }
            None => Ok(()),
        }
    }
}

fn priority(fields: &mut Fields) -> Result<i32, ApiError> {
    let priority = fields.integer("priority")?.unwrap_or(0);
    i32::try_from(priority).map_err(|_| {
        let message = format!("priority is {priority}; it must be from {} to {}", i32::MIN, i32::MAX);
        ApiError::invalid("priority", message)
    })
}

fn cache_salt(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    const MAX_BYTES: usize = 1_024;
    let salt = fields.string("cache_salt")?;
    match &salt {
        Some(text) if text.is_empty() || text.len() > MAX_BYTES => Err(ApiError::invalid(
            "cache_salt",
            format!("cache_salt has {} bytes; it must have 1 to {MAX_BYTES}", text.len()),
        )),
        _ => Ok(salt),
    }
}

fn refuse_unsupported(fields: &mut Fields, words: &Words) -> Result<(), ApiError> {
    for (name, harmless) in UNSUPPORTED {
        if fields.take(name)?.is_some_and(|value| !harmless.covers(&value)) {
            let way_out = match *name {
                "function_call" => "use tool_choice, in a chat",
                "functions" => "use tools, in a chat",
                _ => "omit it",
            };
            let message = format!("{name} is not supported here; {way_out}");
            return Err(ApiError::unsupported(*name, message));
        }
    }
    for (name, way_out) in FOREIGN {
        if fields.look(name, says_nothing)? == Some(false) {
            let way_out = match *way_out {
                "" => "omit it".to_owned(),
                way_out => format!("use {}", words.fill(way_out)),
            };
            return Err(ApiError::unsupported(*name, format!("{name} is unknown; {way_out}")));
        }
        fields.pass(&[name]);
    }
    // Dynamo's extension object has more fields. All but `annotations` constrain the answer.
    let first_binding = |extension: &Value| {
        let mut entries = extension.as_object().into_iter().flatten();
        entries
            .find(|(name, value)| *name != "annotations" && !says_nothing(value))
            .map(|(name, _)| name.clone())
    };
    if let Some(name) = fields.look("nvext", first_binding)?.flatten() {
        let path = format!("nvext.{name}");
        let message = format!("{path} is unknown; use the fields of this interface");
        return Err(ApiError::unsupported(path, message));
    }
    Ok(())
}

/// Takes fields with values that ask for what this server does anyway: it stores nothing and has one tier. An
/// interface that supports such a field takes it first.
fn pass_harmless(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["metadata", "mm_processor_kwargs", "service_tier", "store"] {
        let is_harmless = fields.look(name, |value| match name {
            "store" => *value == false,
            "mm_processor_kwargs" => says_nothing(value),
            "service_tier" => ["auto", "default", "standard_only"].iter().any(|tier| value == tier),
            _ => value.is_object(),
        })?;
        if is_harmless == Some(true) {
            fields.pass(&[name]);
        }
    }
    Ok(())
}

/// Whether the value means the same as an absent field. Routers send all fields that they know.
pub(super) fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        // The format `text` is no constraint.
        Value::Object(fields) => fields.is_empty() || fields.get("type").is_some_and(|kind| kind == "text"),
        Value::Array(items) => items.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::json::parse_object;
    use super::*;

    #[test]
    fn known_fields_are_refused_unless_they_change_nothing() {
        let check = |body: &str, param: Option<&str>| {
            let mut fields = parse_object(body.as_bytes()).unwrap();
            let error = Options::parse(&mut fields, &[], &Words::CHATS).err();
            let error = error.map(|error| error.body()["error"].clone());
            assert_eq!(error.as_ref().and_then(|error| error["param"].as_str()), param, "{body}");
        };
        for harmless in [
            r#"{"best_of": 1, "suffix": "", "tools": [], "tool_choice": "none", "modalities": ["text"]}"#,
            r#"{"prompt_logprobs": null, "use_beam_search": false}"#,
            r#"{"stream": true, "stream_options": {"include_usage": true, "other": 1}, "unknown": [{}]}"#,
        ] {
            check(harmless, None);
        }
        check(r#"{"best_of": 2}"#, Some("best_of"));
        check(r#"{"tools": [{}]}"#, Some("tools"));
        check(r#"{"tools": "x"}"#, Some("tools"));
        check(r#"{"tool_choice": "auto"}"#, Some("tool_choice"));
        check(r#"{"prompt_logprobs": -1}"#, Some("prompt_logprobs"));
        check(r#"{"prompt_logprobs": 1}"#, None);
        check(r#"{"chat_template": "{{ 1 }}"}"#, Some("chat_template"));
        check(r#"{"stream": 1}"#, Some("stream"));
        check(r#"{"stream_options": {}}"#, Some("stream_options"));
        check(
            r#"{"stream": true, "stream_options": {"include_usage": 1}}"#,
            Some("stream_options.include_usage"),
        );
        check(r#"{"cache_salt": ""}"#, Some("cache_salt"));
        check(r#"{"nvext": {"annotations": ["request_id"], "top_k": null}, "text": "x"}"#, None);
        check(r#"{"nvext": {"annotations": [], "guided_json": {"a": 1}}}"#, Some("nvext.guided_json"));
        for (name, way_out) in FOREIGN {
            let body = |value: &str| match name.split_once('.') {
                Some((object, field)) => format!("{{\"{object}\": {{\"{field}\": {value}}}}}"),
                None => format!("{{\"{name}\": {value}}}"),
            };
            check(&body("1"), Some(name));
            for nothing in ["null", "false", "[]", "{}", "\"\"", "{\"type\": \"text\"}"] {
                check(&body(nothing), None);
            }
            let mut fields = parse_object(body("{\"a\": 1}").as_bytes()).unwrap();
            let error = Options::parse(&mut fields, &[], &Words::CHATS).err().unwrap().body();
            assert!(
                error["error"]["message"].as_str().unwrap().contains(&Words::CHATS.fill(way_out)),
                "{error}"
            );
        }
    }
}
