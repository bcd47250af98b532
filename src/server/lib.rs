//! The HTTP server: an OpenAI-compatible endpoint for the engine.
//!
//! Only this module serves HTTP, and only `error.rs` in it picks status codes. The engine's thread never
//! waits for a client: events come through a bounded channel (`generation.rs`), and the request of a client
//! that disconnects or stops reading is aborted. Everything that grows with client input has a limit:
//! connections, request heads, unfinished requests, and the lag of a stream. The memory of bodies, and of
//! everything that is read from them, is charged to one account (`account.rs`).

mod access;
mod account;
mod admission;
mod api;
mod auth;
mod body;
mod clients;
mod connection;
mod cors;
mod descriptors;
mod error;
mod generation;
mod half_closed;
mod history;
mod host;
mod http_counts;
mod ignored;
mod json;
mod keys;
mod kv_events;
mod memory;
mod metrics;
mod new_clients;
mod notices;
mod page;
mod path_in_body;
mod paths;
mod preparation;
mod repeated;
mod router;
mod schema_numbers;
mod signals;
mod state;
mod unanswerable;
mod values;

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

pub use access::{AccessLog, AccessRecord, TokenCounts};
pub use cors::Origin;
pub use kv_events::{KvEventsChoice, KvEventsConfig, zmtp};

use self::descriptors::Descriptors;
use self::keys::KeyRing;
use self::kv_events::KvEvents;
use self::notices::Notices;
use self::signals::{Signals, Wish};
use self::state::App;
use tinyvllm::chat::Chat;
use tinyvllm::llm::{Llm, LoadProgress};
use tinyvllm::{Error, Result};
use tinyvllm_kernels::keep_little_free_memory;

/// Threads that serve connections. They only pass data on; the engine needs the processors. With one thread,
/// all tokens of a step cost one wake-up: with eight clients on two processors, a token takes half the time
/// that it takes with two threads.
const NUM_WORKERS: usize = 1;
/// Threads that parse, render and tokenize.
const MAX_BLOCKING_THREADS: usize = 8;
/// Time to send the last bytes of answers.
const FLUSH_TIME: Duration = Duration::from_secs(2);
/// Time to end the engine where it keeps prefixes in files. It copies blocks for two seconds at most, and writes them.
const KEEP_TIME: Duration = Duration::from_secs(4);

/// The server's settings, named as the flags are.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The address to listen on.
    pub host: String,
    /// The port; 0 lets the system choose.
    pub port: u16,
    /// Names of the model in requests and answers. If empty, the model's own name.
    pub served_model_names: Vec<String>,
    /// API keys. Every request must have one of them, except requests to `/health` and the chat page. If
    /// empty, no key is needed.
    pub api_keys: Vec<String>,
    /// A file with further keys, one a line, and their weights. SIGHUP reloads it.
    pub api_key_file: Option<PathBuf>,
    /// Trust the client's name in a request, in `x-client-id` or `user`.
    pub trust_client_ids: bool,
    /// Origins of web pages that may use the server, in addition to its own.
    pub allowed_origins: Vec<Origin>,
    /// Refuse requests with fields that have no meaning here.
    pub strict_fields: bool,
    /// Longest body of a request.
    pub max_body_bytes: usize,
    /// Limit on the memory of all requests together, in bytes: what clients send, and the work on it.
    pub max_request_memory: usize,
    /// Sequences that may wait for the engine, in addition to the running ones.
    pub max_waiting: usize,
    /// Most connections at once.
    pub max_connections: usize,
    /// Most connections at once from one address.
    pub max_connections_per_address: usize,
    /// How events of the prefix cache are published; `None` for not at all.
    pub kv_events: Option<KvEventsConfig>,
    /// Number of requests whose outcome is kept.
    pub request_history: usize,
    /// Number of responses that are kept for each key, so that later requests can continue them; 0 for none.
    pub responses_memory: usize,
    /// Time for the head of a request to arrive, and for which a connection may be idle.
    pub header_timeout: Duration,
    /// Time for the body of a request to arrive.
    pub body_timeout: Duration,
    /// Time for which a client may read nothing of what is sent to it.
    pub write_timeout: Duration,
    /// Time for running requests to end after the server is stopped.
    pub shutdown_timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8_000,
            served_model_names: Vec::new(),
            api_keys: Vec::new(),
            api_key_file: None,
            trust_client_ids: false,
            allowed_origins: Vec::new(),
            strict_fields: false,
            max_body_bytes: 32 << 20,
            max_request_memory: 256 << 20,
            max_waiting: 256,
            max_connections: 4_096,
            max_connections_per_address: 1_024,
            kv_events: None,
            request_history: 1_000,
            responses_memory: 0,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(30),
            shutdown_timeout: Duration::from_secs(30),
        }
    }
}

impl ServerConfig {
    /// The default of [`Self::max_request_memory`] with this many free bytes: an eighth of them, at least 64
    /// MiB.
    #[must_use]
    pub fn usual_request_memory(free_bytes: u64) -> usize {
        account::default_bytes(free_bytes)
    }
}

/// Parses JSON as the server does. Returns also the bytes that were charged. The test of these charges has an
/// allocator that counts.
///
/// # Errors
/// If it is not JSON, or needs more than `limit` bytes.
#[doc(hidden)]
pub fn read_charged(text: &[u8], limit: usize) -> Result<(serde_json::Value, usize)> {
    let charge = account::Charge::new(&Arc::new(account::RequestMemory::new(limit)));
    let (read, charge) = account::charging(charge, || values::read(text));
    match read {
        Ok(value) => Ok((value, charge.num_bytes())),
        Err(error) => Err(Error::invalid_request(error::ApiError::from(error).body().to_string())),
    }
}

/// Unpacks a body as the server does, up to `limit` bytes. For fuzzing.
///
/// # Errors
/// If it is not gzip, or beyond a limit.
#[doc(hidden)]
pub fn unpack_body(packed: &[u8], limit: usize) -> Result<Vec<u8>> {
    let account = Arc::new(account::RequestMemory::new(4 * limit));
    let timeout = Duration::from_secs(60);
    let body = body::unpack(packed, limit, timeout, &account, tinyvllm::engine::ClientId::default());
    body.map(|body| body.bytes).map_err(|error| Error::invalid_request(error.body().to_string()))
}

/// How the server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It was stopped, and every answer was complete or ended with an error.
    Drained,
    /// It was stopped twice. Answers may be incomplete.
    AtOnce,
}

/// An event in the life of the server.
#[derive(Debug, Clone, Copy)]
pub enum Milestone<'a> {
    /// The model is loaded; with a summary of a line or two.
    Ready(&'a str),
    /// The server is stopping and waits for running requests.
    Draining,
    /// The keys were reloaded; with their number.
    KeysRead(usize),
    /// The keys could not be reloaded, and the old ones are still valid.
    KeysKept(&'a Error),
    /// The server ends before all prefixes are in files.
    PrefixesLost,
}

/// Stops a server, from any thread.
#[derive(Debug, Clone)]
pub struct StopHandle(mpsc::UnboundedSender<()>);

impl StopHandle {
    /// Acts like a signal: the first call drains the server, the second one stops it at once.
    pub fn stop(&self) {
        // A send fails only if the server has already stopped.
        let _ = self.0.send(());
    }
}

/// A server with a bound port. Binding comes first, so that a port in use is an error before the model is
/// loaded.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    config: ServerConfig,
    descriptors: Descriptors,
    keys: KeyRing,
    stop: mpsc::UnboundedSender<()>,
    stopped: mpsc::UnboundedReceiver<()>,
}

/// Loads the model and reports its progress.
pub type Loader = Box<dyn FnOnce(&dyn LoadProgress) -> Result<Llm> + Send>;

impl Server {
    /// Binds the port.
    ///
    /// # Errors
    /// If the address is not one of this machine, the port is in use, the keys cannot be read, or the process
    /// may have too few open files.
    pub fn bind(config: ServerConfig) -> Result<Self> {
        check(&config)?;
        let keys = KeyRing::open(&config.api_keys, config.api_key_file.as_deref())?;
        let address = format!("{}:{}", config.host, config.port);
        let failed = |source: std::io::Error| {
            let hint = match source.kind() {
                std::io::ErrorKind::AddrInUse => "another program has this port; choose one with --port",
                std::io::ErrorKind::PermissionDenied => {
                    "ports below 1024 need privileges; choose another one with --port"
                }
                _ => "--host must be an address or a name of this machine, such as 127.0.0.1 or 0.0.0.0",
            };
            Error::io(format_args!("cannot listen on {address}"), source).with_hint(hint)
        };
        let listener = TcpListener::bind((config.host.as_str(), config.port)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let descriptors = Descriptors::of(&config)?;
        let (stop, stopped) = mpsc::unbounded_channel();
        Ok(Self { listener, address, config, descriptors, keys, stop, stopped })
    }

    /// The address and port that it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the model's names, which may be known only after its files are downloaded: see
    /// [`ServerConfig::served_model_names`].
    pub fn set_names(&mut self, names: Vec<String>) {
        self.config.served_model_names = names;
    }

    /// Whether it has no keys and is reachable from other machines.
    #[must_use]
    pub fn is_open_to_others(&self) -> bool {
        self.keys.current().is_empty() && !self.address.ip().is_loopback()
    }

    /// A notice for the operator if the limits of connections were lowered.
    #[must_use]
    pub fn notice(&self) -> Option<&str> {
        self.descriptors.notice.as_deref()
    }

    /// A handle that stops the server.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle(self.stop.clone())
    }

    /// Serves requests until it is stopped (by SIGTERM, SIGINT or the handle), while `load` runs on its own
    /// thread. `on_milestone` is called on this thread.
    ///
    /// # Errors
    /// If the model cannot be loaded or the engine fails. Waiting requests are answered before.
    pub fn run(
        self,
        load: Loader,
        log: Arc<dyn AccessLog>,
        on_milestone: &mut dyn FnMut(Milestone<'_>),
    ) -> Result<Exit> {
        keep_little_free_memory();
        check_threads()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(NUM_WORKERS)
            .max_blocking_threads(MAX_BLOCKING_THREADS)
            .thread_name("tinyvllm-server")
            .enable_all()
            .build()
            .map_err(|source| Error::io("start the server's threads", source))?;
        let result = runtime.block_on(self.serve(load, log, on_milestone));
        // A load or a long prompt may still be running; do not wait for it.
        runtime.shutdown_background();
        result
    }

    async fn serve(
        mut self,
        load: Loader,
        log: Arc<dyn AccessLog>,
        on_milestone: &mut dyn FnMut(Milestone<'_>),
    ) -> Result<Exit> {
        let listen = |source| Error::io("listen for connections", source);
        let mut signals = Signals::new().map_err(listen)?;
        let listener = tokio::net::TcpListener::from_std(self.listener).map_err(listen)?;
        let is_on_loopback = self.address.ip().is_loopback();
        let kv_events = match &self.config.kv_events {
            Some(config) => {
                Some(KvEvents::bind(config, self.descriptors.budget.peers, Arc::clone(&log)).await?)
            }
            None => None,
        };
        let notices = Notices::new(Arc::clone(&log));
        let app = App::new(self.config.clone(), self.descriptors, self.keys, is_on_loopback, kv_events, log);
        let app = Arc::new(app);
        app.log_key_notice();
        let (close, closing) = watch::channel(false);
        let service = router::router(&app);
        tokio::spawn(connection::accept_all(listener, service, Arc::clone(&app), notices, closing.clone()));
        drop(closing);

        let (fail, mut failed) = mpsc::unbounded_channel::<String>();
        let mut loaded = start_loading(load, Arc::clone(&app), fail)?;
        let mut is_loading = true;
        let error = loop {
            tokio::select! {
                result = &mut loaded, if is_loading => match result {
                    Ok(Ok(summary)) => {
                        is_loading = false;
                        on_milestone(Milestone::Ready(&summary));
                    }
                    Ok(Err(error)) => return Err(error),
                    Err(_) => return Err(Error::internal("loading the model failed without a message")),
                },
                Some(message) = failed.recv() => break Some(message),
                wish = signals.next() => match wish {
                    Wish::Stop => break None,
                    // The file may be on a drive that does not respond.
                    Wish::ReadKeys => tokio::select! {
                        () = read_keys(&app, on_milestone) => {}
                        () = signals.stop() => break None,
                        Some(()) = self.stopped.recv() => break None,
                    },
                },
                Some(()) = self.stopped.recv() => break None,
            }
        };
        let exit = match &error {
            Some(message) => {
                // The engine has ended its requests with this message. Their answers are sent now.
                app.set_failure(message);
                let _ = tokio::time::timeout(FLUSH_TIME, app.idle()).await;
                Exit::Drained
            }
            None => {
                app.start_draining();
                on_milestone(Milestone::Draining);
                tokio::select! {
                    () = drain(&app) => Exit::Drained,
                    () = signals.stop() => Exit::AtOnce,
                    Some(()) = self.stopped.recv() => Exit::AtOnce,
                }
            }
        };
        if exit == Exit::Drained {
            // No more connections are accepted. Idle ones close at once, others after the answer that they
            // send.
            let _ = close.send(true);
            let _ = tokio::time::timeout(FLUSH_TIME, close.closed()).await;
            tokio::select! {
                () = keep_prefixes(&app, on_milestone) => {}
                () = signals.stop(), if error.is_none() => return Ok(Exit::AtOnce),
            }
        }
        match error {
            Some(message) => Err(Error::internal(message).with_hint("start the server again")),
            None => Ok(exit),
        }
    }
}

/// Fails if the system starts no thread. The runtime does not report this error for the threads that serve
/// connections.
fn check_threads() -> Result<()> {
    let failed = |source| {
        Error::io("start a thread", source).with_hint("allow more threads (ulimit -u) or memory (ulimit -v)")
    };
    // The thread does nothing that could fail.
    let _ = std::thread::Builder::new().spawn(|| ()).map_err(failed)?.join();
    Ok(())
}

/// Reloads the keys, for new requests; running ones continue.
async fn read_keys(app: &Arc<App>, on_milestone: &mut dyn FnMut(Milestone<'_>)) {
    if !app.keys.has_file() {
        let error = Error::invalid_request("the server has no key file to reload")
            .with_hint("give keys in a file with --api-key-file");
        return on_milestone(Milestone::KeysKept(&error));
    }
    let reader = Arc::clone(app);
    // The file may be on a slow network drive.
    let result = tokio::task::spawn_blocking(move || reader.keys.read()).await;
    match result.unwrap_or_else(|_| Err(Error::internal("reloading the keys failed without a message"))) {
        Ok(num_keys) => {
            app.log_key_notice();
            on_milestone(Milestone::KeysRead(num_keys));
        }
        Err(error) => on_milestone(Milestone::KeysKept(&error)),
    }
}

/// Waits for running requests, and ends them after the time limit.
async fn drain(app: &Arc<App>) {
    if tokio::time::timeout(app.config.shutdown_timeout, app.idle()).await.is_ok() {
        return;
    }
    if let Some(model) = app.model().cloned() {
        let seconds = body::whole_seconds(app.config.shutdown_timeout);
        let error = Error::internal(format!(
            "the server is shutting down and the answer was not complete after {seconds} s"
        ));
        // Waits for the end of a step, which can be long.
        let _ = tokio::task::spawn_blocking(move || model.llm.engine().fail_all(error)).await;
    }
    let _ = tokio::time::timeout(FLUSH_TIME, app.idle()).await;
}

/// Waits until the prefixes are in files. Tasks that are ending may hold the engine longer than this process lives.
async fn keep_prefixes(app: &App, on_milestone: &mut dyn FnMut(Milestone<'_>)) {
    let Some(model) = app.model().cloned() else { return };
    if model.llm.engine().latest_stats().prefix_store.is_none() {
        return;
    }
    let ended = tokio::task::spawn_blocking(move || model.llm.engine().shut_down());
    if tokio::time::timeout(KEEP_TIME, ended).await.is_err() {
        on_milestone(Milestone::PrefixesLost);
    }
}

/// Loads the model on its own thread. Sends its summary when it is ready for requests.
fn start_loading(
    load: Loader,
    app: Arc<App>,
    fail: mpsc::UnboundedSender<String>,
) -> Result<tokio::sync::oneshot::Receiver<Result<String>>> {
    let (done, loaded) = tokio::sync::oneshot::channel();
    let work = move || {
        let result = load(app.loading()).and_then(|llm| {
            let notices = llm.notices().iter().map(|notice| format!("note: {notice}"));
            let formats = llm.chat_format().map(Chat::formats);
            let lines =
                [Some(llm.summary()), llm.expert_summary(), formats].into_iter().flatten().chain(notices);
            let summary = lines.collect::<Vec<_>>().join("\n");
            llm.engine().on_failure(move |error| {
                // The receiver is gone only if the server has ended.
                let _ = fail.send(error.to_string());
            });
            if let Some(events) = &app.kv_events {
                if !llm.engine().config().enable_prefix_caching {
                    let message = "--kv-events-config publishes events of the prefix cache, which \
                                   --no-enable-prefix-caching turns off";
                    return Err(Error::invalid_request(message).with_hint("omit one of the two"));
                }
                // No request has come yet.
                llm.engine().watch_cache(events.listener())?;
            }
            app.set_model(llm);
            Ok(summary)
        });
        let _ = done.send(result);
    };
    std::thread::Builder::new()
        .name("tinyvllm-load".to_owned())
        .spawn(work)
        .map_err(|source| Error::io("start the loading thread", source))?;
    Ok(loaded)
}

/// With less, a server would refuse everything.
const MIN_BODY_BYTES: usize = 1 << 10;

fn check(config: &ServerConfig) -> Result<()> {
    let limits = [
        ("--max-connections", config.max_connections),
        ("--max-connections-per-address", config.max_connections_per_address),
    ];
    for (flag, limit) in limits {
        if limit == 0 {
            return Err(Error::invalid_request(format!("{flag} is 0; it must be at least 1")));
        }
    }
    let timeouts = [
        ("--header-timeout", config.header_timeout),
        ("--body-timeout", config.body_timeout),
        ("--write-timeout", config.write_timeout),
    ];
    if let Some((flag, _)) = timeouts.iter().find(|(_, timeout)| timeout.is_zero()) {
        return Err(Error::invalid_request(format!("{flag} is 0; it must be more than 0 seconds")));
    }
    if config.max_body_bytes < MIN_BODY_BYTES {
        let message = format!(
            "--max-body-bytes is {}; it must be at least {MIN_BODY_BYTES}, for a short request",
            config.max_body_bytes
        );
        return Err(Error::invalid_request(message));
    }
    if config.max_request_memory < account::MIN_BYTES {
        return Err(Error::invalid_request(format!(
            "--max-request-memory is {}; it must be at least {}",
            config.max_request_memory,
            account::MIN_BYTES
        )));
    }
    Ok(())
}
