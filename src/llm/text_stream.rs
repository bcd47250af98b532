//! The text of a request as an iterator that waits.

use std::collections::VecDeque;
use std::task::{Context, Poll};

use futures_core::Stream;

use super::TextDecoder;
use super::polled::Polled;
use crate::ErrorKind;
use crate::engine::{AbortHandle, Event, FinishReason, PromptProgress, RequestStream, SequenceStats};
use crate::sampling::{RankedLogprobs, TokenLogprobs};

/// Something that happened to a request, in text.
#[derive(Debug, Clone, PartialEq)]
pub enum TextEvent {
    /// The log-probabilities of the next prompt tokens, from the second one on. They come before everything else.
    PromptLogprobs {
        /// One for each token.
        logprobs: Vec<RankedLogprobs>,
    },
    /// More of the prompt is computed; only if requested.
    PromptProgress {
        /// How far it is.
        progress: PromptProgress,
    },
    /// More text, or a token whose text is incomplete.
    Delta {
        /// Number of the sequence in the request.
        index: usize,
        /// May be empty: a character is incomplete, or the text could begin a stop string.
        text: String,
        /// The token; none for text that was held back until the end.
        token_id: Option<u32>,
        /// If requested.
        logprobs: Option<TokenLogprobs>,
    },
    /// A sequence ended; no more events for this index.
    Finished {
        /// Number of the sequence in the request.
        index: usize,
        /// Why. A stop string counts as [`FinishReason::Stop`].
        reason: FinishReason,
        /// With [`FinishReason::Error`], the error.
        error: Option<String>,
        /// Whose fault that is: [`ErrorKind::InvalidRequest`] if it is the request's, which would fail again.
        error_kind: Option<ErrorKind>,
        /// Counts and times.
        stats: SequenceStats,
        /// The stop string that was found; the text ends before it.
        matched_stop: Option<String>,
        /// The token that ended it, if it is one of [`SamplingParams::stop_token_ids`](crate::sampling::SamplingParams).
        stop_token_id: Option<u32>,
    },
}

/// The text of a request while it is generated; an iterator that ends when all sequences have ended.
#[derive(Debug)]
pub struct TextStream {
    events: RequestStream,
    decoder: TextDecoder,
    ready: VecDeque<TextEvent>,
}

impl TextStream {
    pub(super) fn new(events: RequestStream, decoder: TextDecoder) -> Self {
        Self { events, decoder, ready: VecDeque::new() }
    }

    /// Gives up the request, or one of its sequences. The last event is still
    /// [`TextEvent::Finished`].
    pub fn abort(&self, index: Option<usize>) {
        self.events.abort(index);
    }

    /// A handle to abort the request while another thread waits for its events.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        self.events.abort_handle()
    }

    /// The next event if there already is one.
    pub fn try_next(&mut self) -> Option<TextEvent> {
        while self.ready.is_empty() {
            let event = self.events.try_next()?;
            self.translate(event);
        }
        self.ready.pop_front()
    }

    /// The next event, none after the last one; wakes the task when there is one.
    pub fn poll_next(&mut self, context: &Context<'_>) -> Poll<Option<TextEvent>> {
        while self.ready.is_empty() {
            match self.events.poll_next(context) {
                Poll::Ready(Some(event)) => self.translate(event),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(self.ready.pop_front())
    }

    /// The events as a stream, which needs no particular runtime.
    pub fn into_stream(mut self) -> impl Stream<Item = TextEvent> + Send + Unpin {
        Polled(move |context: &mut Context<'_>| self.poll_next(context))
    }

    fn translate(&mut self, event: Event) {
        if let Some(index) = self.decoder.push(event, &mut self.ready) {
            self.events.abort(Some(index));
        }
    }
}

impl Iterator for TextStream {
    type Item = TextEvent;

    fn next(&mut self) -> Option<TextEvent> {
        while self.ready.is_empty() {
            let event = self.events.next()?;
            self.translate(event);
        }
        self.ready.pop_front()
    }
}
