//! The bridge between the engine's thread and the server's tasks.
//!
//! Events come through one bounded channel for all prompts of an HTTP request. The engine never waits for it:
//! if it is full, the client reads too slowly and the request is aborted. If the receiver is dropped because
//! the client is gone, the engine aborts the request before its next step.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::sync::{mpsc, oneshot};

use super::access::{self, Note, TokenCounts};
use super::admission::Permit;
use super::error::ApiError;
use super::history::Record;
use super::state::{App, Model};
use tinyvllm::ErrorKind;
use tinyvllm::engine::{AbortHandle, Event, EventSink, FinishReason, Request, SequenceStats};
use tinyvllm::llm::{TextDecoder, TextEvent, TextOptions};
use tinyvllm::sampling::TokenLogprobs;

/// How many events a stream may lag, for each token that a step can give it.
const STREAM_STEPS: usize = 64;
/// The least number of events that a stream may lag.
const MIN_STREAM_EVENTS: usize = 1_024;

/// How far a reader may lag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Buffer {
    /// By the whole output: this program reads it, not the client.
    Whole,
    /// By some steps.
    Bounded,
}

/// The events of all prompts of an HTTP request, as they are generated.
pub(super) struct Generation {
    app: Arc<App>,
    pub(super) model: Arc<Model>,
    /// Permits are released before the last events: when a client sees the end of a request, its permit is
    /// free.
    permits: Vec<Permit>,
    events: mpsc::Receiver<Arrival>,
    buffer: Buffer,
    prompts: Vec<PromptState>,
    ready: VecDeque<(usize, TextEvent)>,
    num_unfinished: usize,
    counts: TokenCounts,
    arrival: Instant,
    note: Note,
    /// The request's record in the history, if it is kept.
    record: Option<Arc<Record>>,
}

struct PromptState {
    decoder: TextDecoder,
    abort: AbortHandle,
    num_tokens: usize,
    /// The request, and its result.
    max_tokens: Option<usize>,
    num_unfinished: usize,
    max_generated: usize,
    /// When the latest token of each sequence came.
    latest: Vec<Option<Instant>>,
}

/// An event with its prompt and the time at which the engine sent it.
struct Arrival {
    prompt: usize,
    at: Instant,
    event: Event,
}

/// The engine's end of the channel.
struct ChannelSink {
    prompt: usize,
    sender: mpsc::Sender<Arrival>,
    record: Option<Arc<Record>>,
    reports_progress: bool,
}

impl EventSink for ChannelSink {
    fn send(&mut self, event: Event) -> bool {
        if let Event::PromptProgress { progress } = event {
            if let Some(record) = &self.record {
                record.set_progress(self.prompt, progress);
            }
            // A slow reader misses some progress events, but nothing of the answer.
            if !self.reports_progress || self.sender.capacity() < self.sender.max_capacity() / 2 {
                return true;
            }
        }
        let arrival = Arrival { prompt: self.prompt, at: Instant::now(), event };
        self.sender.try_send(arrival).is_ok()
    }

    fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }
}

/// The context of an HTTP request's prompts.
pub(super) struct RequestContext {
    pub(super) app: Arc<App>,
    pub(super) model: Arc<Model>,
    pub(super) note: Note,
    pub(super) record: Option<Arc<Record>>,
    pub(super) arrival: Instant,
    pub(super) permits: Vec<Permit>,
    /// Whether the client requested the progress of its prompt.
    pub(super) reports_progress: bool,
}

impl Generation {
    /// Submits all requests, and returns when the engine has accepted them.
    ///
    /// # Errors
    /// 429 if the engine's queue is full, 400 if a request is not valid, 500 if the engine has failed.
    /// Requests that were accepted before are aborted.
    pub(super) async fn start(
        context: RequestContext,
        requests: Vec<Request>,
        text: &TextOptions,
        buffer: Buffer,
    ) -> Result<Self, ApiError> {
        let RequestContext { app, model, note, record, arrival, permits, reports_progress } = context;
        let engine = model.llm.engine();
        let config = engine.config();
        let num_sequences: usize = requests.iter().map(|request| request.params.n).sum();
        let capacity = match buffer {
            Buffer::Whole => num_sequences * (config.max_model_len + 1),
            Buffer::Bounded => {
                (num_sequences * config.num_scheduler_steps * STREAM_STEPS).max(MIN_STREAM_EVENTS)
            }
        };
        let (sender, events) = mpsc::channel(capacity.max(1));
        let mut accepted = Vec::with_capacity(requests.len());
        for (prompt, request) in requests.into_iter().enumerate() {
            let decoder = model.llm.text_decoder(&request.params, text)?;
            let (num_tokens, latest) = (request.prompt_token_ids.len(), vec![None; request.params.n]);
            let max_tokens = request.params.max_tokens;
            let (reply, id) = oneshot::channel();
            let on_accepted = Box::new(move |id| {
                // The client may have gone; then the sink is closed too.
                let _ = reply.send(id);
            });
            let (sender, record) = (sender.clone(), record.clone());
            let sink = ChannelSink { prompt, sender, record, reports_progress };
            engine.submit_to(request, Box::new(sink), on_accepted)?;
            accepted.push((id, decoder, num_tokens, max_tokens, latest));
        }
        drop(sender);
        let mut prompts = Vec::with_capacity(accepted.len());
        for (id, decoder, num_tokens, max_tokens, latest) in accepted {
            let id = id.await.map_err(|_| ApiError::internal("the engine has stopped"))??;
            prompts.push(PromptState {
                decoder,
                abort: engine.abort_handle(id),
                num_tokens,
                max_tokens,
                num_unfinished: latest.len(),
                max_generated: 0,
                latest,
            });
        }
        let prompt_tokens = prompts.iter().map(|prompt| prompt.num_tokens).sum();
        Ok(Self {
            app,
            events,
            buffer,
            prompts,
            ready: VecDeque::new(),
            num_unfinished: num_sequences,
            counts: TokenCounts { prompt_tokens, ..TokenCounts::default() },
            arrival,
            note,
            record,
            permits,
            model,
        })
    }

    /// Whether every sequence has ended.
    pub(super) fn is_finished(&self) -> bool {
        self.num_unfinished == 0 && self.ready.is_empty()
    }

    /// The next event with its prompt; `None` after the last one.
    ///
    /// # Errors
    /// If a sequence failed, or the reader was too slow. It must not be polled after that.
    pub(super) fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<(usize, TextEvent), ApiError>>> {
        loop {
            if let Some((prompt, event)) = self.ready.pop_front() {
                return Poll::Ready(Some(self.count(prompt, &event).map(|()| (prompt, event))));
            }
            if self.num_unfinished == 0 {
                return Poll::Ready(None);
            }
            let Some(arrival) = ready!(self.events.poll_recv(cx)) else {
                const MESSAGE: &str = "the answer was aborted, because the client reads it too slowly";
                self.note.cut(MESSAGE);
                return Poll::Ready(Some(Err(ApiError::internal(MESSAGE))));
            };
            self.translate(arrival);
        }
    }

    /// The next event, for async callers.
    pub(super) async fn next(&mut self) -> Option<Result<(usize, TextEvent), ApiError>> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    fn translate(&mut self, Arrival { prompt, at, event }: Arrival) {
        let state = &mut self.prompts[prompt];
        if let Event::Token { index, .. } = event {
            let metrics = &self.model.metrics;
            match state.latest[index].replace(at) {
                Some(before) => metrics.inter_token_latency.observe_time(at - before),
                None => {
                    metrics.time_to_first_token.observe_time(at.saturating_duration_since(self.arrival));
                    if index == 0 {
                        metrics.count_prompt(state.num_tokens);
                    }
                }
            }
        }
        let mut events = VecDeque::new();
        if let Some(index) = state.decoder.push(event, &mut events) {
            // If the engine's queue is full, the sequence's next token tries again.
            let _ = state.abort.try_abort(Some(index));
        }
        self.ready.extend(events.into_iter().map(|event| (prompt, event)));
    }

    fn count(&mut self, prompt: usize, event: &TextEvent) -> Result<(), ApiError> {
        let TextEvent::Finished { index, reason, error, error_kind, stats, matched_stop, .. } = event else {
            if let TextEvent::Delta { token_id: Some(_), text, logprobs, .. } = event {
                if self.buffer == Buffer::Whole {
                    let num_bytes = text.len() + kept_bytes(logprobs.as_ref());
                    let charged = self.note.charge(&self.app.request_memory, num_bytes);
                    charged.inspect_err(|_| self.note.cut("memory for the rest of the answer is missing"))?;
                }
                self.counts.completion_tokens += 1;
                self.model.metrics.count_token();
                if let Some(record) = &self.record {
                    record.count_token();
                }
            }
            return Ok(());
        };
        self.num_unfinished -= 1;
        // One permit for each sequence.
        drop(self.permits.pop());
        if *index == 0 {
            self.counts.cached_tokens += stats.num_cached_tokens;
        }
        self.model.metrics.count_finished(*reason, stats);
        let state = &mut self.prompts[prompt];
        state.num_unfinished = state.num_unfinished.saturating_sub(1);
        state.max_generated = state.max_generated.max(stats.num_output_tokens);
        if state.num_unfinished == 0 {
            self.model.metrics.count_request(state.latest.len(), state.max_tokens, state.max_generated);
        }
        if let Some(record) = &self.record {
            record.end(prompt, *index, *reason, matched_stop.is_some(), stats);
        }
        if *reason != FinishReason::Error && *reason != FinishReason::Abort {
            return Ok(());
        }
        let message = error.clone().unwrap_or_else(|| "the request was aborted".to_owned());
        self.note.cut(&message);
        Err(match error_kind {
            _ if self.app.is_draining() => ApiError::unavailable(message),
            // A retry would have the same result.
            Some(ErrorKind::InvalidRequest) => ApiError::cannot_go_on(message),
            _ => ApiError::internal(message),
        })
    }
}

/// Memory for a token of a non-streamed answer: the token, and each of its log-probabilities with its text,
/// once as a value and once as JSON.
fn kept_bytes(logprobs: Option<&TokenLogprobs>) -> usize {
    const TOKEN_BYTES: usize = 64;
    const LOGPROB_BYTES: usize = 320;
    TOKEN_BYTES + logprobs.map_or(0, |logprobs| (logprobs.top.len() + 1) * LOGPROB_BYTES)
}

impl Drop for Generation {
    fn drop(&mut self) {
        if self.num_unfinished > 0 {
            self.note.cut(access::CLIENT_LEFT_EARLY);
        }
        for _ in 0..self.num_unfinished {
            self.model.metrics.count_reason(FinishReason::Abort);
        }
        if let Some(record) = &self.record {
            record.abandon();
        }
        self.note.set(self.counts);
    }
}

/// Sums over the sequences of an HTTP request, for `usage` and `timings`.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Totals {
    pub(super) num_sequences: usize,
    pub(super) num_prompt_tokens: usize,
    pub(super) num_output_tokens: usize,
    pub(super) num_cached_tokens: usize,
    /// Of these, tokens that were read from files, and tokens that were copied from host memory.
    pub(super) num_disk_tokens: usize,
    pub(super) num_host_tokens: usize,
    /// Whether reasoning is separate from the rest of the output.
    pub(super) counts_reasoning: bool,
    /// Output tokens that are reasoning.
    pub(super) num_reasoning_tokens: usize,
    /// The largest times of any sequence, and the sums of preemptions and drafted tokens.
    pub(super) slowest: SequenceStats,
}

impl Totals {
    pub(super) fn add(&mut self, index: usize, stats: &SequenceStats) {
        if index == 0 {
            self.num_cached_tokens += stats.num_cached_tokens;
            self.num_disk_tokens += stats.num_disk_tokens;
            self.num_host_tokens += stats.num_host_tokens;
        }
        self.slowest.num_preemptions += stats.num_preemptions;
        self.slowest.num_accepted_draft_tokens += stats.num_accepted_draft_tokens;
        self.slowest.num_rejected_draft_tokens += stats.num_rejected_draft_tokens;
        self.slowest.queue_time = self.slowest.queue_time.max(stats.queue_time);
        self.slowest.prefill_time = self.slowest.prefill_time.max(stats.prefill_time);
        self.slowest.decode_time = self.slowest.decode_time.max(stats.decode_time);
    }
}
