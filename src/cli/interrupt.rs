//! Ctrl-C: the first one stops what is being generated, the second one the program.
//!
//! While nothing is being generated (loading, downloading) already the first one ends the program.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context as _;
use tinyvllm::engine::AbortHandle;

/// Exit status of a program that Ctrl-C ended: 128 and the number of the signal.
pub(crate) const EXIT_CODE: u8 = 130;

/// What Ctrl-C does now.
#[derive(Debug, Clone)]
pub(crate) struct Interrupt {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Requests that the first Ctrl-C aborts.
    requests: Vec<AbortHandle>,
    is_interrupted: bool,
}

/// As long as this lives, Ctrl-C aborts requests.
#[derive(Debug)]
pub(crate) struct Guard<'a> {
    interrupt: &'a Interrupt,
}

impl Interrupt {
    /// Takes over Ctrl-C. Once in the life of the program.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub(crate) fn install() -> anyhow::Result<Self> {
        let interrupt = Self { state: Arc::default() };
        let handler = interrupt.clone();
        ctrlc::set_handler(move || handler.on_signal()).context("cannot handle Ctrl-C")?;
        Ok(interrupt)
    }

    /// Lets Ctrl-C abort these requests until the guard is dropped.
    pub(crate) fn guard(&self, requests: Vec<AbortHandle>) -> Guard<'_> {
        *self.state() = State { requests, is_interrupted: false };
        Guard { interrupt: self }
    }

    fn on_signal(&self) {
        let mut state = self.state();
        if state.is_interrupted || state.requests.is_empty() {
            drop(state);
            exit_now();
        }
        state.is_interrupted = true;
        state.requests.iter().for_each(|request| request.abort(None));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guard<'_> {
    /// Whether there was a Ctrl-C.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupt.state().is_interrupted
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        *self.interrupt.state() = State::default();
    }
}

/// Ends the program at once.
#[expect(clippy::exit, reason = "the main thread may be in the middle of a step that takes seconds")]
pub(crate) fn exit_now() -> ! {
    // Ends the line that a progress bar or an answer was in the middle of.
    let _ = io::Write::write_all(&mut io::stderr(), b"\n");
    std::process::exit(EXIT_CODE.into())
}
