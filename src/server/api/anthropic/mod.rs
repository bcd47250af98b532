//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's interface.
//!
//! A request becomes the same conversation as one for chats. So it has the same template, limits and engine.
//! `conversation.rs` reads it and `style.rs` writes the answer.

mod conversation;
mod style;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;
use serde_json::{Value, json};

use self::style::MessageStyle;
use super::super::error::{ApiError, ok};
use super::super::json::{Fields, wrong_type};
use super::super::state::{App, Model};
use super::blocks::{BlockResponse, Blocks};
use super::conversation::{Answers, Conversation, Variables, template_variables};
use super::messages::missing;
use super::options::{Options, Words, says_nothing};
use super::structured::{self, StructuredOutput, flat_format};
use super::tools::{self, Functions, ToolChoice, ToolRequest};
use super::{Prepared, generate, prepare, sampling};
use tinyvllm::chat::Tool;

/// Fields that need Anthropic's own servers and would change the answer.
const REFUSED: [&str; 2] = ["container", "mcp_servers"];
/// The highest temperature in this interface.
const MAX_TEMPERATURE: f32 = 1.0;

/// Answers a conversation.
pub(in super::super) async fn create(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    generate(app, request, parse).await
}

/// Counts the tokens of a conversation.
pub(in super::super) async fn count_tokens(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    let model = app.ready()?;
    let count = |model: &Model, mut fields: Fields| {
        let question = Question::parse(&mut fields)?;
        Ok(question.conversation.encode(model)?.len())
    };
    let (num_tokens, _permits) = prepare(&app, &model, request, count).await?;
    Ok(ok(&json!({"input_tokens": num_tokens})))
}

/// The fields that both paths read.
struct Question {
    conversation: Conversation,
    output: Option<StructuredOutput>,
    shows_thinking: bool,
}

impl Question {
    fn parse(fields: &mut Fields) -> Result<Self, ApiError> {
        refuse(fields)?;
        let tools = tool_request(fields)?;
        let (output, effort) = output(fields)?;
        let mut variables =
            template_variables(fields, effort.map(|effort| ("output_config.effort", effort)))?;
        let (thinks, shows_thinking) = thinking(fields, &mut variables)?;
        let turns = conversation::parse(fields)?;
        if let Some(path) = turns.error_mark {
            variables.mark_messages(path, "is_error");
        }
        let other = thinks.then_some("thinking").or_else(|| output.as_ref().map(StructuredOutput::param));
        if let Some(other) = other.filter(|_| turns.is_begun) {
            let message = format!(
                "messages ends with a turn of the assistant, which the answer continues, and {other} sets its \
                 beginning; omit one of them"
            );
            return Err(ApiError::invalid("messages", message));
        }
        let conversation = Conversation {
            param: "messages",
            messages: turns.messages,
            has_paths: false,
            about_tools: turns.about_tools,
            tools,
            add_generation_prompt: !turns.is_begun,
            continue_final_message: turns.is_begun,
            variables,
        };
        Ok(Self { conversation, output, shows_thinking })
    }
}

fn parse(model: &Model, mut fields: Fields) -> Result<Prepared<BlockResponse<MessageStyle>>, ApiError> {
    let question = Question::parse(&mut fields)?;
    // The model's own default may be higher.
    let has_temperature = fields.look("temperature", Value::is_null)? == Some(false);
    let mut params = sampling::parse(&mut fields, model.llm.sampling_defaults())?;
    if params.n != 1 {
        return Err(ApiError::unsupported(
            "n",
            format!("n is {}; this interface gives one answer", params.n),
        ));
    }
    if has_temperature && !(0.0..=MAX_TEMPERATURE).contains(&params.temperature) {
        let message =
            format!("temperature is {}; it must be from 0 to {MAX_TEMPERATURE}", params.temperature);
        return Err(ApiError::invalid("temperature", message));
    }
    params.stop.extend(sampling::strings(&mut fields, "stop_sequences")?);
    let max_tokens = fields.count("max_tokens", 1)?.ok_or_else(|| missing("max_tokens".to_owned()))?;
    params.max_tokens = Some(max_tokens);
    let user = match fields.object("metadata")? {
        Some(mut metadata) => metadata.string("user_id")?,
        None => None,
    };
    let mut options = Options::parse(&mut fields, &params.stop, &Words::MESSAGES)?;
    options.refuse_reports()?;
    options.user = user.or(options.user);
    let Question { conversation, output, shows_thinking } = question;
    // At Anthropic, a limit beyond the context's end means the rest of the context.
    let answers = Answers { output, includes_reasoning: shows_thinking, clamps_max_tokens: true };
    let (request, turns) = conversation
        .prepare(model, params, &mut options, answers)
        .map_err(|error| error.renamed("stop", "stop_sequences"))?;
    let is_clamped = request.params.max_tokens < Some(max_tokens);
    let blocks = Blocks::new(&request, turns);
    let shape = BlockResponse { blocks, style: MessageStyle::new(&model.names[0], is_clamped) };
    Ok(Prepared { requests: vec![request], options, shape })
}

fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    // Every prefix is cached anyway.
    fields.pass(&["cache_control"]);
    for name in REFUSED {
        if fields.take(name)?.is_some_and(|value| !says_nothing(&value)) {
            let message = format!("{name} is not supported here; omit it");
            return Err(ApiError::unsupported(name, message));
        }
    }
    // The conversation is used unchanged: nothing is cleared from it.
    if let Some(mut management) = fields.object("context_management")? {
        // Agents send an edit that clears earlier thinking but keeps all of it.
        let keeps_all = |edits: &Value| {
            edits.as_array().is_some_and(|edits| edits.iter().all(|edit| edit["keep"] == "all"))
        };
        if management.take("edits")?.is_some_and(|edits| !keeps_all(&edits)) {
            management.report("edits");
        }
    }
    if fields.bool("continue_final_message")?.unwrap_or(false) {
        let message = "continue_final_message is for chats; an answer continues the last turn if it is the \
                       assistant's";
        return Err(ApiError::unsupported("continue_final_message", message));
    }
    if fields.string("speed")?.is_some_and(|speed| speed != "standard") {
        fields.report("speed");
    }
    Ok(())
}

/// The format of the answer, and the reasoning effort.
fn output(fields: &mut Fields) -> Result<(Option<StructuredOutput>, Option<String>), ApiError> {
    let older = match fields.object("output_format")? {
        Some(format) => flat_format(format, "output_format", "output_format.schema")?,
        None => None,
    };
    let (mut newer, mut effort) = (None, None);
    if let Some(mut config) = fields.object("output_config")? {
        effort = config.string("effort")?;
        if let Some(format) = config.object("format")? {
            newer = flat_format(format, "output_config.format", "output_config.format.schema")?;
        }
    }
    Ok((structured::parse(fields, newer.into_iter().chain(older))?, effort))
}

/// Sets the template's reasoning switch, which is off unless requested. Returns whether it is on, and whether
/// reasoning is shown. Variables that the request sets itself take precedence.
fn thinking(fields: &mut Fields, variables: &mut Variables) -> Result<(bool, bool), ApiError> {
    let mut shows = true;
    let is_wanted = match fields.object("thinking")? {
        None => None,
        Some(mut thinking) => {
            let path = thinking.path("type");
            let kind = thinking.string("type")?.ok_or_else(|| missing(path.clone()))?;
            let budget = thinking.unsigned("budget_tokens")?;
            shows = match thinking.string("display")?.as_deref() {
                None | Some("summarized") => true,
                Some("omitted") => false,
                Some(other) => {
                    let path = thinking.path("display");
                    return Err(wrong_type(path, &other.into(), "\"summarized\" or \"omitted\""));
                }
            };
            Some(match (kind.as_str(), budget) {
                ("disabled", _) => false,
                ("adaptive", _) => true,
                ("enabled", Some(budget)) => {
                    variables.limit_thinking(thinking.path("budget_tokens"), budget);
                    true
                }
                ("enabled", None) => return Err(missing(thinking.path("budget_tokens"))),
                (other, _) => {
                    return Err(wrong_type(path, &other.into(), "\"enabled\", \"disabled\" or \"adaptive\""));
                }
            })
        }
    };
    match is_wanted {
        None => variables.switch_thinking(false),
        Some(is_wanted) => variables.switch_thinking_by("thinking", is_wanted),
    }
    Ok((is_wanted.unwrap_or(false), shows))
}

fn tool_request(fields: &mut Fields) -> Result<ToolRequest, ApiError> {
    let functions = match fields.take("tools")? {
        Some(given) => Functions::parse(fields, given, tool)?.into_chat_tools("input_schema"),
        None => Functions::default(),
    };
    let Some(mut choice) = fields.object("tool_choice")? else {
        return ToolRequest::new(functions, ToolChoice::Auto.into(), true);
    };
    let is_parallel = !choice.bool("disable_parallel_tool_use")?.unwrap_or(false);
    let path = choice.path("type");
    let wanted = match choice.string("type")?.as_deref() {
        Some("auto") => ToolChoice::Auto,
        Some("any") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        Some("tool") => {
            ToolChoice::Named(choice.string("name")?.ok_or_else(|| missing(choice.path("name")))?)
        }
        Some(other) => {
            return Err(wrong_type(path, &other.into(), "\"auto\", \"any\", \"tool\" or \"none\""));
        }
        None => return Err(missing(path)),
    };
    ToolRequest::new(functions, wanted.into(), is_parallel)
}

fn tool(mut fields: Fields) -> Result<Option<Tool>, ApiError> {
    let path = fields.path("input_schema");
    fields.pass(&["cache_control"]);
    // Anthropic's own tools each have their own type.
    if let Some(kind) = fields.string("type")?.filter(|kind| kind != "custom") {
        fields.leave_out(&kind);
        return Ok(None);
    }
    let tool = tools::function(fields, "input_schema")?;
    match tool.parameters {
        Some(_) => Ok(Some(tool)),
        None => Err(missing(path)),
    }
}

#[cfg(test)]
mod tests;
