//! The sampling parameters of a request. Pure data and its checks; does not depend on tensors.

use std::collections::BTreeMap;

use crate::{Error, Result};

/// Largest accepted `n`.
pub(crate) const MAX_N: usize = 128;
/// Largest accepted number of top log-probabilities.
pub(crate) const MAX_LOGPROBS: usize = 20;
/// Most entries of a logit bias.
pub(crate) const MAX_LOGIT_BIAS: usize = 1_024;
/// Largest logit bias, and the smallest one without its sign.
const MAX_BIAS: f32 = 100.0;
/// Most stop strings.
pub(crate) const MAX_STOP_STRINGS: usize = 16;
/// Most bytes of a stop string.
pub(crate) const MAX_STOP_BYTES: usize = 256;

/// How to choose tokens and when to stop. The names and meanings are vLLM's.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 chooses the most likely token. Between 0 and 2; below 1e-5 counts as 0.
    pub temperature: f32,
    /// Keep only this many most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most likely tokens whose probabilities sum to this. In (0, 1].
    pub top_p: f32,
    /// Drop tokens less likely than this times the most likely one. In [0, 1].
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or output. In (0, 10].
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output. In [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted once for each time that the token is in the output. In [-2, 2].
    pub frequency_penalty: f32,
    /// Makes the request reproducible by itself; without it the engine draws one.
    pub seed: Option<u64>,
    /// The text ends before any of these. Checked on text, above the engine.
    pub stop: Vec<String>,
    /// Tokens that end the sequence, in addition to the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Maximum tokens to generate; none for the maximum that fits.
    pub max_tokens: Option<usize>,
    /// Tokens to generate before the sequence may end.
    pub min_tokens: usize,
    /// Do not end at the model's own end tokens.
    pub ignore_eos: bool,
    /// Added to the logits of these tokens. In [-100, 100].
    pub logit_bias: BTreeMap<u32, f32>,
    /// Report the log-probability of each token and of this many most likely ones.
    pub logprobs: Option<usize>,
    /// Sequences to generate for the prompt.
    pub n: usize,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            max_tokens: None,
            min_tokens: 0,
            ignore_eos: false,
            logit_bias: BTreeMap::new(),
            logprobs: None,
            n: 1,
        }
    }
}

impl SamplingParams {
    /// Always the most likely token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Whether the most likely token is always chosen.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature < 1e-5
    }

    /// Whether a logit depends on the tokens before.
    #[must_use]
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Checks every value against its range.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidRequest`] naming the parameter, the value and the range.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        in_range("temperature", self.temperature, 0.0, 2.0)?;
        in_range("min_p", self.min_p, 0.0, 1.0)?;
        in_range("top_p", self.top_p, f32::MIN_POSITIVE, 1.0)?;
        in_range("repetition_penalty", self.repetition_penalty, f32::MIN_POSITIVE, 10.0)?;
        in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        at_most("n", self.n, MAX_N)?;
        at_least_one("n", self.n)?;
        at_most_logprobs("logprobs", self.logprobs)?;
        at_most_entries("logit_bias", self.logit_bias.len(), MAX_LOGIT_BIAS)?;
        at_most_entries("stop", self.stop.len(), MAX_STOP_STRINGS)?;
        if let Some(max_tokens) = self.max_tokens {
            at_least_one("max_tokens", max_tokens)?;
            if self.min_tokens > max_tokens {
                return Err(Error::invalid_request(format!(
                    "min_tokens is {}, but max_tokens is {max_tokens}",
                    self.min_tokens
                ))
                .with_param("min_tokens"));
            }
        }
        for (index, stop) in self.stop.iter().enumerate() {
            if stop.is_empty() || stop.len() > MAX_STOP_BYTES {
                return Err(Error::invalid_request(format!(
                    "stop[{index}] has {} bytes; it must have 1 to {MAX_STOP_BYTES}",
                    stop.len()
                ))
                .with_param("stop"));
            }
        }
        for (&token_id, &bias) in &self.logit_bias {
            if !(-MAX_BIAS..=MAX_BIAS).contains(&bias) {
                return Err(Error::invalid_request(format!(
                    "logit_bias of token {token_id} is {bias}; it must be at least -{MAX_BIAS} and at most {MAX_BIAS}"
                ))
                .with_param("logit_bias"));
            }
            token_in_vocabulary("logit_bias", token_id, vocab_size)
                .map_err(|error| error.with_param("logit_bias"))?;
        }
        at_most_entries("stop_token_ids", self.stop_token_ids.len(), MAX_LOGIT_BIAS)?;
        for &token_id in &self.stop_token_ids {
            token_in_vocabulary("stop_token_ids", token_id, vocab_size)
                .map_err(|error| error.with_param("stop_token_ids"))?;
        }
        Ok(())
    }
}

fn in_range(name: &'static str, value: f32, low: f32, high: f32) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    let low = if low == f32::MIN_POSITIVE { "above 0".to_owned() } else { format!("at least {low}") };
    let message = format!("{name} is {value}; it must be {low} and at most {high}");
    Err(Error::invalid_request(message).with_param(name))
}

fn at_most(name: &'static str, value: usize, limit: usize) -> Result<()> {
    if value <= limit {
        return Ok(());
    }
    Err(Error::invalid_request(format!("{name} is {value}; it must be at most {limit}")).with_param(name))
}

fn at_most_entries(name: &'static str, num_entries: usize, limit: usize) -> Result<()> {
    if num_entries <= limit {
        return Ok(());
    }
    let message = format!("{name} has {num_entries} entries; it must have at most {limit}");
    Err(Error::invalid_request(message).with_param(name))
}

fn at_least_one(name: &'static str, value: usize) -> Result<()> {
    if value > 0 {
        return Ok(());
    }
    Err(Error::invalid_request(format!("{name} is 0; it must be at least 1")).with_param(name))
}

/// Checks a number of top log-probabilities.
pub(crate) fn at_most_logprobs(name: &'static str, num_top: Option<usize>) -> Result<()> {
    at_most(name, num_top.unwrap_or(0), MAX_LOGPROBS)
}

pub(crate) fn token_in_vocabulary(name: &str, token_id: u32, vocab_size: usize) -> Result<()> {
    if (token_id as usize) < vocab_size {
        return Ok(());
    }
    Err(Error::invalid_request(format!(
        "{name} has the token id {token_id}, but the vocabulary has {vocab_size} tokens"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_values_are_refused_by_name() {
        let check = |change: fn(&mut SamplingParams), wanted: &str| {
            let mut params = SamplingParams::default();
            change(&mut params);
            let error = params.validate(100).unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::InvalidRequest);
            assert!(error.message().contains(wanted), "{error} should say {wanted}");
        };
        assert!(SamplingParams::default().validate(100).is_ok());
        check(|p| p.temperature = f32::NAN, "temperature is NaN");
        check(|p| p.temperature = -1.0, "temperature is -1");
        check(|p| p.temperature = 100.0, "at most 2");
        check(|p| p.top_p = 0.0, "above 0");
        check(|p| p.top_p = 2.0, "top_p is 2");
        check(|p| p.min_p = f32::INFINITY, "min_p is inf");
        check(|p| p.repetition_penalty = 0.0, "repetition_penalty is 0");
        check(|p| p.presence_penalty = 3.0, "presence_penalty is 3");
        check(|p| p.n = 0, "n is 0");
        check(|p| p.n = 129, "n is 129; it must be at most 128");
        check(|p| p.logprobs = Some(21), "logprobs is 21");
        check(|p| p.max_tokens = Some(0), "max_tokens is 0");
        check(|p| (p.max_tokens, p.min_tokens) = (Some(3), 4), "min_tokens is 4");
        check(|p| p.stop = vec![String::new()], "0 bytes");
        check(|p| p.stop = vec!["x".repeat(257)], "257 bytes");
        check(|p| p.stop = vec!["x".to_owned(); 17], "stop has 17 entries");
        check(|p| p.logit_bias = [(100, 1.0)].into(), "token id 100");
        check(|p| p.logit_bias = [(1, 1e9)].into(), "logit_bias of token 1 is 1000000000");
        check(|p| p.stop_token_ids = vec![4_000_000_000], "token id 4000000000");
    }
}
