//! Reports on the tokens of a prompt: vLLM's `prompt_logprobs`, and `echo` with `logprobs` in OpenAI's
//! completions.

use serde_json::{Map, Value, json};

use super::super::account::charge;
use super::super::error::ApiError;
use super::shape::{LOGPROB_OF_ZERO, number, token_string};
use super::types::CompletionTokens;
use tinyvllm::engine::Request;
use tinyvllm::sampling::RankedLogprobs;
use tinyvllm::tokenizer::Tokenizer;

/// Most tokens in all lists of an answer, including likely ones. Each takes about 60 bytes.
const MAX_ENTRIES: usize = 1 << 20;
/// Memory for such a token: an object of three fields with its name, and its text in the answer.
const ENTRY_BYTES: usize = 640;

/// The prompts of a request, and their log-probabilities so far.
pub(super) struct PromptReport {
    prompts: Vec<Prompt>,
    /// Number of likely tokens in `prompt_logprobs`, if requested.
    num_listed: Option<usize>,
    /// Number of likely tokens in `logprobs`, if it includes the prompt.
    num_echoed: Option<usize>,
}

struct Prompt {
    token_ids: Vec<u32>,
    /// From the second token on.
    logprobs: Vec<RankedLogprobs>,
}

/// The tokens of one position by their ids, as in vLLM: the prompt's own token first.
pub(super) type Listed = Option<Map<String, Value>>;

impl PromptReport {
    /// Sets what the report needs in `requests`; `None` if there is no report.
    ///
    /// # Errors
    /// 400 if the answer would be too large.
    pub(super) fn prepare(
        requests: &mut [Request],
        num_listed: Option<usize>,
        num_echoed: Option<usize>,
    ) -> Result<Option<Self>, ApiError> {
        let Some(num_top) = num_listed.max(num_echoed) else { return Ok(None) };
        let entries = |request: &Request| {
            let lists = [num_listed, num_echoed].into_iter().flatten();
            let for_each_token: usize = lists.map(|num_top| num_top + 1).sum();
            request.prompt_token_ids.len() * for_each_token * request.params.n
        };
        let num_entries: usize = requests.iter().map(entries).sum();
        if num_entries > MAX_ENTRIES {
            let param = if num_listed.is_some() { "prompt_logprobs" } else { "logprobs" };
            let message = format!(
                "{param} would report {num_entries} tokens, for all positions of the prompt and all choices \
                 together; the limit is {MAX_ENTRIES}"
            );
            return Err(ApiError::invalid(param, message));
        }
        charge(num_entries * ENTRY_BYTES)?;
        let prompts = requests.iter_mut().map(|request| {
            request.prompt_logprobs = Some(num_top);
            Prompt { token_ids: request.prompt_token_ids.clone(), logprobs: Vec::new() }
        });
        Ok(Some(Self { prompts: prompts.collect(), num_listed, num_echoed }))
    }

    /// Adds the next log-probabilities of a prompt.
    pub(super) fn add(&mut self, prompt: usize, logprobs: Vec<RankedLogprobs>) {
        if let Some(prompt) = self.prompts.get_mut(prompt) {
            prompt.logprobs.extend(logprobs);
        }
    }

    /// The field `prompt_logprobs`. The first token has no entry, because no token precedes it.
    pub(super) fn listed(&self, prompt: usize, tokenizer: Option<&Tokenizer>) -> Option<Vec<Listed>> {
        let (prompt, num_top) = (self.prompts.get(prompt)?, self.num_listed?);
        let index = |(token_id, RankedLogprobs { logprobs, rank }): (&u32, &RankedLogprobs)| {
            let entry = |id: u32, logprob: f32, rank: u32| {
                let text = token_string(id, tokenizer);
                (id.to_string(), json!({"logprob": number(logprob), "rank": rank, "decoded_token": text}))
            };
            let mut tokens = Map::from_iter([entry(*token_id, logprobs.logprob, *rank)]);
            for ((id, logprob), rank) in logprobs.top.iter().take(num_top).zip(1..) {
                let (id, token) = entry(*id, *logprob, rank);
                tokens.entry(id).or_insert(token);
            }
            Some(tokens)
        };
        let others = prompt.token_ids.iter().skip(1).zip(&prompt.logprobs).map(index);
        Some(std::iter::once(None).chain(others).collect())
    }

    /// The beginning of the field `logprobs`, for the echoed prompt.
    pub(super) fn echoed(&self, prompt: usize, tokenizer: Option<&Tokenizer>) -> Option<CompletionTokens> {
        let (prompt, num_top) = (self.prompts.get(prompt)?, self.num_echoed?);
        let mut list = CompletionTokens::default();
        let mut offset = 0;
        for (index, &token_id) in prompt.token_ids.iter().enumerate() {
            let token = token_string(token_id, tokenizer);
            let logprobs = index.checked_sub(1).and_then(|index| prompt.logprobs.get(index));
            list.text_offset.push(offset);
            // A token that only begins a text does not appear in it.
            if !tokenizer.is_some_and(|tokenizer| tokenizer.is_special(token_id)) {
                offset += token.chars().count();
            }
            list.token_logprobs.push(logprobs.map(|ranked| ranked.logprobs.logprob.max(LOGPROB_OF_ZERO)));
            list.top_logprobs.push(logprobs.map(|RankedLogprobs { logprobs, .. }| {
                let mut top = Map::new();
                for (id, logprob) in logprobs.top.iter().take(num_top) {
                    top.entry(token_string(*id, tokenizer)).or_insert_with(|| number(*logprob));
                }
                top.entry(token.as_str()).or_insert_with(|| number(logprobs.logprob));
                top
            }));
            list.tokens.push(token);
        }
        Some(list)
    }
}
