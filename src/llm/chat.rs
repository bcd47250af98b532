//! The simple interface: open a model by its name, send a message, read the answer.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;

use super::polled::Polled;
use super::{Llm, LlmOptions, TextEvent, TextStream};
use crate::chat::{AnswerEvent, AnswerFormat, AnswerParser, ChatOptions, Message};
use crate::engine::{AbortHandle, FinishReason, Request, SequenceStats};
use crate::hub::{HubConfig, ModelSource, resolve};
use crate::sampling::SamplingParams;
use crate::{Error, ErrorKind, Result};

impl Llm {
    /// Opens a model as the command line does without further flags: an alias such as `tinyllama`, `org/name`,
    /// `org/name:TYPE`, a path, or `demo`, the small one in the crate. Files that are not in the Hugging Face cache are
    /// downloaded first. [`Self::load`] takes options and reports progress.
    ///
    /// # Errors
    /// As [`ModelSource::parse`], [`resolve`] and [`Self::load`].
    pub fn open(model: &str) -> Result<Self> {
        let source = ModelSource::parse(model, None)?;
        let files = resolve(&source, &HubConfig::from_env()?, &crate::hub::NoProgress)?;
        Self::load(&files, &LlmOptions::default(), &super::NoProgress)
    }

    /// Answers a conversation. [`Self::sampling_params`] has the defaults from the model's files.
    ///
    /// # Errors
    /// As [`Self::encode_chat`] and [`Self::submit`]; [`ErrorKind::InvalidRequest`] if `params` request several answers.
    pub fn chat(&self, messages: &[Message], params: SamplingParams) -> Result<ChatStream> {
        self.chat_with(messages, &ChatOptions::default(), params)
    }

    /// The same, with tools or other variables of the template. Calls of tools are parsed if the template can describe
    /// tools; otherwise they are content.
    ///
    /// # Errors
    /// As [`Self::chat`].
    pub fn chat_with(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        mut params: SamplingParams,
    ) -> Result<ChatStream> {
        if params.n != 1 {
            return Err(Error::invalid_request(format!("a chat has one answer, and n is {}", params.n))
                .with_hint("call chat several times; the prompt is computed once"));
        }
        let known = self.require_chat()?.answer_format();
        let tool_calls = options.tools.as_ref().and(known.tool_calls.clone());
        let format = AnswerFormat { tool_calls, ..known.clone() };
        let prompt = self.encode_chat(messages, options)?;
        params.max_tokens = self.max_tokens(prompt.len(), &params);
        let parser = AnswerParser::new(&format, self.prompt_end(&prompt), Arc::default());
        let text = self.submit_request(Request::new(prompt, params), &format)?;
        Ok(ChatStream { text, parser, ready: VecDeque::new(), end: None })
    }

    /// The recommended values of the model's files, or else the defaults of [`SamplingParams`].
    #[must_use]
    pub fn sampling_params(&self) -> SamplingParams {
        self.sampling_defaults().apply(SamplingParams::default())
    }
}

/// An answer while it is generated: an iterator that blocks, or an async stream. Dropping it aborts the request.
#[derive(Debug)]
pub struct ChatStream {
    text: TextStream,
    parser: AnswerParser,
    ready: VecDeque<AnswerEvent>,
    end: Option<(FinishReason, SequenceStats)>,
}

impl ChatStream {
    /// Waits for the end. Returns the model's answer, without its reasoning.
    ///
    /// # Errors
    /// If the computation failed.
    pub fn text(self) -> Result<String> {
        let mut content = String::new();
        for event in self {
            if let AnswerEvent::Content(text) = event? {
                content += &text;
            }
        }
        Ok(content)
    }

    /// The same as a stream, which needs no particular runtime.
    pub fn into_stream(mut self) -> impl Stream<Item = Result<AnswerEvent>> + Send + Unpin {
        Polled(move |context: &mut Context<'_>| self.poll_next(context))
    }

    /// Why the answer ended, with counts and times; none before.
    #[must_use]
    pub fn end(&self) -> Option<(FinishReason, SequenceStats)> {
        self.end
    }

    /// A handle to abort the answer while another thread waits for it.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        self.text.abort_handle()
    }

    /// The next event, none after the last one; wakes the task when there is one.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<AnswerEvent>>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            match self.text.poll_next(context) {
                Poll::Ready(Some(event)) => {
                    if let Err(error) = self.translate(event) {
                        return Poll::Ready(Some(Err(error)));
                    }
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    fn translate(&mut self, event: TextEvent) -> Result<()> {
        match event {
            TextEvent::PromptLogprobs { .. } | TextEvent::PromptProgress { .. } => {}
            TextEvent::Delta { text, .. } => self.ready.extend(self.parser.push(&text)),
            TextEvent::Finished { reason, error, error_kind, stats, matched_stop, .. } => {
                self.ready.extend(match reason == FinishReason::Stop && matched_stop.is_none() {
                    true => self.parser.finish(),
                    false => self.parser.cut_off(),
                });
                self.end = Some((reason, stats));
                if reason == FinishReason::Error {
                    let kind = error_kind.unwrap_or(ErrorKind::Internal);
                    return Err(Error::new(kind, error.unwrap_or_default()));
                }
            }
        }
        Ok(())
    }
}

impl Iterator for ChatStream {
    type Item = Result<AnswerEvent>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.ready.is_empty() {
            let event = self.text.next()?;
            if let Err(error) = self.translate(event) {
                return Some(Err(error));
            }
        }
        self.ready.pop_front().map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Wake, Waker};
    use std::thread::Thread;

    use super::*;

    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    /// All items of a stream, without a runtime.
    fn all<T>(mut stream: impl Stream<Item = T> + Unpin) -> Vec<T> {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        let mut items = Vec::new();
        loop {
            match std::pin::Pin::new(&mut stream).poll_next(&mut context) {
                Poll::Ready(Some(item)) => items.push(item),
                Poll::Ready(None) => return items,
                Poll::Pending => std::thread::park(),
            }
        }
    }

    #[test]
    fn an_answer_is_the_same_as_an_iterator_as_a_stream_and_as_a_text() {
        let llm = Llm::open("demo").unwrap();
        let params = SamplingParams { max_tokens: Some(24), ..SamplingParams::greedy() };
        let messages = [Message::new("user", "Tell me of a village.")];
        let chat = || llm.chat(&messages, params.clone()).unwrap();
        let (iterator, stream, text) = (chat(), chat(), chat());
        let events: Vec<AnswerEvent> = all(stream.into_stream()).into_iter().map(Result::unwrap).collect();
        assert_eq!(iterator.map(Result::unwrap).collect::<Vec<_>>(), events);
        let content = events.iter().map(|event| match event {
            AnswerEvent::Content(text) => text.as_str(),
            other => panic!("{other:?}"),
        });
        let text = text.text().unwrap();
        assert_eq!(content.collect::<String>(), text);
        assert!(text.len() > 20, "{text}");
        let mut whole = chat();
        assert!(whole.end().is_none());
        whole.by_ref().for_each(drop);
        let (reason, stats) = whole.end().unwrap();
        assert_eq!((reason, stats.num_output_tokens), (FinishReason::Length, 24));
        let error = llm.chat(&messages, SamplingParams { n: 2, ..params }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
    }
}
