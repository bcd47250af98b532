//! Answers as streams, mostly of server-sent events: the body of every stream, and the chunks of chats and
//! completions in OpenAI's order.
//!
//! The connection polls the body when it can send more. Only then does the body poll the generation. So
//! nothing runs for a client that does not read, and dropping the body aborts the request.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use hyper::body::Frame;
use tokio::time::{Instant, Sleep};

use super::super::error::{ApiError, ok_as};
use super::super::generation::{Generation, Totals};
use super::options::StreamOptions;
use super::prompt_report::Listed;
use super::shape::{Kind, ResponseShape};
use super::turn::Turn;
use super::types::{Choice, Delta, Envelope, Logprobs, StopReason, Timings};
use tinyvllm::engine::PromptProgress;
use tinyvllm::llm::TextEvent;
use tinyvllm::sampling::TokenLogprobs;

/// Ready chunks are sent together, up to about this many bytes.
const MAX_FRAME_BYTES: usize = 16 << 10;
/// After this time without a chunk, a comment shows proxies that the connection is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Converts the events of a generation into the bytes of one interface's stream.
pub(super) trait StreamWriter: Send + Unpin + 'static {
    /// The media type of the stream.
    const CONTENT_TYPE: &'static str = "text/event-stream";
    /// Shows proxies that the connection is alive.
    const KEEP_ALIVE: &'static [u8];

    /// Writes the next event of a prompt; `is_last` if it is the last one.
    fn write_event(&mut self, generation: &Generation, prompt: usize, event: TextEvent, is_last: bool);

    /// Writes the end after everything was generated.
    fn write_end(&mut self, generation: &Generation);

    /// Writes an error, which ends the stream.
    fn write_error(&mut self, error: &ApiError);

    /// Bytes that were written and not sent yet.
    fn bytes(&mut self) -> &mut Vec<u8>;
}

/// Answers with a stream.
pub(super) fn respond<W: StreamWriter>(generation: Generation, writer: W) -> Response {
    let keep_alive = Box::pin(tokio::time::sleep(KEEP_ALIVE));
    let body = EventStream { generation, writer, keep_alive, is_over: false };
    let mut response = ok_as(W::CONTENT_TYPE, Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Otherwise nginx would buffer the chunks.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct EventStream<W> {
    generation: Generation,
    writer: W,
    keep_alive: Pin<Box<Sleep>>,
    is_over: bool,
}

impl<W: StreamWriter> HttpBody for EventStream<W> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        while !this.is_over && this.writer.bytes().len() < MAX_FRAME_BYTES {
            match this.generation.poll_next(cx) {
                Poll::Ready(Some(Ok((prompt, event)))) => {
                    let is_last = this.generation.is_finished();
                    this.writer.write_event(&this.generation, prompt, event, is_last);
                }
                Poll::Ready(Some(Err(error))) => {
                    this.writer.write_error(&error);
                    this.is_over = true;
                }
                Poll::Ready(None) => {
                    this.writer.write_end(&this.generation);
                    this.is_over = true;
                }
                Poll::Pending => break,
            }
        }
        if this.writer.bytes().is_empty() {
            if this.is_over {
                return Poll::Ready(None);
            }
            if this.keep_alive.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            this.writer.bytes().extend_from_slice(W::KEEP_ALIVE);
        }
        this.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
        let bytes = std::mem::take(this.writer.bytes());
        Poll::Ready(Some(Ok(Frame::data(bytes.into()))))
    }
}

impl StreamOptions {
    /// Adds the usage to a chunk that is not the last one.
    fn add_usage(self, chunk: &mut Envelope<'_>, totals: &Totals) {
        if self.continuous_usage {
            chunk.usage = Some(Some(totals.into()));
        } else if self.include_usage {
            chunk.usage = Some(None);
        }
    }
}

/// Converts events into the chunks of chats and completions.
pub(super) struct Writer {
    shape: ResponseShape,
    options: StreamOptions,
    choices: Vec<ChoiceState>,
    totals: Totals,
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct ChoiceState {
    turn: Turn,
    has_begun: bool,
    is_finished: bool,
    /// Characters of all tokens so far, for the offsets of the next ones.
    num_chars: usize,
}

impl ChoiceState {
    fn new(turn: Turn) -> Self {
        Self { turn, has_begun: false, is_finished: false, num_chars: 0 }
    }
}

impl StreamWriter for Writer {
    const KEEP_ALIVE: &'static [u8] = b": waiting\n\n";

    fn write_event(&mut self, generation: &Generation, prompt: usize, event: TextEvent, is_last: bool) {
        match event {
            TextEvent::PromptLogprobs { logprobs } => self.shape.add_prompt_logprobs(prompt, logprobs),
            TextEvent::PromptProgress { progress } => self.write_progress(prompt, progress),
            TextEvent::Delta { .. } if self.shape.is_prompt_only() => {}
            TextEvent::Delta { index, text, token_id, logprobs } => {
                let choice = self.shape.choice_index(prompt, index);
                let token = token_id.map(|id| (id, logprobs));
                self.totals.num_output_tokens += usize::from(token.is_some());
                self.begin(generation, choice);
                self.write_delta(generation, choice, text, token);
            }
            TextEvent::Finished { index, reason, stats, matched_stop, stop_token_id, .. } => {
                let choice = self.shape.choice_index(prompt, index);
                self.totals.add(index, &stats);
                self.begin(generation, choice);
                let finish_reason = self.finish_turn(choice, reason.name(), matched_stop.is_some());
                let mut chunk = self.shape.chunk(choice, Delta::default());
                chunk.finish_reason = Some("length");
                if !self.shape.is_prompt_only() {
                    chunk.finish_reason = Some(finish_reason);
                    chunk.stop_reason = StopReason::new(matched_stop, stop_token_id);
                }
                let timings = is_last.then(|| Timings::from(&self.totals));
                self.write_chunk(chunk, timings);
            }
        }
    }

    fn write_end(&mut self, generation: &Generation) {
        // Choices with nothing to generate.
        for choice in 0..self.choices.len() {
            if !self.choices[choice].is_finished {
                self.begin(generation, choice);
                let mut chunk = self.shape.chunk(choice, Delta::default());
                chunk.finish_reason = Some("length");
                self.write_chunk(chunk, None);
            }
        }
        if self.options.include_usage {
            let mut chunk = self.shape.envelope(Vec::new(), true);
            chunk.usage = Some(Some((&self.totals).into()));
            write_data(&mut self.bytes, &chunk);
        }
        self.bytes.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn write_error(&mut self, error: &ApiError) {
        write_data(&mut self.bytes, &error.body());
        self.bytes.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl Writer {
    pub(super) fn new(shape: ResponseShape, options: StreamOptions) -> Self {
        let choices = (0..shape.num_choices()).map(|_| ChoiceState::new(shape.new_turn())).collect();
        Self { totals: shape.new_totals(), shape, options, choices, bytes: Vec::new() }
    }

    /// Writes the text that was held back. Returns the finish reason of the choice.
    fn finish_turn(&mut self, choice: usize, reason: &'static str, has_matched_stop: bool) -> &'static str {
        let state = &mut self.choices[choice];
        state.is_finished = true;
        if self.shape.kind() == Kind::Completion {
            return reason;
        }
        let deltas = state.turn.finish(reason, has_matched_stop);
        let reason = state.turn.finish_reason(reason, has_matched_stop);
        for delta in deltas {
            self.write_chunk(self.shape.chunk(choice, delta.into()), None);
        }
        reason
    }

    /// Writes what precedes the output: the role, or the prompt.
    fn begin(&mut self, generation: &Generation, choice: usize) {
        if std::mem::replace(&mut self.choices[choice].has_begun, true) {
            return;
        }
        match self.shape.has_prompt_report() {
            // Long lists take long to write; other connections need this thread.
            true => tokio::task::block_in_place(|| self.write_begin(generation, choice)),
            false => self.write_begin(generation, choice),
        }
    }

    fn write_begin(&mut self, generation: &Generation, choice: usize) {
        let tokenizer = generation.model.llm.tokenizer();
        let prompt_token_ids = self.shape.prompt_token_ids(choice);
        let prompt_logprobs = self.shape.prompt_logprobs(choice, tokenizer);
        match self.shape.kind() {
            Kind::Chat => {
                let delta =
                    Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
                let chunk = self.shape.chunk(choice, delta);
                self.write_first_chunk(chunk, prompt_token_ids, prompt_logprobs);
            }
            Kind::Completion => {
                let echo = self.shape.echo(choice).map(str::to_owned);
                self.choices[choice].num_chars = echo.as_ref().map_or(0, |text| text.chars().count());
                if echo.is_some() || prompt_token_ids.is_some() || prompt_logprobs.is_some() {
                    let delta = Delta { content: echo, ..Delta::default() };
                    let mut chunk = self.shape.chunk(choice, delta);
                    chunk.prompt_token_ids = prompt_token_ids;
                    chunk.prompt_logprobs = prompt_logprobs;
                    chunk.logprobs = self.shape.echoed_logprobs(choice, tokenizer).map(Logprobs::Completion);
                    self.write_chunk(chunk, None);
                }
            }
        }
    }

    fn write_delta(
        &mut self,
        generation: &Generation,
        choice: usize,
        text: String,
        token: Option<(u32, Option<TokenLogprobs>)>,
    ) {
        let reports_token = self.shape.has_logprobs() || self.shape.returns_token_ids();
        let content = |text: String| Delta { content: Some(text), ..Delta::default() };
        let mut deltas: Vec<Delta> = match self.shape.kind() {
            Kind::Chat => {
                let deltas = self.choices[choice].turn.push(&text, token.is_some(), &mut self.totals);
                deltas.into_iter().map(Delta::from).collect()
            }
            Kind::Completion if text.is_empty() => Vec::new(),
            Kind::Completion => vec![content(text)],
        };
        if deltas.is_empty() {
            if !reports_token || token.is_none() {
                return;
            }
            deltas.push(content(String::new()));
        }
        let mut chunks: Vec<Choice> =
            deltas.into_iter().map(|delta| self.shape.chunk(choice, delta)).collect();
        // The report on the token is in its first chunk.
        if let (Some(token), Some(chunk)) = (token, chunks.first_mut()) {
            let tokenizer = generation.model.llm.tokenizer();
            let state = &mut self.choices[choice];
            chunk.logprobs = self.shape.logprobs(std::slice::from_ref(&token), state.num_chars, tokenizer);
            if self.shape.has_logprobs() {
                let text = tokenizer.map(|tokenizer| tokenizer.token_text(token.0));
                state.num_chars += text.map_or(0, |text| text.chars().count());
            }
            chunk.token_ids = self.shape.returns_token_ids().then(|| vec![token.0]);
        }
        for chunk in chunks {
            self.write_chunk(chunk, None);
        }
    }

    fn write_first_chunk(
        &mut self,
        choice: Choice,
        prompt_token_ids: Option<Vec<u32>>,
        prompt_logprobs: Option<Vec<Listed>>,
    ) {
        let mut chunk = self.shape.envelope(vec![choice], true);
        chunk.prompt_token_ids = prompt_token_ids;
        chunk.prompt_logprobs = prompt_logprobs;
        self.options.add_usage(&mut chunk, &self.totals);
        write_data(&mut self.bytes, &chunk);
    }

    /// Writes a chunk with the progress of a prompt and no output.
    fn write_progress(&mut self, prompt: usize, progress: PromptProgress) {
        let chunk = self.shape.chunk(self.shape.choice_index(prompt, 0), Delta::default());
        let mut chunk = self.shape.envelope(vec![chunk], true);
        chunk.prompt_progress = Some(progress.into());
        self.options.add_usage(&mut chunk, &self.totals);
        write_data(&mut self.bytes, &chunk);
    }

    fn write_chunk(&mut self, choice: Choice, timings: Option<Timings>) {
        let mut chunk = self.shape.envelope(vec![choice], true);
        chunk.timings = timings;
        self.options.add_usage(&mut chunk, &self.totals);
        write_data(&mut self.bytes, &chunk);
    }
}

/// Writes a named event.
pub(super) fn write_event(bytes: &mut Vec<u8>, name: &str, data: &impl serde::Serialize) {
    bytes.extend_from_slice(b"event: ");
    bytes.extend_from_slice(name.as_bytes());
    bytes.push(b'\n');
    write_data(bytes, data);
}

fn write_data(bytes: &mut Vec<u8>, data: &impl serde::Serialize) {
    bytes.extend_from_slice(b"data: ");
    // Our own types have string keys, so they serialise without errors, and writing to a vector does not
    // fail.
    let _ = serde_json::to_writer(&mut *bytes, data);
    bytes.extend_from_slice(b"\n\n");
}
