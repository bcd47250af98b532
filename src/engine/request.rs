//! A caller's request.

use std::sync::Arc;

use crate::config::EngineConfig;
use crate::runner::Wanted;
use crate::sampling::{Constraint, SamplingParams};
use crate::scheduler::{ClientId, Weight};
use crate::{Error, ErrorKind, Result};

/// The number of a request in its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A prompt in tokens, with its parameters.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// At least one token.
    pub prompt_token_ids: Vec<u32>,
    /// How to choose tokens and when to stop.
    pub params: SamplingParams,
    /// What is wanted of the last prompt token: logits, to generate tokens, or its hidden state, which is reported instead
    /// of tokens.
    pub wanted: Wanted,
    /// Requests with different salts share no cached blocks.
    pub cache_salt: Option<String>,
    /// Report the model's logits for every prompt token.
    pub prompt_logits: bool,
    /// Report the log-probability of every prompt token but the first, and of this many most likely tokens
    /// at its position.
    pub prompt_logprobs: Option<usize>,
    /// Report how far the computation of the prompt is.
    pub prompt_progress: bool,
    /// Tokens that the outputs are likely to have much in common with, such as the text to be edited. They only affect
    /// speed.
    pub prediction: Vec<u32>,
    /// Every output follows this, for instance a [`Grammar`](crate::grammar::Grammar).
    pub constraint: Option<Arc<dyn Constraint>>,
    /// The client whose account pays for the request. Capacity is divided among clients, not requests.
    pub client: ClientId,
    /// Of the client, from now on; of all of its group together, if it is in one.
    pub weight: Weight,
    /// Clients of one group, such as the names under one key, have one account with one weight. None for a client with
    /// an account of its own.
    pub group: Option<ClientId>,
    /// Of the client's waiting requests those with the smallest number come first; those of other clients do not
    /// notice.
    pub priority: i32,
}

/// The engine's limits for its model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelLimits {
    /// Rows of the embedding: token ids are below.
    pub vocab_size: usize,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Tokens that it was trained for.
    pub max_position_embeddings: usize,
    /// The way out if its logits are NaN, if there is one.
    pub broken_logits_hint: Option<String>,
}

impl Request {
    /// A request with these tokens and parameters.
    #[must_use]
    pub fn new(prompt_token_ids: Vec<u32>, params: SamplingParams) -> Self {
        Self { prompt_token_ids, params, ..Self::default() }
    }

    /// A request for the hidden state of the last of these tokens.
    #[must_use]
    pub fn hidden_state(prompt_token_ids: Vec<u32>) -> Self {
        let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() };
        Self { wanted: Wanted::Hidden, ..Self::new(prompt_token_ids, params) }
    }

    /// The length at which each sequence ends for certain, in tokens of prompt and answer.
    #[must_use]
    pub fn max_len(&self, config: &EngineConfig) -> usize {
        let wanted = self.params.max_tokens.unwrap_or(config.max_model_len);
        self.prompt_token_ids.len().saturating_add(wanted).min(config.max_model_len)
    }

    /// Checks the request against the limits, before anything is allocated for it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`] or [`ErrorKind::ContextLength`], with the value and the limit.
    pub fn validate(&self, model: &ModelLimits, config: &EngineConfig) -> Result<()> {
        let num_prompt_tokens = self.prompt_token_ids.len();
        if num_prompt_tokens == 0 {
            return Err(Error::invalid_request("the prompt is empty")
                .with_hint("give at least one token, for instance the model's begin-of-text token"));
        }
        if num_prompt_tokens >= config.max_model_len {
            return Err(Error::new(
                ErrorKind::ContextLength,
                // Programs recognise this case, and the next one, by these sentences, with the numbers in these positions.
                format!(
                    "This model's maximum context length is {} tokens. However, your request has \
                     {num_prompt_tokens} input tokens. Please reduce the length of the input messages",
                    config.max_model_len
                ),
            )
            .with_hint(too_long_hint(num_prompt_tokens, model, config)));
        }
        if let Some(max_tokens) = self.params.max_tokens
            && num_prompt_tokens.saturating_add(max_tokens) > config.max_model_len
        {
            return Err(Error::new(
                ErrorKind::ContextLength,
                format!(
                    "This model's maximum context length is {} tokens. However, you requested {} tokens \
                     ({num_prompt_tokens} in the messages, {max_tokens} in the completion). Please reduce the \
                     length of the messages or completion",
                    config.max_model_len,
                    num_prompt_tokens.saturating_add(max_tokens)
                ),
            )
            .with_hint("lower max_tokens, or omit it to use the rest of the window")
            .with_param("max_tokens"));
        }
        for &token_id in &self.prompt_token_ids {
            crate::sampling::token_in_vocabulary("the prompt", token_id, model.vocab_size)?;
        }
        self.params.validate(model.vocab_size)?;
        crate::sampling::at_most_logprobs("prompt_logprobs", self.prompt_logprobs)?;
        if self.wanted == Wanted::Hidden {
            let with_tokens = [
                ("n", self.params.n > 1),
                ("logprobs", self.params.logprobs.is_some()),
                ("prompt_logprobs", self.prompt_logprobs.is_some()),
                ("prompt_logits", self.prompt_logits),
                ("constraint", self.constraint.is_some()),
            ];
            if let Some((name, _)) = with_tokens.into_iter().find(|(_, is_set)| *is_set) {
                return Err(Error::invalid_request(format!(
                    "a request for a hidden state generates no tokens, and has {name}"
                ))
                .with_hint(format!("give {name} in a request of its own"))
                .with_param(name));
            }
        }
        if self.params.n > config.max_num_seqs {
            return Err(Error::invalid_request(format!(
                "n is {}, but at most {} sequences run at once (--max-num-seqs)",
                self.params.n, config.max_num_seqs
            ))
            .with_param("n"));
        }
        Ok(())
    }
}

/// The way out for a prompt that does not fit.
fn too_long_hint(num_prompt_tokens: usize, model: &ModelLimits, config: &EngineConfig) -> &'static str {
    let trained = model.max_position_embeddings;
    if config.max_model_len >= trained || num_prompt_tokens >= trained {
        "it is the length that the model was trained for; shorten the prompt"
    } else if config.max_model_len >= config.kv_cache_tokens() {
        "it is the size of the KV cache; shorten the prompt, or raise --kv-cache-memory-bytes"
    } else {
        "a larger --max-model-len would hold it"
    }
}
