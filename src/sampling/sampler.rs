//! Chooses a token from a row of logits.
//!
//! The order of the steps is vLLM's: log-probabilities are those of the model's own logits; then logit bias, the ban on
//! end tokens, penalties, the mask of a constraint, temperature, min-p, top-k, top-p, and the draw. The result depends
//! only on the row, the parameters, the sequence's own tokens and its seed.

use super::philox::uniform;
use super::{SamplingParams, TokenMask};

/// The sampler's view of a sequence.
#[derive(Debug, Clone, Copy)]
pub struct SamplerInput<'a> {
    /// The request's parameters.
    pub params: &'a SamplingParams,
    /// Seed of the request.
    pub seed: u64,
    /// Number of the sequence in its request: sequences of one request draw different numbers.
    pub stream: u32,
    /// Given tokens.
    pub prompt_token_ids: &'a [u32],
    /// Generated tokens; their number is the index of the one to be chosen.
    pub output_token_ids: &'a [u32],
    /// Tokens that end the sequence; banned while fewer than `min_tokens` are generated.
    pub end_token_ids: &'a [u32],
    /// If present, no other token is chosen. It also decides which end tokens are allowed, for every `min_tokens`.
    pub allowed: Option<&'a TokenMask>,
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    /// The token.
    pub token_id: u32,
    /// If requested.
    pub logprobs: Option<TokenLogprobs>,
}

/// Log-probabilities (natural logarithm) under the model's own distribution, before any parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// The most likely tokens, most likely first; ties by token id.
    pub top: Vec<(u32, f32)>,
}

/// Log-probabilities of a token that was given, not chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct RankedLogprobs {
    /// Of the token, and of the most likely ones instead.
    pub logprobs: TokenLogprobs,
    /// Rank of the token by likelihood, 1 for the most likely one.
    pub rank: u32,
}

/// The sampler with its scratch memory.
#[derive(Debug, Default)]
pub struct Sampler {
    /// A copy of the row, changed by the parameters.
    logits: Vec<f32>,
    /// How often each token is in the output; all zero between calls.
    counts: Vec<u32>,
    candidates: Vec<(u32, f32)>,
}

impl Sampler {
    /// Chooses a token from `logits` (f32, one for each token of the vocabulary), or returns `None` if
    /// they contain a NaN or +infinity, or no finite value among the tokens that are possible.
    pub fn sample(&mut self, logits: &[f32], input: &SamplerInput<'_>) -> Option<SampledToken> {
        let best = argmax(logits)?;
        let params = input.params;
        let logprobs = params.logprobs.map(|num_top| self.logprobs(logits, num_top));
        let ban_end = input.allowed.is_none()
            && input.output_token_ids.len() < params.min_tokens
            && !input.end_token_ids.is_empty();
        let unchanged =
            input.allowed.is_none() && params.logit_bias.is_empty() && !ban_end && !params.has_penalties();
        let token_id = if params.is_greedy() && unchanged {
            best
        } else {
            self.logits.clear();
            self.logits.extend_from_slice(logits);
            self.adjust(input, ban_end);
            if let Some(allowed) = input.allowed {
                allowed.apply(&mut self.logits);
            }
            match params.is_greedy() {
                true => argmax(&self.logits)?,
                false => {
                    self.draw(params, uniform(input.seed, input.stream, input.output_token_ids.len() as u64))?
                }
            }
        };
        let logprobs = logprobs.map(|(log_sum, top)| TokenLogprobs {
            logprob: (f64::from(logits[token_id as usize]) - log_sum) as f32,
            top,
        });
        Some(SampledToken { token_id, logprobs })
    }

    /// The log-probability of `token_id` at the position of these logits. Logits that are no numbers
    /// give log-probabilities that are none.
    pub fn rank(&mut self, logits: &[f32], token_id: u32, num_top: usize) -> RankedLogprobs {
        let (log_sum, top) = self.logprobs(logits, num_top);
        let logit = logits.get(token_id as usize).copied().unwrap_or(f32::NAN);
        let num_above = logits.iter().filter(|other| **other > logit).count();
        let logprob = (f64::from(logit) - log_sum) as f32;
        RankedLogprobs { logprobs: TokenLogprobs { logprob, top }, rank: num_above as u32 + 1 }
    }

    /// The logarithm of the sum of the exponentials, and the `num_top` most likely tokens.
    fn logprobs(&mut self, logits: &[f32], num_top: usize) -> (f64, Vec<(u32, f32)>) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        let log_sum = f64::from(max) + sum.ln();
        self.candidates.clear();
        self.candidates.extend((0_u32..).zip(logits.iter().copied()));
        let num_top = num_top.min(logits.len());
        if num_top < logits.len() {
            self.candidates.select_nth_unstable_by(num_top, most_likely_first);
        }
        self.candidates.truncate(num_top);
        self.candidates.sort_unstable_by(most_likely_first);
        let top = self.candidates.iter().map(|&(id, logit)| (id, (f64::from(logit) - log_sum) as f32));
        (log_sum, top.collect())
    }

    /// Applies everything that changes single logits.
    fn adjust(&mut self, input: &SamplerInput<'_>, ban_end: bool) {
        let params = input.params;
        for (&token_id, &bias) in &params.logit_bias {
            if let Some(logit) = self.logits.get_mut(token_id as usize) {
                *logit += bias;
            }
        }
        if ban_end {
            for &token_id in input.end_token_ids {
                if let Some(logit) = self.logits.get_mut(token_id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        if !params.has_penalties() {
            return;
        }
        self.counts.resize(self.logits.len().max(self.counts.len()), 0);
        let (prompt, output) = (input.prompt_token_ids, input.output_token_ids);
        for &token_id in output {
            self.counts[token_id as usize] += 1;
        }
        for &token_id in output {
            let count = std::mem::take(&mut self.counts[token_id as usize]);
            if count > 0 {
                let logit = &mut self.logits[token_id as usize];
                *logit = repeated(*logit, params.repetition_penalty);
                *logit -= params.frequency_penalty * count as f32 + params.presence_penalty;
            }
        }
        if params.repetition_penalty != 1.0 {
            // Mark the output's tokens again: each token is penalised once, wherever it is.
            output.iter().for_each(|&id| self.counts[id as usize] = 1);
            for &token_id in prompt {
                if std::mem::replace(&mut self.counts[token_id as usize], 1) == 0 {
                    let logit = &mut self.logits[token_id as usize];
                    *logit = repeated(*logit, params.repetition_penalty);
                }
            }
            prompt.iter().chain(output).for_each(|&id| self.counts[id as usize] = 0);
        }
    }

    /// Draws from the tokens that the filters leave, with `u` in [0, 1).
    fn draw(&mut self, params: &SamplingParams, u: f64) -> Option<u32> {
        let max = self.logits[argmax(&self.logits)? as usize];
        // Probabilities up to a common factor: the most likely token has 1.
        let scale = 1.0 / params.temperature;
        for logit in &mut self.logits {
            *logit = ((*logit - max) * scale).exp();
        }
        let weights = &self.logits;
        let keeps_all = params.top_k == 0 && params.top_p >= 1.0;
        if keeps_all {
            let kept = |weight: f32| if weight >= params.min_p { f64::from(weight) } else { 0.0 };
            let total: f64 = weights.iter().map(|&weight| kept(weight)).sum();
            return pick((0_u32..).zip(weights.iter().map(|&weight| kept(weight))), u * total);
        }
        // Tokens with a negligible total probability, outside top-p, need not be sorted.
        let total: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
        let negligible = ((1.0 - f64::from(params.top_p)) * total / weights.len() as f64) as f32;
        let threshold = params.min_p.max(if params.top_k == 0 { negligible } else { 0.0 });
        self.candidates.clear();
        let candidates = (0_u32..).zip(weights.iter().copied()).filter(|&(_, weight)| weight >= threshold);
        self.candidates.extend(candidates);
        if params.top_k > 0 && params.top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(params.top_k, most_likely_first);
            self.candidates.truncate(params.top_k);
        }
        self.candidates.sort_unstable_by(most_likely_first);
        let total: f64 = match params.top_k == 0 && params.min_p == 0.0 {
            true => total,
            false => self.candidates.iter().map(|&(_, weight)| f64::from(weight)).sum(),
        };
        let mut nucleus = 0.0;
        let wanted = f64::from(params.top_p) * total;
        let len = self.candidates.iter().position(|&(_, weight)| {
            nucleus += f64::from(weight);
            nucleus >= wanted
        });
        self.candidates.truncate(len.map_or(self.candidates.len(), |last| last + 1));
        // In the order of ids, as without filters and as on a device that does not sort.
        self.candidates.sort_unstable_by_key(|&(id, _)| id);
        let total: f64 = self.candidates.iter().map(|&(_, weight)| f64::from(weight)).sum();
        pick(self.candidates.iter().map(|&(id, weight)| (id, f64::from(weight))), u * total)
    }
}

/// The index of the largest value, the first one on ties; `None` if a value is NaN or +infinity or all
/// are -infinity.
fn argmax(values: &[f32]) -> Option<u32> {
    let (mut best, mut max) = (0, f32::NEG_INFINITY);
    let mut is_nan = false;
    for (index, &value) in values.iter().enumerate() {
        is_nan |= value.is_nan();
        if value > max {
            (best, max) = (index, value);
        }
    }
    (!is_nan && max.is_finite()).then_some(best as u32)
}

fn repeated(logit: f32, penalty: f32) -> f32 {
    if logit > 0.0 { logit / penalty } else { logit * penalty }
}

fn most_likely_first(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The first item at which the running sum exceeds `target`; for a target lost to rounding, the last
/// one with any weight.
fn pick(weights: impl Iterator<Item = (u32, f64)>, target: f64) -> Option<u32> {
    let (mut sum, mut last) = (0.0, None);
    for (id, weight) in weights {
        if weight > 0.0 {
            sum += weight;
            last = Some(id);
            if sum > target {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(logits: &[f32], params: &SamplingParams, seed: u64, output: &[u32]) -> Option<SampledToken> {
        let input = SamplerInput {
            params,
            seed,
            stream: 0,
            prompt_token_ids: &[],
            output_token_ids: output,
            end_token_ids: &[0],
            allowed: None,
        };
        Sampler::default().sample(logits, &input)
    }

    /// The tokens that can be drawn, by many seeds.
    fn support(logits: &[f32], params: &SamplingParams) -> Vec<u32> {
        let mut ids: Vec<u32> =
            (0..400).map(|seed| sample(logits, params, seed, &[]).unwrap().token_id).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    #[test]
    fn filters_keep_what_they_say() {
        // Probabilities 0.4, 0.3, 0.2, 0.1.
        let logits: Vec<f32> = [0.4_f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
        let check = |change: fn(&mut SamplingParams), wanted: &[u32]| {
            let mut params = SamplingParams::default();
            change(&mut params);
            assert_eq!(support(&logits, &params), wanted, "{params:?}");
        };
        check(|_| (), &[0, 1, 2, 3]);
        check(|p| p.temperature = 0.0, &[0]);
        check(|p| p.top_k = 1, &[0]);
        check(|p| p.top_k = 3, &[0, 1, 2]);
        check(|p| p.top_k = 100, &[0, 1, 2, 3]);
        check(|p| p.top_p = 0.35, &[0]);
        check(|p| p.top_p = 0.65, &[0, 1]);
        check(|p| p.min_p = 0.45, &[0, 1, 2]);
        check(|p| (p.top_k, p.top_p) = (2, 0.5), &[0]);
        check(|p| (p.min_p, p.top_p) = (0.45, 0.99), &[0, 1, 2]);
        check(|p| p.logit_bias = [(3, 100.0)].into(), &[3]);
        check(|p| p.min_tokens = 1, &[1, 2, 3]);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let probabilities = [0.1_f64, 0.2, 0.3, 0.4];
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
        for params in [SamplingParams::default(), SamplingParams { top_k: 4, ..SamplingParams::default() }] {
            let mut counts = [0_u32; 4];
            for seed in 0..20_000 {
                counts[sample(&logits, &params, seed, &[]).unwrap().token_id as usize] += 1;
            }
            for (count, probability) in counts.iter().zip(probabilities) {
                assert!((f64::from(*count) / 20_000.0 - probability).abs() < 0.015, "{counts:?}");
            }
        }
    }

    #[test]
    fn penalties_apply_once_for_each_token() {
        let greedy = SamplingParams::greedy();
        let check = |params: SamplingParams, prompt: &[u32], output: &[u32], wanted: u32| {
            let input = SamplerInput {
                params: &params,
                seed: 0,
                stream: 0,
                prompt_token_ids: prompt,
                output_token_ids: output,
                end_token_ids: &[],
                allowed: None,
            };
            let mut sampler = Sampler::default();
            for _ in 0..2 {
                let token = sampler.sample(&[1.0, 0.8, -0.5, 0.45], &input).unwrap();
                assert_eq!(token.token_id, wanted, "{params:?} {prompt:?} {output:?}");
            }
        };
        let repetition = |penalty| SamplingParams { repetition_penalty: penalty, ..greedy.clone() };
        check(repetition(1.2), &[], &[0, 0, 0], 0);
        check(repetition(1.3), &[0, 0], &[0], 1);
        check(repetition(2.0), &[0, 1], &[1, 0], 0);
        check(repetition(2.5), &[0, 1], &[], 3);
        check(SamplingParams { presence_penalty: 0.15, ..greedy.clone() }, &[0], &[0, 0], 0);
        check(SamplingParams { presence_penalty: 0.25, ..greedy.clone() }, &[], &[0, 0], 1);
        check(SamplingParams { frequency_penalty: 0.15, ..greedy.clone() }, &[], &[0, 0], 1);
        check(SamplingParams { frequency_penalty: 0.15, ..greedy.clone() }, &[], &[0], 0);
    }

    #[test]
    fn logprobs_are_of_the_unchanged_distribution() {
        let logits: Vec<f32> = [0.1_f32, 0.6, 0.3].iter().map(|p| p.ln()).collect();
        let params =
            SamplingParams { logprobs: Some(2), logit_bias: [(0, 50.0)].into(), ..SamplingParams::greedy() };
        let token = sample(&logits, &params, 0, &[]).unwrap();
        assert_eq!(token.token_id, 0);
        let logprobs = token.logprobs.unwrap();
        assert!((logprobs.logprob - 0.1_f32.ln()).abs() < 1e-5);
        assert_eq!(logprobs.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2]);
        assert!((logprobs.top[0].1 - 0.6_f32.ln()).abs() < 1e-5);
    }

    #[test]
    fn logits_that_are_no_numbers_are_reported() {
        for logits in [[f32::NAN, 1.0], [1.0, f32::NAN], [f32::INFINITY, 0.0], [f32::NEG_INFINITY; 2]] {
            for params in [SamplingParams::default(), SamplingParams::greedy()] {
                assert_eq!(sample(&logits, &params, 1, &[]), None, "{logits:?}");
            }
        }
    }

    proptest! {
        /// For all parameters, and for every likelihood of the token.
        #[test]
        fn only_allowed_tokens_are_chosen(
            logits in proptest::collection::vec(-30.0_f32..30.0, 2..100),
            chosen in proptest::collection::vec(0_u32..100, 1..5),
            (temperature, top_k, top_p, min_p) in (0.0_f32..2.0, 0_usize..4, 0.01_f32..1.0, 0.0_f32..1.0),
            (penalty, bias, min_tokens) in (0.1_f32..3.0, 0_u32..100, 0_usize..3),
            seed in any::<u64>(),
        ) {
            let len = logits.len() as u32;
            let allowed: TokenMask = chosen.iter().map(|id| id % len).collect();
            let params = SamplingParams {
                temperature, top_k, top_p, min_p, min_tokens, repetition_penalty: penalty, logprobs: Some(1),
                logit_bias: [(bias % len, 100.0)].into(), ..SamplingParams::default()
            };
            let mut input = SamplerInput {
                params: &params, seed, stream: 0, prompt_token_ids: &[0], output_token_ids: &[1],
                end_token_ids: &[0], allowed: Some(&allowed),
            };
            let token = Sampler::default().sample(&logits, &input).unwrap();
            prop_assert!(allowed.contains(token.token_id));
            let all: TokenMask = (0..len).collect();
            input.allowed = Some(&all);
            let free = SamplingParams { min_tokens: 0, ..params.clone() };
            let unmasked = SamplerInput { params: &free, allowed: None, ..input };
            let logprobs = token.logprobs.unwrap();
            prop_assert_eq!(
                Sampler::default().sample(&logits, &input),
                Sampler::default().sample(&logits, &unmasked)
            );
            // Log-probabilities are those of the model, for every set of allowed tokens.
            prop_assert_eq!(logprobs.top, Sampler::default().sample(&logits, &unmasked).unwrap().logprobs.unwrap().top);
        }

        /// The fast nucleus against one that sorts everything.
        #[test]
        fn top_p_agrees_with_a_full_sort(
            logits in proptest::collection::vec(-20.0_f32..20.0, 1..60),
            top_p in 0.01_f32..1.0,
            seed in any::<u64>(),
        ) {
            let params = SamplingParams { top_p, ..SamplingParams::default() };
            let drawn = sample(&logits, &params, seed, &[]).unwrap().token_id;
            let mut order: Vec<(u32, f32)> = (0_u32..).zip(logits.iter().copied()).collect();
            order.sort_by(most_likely_first);
            let max = order[0].1;
            let total: f64 = order.iter().map(|(_, l)| f64::from((l - max).exp())).sum();
            let mut before = 0.0;
            for (id, logit) in order {
                if id == drawn {
                    prop_assert!(before <= (f64::from(top_p) + 1e-6) * total);
                    break;
                }
                before += f64::from((logit - max).exp());
            }
        }
    }
}
