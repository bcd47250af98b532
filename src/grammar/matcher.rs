//! A compiled grammar, and where a sequence is in it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::Matcher;

use crate::sampling::{Constraint, ConstraintState, TokenMask};
use crate::{Error, ErrorKind, Result};

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
        let grammar = Self { start: Mutex::new(matcher), eos_token_ids };
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
        GrammarState { matcher, eos_token_ids: Arc::clone(&self.eos_token_ids) }
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
    eos_token_ids: Arc<[u32]>,
}

impl ConstraintState for GrammarState {
    fn allowed(&mut self, allowed: &mut TokenMask) -> Result<bool> {
        allowed.clear();
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

    fn accept(&mut self, token_id: u32) -> Result<()> {
        self.matcher.consume_token(token_id).map_err(|error| failure(&error))
    }
}

/// What the library says, in one line.
pub(super) fn failure(error: &anyhow::Error) -> Error {
    let text = error.to_string();
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("it gives no reason").trim();
    let line: String = line.chars().take(400).collect();
    let line = match line.as_str() {
        "NoExtensionBias" => "no token of the model can continue the text",
        line => line,
    };
    Error::new(ErrorKind::InvalidRequest, format!("the grammar cannot be followed: {line}"))
}
