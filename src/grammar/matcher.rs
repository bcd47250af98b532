//! A compiled grammar, and where a sequence is in it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use llguidance::{CancellationHandle, Matcher};

use super::watchdog;
use crate::sampling::{Constraint, ConstraintState, TokenMask};
use crate::{Error, ErrorKind, Result};

/// Time that a sequence may take altogether, and more for each of its tokens. A usual token takes a five-hundredth;
/// the beginning is long enough for a thread that an overloaded machine lets wait.
const TIME_TO_START: Duration = Duration::from_secs(5);
const TIME_FOR_TOKEN: Duration = Duration::from_millis(20);

/// A compiled grammar. Any number of sequences can use it at once.
pub struct Grammar {
    /// Before the first token. It is copied and never moves on.
    start: Mutex<Matcher>,
    eos_token_ids: Arc<[u32]>,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammar {
    /// Checks that there is something to generate.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`] if no text matches that this vocabulary can spell, only the empty one does,
    /// or the first set of tokens is beyond the limits.
    pub(super) fn new(matcher: Matcher, eos_token_ids: Arc<[u32]>) -> Result<Self> {
        let grammar = Self { start: Mutex::new(matcher.into_cancellable()), eos_token_ids };
        let mut allowed = TokenMask::default();
        grammar.start_state().allowed(&mut allowed)?;
        match allowed.is_empty() {
            true => Err(Error::invalid_request("the grammar allows nothing but an empty answer")),
            false => Ok(grammar),
        }
    }

    /// The copy has caches of its own: what the limits allow must not depend on other sequences.
    fn start_state(&self) -> GrammarState {
        let matcher = self.start.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        GrammarState {
            stop: matcher.cancellation_handle().unwrap_or_default(),
            matcher,
            eos_token_ids: Arc::clone(&self.eos_token_ids),
            time_left: TIME_TO_START,
        }
    }
}

impl Constraint for Grammar {
    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(self.start_state())
    }
}

/// Where a sequence is in its grammar.
struct GrammarState {
    matcher: Matcher,
    stop: CancellationHandle,
    eos_token_ids: Arc<[u32]>,
    time_left: Duration,
}

impl GrammarState {
    /// Does a piece of work, if there is time for it.
    fn timed<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.time_left.is_zero() {
            return Err(Error::invalid_request(
                "the grammar is too complex: it takes too long for each token",
            ));
        }
        let start = Instant::now();
        let _watch = watchdog::watch(&self.stop);
        let result = work(self);
        self.time_left = self.time_left.saturating_sub(start.elapsed());
        match self.matcher.is_cancelled() {
            true => Err(Error::invalid_request("the grammar is too complex: one token takes too long")),
            false => result,
        }
    }

    fn compute_allowed(&mut self, allowed: &mut TokenMask) -> Result<bool> {
        if self.matcher.is_stopped() && self.matcher.stop_reason().is_ok() {
            return Ok(true);
        }
        let may_end = self.matcher.is_accepting().map_err(|error| failure(&error))?;
        match self.matcher.compute_mask() {
            Ok(mask) => allowed.set_words(mask.as_slice()),
            // There is no token for what could follow.
            Err(_) if may_end => return Ok(true),
            Err(error) => return Err(failure(&error)),
        }
        if may_end {
            self.eos_token_ids.iter().for_each(|id| allowed.remove(*id));
        }
        Ok(may_end)
    }
}

impl ConstraintState for GrammarState {
    fn allowed(&mut self, allowed: &mut TokenMask) -> Result<bool> {
        allowed.clear();
        self.timed(|state| state.compute_allowed(allowed))
    }

    fn accept(&mut self, token_id: u32) -> Result<()> {
        self.time_left += TIME_FOR_TOKEN;
        self.timed(|state| state.matcher.consume_token(token_id).map_err(|error| failure(&error)))
    }
}

/// What the library says, in one line.
pub(super) fn failure(error: &anyhow::Error) -> Error {
    const MAX_CHARS: usize = 300;
    let text = error.to_string();
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("no reason is given").trim();
    let line: String = line.chars().take(MAX_CHARS).collect();
    let line = match line.as_str() {
        "NoExtensionBias" => "no token of the model can continue the text",
        line => line,
    };
    Error::new(ErrorKind::InvalidRequest, format!("the grammar cannot be followed: {line}"))
}
