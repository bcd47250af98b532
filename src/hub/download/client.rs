//! The client of the Hub: lists the files of a revision, gets the name of a file's content, and fetches its data.
//!
//! Invariants: the token goes only to the origin (scheme, host and port) of the configured endpoint, so redirects are
//! followed here and not by the HTTP library; every wait is bounded; and every failure is an [`Error`] whose kind
//! distinguishes errors that are worth a retry ([`ErrorKind::Unavailable`]) from others. Messages never have complete
//! addresses, because those of storage hosts carry signatures. This file does not use the disk.

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
use super::refusal::{Asked, refusal};
use crate::hub::cache::is_path_word;
use crate::hub::config::HubConfig;
use crate::hub::source::HubModel;
use crate::{Error, ErrorKind, Result};

const MAX_REDIRECTS: usize = 10;

/// The Hub's data about a revision.
#[derive(Debug)]
pub(super) struct RepoInfo {
    /// The commit of the revision.
    pub(super) commit: String,
    /// All files of the commit.
    pub(super) files: Vec<String>,
}

/// The Hub's data about a file.
#[derive(Debug)]
pub(super) struct FileMetadata {
    /// A name for the content, safe as a file name.
    pub(super) etag: String,
    /// Size in bytes.
    pub(super) size: Option<u64>,
}

/// The answer to a request for some bytes of a file.
pub(super) enum Answer {
    RangeBody(RangeBody),
    /// The server sends the file from its first byte on, for any range.
    Whole,
    /// The range is past the end: the file has only this many bytes, if the server reports it.
    Beyond(Option<u64>),
}

/// Bytes from the first requested one on.
pub(super) struct RangeBody {
    /// Their number; never more than requested.
    pub(super) num_bytes: u64,
    /// Size of the whole file in bytes.
    pub(super) total: Option<u64>,
    /// The content's name on the host that sends the bytes, with the name of the host.
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
    /// The pause that the server requests, if it sends one.
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
                "the token from {} has characters that a token cannot have",
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
            .map_err(|error| garbled(format!("did not answer like the Hub: {error}")))?;
        if !is_path_word(&info.sha) {
            return Err(garbled("named an invalid commit".to_owned()));
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

    /// The bytes `range` of a file. `storage` is the file's last host; if it refuses, because signed addresses expire,
    /// the Hub's current one replaces it.
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
            .ok_or_else(|| self.broken(address, &"a range of the file without its position"))?;
        let num_bytes = sent.end.saturating_sub(sent.start);
        let is_as_long_as_it_says = number(headers, CONTENT_LENGTH).is_none_or(|length| length == num_bytes);
        if sent.start != range.start || num_bytes == 0 || sent.end > range.end || !is_as_long_as_it_says {
            return Err(self.broken(address, &"another range of the file than requested").into());
        }
        let etag = text(headers, ETAG).map(|etag| (address.host().to_owned(), etag));
        Ok(Answer::RangeBody(RangeBody {
            num_bytes,
            total,
            etag,
            reader: response.into_body().into_reader(),
        }))
    }

    /// A file from its first byte on, from a server that does not support ranges.
    pub(super) fn whole(&self, commit: &str, file: &str) -> Result<Whole> {
        let (response, address) = self.follow(&Method::GET, self.resolve_address(commit, file), None)?;
        if response.status() != StatusCode::OK {
            return Err(self.refused(&response, &address, Some(file)));
        }
        let total = number(response.headers(), CONTENT_LENGTH);
        Ok(Whole { total, reader: response.into_body().into_reader() })
    }

    /// Runs `attempt` until it succeeds, is refused, or has failed in transit more often than allowed.
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

    /// One request and its answer. The only function that sends the token.
    fn call(&self, method: &Method, address: &Address, range: Option<&Range<u64>>) -> Result<Response<Body>> {
        let send = |agent: &ureq::Agent| {
            let mut request = match *method {
                Method::HEAD => agent.head(address.as_str()),
                _ => agent.get(address.as_str()),
            };
            // Sizes and offsets are those of the file, so compression in transit is disabled.
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

    /// A response that began well and then violated HTTP.
    pub(super) fn broken(&self, address: &Address, what: &dyn std::fmt::Display) -> Error {
        Error::new(ErrorKind::Unavailable, format!("the answer of `{}` broke off: {what}", address.host()))
            .with_hint("try again: the downloaded bytes are kept")
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
