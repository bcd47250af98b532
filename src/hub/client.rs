//! Talks to the Hub: which files a revision has, what a file's data is called, and the data itself.
//!
//! Invariants: the token goes to the origin (scheme, host and port) of the configured endpoint and to
//! no other, so redirects are followed here and not by the HTTP library; no wait is without end; and
//! every failure is an [`Error`] whose kind tells apart what can be tried again
//! ([`ErrorKind::Unavailable`]) from what cannot. Addresses never appear in messages as a whole,
//! because the ones of storage hosts carry signatures. This file knows nothing of the disk.

use std::time::Duration;

use serde::Deserialize;
use ureq::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, LOCATION, RANGE,
};
use ureq::http::{HeaderMap, HeaderName, Method, Response, StatusCode};
use ureq::{Agent, Body, BodyReader};

use super::address::{Address, encode};
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

/// The data of a file from some byte on.
pub(super) struct Data {
    /// Offset in bytes of the first byte; 0 if the server cannot begin in the middle.
    pub(super) start: u64,
    /// Size of the whole file in bytes.
    pub(super) total: Option<u64>,
    pub(super) reader: BodyReader<'static>,
}

/// A connection to the Hub on behalf of one model.
#[derive(Debug)]
pub(super) struct Client<'a> {
    agent: Agent,
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
        let mut agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("tinyvllm/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(config.connect_timeout))
            .timeout_connect(Some(config.connect_timeout))
            .timeout_send_request(Some(config.read_timeout))
            .timeout_recv_response(Some(config.read_timeout))
            .timeout_per_read(Some(config.read_timeout));
        if !config.proxy_from_env {
            agent = agent.proxy(None);
        }
        Ok(Self { agent: agent.build().new_agent(), config, model, endpoint })
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

    /// The data of a file from byte `from` on.
    pub(super) fn data(&self, commit: &str, file: &str, from: u64) -> Result<Data> {
        let (response, address) =
            self.follow(&Method::GET, self.resolve_address(commit, file), (from > 0).then_some(from))?;
        let (start, total) = match response.status() {
            StatusCode::RANGE_NOT_SATISFIABLE if from > 0 => return self.data(commit, file, 0),
            StatusCode::PARTIAL_CONTENT => {
                let (start, total) = content_range(response.headers())
                    .ok_or_else(|| self.broken(&address, &"a part of the file without saying which part"))?;
                if start != from {
                    return Err(self.broken(&address, &"another part of the file than asked for"));
                }
                (start, total)
            }
            StatusCode::OK => (0, number(response.headers(), CONTENT_LENGTH)),
            _ => return Err(self.refused(&response, &address, Some(file))),
        };
        Ok(Data { start, total, reader: response.into_body().into_reader() })
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

    /// Waits before attempt number `num_failures + 1`, at most half a minute.
    pub(super) fn wait(&self, num_failures: u32) {
        let factor = 2_u32.saturating_pow(num_failures.saturating_sub(1));
        std::thread::sleep(self.config.retry_delay.saturating_mul(factor).min(Duration::from_secs(30)));
    }

    fn resolve_address(&self, commit: &str, file: &str) -> Address {
        let repo = &self.model.repo;
        self.endpoint.below(&format!("/{repo}/resolve/{}/{}", encode(commit, b""), encode(file, b"/")))
    }

    fn follow(
        &self,
        method: &Method,
        mut address: Address,
        from: Option<u64>,
    ) -> Result<(Response<Body>, Address)> {
        for _ in 0..=MAX_REDIRECTS {
            let response = self.call(method, &address, from)?;
            match self.redirection(&response, &address)? {
                Some(next) => address = next,
                None => return Ok((response, address)),
            }
        }
        Err(too_many_redirects(&address))
    }

    /// One request and its answer. The only place that sends the token.
    fn call(&self, method: &Method, address: &Address, from: Option<u64>) -> Result<Response<Body>> {
        let mut request = match *method {
            Method::HEAD => self.agent.head(address.as_str()),
            _ => self.agent.get(address.as_str()),
        };
        // Sizes and offsets are those of the file, so nothing may be compressed on the way.
        request = request.header(ACCEPT_ENCODING, "identity");
        if let Some(from) = from {
            request = request.header(RANGE, format!("bytes={from}-"));
        }
        if let Some(token) = &self.config.token
            && address.is_same_origin(&self.endpoint)
        {
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.secret()));
        }
        request.call().map_err(|error| self.unreachable(address, error))
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
        let error = match error {
            ureq::Error::BadUri(_) => Error::new(ErrorKind::Unavailable, message),
            source => Error::new(ErrorKind::Unavailable, message).with_source(source),
        };
        error.with_hint(
            "check the network, the proxy and HF_ENDPOINT; a model that has been downloaded runs without them",
        )
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

/// Start and total of `bytes 5-9/10`; the total may be `*`.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let value = text(headers, CONTENT_RANGE)?;
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    Some((start.trim().parse().ok()?, total.trim().parse().ok()))
}

fn too_many_redirects(address: &Address) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("more than {MAX_REDIRECTS} redirects, the last one to `{}`", address.host()),
    )
    .with_hint("check HF_ENDPOINT")
}
