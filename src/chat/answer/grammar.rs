//! Grammars of answers that call tools, in the language of [`GrammarSpec::Lark`].
//!
//! The parsers of this module understand every text of such a grammar, and its arguments are valid under the schema of
//! their tool. A tool whose schema names no properties and does not mention others takes none.

use serde_json::{Map, Value, json};

use super::syntax::{ANY_TYPE, Body, CallSyntax, Id, LINE_END, NUMBER, Pairs};
use super::unquoted::{alternatives, resolved, type_name};
use super::{AnswerFormat, Tool};
use crate::grammar::{GrammarSpec, SchemaPlace};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result, quoted};

/// Subschemas that others refer to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// Keywords with which a schema constrains an object's keys.
const OBJECT_KEYWORDS: [&str; 7] =
    ["$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties", "properties"];
/// A key that no schema names.
const FREE_KEY: &str = "/[A-Za-z0-9_.-]{1,64}/";

impl AnswerFormat {
    /// The grammar of answers that are calls of these tools: of one, or with `is_parallel` of one or more. Reasoning is
    /// not included. None if the tool-call format is unknown or there are no tools.
    ///
    /// # Errors
    /// If the schema of a tool is not one, or cannot be enforced.
    pub fn call_grammar(
        &self,
        tokenizer: &Tokenizer,
        tools: &[Tool],
        is_parallel: bool,
    ) -> Result<Option<String>> {
        let Some(format) = self.tool_calls.as_ref().filter(|_| !tools.is_empty()) else { return Ok(None) };
        let mut rules = Rules { tokenizer, text: String::new() };
        rules.calls(&format.0, tools, is_parallel)?;
        Ok(Some(rules.text))
    }
}

/// The schema of a tool's arguments, which are an object even if it does not require one.
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

/// The text around keys and values, as elements of rules.
struct Around {
    /// Before a key.
    key: String,
    /// Between a key and a value, by type.
    between: Vec<(&'static str, String)>,
    /// The end of a value, as a model writes it.
    end: String,
    /// The end is followed by the key and by a `>`.
    ends_with_key: bool,
    /// The continuation after the end.
    after: String,
    /// Before a text and after it.
    quote: String,
    /// Texts are written as JSON.
    has_json_texts: bool,
    /// Between two pairs.
    separator: String,
}

impl Around {
    fn between(&self, kind: &str) -> &str {
        let kind = if kind == "integer" { "number" } else { kind };
        let of = |wanted: &str| self.between.iter().find(|(kind, _)| *kind == wanted);
        of(kind).or_else(|| of(ANY_TYPE)).or(self.between.last()).map_or("", |(_, text)| text)
    }

    /// Marks give the type of a value.
    fn is_typed(&self) -> bool {
        self.between.len() > 1
    }

    /// The end of a value of this key, as a model writes it.
    fn end_of(&self, key: &str) -> String {
        if self.ends_with_key { format!("{}{key}>", self.end) } else { self.end.clone() }
    }

    /// The characters of a text whose length is bounded: it has none with which its end may begin.
    fn text_class(&self) -> String {
        let end = if self.quote.is_empty() { &self.end } else { &self.quote };
        let first = end.trim_start().chars().next().unwrap_or('<');
        let line = if end.starts_with('\n') { "\\n" } else { "" };
        format!("[^{}{line}]", escaped(first))
    }
}

/// A character in a regular expression.
fn escaped(c: char) -> String {
    if c.is_ascii_alphanumeric() || matches!(c, '<' | '>') || !c.is_ascii() {
        c.to_string()
    } else {
        format!("\\{c}")
    }
}

/// Rules in the making.
struct Rules<'t> {
    tokenizer: &'t Tokenizer,
    text: String,
}

/// The properties of an object.
struct Members<'s> {
    /// Key, schema, and whether it must be there; in the order of the schema.
    named: Vec<(&'s str, &'s Value, bool)>,
    /// The schema of unnamed properties.
    others: Option<&'s Value>,
}

impl Rules<'_> {
    fn add(&mut self, name: &str, body: &str) {
        self.text.push_str(&format!("{name}: {body}\n"));
    }

    /// A text of a call syntax in a grammar. Special tokens are named, because no text produces them.
    fn written(&self, text: &str) -> String {
        let mut parts = Vec::new();
        for segment in text.split_inclusive([LINE_END, NUMBER]) {
            let plain = segment.trim_end_matches([LINE_END, NUMBER]);
            let mut done = 0;
            for span in self.tokenizer.find_special(plain) {
                let id = self.tokenizer.token_id(&plain[span.clone()]);
                let Some(id) = id.filter(|id| self.tokenizer.is_special(*id)) else { continue };
                if span.start > done {
                    parts.push(literal(&plain[done..span.start]));
                }
                parts.push(format!("<[{id}]>"));
                done = span.end;
            }
            if done < plain.len() {
                parts.push(literal(&plain[done..]));
            }
            match segment.chars().last() {
                Some(LINE_END) => parts.push("\"\\n\"?".to_owned()),
                Some(NUMBER) => parts.push("/[0-9]{1,3}/".to_owned()),
                _ => {}
            }
        }
        if parts.is_empty() { "\"\"".to_owned() } else { parts.join(" ") }
    }

    fn calls(&mut self, syntax: &CallSyntax, tools: &[Tool], is_parallel: bool) -> Result<()> {
        let names: Vec<String> = (0..tools.len()).map(|index| format!("call_{index}")).collect();
        let any = names.join(" | ");
        let mut group = [self.written(&syntax.group[0]), self.written(&syntax.group[1])];
        let mut separator = self.written(&syntax.separator);
        let mut open = self.written(&syntax.open);
        if syntax.is_bare {
            // Other text before such calls is left out, except for the bracket of a list. A mark before the first call
            // is in the prompt.
            if syntax.group[0] != "[" {
                group = [const { "\"\"" }; 2].map(str::to_owned);
            }
            if !syntax.open.is_empty() {
                separator = std::mem::replace(&mut open, "\"\"".to_owned());
            }
        }
        let several = match is_parallel {
            true => format!("call ({separator} call)*"),
            false => "call".to_owned(),
        };
        let [begin, end] = group;
        match syntax.is_each {
            true => {
                self.add("start", &several);
                self.add("call", &format!("{begin} ({any}) {end}"));
            }
            false => {
                self.add("start", &format!("{begin} {several} {end}"));
                self.add("call", &any);
            }
        }
        let around = self.around(syntax);
        if around.as_ref().is_some_and(|around| !around.ends_with_key)
            && let Some(around) = &around
        {
            self.text_rule("text_value", &around.end_of(""), &around.quote);
        }
        for (index, tool) in tools.iter().enumerate() {
            let rule = format!("call_{index}");
            let name = literal(&tool.name);
            let arguments = format!("arguments_{index}");
            let body = match &syntax.body {
                Body::Object(object) => {
                    let before = self.written(&object.before_name);
                    let between = format!("{name}{}", object.before_arguments);
                    format!("{before} {} {arguments} {}", literal(&between), self.written(&object.end))
                }
                Body::Keyed => format!("{} {arguments} \"}}\"", literal(&format!("{{{name}: "))),
                Body::Json | Body::Pairs(_) => {
                    format!("{} {arguments} {}", self.name(syntax, &open, tool), self.written(&syntax.close))
                }
                Body::Python => {
                    format!("{open} {name} \"(\" {arguments} \")\" {}", self.written(&syntax.close))
                }
                Body::Braces { .. } => {
                    format!("{open} {name} \"{{\" {arguments} \"}}\" {}", self.written(&syntax.close))
                }
            };
            self.add(&rule, &body);
            match &around {
                Some(around) => self.pairs(index, tool, around),
                None => {
                    GrammarSpec::lark_arguments(&arguments_of(tool)).map(|rules| self.add(&arguments, &rules))
                }
            }
            .map_err(|error| of_tool(&error, &tool.name))?;
        }
        Ok(())
    }

    /// The name of a tool with the text around it.
    fn name(&self, syntax: &CallSyntax, open: &str, tool: &Tool) -> String {
        let name = literal(&format!("{}{}", syntax.prefix, tool.name));
        let after = self.written(&syntax.after_name);
        match &syntax.id {
            Id::None => format!("{open} {name} {after}"),
            Id::Before { written, mark } => {
                format!("{open} {} {} {name} {after}", self.written(written), self.written(mark))
            }
            Id::After { written, .. } => format!("{open} {name} {} {after}", self.written(written)),
        }
    }

    /// The text around the arguments of a syntax in which they are not JSON.
    fn around(&self, syntax: &CallSyntax) -> Option<Around> {
        let literals = |equals: &str, quote: &str| Around {
            key: self.written(""),
            between: vec![(ANY_TYPE, literal(equals))],
            end: String::new(),
            ends_with_key: false,
            after: self.written(""),
            quote: quote.to_owned(),
            has_json_texts: quote.is_empty(),
            separator: literal(if quote.is_empty() { ", " } else { "," }),
        };
        match &syntax.body {
            Body::Object(_) | Body::Keyed | Body::Json => None,
            Body::Python => Some(literals("=", "")),
            Body::Braces { quote } => Some(literals(":", quote)),
            Body::Pairs(Pairs { key, between, end, item, .. }) => {
                let trimmed = end.trim_end_matches(|c: char| c.is_whitespace() || c == LINE_END);
                let between = between.iter().map(|(kind, text)| (*kind, self.written(text)));
                Some(Around {
                    key: self.written(key),
                    between: between.collect(),
                    end: trimmed.to_owned(),
                    ends_with_key: item.is_some(),
                    after: self.written(&end[trimmed.len()..]),
                    quote: String::new(),
                    has_json_texts: false,
                    separator: String::new(),
                })
            }
        }
    }

    /// A rule for a text with its end, a token of its own or text too.
    fn text_rule(&mut self, name: &str, end: &str, quote: &str) {
        let mark = if quote.is_empty() { end } else { quote };
        let written = self.written(mark);
        let mut first = mark.trim_start().chars();
        let before = if quote.is_empty() { String::new() } else { format!("{written} ") };
        match (written.contains("<["), first.next(), first.next()) {
            (_, None, _) => {}
            (false, ..) if quote.is_empty() => {
                self.add(&format!("{name}[suffix={}]", literal(mark)), "/(?s:.*)/");
            }
            (_, Some(first), second) => {
                let first = escaped(first);
                let text = match second.map(escaped) {
                    Some(second) => format!("/([^{first}]|{first}[^{second}])*/"),
                    None => format!("/[^{first}]*/"),
                };
                self.add(name, &format!("{before}{text} {written}"));
            }
        }
    }

    /// Arguments that are pairs of a key and a value.
    fn pairs(&mut self, index: usize, tool: &Tool, around: &Around) -> Result<()> {
        let root = arguments_of(tool);
        let named = resolved(&root, &root);
        let objects = match named.get("properties") {
            Some(_) => vec![named],
            None => alternatives(&root, &root),
        };
        let mut options = Vec::new();
        for (number, object) in objects.into_iter().enumerate() {
            options.push(self.object_pairs(&format!("pair_{index}_{number}"), object, &root, around)?);
        }
        self.add(&format!("arguments_{index}"), &options.join(" | "));
        Ok(())
    }

    /// The pairs of an object, in the order of its schema.
    fn object_pairs(
        &mut self,
        prefix: &str,
        object: &Value,
        root: &Value,
        around: &Around,
    ) -> Result<String> {
        let members = members(object, root)?;
        let mut pairs = Vec::new();
        for (position, (key, schema, is_required)) in members.named.iter().enumerate() {
            let pair = format!("{prefix}_{position}");
            self.add(&pair, &format!("{} {} {pair}_value {}", around.key, literal(key), around.after));
            self.value(&format!("{pair}_value"), key, schema, root, around)
                .map_err(|error| SchemaPlace::in_property(&error, root, key))?;
            pairs.push((pair, *is_required));
        }
        let mut more = None;
        if let Some(others) = members.others {
            if around.ends_with_key {
                let error = Error::invalid_request(
                    "the parameters of a tool have keys that its schema does not name, which cannot be enforced in \
                     this model's tool-call format",
                );
                let error = error.with_hint("set additionalProperties to false");
                return Err(SchemaPlace::at_keyword(&error, root, "additionalProperties"));
            }
            let taken: Vec<String> = members.named.iter().map(|(name, ..)| literal(name)).collect();
            let key = match taken.is_empty() {
                true => FREE_KEY.to_owned(),
                false => format!("{FREE_KEY} & ~({})", taken.join(" | ")),
            };
            let name = prefix.to_uppercase();
            self.add(&format!("{name}_KEY"), &key);
            let pair = format!("{} {name}_KEY {prefix}_value {}", around.key, around.after);
            self.add(&format!("{prefix}_more"), &pair);
            self.value(&format!("{prefix}_value"), "", others, root, around)?;
            more = Some(format!("{prefix}_more"));
        }
        if around.separator.is_empty() {
            let mut body = String::from("\"\"");
            for (pair, is_required) in pairs {
                body.push_str(&format!(" {pair}{}", if is_required { "" } else { "?" }));
            }
            if let Some(more) = more {
                body.push_str(&format!(" {more}*"));
            }
            return Ok(body);
        }
        // From the last pair to the first: the continuation after a previous pair, and after none.
        let separator = &around.separator;
        let (mut after, mut first) = (format!("{prefix}_after"), format!("{prefix}_first"));
        match more {
            Some(more) => {
                self.add(&after, &format!("({separator} {more})*"));
                self.add(&first, &format!("({more} {after})?"));
            }
            None => {
                self.add(&after, "\"\"");
                self.add(&first, "\"\"");
            }
        }
        for (pair, is_required) in pairs.into_iter().rev() {
            let (next_after, next_first) = (format!("{pair}_after"), format!("{pair}_first"));
            let skip = |next: &str| if is_required { String::new() } else { format!(" | {next}") };
            self.add(&next_after, &format!("{separator} {pair} {after}{}", skip(&after)));
            self.add(&next_first, &format!("{pair} {after}{}", skip(&first)));
            (after, first) = (next_after, next_first);
        }
        Ok(first)
    }

    /// The text between a key and a value, the value and its end: strings are raw, other values are JSON.
    fn value(&mut self, name: &str, key: &str, schema: &Value, root: &Value, around: &Around) -> Result<()> {
        let end = self.written(&around.end_of(key));
        let string = around.between("string").to_owned();
        let mut text_value = "text_value".to_owned();
        if around.ends_with_key {
            text_value = format!("{name}_text");
            self.text_rule(&text_value, &around.end_of(key), "");
        }
        let branches: Vec<Value> = alternatives(schema, root).into_iter().flat_map(by_type).collect();
        let is_text = |branch: &&Value| !around.has_json_texts && is_text(branch);
        let texts: Vec<&Value> = branches.iter().filter(is_text).collect();
        let others: Vec<&Value> = branches.iter().filter(|branch| !is_text(branch)).collect();
        let is_plain = |branch: &&&Value| {
            let is_scalar =
                ["null", "boolean", "integer", "number"].iter().any(|kind| branch["type"] == *kind);
            is_scalar && branch.as_object().is_some_and(|fields| fields.len() == 1)
        };
        let has_free = texts.iter().any(|branch| GrammarSpec::is_free_text(branch));
        let has_marks = around.is_typed() || !around.quote.is_empty();
        // Text that is not JSON of the other types is a string then, and every text is valid.
        let is_any = branches.iter().any(|branch| branch.as_object().is_none_or(Map::is_empty));
        let reads_all = !has_marks && others.iter().all(|other| is_plain(&other));
        if !around.has_json_texts && (is_any || has_free && (others.is_empty() || reads_all)) {
            self.add(name, &format!("{string} {text_value}"));
            return Ok(());
        }
        let mut options = Vec::new();
        let mut json: Vec<Value> = others.iter().map(|other| (*other).clone()).collect();
        let quote = self.written(&around.quote);
        let mut option = |text: &str| options.push(format!("{string} {quote} {text} {quote} {end}"));
        let mut terminals = 0;
        for text in texts {
            if has_marks && GrammarSpec::is_free_text(text) {
                continue;
            }
            match words(text) {
                Some(words) => {
                    for word in words {
                        // Values that parse as JSON are written as JSON, unless they can only be strings.
                        let is_json = !has_marks
                            && !others.is_empty()
                            && serde_json::from_str::<Value>(word.trim()).is_ok();
                        match is_json || word.contains("</") || word.contains('\n') {
                            true if others.is_empty() => {
                                return Err(Error::invalid_request(format!(
                                    "the value {} of a parameter is ambiguous in this model's tool-call format",
                                    quoted(word)
                                )));
                            }
                            true => json.push(json!({"const": word})),
                            false => option(&literal(word)),
                        }
                    }
                }
                None => {
                    let kinds: Vec<&str> = others.iter().filter_map(|other| kind_of(other)).collect();
                    let text = GrammarSpec::lark_text(text, &around.text_class())?;
                    let text = match others.is_empty() || has_marks {
                        true => text,
                        false => format!("{text} & ~({})", json_beginnings(&kinds)),
                    };
                    let terminal = format!("{}_TEXT_{terminals}", name.to_uppercase());
                    terminals += 1;
                    self.text.push_str(&format!("{terminal}: {text}\n"));
                    option(&terminal);
                }
            }
        }
        if has_marks && has_free {
            options.push(format!("{string} {text_value}"));
        }
        // By the mark before them.
        let mut by_mark: Vec<(&str, Vec<Value>)> = Vec::new();
        for schema in json {
            let mark = around.between(kind_of(&schema).unwrap_or("object"));
            match by_mark.iter_mut().find(|(known, _)| *known == mark) {
                Some((_, schemas)) => schemas.push(schema),
                None => by_mark.push((mark, vec![schema])),
            }
        }
        for (number, (mark, schemas)) in by_mark.into_iter().enumerate() {
            let mut schema = json!({"anyOf": schemas});
            for definitions in DEFINITIONS {
                if let Some(found) = root.get(definitions) {
                    schema[definitions] = found.clone();
                }
            }
            let rule = format!("{name}_json_{number}");
            self.add(&rule, &GrammarSpec::lark_arguments(&schema)?);
            options.push(format!("{mark} {rule} {end}"));
        }
        self.add(name, &options.join(" | "));
        Ok(())
    }
}

/// The same error with the tool that it is about.
fn of_tool(error: &Error, name: &str) -> Error {
    let way_out = "omit the tool, or choose another one with tool_choice";
    let hint = error.hint().map_or_else(|| way_out.to_owned(), |hint| format!("{hint}; or {way_out}"));
    SchemaPlace::of_tool(error, name).with_hint(hint)
}

/// The properties of an object, by its schema.
fn members<'s>(object: &'s Value, root: &Value) -> Result<Members<'s>> {
    static ANY: Value = Value::Bool(true);
    const UNKNOWN: [&str; 7] =
        ["allOf", "dependencies", "dependentRequired", "dependentSchemas", "if", "not", "patternProperties"];
    let says_nothing = |name: &str| match (name, &object[name]) {
        (_, Value::Null) => true,
        ("if", _) => object["then"].is_null() && object["else"].is_null(),
        ("not", refused) => *refused == false,
        (_, Value::Object(fields)) => fields.is_empty(),
        _ => false,
    };
    if let Some(keyword) = UNKNOWN.into_iter().find(|name| !says_nothing(name)) {
        let error = Error::invalid_request(format!(
            "the parameters of a tool have {keyword}, which cannot be enforced in this model's tool-call format"
        ));
        return Err(SchemaPlace::at_keyword(&error.with_hint("leave it out"), root, keyword));
    }
    let required = object.get("required").and_then(Value::as_array).into_iter().flatten();
    let required: Vec<&str> = required.filter_map(Value::as_str).collect();
    let properties = object.get("properties").and_then(Value::as_object);
    let others = object.get("additionalProperties").filter(|others| **others != Value::Bool(false));
    let declared = properties.into_iter().flatten().map(|(name, schema)| (name.as_str(), schema));
    let undeclared =
        required.iter().filter(|name| properties.is_none_or(|known| !known.contains_key(**name)));
    let undeclared = undeclared.map(|name| (*name, others.unwrap_or(&ANY)));
    let named = declared
        .chain(undeclared)
        .filter(|(_, schema)| **schema != Value::Bool(false))
        .map(|(key, schema)| (key, schema, required.contains(&key)));
    Ok(Members { named: named.collect(), others })
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
            "null" => r"/\s*(null|None)\s*/",
            "boolean" => r"/\s*(true|false|True|False)\s*/",
            "integer" | "number" => r"/\s*-?[0-9](?s:.*)/",
            "array" => r"/\s*[\[(](?s:.*)/",
            _ => r"/\s*\{(?s:.*)/",
        });
    }
    beginnings.join(" | ")
}
