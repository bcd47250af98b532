//! `/v1/completions`: prompts without a template, as text or token ids.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;
use serde_json::Value;

use super::super::account::on_text;
use super::super::error::ApiError;
use super::super::json::{Fields, NO_LIMIT, wrong_token_ids, wrong_type};
use super::super::state::{App, Model};
use super::super::values::BodyValue;
use super::conversation::check_text_len;
use super::options::{MAX_PROMPTS, Options, Words};
use super::prompt_report::PromptReport;
use super::shape::{Kind, ResponseShape};
use super::{Prepared, generate, prediction, sampling, structured};
use tinyvllm::engine::Request;
use tinyvllm::tokenizer::Tokenizer;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Continues prompts.
pub(in super::super) async fn handle(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    generate(app, request, parse).await
}

/// A prompt as it was sent.
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

pub(super) fn parse(model: &Model, mut fields: Fields) -> Result<Prepared<ResponseShape>, ApiError> {
    let mut params = sampling::parse(&mut fields, model.llm.sampling_defaults())?;
    params.logprobs = fields.unsigned("logprobs")?;
    let predicted = prediction::parse(&mut fields)?;
    let echo = fields.bool("echo")?.unwrap_or(false);
    let max_tokens = fields.limit("max_tokens", 0)?;
    let mut options = Options::parse(&mut fields, &params.stop, &Words::CHATS)?;
    options.parse_progress(&mut fields)?;
    if fields.bool("continue_final_message")?.unwrap_or(false) {
        let message = "continue_final_message is for chats; a completion always continues its prompt";
        return Err(ApiError::unsupported("continue_final_message", message));
    }
    let add_special_tokens = fields.bool("add_special_tokens")?.unwrap_or(true);
    let output = structured::parse(&mut fields, None)?;
    let prompts = prompts(&mut fields)?;
    let constraint = output.map(|output| output.compile(model)).transpose()?;
    let engine = model.llm.engine();
    let mut requests = Vec::with_capacity(prompts.len());
    let mut echoes = Vec::new();
    for prompt in prompts {
        let prompt_token_ids = match &prompt {
            Prompt::Ids(ids) => ids.clone(),
            Prompt::Text(text) => {
                check_text_len(model, "prompt", text.len())?;
                encode(model, text, add_special_tokens)?
            }
        };
        let left = engine.config().max_model_len.saturating_sub(prompt_token_ids.len());
        params.max_tokens = Some(match max_tokens {
            // A prompt that leaves less than the default is no error.
            None => {
                let default = model.llm.default_max_tokens(prompt_token_ids.len(), &params);
                default.map_or(DEFAULT_MAX_TOKENS, |most| most.min(DEFAULT_MAX_TOKENS)).min(left).max(1)
            }
            // With `echo`, the prompt alone can be requested. It has to fit like any other.
            Some(0) if echo => 1,
            Some(NO_LIMIT) => left.max(1),
            Some(given) => given,
        });
        let mut request = Request::new(prompt_token_ids, params.clone());
        request.cache_salt.clone_from(&options.cache_salt);
        request.prompt_logprobs = options.prompt_logprobs;
        request.constraint.clone_from(&constraint);
        request
            .validate(engine.model_limits(), engine.config())
            .map_err(|error| ApiError::from(error).or_param("prompt"))?;
        if echo {
            echoes.push(match prompt {
                Prompt::Text(text) => text,
                Prompt::Ids(ids) => tokenizer(model)?.decode(&ids, options.text.skip_special),
            });
        }
        requests.push(request);
    }
    prediction::apply(predicted.as_deref(), model, &mut requests)?;
    let has_logprobs = params.logprobs.is_some();
    let mut shape = ResponseShape::new(Kind::Completion, model, &requests, &options, has_logprobs);
    shape.set_echo(echoes);
    let report =
        PromptReport::prepare(&mut requests, options.prompt_logprobs, params.logprobs.filter(|_| echo))?;
    match (max_tokens, &report) {
        // There is nothing to compute.
        (Some(0), None) => requests.clear(),
        (Some(0), Some(_)) => shape.set_prompt_only(),
        _ => {}
    }
    shape.set_prompt_report(report);
    Ok(Prepared { requests, options, shape })
}

/// The token ids of a text.
pub(super) fn encode(model: &Model, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ApiError> {
    let tokenizer = tokenizer(model)?;
    on_text(text.len(), || {
        let encoded = tokenizer.encode_prompt(text, add_special_tokens);
        encoded.map_err(|error| ApiError::from(error).or_param("prompt"))
    })
}

/// The tokenizer, which texts need.
pub(super) fn tokenizer(model: &Model) -> Result<&Tokenizer, ApiError> {
    model.llm.require_tokenizer().map_err(|error| {
        let message = format!("{}; send token ids and set return_token_ids", error.message());
        ApiError::unsupported("prompt", message)
    })
}

/// A string, a list of strings, a list of token ids, or a list of lists of token ids.
fn prompts(fields: &mut Fields) -> Result<Vec<Prompt>, ApiError> {
    const EXPECTED: &str = "a string, a list of strings, token ids or lists of token ids";
    let wrong = |value: &Value| wrong_type("prompt".to_owned(), value, EXPECTED);
    let part =
        fields.take_unread("prompt").ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
    let items = match part.into_token_ids()? {
        Ok(ids) if !ids.is_empty() => return Ok(vec![Prompt::Ids(ids)]),
        Ok(_) => Vec::new(),
        Err(items) if items.is_list() => items.into_items()?,
        Err(other) => match other.read()? {
            Value::String(text) => return Ok(vec![Prompt::Text(text)]),
            other => return Err(wrong(&other)),
        },
    };
    if items.first().is_some_and(BodyValue::is_number) {
        let items = items.into_iter().map(BodyValue::read).collect::<Result<_, _>>()?;
        return Err(wrong_token_ids("prompt".to_owned(), &Value::Array(items)));
    }
    if items.is_empty() || items.len() > MAX_PROMPTS {
        let message = format!("prompt has {} entries; it must have 1 to {MAX_PROMPTS}", items.len());
        return Err(ApiError::invalid("prompt", message));
    }
    let prompt = |item: BodyValue| match item.into_token_ids()? {
        Ok(ids) => Ok(Prompt::Ids(ids)),
        Err(other) => match other.read()? {
            Value::String(text) => Ok(Prompt::Text(text)),
            other => Err(wrong(&other)),
        },
    };
    items.into_iter().map(prompt).collect()
}
