//! The engine on its own thread.
//!
//! One thread owns all state. Commands reach it through a bounded channel as a closed enum; events
//! leave through a sink per request that never waits, so the engine never waits for a reader. A request
//! whose reader is gone is aborted before the next step. All commands that are there are obeyed before a step, so
//! requests that were submitted while another one ran join the next one together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::thread::JoinHandle;

use super::channel::{EventReceiver, channel};
use super::sink::{EventSink, OnAccepted, OnCacheEvents};
use super::thread::{Board, Command, EngineThread};
use super::{EngineCore, EngineStats, Event, ModelLimits, Request, RequestId};
use crate::config::EngineConfig;
use crate::{Error, ErrorKind, Result};

/// Commands that may wait for the engine to finish its step: more than the requests that a server accepts by
/// default, so that one client leaves space for others.
const COMMAND_QUEUE: usize = 2_048;

/// A running engine. Dropping it ends all requests.
#[derive(Debug)]
pub struct Engine {
    commands: SyncSender<Command>,
    config: Arc<EngineConfig>,
    model: Arc<ModelLimits>,
    board: Arc<Board>,
    next_id: Arc<AtomicU64>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the operating system refuses another thread.
    pub fn start(core: EngineCore) -> Result<Self> {
        let (commands, receiver) = mpsc::sync_channel(COMMAND_QUEUE);
        let (config, model) = (Arc::clone(core.config()), Arc::clone(core.model_limits()));
        let (board, next_id) = (Arc::new(Board::default()), Arc::clone(core.next_id()));
        let engine_thread = EngineThread::new(core, Arc::clone(&board), commands.clone());
        let thread = std::thread::Builder::new()
            .name("tinyvllm-engine".to_owned())
            .spawn(move || engine_thread.run(&receiver))
            .map_err(|source| Error::io("start the engine's thread", source))?;
        Ok(Self { commands, config, model, board, next_id, thread: Mutex::new(Some(thread)) })
    }

    /// The engine's limits.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// The model's limits.
    #[must_use]
    pub fn model_limits(&self) -> &ModelLimits {
        &self.model
    }

    /// Queues a request; the stream yields its tokens. Dropping the stream aborts it. This does not wait for the
    /// current step: requests that are submitted one after another start together.
    ///
    /// # Errors
    /// If the request is not valid (see [`Request::validate`]), or the engine has failed. Errors that only the engine
    /// can detect are the first event instead, an [`Event::Finished`]: too many requests are unfinished, or a
    /// constraint allows no token.
    pub fn submit(&self, request: Request) -> Result<RequestStream> {
        request.validate(&self.model, &self.config)?;
        let unfinished = vec![true; request.params.n];
        let (id, (sender, events)) = (self.new_id(), channel());
        self.send(Command::Submit {
            id,
            request: Box::new(request),
            sink: Box::new(sender),
            on_accepted: None,
        })?;
        Ok(RequestStream { events, abort: self.abort_handle(id), unfinished })
    }

    /// Queues a request whose events go to `sink`, without waiting for anything. `on_accepted` receives
    /// whether the engine takes it.
    ///
    /// # Errors
    /// [`ErrorKind::Capacity`] if too many commands wait for the end of the step; or if the engine has
    /// failed.
    pub fn submit_to(
        &self,
        request: Request,
        sink: Box<dyn EventSink>,
        on_accepted: OnAccepted,
    ) -> Result<()> {
        let (id, on_accepted) = (self.new_id(), Some(on_accepted));
        let command = Command::Submit { id, request: Box::new(request), sink, on_accepted };
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => Error::new(
                ErrorKind::Capacity,
                format!("{COMMAND_QUEUE} submissions wait for the engine, which is the limit"),
            )
            .with_hint("try again in a moment"),
            TrySendError::Disconnected(_) => stopped(),
        })
    }

    /// A handle to abort a request that was accepted.
    #[must_use]
    pub fn abort_handle(&self, id: RequestId) -> AbortHandle {
        AbortHandle { id, commands: self.commands.clone() }
    }

    /// Ends every unfinished request with this error. The engine continues. Waits for space in the queue of
    /// commands.
    pub fn fail_all(&self, error: Error) {
        // A stopped engine has ended all requests already.
        let _ = self.commands.send(Command::FailAll { error });
    }

    /// The totals after the latest step, without waiting for one that is running.
    #[must_use]
    pub fn latest_stats(&self) -> EngineStats {
        self.board.stats()
    }

    /// Calls `listener` on the engine's thread if the engine fails, after all requests have been ended;
    /// at once if it has failed already.
    pub fn on_failure(&self, listener: impl FnOnce(&Error) + Send + 'static) {
        self.board.on_failure(Box::new(listener));
    }

    /// Calls `listener` on the engine's thread after each step that added blocks to the prefix cache or removed them.
    /// Blocks that are already in the cache are not reported. Waits for space in the queue of commands.
    ///
    /// # Errors
    /// If the engine has failed.
    pub fn watch_cache(&self, listener: OnCacheEvents) -> Result<()> {
        self.send(Command::WatchCache { listener })
    }

    /// Running totals.
    ///
    /// # Errors
    /// If the engine has failed.
    pub fn stats(&self) -> Result<EngineStats> {
        let (reply, answer) = mpsc::sync_channel(1);
        self.send(Command::Stats { reply })?;
        answer.recv().map_err(|_| stopped())
    }

    /// Ends all requests and the engine, and waits until prefixes are written to files. Others may still hold it.
    pub fn shut_down(&self) {
        // The thread may have ended by itself after a failure.
        let _ = self.commands.send(Command::Shutdown);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }

    fn new_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    fn send(&self, command: Command) -> Result<()> {
        if self.board.has_failed() {
            return Err(stopped());
        }
        self.commands.send(command).map_err(|_| stopped())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shut_down();
    }
}

fn stopped() -> Error {
    Error::internal("the engine has stopped").with_hint("an earlier message gives the cause; restart it")
}

/// The events of one request, as an iterator that ends when all its sequences have ended.
#[derive(Debug)]
pub struct RequestStream {
    events: EventReceiver,
    abort: AbortHandle,
    /// By sequence.
    unfinished: Vec<bool>,
}

/// Aborts a request from any thread, for instance when the user presses Ctrl-C. Does nothing once the request has
/// ended.
#[derive(Debug, Clone)]
pub struct AbortHandle {
    id: RequestId,
    commands: SyncSender<Command>,
}

impl AbortHandle {
    /// Gives up the request, or one of its sequences, as [`RequestStream::abort`] does.
    pub fn abort(&self, index: Option<usize>) {
        // A stopped engine has ended the request already.
        let _ = self.commands.send(Command::Abort { id: self.id, index });
    }

    /// The same without waiting; false if too many commands wait for the end of the step.
    #[must_use]
    pub fn try_abort(&self, index: Option<usize>) -> bool {
        let sent = self.commands.try_send(Command::Abort { id: self.id, index });
        !matches!(sent, Err(TrySendError::Full(_)))
    }
}

impl RequestStream {
    /// The request's number.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.abort.id
    }

    /// Aborts the request, or one of its sequences. Queued events still arrive; the last is [`Event::Finished`].
    pub fn abort(&self, index: Option<usize>) {
        self.abort.abort(index);
    }

    /// A handle to abort the request while another thread waits for its events.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
    }

    /// The next event if there already is one.
    pub fn try_next(&mut self) -> Option<Event> {
        match self.events.try_recv() {
            Poll::Ready(event) => self.count(event),
            Poll::Pending => None,
        }
    }

    /// The next event, none after the last one; wakes the task when there is one.
    pub fn poll_next(&mut self, context: &Context<'_>) -> Poll<Option<Event>> {
        if self.is_finished() {
            return Poll::Ready(None);
        }
        self.events.poll_recv(context).map(|event| self.count(event))
    }

    fn is_finished(&self) -> bool {
        !self.unfinished.contains(&true)
    }

    /// Counts the sequences that end. An engine that is gone has ended all of them.
    fn count(&mut self, event: Option<Event>) -> Option<Event> {
        let event = event.or_else(|| {
            let index = self.unfinished.iter().position(|unfinished| *unfinished)?;
            Some(Event::failed(index, &stopped()))
        });
        if let Some(Event::Finished { index, .. }) = event {
            self.unfinished[index] = false;
        }
        event
    }
}

impl Iterator for RequestStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        if self.is_finished() {
            return None;
        }
        let event = self.events.recv();
        self.count(event)
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.is_finished() {
            self.abort(None);
        }
    }
}
