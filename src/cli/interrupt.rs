//! Ctrl-C: the first one stops the generation, the second one ends the program.
//!
//! If nothing is being generated, for instance during a download, the first one ends the program.

use std::io::{self, IsTerminal};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context as _;
use tinyvllm::engine::AbortHandle;

use super::keyboard;

/// Exit status after Ctrl-C: 128 and the number of the signal.
pub(crate) const EXIT_CODE: u8 = 130;

/// Handles Ctrl-C.
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

/// While this lives, Ctrl-C aborts its requests.
#[derive(Debug)]
pub(crate) struct Guard<'a> {
    interrupt: &'a Interrupt,
}

impl Interrupt {
    /// Installs the handler. Call this once.
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
    keyboard::restore();
    // Ends the line of a progress bar or an answer.
    if io::stderr().is_terminal() {
        let _ = io::Write::write_all(&mut io::stderr(), b"\n");
    }
    std::process::exit(EXIT_CODE.into())
}
