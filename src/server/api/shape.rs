//! The shape of an answer: its object, its choices, and the report on each token. Complete answers and
//! streams share this, so the two cannot differ.

use std::sync::Arc;

use axum::response::Response;
use serde_json::{Map, Value};

use super::super::access::new_id;
use super::super::auth::Caller;
use super::super::error::{ApiError, ok};
use super::super::generation::{Generation, Totals};
use super::super::history::Identity;
use super::super::state::{Model, unix_seconds};
use super::answer::Answer;
use super::options::{Options, StreamOptions};
use super::prompt_report::{Listed, PromptReport};
use super::stream::Writer;
use super::turn::{Turn, TurnFormat};
use super::types::{
    ChatToken, Choice, CompletionTokens, Content, Delta, Envelope, Logprobs, Message, StopReason,
    TokenLogprob,
};
use tinyvllm::engine::Request;
use tinyvllm::llm::TextEvent;
use tinyvllm::sampling::{RankedLogprobs, TokenLogprobs};
use tinyvllm::tokenizer::Tokenizer;

/// Stands for the logarithm of 0, which JSON cannot express.
pub(super) const LOGPROB_OF_ZERO: f32 = -9999.0;

/// The requested interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Completion,
}

/// The shape of the answer to one HTTP request.
pub(super) struct ResponseShape {
    kind: Kind,
    id: String,
    created: u64,
    model_name: String,
    num_prompts: usize,
    /// Sequences for each prompt.
    n: usize,
    has_logprobs: bool,
    /// Set if token ids are requested.
    prompt_token_ids: Option<Vec<Vec<u32>>>,
    /// The texts of the prompts, if they precede the output.
    echoes: Vec<String>,
    num_prompt_tokens: usize,
    /// The report on the prompts, if there is one.
    prompt_report: Option<PromptReport>,
    /// Whether only the prompt is requested: generated tokens are discarded.
    is_prompt_only: bool,
    /// The parser of answers.
    turns: Arc<TurnFormat>,
}

/// A choice so far.
#[derive(Debug)]
struct Progress {
    text: String,
    turn: Turn,
    message: Message,
    tokens: Vec<(u32, Option<TokenLogprobs>)>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
}

impl ResponseShape {
    pub(super) fn new(
        kind: Kind,
        model: &Model,
        requests: &[Request],
        options: &Options,
        has_logprobs: bool,
    ) -> Self {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Completion => "cmpl",
        };
        let prompts = requests.iter().map(|request| request.prompt_token_ids.clone());
        Self {
            kind,
            id: format!("{prefix}-{}", new_id()),
            created: unix_seconds(),
            model_name: model.names[0].clone(),
            num_prompts: requests.len(),
            n: requests.first().map_or(1, |request| request.params.n),
            has_logprobs,
            prompt_token_ids: options.return_token_ids.then(|| prompts.collect()),
            echoes: Vec::new(),
            prompt_report: None,
            is_prompt_only: false,
            num_prompt_tokens: requests.iter().map(|request| request.prompt_token_ids.len()).sum(),
            turns: Arc::default(),
        }
    }

    /// Sets the parser of answers.
    pub(super) fn set_turns(&mut self, turns: TurnFormat) {
        self.turns = Arc::new(turns);
    }

    /// A parser for one choice of a chat.
    pub(super) fn new_turn(&self) -> Turn {
        Turn::new(&self.turns)
    }

    /// Sets texts, one for each prompt, that precede the output.
    pub(super) fn set_echo(&mut self, echoes: Vec<String>) {
        self.echoes = echoes;
    }

    /// Sets the report on the prompts.
    pub(super) fn set_prompt_report(&mut self, report: Option<PromptReport>) {
        self.prompt_report = report;
    }

    /// Omits everything that is generated.
    pub(super) fn set_prompt_only(&mut self) {
        self.is_prompt_only = true;
    }

    pub(super) fn is_prompt_only(&self) -> bool {
        self.is_prompt_only
    }

    /// Adds the next log-probabilities of a prompt.
    pub(super) fn add_prompt_logprobs(&mut self, prompt: usize, logprobs: Vec<RankedLogprobs>) {
        if let Some(report) = &mut self.prompt_report {
            report.add(prompt, logprobs);
        }
    }

    /// Whether prompts are reported.
    pub(super) fn has_prompt_report(&self) -> bool {
        self.prompt_report.is_some()
    }

    /// The field `prompt_logprobs` of the prompt that a choice continues.
    pub(super) fn prompt_logprobs(
        &self,
        choice: usize,
        tokenizer: Option<&Tokenizer>,
    ) -> Option<Vec<Listed>> {
        self.prompt_report.as_ref()?.listed(choice / self.n, tokenizer)
    }

    /// The prompt's entries in the field `logprobs`.
    pub(super) fn echoed_logprobs(
        &self,
        choice: usize,
        tokenizer: Option<&Tokenizer>,
    ) -> Option<CompletionTokens> {
        self.prompt_report.as_ref()?.echoed(choice / self.n, tokenizer)
    }

    pub(super) fn num_choices(&self) -> usize {
        self.num_prompts * self.n
    }

    /// The index of a choice in the answer.
    pub(super) fn choice_index(&self, prompt: usize, index: usize) -> usize {
        prompt * self.n + index
    }

    pub(super) fn has_logprobs(&self) -> bool {
        self.has_logprobs
    }

    pub(super) fn returns_token_ids(&self) -> bool {
        self.prompt_token_ids.is_some()
    }

    pub(super) fn new_totals(&self) -> Totals {
        Totals {
            num_prompt_tokens: self.num_prompt_tokens,
            num_sequences: self.num_choices(),
            counts_reasoning: self.turns.answers.reasoning.is_some(),
            ..Totals::default()
        }
    }

    /// The text that precedes the output of this choice.
    pub(super) fn echo(&self, choice: usize) -> Option<&str> {
        self.echoes.get(choice / self.n).map(String::as_str)
    }

    fn write_answer(&self, choices: Vec<Progress>, totals: &Totals, generation: &Generation) -> Response {
        let tokenizer = generation.model.llm.tokenizer();
        let choices =
            choices.into_iter().enumerate().map(|(index, choice)| self.choice(index, choice, tokenizer));
        let mut answer = self.envelope(choices.collect(), false);
        answer.usage = Some(Some(totals.into()));
        answer.timings = Some(totals.into());
        if self.kind == Kind::Chat {
            answer.prompt_token_ids = self.prompt_token_ids(0);
            answer.prompt_logprobs = self.prompt_logprobs(0, tokenizer);
        }
        ok(&answer)
    }

    fn new_progress(&self) -> Progress {
        Progress {
            text: String::new(),
            turn: self.new_turn(),
            message: Message::new(),
            tokens: Vec::new(),
            finish_reason: None,
            stop_reason: None,
        }
    }

    fn choice(&self, index: usize, progress: Progress, tokenizer: Option<&Tokenizer>) -> Choice {
        let Progress { text, turn: _, message, tokens, finish_reason, stop_reason } = progress;
        let content = match self.kind {
            Kind::Chat => Content::Message { message: message.complete() },
            Kind::Completion => {
                Content::Text { text: format!("{}{text}", self.echo(index).unwrap_or_default()) }
            }
        };
        Choice {
            index,
            content,
            logprobs: self.logprobs_after_echo(index, &tokens, tokenizer),
            // A choice without a finish reason had nothing to generate.
            finish_reason: finish_reason.or(Some("length")),
            stop_reason,
            prompt_token_ids: match self.kind {
                Kind::Chat => None,
                Kind::Completion => self.prompt_token_ids(index),
            },
            prompt_logprobs: match self.kind {
                Kind::Chat => None,
                Kind::Completion => self.prompt_logprobs(index, tokenizer),
            },
            token_ids: self.returns_token_ids().then(|| tokens.iter().map(|(id, _)| *id).collect()),
        }
    }

    /// A chunk of a choice in a stream. A completion takes only the content of `delta`.
    pub(super) fn chunk(&self, index: usize, delta: Delta) -> Choice {
        let content = match self.kind {
            Kind::Chat => Content::Delta { delta },
            Kind::Completion => Content::Text { text: delta.content.unwrap_or_default() },
        };
        Choice {
            index,
            content,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
            token_ids: None,
        }
    }

    /// The answer with these choices.
    pub(super) fn envelope(&self, choices: Vec<Choice>, is_chunk: bool) -> Envelope<'_> {
        let object = match (self.kind, is_chunk) {
            (Kind::Chat, false) => "chat.completion",
            (Kind::Chat, true) => "chat.completion.chunk",
            (Kind::Completion, _) => "text_completion",
        };
        Envelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model_name,
            choices,
            usage: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
            timings: None,
            prompt_progress: None,
        }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// The token ids of the prompt that a choice continues, if requested.
    pub(super) fn prompt_token_ids(&self, choice: usize) -> Option<Vec<u32>> {
        self.prompt_token_ids.as_ref()?.get(choice / self.n).cloned()
    }

    /// The report on all tokens of a choice, beginning with those of an echoed prompt.
    fn logprobs_after_echo(
        &self,
        choice: usize,
        tokens: &[(u32, Option<TokenLogprobs>)],
        tokenizer: Option<&Tokenizer>,
    ) -> Option<Logprobs> {
        let offset = self.echo(choice).map_or(0, |text| text.chars().count());
        let output = self.logprobs(tokens, offset, tokenizer)?;
        Some(match (self.echoed_logprobs(choice, tokenizer), output) {
            (Some(mut list), Logprobs::Completion(output)) => {
                list.append(output);
                Logprobs::Completion(list)
            }
            (_, output) => output,
        })
    }

    /// The report on these tokens. The first one is `offset` characters into the output.
    pub(super) fn logprobs(
        &self,
        tokens: &[(u32, Option<TokenLogprobs>)],
        mut offset: usize,
        tokenizer: Option<&Tokenizer>,
    ) -> Option<Logprobs> {
        if !self.has_logprobs {
            return None;
        }
        Some(match self.kind {
            Kind::Chat => Logprobs::Chat { content: chat_tokens(tokens, tokenizer), refusal: None },
            Kind::Completion => {
                let text = |id: u32| token_string(id, tokenizer);
                let mut list = CompletionTokens::default();
                for (id, logprobs) in with_logprobs(tokens) {
                    let token = text(id);
                    let mut top = Map::new();
                    for (id, logprob) in &logprobs.top {
                        // Of two tokens with the same text, the more likely one comes first.
                        top.entry(text(*id)).or_insert_with(|| number(*logprob));
                    }
                    // The chosen token is in the list even if it is not among the likeliest.
                    top.entry(token.as_str()).or_insert_with(|| number(logprobs.logprob));
                    list.text_offset.push(offset);
                    offset += token.chars().count();
                    list.tokens.push(token);
                    list.token_logprobs.push(Some(logprobs.logprob.max(LOGPROB_OF_ZERO)));
                    list.top_logprobs.push(Some(top));
                }
                Logprobs::Completion(list)
            }
        })
    }
}

impl Answer for ResponseShape {
    type Writer = Writer;

    fn identity(&self, request_id: Arc<str>, caller: Caller) -> Identity {
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        Identity { id: self.id.clone(), request_id, caller, object, created: self.created }
    }

    async fn collect(mut self, mut generation: Generation) -> Result<Response, ApiError> {
        let mut choices: Vec<Progress> = (0..self.num_choices()).map(|_| self.new_progress()).collect();
        let mut totals = self.new_totals();
        while let Some(event) = generation.next().await {
            let (prompt, event) = event?;
            match event {
                TextEvent::PromptLogprobs { logprobs } => self.add_prompt_logprobs(prompt, logprobs),
                TextEvent::PromptProgress { .. } => {}
                TextEvent::Delta { .. } if self.is_prompt_only => {}
                TextEvent::Delta { index, text, token_id, logprobs } => {
                    let choice = &mut choices[self.choice_index(prompt, index)];
                    match self.kind {
                        Kind::Chat => {
                            let deltas = choice.turn.push(&text, token_id.is_some(), &mut totals);
                            deltas.into_iter().for_each(|delta| choice.message.add(delta.into()));
                        }
                        Kind::Completion => choice.text.push_str(&text),
                    }
                    if let Some(token_id) = token_id {
                        totals.num_output_tokens += 1;
                        choice.tokens.push((token_id, logprobs));
                    }
                }
                TextEvent::Finished { index, reason, stats, matched_stop, stop_token_id, .. } => {
                    totals.add(index, &stats);
                    if !self.is_prompt_only {
                        let choice = &mut choices[self.choice_index(prompt, index)];
                        let (reason, has_matched_stop) = (reason.name(), matched_stop.is_some());
                        let deltas = choice.turn.finish(reason, has_matched_stop);
                        deltas.into_iter().for_each(|delta| choice.message.add(delta.into()));
                        choice.finish_reason = Some(choice.turn.finish_reason(reason, has_matched_stop));
                        choice.stop_reason = StopReason::new(matched_stop, stop_token_id);
                    }
                }
            }
        }
        Ok(match self.prompt_report {
            // Long lists take long to write; other connections need this thread.
            Some(_) => tokio::task::block_in_place(|| self.write_answer(choices, &totals, &generation)),
            None => self.write_answer(choices, &totals, &generation),
        })
    }

    fn into_writer(self, options: StreamOptions) -> Writer {
        Writer::new(self, options)
    }
}

/// The report on tokens in chats and similar interfaces.
pub(super) fn chat_tokens(
    tokens: &[(u32, Option<TokenLogprobs>)],
    tokenizer: Option<&Tokenizer>,
) -> Vec<ChatToken> {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.map_or_else(Vec::new, |tokenizer| tokenizer.token_bytes(id).to_vec());
        TokenLogprob { token: String::from_utf8_lossy(&bytes).into_owned(), logprob: number(logprob), bytes }
    };
    let token = |(id, logprobs): (u32, &TokenLogprobs)| ChatToken {
        token: entry(id, logprobs.logprob),
        top_logprobs: logprobs.top.iter().map(|(id, logprob)| entry(*id, *logprob)).collect(),
    };
    with_logprobs(tokens).map(token).collect()
}

fn with_logprobs(tokens: &[(u32, Option<TokenLogprobs>)]) -> impl Iterator<Item = (u32, &TokenLogprobs)> {
    tokens.iter().filter_map(|(id, logprobs)| Some((*id, logprobs.as_ref()?)))
}

/// A log-probability with only the digits that an f32 has.
pub(super) fn number(logprob: f32) -> Value {
    let digits = logprob.max(LOGPROB_OF_ZERO).to_string();
    digits.parse::<f64>().map_or(Value::Null, Value::from)
}

/// The text of one token. An incomplete character becomes a replacement character.
pub(super) fn token_string(id: u32, tokenizer: Option<&Tokenizer>) -> String {
    let bytes = tokenizer.map_or(&[][..], |tokenizer| tokenizer.token_bytes(id));
    String::from_utf8_lossy(bytes).into_owned()
}
