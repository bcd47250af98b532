//! The state that all requests share: the model after it is loaded, the limits, and the state of the server.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::account::RequestMemory;
use super::admission::{AdmissionControl, Permit};
use super::clients::{Client, Clients};
use super::descriptors::Descriptors;
use super::error::ApiError;
use super::history::History;
use super::http_counts::HttpCounts;
use super::ignored::LoggedNames;
use super::keys::KeyRing;
use super::kv_events::KvEvents;
use super::memory::Memory;
use super::metrics::Metrics;
use super::preparation::Preparation;
use super::{AccessLog, ServerConfig};
use tinyvllm::llm::{Llm, LoadProgress};

/// Stored responses may take the request memory divided by this, in addition to it.
const STORED_DIVISOR: usize = 4;
/// Delay of a refusal. It is part of the second after which a client may try again.
const REFUSAL_TIME: Duration = Duration::from_millis(250);
/// Steps that must fail in a row before the server reports itself unhealthy.
const MAX_FAILED_STEPS: u32 = 3;

/// The server's state.
pub(super) struct App {
    pub(super) config: ServerConfig,
    /// The limits of connections.
    pub(super) descriptors: Descriptors,
    /// Whether only this machine can reach it.
    pub(super) is_on_loopback: bool,
    pub(super) log: Arc<dyn AccessLog>,
    /// The memory account of requests.
    pub(super) request_memory: Arc<RequestMemory>,
    /// The queue before the engine.
    pub(super) preparation: Preparation,
    admission: AdmissionControl,
    pub(super) keys: KeyRing,
    /// The publisher of prefix-cache events, if there is one.
    pub(super) kv_events: Option<KvEvents>,
    pub(super) clients: Clients,
    pub(super) history: History,
    /// Stored responses.
    pub(super) memory: Memory,
    pub(super) http: HttpCounts,
    logged: LoggedNames,
    logged_dropped: LoggedNames,
    loading: Loading,
    model: OnceLock<Arc<Model>>,
    is_draining: AtomicBool,
    failure: OnceLock<String>,
    /// Number of requests whose answer is not complete.
    num_active: watch::Sender<usize>,
}

/// A loaded model and its names.
pub(super) struct Model {
    pub(super) llm: Llm,
    pub(super) metrics: Metrics,
    /// The names that it answers to; the first one is used in answers.
    pub(super) names: Vec<String>,
    /// When it was loaded, in seconds since 1970.
    pub(super) created: u64,
    /// A text with more bytes than this cannot fit into the model's context, in any tokens.
    pub(super) max_text_bytes: usize,
}

impl App {
    pub(super) fn new(
        config: ServerConfig,
        descriptors: Descriptors,
        keys: KeyRing,
        is_on_loopback: bool,
        kv_events: Option<KvEvents>,
        log: Arc<dyn AccessLog>,
    ) -> Self {
        Self {
            request_memory: Arc::new(RequestMemory::new(config.max_request_memory)),
            preparation: Preparation::new(),
            admission: AdmissionControl::new(config.max_waiting),
            keys,
            kv_events,
            clients: Clients::new(config.trust_client_ids),
            history: History::new(config.request_history),
            memory: Memory::new(config.responses_memory, config.max_request_memory / STORED_DIVISOR),
            http: HttpCounts::default(),
            logged: LoggedNames::default(),
            logged_dropped: LoggedNames::default(),
            config,
            descriptors,
            is_on_loopback,
            log,
            loading: Loading::default(),
            model: OnceLock::new(),
            is_draining: AtomicBool::new(false),
            failure: OnceLock::new(),
            num_active: watch::Sender::new(0),
        }
    }

    /// Whether one user owns everything in the cache: the user of this machine if there are no keys,
    /// otherwise the owner of the only key that was ever valid.
    pub(super) fn has_one_user(&self) -> bool {
        match self.keys.current().num_known() {
            0 => self.is_on_loopback && !self.config.trust_client_ids,
            num_keys => num_keys == 1 && !self.config.trust_client_ids,
        }
    }

    /// Logs what is remarkable about the key file that was read last.
    pub(super) fn log_key_notice(&self) {
        if let Some(notice) = self.keys.take_notice() {
            self.log.notice(&notice);
        }
    }

    /// The model, if it is loaded.
    pub(super) fn model(&self) -> Option<&Arc<Model>> {
        self.model.get()
    }

    /// The model, for a request that needs it.
    ///
    /// # Errors
    /// 503 while it is being loaded, after a failure, and while the server shuts down.
    pub(super) fn ready(&self) -> Result<Arc<Model>, ApiError> {
        if let Some(failure) = self.failure.get() {
            return Err(ApiError::unavailable(failure));
        }
        if self.is_draining() {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        self.model.get().cloned().ok_or_else(|| ApiError::unavailable("Loading model"))
    }

    /// Logs, once for each name, that these fields are ignored.
    ///
    /// # Errors
    /// 400 with `--strict-fields`.
    pub(super) fn log_ignored(&self, names: &[String]) -> Result<(), ApiError> {
        if let (Some(first), true) = (names.first(), self.config.strict_fields) {
            let (verb, them) = if names.len() == 1 { ("has", "it") } else { ("have", "them") };
            let names = names.join(", ");
            let message = format!("{names} {verb} no effect here (--strict-fields); omit {them}");
            return Err(ApiError::unsupported(first.clone(), message));
        }
        if let Some(message) = self.logged.notice(names) {
            self.log.notice(&message);
        }
        Ok(())
    }

    /// Logs, once for each name, that these bytes and characters of prompts are dropped.
    pub(super) fn log_dropped(&self, names: &[String]) {
        if let Some(message) = self.logged_dropped.dropped_notice(names) {
            self.log.notice(&message);
        }
    }

    /// Refuses a request before its body is read, if no permit is free.
    ///
    /// # Errors
    /// 429 if none is free.
    pub(super) async fn check_permit(&self, model: &Model, client: &Client) -> Result<(), ApiError> {
        let running = model.llm.engine().config().max_num_seqs;
        delayed(self.admission.check(running, client, 1)).await
    }

    /// A permit for a request whose body is there and was not converted yet.
    ///
    /// # Errors
    /// 429 if none is free.
    pub(super) async fn take_permit(&self, model: &Model, client: &Client) -> Result<Vec<Permit>, ApiError> {
        delayed(self.take_permits(model, client, 1)).await
    }

    /// Permits for `num_sequences` sequences of this client.
    ///
    /// # Errors
    /// 429 if too few are free, 400 if there are too few in all.
    pub(super) fn take_permits(
        &self,
        model: &Model,
        client: &Client,
        num_sequences: usize,
    ) -> Result<Vec<Permit>, ApiError> {
        self.admission.take(model.llm.engine().config().max_num_seqs, client, num_sequences)
    }

    pub(super) fn loading(&self) -> &Loading {
        &self.loading
    }

    pub(super) fn set_model(&self, llm: Llm) {
        let names = match self.config.served_model_names.as_slice() {
            [] => vec![llm.name().to_owned()],
            names => names.to_vec(),
        };
        let max_model_len = llm.engine().config().max_model_len;
        let model = Model {
            metrics: Metrics::new(&names[0], max_model_len),
            names,
            created: unix_seconds(),
            max_text_bytes: llm.max_text_bytes(),
            llm,
        };
        // A server loads once.
        let _ = self.model.set(Arc::new(model));
    }

    pub(super) fn set_failure(&self, message: &str) {
        // The first failure causes the others.
        let _ = self.failure.set(message.to_owned());
    }

    pub(super) fn start_draining(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// The answer of `/health`, and whether the server is healthy.
    pub(super) fn health(&self) -> (bool, Value) {
        if let Some(failure) = self.failure.get() {
            return (false, json!({"status": "failed", "message": failure}));
        }
        if self.is_draining() {
            return (false, json!({"status": "shutting down"}));
        }
        let Some(model) = self.model.get() else {
            let (stage, progress) = self.loading.read();
            return (false, json!({"status": "loading", "stage": stage, "progress": progress}));
        };
        let num_failed = model.llm.engine().latest_stats().num_failed_steps_in_a_row;
        if num_failed >= MAX_FAILED_STEPS {
            let message = format!("the last {num_failed} steps failed");
            return (false, json!({"status": "failed", "message": message}));
        }
        (true, json!({"status": "ok"}))
    }

    /// Counts a request as active until the guard is dropped.
    pub(super) fn enter(self: &Arc<Self>) -> Active {
        self.num_active.send_modify(|count| *count += 1);
        Active(Arc::clone(self))
    }

    /// Returns when no request is active.
    pub(super) async fn idle(&self) {
        // The sender lives as long as `self`.
        let _ = self.num_active.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// Delays a refusal. Clients that retry at once would otherwise occupy the thread that serves all clients.
async fn delayed<T>(result: Result<T, ApiError>) -> Result<T, ApiError> {
    if result.is_err() {
        tokio::time::sleep(REFUSAL_TIME).await;
    }
    result
}

/// A request that is being answered.
pub(super) struct Active(Arc<App>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.num_active.send_modify(|count| *count -= 1);
    }
}

/// The progress of loading.
#[derive(Debug, Default)]
pub(super) struct Loading {
    stage: Mutex<String>,
    done: AtomicU64,
    total: AtomicU64,
    compiled: AtomicU64,
    kernels: AtomicU64,
}

impl Loading {
    /// The current stage and its progress. After the last stage, kernels are compiled.
    fn read(&self) -> (String, f64) {
        let read = |done: &AtomicU64, total: &AtomicU64| {
            let total = total.load(Ordering::Relaxed);
            (done.load(Ordering::Relaxed).min(total), total)
        };
        let (stage_done, stage_total) = read(&self.done, &self.total);
        let (compiled, kernels) = read(&self.compiled, &self.kernels);
        let share = |done: u64, total: u64| (done as f64 / total.max(1) as f64 * 1e3).round() / 1e3;
        if stage_done == stage_total && compiled < kernels {
            return ("compiling kernels".to_owned(), share(compiled, kernels));
        }
        let stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (stage, share(stage_done, stage_total))
    }
}

impl LoadProgress for Loading {
    fn begin(&self, stage: &str, total: u64) {
        stage.clone_into(&mut self.stage.lock().unwrap_or_else(PoisonError::into_inner));
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn end(&self) {
        self.done.store(self.total.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn compiling(&self, num_done: usize, num_kernels: usize) {
        self.compiled.store(num_done as u64, Ordering::Relaxed);
        self.kernels.store(num_kernels as u64, Ordering::Relaxed);
    }
}

/// The wall clock, only for what clients display.
pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
