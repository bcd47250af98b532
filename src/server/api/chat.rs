//! `/v1/chat/completions`: a conversation, rendered with the model's own template.

use std::sync::Arc;

use super::super::error::ApiError;
use super::super::json::{Fields, NO_LIMIT};
use super::super::state::{App, Model};
use super::conversation::{self, Answers, Conversation, Variables};
use super::options::{Options, Words};
use super::prompt_report::PromptReport;
use super::shape::{Kind, ResponseShape};
use super::tools::ToolRequest;
use super::{Prepared, generate, messages, prediction, sampling, structured};
use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;

/// Answers a conversation.
pub(in super::super) async fn handle(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    generate(app, request, parse).await
}

pub(super) fn parse(model: &Model, mut fields: Fields) -> Result<Prepared<ResponseShape>, ApiError> {
    let mut params = sampling::parse(&mut fields, model.llm.sampling_defaults())?;
    params.max_tokens = max_tokens(&mut fields)?;
    params.logprobs = logprobs(&mut fields)?;
    let tools = ToolRequest::parse(&mut fields)?;
    let predicted = prediction::parse(&mut fields)?;
    let includes_reasoning = fields.bool("include_reasoning")?.unwrap_or(true);
    let mut options = Options::parse(&mut fields, &params.stop, &Words::CHATS)?;
    options.parse_progress(&mut fields)?;
    if fields.bool("echo")?.unwrap_or(false) {
        return Err(ApiError::unsupported("echo", "echo is not supported in chats; use /v1/completions"));
    }
    let output = structured::parse(&mut fields, None)?;
    let conversation = conversation(&mut fields, tools)?;
    let has_logprobs = params.logprobs.is_some();
    let answers = Answers { output, includes_reasoning, clamps_max_tokens: false };
    let (request, turns) = conversation.prepare(model, params, &mut options, answers)?;
    let mut requests = vec![request];
    prediction::apply(predicted.as_deref(), model, &mut requests)?;
    let mut shape = ResponseShape::new(Kind::Chat, model, &requests, &options, has_logprobs);
    shape.set_prompt_report(PromptReport::prepare(&mut requests, options.prompt_logprobs, None)?);
    shape.set_turns(turns);
    Ok(Prepared { requests, options, shape })
}

/// The token ids of the conversation in `messages`, with the tools.
pub(super) fn encode(model: &Model, fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    let tools = ToolRequest::parse(fields)?;
    conversation(fields, tools)?.encode(model)
}

fn conversation(fields: &mut Fields, tools: ToolRequest) -> Result<Conversation, ApiError> {
    let messages = messages::parse(fields)?;
    let continue_final_message = fields.bool("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.bool("add_generation_prompt")?;
    if continue_final_message && add_generation_prompt == Some(true) {
        let message =
            "continue_final_message and add_generation_prompt exclude each other; set one of them to false";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    Ok(Conversation {
        param: "messages",
        about_tools: messages::speak_of_tools(&messages).map(|index| format!("messages[{index}]")),
        messages,
        has_paths: true,
        tools,
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        variables: template_variables(fields)?,
    })
}

/// The newer name wins. Both are accepted if they agree.
fn max_tokens(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let old = fields.limit("max_tokens", 1)?;
    let new = fields.limit("max_completion_tokens", 1)?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => {
            let [old, new] = [old, new].map(|limit| match limit {
                NO_LIMIT => "-1".to_owned(),
                limit => limit.to_string(),
            });
            let message =
                format!("max_tokens is {old}, but max_completion_tokens is {new}; give one of them");
            Err(ApiError::invalid("max_tokens", message))
        }
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

/// The template variables of the request.
fn template_variables(fields: &mut Fields) -> Result<Variables, ApiError> {
    let effort = fields.string("reasoning_effort")?;
    conversation::template_variables(fields, effort.map(|effort| ("reasoning_effort", effort)))
}
