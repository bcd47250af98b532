//! A compiled grammar, and where a sequence is in it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use llguidance::{CancellationHandle, Matcher};

use super::{expressions, forced, watchdog};
use crate::deadline::Deadline;
use crate::sampling::{Constraint, ConstraintState, TokenMask};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result, shortened};

/// Processor time that a sequence may take in total, and the addition for each of its tokens. A usual token takes a
/// five-hundredth of it. Time of other threads does not count.
const TIME_TO_START: Duration = Duration::from_secs(5);
const TIME_FOR_TOKEN: Duration = Duration::from_millis(20);

/// Tokens of an answer that are tried out before there is one, if they take no longer.
const TRIED_TOKENS: usize = 16;
const TIME_TO_TRY: Duration = Duration::from_millis(100);

/// A compiled grammar. Any number of sequences can use it at once.
pub struct Grammar {
    /// Before the first token. It is copied and never moves on.
    start: Mutex<Matcher>,
    eos_token_ids: Arc<[u32]>,
    tokenizer: Arc<Tokenizer>,
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
    /// [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest) if no text matches that this vocabulary can spell,
    /// only the empty one does, or the first sets of tokens are beyond the limits.
    pub(super) fn new(
        matcher: Matcher,
        eos_token_ids: Arc<[u32]>,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let grammar = Self { start: Mutex::new(matcher.into_cancellable()), eos_token_ids, tokenizer };
        let mut state = grammar.start_state();
        let mut allowed = TokenMask::default();
        state.allowed(&mut allowed)?;
        if allowed.is_empty() {
            return Err(Error::invalid_request("the grammar allows only an empty answer"));
        }
        try_out(&mut state, &mut allowed)?;
        Ok(grammar)
    }

    /// The copy has its own caches: the limits must not depend on other sequences.
    fn start_state(&self) -> GrammarState {
        let matcher = self.start.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        GrammarState {
            stop: matcher.cancellation_handle().unwrap_or_default(),
            matcher,
            eos_token_ids: Arc::clone(&self.eos_token_ids),
            tokenizer: Arc::clone(&self.tokenizer),
            time_left: TIME_TO_START,
        }
    }
}

/// Follows the grammar for some tokens, so that limits which are reached soon are reported before an answer begins.
fn try_out(state: &mut GrammarState, allowed: &mut TokenMask) -> Result<()> {
    let start = Instant::now();
    for step in 0..TRIED_TOKENS {
        let Some(token_id) = state.telling_token(allowed, step % 2 == 0) else { break };
        state.accept(token_id)?;
        let may_end = state.allowed(allowed)?;
        if start.elapsed() > TIME_TO_TRY || may_end && allowed.is_empty() {
            break;
        }
    }
    Ok(())
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
    tokenizer: Arc<Tokenizer>,
    time_left: Duration,
}

impl GrammarState {
    /// Does a chunk of work, if there is time for it.
    fn timed<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.time_left.is_zero() {
            return Err(Error::invalid_request(
                "the grammar is too complex: it takes too long for each token",
            ));
        }
        let clock = Deadline::new(self.time_left);
        let _watch = watchdog::watch(&self.stop);
        let result = work(self);
        self.time_left = self.time_left.saturating_sub(clock.spent());
        match self.matcher.is_cancelled() {
            true => Err(Error::invalid_request("the grammar is too complex: one token takes too long")),
            false => result,
        }
    }

    /// One of these tokens that goes far: a long one without spaces, and one that begins with a mark if that is required and
    /// there is one, because after marks is where grammars branch.
    fn telling_token(&self, allowed: &TokenMask, wants_mark: bool) -> Option<u32> {
        let vocabulary = self.matcher.tok_env().ok()?;
        let rank = |token_id: &u32| {
            let bytes = vocabulary.tok_trie().token(*token_id);
            let has_mark = wants_mark && bytes.first().is_some_and(u8::is_ascii_punctuation);
            (has_mark, !bytes.iter().any(u8::is_ascii_whitespace), bytes.len())
        };
        allowed.iter().max_by_key(rank)
    }

    fn compute_allowed(&mut self, allowed: &mut TokenMask) -> Result<bool> {
        if self.matcher.is_stopped() && self.matcher.stop_reason().is_ok() {
            return Ok(true);
        }
        let may_end = self.matcher.is_accepting().map_err(|error| failure(&error))?;
        match self.matcher.compute_mask() {
            Ok(mask) => allowed.set_words(mask.as_slice()),
            // No token continues the text.
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

    fn forced(&mut self) -> Vec<u32> {
        let bytes = self.timed(|state| Ok(state.matcher.compute_ff_bytes())).unwrap_or_default();
        let Ok(vocabulary) = self.matcher.tok_env() else { return Vec::new() };
        forced::tokens(&bytes, &self.tokenizer, vocabulary.tok_trie())
    }

    fn roll_back(&mut self, num_tokens: usize) -> Result<()> {
        self.timed(|state| state.matcher.rollback(num_tokens).map_err(|error| failure(&error)))
    }
}

/// Words in the library's messages about exceeded limits, with explanations for the author of the grammar. The
/// library's own words refer to settings that users do not have.
const LIMITS: [(&str, &str); 10] = [
    ("fuel", REGULAR_EXPRESSIONS),
    ("lexer configuration", REGULAR_EXPRESSIONS),
    ("too many expressions", REGULAR_EXPRESSIONS),
    ("too many states", REGULAR_EXPRESSIONS),
    ("unknown error", REGULAR_EXPRESSIONS),
    ("TooComplex", REGULAR_EXPRESSIONS),
    ("Unable to determine if regex is empty", REGULAR_EXPRESSIONS),
    ("grammar size", "it has too many rules"),
    ("Current row has", TOO_MUCH_AT_ONCE),
    ("Too many items", TOO_MUCH_AT_ONCE),
];
const REGULAR_EXPRESSIONS: &str = "its regular expressions, patterns and lengths are too large together";
const TOO_MUCH_AT_ONCE: &str = "too many continuations in one position, such as keys and alternatives";

/// The defect of a regular expression in a grammar, which the library writes down with its own escapes.
fn broken_expression(text: &str) -> Option<Error> {
    let (expression, rest) = text.split_once("invalid regex ")?.1.split_once(" (in ")?;
    let reason = rest.split_once("): ")?.1.trim_end();
    let expression: String = serde_json::from_str(expression).unwrap_or_else(|_| expression.to_owned());
    Some(expressions::refusal("the regular expression", &expression, false, reason))
}

/// The error in one line: in our words for a limit, and in the library's about the text of a grammar.
pub(super) fn failure(error: &anyhow::Error) -> Error {
    let text = error.to_string();
    if let Some((_, what)) = LIMITS.iter().find(|(words, _)| text.contains(words)) {
        return Error::invalid_request(format!("the grammar is too complex: {what}"))
            .with_hint("make it smaller, with fewer alternatives and repetitions");
    }
    if let Some(error) = broken_expression(&text) {
        return error;
    }
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("no reason is given").trim();
    // The position in the generated rules is meaningless to the author of the schema.
    let line = line.split_once("failed to compile JSON schema: ").map_or(line, |(_, what)| what);
    let line = match line.trim_start_matches("Parser Error: ") {
        "NoExtensionBias" => "no token of the model can continue the text",
        line => line,
    };
    Error::invalid_request(format!("the grammar cannot be followed: {}", shortened(line)))
}
