//! The format of the answer: OpenAI's `response_format`, vLLM's `structured_outputs`, and its older
//! `guided_…` fields. A request has at most one of them.

use std::sync::Arc;

use serde_json::Value;

use super::super::account::charge;
use super::super::error::ApiError;
use super::super::json::{Fields, describe, wrong_type};
use super::super::schema_numbers;
use super::super::state::Model;
use super::super::values::{self, ReadError};
use super::messages::value_bytes;
use super::options::says_nothing;
use tinyvllm::grammar::{Grammar, GrammarSpec};
use tinyvllm::sampling::Constraint;

/// The kinds of output: their names in `structured_outputs` and as fields of the request.
const KINDS: [(&str, &str, &str); 4] = [
    ("json", "structured_outputs.json", "guided_json"),
    ("regex", "structured_outputs.regex", "guided_regex"),
    ("choice", "structured_outputs.choice", "guided_choice"),
    ("grammar", "structured_outputs.grammar", "guided_grammar"),
];
/// Other fields of `structured_outputs`, which would change what is allowed.
const REFUSED: [&str; 4] =
    ["structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"];

/// The requested format and its field.
#[derive(Debug, PartialEq)]
pub(super) struct StructuredOutput {
    spec: GrammarSpec,
    param: &'static str,
}

impl StructuredOutput {
    /// Its field.
    pub(super) fn param(&self) -> &'static str {
        self.param
    }

    /// Whether the format applies only to text, and not to calls. vLLM's own fields apply to the whole
    /// answer.
    pub(super) fn is_for_text(&self) -> bool {
        !["structured_outputs", "guided_"].iter().any(|field| self.param.starts_with(field))
    }

    /// A format that also accepts this grammar of calls. A call is an answer without text, so the format does
    /// not apply to it.
    pub(super) fn or_calls(self, calls: &str) -> Result<Self, ApiError> {
        let spec = self.spec.or_lark(calls).map_err(|error| in_field(error, &self.spec, self.param))?;
        Ok(Self { spec, ..self })
    }

    /// Compiles it into a grammar. This can take up to a second, so call it on a blocking thread only.
    pub(super) fn compile(self, model: &Model) -> Result<Arc<dyn Constraint>, ApiError> {
        Ok(compile(model, &self.spec, self.param)?)
    }
}

/// The error about a format in this field.
fn in_field(error: tinyvllm::Error, spec: &GrammarSpec, param: &'static str) -> ApiError {
    match spec {
        GrammarSpec::JsonSchema(_) => ApiError::in_schema(error, param),
        _ => ApiError::from(error).or_param(param),
    }
}

/// Compiles the grammar of this field and charges the request for it. Even for a cached grammar, each request has its own
/// states.
///
/// # Errors
/// 429 or 413 if there is too little memory for it; errors of the compiler.
pub(super) fn compile(
    model: &Model,
    spec: &GrammarSpec,
    param: &'static str,
) -> Result<Arc<Grammar>, ApiError> {
    /// Memory for each byte of the grammar: states and expressions. Measured with lists of choices, which are
    /// the largest.
    const COMPILED_BYTES: usize = 64;
    /// The largest grammar within the compiler's limits.
    const MAX_BYTES: usize = 16 << 20;
    let num_bytes = match spec {
        GrammarSpec::JsonObject => 0,
        GrammarSpec::JsonSchema(schema) => value_bytes(schema),
        GrammarSpec::Regex(text) | GrammarSpec::Lark(text) => text.len(),
        GrammarSpec::Choice(choices) => choices.iter().map(String::len).sum(),
    };
    let num_bytes = num_bytes.saturating_mul(COMPILED_BYTES).min(MAX_BYTES);
    charge(num_bytes).map_err(|error| error.or_param(param))?;
    model.llm.compile_grammar(spec).map_err(|error| in_field(error, spec, param))
}

/// Parses the fields that all interfaces share. `own` is the output from the interface's own fields.
pub(super) fn parse(
    fields: &mut Fields,
    own: impl IntoIterator<Item = StructuredOutput>,
) -> Result<Option<StructuredOutput>, ApiError> {
    let mut found: Option<StructuredOutput> = None;
    let mut add = |output: Option<StructuredOutput>| match (&found, output) {
        (Some(first), Some(second)) => {
            let message =
                format!("{} and {} exclude each other; give one of them", first.param, second.param);
            Err(ApiError::invalid(second.param, message))
        }
        (None, Some(output)) => {
            found = Some(output);
            Ok(())
        }
        (_, None) => Ok(()),
    };
    own.into_iter().try_for_each(|output| add(Some(output)))?;
    add(response_format(fields)?)?;
    if let Some(mut inner) = fields.object("structured_outputs")? {
        for name in REFUSED {
            if inner.take(name)?.is_some_and(|value| value != Value::Bool(false)) {
                let path = inner.path(name);
                let message = format!("{path} is not supported here; omit it");
                return Err(ApiError::unsupported(path, message));
            }
        }
        for (name, param, _) in KINDS {
            add(kind(name, param, inner.take(name)?)?)?;
        }
        let any_object = inner.bool("json_object")?.unwrap_or(false);
        let param = "structured_outputs.json_object";
        add(any_object.then_some(StructuredOutput { spec: GrammarSpec::JsonObject, param }))?;
        // An unknown field may be a constraint of another engine.
        let unknown = inner.first().map(|name| inner.path(name));
        if let Some(path) = unknown {
            let names = KINDS.map(|(name, ..)| name).join(", ");
            let message = format!("{path} is unknown; structured_outputs has {names} and json_object");
            return Err(ApiError::unsupported(path, message));
        }
    }
    for (name, _, param) in KINDS {
        add(kind(name, param, fields.take(param)?)?)?;
    }
    Ok(found)
}

fn response_format(fields: &mut Fields) -> Result<Option<StructuredOutput>, ApiError> {
    let Some(mut format) = fields.object("response_format")? else { return Ok(None) };
    match format.string("type")?.as_deref() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(match format.take("schema")? {
            None => StructuredOutput { spec: GrammarSpec::JsonObject, param: "response_format" },
            // As in some other servers.
            Some(schema) => {
                StructuredOutput { spec: GrammarSpec::JsonSchema(schema), param: "response_format.schema" }
            }
        })),
        Some("json_schema") => {
            let Some(mut inner) = format.object("json_schema")? else {
                let param = "response_format.json_schema";
                return Err(ApiError::invalid(param, format!("{param} is missing")));
            };
            json_schema(&mut inner, "response_format.json_schema.schema").map(Some)
        }
        Some("structural_tag") => {
            let message = "response_format of type structural_tag is not supported here";
            Err(ApiError::unsupported("response_format.type", message))
        }
        other => {
            let found = other.map_or_else(|| "missing".to_owned(), |text| describe(&text.into()));
            let message =
                format!("response_format.type is {found}, expected text, json_object or json_schema");
            Err(ApiError::invalid("response_format.type", message))
        }
    }
}

/// The schema in an object with a name and the field `strict`. Every schema is enforced; with `strict`,
/// objects have no additional properties.
fn json_schema(fields: &mut Fields, param: &'static str) -> Result<StructuredOutput, ApiError> {
    fields.string("name")?;
    fields.string("description")?;
    if fields.take("grammar")?.is_some_and(|grammar| !says_nothing(&grammar)) {
        let path = fields.path("grammar");
        let message = format!("{path} is unknown; use structured_outputs.grammar, in Lark or GBNF");
        return Err(ApiError::unsupported(path, message));
    }
    let is_strict = fields.bool("strict")?.unwrap_or(false);
    let path = fields.path("schema");
    match fields.take("schema")? {
        Some(schema) => {
            let schema = if is_strict { GrammarSpec::closed(schema) } else { schema };
            Ok(StructuredOutput { spec: GrammarSpec::JsonSchema(schema), param })
        }
        None => Err(ApiError::invalid(path.clone(), format!("{path} is missing"))),
    }
}

/// The same for interfaces whose object `format` has the schema next to the type. `schema_param` is its field.
pub(super) fn flat_format(
    mut format: Fields,
    param: &'static str,
    schema_param: &'static str,
) -> Result<Option<StructuredOutput>, ApiError> {
    match format.string("type")?.as_deref() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(StructuredOutput { spec: GrammarSpec::JsonObject, param })),
        Some("json_schema") => json_schema(&mut format, schema_param).map(Some),
        other => {
            let path = format.path("type");
            let found = other.map_or_else(|| "missing".to_owned(), |text| describe(&text.into()));
            let message = format!("{path} is {found}, expected text, json_object or json_schema");
            Err(ApiError::invalid(path, message))
        }
    }
}

/// ollama's format: `"json"` is any object, an object is a schema, and an absent one is no constraint.
pub(super) fn json_or_schema(
    format: Value,
    param: &'static str,
) -> Result<Option<StructuredOutput>, ApiError> {
    let spec = match format {
        Value::String(word) if word.is_empty() => return Ok(None),
        Value::String(word) if word == "json" => GrammarSpec::JsonObject,
        Value::Object(schema) => GrammarSpec::JsonSchema(schema.into()),
        other => {
            return Err(wrong_type(
                param.to_owned(),
                &other,
                "\"json\" or a JSON schema, which is an object",
            ));
        }
    };
    Ok(Some(StructuredOutput { spec, param }))
}

fn kind(name: &str, param: &'static str, value: Option<Value>) -> Result<Option<StructuredOutput>, ApiError> {
    let Some(value) = value else { return Ok(None) };
    let spec = match (name, value) {
        // A schema may be a string.
        ("json", Value::String(text)) => match values::read(text.as_bytes()) {
            Ok(schema) => {
                schema_numbers::check_schema(text.as_bytes(), param)?;
                GrammarSpec::JsonSchema(schema)
            }
            Err(ReadError::Refused(refusal)) => return Err(refusal),
            Err(ReadError::Json(error)) => {
                return Err(ApiError::invalid(param, format!("{param} is not JSON: {error}")));
            }
        },
        ("json", schema) => GrammarSpec::JsonSchema(schema),
        ("regex", Value::String(regex)) => GrammarSpec::Regex(regex),
        ("grammar", Value::String(grammar)) => GrammarSpec::Lark(grammar),
        ("choice", Value::Array(items)) => {
            let choices = items.into_iter().map(|item| match item {
                Value::String(text) => Ok(text),
                other => Err(wrong_type(param.to_owned(), &other, "a list of strings")),
            });
            GrammarSpec::Choice(choices.collect::<Result<_, _>>()?)
        }
        (name, other) => {
            let expected = if name == "choice" { "a list of strings" } else { "a string" };
            return Err(wrong_type(param.to_owned(), &other, expected));
        }
    };
    Ok(Some(StructuredOutput { spec, param }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::json::parse_object;
    use super::*;

    fn read(body: &Value) -> Result<Option<StructuredOutput>, Value> {
        let mut fields = parse_object(body.to_string().as_bytes()).unwrap();
        let result = parse(&mut fields, None).map_err(|error| error.body()["error"].clone());
        assert!(fields.into_map().unwrap().keys().all(|name| name == "other"), "{body}");
        result
    }

    #[test]
    fn all_names_of_the_same_thing() {
        let check = |body: Value, wanted: Option<(GrammarSpec, &str)>| {
            let found = read(&body).unwrap().map(|output| (output.spec, output.param));
            assert_eq!(found, wanted, "{body}");
        };
        let schema = json!({"type": "integer"});
        let spec = || GrammarSpec::JsonSchema(schema.clone());
        check(json!({"other": 1}), None);
        check(json!({"response_format": null, "structured_outputs": {}, "guided_json": null}), None);
        check(json!({"response_format": {"type": "text"}}), None);
        check(
            json!({"response_format": {"type": "json_object"}}),
            Some((GrammarSpec::JsonObject, "response_format")),
        );
        let named = json!({"name": "x", "strict": true, "schema": schema});
        let format = json!({"type": "json_schema", "json_schema": named});
        check(json!({"response_format": format}), Some((spec(), "response_format.json_schema.schema")));
        check(json!({"structured_outputs": {"json": schema}}), Some((spec(), "structured_outputs.json")));
        check(json!({"guided_json": schema.to_string()}), Some((spec(), "guided_json")));
        check(
            json!({"structured_outputs": {"json_object": true, "disable_any_whitespace": false}}),
            Some((GrammarSpec::JsonObject, "structured_outputs.json_object")),
        );
        let combined = json!({"type": "json_object", "schema": schema});
        check(json!({"response_format": combined}), Some((spec(), "response_format.schema")));
        let open = json!({"type": "object", "properties": {"a": {}}, "additionalProperties": true});
        let mut closed = open.clone();
        closed["additionalProperties"] = false.into();
        let strict =
            json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": open}});
        let spec = GrammarSpec::JsonSchema(closed);
        check(json!({"response_format": strict}), Some((spec.clone(), "response_format.json_schema.schema")));
        let flat = json!({"type": "json_schema", "name": "x", "strict": true, "schema": open});
        let flat = Fields::inside(flat, "text.format").unwrap();
        let flat = flat_format(flat, "text.format", "text.format.schema").unwrap();
        assert_eq!(flat, Some(StructuredOutput { spec, param: "text.format.schema" }));
        check(json!({"guided_regex": "a"}), Some((GrammarSpec::Regex("a".to_owned()), "guided_regex")));
        let choice = GrammarSpec::Choice(vec!["a".to_owned(), "b".to_owned()]);
        check(
            json!({"structured_outputs": {"choice": ["a", "b"]}}),
            Some((choice, "structured_outputs.choice")),
        );
        check(
            json!({"structured_outputs": {"grammar": "start: \"a\""}}),
            Some((GrammarSpec::Lark("start: \"a\"".to_owned()), "structured_outputs.grammar")),
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |body: Value, param: &str, words: &str| {
            let error = read(&body).unwrap_err();
            assert_eq!(error["param"], param, "{body}");
            assert!(error["message"].as_str().unwrap().contains(words), "{error}");
        };
        let format = |format: Value| json!({"response_format": format});
        check(
            format(json!({"type": "structural_tag"})),
            "response_format.type",
            "structural_tag is not supported",
        );
        check(format(json!({"type": "xml"})), "response_format.type", "\"xml\"");
        check(format(json!({})), "response_format.type", "missing");
        check(format(json!("json_object")), "response_format", "an object");
        check(format(json!({"type": "json_schema"})), "response_format.json_schema", "missing");
        check(
            format(json!({"type": "json_schema", "json_schema": {"name": "x"}})),
            "response_format.json_schema.schema",
            "missing",
        );
        check(
            format(json!({"type": "json_schema", "json_schema": {"schema": {}, "grammar": "a"}})),
            "response_format.json_schema.grammar",
            "use structured_outputs.grammar",
        );
        check(json!({"guided_choice": "a"}), "guided_choice", "a list of strings");
        check(json!({"guided_choice": ["a", 1]}), "guided_choice", "a list of strings");
        check(json!({"guided_grammar": 1}), "guided_grammar", "a string");
        check(json!({"guided_json": "{"}), "guided_json", "not JSON");
        check(
            json!({"structured_outputs": {"structural_tag": {}}}),
            "structured_outputs.structural_tag",
            "not supported",
        );
        for unknown in ["backend", "structural_tags", "Json"] {
            let path = format!("structured_outputs.{unknown}");
            check(
                json!({"structured_outputs": {"regex": "a", unknown: 1}}),
                &path,
                "json, regex, choice, grammar",
            );
        }
        check(
            json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
            "structured_outputs.choice",
            "exclude",
        );
        check(
            json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}),
            "guided_regex",
            "response_format and guided_regex exclude each other",
        );
    }
}
