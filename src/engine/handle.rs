//! The engine on a thread of its own.
//!
//! One thread owns all state. Commands reach it through a bounded channel as a closed enum; events
//! leave through a channel per request, which holds at most the request's own tokens, so the engine
//! never waits for a reader. A request whose reader is gone is aborted before the next step.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender, TryRecvError};
use std::thread::JoinHandle;

use super::{EngineCore, EngineStats, Event, ModelLimits, Request, RequestId};
use crate::config::EngineConfig;
use crate::{Error, Result};

/// Commands that may wait for the engine to finish its step.
const COMMAND_QUEUE: usize = 256;

/// Everything that the engine's thread can be told.
enum Command {
    Submit { request: Box<Request>, reply: SyncSender<Result<RequestId>>, events: Sender<Event> },
    Abort { id: RequestId, index: Option<usize> },
    Stats { reply: SyncSender<EngineStats> },
    Shutdown,
}

/// A running engine. Dropping it ends all requests.
#[derive(Debug)]
pub struct Engine {
    commands: SyncSender<Command>,
    config: Arc<EngineConfig>,
    model: Arc<ModelLimits>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the operating system refuses another thread.
    pub fn start(core: EngineCore) -> Result<Self> {
        let (commands, receiver) = mpsc::sync_channel(COMMAND_QUEUE);
        let (config, model) = (Arc::clone(core.config()), Arc::clone(core.model_limits()));
        let thread = std::thread::Builder::new()
            .name("tinyvllm-engine".to_owned())
            .spawn(move || EngineThread { core, readers: HashMap::new() }.run(&receiver))
            .map_err(|source| Error::io("start the engine's thread", source))?;
        Ok(Self { commands, config, model, thread: Some(thread) })
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

    /// Queues a request; the stream gives its tokens as they come. Dropping the stream aborts it.
    ///
    /// # Errors
    /// If the request is not valid, the queue is full, or the engine has failed.
    pub fn submit(&self, request: Request) -> Result<RequestStream> {
        let num_sequences = request.params.n;
        let (reply, answer) = mpsc::sync_channel(1);
        let (events, stream) = mpsc::channel();
        self.send(Command::Submit { request: Box::new(request), reply, events })?;
        let id = answer.recv().map_err(|_| stopped())??;
        Ok(RequestStream { id, events: stream, commands: self.commands.clone(), unfinished: num_sequences })
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

    fn send(&self, command: Command) -> Result<()> {
        self.commands.send(command).map_err(|_| stopped())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The thread may have ended by itself after a failure.
        let _ = self.commands.send(Command::Shutdown);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn stopped() -> Error {
    Error::internal("the engine has stopped").with_hint("an earlier message says why; start it again")
}

/// The events of one request, as an iterator that ends when all its sequences have ended.
#[derive(Debug)]
pub struct RequestStream {
    id: RequestId,
    events: Receiver<Event>,
    commands: SyncSender<Command>,
    unfinished: usize,
}

/// Gives up a request from anywhere, for instance when the user presses Ctrl-C. Does nothing once the
/// request has ended.
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
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Submit { .. } => "Submit",
            Self::Abort { .. } => "Abort",
            Self::Stats { .. } => "Stats",
            Self::Shutdown => "Shutdown",
        })
    }
}

impl RequestStream {
    /// The request's number.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Gives up the request, or one of its sequences. Events that are already on their way still come;
    /// the last is [`Event::Finished`].
    pub fn abort(&self, index: Option<usize>) {
        self.abort_handle().abort(index);
    }

    /// A way to give up the request while another thread waits for its events.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle { id: self.id, commands: self.commands.clone() }
    }

    /// The next event if there already is one.
    pub fn try_next(&mut self) -> Option<Event> {
        let event = self.events.try_recv().ok()?;
        Some(self.count(event))
    }

    fn count(&mut self, event: Event) -> Event {
        if matches!(event, Event::Finished { .. }) {
            self.unfinished -= 1;
        }
        event
    }
}

impl Iterator for RequestStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        if self.unfinished == 0 {
            return None;
        }
        match self.events.recv() {
            Ok(event) => Some(self.count(event)),
            Err(_) => {
                self.unfinished = 0;
                None
            }
        }
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if self.unfinished > 0 {
            self.abort(None);
        }
    }
}

struct EngineThread {
    core: EngineCore,
    readers: HashMap<RequestId, Sender<Event>>,
}

impl EngineThread {
    fn run(mut self, commands: &Receiver<Command>) {
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| self.serve(commands)));
        let error = match outcome {
            Ok(Ok(())) => Error::internal("the engine was shut down"),
            Ok(Err(violation)) => Error::internal(format!("the engine's state is inconsistent: {violation}")),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown cause");
                Error::internal(format!("the engine failed: {text}"))
            }
        };
        let events = self.core.fail_all(&error);
        self.deliver(events);
    }

    /// Returns when told to, or with the violation of an invariant.
    fn serve(&mut self, commands: &Receiver<Command>) -> Result<(), String> {
        loop {
            if !self.core.has_unfinished() {
                self.core.check_integrity()?;
                let Ok(command) = commands.recv() else { return Ok(()) };
                if !self.obey(command) {
                    return Ok(());
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
            let events = self.core.step();
            self.deliver(events);
        }
    }

    /// Carries out a command; false means stop.
    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Submit { request, reply, events } => {
                let id = self.core.submit(*request);
                if let Ok(id) = id {
                    self.readers.insert(id, events);
                }
                // Nobody listens for the answer: the stream does not exist either, and the first event
                // will abort the request.
                let _ = reply.send(id);
            }
            Command::Abort { id, index } => {
                let events = self.core.abort(id, index);
                self.deliver(events);
            }
            Command::Stats { reply } => {
                let _ = reply.send(self.core.stats());
            }
            Command::Shutdown => return false,
        }
        true
    }

    fn deliver(&mut self, events: Vec<(RequestId, Event)>) {
        for (id, event) in events {
            let Some(reader) = self.readers.get(&id) else { continue };
            if reader.send(event).is_err() {
                self.readers.remove(&id);
                self.core.abort(id, None);
            }
        }
        if !self.core.has_unfinished() {
            self.readers.clear();
        } else {
            self.readers.retain(|id, _| self.core.is_unfinished(*id));
        }
    }
}
