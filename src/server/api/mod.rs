//! The interfaces: their requests and their answers. Each converts its request into the same conversation
//! (`conversation.rs`), and builds its answer from the same deltas (`turn.rs`).
//!
//! A known field that this server does not support is refused by its name. Unknown fields are ignored,
//! because clients send extra ones, and listed in a header of the answer.

mod answer;
pub(super) mod anthropic;
mod blocks;
pub(super) mod chat;
pub(super) mod completions;
mod conversation;
pub(super) mod info;
mod messages;
pub(super) mod models;
pub(super) mod ollama;
mod options;
mod prediction;
mod prompt_report;
pub(super) mod render;
pub(super) mod requests;
pub(super) mod responses;
pub(super) mod sampling;
mod shape;
mod stream;
mod structured;
pub(super) mod tokens;
mod tools;
mod turn;
mod types;

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::Request as HttpRequest;
use axum::response::Response;

pub(super) use self::types::Reading;

use self::answer::Answer;
use self::options::Options;
use super::access::Note;
use super::account::charging;
use super::admission::Permit;
use super::auth::Caller;
use super::clients::Client;
use super::error::ApiError;
use super::generation::{Buffer, Generation, RequestContext};
use super::ignored::Ignored;
use super::json::{Fields, parse_object};
use super::state::{App, Model};
use tinyvllm::engine::Request;
use tinyvllm::tokenizer::dropped_in;

/// A request, checked and tokenized.
struct Prepared<A> {
    /// One for each prompt.
    requests: Vec<Request>,
    options: Options,
    shape: A,
}

/// Receives a body, and converts it with `parse` on a blocking thread. Returns also the permit for that work.
///
/// A request takes its permit when its body is there. So clients that send slowly, or only half a body, keep
/// no permits from others: their connections have limits of their own.
async fn prepare<T: Send + 'static>(
    app: &App,
    model: &Arc<Model>,
    request: HttpRequest<Body>,
    parse: impl FnOnce(&Model, Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, Vec<Permit>), ApiError> {
    let note = request.extensions().get::<Note>().cloned().unwrap_or_default();
    let client = Client::of(&request)?;
    app.check_permit(model, &client).await?;
    let body = super::body::receive(app, request).await?;
    // Before the body is unpacked and encoded, because that is work too.
    let permits = app.take_permit(model, &client).await?;
    let body = body.unpacked(app, &client).await?;
    let ignored = Ignored::default();
    let left = ignored.clone();
    let model = Arc::clone(model);
    // Templates and tokenizers are slow with long texts.
    let prepared = app.preparation.run(&client, move || {
        let body_bytes = body.bytes.capacity();
        let (parsed, mut charge) = charging(body.charge, || {
            dropped_in(|| {
                let mut fields = parse_object(body.bytes)?.telling(&left);
                check_model(&model, &mut fields)?;
                parse(&model, fields)
            })
        });
        // The body is freed, and the request has what was read from it.
        charge.give_back(body_bytes);
        (parsed, charge)
    });
    let ((parsed, dropped), charge) = prepared.await?;
    note.hold(charge);
    // A prompt of dropped characters only is empty. The notice explains that error.
    app.log_dropped(&dropped);
    note.set_dropped(dropped);
    let parsed = parsed?;
    let names = ignored.take();
    app.log_ignored(&names)?;
    note.set_ignored(names);
    Ok((parsed, permits))
}

/// Generates and answers, at once or as a stream.
async fn generate<A: Answer>(
    app: Arc<App>,
    request: HttpRequest<Body>,
    parse: impl FnOnce(&Model, Fields) -> Result<Prepared<A>, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let arrival = Instant::now();
    let model = app.ready()?;
    let note = request.extensions().get::<Note>().cloned().unwrap_or_default();
    let caller = request.extensions().get::<Caller>().copied().unwrap_or_default();
    let mut client = Client::of(&request)?;
    let (prepared, mut permits) = prepare(&app, &model, request, parse).await?;
    let Prepared { mut requests, options, shape } = prepared;
    let sender = client.id;
    client = app.clients.rename(client, options.user.as_deref());
    let num_sequences = requests.iter().map(|request| request.params.n).sum::<usize>().max(1);
    if client.id != sender || num_sequences > 1 {
        // The number of sequences and their client are known now.
        drop(permits);
        permits = app.take_permits(&model, &client, num_sequences)?;
    }
    for request in &mut requests {
        (request.client, request.weight, request.group) = (client.id, client.weight, Some(client.group));
        request.priority = options.priority;
    }
    let buffer = if options.stream.is_some() { Buffer::Bounded } else { Buffer::Whole };
    let identity = shape.identity(note.request_id(), caller);
    let record = app.history.begin(identity, &requests, options.stream.is_some());
    let reports_progress = options.stream.is_some_and(|stream| stream.reports_progress);
    for request in &mut requests {
        request.prompt_progress = reports_progress || record.is_some();
    }
    let context = RequestContext { app, model, note, record, arrival, permits, reports_progress };
    let generation = Generation::start(context, requests, &options.text, buffer).await?;
    match options.stream {
        Some(stream) => Ok(stream::respond(generation, shape.into_writer(stream))),
        None => shape.collect(generation).await,
    }
}

/// The parameter of a path.
fn from_path(param: &'static str, found: Result<Path<String>, PathRejection>) -> Result<String, ApiError> {
    match found {
        Ok(Path(name)) => Ok(name),
        Err(_) => Err(ApiError::invalid(param, format!("the {param} in the path is not UTF-8"))),
    }
}

fn check_model(model: &Model, fields: &mut Fields) -> Result<(), ApiError> {
    check_name(model, fields.string("model")?.as_deref())
}

/// An empty or absent name means the served model. Clients of ollama may append `:latest`.
fn check_name(model: &Model, name: Option<&str>) -> Result<(), ApiError> {
    let is_served = |name: &str| name.is_empty() || model.names.iter().any(|served| served == name);
    match name {
        Some(name) if !is_served(name) && !name.strip_suffix(":latest").is_some_and(is_served) => {
            Err(ApiError::no_such_model(name, &model.names[0]))
        }
        _ => Ok(()),
    }
}
