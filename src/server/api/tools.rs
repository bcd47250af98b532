//! The tools of a request: which ones the model may call, and whether it must.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::json::{Fields, describe, wrong_type};
use super::super::values::charge_copies;
use super::messages::value_bytes;
use tinyvllm::chat::Tool;
use tinyvllm::grammar::{GrammarSpec, SchemaPlace};
use tinyvllm::quoted;

/// Most tools in a request. Agents with many tool servers send hundreds.
const MAX_TOOLS: usize = 1_024;
/// Most characters of a tool's name, as in Anthropic's messages and OpenAI's responses. OpenAI's chats allow
/// half as many.
const MAX_NAME_CHARS: usize = 128;
/// The schema of a function in the format of chats.
const CHAT_SCHEMA: &str = "function.parameters";
/// Most bytes of all tools together.
const MAX_BYTES: usize = 512 << 10;

/// The tools of a request, and the rules for calling them.
#[derive(Debug, Default)]
pub(super) struct ToolRequest {
    /// The tools as they were sent, for the template; `None` if there are none.
    pub(super) source: Option<Value>,
    pub(super) tools: Arc<[Tool]>,
    /// Their positions in the body, and where each has its schema.
    positions: Vec<usize>,
    schema: &'static str,
    pub(super) choice: ToolChoice,
    /// Whether the model may make several calls at once.
    pub(super) is_parallel: bool,
}

/// Whether and which tools are called.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum ToolChoice {
    /// Output is not parsed for calls.
    #[default]
    None,
    /// Optional.
    Auto,
    /// At least one call.
    Required,
    /// One call of this tool.
    Named(String),
}

/// The field `tool_choice`.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) mode: ToolChoice,
    /// The names of the tools that may be called; `None` for all.
    pub(super) allowed: Option<Vec<String>>,
}

impl From<ToolChoice> for Choice {
    fn from(mode: ToolChoice) -> Self {
        Self { mode, allowed: None }
    }
}

impl ToolRequest {
    /// Parses all fields about tools.
    pub(super) fn parse(fields: &mut Fields) -> Result<Self, ApiError> {
        let functions = match fields.take("tools")? {
            None => Functions::default(),
            Some(source) => Functions::parse(fields, source, tool)?,
        };
        let choice = choice(fields)?;
        let is_parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
        Self::new(functions, choice, is_parallel)
    }

    /// The request with these tools, or with the `allowed` ones only. Their source is in the format of chats.
    pub(super) fn new(
        Functions { mut source, mut tools, mut positions, schema, left_out }: Functions,
        Choice { mode, allowed }: Choice,
        is_parallel: bool,
    ) -> Result<Self, ApiError> {
        if let Some(allowed) = allowed {
            check_allowed(&allowed, &tools, &left_out)?;
            // The prompt has only these, so that the model does not call other ones by itself.
            let is_allowed: Vec<bool> = tools.iter().map(|tool| allowed.contains(&tool.name)).collect();
            let mut each = is_allowed.iter();
            source.retain(|_| each.next() == Some(&true));
            let mut each = is_allowed.iter();
            positions.retain(|_| each.next() == Some(&true));
            tools.retain(|tool| allowed.contains(&tool.name));
        }
        let choice = possible(mode, &tools, &left_out)?;
        let source = (!tools.is_empty()).then_some(Value::Array(source));
        Ok(Self { source, tools: tools.into(), positions, schema, choice, is_parallel })
    }

    /// The error about the schema of one of the tools.
    pub(super) fn schema_error(&self, error: tinyvllm::Error) -> ApiError {
        let name = SchemaPlace::of(&error).and_then(SchemaPlace::tool);
        let index = self.tools.iter().position(|tool| Some(tool.name.as_str()) == name);
        match index.and_then(|index| self.positions.get(index)) {
            Some(position) => ApiError::in_schema(error, &format!("tools[{position}].{}", self.schema)),
            None => ApiError::from(error).or_param("tools"),
        }
    }

    /// Whether the answer is parsed for calls.
    pub(super) fn may_call(&self) -> bool {
        self.choice != ToolChoice::None
    }
}

/// The functions among a request's tools.
#[derive(Debug, Default)]
pub(super) struct Functions {
    /// The functions as they were sent.
    pub(super) source: Vec<Value>,
    pub(super) tools: Vec<Tool>,
    /// Their positions in the body, and where each has its schema there.
    positions: Vec<usize>,
    schema: &'static str,
    left_out: Vec<LeftOut>,
}

/// A tool that is not a function.
#[derive(Debug)]
struct LeftOut {
    index: usize,
    kind: String,
    name: Option<String>,
}

impl Functions {
    /// Parses the field `tools`. `tool` parses one item, and returns `None` if it is not a function. Such
    /// tools are left out: agents also send tools that run elsewhere.
    pub(super) fn parse(
        fields: &Fields,
        source: Value,
        tool: fn(Fields) -> Result<Option<Tool>, ApiError>,
    ) -> Result<Self, ApiError> {
        let Value::Array(items) = source else {
            return Err(wrong_type("tools".to_owned(), &source, "a list of tools"));
        };
        if items.len() > MAX_TOOLS {
            let message = format!("tools has {} entries; it must have at most {MAX_TOOLS}", items.len());
            return Err(ApiError::invalid("tools", message));
        }
        let num_bytes = items.iter().map(value_bytes).sum::<usize>();
        if num_bytes > MAX_BYTES {
            let message = format!("tools has {num_bytes} bytes of text; it must have at most {MAX_BYTES}");
            return Err(ApiError::invalid("tools", message));
        }
        charge_copies(&items)?;
        let mut functions = Self { schema: CHAT_SCHEMA, ..Self::default() };
        let mut names = HashSet::new();
        for (index, (item, source)) in fields.objects("tools", items.clone()).zip(items).enumerate() {
            let Some(tool) = tool(item?)? else {
                let text = |field: &str| source.get(field).and_then(Value::as_str).map(str::to_owned);
                let kind = text("type").unwrap_or_default();
                functions.left_out.push(LeftOut { index, kind, name: text("name") });
                continue;
            };
            if !names.insert(tool.name.clone()) {
                let message = format!("tools has two functions of the name {}", quoted(&tool.name));
                return Err(ApiError::invalid("tools", message));
            }
            functions.positions.push(index);
            functions.source.push(source);
            functions.tools.push(tool);
        }
        Ok(functions)
    }

    /// Converts each source into the format of chats. `schema` is the field with the parameters.
    pub(super) fn into_chat_tools(mut self, schema: &'static str) -> Self {
        self.source = self.source.into_iter().map(|item| into_chat_tools(item, schema)).collect();
        self.schema = schema;
        self
    }
}

fn tool(mut fields: Fields) -> Result<Option<Tool>, ApiError> {
    match fields.string("type")?.as_deref() {
        Some("function") => {}
        Some(kind) => {
            fields.leave_out(kind);
            return Ok(None);
        }
        None => return Err(missing(fields.path("type"))),
    }
    let function = fields.object("function")?.ok_or_else(|| missing(fields.path("function")))?;
    self::function(function, "parameters").map(Some)
}

/// Parses a function whose schema is in the field `schema`.
pub(super) fn function(mut function: Fields, schema: &str) -> Result<Tool, ApiError> {
    let name = function.string("name")?.ok_or_else(|| missing(function.path("name")))?;
    if !is_name(&name) {
        let path = function.path("name");
        let message = format!(
            "{path} is {}; it must have 1 to {MAX_NAME_CHARS} of the characters a-z, A-Z, 0-9, _, -, ., / and :",
            describe(&name.into())
        );
        return Err(ApiError::invalid(path, message));
    }
    function.string("description")?;
    let is_strict = function.bool("strict")?.unwrap_or(false);
    let path = function.path(schema);
    let parameters = function.take(schema)?;
    match &parameters {
        None => {}
        Some(Value::Object(schema)) => match schema.get("type") {
            None => {}
            Some(kind) if kind == "object" => {}
            Some(kind) => {
                let path = format!("{path}.type");
                let message = format!("{path} is {}, expected \"object\"", describe(kind));
                return Err(ApiError::invalid(path, message));
            }
        },
        Some(other) => return Err(wrong_type(path, other, "a JSON schema, which is an object")),
    }
    let parameters = if is_strict { parameters.map(GrammarSpec::closed) } else { parameters };
    Ok(Tool { name, parameters })
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_CHARS).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-./:".contains(&byte))
}

/// Converts a tool without the object `function` into the format of chats, which templates know.
fn into_chat_tools(mut tool: Value, schema: &str) -> Value {
    let mut function = Map::new();
    for (name, from) in [("name", "name"), ("description", "description"), ("parameters", schema)] {
        if let Some(value) = tool.get_mut(from).map(Value::take).filter(|value| !value.is_null()) {
            function.insert(name.to_owned(), value);
        }
    }
    json!({"type": "function", "function": function})
}

fn choice(fields: &mut Fields) -> Result<Choice, ApiError> {
    const EXPECTED: &str = "\"none\", \"auto\", \"required\" or an object that names functions";
    let mode = match fields.take("tool_choice")? {
        None => ToolChoice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => return Err(wrong_type("tool_choice".to_owned(), &word.into(), EXPECTED)),
        },
        Some(value @ Value::Object(_)) if value.get("type").is_some_and(|kind| kind == "allowed_tools") => {
            return allowed_tools(fields.within("tool_choice", value)?);
        }
        Some(value @ Value::Object(_)) => ToolChoice::Named(named(fields.within("tool_choice", value)?)?),
        Some(other) => return Err(wrong_type("tool_choice".to_owned(), &other, EXPECTED)),
    };
    Ok(mode.into())
}

/// 400: a tool with this name cannot be called.
fn no_function(verb: &str, name: &str, left_out: &[LeftOut]) -> ApiError {
    let name_of = |tool: &&LeftOut| tool.name.as_deref() == Some(name);
    let message = match left_out.iter().find(name_of) {
        Some(LeftOut { index, kind, .. }) => format!(
            "tool_choice {verb} {}, which is tools[{index}] of type {}; only functions can be called",
            quoted(name),
            quoted(kind)
        ),
        None => format!("tool_choice {verb} {}, which is not in tools", quoted(name)),
    };
    ApiError::invalid("tool_choice", message)
}

fn check_allowed(allowed: &[String], tools: &[Tool], left_out: &[LeftOut]) -> Result<(), ApiError> {
    if allowed.len() > MAX_TOOLS {
        let message = format!("tool_choice allows {} tools; it must be at most {MAX_TOOLS}", allowed.len());
        return Err(ApiError::invalid("tool_choice", message));
    }
    match allowed.iter().find(|name| !tools.iter().any(|tool| tool.name == **name)) {
        Some(name) => Err(no_function("allows", name, left_out)),
        None => Ok(()),
    }
}

fn possible(choice: ToolChoice, tools: &[Tool], left_out: &[LeftOut]) -> Result<ToolChoice, ApiError> {
    match choice {
        ToolChoice::None | ToolChoice::Auto if tools.is_empty() => Ok(ToolChoice::None),
        ToolChoice::Required if tools.is_empty() => {
            let message = match left_out.first() {
                None => "tool_choice requires a call, but there are no tools".to_owned(),
                Some(LeftOut { index, kind, .. }) => format!(
                    "tool_choice requires a call, but tools has no function: tools[{index}] is of type {}, which runs \
                     elsewhere; send \"auto\", or a function",
                    quoted(kind)
                ),
            };
            Err(ApiError::invalid("tool_choice", message))
        }
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == name) => {
            Err(no_function("names", &name, left_out))
        }
        choice => Ok(choice),
    }
}

/// `{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}`
fn allowed_tools(mut fields: Fields) -> Result<Choice, ApiError> {
    fields.string("type")?;
    let mut inner = fields.object("allowed_tools")?.ok_or_else(|| missing(fields.path("allowed_tools")))?;
    let mode = match inner.string("mode")?.as_deref() {
        Some("auto") | None => ToolChoice::Auto,
        Some("required") => ToolChoice::Required,
        Some(other) => {
            return Err(wrong_type(inner.path("mode"), &other.into(), "\"auto\" or \"required\""));
        }
    };
    let path = inner.path("tools");
    let items = match inner.take("tools")? {
        Some(Value::Array(items)) if !items.is_empty() => items,
        Some(other) => return Err(wrong_type(path, &other, "a list of functions that is not empty")),
        None => return Err(missing(path)),
    };
    let names = inner.objects("tools", items).map(|item| {
        let mut item = item?;
        item.string("type")?;
        let mut function = item.object("function")?.ok_or_else(|| missing(item.path("function")))?;
        function.string("name")?.ok_or_else(|| missing(function.path("name")))
    });
    Ok(Choice { mode, allowed: Some(names.collect::<Result<_, _>>()?) })
}

fn named(mut fields: Fields) -> Result<String, ApiError> {
    match fields.string("type")?.as_deref() {
        Some("function") | None => {}
        Some(kind) => {
            let message = format!("tool_choice.type is {}, expected \"function\"", describe(&kind.into()));
            return Err(ApiError::unsupported("tool_choice.type", message));
        }
    }
    let mut function = fields.object("function")?.ok_or_else(|| missing(fields.path("function")))?;
    function.string("name")?.ok_or_else(|| missing(function.path("name")))
}

fn missing(path: String) -> ApiError {
    let message = format!("{path} is missing");
    ApiError::invalid(path, message)
}

#[cfg(test)]
mod tests {
    use super::super::super::json::parse_object;
    use super::*;

    fn parse(body: &Value) -> Result<ToolRequest, ApiError> {
        ToolRequest::parse(&mut parse_object(body.to_string().as_bytes()).unwrap())
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn choices() {
        let check =
            |body: Value, expected: ToolChoice| assert_eq!(parse(&body).unwrap().choice, expected, "{body}");
        check(json!({}), ToolChoice::None);
        check(json!({"tools": [], "tool_choice": "auto"}), ToolChoice::None);
        check(json!({"tools": [tool("a")]}), ToolChoice::Auto);
        check(json!({"tools": [tool("a")], "tool_choice": "none"}), ToolChoice::None);
        check(json!({"tools": [tool("a")], "tool_choice": "required"}), ToolChoice::Required);
        let named = json!({"type": "function", "function": {"name": "a"}});
        check(json!({"tools": [tool("a")], "tool_choice": named}), ToolChoice::Named("a".to_owned()));
        let allowed = |mode: Value| {
            let tools = json!([{"type": "function", "function": {"name": "b.c/d:e"}}]);
            json!({"tools": [tool("a"), tool("b.c/d:e")],
                   "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}})
        };
        for (mode, expected) in [("auto", ToolChoice::Auto), ("required", ToolChoice::Required)] {
            check(allowed(mode.into()), expected);
            let found = parse(&allowed(mode.into())).unwrap();
            let names: Vec<&str> = found.tools.iter().map(|tool| tool.name.as_str()).collect();
            assert_eq!(names, ["b.c/d:e"]);
            assert_eq!(found.source.unwrap(), json!([tool("b.c/d:e")]));
        }
    }

    #[test]
    fn strict_tools_are_closed() {
        let open =
            json!({"type": "object", "properties": {"a": {"type": "object"}}, "additionalProperties": true});
        let with = |strict: bool| {
            let function = json!({"name": "a", "strict": strict, "parameters": open});
            let found = parse(&json!({"tools": [{"type": "function", "function": function}]})).unwrap();
            found.tools[0].parameters.clone().unwrap()
        };
        assert_eq!(with(false), open);
        let closed = json!({"type": "object", "additionalProperties": false,
                            "properties": {"a": {"type": "object", "additionalProperties": false}}});
        assert_eq!(with(true), closed);
    }

    #[test]
    fn what_is_not_valid_is_refused_by_name() {
        let check = |body: Value, param: &str, wanted: &str| {
            let error = parse(&body).unwrap_err().body()["error"].clone();
            assert_eq!(error["param"], param, "{body}");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(wanted), "{message} should say {wanted}");
        };
        let with = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
        check(json!({"tools": "x"}), "tools", "a list");
        check(json!({"tools": [1]}), "tools[0]", "an object");
        check(json!({"tools": [{}]}), "tools[0].type", "missing");
        let search = json!([{"type": "web_search"}]);
        check(json!({"tools": search, "tool_choice": "required"}), "tool_choice", "of type \"web_search\"");
        check(json!({"tools": [{"type": "function"}]}), "tools[0].function", "missing");
        check(with(json!({})), "tools[0].function.name", "missing");
        check(with(json!({"name": "a b"})), "tools[0].function.name", "a-z");
        check(with(json!({"name": "x".repeat(129)})), "tools[0].function.name", "129 bytes");
        check(with(json!({"name": ""})), "tools[0].function.name", "1 to 128");
        check(with(json!({"name": "a", "description": 1})), "tools[0].function.description", "a string");
        check(with(json!({"name": "a", "strict": 1})), "tools[0].function.strict", "true or false");
        check(with(json!({"name": "a", "parameters": []})), "tools[0].function.parameters", "schema");
        let list = json!({"name": "a", "parameters": {"type": "array"}});
        check(with(list), "tools[0].function.parameters.type", "object");
        check(json!({"tools": vec![tool("a"); 10_000]}), "tools", "10000 entries");
        check(json!({"tools": [tool("a"), tool("a")]}), "tools", "two functions");
        let long = json!({"name": "a", "description": "x".repeat(1 << 20)});
        check(with(long), "tools", "bytes");
        check(json!({"tool_choice": "required"}), "tool_choice", "no tools");
        check(json!({"tool_choice": "some"}), "tool_choice", "required");
        check(json!({"tool_choice": 1}), "tool_choice", "required");
        check(json!({"tool_choice": {"type": "custom"}}), "tool_choice.type", "function");
        check(json!({"tool_choice": {"type": "function"}}), "tool_choice.function", "missing");
        let allowed = |inner: Value| json!({"tools": [tool("a")], "tool_choice": {"type": "allowed_tools", "allowed_tools": inner}});
        check(allowed(Value::Null), "tool_choice.allowed_tools", "missing");
        check(allowed(json!({"mode": "all"})), "tool_choice.allowed_tools.mode", "required");
        check(allowed(json!({"tools": []})), "tool_choice.allowed_tools.tools", "not empty");
        check(
            allowed(json!({"tools": [{"type": "function", "function": {"name": "x"}}]})),
            "tool_choice",
            "not in tools",
        );
        let unknown = json!({"type": "function", "function": {"name": "b"}});
        check(json!({"tools": [tool("a")], "tool_choice": unknown}), "tool_choice", "not in tools");
        check(
            json!({"tools": [tool("a")], "parallel_tool_calls": 1}),
            "parallel_tool_calls",
            "true or false",
        );
    }
}
