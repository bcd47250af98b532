//! Drafted tokens: which of them a step computes after the last known token of a sequence.
//!
//! A step samples after each drafted token as if decoding had reached it one by one, and what is sampled is compared,
//! so a draft can change when a token is computed and never which. How many are worth their time is decided for each
//! step: a row more takes time of all that are in it.

use super::pace::{Load, Pace};
use super::{PlannedSequence, Scheduler, SchedulerOutput, SeqId, Sequence, SequenceStatus};
use crate::speculation::{Draft, DraftCost};

/// How much longer drafts may make a step with sequences of several clients.
const MAX_DRAFT_TIME_RATIO: f64 = 0.25;

impl Scheduler {
    /// Bounds the tokens of steps that have drafted ones. Where a device computes few tokens in another way than many, this is
    /// the most that are few, so that a draft changes no bit.
    pub fn limit_drafted_steps(&mut self, max_tokens: usize) {
        self.max_drafted_step = max_tokens;
    }

    /// Receives a sequence's draft, which replaces an earlier one. Dropped when the sequence gets a token.
    pub fn propose(&mut self, id: SeqId, draft: &Draft) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.set_draft(draft);
        }
    }

    /// Sequences that take part in the next step with a token alone, after which drafted ones could be tried.
    #[must_use]
    pub fn generating(&self) -> Vec<SeqId> {
        if self.config.speculative.num_speculative_tokens == 0 {
            return Vec::new();
        }
        let may_have = |id: &&SeqId| may_have_draft(&self.sequences[id]);
        self.running.iter().filter(may_have).copied().collect()
    }

    /// Whether a sequence could have drafted tokens after its next one.
    pub(super) fn has_drafts(&self, output: &SchedulerOutput) -> bool {
        let num_rows = output.sequences.len();
        output
            .sequences
            .iter()
            .any(|planned| self.num_worthwhile(&self.sequences[&planned.seq], num_rows) > 0)
    }

    /// Adds drafted tokens to sequences that decode, with what they need: tokens of the step, rows of logits, and blocks, of
    /// which no client loses.
    pub(super) fn add_drafts(&mut self, output: &mut SchedulerOutput) {
        let num_tokens = output.num_scheduled_tokens();
        let num_logits: usize = output
            .sequences
            .iter()
            .map(|planned| self.num_logits(planned.seq, planned.start, planned.len))
            .sum();
        let mut capacity = [
            self.config.max_num_batched_tokens.saturating_sub(num_tokens),
            self.config.max_num_logits().saturating_sub(num_logits),
            self.max_drafted_step.saturating_sub(num_tokens),
            // What others of the step need in the next one stays free.
            self.pool.num_allocatable().saturating_sub(output.sequences.len()) * self.config.block_size,
            self.max_with_other_clients(output),
        ]
        .into_iter()
        .min()
        .unwrap_or(0);
        let mut num_rows = output.sequences.len();
        for planned in &mut output.sequences {
            let sequence = &self.sequences[&planned.seq];
            if planned.len != 1 || planned.samples != [planned.seq] || !may_have_draft(sequence) {
                continue;
            }
            let most = self.num_worthwhile(sequence, num_rows).min(capacity);
            let Some(num_draft_tokens) = (1..=most).rev().find(|num| self.can_reserve(planned.seq, 1 + num))
            else {
                continue;
            };
            let copy = self.reserve(planned.seq, 1 + num_draft_tokens);
            planned.copy = planned.copy.or(copy);
            (planned.len, planned.num_draft_tokens) = (1 + num_draft_tokens, num_draft_tokens);
            capacity -= num_draft_tokens;
            num_rows += num_draft_tokens;
        }
    }

    /// The most drafted tokens of a step with sequences of several clients: a client without drafts waits for those of
    /// others, so they make the step no more than a part longer.
    fn max_with_other_clients(&self, output: &SchedulerOutput) -> usize {
        let client = |planned: &PlannedSequence| self.queue.group(self.sequences[&planned.seq].client);
        let mut clients = output.sequences.iter().map(client);
        let first = clients.next();
        if clients.all(|other| Some(other) == first) || !self.config.speculative.is_adaptive {
            return usize::MAX;
        }
        let time = self.step_time();
        let load: Load = output.sequences.iter().map(Load::of_sequence).sum();
        (MAX_DRAFT_TIME_RATIO * (time.own + time.of(load)) / time.row.max(f64::MIN_POSITIVE)) as usize
    }

    /// Rows of logits that a planned sequence takes at most.
    fn num_logits(&self, id: SeqId, start: usize, len: usize) -> usize {
        let sequence = &self.sequences[&id];
        if sequence.prompt_logits && start < sequence.num_prompt_tokens { len } else { 1 }
    }

    /// How many tokens to draft for a sequence if drafting takes so long: about as many as would be tried.
    #[must_use]
    pub fn num_worth_drafting(&self, id: SeqId, cost: DraftCost) -> usize {
        let Some(sequence) = self.sequences.get(&id) else { return 0 };
        let is_known = self.pace.as_ref().is_some_and(Pace::knows_seconds);
        let seconds = if is_known { cost.seconds_per_token } else { 0.0 };
        let chances = std::iter::repeat_n(cost.chance, self.config.speculative.num_speculative_tokens);
        self.num_worth_their_time(sequence, self.running.len(), chances, seconds)
    }

    /// How many of the drafted tokens to try in a step of `num_rows` rows.
    fn num_worthwhile(&self, sequence: &Sequence, num_rows: usize) -> usize {
        self.num_worth_their_time(sequence, num_rows, sequence.draft_chances().iter().copied(), 0.0)
    }

    /// How many tokens that are right at these chances are worth a row of a step of `num_rows` rows, and `seconds` more each:
    /// as long as one more is likelier to be right than the part of the step that its time is, counted in the tokens which the
    /// step gives.
    fn num_worth_their_time(
        &self,
        sequence: &Sequence,
        num_rows: usize,
        chances: impl Iterator<Item = f32>,
        seconds: f64,
    ) -> usize {
        let time = self.step_time();
        let most = sequence.max_len.saturating_sub(sequence.token_ids().len() + 1);
        let most = most.min(self.config.speculative.num_speculative_tokens);
        if !self.config.speculative.is_adaptive {
            return chances.take(most).count();
        }
        let (mut num_tokens, mut chance) = (num_rows.max(1) as f64, 1.0);
        let mut step = time.own + time.row * num_tokens;
        let pays = |own: &f32| {
            chance *= f64::from(*own);
            let is_worth_it = chance * step > (time.row + seconds) * num_tokens;
            num_tokens += chance;
            step += time.row + seconds;
            is_worth_it
        };
        chances.take(most).take_while(pays).count()
    }
}

/// Whether the next token of the sequence is a generated one, with nothing before it to compute.
fn may_have_draft(sequence: &Sequence) -> bool {
    sequence.status == SequenceStatus::Running
        && !sequence.is_held
        && sequence.num_uncomputed_tokens() == 1
        && sequence.num_computed_tokens >= sequence.num_prompt_tokens
        && sequence.forks.is_empty()
}
