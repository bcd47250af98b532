//! Turns a refusal of the Hub into the message that the user reads.
//!
//! The Hub answers 401 for a missing model, a private one, a gated one and a wrong token alike. The `x-error-code`
//! header distinguishes them; if a mirror omits it, the message lists the possible reasons.

use ureq::http::{HeaderMap, StatusCode};

use crate::hub::config::Token;
use crate::hub::source::HubModel;
use crate::{Error, ErrorKind};

/// The requested item and the host.
#[derive(Debug)]
pub(super) struct Asked<'a> {
    pub(super) model: &'a HubModel,
    pub(super) file: Option<&'a str>,
    pub(super) endpoint: &'a str,
    pub(super) token: Option<&'a Token>,
    /// The host that refused, and whether it is the Hub rather than a storage host.
    pub(super) host: &'a str,
    pub(super) is_endpoint: bool,
}

/// The error for an answer whose status is not a success.
pub(super) fn refusal(asked: &Asked<'_>, status: StatusCode, headers: &HeaderMap) -> Error {
    let header = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let bad_credentials = header("x-error-message").starts_with("Invalid credentials");
    match (status.as_u16(), header("x-error-code")) {
        (429, _) => rate_limited(asked, header("retry-after")),
        (401 | 403, _) if !asked.is_endpoint => storage_refused(asked, status),
        (401 | 403, "GatedRepo") => gated(asked),
        (401, _) if bad_credentials => wrong_token(asked),
        (401 | 404, "RepoNotFound") => unknown_model(asked),
        (404, "RevisionNotFound") => unknown_revision(asked),
        (401, _) if asked.token.is_none() => token_needed(asked),
        (401, _) => wrong_token(asked),
        (403, _) => forbidden(asked),
        (404 | 410, _) if asked.file.is_some() => unknown_file(asked),
        (404 | 410, _) if asked.model.revision != "main" => unknown_model_or_revision(asked),
        (404 | 410, _) => unknown_model(asked),
        _ => Error::new(
            ErrorKind::Unavailable,
            format!("`{}` answered {status} to a request for `{}`", asked.host, asked.model.repo),
        )
        .with_hint("try again later: the downloaded bytes are kept"),
    }
}

fn unknown_model(asked: &Asked<'_>) -> Error {
    let repo = &asked.model.repo;
    let error = Error::new(
        ErrorKind::NotFound,
        format!("there is no model `{repo}` on `{}`, or it is private", asked.host),
    );
    match asked.token {
        Some(token) => error.with_hint(format!(
            "check the name; if the model is private, the token from {} must have access to it",
            token.origin()
        )),
        None => error.with_hint("check the name; if the model is private, set HF_TOKEN"),
    }
}

fn unknown_revision(asked: &Asked<'_>) -> Error {
    let HubModel { repo, revision, .. } = asked.model;
    Error::new(ErrorKind::NotFound, format!("the model `{repo}` has no revision `{revision}`"))
        .with_hint(format!("its branches and tags are listed at {}/{repo}/tree/main", asked.endpoint))
}

fn unknown_model_or_revision(asked: &Asked<'_>) -> Error {
    let HubModel { repo, revision, .. } = asked.model;
    Error::new(
        ErrorKind::NotFound,
        format!("there is no model `{repo}` with a revision `{revision}` on `{}`", asked.host),
    )
    .with_hint("check the name and --revision")
}

fn unknown_file(asked: &Asked<'_>) -> Error {
    let HubModel { repo, revision, .. } = asked.model;
    let file = asked.file.unwrap_or_default();
    Error::new(
        ErrorKind::NotFound,
        format!("`{repo}` lists the file `{file}` at `{revision}` but does not have it"),
    )
    .with_hint("try again: the model may be changing at this moment")
}

fn gated(asked: &Asked<'_>) -> Error {
    let (repo, endpoint) = (&asked.model.repo, asked.endpoint);
    match asked.token {
        None => {
            Error::new(ErrorKind::Unauthorized, format!("the model `{repo}` is gated, and no token is set"))
                .with_hint(format!(
                    "accept its terms at {endpoint}/{repo}, then set HF_TOKEN to a token of that \
                                account"
                ))
        }
        Some(token) => Error::new(
            ErrorKind::Unauthorized,
            format!(
                "the model `{repo}` is gated, and the account of the token from {} has no access",
                token.origin()
            ),
        )
        .with_hint(format!(
            "request access at {endpoint}/{repo}; a fine-grained token also needs the right to read gated \
             repositories"
        )),
    }
}

fn token_needed(asked: &Asked<'_>) -> Error {
    let repo = &asked.model.repo;
    Error::new(
        ErrorKind::Unauthorized,
        format!("`{}` requires a token for the model `{repo}`, and none is set", asked.host),
    )
    .with_hint(format!(
        "check the name, since unknown models get this answer, too; make a token at \
         {}/settings/tokens and set HF_TOKEN",
        asked.endpoint
    ))
}

fn wrong_token(asked: &Asked<'_>) -> Error {
    let origin = asked.token.map_or("HF_TOKEN", Token::origin);
    Error::new(ErrorKind::Unauthorized, format!("`{}` does not accept the token from {origin}", asked.host))
        .with_hint(format!(
            "make a new one at {}/settings/tokens, or remove it: public models need none",
            asked.endpoint
        ))
}

fn forbidden(asked: &Asked<'_>) -> Error {
    let repo = &asked.model.repo;
    let error = |what: String| Error::new(ErrorKind::Unauthorized, what);
    match asked.token {
        Some(token) => error(format!("the token from {} may not read the model `{repo}`", token.origin()))
            .with_hint(format!("give it the right to read at {}/settings/tokens", asked.endpoint)),
        None => error(format!(
            "`{}` does not give the model `{repo}` to everyone, and no token is set",
            asked.host
        ))
        .with_hint("set HF_TOKEN to a token that has access"),
    }
}

fn rate_limited(asked: &Asked<'_>, retry_after: &str) -> Error {
    let wait = match retry_after.trim().parse::<u64>() {
        Ok(seconds) => format!("wait {seconds} s"),
        Err(_) => "wait some minutes".to_owned(),
    };
    let hint = match asked.token {
        Some(_) => format!("{wait} and run the command again: the downloaded bytes are kept"),
        None => format!("{wait}, or set HF_TOKEN: with a token the Hub allows more"),
    };
    Error::new(ErrorKind::RateLimited, format!("`{}` refuses more requests for now", asked.host))
        .with_hint(hint)
}

/// Storage hosts are given signed addresses that expire; the next attempt gets a new one.
fn storage_refused(asked: &Asked<'_>, status: StatusCode) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("the storage host `{}` answered {status} for a file of `{}`", asked.host, asked.model.repo),
    )
    .with_hint("try again: the downloaded bytes are kept")
}
