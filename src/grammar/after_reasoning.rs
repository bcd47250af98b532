//! A constraint that begins after the model's reasoning.
//!
//! Reasoning is free text that one token ends, so this is about tokens and not about a grammar: any constraint can
//! follow.

use std::sync::Arc;

use crate::sampling::{Constraint, ConstraintState, TokenMask};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Where a sequence begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningStart {
    /// In the reasoning, which the prompt has opened.
    Inside,
    /// Before it: this token opens it, if the model reasons at all.
    Before(u32),
}

/// Lets the model reason first, and then constrains it.
#[derive(Debug)]
pub struct AfterReasoning {
    constraint: Arc<dyn Constraint>,
    start: ReasoningStart,
    tokens: Arc<Tokens>,
}

#[derive(Debug)]
struct Tokens {
    /// Ends the reasoning.
    close: u32,
    /// The reasoning, with its end.
    free: TokenMask,
    /// Line breaks, one of which may separate the reasoning from the rest.
    line_breaks: Vec<u32>,
}

impl AfterReasoning {
    /// Reasoning that ends with the token `close`, and then `constraint`. The sequence does not end in between.
    #[must_use]
    pub fn new(
        constraint: Arc<dyn Constraint>,
        start: ReasoningStart,
        close: u32,
        tokenizer: &Tokenizer,
        end_token_ids: &[u32],
    ) -> Self {
        let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let is_free = |id: &u32| {
            let is_text = !tokenizer.is_special(*id) && !tokenizer.token_bytes(*id).is_empty();
            *id == close || is_text && !end_token_ids.contains(id)
        };
        let is_break = |id: &u32| {
            let bytes = tokenizer.token_bytes(*id);
            !bytes.is_empty() && bytes.iter().all(|byte| *byte == b'\n')
        };
        let tokens = Tokens {
            close,
            free: ids.clone().filter(is_free).collect(),
            line_breaks: ids.filter(is_break).collect(),
        };
        Self { constraint, start, tokens: Arc::new(tokens) }
    }
}

impl Constraint for AfterReasoning {
    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(State {
            phase: match self.start {
                ReasoningStart::Inside => Phase::Inside,
                ReasoningStart::Before(open) => Phase::Before(open),
            },
            taken: Vec::new(),
            rest: self.constraint.start(),
            tokens: Arc::clone(&self.tokens),
        })
    }
}

struct State {
    phase: Phase,
    /// The last tokens.
    taken: Vec<AcceptedToken>,
    rest: Box<dyn ConstraintState>,
    tokens: Arc<Tokens>,
}

/// Tokens that can be taken back, at least: more than a draft has.
const MAX_TAKEN_BACK: usize = 128;

/// A token that was accepted.
#[derive(Debug, Clone, Copy)]
struct AcceptedToken {
    before: Phase,
    /// It was the other constraint's.
    is_others: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Before(u32),
    Inside,
    /// Right after the reasoning.
    Gap,
    After,
}

impl ConstraintState for State {
    fn allowed(&mut self, allowed: &mut TokenMask) -> Result<bool> {
        if self.phase == Phase::Inside {
            allowed.clone_from(&self.tokens.free);
            return Ok(false);
        }
        let may_end = self.rest.allowed(allowed)?;
        match self.phase {
            Phase::Before(open) => allowed.insert(open),
            Phase::Gap => self.tokens.line_breaks.iter().for_each(|id| allowed.insert(*id)),
            Phase::Inside | Phase::After => {}
        }
        Ok(may_end)
    }

    fn accept(&mut self, token_id: u32) -> Result<()> {
        let (next, is_others) = match self.phase {
            Phase::Before(open) if token_id == open => (Phase::Inside, false),
            Phase::Inside if token_id == self.tokens.close => (Phase::Gap, false),
            Phase::Inside => (Phase::Inside, false),
            Phase::Gap if self.tokens.line_breaks.contains(&token_id) => (Phase::After, false),
            Phase::Before(_) | Phase::Gap | Phase::After => (Phase::After, true),
        };
        if self.taken.len() >= 2 * MAX_TAKEN_BACK {
            self.taken.drain(..MAX_TAKEN_BACK);
        }
        self.taken.push(AcceptedToken { before: self.phase, is_others });
        self.phase = next;
        if is_others { self.rest.accept(token_id) } else { Ok(()) }
    }

    fn forced(&mut self) -> Vec<u32> {
        if self.phase == Phase::After { self.rest.forced() } else { Vec::new() }
    }

    fn roll_back(&mut self, num_tokens: usize) -> Result<()> {
        let Some(first) = self.taken.len().checked_sub(num_tokens) else {
            return Err(Error::internal(format!("{num_tokens} tokens are more than can be taken back")));
        };
        let num_others = self.taken[first..].iter().filter(|taken| taken.is_others).count();
        self.phase = self.taken.get(first).map_or(self.phase, |taken| taken.before);
        self.taken.truncate(first);
        if num_others > 0 { self.rest.roll_back(num_others) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{GrammarCompiler, GrammarSpec};
    use super::*;
    use crate::tokenizer::tests::tokenizer;

    #[test]
    fn the_constraint_begins_after_the_reasoning() {
        let tokenizer = tokenizer("qwen2");
        let ends = tokenizer.stop_token_ids(&[]);
        let [open, close] = ["(", ")"].map(|text| tokenizer.token_id(text).unwrap());
        let [x, space] = ["x", "\n"]
            .map(|text| tokenizer.encode(text, crate::tokenizer::SpecialTokens::AsText).unwrap()[0]);
        let compiler = GrammarCompiler::new(Arc::clone(&tokenizer), tokenizer.vocab_size(), &ends);
        let start = |start: ReasoningStart| {
            let grammar = compiler.compile(&GrammarSpec::Regex("x".to_owned())).unwrap();
            AfterReasoning::new(grammar, start, close, &tokenizer, &ends).start()
        };
        let mut allowed = TokenMask::default();
        let mut state = start(ReasoningStart::Before(open));
        assert!(!state.allowed(&mut allowed).unwrap());
        assert!(allowed.contains(open) && allowed.contains(x) && !allowed.contains(close));
        state.accept(open).unwrap();
        assert!(!state.allowed(&mut allowed).unwrap(), "reasoning must be closed");
        assert!(
            allowed.contains(close) && allowed.contains(open) && !ends.iter().any(|id| allowed.contains(*id))
        );
        assert!(
            (0..tokenizer.vocab_size() as u32).all(|id| !tokenizer.is_special(id) || !allowed.contains(id))
        );
        state.accept(space).unwrap();
        state.accept(close).unwrap();
        assert!(!state.allowed(&mut allowed).unwrap());
        assert!(allowed.contains(space) && allowed.contains(x) && !allowed.contains(open));
        state.accept(space).unwrap();
        assert!(!state.allowed(&mut allowed).unwrap());
        assert_eq!(allowed.iter().collect::<Vec<_>>(), [x]);
        state.accept(x).unwrap();
        assert!(state.allowed(&mut allowed).unwrap());
        // Without reasoning, and with one that the prompt has opened.
        let mut state = start(ReasoningStart::Before(open));
        state.accept(x).unwrap();
        assert!(state.allowed(&mut allowed).unwrap());
        let mut state = start(ReasoningStart::Inside);
        state.accept(x).unwrap();
        state.accept(close).unwrap();
        assert!(state.accept(open).is_err());
    }
}
