//! The fields of a request besides its input, and the settings that the response repeats.

use serde_json::{Map, Value, json};

use super::super::super::auth::Caller;
use super::super::super::error::ApiError;
use super::super::super::json::{Fields, NO_LIMIT, describe, wrong_type};
use super::super::super::memory::Memory;
use super::super::conversation::{Conversation, Variables, template_variables};
use super::super::messages::missing;
use super::super::structured::{self, StructuredOutput, flat_format};
use super::super::tools::{self, Choice, Functions, ToolChoice, ToolRequest};
use super::items;
use tinyvllm::chat::Tool;
use tinyvllm::quoted;

/// Fields that need OpenAI's own servers and would change the answer.
const REFUSED: [&str; 3] = ["conversation", "moderation", "prompt"];
/// The supported value of `include`. Other values have nothing to include.
const LOGPROBS: &str = "message.output_text.logprobs";
const INCLUDABLE: [&str; 7] = [
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
];
/// Most entries of `metadata`, and most characters of a name and a value, as at OpenAI.
const MAX_METADATA: (usize, usize, usize) = (16, 64, 512);
/// Most bytes of a name that is repeated in the response.
const MAX_NAME_BYTES: usize = 1_024;

/// A parsed request.
pub(super) struct Question {
    pub(super) conversation: Conversation,
    pub(super) output: Option<StructuredOutput>,
    pub(super) max_tokens: Option<usize>,
    pub(super) logprobs: Option<usize>,
    /// The settings that the response repeats.
    pub(super) settings: Map<String, Value>,
    /// The whole conversation, without the instructions.
    pub(super) items: Vec<Value>,
    /// Whether the response is stored.
    pub(super) is_stored: bool,
}

impl Question {
    pub(super) fn parse(fields: &mut Fields, memory: &Memory, caller: Caller) -> Result<Self, ApiError> {
        refuse(fields)?;
        let mut settings = Map::new();
        let instructions = fields.string("instructions")?;
        settings.insert("instructions".to_owned(), instructions.clone().into());
        let max_tokens = fields.limit("max_output_tokens", 1)?;
        let sent = max_tokens.filter(|limit| *limit != NO_LIMIT);
        settings.insert("max_output_tokens".to_owned(), sent.into());
        // The limit applies to tools that run at OpenAI. This server has none.
        let max_tool_calls = fields.unsigned("max_tool_calls")?;
        if max_tool_calls.is_some() {
            fields.report("max_tool_calls");
        }
        settings.insert("max_tool_calls".to_owned(), max_tool_calls.into());
        settings.insert("metadata".to_owned(), metadata(fields)?);
        let tools = tool_request(fields, &mut settings)?;
        let variables = variables(fields, &mut settings)?;
        let output = text(fields, &mut settings)?;
        let logprobs = logprobs(fields, &mut settings)?;
        for name in ["prompt_cache_key", "safety_identifier"] {
            settings.insert(name.to_owned(), name_of(fields, name)?.into());
        }
        settings.insert("service_tier".to_owned(), "default".into());
        settings.insert("truncation".to_owned(), "disabled".into());
        let is_stored = fields.bool("store")?.unwrap_or(true) && memory.is_on();
        settings.insert("store".to_owned(), is_stored.into());
        let previous = name_of(fields, "previous_response_id")?;
        let mut items = match &previous {
            Some(id) => memory.conversation(caller, id)?,
            None => Vec::new(),
        };
        settings.insert("previous_response_id".to_owned(), previous.into());
        let num_before = items.len();
        items.extend(memory.resolve(caller, items::take(fields)?)?);
        let turns = items::messages(instructions.as_deref(), fields, &items, num_before)?;
        let conversation = Conversation {
            param: "input",
            messages: turns.messages,
            has_paths: false,
            about_tools: turns.about_tools,
            tools,
            add_generation_prompt: true,
            continue_final_message: false,
            variables,
        };
        Ok(Self { conversation, output, max_tokens, logprobs, settings, items, is_stored })
    }
}

fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    let refuse = |name: &'static str| {
        let message = format!("{name} is not supported here; omit it");
        Err(ApiError::unsupported(name, message))
    };
    for name in REFUSED {
        match fields.take(name)? {
            Some(Value::Array(items)) if items.is_empty() => {}
            Some(_) => return refuse(name),
            None => {}
        }
    }
    if fields.bool("continue_final_message")?.unwrap_or(false) {
        let message = "continue_final_message is for chats; use /v1/chat/completions";
        return Err(ApiError::unsupported("continue_final_message", message));
    }
    if fields.bool("background")?.unwrap_or(false) {
        return refuse("background");
    }
    // These values change no answer: an input that is too long is refused anyway, and there is one tier.
    for name in ["service_tier", "truncation"] {
        let is_usual = |value: &str| match name {
            "truncation" => value == "disabled",
            _ => ["auto", "default"].contains(&value),
        };
        if fields.string(name)?.is_some_and(|value| !is_usual(&value)) {
            fields.report(name);
        }
    }
    Ok(())
}

/// A short string.
fn name_of(fields: &mut Fields, name: &'static str) -> Result<Option<String>, ApiError> {
    let value = fields.string(name)?;
    match &value {
        Some(text) if text.len() > MAX_NAME_BYTES => {
            let message = format!("{name} has {} bytes; it must have at most {MAX_NAME_BYTES}", text.len());
            Err(ApiError::invalid(name, message))
        }
        _ => Ok(value),
    }
}

fn metadata(fields: &mut Fields) -> Result<Value, ApiError> {
    let Some(entries) = fields.object("metadata")? else { return Ok(json!({})) };
    let entries = entries.into_map()?;
    let (max_entries, max_name, max_value) = MAX_METADATA;
    let fits = |(name, value): (&String, &Value)| {
        name.chars().count() <= max_name
            && value.as_str().is_some_and(|text| text.chars().count() <= max_value)
    };
    if entries.len() > max_entries || !entries.iter().all(fits) {
        let message = format!(
            "metadata must have at most {max_entries} entries with names of at most {max_name} and texts of at most \
             {max_value} characters"
        );
        return Err(ApiError::invalid("metadata", message));
    }
    Ok(entries.into())
}

/// The reasoning effort. There are no summaries: reasoning is sent unchanged.
fn variables(fields: &mut Fields, settings: &mut Map<String, Value>) -> Result<Variables, ApiError> {
    let (mut effort, mut summary) = (None, None);
    if let Some(mut reasoning) = fields.object("reasoning")? {
        effort = reasoning.string("effort")?;
        let older = reasoning.string("generate_summary")?;
        summary = reasoning.string("summary")?.or(older);
    }
    settings.insert("reasoning".to_owned(), json!({"effort": effort, "summary": summary}));
    template_variables(fields, effort.map(|effort| ("reasoning.effort", effort)))
}

/// The format of the answer.
fn text(
    fields: &mut Fields,
    settings: &mut Map<String, Value>,
) -> Result<Option<StructuredOutput>, ApiError> {
    let mut sent = json!({"type": "text"});
    let mut output = None;
    if let Some(mut text) = fields.object("text")? {
        if text.string("verbosity")?.is_some_and(|verbosity| verbosity != "medium") {
            text.report("verbosity");
        }
        if let Some(format) = text.take("format")? {
            sent.clone_from(&format);
            output = flat_format(text.within("format", format)?, "text.format", "text.format.schema")?;
        }
    }
    settings.insert("text".to_owned(), json!({"format": sent, "verbosity": "medium"}));
    structured::parse(fields, output)
}

fn logprobs(fields: &mut Fields, settings: &mut Map<String, Value>) -> Result<Option<usize>, ApiError> {
    let mut is_wanted = false;
    match fields.take("include")? {
        None => {}
        Some(Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                let path = format!("include[{index}]");
                let name = item.as_str().ok_or_else(|| wrong_type(path.clone(), item, "a string"))?;
                is_wanted |= name == LOGPROBS;
                if !INCLUDABLE.contains(&name) {
                    fields.report(&format!("{path}.{name}"));
                }
            }
        }
        Some(other) => return Err(wrong_type("include".to_owned(), &other, "a list of strings")),
    }
    let num_top = fields.unsigned("top_logprobs")?;
    settings.insert("top_logprobs".to_owned(), num_top.unwrap_or(0).into());
    // `top_logprobs` implies the report on tokens.
    Ok((is_wanted || num_top.is_some_and(|num_top| num_top > 0)).then(|| num_top.unwrap_or(0)))
}

fn tool_request(fields: &mut Fields, settings: &mut Map<String, Value>) -> Result<ToolRequest, ApiError> {
    let given = fields.take("tools")?.unwrap_or_else(|| json!([]));
    let functions = Functions::parse(fields, given, tool)?;
    settings.insert("tools".to_owned(), functions.source.clone().into());
    let functions = functions.into_chat_tools("parameters");
    let choice = fields.take("tool_choice")?.unwrap_or_else(|| "auto".into());
    settings.insert("tool_choice".to_owned(), choice.clone());
    let is_parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    settings.insert("parallel_tool_calls".to_owned(), is_parallel.into());
    ToolRequest::new(functions, self::choice(fields, choice)?, is_parallel)
}

fn tool(mut fields: Fields) -> Result<Option<Tool>, ApiError> {
    match fields.string("type")?.as_deref() {
        Some("function") => tools::function(fields, "parameters").map(Some),
        Some(kind) => {
            fields.leave_out(kind);
            Ok(None)
        }
        None => Err(missing(fields.path("type"))),
    }
}

/// The choice, and the names of the allowed tools if they are limited.
fn choice(fields: &Fields, value: Value) -> Result<Choice, ApiError> {
    const EXPECTED: &str =
        "\"none\", \"auto\", \"required\", or an object that names a function or allowed tools";
    let word = |value: &Value| match value.as_str() {
        Some("none") => Some(ToolChoice::None),
        Some("auto") => Some(ToolChoice::Auto),
        Some("required") => Some(ToolChoice::Required),
        _ => None,
    };
    if !value.is_object() {
        let choice = word(&value).map(Choice::from);
        return choice.ok_or_else(|| wrong_type("tool_choice".to_owned(), &value, EXPECTED));
    }
    let mut choice = fields.within("tool_choice", value)?;
    let path = choice.path("type");
    match choice.string("type")?.as_deref() {
        Some("function") => {
            let name = choice.string("name")?.ok_or_else(|| missing(choice.path("name")))?;
            Ok(ToolChoice::Named(name).into())
        }
        Some("allowed_tools") => {
            let path = choice.path("mode");
            let mode = choice.take("mode")?.unwrap_or_default();
            let mode = word(&mode)
                .filter(|mode| *mode != ToolChoice::None)
                .ok_or_else(|| wrong_type(path, &mode, "\"auto\" or \"required\""))?;
            let path = choice.path("tools");
            let items = match choice.take("tools")? {
                Some(Value::Array(items)) => items,
                Some(other) => return Err(wrong_type(path, &other, "a list of tools")),
                None => return Err(missing(path)),
            };
            let mut names = Vec::new();
            for item in choice.objects("tools", items) {
                let mut item = item?;
                match item.string("type")?.filter(|kind| kind != "function") {
                    None => names.push(item.string("name")?.ok_or_else(|| missing(item.path("name")))?),
                    Some(kind) => item.leave_out(&kind),
                }
            }
            Ok(Choice { mode, allowed: Some(names) })
        }
        Some(kind) => {
            let names = ["name", "server_label"].map(|name| choice.string(name));
            let [name, label] = names;
            let named = name?.or(label?).map(|name| format!(" of {}", quoted(&name))).unwrap_or_default();
            let kind = describe(&kind.into());
            let message = format!(
                "{path}{named} is {kind}, which runs elsewhere: only functions can be required; send \"auto\" or name a \
                 function"
            );
            Err(ApiError::unsupported(path, message))
        }
        None => Err(missing(path)),
    }
}
