//! Grammars of answers that call tools, in the language of [`GrammarSpec::Lark`](crate::grammar::GrammarSpec).
//!
//! What such a grammar allows, the parsers of this module understand, and arguments follow the schema of their
//! tool. What is not enforced is a pattern or format of texts in the forms of GLM and Qwen 3 Coder, which have no quotes.

use serde_json::{Map, Value, json};

use super::format::ToolCallFormat;
use super::unquoted::{Types, resolved};
use super::{AnswerFormat, Tool, glm, hermes, mistral, qwen3_coder};
use crate::tokenizer::Tokenizer;

/// Space between the parts of JSON: none or one. With more, a model could go on with it for ever.
const JSON_SPACE: &str = " ?";
/// Longer bounds of texts are not looked at, because the grammar would become large.
const MAX_TEXT_LENGTH: u64 = 4_096;
/// Parts of a schema that others refer to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

impl AnswerFormat {
    /// The grammar of answers that are calls of these tools: of one, or with `is_parallel` of one or more. Reasoning
    /// is no part of it. None if the form of calls is not known or there are no tools.
    #[must_use]
    pub fn call_grammar(self, tokenizer: &Tokenizer, tools: &[Tool], is_parallel: bool) -> Option<String> {
        let format = self.tool_calls.filter(|_| !tools.is_empty())?;
        let mut rules = Rules { tokenizer, text: String::new() };
        rules.calls(format, tools, is_parallel);
        Some(rules.text)
    }
}

/// A marker in a grammar: a special token has to be named, because no text produces it.
fn marker(tokenizer: &Tokenizer, text: &str) -> String {
    match tokenizer.token_id(text).filter(|id| tokenizer.is_special(*id)) {
        Some(id) => format!("<[{id}]>"),
        None => literal(text),
    }
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

    fn calls(&mut self, format: ToolCallFormat, tools: &[Tool], is_parallel: bool) {
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
                self.objects(tools, "arguments");
            }
            ToolCallFormat::Llama3 => {
                self.add("start", &several("\"; \""));
                self.add("call", &any);
                self.objects(tools, "parameters");
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
                        self.arguments(index, tool);
                    }
                } else {
                    self.add("start", &format!("{open} \"[\" {} \"]\"", several("\", \"")));
                    self.add("call", &any);
                    self.objects(tools, "arguments");
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
                self.all_pairs(tools, &form);
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
                self.all_pairs(tools, &form);
            }
        }
    }

    fn all_pairs(&mut self, tools: &[Tool], form: &Pairs) {
        for (index, tool) in tools.iter().enumerate() {
            self.pairs(index, tool, form);
        }
    }

    /// Each call as an object with a name and arguments.
    fn objects(&mut self, tools: &[Tool], key: &str) {
        for (index, tool) in tools.iter().enumerate() {
            let before = format!("{{\"name\": {}, \"{key}\": ", literal(&tool.name));
            let body = format!("{} arguments_{index} \"}}\"", literal(&before));
            self.add(&format!("call_{index}"), &body);
            self.arguments(index, tool);
        }
    }

    fn arguments(&mut self, index: usize, tool: &Tool) {
        let nothing = || json!({"type": "object", "properties": {}, "additionalProperties": false});
        let mut schema = tool.parameters.clone().unwrap_or_else(nothing);
        if let Value::Object(fields) = &mut schema {
            // Arguments are an object also where the schema does not say so.
            fields.entry("type").or_insert_with(|| "object".into());
        }
        self.json(&format!("arguments_{index}"), schema);
    }

    fn json(&mut self, name: &str, mut schema: Value) {
        if let Value::Object(fields) = &mut schema {
            fields.insert("x-guidance".to_owned(), json!({"whitespace_pattern": JSON_SPACE}));
        }
        self.add(name, &format!("%json {schema}"));
    }

    /// A call in which arguments are pairs of a key and a value without quotes.
    fn pairs(&mut self, index: usize, tool: &Tool, form: &Pairs) {
        let rule = format!("call_{index}");
        let [before, end] = match form.function {
            ["", ""] => [literal(&tool.name), String::new()],
            [begin, end] => [literal(&format!("{begin}{}>\n", tool.name)), literal(end)],
        };
        let Some(parameters) = &tool.parameters else { return self.add(&rule, &format!("{before} {end}")) };
        let Some(properties) = parameters.get("properties").and_then(Value::as_object) else {
            self.add(&rule, &format!("{before} pair_{index}* {end}"));
            return self.add(&format!("pair_{index}"), &form.pair("/[^<>\\n]{1,64}/", "text_value"));
        };
        let required: Vec<&str> = parameters
            .get("required")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let mut body = before;
        let mut rules = Vec::new();
        for (position, (key, schema)) in properties.iter().enumerate() {
            let pair = format!("pair_{index}_{position}");
            let mark = if required.contains(&key.as_str()) { "" } else { "?" };
            body.push_str(&format!(" {pair}{mark}"));
            rules.push((pair, key, schema));
        }
        self.add(&rule, &format!("{body} {end}"));
        for (pair, key, schema) in rules {
            let value = format!("{pair}_value");
            self.add(&pair, &form.pair(&literal(key), &value));
            self.value(&value, schema, parameters, form);
        }
    }

    fn value(&mut self, name: &str, schema: &Value, parameters: &Value, form: &Pairs) {
        let Pairs { end, text_class, .. } = form;
        let schema = resolved(schema, parameters);
        let words = schema.get("enum").and_then(Value::as_array);
        let words: Option<Vec<&str>> = words.and_then(|words| words.iter().map(Value::as_str).collect());
        if let Some(words) = words.filter(|words| !words.is_empty()) {
            let words: Vec<String> = words.into_iter().map(literal).collect();
            return self.add(name, &format!("({}) {end}", words.join(" | ")));
        }
        if Types::of(Some(schema)).may_be_text() {
            let bound = |name: &str| schema.get(name).and_then(Value::as_u64);
            let max = bound("maxLength").filter(|max| *max <= MAX_TEXT_LENGTH);
            let min = bound("minLength").filter(|min| *min <= max.unwrap_or(MAX_TEXT_LENGTH)).unwrap_or(0);
            return match max {
                Some(max) => self.add(name, &format!("/{text_class}{{{min},{max}}}/ {end}")),
                None if min > 0 => self.add(name, &format!("/{text_class}{{{min}}}/ text_value")),
                None => self.add(name, "text_value"),
            };
        }
        let mut schema = schema.clone();
        if let Value::Object(fields) = &mut schema {
            let definitions = DEFINITIONS.iter().filter_map(|name| Some((*name, parameters.get(*name)?)));
            let definitions: Map<String, Value> =
                definitions.map(|(name, value)| (name.to_owned(), value.clone())).collect();
            fields.extend(definitions);
        }
        let json = format!("{name}_json");
        self.add(name, &format!("{json} {end}"));
        self.json(&json, schema);
    }
}
