//! A model ready to use: weights, tokenizer, chat template and a running engine in one value.
//!
//! The engine below speaks token ids only; this layer and the ones above speak text.

mod cache_folder;
mod chat;
mod device;
mod draft;
mod embed;
mod expert_file;
mod generation_config;
mod kv_cache_choice;
mod load;
mod offload;
mod polled;
mod prefix_store;
mod report;
mod text_decoder;
mod text_stream;

use std::sync::Arc;
use std::time::Duration;

pub use cache_folder::cache_folder;
pub use chat::ChatStream;
pub use device::{DeviceChoice, KernelChoice, OpenedDevice};
pub use generation_config::GenerationConfigChoice;
pub use kv_cache_choice::KvCacheChoice;
pub use load::{DenseDType, LlmOptions, LoadProgress, NoProgress};
pub use offload::OffloadOptions;
pub use report::ModelReport;
pub use text_decoder::{TextDecoder, TextOptions};
pub use text_stream::{TextEvent, TextStream};

use crate::chat::{AnswerFormat, Chat, ChatOptions, EncodedChat, Message, PromptEnd, ReasoningFormat};
use crate::config::ModelConfig;
use crate::engine::{Engine, Request};
use crate::grammar::{AfterReasoning, Grammar, GrammarCompiler, GrammarSpec, ReasoningStart};
use crate::models::WeightTraffic;
use crate::ops::Context;
use crate::ops::cpu::matmul::MatrixFile;
use crate::sampling::{Constraint, SamplingDefaults, SamplingParams};
use crate::tokenizer::Tokenizer;
use crate::{Error, ErrorKind, Result};

/// A loaded model with its engine.
#[derive(Debug)]
pub struct Llm {
    name: String,
    engine: Engine,
    tokenizer: Option<Arc<Tokenizer>>,
    /// Why there is none, if the files have one.
    tokenizer_error: Option<Error>,
    grammars: Option<GrammarCompiler>,
    chat: Option<Chat>,
    chat_problem: Option<String>,
    config: ModelConfig,
    context: Arc<Context>,
    weight_traffic: WeightTraffic,
    expert_file: Option<Arc<MatrixFile>>,
    sampling_defaults: SamplingDefaults,
    notices: Vec<String>,
    load_time: Duration,
}

impl Llm {
    /// The model's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The engine: token ids in, token ids out.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The tokenizer, if the model came with one.
    #[must_use]
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_deref()
    }

    /// The chat format, if there is a template.
    #[must_use]
    pub fn chat_format(&self) -> Option<&Chat> {
        self.chat.as_ref()
    }

    /// Whether there is a chat template, be it of use or not.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.chat.is_some() || self.chat_problem.is_some()
    }

    /// The chat format, or why chats are impossible.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model has no template, or one that is of no use.
    pub fn require_chat(&self) -> Result<&Chat> {
        self.chat.as_ref().ok_or_else(|| match &self.chat_problem {
            Some(problem) => {
                Error::new(ErrorKind::Unsupported, format!("{} cannot chat: {problem}", self.name))
                    .with_hint("give another template with --chat-template, or the prompt as it is (--raw)")
            }
            None => Error::new(ErrorKind::Unsupported, format!("{} has no chat template", self.name))
                .with_hint("give the prompt as it is with --raw, or a template with --chat-template"),
        })
    }

    /// The model's dimensions.
    #[must_use]
    pub fn model_config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device and its counters.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The weights that steps read.
    #[must_use]
    pub fn weight_traffic(&self) -> &WeightTraffic {
        &self.weight_traffic
    }

    /// Where experts are that did not fit into memory, or were not to be there.
    #[must_use]
    pub fn expert_file(&self) -> Option<&MatrixFile> {
        self.expert_file.as_deref()
    }

    /// From the start of loading until the engine ran.
    #[must_use]
    pub fn load_time(&self) -> Duration {
        self.load_time
    }

    /// Defaults of requests, from the model's files.
    #[must_use]
    pub fn sampling_defaults(&self) -> &SamplingDefaults {
        &self.sampling_defaults
    }

    /// Maximum number of tokens to generate after a prompt of this length, if the request sets none.
    #[must_use]
    pub fn default_max_tokens(&self, num_prompt_tokens: usize, params: &SamplingParams) -> Option<usize> {
        let left = self.engine.config().max_model_len.saturating_sub(num_prompt_tokens);
        self.sampling_defaults.max_tokens_for(left, params.min_tokens)
    }

    /// Maximum number of tokens to generate after a prompt of this length: the request's (its largest value is all that
    /// fit), or the default.
    #[must_use]
    pub fn max_tokens(&self, num_prompt_tokens: usize, params: &SamplingParams) -> Option<usize> {
        let left = self.engine.config().max_model_len.saturating_sub(num_prompt_tokens);
        match params.max_tokens {
            None => self.default_max_tokens(num_prompt_tokens, params),
            Some(usize::MAX) => Some(left.max(1)),
            given => given,
        }
    }

    /// Notices about the model and the request, a line each.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// The summary line: model, device and limits.
    #[must_use]
    pub fn summary(&self) -> String {
        let left_out = match self.config.num_nextn_layers {
            0 => "",
            _ if self.config.mtp_layer().is_some() => " · drafts with its MTP block",
            _ => " · without its MTP block",
        };
        format!(
            "{} on {}{left_out} · KV cache {} tokens, context {} · loaded in {:.2} s",
            self.name,
            self.context.description(),
            self.engine.config().kv_cache_tokens(),
            self.engine.config().max_model_len,
            self.load_time.as_secs_f64()
        )
    }

    /// A line about the experts in a file: its path, and how much of it is in memory at the moment.
    #[must_use]
    pub fn expert_summary(&self) -> Option<String> {
        self.expert_file().map(expert_file::summary)
    }

    /// Encodes a raw prompt; text that spells a special token becomes that token.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model has no tokenizer.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>> {
        self.require_tokenizer()?.encode_prompt(text, true)
    }

    /// The longest text that can be a prompt, in bytes. It is four times as long as the context, because templates trim
    /// and normalising shortens.
    #[must_use]
    pub fn max_text_bytes(&self) -> usize {
        let longest_token = self.tokenizer().map_or(1, Tokenizer::longest_token);
        self.engine.config().max_model_len.saturating_mul(longest_token).saturating_mul(4)
    }

    /// Renders a conversation through the model's chat template and encodes it. Text of messages never
    /// becomes a special token.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model has no tokenizer or no template;
    /// [`ErrorKind::ContextLength`] if the template makes it so long that it is not even tokenized; otherwise as the
    /// template fails.
    pub fn encode_chat(&self, messages: &[Message], options: &ChatOptions) -> Result<Vec<u32>> {
        Ok(self.encode_chat_reporting(messages, options)?.token_ids)
    }

    /// The same, with the messages that the template leaves out.
    ///
    /// # Errors
    /// As [`Self::encode_chat`].
    pub fn encode_chat_reporting(&self, messages: &[Message], options: &ChatOptions) -> Result<EncodedChat> {
        let tokenizer = self.require_tokenizer()?;
        let most = (self.max_text_bytes(), self.engine.config().max_model_len);
        self.require_chat()?.encode_within(tokenizer, messages, options, most)
    }

    /// Where the template left off, from the last tokens of a prompt.
    #[must_use]
    pub fn prompt_end(&self, prompt_token_ids: &[u32]) -> PromptEnd {
        // More than the markers and the line ends around them have, also where a token is a letter.
        const NUM_TOKENS: usize = 64;
        let last = &prompt_token_ids[prompt_token_ids.len().saturating_sub(NUM_TOKENS)..];
        let text = self.tokenizer.as_ref().map(|tokenizer| tokenizer.decode(last, false));
        let format = self.chat_format().and_then(|chat| chat.answer_format().reasoning.as_ref());
        text.map_or(PromptEnd::Plain, |text| PromptEnd::of(&text, format))
    }

    /// The special tokens that must stay in the text for answers of this format to be parsed, for
    /// [`TextOptions::visible_special`].
    #[must_use]
    pub fn visible_special(&self, answers: &AnswerFormat) -> Arc<[u32]> {
        let markers = self.tokenizer.as_ref().map(|tokenizer| answers.marker_token_ids(tokenizer));
        markers.unwrap_or_default().into()
    }

    /// Compiles the format of answers, for [`Request::constraint`]. Takes up to a second.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model has no tokenizer; otherwise as [`GrammarCompiler::compile`].
    pub fn compile_grammar(&self, spec: &GrammarSpec) -> Result<Arc<Grammar>> {
        self.require_tokenizer()?;
        match &self.grammars {
            Some(grammars) => grammars.compile(spec),
            None => Err(Error::internal("a model with a tokenizer has no compiler of grammars")),
        }
    }

    /// The same constraint for a model that may reason first: it begins where the reasoning ends.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the answer begins with reasoning and its end is not a single token.
    pub fn after_reasoning(
        &self,
        constraint: Arc<dyn Constraint>,
        format: Option<&ReasoningFormat>,
        prompt_end: PromptEnd,
    ) -> Result<Arc<dyn Constraint>> {
        let Some(format) = format.filter(|_| prompt_end != PromptEnd::AfterReasoning) else {
            return Ok(constraint);
        };
        let tokenizer = self.require_tokenizer()?;
        let (open, close) = format.markers();
        let [open, close] = [open, close].map(|marker| tokenizer.token_id(marker));
        let is_inside = prompt_end == PromptEnd::InReasoning || format.is_from_start();
        let (start, close) = match (is_inside, open, close) {
            (true, _, Some(close)) => (ReasoningStart::Inside, close),
            (false, Some(open), Some(close)) => (ReasoningStart::Before(open), close),
            // A model without these tokens is not made to think, so that it can go without.
            (false, _, _) => return Ok(constraint),
            (true, _, None) => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "the answer begins with reasoning, and the model has no token that ends it, so its format \
                     cannot be enforced",
                )
                .with_hint("switch reasoning off with chat_template_kwargs {\"enable_thinking\": false}"));
            }
        };
        let ends = &self.engine.model_limits().eos_token_ids;
        Ok(Arc::new(AfterReasoning::new(constraint, start, close, tokenizer, ends)))
    }

    /// Queues a prompt; the stream yields text as it is generated.
    ///
    /// # Errors
    /// If the request is not valid (see [`Request::validate`]), or has stop strings without a tokenizer.
    pub fn submit(&self, prompt_token_ids: Vec<u32>, params: SamplingParams) -> Result<TextStream> {
        self.submit_request(Request::new(prompt_token_ids, params), &AnswerFormat::default())
    }

    /// The same for a request with more than parameters, and an answer with this parser: its marks
    /// stay in the text, and no stop string ends its reasoning.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn submit_request(&self, request: Request, answers: &AnswerFormat) -> Result<TextStream> {
        let prompt_end = || self.prompt_end(&request.prompt_token_ids);
        let options = TextOptions {
            stop: request.params.stop.clone(),
            visible_special: self.visible_special(answers),
            reasoning: answers.reasoning.clone().map(|format| (format, prompt_end())),
            ..TextOptions::default()
        };
        let decoder = self.text_decoder(&request.params, &options)?;
        let events = self.engine.submit(request)?;
        Ok(TextStream::new(events, decoder))
    }

    /// A decoder for the events of a request with `num_sequences` sequences.
    ///
    /// # Errors
    /// If a stop string is empty, or there are stop strings without a tokenizer.
    pub fn text_decoder(&self, params: &SamplingParams, options: &TextOptions) -> Result<TextDecoder> {
        if !options.stop.is_empty() {
            self.require_tokenizer()?;
        }
        TextDecoder::new(self.tokenizer.as_ref(), params, options)
    }

    /// The tokenizer, without which there is no text.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model has none, or one that cannot be used, with the reason.
    pub fn require_tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_deref().ok_or_else(|| match &self.tokenizer_error {
            None => Error::unsupported(format!("{} has no tokenizer", self.name))
                .with_hint("give the prompt in token ids with --prompt-ids"),
            Some(error) => {
                let message = format!("the tokenizer of {} cannot be used: {}", self.name, error.message());
                let hint = error.hint().map(|hint| format!("{hint}; ")).unwrap_or_default();
                Error::unsupported(message)
                    .with_hint(format!("{hint}prompts in token ids work, with --prompt-ids"))
            }
        })
    }
}
