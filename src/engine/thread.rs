//! The engine's thread: the one owner of all state.
//!
//! It runs commands and steps, and passes events to sinks that never block. It publishes state for other threads: the
//! latest totals, and the reason of a failure.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::sink::{EventSink, OnAccepted, OnCacheEvents};
use super::{EngineCore, EngineStats, Event, Request, RequestId};
use crate::{Error, Result};

/// The maximum sleep of the thread while prefixes are read from files.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

/// And while blocks wait for files that take none at the moment.
const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// Commands for the engine's thread.
pub(super) enum Command {
    /// Where no caller waits for the answer, a refusal is an event like others.
    Submit {
        id: RequestId,
        request: Box<Request>,
        sink: Box<dyn EventSink>,
        on_accepted: Option<OnAccepted>,
    },
    Abort {
        id: RequestId,
        index: Option<usize>,
    },
    FailAll {
        error: Error,
    },
    Stats {
        reply: SyncSender<EngineStats>,
    },
    WatchCache {
        listener: OnCacheEvents,
    },
    /// The awaited result of a step has arrived.
    GoOn,
    Shutdown,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Submit { .. } => "Submit",
            Self::Abort { .. } => "Abort",
            Self::FailAll { .. } => "FailAll",
            Self::Stats { .. } => "Stats",
            Self::WatchCache { .. } => "WatchCache",
            Self::GoOn => "GoOn",
            Self::Shutdown => "Shutdown",
        })
    }
}

type OnFailure = Box<dyn FnOnce(&Error) + Send>;

/// State that any thread may read.
#[derive(Default)]
pub(super) struct Board {
    stats: Mutex<EngineStats>,
    failure: Mutex<Failure>,
}

#[derive(Default)]
struct Failure {
    error: Option<Arc<Error>>,
    listeners: Vec<OnFailure>,
}

impl std::fmt::Debug for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Board").field("failure", &self.failure().error).finish_non_exhaustive()
    }
}

impl Board {
    /// The totals after the latest step.
    pub(super) fn stats(&self) -> EngineStats {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `listener` when the engine fails; at once if it has.
    pub(super) fn on_failure(&self, listener: OnFailure) {
        let mut failure = self.failure();
        match failure.error.clone() {
            None => failure.listeners.push(listener),
            Some(error) => {
                drop(failure);
                listener(&error);
            }
        }
    }

    fn publish(&self, stats: EngineStats) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }

    /// Whether the engine has failed and accepts no requests.
    pub(super) fn has_failed(&self) -> bool {
        self.failure().error.is_some()
    }

    fn refuse(&self, error: Error) {
        self.failure().error = Some(Arc::new(error));
    }

    fn report_failure(&self) {
        let mut failure = self.failure();
        let (error, listeners) = (failure.error.clone(), std::mem::take(&mut failure.listeners));
        drop(failure);
        if let Some(error) = error {
            listeners.into_iter().for_each(|listener| listener(&error));
        }
    }

    fn failure(&self) -> MutexGuard<'_, Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct EngineThread {
    core: EngineCore,
    sinks: HashMap<RequestId, Box<dyn EventSink>>,
    board: Arc<Board>,
    cache_listener: Option<OnCacheEvents>,
}

impl EngineThread {
    /// `commands` is the way back to this thread.
    pub(super) fn new(mut core: EngineCore, board: Arc<Board>, commands: SyncSender<Command>) -> Self {
        core.keep_pace();
        // A full queue has a command that wakes the thread.
        core.on_mask(move || drop(commands.try_send(Command::GoOn)));
        board.publish(core.stats());
        Self { core, sinks: HashMap::new(), board, cache_listener: None }
    }

    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| self.serve(commands)));
        let failure = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(failure)) => Some(failure),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown cause");
                Some(format!("the engine failed: {text}"))
            }
        };
        let message = failure.as_deref().unwrap_or("the engine was shut down");
        if failure.is_some() {
            // A client that retries gets the same answer.
            self.board.refuse(Error::internal(message));
        }
        let events = self.core.fail_all(&Error::internal(message));
        self.deliver(events);
        if failure.is_none() {
            self.core.keep_rest();
        }
        self.board.publish(self.core.stats());
        if failure.is_some() {
            self.board.report_failure();
        }
    }

    /// Returns at the command, or with the reason why it cannot continue.
    fn serve(&mut self, commands: &Receiver<Command>) -> Result<(), String> {
        loop {
            self.board.publish(self.core.stats());
            let is_idle = !self.core.has_unfinished();
            let is_keeping = is_idle && self.core.keep_while_idle();
            if is_idle && !is_keeping {
                let inconsistent = |violation| format!("the engine's state is inconsistent: {violation}");
                self.core.check_integrity().map_err(inconsistent)?;
            }
            if !is_keeping && (is_idle || self.core.sleep()) {
                // A disk that does not respond does not block the end for ever.
                let command = match (self.core.has_restores(), is_idle && self.core.waits_for_tiers()) {
                    (true, _) => commands.recv_timeout(LONGEST_SLEEP),
                    (false, true) => commands.recv_timeout(LONGEST_WAIT),
                    (false, false) => commands.recv().map_err(RecvTimeoutError::from),
                };
                match command {
                    Ok(command) => {
                        if !self.obey(command) {
                            return Ok(());
                        }
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            }
            loop {
                match commands.try_recv() {
                    Ok(command) => {
                        if !self.obey(command) {
                            return Ok(());
                        }
                    }
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return Ok(()),
                }
            }
            self.give_up_unread();
            let events = self.core.take_masks();
            self.deliver(events);
            let events = self.core.step_with_masks();
            // Before the events, so that a client that has one finds it in the totals and among the batches.
            self.board.publish(self.core.stats());
            self.report_cache_changes();
            self.deliver(events);
            if let Some(error) = self.core.lost_device() {
                return Err(format!("the device is lost: {error}"));
            }
        }
    }

    /// Carries out a command; false means stop.
    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Submit { id, request, sink, on_accepted } => {
                let num_sequences = request.params.n;
                match (self.core.submit_as(id, *request), on_accepted) {
                    (Ok(()), on_accepted) => {
                        self.sinks.insert(id, sink);
                        on_accepted.into_iter().for_each(|on_accepted| on_accepted(Ok(id)));
                    }
                    (Err(error), Some(on_accepted)) => on_accepted(Err(error)),
                    (Err(error), None) => refuse(sink, num_sequences, &error),
                }
            }
            Command::Abort { id, index } => {
                let events = self.core.abort(id, index);
                self.deliver(events);
            }
            Command::FailAll { error } => {
                let events = self.core.fail_all(&error);
                self.deliver(events);
            }
            Command::Stats { reply } => {
                // The caller may have gone.
                let _ = reply.send(self.core.stats());
            }
            Command::WatchCache { listener } => {
                self.core.record_cache_events();
                self.cache_listener = Some(listener);
            }
            Command::GoOn => {}
            Command::Shutdown => return false,
        }
        true
    }

    fn report_cache_changes(&mut self) {
        if let Some(listener) = &mut self.cache_listener {
            let events = self.core.take_cache_events();
            if !events.is_empty() {
                listener(events);
            }
        }
    }

    fn give_up_unread(&mut self) {
        let core = &mut self.core;
        self.sinks.retain(|id, sink| {
            let is_closed = sink.is_closed();
            if is_closed {
                core.abort(*id, None);
            }
            !is_closed
        });
    }

    fn deliver(&mut self, events: Vec<(RequestId, Event)>) {
        for (id, event) in events {
            let Some(sink) = self.sinks.get_mut(&id) else { continue };
            if !sink.send(event) {
                self.sinks.remove(&id);
                self.core.abort(id, None);
            }
        }
        if !self.core.has_unfinished() {
            self.sinks.clear();
        } else {
            self.sinks.retain(|id, _| self.core.is_unfinished(*id));
        }
    }
}

/// Ends all sequences of a request that is not taken.
fn refuse(mut sink: Box<dyn EventSink>, num_sequences: usize, error: &Error) {
    for index in 0..num_sequences {
        if !sink.send(Event::failed(index, error)) {
            return;
        }
    }
}
