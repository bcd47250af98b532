//! Speculation: tokens that may follow a sequence are drafted, and a step computes several of them at once.
//!
//! Each position is sampled with its own logits, random number, penalties and mask, as if it had been reached one by one, and
//! the draft is kept as far as it agrees. So no draft can change a token or a log-probability, only when it comes.
//!
//! A [`Drafter`] proposes; the scheduler decides how many of the tokens are worth their time (`scheduler/drafts.rs`). No
//! tensors, no text, no clock.

use crate::sampling::SamplingParams;

mod acceptance;
mod seconds;
mod suffix;
mod suffix_automaton;

pub use acceptance::{Acceptance, Evidence, OwnAcceptance};
pub use seconds::SecondsPerToken;
pub use suffix::LookupSource;

/// A model's draft continues while its chance of full acceptance is at least this.
pub const LEAST_CHANCE: f32 = 0.25;

/// Tokens that may follow a sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Draft {
    /// In their order.
    pub token_ids: Vec<u32>,
    /// For each token the probability, 0 to 1, that it is right if those before it are. Length of `token_ids`.
    pub chances: Vec<f32>,
}

impl Draft {
    /// Tokens in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.token_ids.len()
    }

    /// Whether the draft is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.token_ids.is_empty()
    }

    /// Adds a token with its probability.
    pub fn push(&mut self, token_id: u32, chance: f32) {
        self.token_ids.push(token_id);
        self.chances.push(chance);
    }

    /// Takes all tokens out and keeps the memory.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.chances.clear();
    }
}

/// Proposes a continuation of one sequence, from its own tokens only.
pub trait Drafter: Send {
    /// Takes the next tokens: those that are predicted, the prompt, which may come in chunks, and the output.
    fn extend(&mut self, token_ids: &[u32]);

    /// The cost of drafting, if it matters. Then drafts are requested only where they pay.
    fn cost(&mut self) -> Option<DraftCost> {
        None
    }

    /// Adds up to `max_tokens` tokens to the empty `draft` that may follow those so far.
    fn draft(&mut self, max_tokens: usize, draft: &mut Draft);

    /// Receives that `num_tried` tokens of the last draft were tried, of which the first `num_right` were accepted.
    fn learn(&mut self, num_tried: usize, num_right: usize);
}

/// The time of a drafted token, and its value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftCost {
    /// The probability that a token is right, if those before it are.
    pub chance: f32,
    /// 0 if it is not known yet.
    pub seconds_per_token: f64,
}

/// A sequence that is to be drafted for.
#[derive(Debug, Clone, Copy)]
pub struct DraftedSequence<'a> {
    /// The number of tokens at the start of the drafter's input that do not belong to it: the request predicts that the
    /// output will be similar to them.
    pub num_predicted: usize,
    /// The next ones are the prompt.
    pub num_prompt_tokens: usize,
    /// How its tokens are chosen.
    pub params: &'a SamplingParams,
    /// The seed of its request.
    pub seed: u64,
    /// Its number in its request.
    pub stream: u32,
    /// Tokens that end it.
    pub end_token_ids: &'a [u32],
}

/// Starts a [`Drafter`] for each sequence.
pub trait DraftSource: Send {
    /// The drafter of a sequence.
    fn start(&self, sequence: &DraftedSequence<'_>) -> Box<dyn Drafter>;
}
