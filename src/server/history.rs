//! The outcome of the latest requests, for `GET /v1/requests/{id}`.
//!
//! A record has counts, times and parameters, but no text of a prompt or an answer. It belongs to the API key
//! of its request, and no other key finds it. A new record replaces an old one of the key with the most
//! records (`ring.rs`), even if that request is still running.

mod ring;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use self::ring::Ring;
use super::api::{Reading, sampling};
use super::auth::Caller;
use tinyvllm::engine::{BlockMiss, FinishReason, PrefixMiss, PromptProgress, Request, SequenceStats};
use tinyvllm::sampling::SamplingParams;
use tinyvllm::tokenizer::Tokenizer;

/// The latest requests.
#[derive(Debug)]
pub(super) struct History {
    capacity: usize,
    records: Mutex<Ring>,
}

/// A request's ids and its owner.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    /// The id in the answer.
    pub(super) id: String,
    /// The id in the answer's header.
    pub(super) request_id: Arc<str>,
    pub(super) caller: Caller,
    /// The type of the answer.
    pub(super) object: &'static str,
    /// In seconds since 1970.
    pub(super) created: u64,
}

/// The record of one HTTP request.
#[derive(Debug)]
pub(super) struct Record {
    identity: Identity,
    is_stream: bool,
    has_cache_salt: bool,
    /// Parameters of the first prompt, without those that can be large. The other prompts differ at most in
    /// their token limit.
    params: SamplingParams,
    num_stop_strings: usize,
    num_logit_biases: usize,
    prompts: Vec<PromptRecord>,
    num_output_tokens: AtomicUsize,
}

#[derive(Debug)]
struct PromptRecord {
    num_tokens: usize,
    /// The progress of the prompt; `None` before its first step.
    progress: Mutex<Option<PromptProgress>>,
    /// By index; `None` while the sequence runs.
    ends: Mutex<Vec<Option<End>>>,
}

#[derive(Debug, Clone)]
struct End {
    /// `None` if the client disconnected.
    reason: Option<FinishReason>,
    has_matched_stop: bool,
    stats: SequenceStats,
}

impl History {
    /// Keeps at most this many records.
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, records: Mutex::default() }
    }

    /// Begins the record of a request; `None` if no records are kept.
    pub(super) fn begin(
        &self,
        identity: Identity,
        requests: &[Request],
        is_stream: bool,
    ) -> Option<Arc<Record>> {
        if self.capacity == 0 {
            return None;
        }
        let prompt = |request: &Request| PromptRecord {
            num_tokens: request.prompt_token_ids.len(),
            progress: Mutex::default(),
            ends: Mutex::new(vec![None; request.params.n]),
        };
        let first = requests.first();
        let mut params = first.map(|request| request.params.clone()).unwrap_or_default();
        let num_stop_strings = std::mem::take(&mut params.stop).len();
        let num_logit_biases = std::mem::take(&mut params.logit_bias).len();
        let record = Arc::new(Record {
            identity,
            is_stream,
            has_cache_salt: first.is_some_and(|request| request.cache_salt.is_some()),
            params,
            num_stop_strings,
            num_logit_biases,
            prompts: requests.iter().map(prompt).collect(),
            num_output_tokens: AtomicUsize::new(0),
        });
        let client = first.map(|request| request.client).unwrap_or_default();
        self.ring().push(Arc::clone(&record), client, self.capacity);
        Some(record)
    }

    /// Finds the latest request of this caller with this id in the answer or in its header.
    pub(super) fn find(&self, id: &str, caller: Caller) -> Option<Arc<Record>> {
        let is_it = |record: &&Arc<Record>| {
            let identity = &record.identity;
            identity.caller == caller && (identity.id == id || &*identity.request_id == id)
        };
        self.ring().latest().find(is_it).cloned()
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Record {
    fn num_sequences(&self) -> usize {
        self.prompts.len() * self.params.n
    }

    /// Sets the progress of a prompt.
    pub(super) fn set_progress(&self, prompt: usize, progress: PromptProgress) {
        if let Some(prompt) = self.prompts.get(prompt) {
            *prompt.progress() = Some(progress);
        }
    }

    /// Counts a generated token.
    pub(super) fn count_token(&self) {
        self.num_output_tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the end of a sequence.
    pub(super) fn end(
        &self,
        prompt: usize,
        index: usize,
        reason: FinishReason,
        has_matched_stop: bool,
        stats: &SequenceStats,
    ) {
        self.set_end(prompt, index, End { reason: Some(reason), has_matched_stop, stats: *stats });
    }

    /// Marks unfinished sequences as aborted. They have no times.
    pub(super) fn abandon(&self) {
        for (prompt, record) in self.prompts.iter().enumerate() {
            let num_sequences = record.ends().len();
            for index in 0..num_sequences {
                let stats = SequenceStats::default();
                self.set_end(prompt, index, End { reason: None, has_matched_stop: false, stats });
            }
        }
    }

    fn set_end(&self, prompt: usize, index: usize, end: End) {
        let Some(prompt) = self.prompts.get(prompt) else { return };
        if let Some(slot) = prompt.ends().get_mut(index) {
            slot.get_or_insert(end);
        }
    }

    /// The record for its owner. If the cache has another token at a position of this prompt, that token is
    /// another request's, and the position reveals it. So unless all requests have the same owner, positions
    /// are rounded to blocks, as counts of cached tokens are.
    pub(super) fn describe(
        &self,
        tokenizer: Option<&Tokenizer>,
        block_size: usize,
        is_only_caller: bool,
    ) -> Value {
        let Identity { id, request_id, object, created, .. } = &self.identity;
        let ends: Vec<Vec<Option<End>>> = self.prompts.iter().map(|prompt| prompt.ends().clone()).collect();
        let explain =
            Explanation { tokenizer, block_size, is_only_caller, has_cache_salt: self.has_cache_salt };
        let prompts = self.prompts.iter().zip(&ends).enumerate().map(|(number, (prompt, ends))| {
            // The sequences of a prompt share its computation. The first one that ends has the statistics.
            let stats = ends.iter().flatten().map(|end| &end.stats).find(|stats| stats.prefix_miss.is_some());
            json!({
                "index": number,
                "prompt_tokens": prompt.num_tokens,
                "prompt_progress": prompt.progress().map(Reading::from),
                "cached_tokens": stats.map(|stats| stats.num_cached_tokens),
                "cached_tokens_from_cpu": stats.map(|stats| stats.num_host_tokens),
                "cached_tokens_from_disk": stats.map(|stats| stats.num_disk_tokens),
                "prefix_cache": stats.and_then(|stats| {
                    Some(explain.miss(stats.prefix_miss?, stats))
                }),
                "sequences": ends.iter().enumerate().map(|(index, end)| sequence(index, end.as_ref())).collect::<Vec<_>>(),
            })
        });
        json!({
            "id": id,
            "object": "request",
            "request_id": &**request_id,
            "answer": object,
            "created": created,
            "state": state(ends.iter().flatten()),
            "stream": self.is_stream,
            "usage": {
                "prompt_tokens": self.prompts.iter().map(|prompt| prompt.num_tokens).sum::<usize>(),
                "completion_tokens": self.num_output_tokens.load(Ordering::Relaxed),
            },
            "has_cache_salt": self.has_cache_salt,
            "sampling_params": self.params(),
            "prompts": prompts.collect::<Vec<_>>(),
        })
    }

    /// The effective parameters. Stop strings are the client's text, so only their number is given.
    fn params(&self) -> Value {
        let mut fields = sampling::in_effect(&self.params);
        fields.insert("num_stop_strings".to_owned(), self.num_stop_strings.into());
        fields.insert("num_logit_biases".to_owned(), self.num_logit_biases.into());
        fields.into()
    }
}

impl PromptRecord {
    fn progress(&self) -> MutexGuard<'_, Option<PromptProgress>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ends(&self) -> MutexGuard<'_, Vec<Option<End>>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The state of the whole request, in one word.
fn state<'a>(ends: impl Iterator<Item = &'a Option<End>>) -> &'static str {
    let mut state = "finished";
    for end in ends {
        match end.as_ref().map(|end| end.reason) {
            None => return "running",
            Some(Some(FinishReason::Error)) => state = "failed",
            Some(None | Some(FinishReason::Abort)) if state != "failed" => state = "aborted",
            Some(_) => {}
        }
    }
    state
}

fn sequence(index: usize, end: Option<&End>) -> Value {
    let Some(End { reason, has_matched_stop, stats }) = end else {
        return json!({"index": index, "finish_reason": null});
    };
    let Some(reason) = reason else {
        return json!({"index": index, "finish_reason": "abort"});
    };
    let milliseconds = |time: std::time::Duration| time.as_micros() as f64 / 1e3;
    json!({
        "index": index,
        "finish_reason": reason.name(),
        "matched_stop_string": has_matched_stop,
        "completion_tokens": stats.num_output_tokens,
        "preemptions": stats.num_preemptions,
        "draft_tokens": stats.num_accepted_draft_tokens + stats.num_rejected_draft_tokens,
        "accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "queue_ms": milliseconds(stats.queue_time),
        "prefill_ms": milliseconds(stats.prefill_time),
        "decode_ms": milliseconds(stats.decode_time),
        "time_to_first_token_ms": milliseconds(stats.queue_time + stats.prefill_time),
    })
}

/// Explains a miss of the prefix cache.
struct Explanation<'a> {
    tokenizer: Option<&'a Tokenizer>,
    block_size: usize,
    is_only_caller: bool,
    has_cache_salt: bool,
}

impl Explanation<'_> {
    fn miss(&self, miss: PrefixMiss, stats: &SequenceStats) -> Value {
        let block_size = self.block_size;
        let (reason, message) = match miss {
            PrefixMiss::Disabled => ("disabled", "the server runs without a prefix cache".to_owned()),
            PrefixMiss::PromptLogits => (
                "prompt_logprobs",
                "log-probabilities of the prompt were requested, so all of it was computed".to_owned(),
            ),
            PrefixMiss::ShortPrompt => (
                "short_prompt",
                format!(
                    "only full blocks of {block_size} tokens are cached, and the last token of a prompt is \
                     always computed: a prompt of {} tokens has no block to look up",
                    stats.num_prompt_tokens
                ),
            ),
            PrefixMiss::None => (
                "none",
                "every full block before the last token was found; that token is always computed".to_owned(),
            ),
            PrefixMiss::Block { start, reason: BlockMiss::Evicted } => (
                "evicted",
                format!("the block at token {start} was cached and then evicted for other requests"),
            ),
            PrefixMiss::Block { start, reason: BlockMiss::OtherGrouping } => (
                "other_form",
                format!(
                    "the block at token {start} is cached, but some of its tokens were generated or were at the \
                     end of a shorter prompt; this model computes the tokens of a prompt in another way"
                ),
            ),
            PrefixMiss::Block { start, reason: BlockMiss::Unseen } => ("unseen", self.unseen(start)),
            PrefixMiss::Block { start, reason: BlockMiss::Differs { num_equal, .. } } => (
                "different_token",
                format!(
                    "the closest cached prompt has another token {}; the block of {block_size} tokens around it had \
                     to be computed",
                    match self.is_only_caller {
                        true => format!("at position {}", start + num_equal),
                        false => format!("at one of the positions {start} to {}", start + block_size - 1),
                    }
                ),
            ),
        };
        let mut answer = json!({"reason": reason, "message": message});
        if let Some((position, token_id, cached_token_id)) = miss.first_difference() {
            answer["first_difference"] = match self.is_only_caller {
                true => json!({
                    "position": position,
                    "token": self.token(token_id),
                    "cached_token": self.token(cached_token_id),
                }),
                false => json!({
                    "position": position - position % block_size,
                    "token": null,
                    "cached_token": null,
                }),
            };
        }
        answer
    }

    fn unseen(&self, start: usize) -> String {
        let whom = if self.has_cache_salt {
            "no request with this cache_salt"
        } else {
            "no request without a cache_salt"
        };
        match start {
            0 => format!("{whom} has left a full block in the cache"),
            _ => {
                format!("{whom} has filled the block that follows the first {start} tokens, which were found")
            }
        }
    }

    fn token(&self, id: u32) -> Value {
        json!({"id": id, "text": self.tokenizer.map(|tokenizer| tokenizer.token_text(id))})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinyvllm::engine::ClientId;

    fn identity(id: &str, caller: usize) -> Identity {
        Identity {
            id: id.to_owned(),
            request_id: format!("header-{id}").into(),
            caller: Caller(caller),
            object: "text_completion",
            created: 0,
        }
    }

    #[test]
    fn the_latest_are_kept_and_only_their_owner_finds_them() {
        let history = History::new(2);
        for id in ["a", "b", "c"] {
            history.begin(identity(id, 1), &[Request::default()], false).unwrap();
        }
        let find = |id: &str, caller: usize| history.find(id, Caller(caller)).is_some();
        assert_eq!([find("a", 1), find("b", 1), find("c", 1)], [false, true, true]);
        assert!(find("header-c", 1));
        assert!(!find("c", 0) && !find("", 1));
        // A request with many sequences replaces several records.
        let params = SamplingParams { n: 15, ..SamplingParams::default() };
        history.begin(identity("d", 1), &[Request::new(vec![1], params)], false).unwrap();
        history.begin(identity("e", 1), &[Request::default()], false).unwrap();
        assert_eq!([find("c", 1), find("d", 1), find("e", 1)], [false, true, true]);
        assert!(History::new(0).begin(identity("a", 0), &[], false).is_none());
    }

    #[test]
    fn a_request_has_the_state_of_its_sequences() {
        let history = History::new(1);
        let params = SamplingParams { n: 2, ..SamplingParams::default() };
        let begin =
            || history.begin(identity("a", 0), &[Request::new(vec![1, 2], params.clone())], true).unwrap();
        let state = |record: &Record| record.describe(None, 32, true)["state"].clone();
        let record = begin();
        assert_eq!(state(&record), "running");
        let stats = SequenceStats { prefix_miss: Some(PrefixMiss::ShortPrompt), ..SequenceStats::default() };
        record.end(0, 0, FinishReason::Stop, true, &stats);
        assert_eq!(state(&record), "running");
        record.end(0, 1, FinishReason::Length, false, &stats);
        // Ended sequences do not change.
        record.abandon();
        let value = record.describe(None, 32, true);
        assert_eq!(
            (&value["state"], &value["prompts"][0]["sequences"][0]["finish_reason"]),
            (&json!("finished"), &json!("stop"))
        );
        assert_eq!(value["prompts"][0]["prefix_cache"]["reason"], "short_prompt");
        let record = begin();
        record.end(0, 1, FinishReason::Length, false, &stats);
        record.abandon();
        assert_eq!(state(&record), "aborted");
        let record = begin();
        record.end(0, 0, FinishReason::Error, false, &stats);
        record.abandon();
        assert_eq!(state(&record), "failed");
    }

    #[test]
    fn where_another_clients_prompt_differs_is_reported_in_blocks() {
        let reason = BlockMiss::Differs { num_equal: 3, token_id: 4, cached_token_id: 9 };
        let miss = PrefixMiss::Block { start: 8, reason };
        let explain = |is_only_caller| {
            let explain =
                Explanation { tokenizer: None, block_size: 4, is_only_caller, has_cache_salt: false };
            explain.miss(miss, &SequenceStats::default())
        };
        let own = explain(true);
        let (token, cached) = (json!({"id": 4, "text": null}), json!({"id": 9, "text": null}));
        assert_eq!(own["first_difference"], json!({"position": 11, "token": token, "cached_token": cached}));
        assert!(own["message"].as_str().unwrap().contains("at position 11;"), "{own}");
        // Within a block, all differences give the same report.
        let other = explain(false);
        assert_eq!(other["first_difference"], json!({"position": 8, "token": null, "cached_token": null}));
        assert!(other["message"].as_str().unwrap().contains("positions 8 to 11;"), "{other}");
    }

    #[test]
    fn a_heavy_client_evicts_no_record_of_a_light_one() {
        let history = History::new(10);
        let begin = |id: &str, caller: usize, client: u64, num_sequences: usize| {
            let params = SamplingParams { n: num_sequences, ..SamplingParams::default() };
            let mut request = Request::new(vec![1], params);
            request.client = ClientId(client);
            history.begin(identity(id, caller), &[request], false).unwrap();
        };
        let find = |id: &str, caller: usize| history.find(id, Caller(caller)).is_some();
        for id in ["a", "b"] {
            begin(id, 1, 1, 1);
        }
        for number in 0..1_100 {
            begin(&format!("loud-{number}"), 2, 2, 1);
        }
        assert!(find("a", 1) && find("b", 1) && find("loud-1099", 2) && find("loud-1092", 2));
        assert!(!find("loud-1091", 2), "two records are another's");
        // A large request replaces records of its own key, and so do many names of one key.
        begin("wide", 2, 2, 70);
        assert!(find("a", 1) && find("b", 1) && find("wide", 2) && !find("loud-1092", 2));
        (0..100).for_each(|number| begin(&format!("named-{number}"), 3, 100 + number, 1));
        assert!(find("a", 1) && find("b", 1) && find("named-99", 3));
        // Of owners with equally many, the one with the oldest record loses it.
        let history = History::new(2);
        for (id, caller) in [("x", 1), ("y", 2), ("z", 3)] {
            history.begin(identity(id, caller), &[Request::default()], false).unwrap();
        }
        assert_eq!(
            [("x", 1), ("y", 2), ("z", 3)].map(|(id, caller)| history.find(id, Caller(caller)).is_some()),
            [false, true, true]
        );
    }
}
