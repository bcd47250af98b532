//! From a specification to a grammar, under limits.
//!
//! The work runs on its own thread, which has a stack for deep grammars and can be abandoned when it takes too long. An
//! abandoned thread ends by itself, because the library bounds every step of its work; until then it counts against the
//! number of concurrent compilations.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};

use super::cache::GrammarCache;
use super::matcher::{Grammar, failure};
use super::spec::GrammarSpec;
use super::unwritable;
use super::vocabulary::token_env;
use super::watchdog::{counter_of_this_thread, read_counter};
use crate::tokenizer::Tokenizer;
use crate::{Error, ErrorKind, Result};

/// Grammars that take longer to compile are refused.
pub const MAX_COMPILE_TIME: Duration = Duration::from_millis(700);
/// How often that time may pass while the machine lets the compilation wait, so that it has not computed for most of it.
const MAX_WAITS: usize = 8;
/// Most compilations at once.
const MAX_COMPILATIONS: usize = 4;
/// Most items of the parser in one position: about two for each key that may come next.
pub(super) const MAX_ITEMS: usize = 2_500;
/// Most states of the lexer that a sequence comes through, and those that it may come through however little memory there
/// is: a text of counted length has one for each character.
const MAX_LEXER_STATES: usize = 20_000;
const MIN_LEXER_STATES: usize = 1_000;
/// The memory of one, including temporary memory.
const LEXER_STATE_BYTES: u64 = 1_024;
/// Stack of a compilation; only used pages take memory.
const STACK_BYTES: usize = 64 << 20;

/// Makes grammars for one model. The trie of its vocabulary is built for the first one.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    eos_token_ids: Arc<[u32]>,
    factory: OnceLock<Result<Arc<ParserFactory>>>,
    cache: GrammarCache,
    slots: Arc<Slots>,
    /// Each sequence keeps those that it has come through.
    max_lexer_states: usize,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").field("eos_token_ids", &self.eos_token_ids).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// A compiler for a model with this tokenizer, logits for `vocab_size` tokens, and these end tokens.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, eos_token_ids: &[u32]) -> Self {
        Self {
            tokenizer,
            vocab_size,
            eos_token_ids: eos_token_ids.into(),
            factory: OnceLock::new(),
            cache: GrammarCache::default(),
            slots: Arc::default(),
            max_lexer_states: MAX_LEXER_STATES,
        }
    }

    /// The same, where each sequence may take this many bytes for its state in a grammar.
    #[must_use]
    pub fn with_memory(mut self, bytes_per_sequence: u64) -> Self {
        let most = usize::try_from(bytes_per_sequence / LEXER_STATE_BYTES).unwrap_or(usize::MAX);
        self.max_lexer_states = most.clamp(MIN_LEXER_STATES, MAX_LEXER_STATES);
        self
    }

    /// Compiles a specification, or finds it among those compiled lately. Takes up to [`MAX_COMPILE_TIME`]; the
    /// first time for a model, and on a machine that is overloaded, more.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`] if the specification is wrong, cannot be enforced, allows no text, or is
    /// beyond the limits of size, time and complexity; [`ErrorKind::Capacity`] if too many are being compiled;
    /// [`ErrorKind::Unsupported`] if the model's vocabulary is too large.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Arc<Grammar>> {
        if let Some(grammar) = self.cache.get(spec) {
            return Ok(grammar);
        }
        spec.check_size()?;
        unwritable::check(spec, &|c| self.tokenizer.can_write(c))?;
        let factory = Arc::clone(self.factory()?);
        let slot = Slot::take(&self.slots)?;
        let (sender, result) = mpsc::sync_channel(1);
        let (job, eos_token_ids) = (spec.clone(), Arc::clone(&self.eos_token_ids));
        let tokenizer = Arc::clone(&self.tokenizer);
        let counter = Arc::new(OnceLock::new());
        let own_counter = Arc::clone(&counter);
        std::thread::Builder::new()
            .name("tinyvllm-grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                // Only this sets it.
                let _ = own_counter.set(counter_of_this_thread());
                let grammar = compile(&factory, &job, eos_token_ids, tokenizer);
                // Before its caller can ask again.
                drop(slot);
                // They may have given up.
                let _ = sender.send(grammar);
            })
            .map_err(|source| Error::io("start a thread for a grammar", source))?;
        let grammar = Arc::new(wait(&result, &counter)?);
        self.cache.put(spec, &grammar);
        Ok(grammar)
    }

    fn factory(&self) -> Result<&Arc<ParserFactory>> {
        let build = || {
            let env = token_env(&self.tokenizer, self.vocab_size, &self.eos_token_ids)?;
            let slices = SlicedBiasComputer::general_slices();
            let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
                .map_err(|error| Error::internal(format!("the vocabulary has no trie: {error}")))?;
            factory.quiet();
            *factory.limits_mut() = limits(self.max_lexer_states);
            Ok(Arc::new(factory))
        };
        self.factory.get_or_init(build).as_ref().map_err(|error| Error::new(error.kind(), error.message()))
    }
}

/// Memory and time are bounded: about a kilobyte for each state of the lexer, and some milliseconds for each set
/// of tokens in the worst case.
fn limits(max_lexer_states: usize) -> ParserLimits {
    ParserLimits {
        max_items_in_row: MAX_ITEMS,
        step_lexer_fuel: 100_000,
        step_max_items: 100_000,
        max_lexer_states,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

fn compile(
    factory: &ParserFactory,
    spec: &GrammarSpec,
    eos_token_ids: Arc<[u32]>,
    tokenizer: Arc<Tokenizer>,
) -> Result<Grammar> {
    let parser = factory.create_parser(spec.to_grammar()?).map_err(|error| failure(&error))?;
    Grammar::new(Matcher::new(Ok(parser)), eos_token_ids, tokenizer)
}

/// Waits for a compilation as long as it may take, and on an overloaded machine until it has had its turn.
fn wait(result: &Receiver<Result<Grammar>>, counter: &OnceLock<Option<Arc<str>>>) -> Result<Grammar> {
    for _ in 0..MAX_WAITS {
        match result.recv_timeout(MAX_COMPILE_TIME) {
            Ok(grammar) => return grammar,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::invalid_request("the grammar cannot be compiled"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        // It may not even have begun.
        let computed = counter.get().map(|counter| counter.as_deref().and_then(read_counter));
        if computed.is_some_and(|computed| computed.is_none_or(|time| time > MAX_COMPILE_TIME * 3 / 4)) {
            break;
        }
    }
    Err(Error::invalid_request(format!(
        "the grammar is too complex: compiling it takes more than {MAX_COMPILE_TIME:?}"
    )))
}

/// How many compilations run.
#[derive(Debug, Default)]
struct Slots {
    num_taken: Mutex<usize>,
    freed: Condvar,
}

/// The right to compile.
struct Slot(Arc<Slots>);

impl Slot {
    /// Waits for its turn, but no longer than a compilation may take.
    fn take(slots: &Arc<Slots>) -> Result<Self> {
        let num_taken = slots.num_taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut num_taken, _) = slots
            .freed
            .wait_timeout_while(num_taken, MAX_COMPILE_TIME, |num_taken| *num_taken >= MAX_COMPILATIONS)
            .unwrap_or_else(PoisonError::into_inner);
        if *num_taken >= MAX_COMPILATIONS {
            return Err(Error::new(
                ErrorKind::Capacity,
                format!("{MAX_COMPILATIONS} grammars are being compiled, the most allowed"),
            )
            .with_hint("try again in a moment"));
        }
        *num_taken += 1;
        Ok(Self(Arc::clone(slots)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.num_taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}
