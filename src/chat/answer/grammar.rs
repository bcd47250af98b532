//! Grammars of answers that call tools, in the language of [`GrammarSpec::Lark`].
//!
//! What such a grammar allows, the parsers of this module understand, and arguments are valid under the schema of
//! their tool. A tool whose schema names no properties and says nothing of others takes none.

use serde_json::{Map, Value, json};

use super::format::ToolCallFormat;
use super::unquoted::{alternatives, resolved, type_name};
use super::{AnswerFormat, Tool, glm, hermes, mistral, qwen3_coder};
use crate::grammar::GrammarSpec;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Parts of a schema that others refer to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// Keywords with which a schema says what an object has.
const OBJECT_KEYWORDS: [&str; 7] =
    ["$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties", "properties"];
/// A key that no schema names.
const FREE_KEY: &str = "/[A-Za-z0-9_.-]{1,64}/";

impl AnswerFormat {
    /// The grammar of answers that are calls of these tools: of one, or with `is_parallel` of one or more. Reasoning
    /// is no part of it. None if the form of calls is not known or there are no tools.
    ///
    /// # Errors
    /// If the schema of a tool is not one, or cannot be enforced.
    pub fn call_grammar(
        self,
        tokenizer: &Tokenizer,
        tools: &[Tool],
        is_parallel: bool,
    ) -> Result<Option<String>> {
        let Some(format) = self.tool_calls.filter(|_| !tools.is_empty()) else { return Ok(None) };
        let mut rules = Rules { tokenizer, text: String::new() };
        rules.calls(format, tools, is_parallel)?;
        Ok(Some(rules.text))
    }
}

/// A marker in a grammar: a special token has to be named, because no text produces it.
fn marker(tokenizer: &Tokenizer, text: &str) -> String {
    match tokenizer.token_id(text).filter(|id| tokenizer.is_special(*id)) {
        Some(id) => format!("<[{id}]>"),
        None => literal(text),
    }
}

/// The schema of a tool's arguments, which are an object also where it does not say so.
fn arguments_of(tool: &Tool) -> Value {
    let mut schema = tool.parameters.clone().unwrap_or_else(|| json!({}));
    if let Value::Object(fields) = &mut schema {
        fields.entry("type").or_insert_with(|| "object".into());
        if !OBJECT_KEYWORDS.iter().any(|keyword| fields.contains_key(*keyword)) {
            fields.insert("additionalProperties".to_owned(), false.into());
        }
    }
    schema
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// What is around keys and values that have no quotes, as parts of rules.
struct Pairs {
    /// Text before the name of the function, which a `>` and a line end follow, and behind its arguments; or nothing.
    function: [&'static str; 2],
    /// Before a key, and between a key and its value.
    key: [String; 2],
    /// The end of a value.
    end: String,
    /// The characters of a text whose length is bounded: it has none with which its end may begin.
    text_class: &'static str,
    /// What follows the end.
    after: &'static str,
}

impl Pairs {
    /// `value` includes its end.
    fn pair(&self, key: &str, value: &str) -> String {
        let [before, between] = &self.key;
        format!("{before} {key} {between} {value} {}", self.after)
    }
}

/// Rules in the making.
struct Rules<'t> {
    tokenizer: &'t Tokenizer,
    text: String,
}

impl Rules<'_> {
    fn add(&mut self, name: &str, body: &str) {
        self.text.push_str(&format!("{name}: {body}\n"));
    }

    fn marker(&self, text: &str) -> String {
        marker(self.tokenizer, text)
    }

    fn calls(&mut self, format: ToolCallFormat, tools: &[Tool], is_parallel: bool) -> Result<()> {
        let several = |separator: &str| match is_parallel {
            true => format!("call ({separator} call)*"),
            false => "call".to_owned(),
        };
        let names: Vec<String> = (0..tools.len()).map(|index| format!("call_{index}")).collect();
        let any = names.join(" | ");
        match format {
            ToolCallFormat::Hermes => {
                self.add("start", &several("\"\\n\""));
                let (open, close) = (self.marker(hermes::OPEN), self.marker(hermes::CLOSE));
                self.add("call", &format!("{open} \"\\n\" ({any}) \"\\n\" {close}"));
                self.objects(tools, "arguments")?;
            }
            ToolCallFormat::Llama3 => {
                self.add("start", &several("\"; \""));
                self.add("call", &any);
                self.objects(tools, "parameters")?;
            }
            ToolCallFormat::Mistral => {
                let open = self.marker(mistral::OPEN);
                if self.tokenizer.token_id(mistral::ARGS).is_some() {
                    self.add("start", &several(""));
                    self.add("call", &format!("{open} ({any})"));
                    let args = self.marker(mistral::ARGS);
                    for (index, tool) in tools.iter().enumerate() {
                        let name = literal(&tool.name);
                        self.add(&format!("call_{index}"), &format!("{name} {args} arguments_{index}"));
                        self.arguments(index, tool)?;
                    }
                } else {
                    self.add("start", &format!("{open} \"[\" {} \"]\"", several("\", \"")));
                    self.add("call", &any);
                    self.objects(tools, "arguments")?;
                }
            }
            ToolCallFormat::Glm => {
                self.add("start", &several("\"\\n\"?"));
                let (open, close) = (self.marker(glm::OPEN), self.marker(glm::CLOSE));
                self.add("call", &format!("{open} ({any}) \"\\n\"? {close}"));
                // A text with its end, whether that is a token of its own or text too.
                let end = self.marker(glm::VALUE_END);
                match end.starts_with('<') {
                    true => self.add("text_value", &format!(r"/([^<]|<[^\/])*/ {end}")),
                    false => self.add(&format!("text_value[suffix={end}]"), "/(?s:.*)/"),
                }
                let [open, close, begin] = [glm::KEY, glm::KEY_END, glm::VALUE].map(|text| self.marker(text));
                let form = Pairs {
                    function: ["", ""],
                    key: [format!("\"\\n\"? {open}"), format!("{close} \"\\n\"? {begin}")],
                    end,
                    text_class: "[^<]",
                    after: "",
                };
                self.all_pairs(tools, &form)?;
            }
            ToolCallFormat::Qwen3Coder => {
                self.add("start", &several("\"\\n\""));
                let (open, close) = (self.marker(hermes::OPEN), self.marker(hermes::CLOSE));
                self.add("call", &format!("{open} \"\\n\" ({any}) \"\\n\" {close}"));
                let end = literal(qwen3_coder::VALUE_END);
                self.add(&format!("text_value[suffix={end}]"), "/(?s:.*)/");
                let form = Pairs {
                    function: [qwen3_coder::FUNCTION, qwen3_coder::FUNCTION_END],
                    key: [literal(qwen3_coder::PARAMETER), literal(">\n")],
                    end,
                    text_class: r"[^<\n]",
                    after: "\"\\n\"",
                };
                self.all_pairs(tools, &form)?;
            }
        }
        Ok(())
    }

    fn all_pairs(&mut self, tools: &[Tool], form: &Pairs) -> Result<()> {
        tools.iter().enumerate().try_for_each(|(index, tool)| self.pairs(index, tool, form))
    }

    /// Each call as an object with a name and arguments.
    fn objects(&mut self, tools: &[Tool], key: &str) -> Result<()> {
        for (index, tool) in tools.iter().enumerate() {
            let before = format!("{{\"name\": {}, \"{key}\": ", literal(&tool.name));
            let body = format!("{} arguments_{index} \"}}\"", literal(&before));
            self.add(&format!("call_{index}"), &body);
            self.arguments(index, tool)?;
        }
        Ok(())
    }

    fn arguments(&mut self, index: usize, tool: &Tool) -> Result<()> {
        let schema = GrammarSpec::lark_arguments(&arguments_of(tool))?;
        self.add(&format!("arguments_{index}"), &schema);
        Ok(())
    }

    /// A call in which arguments are pairs of a key and a value without quotes.
    fn pairs(&mut self, index: usize, tool: &Tool, form: &Pairs) -> Result<()> {
        let rule = format!("call_{index}");
        let [before, end] = match form.function {
            ["", ""] => [literal(&tool.name), String::new()],
            [begin, end] => [literal(&format!("{begin}{}>\n", tool.name)), literal(end)],
        };
        let root = arguments_of(tool);
        let named = resolved(&root, &root);
        let objects = match named.get("properties") {
            Some(_) => vec![named],
            None => alternatives(&root, &root),
        };
        let mut options = Vec::new();
        for (number, object) in objects.into_iter().enumerate() {
            options.push(self.object_pairs(&format!("pair_{index}_{number}"), object, &root, form)?);
        }
        self.add(&rule, &format!("{before} ({}) {end}", options.join(" | ")));
        Ok(())
    }

    /// The pairs of an object, in the order of its schema.
    fn object_pairs(&mut self, prefix: &str, object: &Value, root: &Value, form: &Pairs) -> Result<String> {
        if let Some(keyword) =
            ["allOf", "patternProperties"].into_iter().find(|name| object.get(name).is_some())
        {
            return Err(Error::invalid_request(format!(
                "the parameters of a tool have {keyword}, which cannot be enforced in this model's form of calls"
            )));
        }
        let none = Map::new();
        let properties = object.get("properties").and_then(Value::as_object).unwrap_or(&none);
        let required = object.get("required").and_then(Value::as_array).into_iter().flatten();
        let required: Vec<&str> = required.filter_map(Value::as_str).collect();
        let others = object.get("additionalProperties").filter(|others| **others != Value::Bool(false));
        let any = Value::Bool(true);
        let undeclared = required.iter().filter(|name| !properties.contains_key(**name));
        let undeclared = undeclared.map(|name| (*name, others.unwrap_or(&any)));
        let declared = properties.iter().map(|(name, schema)| (name.as_str(), schema));
        let mut body = String::from("\"\"");
        for (position, (key, schema)) in declared.chain(undeclared).enumerate() {
            if *schema == Value::Bool(false) {
                continue;
            }
            let pair = format!("{prefix}_{position}");
            let mark = if required.contains(&key) { "" } else { "?" };
            body.push_str(&format!(" {pair}{mark}"));
            let value = format!("{pair}_value");
            self.add(&pair, &form.pair(&literal(key), &value));
            self.value(&value, schema, root, form)?;
        }
        if let Some(others) = others {
            let taken: Vec<String> = properties.keys().map(|name| literal(name)).collect();
            let key = match taken.is_empty() {
                true => FREE_KEY.to_owned(),
                false => format!("{FREE_KEY} & ~({})", taken.join(" | ")),
            };
            let name = prefix.to_uppercase();
            self.add(&format!("{name}_KEY"), &key);
            self.add(
                &format!("{prefix}_more"),
                &form.pair(&format!("{name}_KEY"), &format!("{prefix}_value")),
            );
            self.value(&format!("{prefix}_value"), others, root, form)?;
            body.push_str(&format!(" {prefix}_more*"));
        }
        Ok(body)
    }

    /// A value and its end: a text as it is, anything else as JSON.
    fn value(&mut self, name: &str, schema: &Value, root: &Value, form: &Pairs) -> Result<()> {
        let end = &form.end;
        let branches: Vec<Value> = alternatives(schema, root).into_iter().flat_map(by_type).collect();
        let texts: Vec<&Value> = branches.iter().filter(|branch| is_text(branch)).collect();
        let others: Vec<&Value> = branches.iter().filter(|branch| !is_text(branch)).collect();
        let is_free = |branch: &&Value| GrammarSpec::is_free_text(branch);
        let is_plain = |branch: &&&Value| {
            let is_scalar =
                ["null", "boolean", "integer", "number"].iter().any(|kind| branch["type"] == *kind);
            is_scalar && branch.as_object().is_some_and(|fields| fields.len() == 1)
        };
        // What is no JSON of the other types is a text then, and every text is right.
        let is_any = branches.iter().any(|branch| branch.as_object().is_none_or(Map::is_empty));
        if is_any || texts.iter().any(is_free) && others.iter().all(|other| is_plain(&other)) {
            self.add(name, "text_value");
            return Ok(());
        }
        let mut options = Vec::new();
        let mut json: Vec<Value> = others.iter().map(|other| (*other).clone()).collect();
        for text in texts {
            match words(text) {
                Some(words) => {
                    for word in words {
                        // What reads as JSON is written as JSON, unless it can be a text only.
                        let is_json =
                            !others.is_empty() && serde_json::from_str::<Value>(word.trim()).is_ok();
                        match is_json || word.contains("</") || word.contains('\n') {
                            true if others.is_empty() => {
                                return Err(Error::invalid_request(format!(
                                    "the value {word:?} of a parameter cannot be told in this model's form of calls"
                                )));
                            }
                            true => json.push(json!({"const": word})),
                            false => options.push(literal(word)),
                        }
                    }
                }
                None => {
                    let kinds: Vec<&str> = others.iter().filter_map(|other| kind_of(other)).collect();
                    let text = GrammarSpec::lark_text(text, form.text_class)?;
                    let text = match others.is_empty() {
                        true => text,
                        false => format!("{text} & ~({})", json_beginnings(&kinds)),
                    };
                    let terminal = format!("{}_TEXT_{}", name.to_uppercase(), options.len());
                    self.add(&terminal, &text);
                    options.push(terminal);
                }
            }
        }
        if !json.is_empty() {
            let mut schema = json!({"anyOf": json});
            for definitions in DEFINITIONS {
                if let Some(found) = root.get(definitions) {
                    schema[definitions] = found.clone();
                }
            }
            self.add(&format!("{name}_json"), &GrammarSpec::lark_arguments(&schema)?);
            options.push(format!("{name}_json"));
        }
        self.add(name, &format!("({}) {end}", options.join(" | ")));
        Ok(())
    }
}

/// One schema for each of the types of a list of them.
fn by_type(schema: &Value) -> Vec<Value> {
    let mut schema = schema.clone();
    for annotation in ["description", "title", "default", "examples"] {
        schema.as_object_mut().map(|fields| fields.remove(annotation));
    }
    match (schema.get("type"), schema.get("enum")) {
        (_, Some(Value::Array(values))) => {
            let (texts, others): (Vec<Value>, Vec<Value>) =
                values.iter().cloned().partition(Value::is_string);
            let kinds = schema.get("type").cloned();
            let lists = [texts, others].into_iter().filter(|list| !list.is_empty()).map(|list| {
                let mut listed = json!({"enum": list});
                if let Some(kinds) = &kinds {
                    listed["type"] = kinds.clone();
                }
                listed
            });
            lists.collect()
        }
        (Some(Value::Array(kinds)), _) => {
            let kinds = kinds.clone();
            let single = kinds.into_iter().map(|kind| {
                let mut single = schema.clone();
                single["type"] = kind;
                single
            });
            single.collect()
        }
        _ => vec![schema],
    }
}

fn is_text(schema: &Value) -> bool {
    kind_of(schema) == Some("string")
}

/// The type of a schema that has one only.
fn kind_of(schema: &Value) -> Option<&str> {
    let listed = schema.get("enum").and_then(|values| values.get(0)).or_else(|| schema.get("const"));
    listed.map(type_name).or_else(|| schema.get("type")?.as_str())
}

fn words(schema: &Value) -> Option<Vec<&str>> {
    match (schema.get("enum"), schema.get("const")) {
        (Some(Value::Array(words)), _) => Some(words.iter().filter_map(Value::as_str).collect()),
        (None, Some(Value::String(word))) => Some(vec![word]),
        _ => None,
    }
}

/// How texts begin that would be read as JSON of a string or of these types.
fn json_beginnings(kinds: &[&str]) -> String {
    let mut beginnings = vec![r#"/\s*"(?s:.*)/"#];
    for kind in kinds {
        beginnings.push(match *kind {
            "null" => r"/\s*null\s*/",
            "boolean" => r"/\s*(true|false)\s*/",
            "integer" | "number" => r"/\s*-?[0-9](?s:.*)/",
            "array" => r"/\s*\[(?s:.*)/",
            _ => r"/\s*\{(?s:.*)/",
        });
    }
    beginnings.join(" | ")
}
