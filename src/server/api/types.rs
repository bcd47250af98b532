//! Answers in OpenAI's format, with the additions of vLLM and of this program. Pure data.

use serde::Serialize;

use super::super::generation::Totals;
use super::prompt_report::Listed;
use tinyvllm::engine::PromptProgress;

/// An answer, or a chunk of one.
#[derive(Debug, Serialize)]
pub(super) struct Envelope<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: Vec<Choice>,
    /// The outer option is whether the field is present, the inner one whether it is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<Vec<Listed>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timings: Option<Timings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_progress: Option<Reading>,
}

/// The progress of the prompt, as llama.cpp's server reports it.
#[derive(Debug, Serialize)]
pub(in super::super) struct Reading {
    /// Tokens of the prompt.
    total: usize,
    /// Tokens of the prompt that were found in the prefix cache.
    cache: usize,
    /// Tokens of the prompt that were computed or found.
    processed: usize,
    /// Time since the first step of the request.
    time_ms: f64,
}

impl From<PromptProgress> for Reading {
    fn from(progress: PromptProgress) -> Self {
        Self {
            total: progress.num_prompt_tokens,
            cache: progress.num_cached_tokens,
            processed: progress.num_processed_tokens,
            time_ms: progress.time.as_micros() as f64 / 1e3,
        }
    }
}

/// One sequence of the answer.
#[derive(Debug, Serialize)]
pub(super) struct Choice {
    pub(super) index: usize,
    #[serde(flatten)]
    pub(super) content: Content,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<Vec<Listed>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<u32>>,
}

/// The stop string or token of the request that ended a choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(super) enum StopReason {
    /// A stop string.
    Text(String),
    /// A stop token.
    Token(u32),
}

impl StopReason {
    pub(super) fn new(text: Option<String>, token_id: Option<u32>) -> Option<Self> {
        text.map(Self::Text).or(token_id.map(Self::Token))
    }
}

/// The output of a choice, in the field of its interface.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Content {
    /// A complete message of a chat.
    Message { message: Message },
    /// A chunk of a message.
    Delta { delta: Delta },
    /// A completion or a chunk of one.
    Text { text: String },
}

/// The assistant's turn.
#[derive(Debug, Serialize)]
pub(super) struct Message {
    pub(super) role: &'static str,
    pub(super) content: Option<String>,
    pub(super) refusal: Option<String>,
    /// The reasoning, under vLLM's older and its newer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCall>,
}

impl Message {
    /// A message without content.
    pub(super) fn new() -> Self {
        Self {
            role: "assistant",
            content: None,
            refusal: None,
            reasoning_content: None,
            reasoning: None,
            tool_calls: Vec::new(),
        }
    }
}

/// A tool call.
#[derive(Debug, Default, Serialize)]
pub(super) struct ToolCall {
    pub(super) id: String,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) function: FunctionCall,
}

/// The function of a call.
#[derive(Debug, Default, Serialize)]
pub(super) struct FunctionCall {
    pub(super) name: String,
    /// JSON as a string.
    pub(super) arguments: String,
}

/// An increment of the assistant's turn.
#[derive(Debug, Default, Serialize)]
pub(super) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCallDelta>,
}

/// An increment of a call: first its id and name, then arguments.
#[derive(Debug, Serialize)]
pub(super) struct ToolCallDelta {
    pub(super) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<&'static str>,
    pub(super) function: FunctionDelta,
}

/// An increment of a call's function.
#[derive(Debug, Serialize)]
pub(super) struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    pub(super) arguments: String,
}

/// Log-probabilities in the format of chats or of completions.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Logprobs {
    Chat { content: Vec<ChatToken>, refusal: Option<Vec<ChatToken>> },
    Completion(CompletionTokens),
}

/// A token of a chat.
#[derive(Debug, Clone, Serialize)]
pub(super) struct ChatToken {
    #[serde(flatten)]
    pub(super) token: TokenLogprob,
    pub(super) top_logprobs: Vec<TokenLogprob>,
}

/// A token with its log-probability.
#[derive(Debug, Clone, Serialize)]
pub(super) struct TokenLogprob {
    pub(super) token: String,
    /// A number with only the digits that an f32 has.
    pub(super) logprob: serde_json::Value,
    pub(super) bytes: Vec<u8>,
}

/// The tokens of a completion. Each list has one entry for each token.
#[derive(Debug, Default, Serialize)]
pub(super) struct CompletionTokens {
    pub(super) tokens: Vec<String>,
    /// Null for the first token of a prompt.
    pub(super) token_logprobs: Vec<Option<f32>>,
    pub(super) top_logprobs: Vec<Option<serde_json::Map<String, serde_json::Value>>>,
    /// Characters of the text before the token.
    pub(super) text_offset: Vec<usize>,
}

impl CompletionTokens {
    /// Appends the entries of `other`.
    pub(super) fn append(&mut self, other: Self) {
        self.tokens.extend(other.tokens);
        self.token_logprobs.extend(other.token_logprobs);
        self.top_logprobs.extend(other.top_logprobs);
        self.text_offset.extend(other.text_offset);
    }
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
    /// Of these, copied from host memory (`--kv-offload-gb`); absent if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens_from_cpu: Option<usize>,
    /// Of these, read from files (`--prefix-cache-dir`); absent if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens_from_disk: Option<usize>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct CompletionDetails {
    reasoning_tokens: usize,
    /// Accepted and rejected drafted tokens. Rejected ones are not completion tokens.
    accepted_prediction_tokens: usize,
    rejected_prediction_tokens: usize,
}

impl From<&Totals> for Usage {
    fn from(totals: &Totals) -> Self {
        let num_accepted = totals.slowest.num_accepted_draft_tokens;
        let num_rejected = totals.slowest.num_rejected_draft_tokens;
        let num_tried = num_accepted + num_rejected;
        let some = |num_tokens: usize| Some(num_tokens).filter(|num_tokens| *num_tokens > 0);
        Self {
            prompt_tokens: totals.num_prompt_tokens,
            completion_tokens: totals.num_output_tokens,
            total_tokens: totals.num_prompt_tokens + totals.num_output_tokens,
            prompt_tokens_details: PromptDetails {
                cached_tokens: totals.num_cached_tokens,
                cached_tokens_from_cpu: some(totals.num_host_tokens),
                cached_tokens_from_disk: some(totals.num_disk_tokens),
            },
            completion_tokens_details: (totals.counts_reasoning || num_tried > 0).then_some(
                CompletionDetails {
                    reasoning_tokens: totals.num_reasoning_tokens,
                    accepted_prediction_tokens: num_accepted,
                    rejected_prediction_tokens: num_rejected,
                },
            ),
        }
    }
}

/// Times of a request. With several sequences, each is the longest time of one. A rate is null if nothing was
/// measured.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Timings {
    queue_ms: f64,
    prefill_ms: f64,
    decode_ms: f64,
    prompt_tokens_per_second: Option<f64>,
    output_tokens_per_second: Option<f64>,
    cached_tokens: usize,
    preemptions: usize,
    draft_tokens: usize,
    accepted_draft_tokens: usize,
}

impl From<&Totals> for Timings {
    fn from(totals: &Totals) -> Self {
        let slowest = &totals.slowest;
        let milliseconds = |time: std::time::Duration| time.as_micros() as f64 / 1e3;
        let rate = |num_tokens: usize, time: std::time::Duration| {
            let is_measured = num_tokens > 0 && !time.is_zero();
            is_measured.then(|| (num_tokens as f64 / time.as_secs_f64() * 100.0).round() / 100.0)
        };
        // Cached tokens are not computed, and the first token of a sequence is computed together with its
        // prompt.
        let num_computed = totals.num_prompt_tokens.saturating_sub(totals.num_cached_tokens);
        let num_decoded = totals.num_output_tokens.saturating_sub(totals.num_sequences);
        Self {
            queue_ms: milliseconds(slowest.queue_time),
            prefill_ms: milliseconds(slowest.prefill_time),
            decode_ms: milliseconds(slowest.decode_time),
            prompt_tokens_per_second: rate(num_computed, slowest.prefill_time),
            output_tokens_per_second: rate(num_decoded, slowest.decode_time),
            cached_tokens: totals.num_cached_tokens,
            preemptions: slowest.num_preemptions,
            draft_tokens: slowest.num_accepted_draft_tokens + slowest.num_rejected_draft_tokens,
            accepted_draft_tokens: slowest.num_accepted_draft_tokens,
        }
    }
}
