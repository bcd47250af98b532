//! `/v1/responses/{id}` and the paths below it: stored responses.

use std::sync::Arc;

use axum::Extension;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::super::super::access::Note;
use super::super::super::account::{Charge, charging};
use super::super::super::auth::Caller;
use super::super::super::error::{ApiError, ok};
use super::super::super::state::App;
use super::super::from_path;

/// Most items in one answer; this and the default are those of OpenAI.
const MAX_ITEMS: usize = 100;
const DEFAULT_ITEMS: usize = 20;

type Id = Result<Path<String>, PathRejection>;

/// Returns a stored response.
pub(in super::super::super) async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Extension(note): Extension<Note>,
    RawQuery(query): RawQuery,
    id: Id,
) -> Result<Response, ApiError> {
    if parameter(query.as_deref(), "stream") == Some("true") {
        let message = "stream is not supported here: a response is stored when it is complete";
        return Err(ApiError::unsupported("stream", message));
    }
    let id = from_path("id", id)?;
    on_account(&app, &note, || Ok(ok(&app.memory.response(caller, &id)?)))
}

/// Deletes a stored response.
pub(in super::super::super) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    id: Id,
) -> Result<Response, ApiError> {
    let id = from_path("id", id)?;
    app.memory.forget(caller, &id)?;
    Ok(ok(&json!({"id": id, "object": "response", "deleted": true})))
}

/// Refuses to cancel a response: a stored one is complete.
pub(in super::super::super) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    id: Id,
) -> ApiError {
    match from_path("id", id).and_then(|id| app.memory.require(caller, &id)) {
        Ok(()) => {
            let message = "only a background response can be cancelled, which is not supported here; a response \
                           ends when its connection is closed";
            ApiError::invalid("id", message)
        }
        Err(error) => error,
    }
}

/// The conversation before a response, as items.
pub(in super::super::super) async fn input_items(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Extension(note): Extension<Note>,
    RawQuery(query): RawQuery,
    id: Id,
) -> Result<Response, ApiError> {
    let id = from_path("id", id)?;
    on_account(&app, &note, || list_items(app.memory.input(caller, &id)?, query.as_deref()))
}

/// Does work whose memory is charged until the end of the answer.
fn on_account(
    app: &App,
    note: &Note,
    work: impl FnOnce() -> Result<Response, ApiError>,
) -> Result<Response, ApiError> {
    let (answer, charge) = charging(Charge::new(&app.request_memory), work);
    note.hold(charge);
    answer
}

fn list_items(mut items: Vec<Value>, query: Option<&str>) -> Result<Response, ApiError> {
    match parameter(query, "order") {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(_) => return Err(ApiError::invalid("order", "order must be asc or desc")),
    }
    let limit = match parameter(query, "limit") {
        None => DEFAULT_ITEMS,
        Some(limit) => {
            let limit = limit.parse().ok().filter(|limit| (1..=MAX_ITEMS).contains(limit));
            limit.ok_or_else(|| ApiError::invalid("limit", format!("limit must be from 1 to {MAX_ITEMS}")))?
        }
    };
    let start = match parameter(query, "after") {
        None => 0,
        Some(after) => {
            let position = items.iter().position(|item| item["id"] == after);
            position.ok_or_else(|| ApiError::invalid("after", "after is not the id of an item"))? + 1
        }
    };
    let has_more = items.len() > start + limit;
    let items: Vec<Value> = items.into_iter().skip(start).take(limit).collect();
    let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
    Ok(ok(&json!({
        "object": "list",
        "first_id": id(items.first()),
        "last_id": id(items.last()),
        "has_more": has_more,
        "data": items,
    })))
}

/// A parameter of the query. Ids and numbers need no decoding.
fn parameter<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    let pairs = query?.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(found, _)| *found == name).map(|(_, value)| value).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_queries() {
        let query = Some("a=1&order=asc&b&limit=5&limit=6&c=");
        assert_eq!(parameter(query, "order"), Some("asc"));
        assert_eq!(parameter(query, "limit"), Some("5"));
        assert_eq!(parameter(query, "c"), Some(""));
        assert_eq!(
            (parameter(query, "b"), parameter(query, "rder"), parameter(None, "a")),
            (None, None, None)
        );
    }
}
