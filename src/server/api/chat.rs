//! `/v1/chat/completions`: a conversation through the model's own template.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;
use serde_json::{Map, Value};

use super::super::error::ApiError;
use super::super::json::{Fields, wrong_type};
use super::super::state::{App, Model};
use super::form::{Form, Kind};
use super::options::Options;
use super::prompt_report::PromptReport;
use super::structured::{self, StructuredOutput};
use super::tools::{ToolChoice, ToolRequest};
use super::turn::TurnFormat;
use super::{Prepared, generate, messages, sampling};
use crate::chat::{AnswerFormat, Chat, ChatOptions, Tool, ToolCallFormat};
use crate::engine::Request;
use crate::grammar::GrammarSpec;
use crate::sampling::Constraint;

/// Variables that a request may give to the template. None of them can make it do more work than the
/// conversation itself, or stand for something that the server decides.
const TEMPLATE_VARIABLES: [&str; 5] =
    ["enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string"];
/// Most bytes of such a variable.
const MAX_VARIABLE_BYTES: usize = 256;

/// Answers a conversation.
pub(in super::super) async fn handle(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    generate(app, request, parse).await
}

fn parse(model: &Model, mut fields: Fields) -> Result<Prepared, ApiError> {
    let mut params = sampling::parse(&mut fields)?;
    params.max_tokens = max_tokens(&mut fields)?;
    params.logprobs = logprobs(&mut fields)?;
    let tools = ToolRequest::parse(&mut fields)?;
    let includes_reasoning = fields.bool("include_reasoning")?.unwrap_or(true);
    let mut options = Options::parse(&mut fields, &params.stop)?;
    if fields.bool("echo")?.unwrap_or(false) {
        return Err(ApiError::unsupported("echo", "echo is not supported in chats; use /v1/completions"));
    }
    let output = structured::parse(&mut fields)?;
    let prompt_token_ids = encode_with(model, &mut fields, &tools)?;
    let turns = turn_format(model, &prompt_token_ids, &tools, includes_reasoning)?;
    options.text.visible_special = model.llm.visible_special(turns.answers);
    let has_logprobs = params.logprobs.is_some();
    let mut request = Request::new(prompt_token_ids, params);
    request.cache_salt.clone_from(&options.cache_salt);
    request.prompt_logprobs = options.prompt_logprobs;
    request.constraint = constraint(model, output, &tools, &turns)?;
    let engine = model.llm.engine();
    request
        .validate(engine.model_limits(), engine.config())
        .map_err(|error| ApiError::from(error).or_param("messages"))?;
    let mut requests = vec![request];
    let mut form = Form::new(Kind::Chat, model, &requests, &options, has_logprobs);
    form.set_prompt_report(PromptReport::prepare(&mut requests, options.prompt_logprobs, None)?);
    form.set_turns(turns);
    Ok(Prepared { requests, options, form })
}

/// The token ids of the conversation in `messages`, with the tools.
pub(super) fn encode(model: &Model, fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    let tools = ToolRequest::parse(fields)?;
    encode_with(model, fields, &tools)
}

fn encode_with(model: &Model, fields: &mut Fields, tools: &ToolRequest) -> Result<Vec<u32>, ApiError> {
    let messages = messages::parse(fields)?;
    let uses_tools = model.llm.chat().is_none_or(Chat::uses_tools);
    let speaking = messages::speak_of_tools(&messages).map(|index| format!("messages[{index}]"));
    if let Some(param) = tools.source.as_ref().map(|_| "tools".to_owned()).or(speaking)
        && !uses_tools
    {
        let message = format!(
            "{param} is about tools, of which the chat template of {} tells the model nothing; start the \
             server with one that does (--chat-template)",
            model.llm.name()
        );
        return Err(ApiError::unsupported(param, message));
    }
    let num_tool_bytes = tools.source.as_ref().map_or(0, messages::value_bytes);
    check_text_len(model, "tools", num_tool_bytes)?;
    check_text_len(model, "messages", messages::num_bytes(&messages))?;
    let continue_final_message = fields.bool("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.bool("add_generation_prompt")?;
    if continue_final_message && add_generation_prompt == Some(true) {
        let message =
            "continue_final_message and add_generation_prompt exclude each other; send one of them as false";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    let options = ChatOptions {
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        tools: tools.source.clone(),
        variables: template_variables(fields)?,
    };
    model.llm.encode_chat(&messages, &options).map_err(|error| ApiError::from(error).or_param("messages"))
}

/// How the answers are taken apart.
fn turn_format(
    model: &Model,
    prompt_token_ids: &[u32],
    tools: &ToolRequest,
    includes_reasoning: bool,
) -> Result<TurnFormat, ApiError> {
    let known = model.llm.chat().map(Chat::answer_format).unwrap_or_default();
    let tool_calls = known.tool_calls.filter(|_| tools.may_call());
    if tool_calls.is_none() && tools.may_call() {
        let message = format!(
            "tools cannot be called, because it is not known how {} writes calls; start the server with \
             --tool-call-parser {}, or send tool_choice \"none\"",
            model.llm.name(),
            ToolCallFormat::NAMES.join(" or ")
        );
        return Err(ApiError::unsupported("tools", message));
    }
    Ok(TurnFormat {
        answers: AnswerFormat { tool_calls, reasoning: known.reasoning },
        prompt_end: model.llm.prompt_end(prompt_token_ids),
        tools: Arc::clone(&tools.tools),
        includes_reasoning,
        max_calls: (!tools.is_parallel).then_some(1),
    })
}

/// What the answer has to be: calls, if they are asked for, or structured output; after the reasoning.
fn constraint(
    model: &Model,
    output: Option<StructuredOutput>,
    tools: &ToolRequest,
    turns: &TurnFormat,
) -> Result<Option<Arc<dyn Constraint>>, ApiError> {
    let (constraint, param) = match (output, called_tools(tools)) {
        (None, None) => return Ok(None),
        (Some(output), _) if tools.may_call() => {
            let param = output.param();
            let message = format!(
                "{param} and tools exclude each other, because a call is not of that form; leave one of them out, \
                 or send tool_choice \"none\""
            );
            return Err(ApiError::unsupported(param, message));
        }
        (Some(output), _) => {
            let param = output.param();
            (output.compile(model)?, param)
        }
        (None, Some((called, is_parallel))) => {
            let grammar = model
                .llm
                .tokenizer()
                .and_then(|tokenizer| turns.answers.call_grammar(tokenizer, &called, is_parallel).transpose())
                .transpose()
                .map_err(|error| ApiError::from(error).or_param("tools"))?
                .ok_or_else(|| {
                    ApiError::unsupported("tools", "tools need a tokenizer, and the model has none")
                })?;
            let grammar = model.llm.compile_grammar(&GrammarSpec::Lark(grammar));
            let grammar: Arc<dyn Constraint> =
                grammar.map_err(|error| ApiError::from(error).or_param("tools"))?;
            (grammar, "tool_choice")
        }
    };
    let constraint = model.llm.after_reasoning(constraint, turns.answers.reasoning, turns.prompt_end);
    Ok(Some(constraint.map_err(|error| ApiError::from(error).or_param(param))?))
}

/// The tools of which at least one must be called, and whether that may be more than once.
fn called_tools(tools: &ToolRequest) -> Option<(Vec<Tool>, bool)> {
    match &tools.choice {
        ToolChoice::None | ToolChoice::Auto => None,
        ToolChoice::Required => Some((tools.tools.to_vec(), tools.is_parallel)),
        // A named tool is called once: that is what was asked for.
        ToolChoice::Named(name) => {
            Some((tools.tools.iter().filter(|tool| tool.name == *name).cloned().collect(), false))
        }
    }
}

/// Refuses a text that is too long for certain, before work is put into it.
pub(super) fn check_text_len(model: &Model, param: &'static str, num_bytes: usize) -> Result<(), ApiError> {
    if num_bytes <= model.max_text_bytes {
        return Ok(());
    }
    let message = format!(
        "This model's maximum context length is {} tokens. However, {param} has {num_bytes} bytes of text, which are \
         more tokens for certain. Please reduce the length of the input messages",
        model.llm.engine().config().max_model_len
    );
    Err(ApiError::from(crate::Error::new(crate::ErrorKind::ContextLength, message)).or_param(param))
}

/// The newer name wins; both may be given if they agree.
fn max_tokens(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let old = fields.unsigned("max_tokens")?;
    let new = fields.unsigned("max_completion_tokens")?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(ApiError::invalid(
            "max_tokens",
            format!("max_tokens is {old}, but max_completion_tokens is {new}; give one of them"),
        )),
        _ => Ok(new.or(old)),
    }
}

fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let num_top = fields.unsigned("top_logprobs")?;
    match num_top {
        Some(num_top) if !wanted && num_top > 0 => {
            let message = format!("top_logprobs is {num_top}, but logprobs is not true");
            Err(ApiError::invalid("top_logprobs", message))
        }
        Some(num_top) if num_top > 20 => {
            let message = format!("top_logprobs is {num_top}; it must be at most 20");
            Err(ApiError::invalid("top_logprobs", message))
        }
        _ => Ok(wanted.then(|| num_top.unwrap_or(0))),
    }
}

fn template_variables(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut variables = match fields.object("chat_template_kwargs")? {
        Some(variables) => variables.into_map(),
        None => Map::new(),
    };
    if let Some(effort) = fields.string("reasoning_effort")? {
        let other = variables.get("reasoning_effort").filter(|other| !other.is_null());
        if other.is_some_and(|other| *other != effort) {
            let message =
                "reasoning_effort and chat_template_kwargs.reasoning_effort differ; give one of them";
            return Err(ApiError::invalid("reasoning_effort", message));
        }
        variables.insert("reasoning_effort".to_owned(), effort.into());
    }
    for (name, value) in &variables {
        let param = format!("chat_template_kwargs.{name}");
        if !TEMPLATE_VARIABLES.contains(&name.as_str()) {
            let message =
                format!("{param} is not supported; a request may set {}", TEMPLATE_VARIABLES.join(", "));
            return Err(ApiError::unsupported(param, message));
        }
        let is_small = match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => true,
            Value::String(text) => text.len() <= MAX_VARIABLE_BYTES,
            Value::Array(_) | Value::Object(_) => false,
        };
        if !is_small {
            return Err(wrong_type(param, value, "true, false, a number or a short string"));
        }
    }
    Ok(variables)
}
