//! From a specification to a grammar, under limits.
//!
//! The work is done on a thread of its own: it has a stack for deep grammars, and it can be left behind when it
//! takes too long. What is left behind ends by itself, because the library bounds every part of its work; until
//! then it counts against the number of compilations that may run at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};

use super::cache::GrammarCache;
use super::matcher::{Grammar, failure};
use super::spec::GrammarSpec;
use super::vocabulary::token_env;
use crate::tokenizer::Tokenizer;
use crate::{Error, ErrorKind, Result};

/// What takes longer to compile is refused.
pub const MAX_COMPILE_TIME: Duration = Duration::from_millis(700);
/// Most compilations at once.
const MAX_COMPILATIONS: usize = 4;
/// Stack of a compilation, of which only what is used takes memory.
const STACK_BYTES: usize = 64 << 20;

/// Makes grammars for one model. The trie of its vocabulary is built when the first one is wanted.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    eos_token_ids: Arc<[u32]>,
    factory: OnceLock<Result<Arc<ParserFactory>>>,
    cache: GrammarCache,
    num_running: Arc<AtomicUsize>,
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
            num_running: Arc::default(),
        }
    }

    /// Compiles a specification, or finds it among those compiled lately. Takes up to [`MAX_COMPILE_TIME`], and
    /// the first time for a model a moment more.
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
        let factory = Arc::clone(self.factory()?);
        let slot = Slot::take(&self.num_running)?;
        let (sender, result) = mpsc::sync_channel(1);
        let (job, eos_token_ids) = (spec.clone(), Arc::clone(&self.eos_token_ids));
        std::thread::Builder::new()
            .name("tinyvllm-grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let _slot = slot;
                // Whoever asked may have given up.
                let _ = sender.send(compile(&factory, &job, eos_token_ids));
            })
            .map_err(|source| Error::io("start a thread for a grammar", source))?;
        let grammar = match result.recv_timeout(MAX_COMPILE_TIME) {
            Ok(grammar) => Arc::new(grammar?),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                return Err(Error::invalid_request(format!(
                    "the grammar is too complex: compiling it takes more than {MAX_COMPILE_TIME:?}"
                )));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Error::invalid_request("the grammar cannot be compiled"));
            }
        };
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
            *factory.limits_mut() = limits();
            Ok(Arc::new(factory))
        };
        self.factory.get_or_init(build).as_ref().map_err(|error| Error::new(error.kind(), error.message()))
    }
}

/// Memory and time are bounded: about a kilobyte for each state of the lexer, and some milliseconds for each set
/// of tokens in the worst case.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1_000,
        step_lexer_fuel: 100_000,
        step_max_items: 10_000,
        max_lexer_states: 20_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

fn compile(factory: &ParserFactory, spec: &GrammarSpec, eos_token_ids: Arc<[u32]>) -> Result<Grammar> {
    let parser = factory.create_parser(spec.to_grammar()?).map_err(|error| failure(&error))?;
    Grammar::new(Matcher::new(Ok(parser)), eos_token_ids)
}

/// The right to compile.
struct Slot(Arc<AtomicUsize>);

impl Slot {
    fn take(num_running: &Arc<AtomicUsize>) -> Result<Self> {
        let slot = Self(Arc::clone(num_running));
        if num_running.fetch_add(1, Ordering::AcqRel) < MAX_COMPILATIONS {
            return Ok(slot);
        }
        Err(Error::new(
            ErrorKind::Capacity,
            format!("{MAX_COMPILATIONS} grammars are being compiled, the most allowed"),
        )
        .with_hint("try again in a moment"))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
