//! `/v1/responses`: OpenAI's interface for agents.
//!
//! A request becomes the same conversation as one for chats: `items.rs` reads its input, `request.rs` the
//! other fields, and `style.rs` writes the answer. It is stored only with `--responses-memory` (`kept.rs`).

mod items;
mod kept;
mod request;
mod style;

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;

use self::request::Question;
use self::style::{Keeper, ResponseStyle};
use super::super::auth::Caller;
use super::super::error::ApiError;
use super::super::json::Fields;
use super::super::memory::StoredResponse;
use super::super::state::{App, Model};
use super::super::values::charge_copies;
use super::blocks::{BlockResponse, Blocks};
use super::conversation::Answers;
use super::options::{Options, Words};
use super::{Prepared, generate, sampling};

pub(in super::super) use self::kept::{cancel, delete, input_items, show};

/// Answers a conversation.
pub(in super::super) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    let owner = Arc::clone(&app);
    generate(app, request, move |model, fields| parse(model, fields, owner, caller)).await
}

fn parse(
    model: &Model,
    mut fields: Fields,
    app: Arc<App>,
    caller: Caller,
) -> Result<Prepared<BlockResponse<ResponseStyle>>, ApiError> {
    let question = Question::parse(&mut fields, &app.memory, caller)?;
    let mut params = sampling::parse(&mut fields, model.llm.sampling_defaults())?;
    if params.n != 1 {
        let message = format!("n is {}; a response is one answer", params.n);
        return Err(ApiError::unsupported("n", message));
    }
    (params.max_tokens, params.logprobs) = (question.max_tokens, question.logprobs);
    let mut settings = question.settings;
    settings.insert("temperature".to_owned(), short(params.temperature));
    settings.insert("top_p".to_owned(), short(params.top_p));
    let mut options = Options::parse(&mut fields, &params.stop, &Words::RESPONSES)?;
    options.refuse_reports()?;
    settings.insert("user".to_owned(), options.user.clone().into());
    // The answer repeats the settings.
    charge_copies(settings.values())?;
    let answers = Answers { output: question.output, includes_reasoning: true, clamps_max_tokens: false };
    let (request, turns) =
        question.conversation.prepare(model, params, &mut options, answers).map_err(|error| {
            error.renamed("max_tokens", "max_output_tokens").renamed("logprobs", "top_logprobs")
        })?;
    let keeper = match question.is_stored {
        true => Some(Keeper { app, caller, question: StoredResponse::begin(question.items)? }),
        false => None,
    };
    let style = ResponseStyle::new(&model.names[0], settings, keeper);
    let blocks = Blocks::new(&request, turns);
    Ok(Prepared { requests: vec![request], options, shape: BlockResponse { blocks, style } })
}

/// A number with only the digits that an f32 has.
fn short(value: f32) -> serde_json::Value {
    value.to_string().parse::<f64>().map_or(serde_json::Value::Null, Into::into)
}

#[cfg(test)]
mod tests;
