//! A constraint that allows random tokens, and its expected results.

use std::hash::{DefaultHasher, Hash, Hasher};

use tinyvllm::engine::FinishReason;
use tinyvllm::sampling::{Constraint, ConstraintState, Sampler, SamplerInput, SamplingParams, TokenMask};
use tinyvllm::{Error, Result};

use super::fake_runner::{EOS, VOCAB_SIZE, logits};

/// A third of the tokens may come next, another third after other tokens; sometimes the output may end, at some
/// length it must, and some rules lead nowhere.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rule(pub(crate) u64);

impl Rule {
    fn chance(self, tokens: &[u32], what: u32) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.0, tokens, what).hash(&mut hasher);
        hasher.finish()
    }

    pub(crate) fn allowed(self, tokens: &[u32]) -> Vec<u32> {
        if tokens.len() as u64 >= 3 + self.0 % 20 {
            return Vec::new();
        }
        (1..VOCAB_SIZE as u32).filter(|id| *id == 1 || self.chance(tokens, *id).is_multiple_of(3)).collect()
    }

    pub(crate) fn may_end(self, tokens: &[u32]) -> bool {
        match self.allowed(tokens).is_empty() {
            true => !self.0.is_multiple_of(5),
            false => self.chance(tokens, EOS).is_multiple_of(6),
        }
    }
}

struct RuleState {
    rule: Rule,
    tokens: Vec<u32>,
}

impl Constraint for Rule {
    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(RuleState { rule: *self, tokens: Vec::new() })
    }
}

impl ConstraintState for RuleState {
    fn allowed(&mut self, allowed: &mut TokenMask) -> Result<bool> {
        *allowed = self.rule.allowed(&self.tokens).into_iter().collect();
        Ok(self.rule.may_end(&self.tokens))
    }

    fn accept(&mut self, token_id: u32) -> Result<()> {
        if !self.rule.allowed(&self.tokens).contains(&token_id) {
            return Err(Error::internal(format!("{token_id} is not allowed after {:?}", self.tokens)));
        }
        self.tokens.push(token_id);
        Ok(())
    }

    /// Some that may come next, and some that may not.
    fn forced(&mut self) -> Vec<u32> {
        let mut tokens = self.tokens.clone();
        for _ in 0..self.rule.chance(&tokens, EOS) % 4 {
            tokens.extend(self.rule.allowed(&tokens).first());
        }
        let mut forced = tokens.split_off(self.tokens.len());
        forced.extend(self.rule.chance(&tokens, EOS).is_multiple_of(3).then_some(2));
        forced
    }

    fn roll_back(&mut self, num_tokens: usize) -> Result<()> {
        self.tokens.truncate(self.tokens.len().checked_sub(num_tokens).expect("more than there are"));
        Ok(())
    }
}

/// The expected result of a request under a rule, computed without an engine, mask or early end.
pub(crate) fn reference(
    rule: Rule,
    prompt: &[u32],
    params: &SamplingParams,
    stream: u32,
    max_len: usize,
) -> (Vec<u32>, FinishReason) {
    let mut end_token_ids = params.stop_token_ids.clone();
    if !params.ignore_eos {
        end_token_ids.push(EOS);
    }
    let max_len = max_len.min(prompt.len() + params.max_tokens.unwrap_or(usize::MAX / 2));
    let free = SamplingParams { min_tokens: 0, ..params.clone() };
    let mut tokens = prompt.to_vec();
    loop {
        let output = &tokens[prompt.len()..];
        let mut candidates = rule.allowed(output);
        if candidates.is_empty() && rule.may_end(output) {
            return (output.to_vec(), FinishReason::Stop);
        }
        if tokens.len() >= max_len {
            return (output.to_vec(), FinishReason::Length);
        }
        if candidates.is_empty() {
            return (output.to_vec(), FinishReason::Error);
        }
        let can_end = output.len() >= params.min_tokens;
        if can_end && rule.may_end(output) {
            candidates.extend(&end_token_ids);
        } else if !can_end && candidates.iter().any(|id| !end_token_ids.contains(id)) {
            candidates.retain(|id| !end_token_ids.contains(id));
        }
        let mut logits = logits(&tokens);
        for (id, logit) in (0..).zip(&mut logits) {
            if !candidates.contains(&id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        let input = SamplerInput {
            params: &free,
            seed: params.seed.unwrap(),
            stream,
            prompt_token_ids: prompt,
            output_token_ids: output,
            end_token_ids: &[],
            allowed: None,
        };
        let token = Sampler::default().sample(&logits, &input).unwrap().token_id;
        tokens.push(token);
        if can_end && end_token_ids.contains(&token) {
            return (tokens.split_off(prompt.len()), FinishReason::Stop);
        }
    }
}
