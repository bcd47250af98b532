//! Talks to the Hub: which files a revision has, what a file's data is called, and the data itself.
//!
//! Invariants: the token goes to the origin (scheme, host and port) of the configured endpoint and to
//! no other, so redirects are followed here and not by the HTTP library; no wait is without end; and
//! every failure is an [`Error`] whose kind tells apart what can be tried again
//! ([`ErrorKind::Unavailable`]) from what cannot. Addresses never appear in messages as a whole,
//! because the ones of storage hosts carry signatures. This file knows nothing of the disk.

use std::ops::Range;
use std::time::Duration;

use serde::Deserialize;
use ureq::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, LOCATION, RANGE, RETRY_AFTER,
};
use ureq::http::{HeaderMap, HeaderName, Method, Response, StatusCode};
use ureq::{Body, BodyReader};

use super::address::{Address, encode};
use super::agent::{Agents, is_untrusted};
use super::cache::is_path_word;
use super::config::HubConfig;
use super::refusal::{Asked, refusal};
use super::source::HubModel;
use crate::{Error, ErrorKind, Result};

const MAX_REDIRECTS: usize = 10;

/// What the Hub says about a revision.
#[derive(Debug)]
pub(super) struct RepoInfo {
    /// The commit that the revision stands for.
    pub(super) commit: String,
    /// All files of the commit.
    pub(super) files: Vec<String>,
}

/// What the Hub says about a file.
#[derive(Debug)]
pub(super) struct FileMetadata {
    /// A name for the content, safe as a file name.
    pub(super) etag: String,
    /// Size in bytes.
    pub(super) size: Option<u64>,
}

/// The answer to a request for some bytes of a file.
pub(super) enum Answer {
    Part(Part),
    /// The server sends the file from its first byte on, whatever it is asked for.
    Whole,
    /// There is no such byte: the file has only so many, if the server says how many.
    Beyond(Option<u64>),
}

/// Bytes from the first one that was asked for on.
pub(super) struct Part {
    /// How many there are; never more than were asked for.
    pub(super) num_bytes: u64,
    /// Size of the whole file in bytes.
    pub(super) total: Option<u64>,
    /// What the host that sends them calls the content, with the name of the host.
    pub(super) etag: Option<(String, String)>,
    pub(super) reader: BodyReader<'static>,
}

/// A file from its first byte on.
pub(super) struct Whole {
    /// Size in bytes.
    pub(super) total: Option<u64>,
    pub(super) reader: BodyReader<'static>,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: Error,
    /// How long the server wants to be left alone, if it says so.
    pub(super) retry_after: Option<Duration>,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, retry_after: None }
    }
}

/// A connection to the Hub on behalf of one model.
#[derive(Debug)]
pub(super) struct Client<'a> {
    agents: Agents,
    config: &'a HubConfig,
    model: &'a HubModel,
    endpoint: Address,
}

impl<'a> Client<'a> {
    /// # Errors
    /// [`ErrorKind::InvalidRequest`] if the endpoint is no address or the token cannot be sent.
    pub(super) fn new(config: &'a HubConfig, model: &'a HubModel) -> Result<Self> {
        let endpoint = Address::parse(config.endpoint.trim_end_matches('/')).ok_or_else(|| {
            Error::invalid_request(format!("the Hub's address `{}` cannot be used", config.endpoint))
                .with_hint("HF_ENDPOINT must look like https://huggingface.co, without a user name")
        })?;
        if let Some(token) = &config.token
            && !token.secret().bytes().all(|byte| byte.is_ascii_graphic())
        {
            return Err(Error::invalid_request(format!(
                "the token from {} has characters that no token has",
                token.origin()
            ))
            .with_hint("copy it again from https://huggingface.co/settings/tokens"));
        }
        Ok(Self { agents: Agents::new(config), config, model, endpoint })
    }

    /// The commit and the files of the model's revision.
    pub(super) fn repo_info(&self) -> Result<RepoInfo> {
        #[derive(Deserialize)]
        struct Info {
            sha: String,
            #[serde(default)]
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let HubModel { repo, revision, .. } = self.model;
        let address = self.endpoint.below(&format!("/api/models/{repo}/revision/{}", encode(revision, b"")));
        let (mut response, address) = self.follow(&Method::GET, address, None)?;
        if !response.status().is_success() {
            return Err(self.refused(&response, &address, None));
        }
        let body = response.body_mut().read_to_vec().map_err(|error| self.broken(&address, &error))?;
        let garbled = |what: String| {
            Error::new(ErrorKind::Unavailable, format!("`{}` {what}", address.host()))
                .with_hint("check HF_ENDPOINT; a network that asks for a login first answers like this")
        };
        let info: Info = serde_json::from_slice(&body)
            .map_err(|error| garbled(format!("did not answer as the Hub does: {error}")))?;
        if !is_path_word(&info.sha) {
            return Err(garbled("named a commit that is none".to_owned()));
        }
        let files = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        Ok(RepoInfo { commit: info.sha, files })
    }

    /// Name and size of a file's data. The answer comes from the endpoint; the storage host that it
    /// points to is not asked.
    pub(super) fn metadata(&self, commit: &str, file: &str) -> Result<FileMetadata> {
        let mut address = self.resolve_address(commit, file);
        let mut linked_etag = None;
        let mut etag = None;
        let mut size = None;
        for _ in 0..=MAX_REDIRECTS {
            let response = self.call(&Method::HEAD, &address, None)?;
            let headers = response.headers();
            linked_etag = text(headers, X_LINKED_ETAG).or(linked_etag);
            etag = text(headers, ETAG).or(etag);
            size = number(headers, X_LINKED_SIZE).or(size);
            if let Some(next) = self.redirection(&response, &address)? {
                if next.is_same_origin(&self.endpoint) {
                    address = next;
                    continue;
                }
            } else if response.status().is_success() {
                size = size.or_else(|| number(headers, CONTENT_LENGTH));
            } else {
                return Err(self.refused(&response, &address, Some(file)));
            }
            let etag = linked_etag.or(etag).unwrap_or_default();
            let etag = etag.trim_start_matches("W/").trim_matches('"');
            if !is_path_word(etag) {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    format!("`{}` did not say which content `{file}` has", address.host()),
                )
                .with_hint("check HF_ENDPOINT: a mirror must pass on the ETag headers"));
            }
            return Ok(FileMetadata { etag: etag.to_owned(), size });
        }
        Err(too_many_redirects(&address))
    }

    /// The bytes `range` of a file. `storage` is where the file was found last; a host that does not give
    /// it out any more, because signed addresses expire, is left for the one that the Hub names now.
    pub(super) fn range(
        &self,
        commit: &str,
        file: &str,
        range: &Range<u64>,
        storage: Option<&Address>,
    ) -> Result<(Answer, Address), Failure> {
        if let Some(address) = storage {
            let response = self.call(&Method::GET, address, Some(range))?;
            let status = response.status();
            if !status.is_redirection() && !matches!(status.as_u16(), 400 | 401 | 403 | 404 | 410) {
                return Ok((self.part(response, address, file, range)?, address.clone()));
            }
        }
        let (response, address) =
            self.follow(&Method::GET, self.resolve_address(commit, file), Some(range))?;
        Ok((self.part(response, &address, file, range)?, address))
    }

    /// Reads the head of an answer to a request for `range`.
    fn part(
        &self,
        response: Response<Body>,
        address: &Address,
        file: &str,
        range: &Range<u64>,
    ) -> Result<Answer, Failure> {
        let headers = response.headers();
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {}
            StatusCode::OK => return Ok(Answer::Whole),
            StatusCode::RANGE_NOT_SATISFIABLE => return Ok(Answer::Beyond(unsatisfied_range(headers))),
            _ => {
                let retry_after = number(headers, RETRY_AFTER).map(Duration::from_secs);
                return Err(Failure { error: self.refused(&response, address, Some(file)), retry_after });
            }
        }
        let (sent, total) = content_range(headers)
            .ok_or_else(|| self.broken(address, &"a part of the file without saying which part"))?;
        let num_bytes = sent.end.saturating_sub(sent.start);
        let is_as_long_as_it_says = number(headers, CONTENT_LENGTH).is_none_or(|length| length == num_bytes);
        if sent.start != range.start || num_bytes == 0 || sent.end > range.end || !is_as_long_as_it_says {
            return Err(self.broken(address, &"another part of the file than asked for").into());
        }
        let etag = text(headers, ETAG).map(|etag| (address.host().to_owned(), etag));
        Ok(Answer::Part(Part { num_bytes, total, etag, reader: response.into_body().into_reader() }))
    }

    /// A file from its first byte on, from a server that knows no ranges.
    pub(super) fn whole(&self, commit: &str, file: &str) -> Result<Whole> {
        let (response, address) = self.follow(&Method::GET, self.resolve_address(commit, file), None)?;
        if response.status() != StatusCode::OK {
            return Err(self.refused(&response, &address, Some(file)));
        }
        let total = number(response.headers(), CONTENT_LENGTH);
        Ok(Whole { total, reader: response.into_body().into_reader() })
    }

    /// Runs `attempt` until it succeeds, is refused, or has failed on the way once more than allowed.
    pub(super) fn with_retries<T>(&self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let mut num_failures = 0;
        loop {
            match attempt() {
                Err(error)
                    if error.kind() == ErrorKind::Unavailable && num_failures < self.config.num_retries =>
                {
                    num_failures += 1;
                    self.wait(num_failures);
                }
                result => return result,
            }
        }
    }

    /// Waits before attempt number `num_failures + 1`.
    pub(super) fn wait(&self, num_failures: u32) {
        std::thread::sleep(self.delay(num_failures));
    }

    /// How long to wait before attempt number `num_failures + 1`, at most half a minute.
    pub(super) fn delay(&self, num_failures: u32) -> Duration {
        let factor = 2_u32.saturating_pow(num_failures.saturating_sub(1));
        self.config.retry_delay.saturating_mul(factor).min(Duration::from_secs(30))
    }

    fn resolve_address(&self, commit: &str, file: &str) -> Address {
        let repo = &self.model.repo;
        self.endpoint.below(&format!("/{repo}/resolve/{}/{}", encode(commit, b""), encode(file, b"/")))
    }

    fn follow(
        &self,
        method: &Method,
        mut address: Address,
        range: Option<&Range<u64>>,
    ) -> Result<(Response<Body>, Address)> {
        for _ in 0..=MAX_REDIRECTS {
            let response = self.call(method, &address, range)?;
            match self.redirection(&response, &address)? {
                Some(next) => address = next,
                None => return Ok((response, address)),
            }
        }
        Err(too_many_redirects(&address))
    }

    /// One request and its answer. The only place that sends the token.
    fn call(&self, method: &Method, address: &Address, range: Option<&Range<u64>>) -> Result<Response<Body>> {
        let send = |agent: &ureq::Agent| {
            let mut request = match *method {
                Method::HEAD => agent.head(address.as_str()),
                _ => agent.get(address.as_str()),
            };
            // Sizes and offsets are those of the file, so nothing may be compressed on the way.
            request = request.header(ACCEPT_ENCODING, "identity");
            if let Some(range) = range {
                request = request.header(RANGE, format!("bytes={}-{}", range.start, range.end - 1));
            }
            if let Some(token) = &self.config.token
                && address.is_same_origin(&self.endpoint)
            {
                request = request.header(AUTHORIZATION, format!("Bearer {}", token.secret()));
            }
            request.call()
        };
        self.agents.send(send).map_err(|error| self.unreachable(address, error))
    }

    fn redirection(&self, response: &Response<Body>, address: &Address) -> Result<Option<Address>> {
        if !response.status().is_redirection() {
            return Ok(None);
        }
        let next = text(response.headers(), LOCATION).and_then(|location| address.join(&location));
        match next {
            Some(next) if next.is_as_secure_as(address) => Ok(Some(next)),
            _ => Err(self.broken(address, &"a redirect to an address that cannot be used")),
        }
    }

    fn refused(&self, response: &Response<Body>, address: &Address, file: Option<&str>) -> Error {
        let asked = Asked {
            model: self.model,
            file,
            endpoint: &self.config.endpoint,
            token: self.config.token.as_ref(),
            host: address.host(),
            is_endpoint: address.is_same_origin(&self.endpoint),
        };
        refusal(&asked, response.status(), response.headers())
    }

    fn unreachable(&self, address: &Address, error: ureq::Error) -> Error {
        let host = address.host();
        let message = match &error {
            ureq::Error::Timeout(_) => {
                let seconds = match &error {
                    ureq::Error::Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => {
                        self.config.connect_timeout
                    }
                    _ => self.config.read_timeout,
                };
                format!("no answer from `{host}` within {seconds:?}")
            }
            ureq::Error::HostNotFound => format!("the host `{host}` cannot be found"),
            // This variant would show the whole address.
            ureq::Error::BadUri(_) => format!("the address at `{host}` is malformed"),
            error => format!("cannot reach `{host}`: {error}"),
        };
        let hint = if is_untrusted(&error) {
            "neither the certificate authorities in this program nor those of the system vouch for it; if a proxy \
             of your company opens the traffic, install its certificate in the system, or name its file in \
             SSL_CERT_FILE (Linux)"
        } else {
            "check the network, the proxy and HF_ENDPOINT; a model that has been downloaded runs without them"
        };
        let error = match error {
            ureq::Error::BadUri(_) => Error::new(ErrorKind::Unavailable, message),
            source => Error::new(ErrorKind::Unavailable, message).with_source(source),
        };
        error.with_hint(hint)
    }

    /// An answer that began well and then was not what HTTP promises.
    pub(super) fn broken(&self, address: &Address, what: &dyn std::fmt::Display) -> Error {
        Error::new(ErrorKind::Unavailable, format!("the answer of `{}` broke off: {what}", address.host()))
            .with_hint("try again: what has arrived is kept")
    }
}

const X_LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");
const X_LINKED_SIZE: HeaderName = HeaderName::from_static("x-linked-size");

fn text(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

fn number(headers: &HeaderMap, name: HeaderName) -> Option<u64> {
    text(headers, name)?.trim().parse().ok()
}

/// The bytes and the total of `bytes 5-9/10`; the total may be `*`.
fn content_range(headers: &HeaderMap) -> Option<(Range<u64>, Option<u64>)> {
    let value = text(headers, CONTENT_RANGE)?;
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let (start, last) = range.split_once('-')?;
    let end = last.trim().parse::<u64>().ok()?.checked_add(1)?;
    Some((start.trim().parse().ok()?..end, total.trim().parse().ok()))
}

/// The total of `bytes */10`.
fn unsatisfied_range(headers: &HeaderMap) -> Option<u64> {
    text(headers, CONTENT_RANGE)?.strip_prefix("bytes */")?.trim().parse().ok()
}

fn too_many_redirects(address: &Address) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("more than {MAX_REDIRECTS} redirects, the last one to `{}`", address.host()),
    )
    .with_hint("check HF_ENDPOINT")
}
