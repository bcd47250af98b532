//! The form of an answer: which object, which choices, what is told of each token. The same for answers
//! that come whole and for streams, so that the two cannot differ.

use std::sync::Arc;

use axum::response::Response;
use serde_json::{Map, Value};

use super::super::access::new_id;
use super::super::error::{ApiError, ok};
use super::super::generation::{Generation, Totals};
use super::super::state::{Model, unix_seconds};
use super::options::Options;
use super::turn::{Turn, TurnFormat};
use super::types::{
    ChatToken, Choice, CompletionTokens, Content, Delta, Envelope, Logprobs, Message, TokenLogprob,
};
use crate::engine::Request;
use crate::llm::TextEvent;
use crate::sampling::TokenLogprobs;
use crate::tokenizer::Tokenizer;

/// Stands for a probability of 0, whose logarithm JSON cannot express.
const LOGPROB_OF_ZERO: f32 = -9999.0;

/// Which interface was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Completion,
}

/// What the answer to one HTTP request looks like.
pub(super) struct Form {
    kind: Kind,
    id: String,
    created: u64,
    model_name: String,
    num_prompts: usize,
    /// Sequences for each prompt.
    n: usize,
    has_logprobs: bool,
    /// Present if token ids are wanted.
    prompt_token_ids: Option<Vec<Vec<u32>>>,
    /// The texts of the prompts, if they are to come before the output.
    echoes: Vec<String>,
    num_prompt_tokens: usize,
    /// How the answers of a chat are taken apart.
    turns: Arc<TurnFormat>,
}

/// One choice, as far as it has come.
#[derive(Debug)]
struct Progress {
    text: String,
    turn: Turn,
    message: Message,
    tokens: Vec<(u32, Option<TokenLogprobs>)>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<String>,
}

impl Form {
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
            num_prompt_tokens: requests.iter().map(|request| request.prompt_token_ids.len()).sum(),
            turns: Arc::default(),
        }
    }

    /// Takes the answers apart like this.
    pub(super) fn set_turns(&mut self, turns: TurnFormat) {
        self.turns = Arc::new(turns);
    }

    /// What takes the text of one choice of a chat apart.
    pub(super) fn new_turn(&self) -> Turn {
        Turn::new(&self.turns)
    }

    /// Puts these texts, one for each prompt, before the output.
    pub(super) fn set_echo(&mut self, echoes: Vec<String>) {
        self.echoes = echoes;
    }

    pub(super) fn num_choices(&self) -> usize {
        self.num_prompts * self.n
    }

    /// The number of a choice in the answer.
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

    /// What comes before the output of this choice.
    pub(super) fn echo(&self, choice: usize) -> Option<&str> {
        self.echoes.get(choice / self.n).map(String::as_str)
    }

    /// Waits for everything and answers.
    pub(super) async fn collect(self, mut generation: Generation) -> Result<Response, ApiError> {
        let mut choices: Vec<Progress> = (0..self.num_choices()).map(|_| self.new_progress()).collect();
        let mut totals = self.new_totals();
        while let Some(event) = generation.next().await {
            let (prompt, event) = event?;
            match event {
                TextEvent::Delta { index, text, token_id, logprobs } => {
                    let choice = &mut choices[self.choice_index(prompt, index)];
                    match self.kind {
                        Kind::Chat => {
                            let deltas = choice.turn.push(&text, token_id.is_some(), &mut totals);
                            deltas.into_iter().for_each(|delta| choice.message.add(delta));
                        }
                        Kind::Completion => choice.text.push_str(&text),
                    }
                    if let Some(token_id) = token_id {
                        totals.num_output_tokens += 1;
                        choice.tokens.push((token_id, logprobs));
                    }
                }
                TextEvent::Finished { index, reason, stats, matched_stop, .. } => {
                    totals.add(index, &stats);
                    let choice = &mut choices[self.choice_index(prompt, index)];
                    choice.turn.finish().into_iter().for_each(|delta| choice.message.add(delta));
                    choice.finish_reason = Some(choice.turn.finish_reason(reason.name()));
                    choice.stop_reason = matched_stop;
                }
            }
        }
        let tokenizer = generation.model.llm.tokenizer();
        let choices =
            choices.into_iter().enumerate().map(|(index, choice)| self.choice(index, choice, tokenizer));
        let mut answer = self.envelope(choices.collect(), false);
        answer.usage = Some(Some((&totals).into()));
        answer.timings = Some((&totals).into());
        if self.kind == Kind::Chat {
            answer.prompt_token_ids = self.prompt_token_ids(0);
        }
        Ok(ok(&answer))
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
            logprobs: self.logprobs(&tokens, 0, tokenizer),
            // A choice without an end is one for which nothing was to be generated.
            finish_reason: finish_reason.or(Some("length")),
            stop_reason,
            prompt_token_ids: match self.kind {
                Kind::Chat => None,
                Kind::Completion => self.prompt_token_ids(index),
            },
            token_ids: self.returns_token_ids().then(|| tokens.iter().map(|(id, _)| *id).collect()),
        }
    }

    /// A piece of a choice in a stream. A completion takes the content of `delta` alone.
    pub(super) fn piece(&self, index: usize, delta: Delta) -> Choice {
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
            token_ids: None,
        }
    }

    /// The answer around these choices.
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
            timings: None,
        }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// The token ids of the prompt that a choice continues, if they are wanted.
    pub(super) fn prompt_token_ids(&self, choice: usize) -> Option<Vec<u32>> {
        self.prompt_token_ids.as_ref()?.get(choice / self.n).cloned()
    }

    /// What is told of these tokens, the first of which stands `offset` characters into the output.
    pub(super) fn logprobs(
        &self,
        tokens: &[(u32, Option<TokenLogprobs>)],
        mut offset: usize,
        tokenizer: Option<&Tokenizer>,
    ) -> Option<Logprobs> {
        if !self.has_logprobs {
            return None;
        }
        let bytes = |id: u32| tokenizer.map_or_else(Vec::new, |tokenizer| tokenizer.token_bytes(id).to_vec());
        let known = tokens.iter().filter_map(|(id, logprobs)| Some((*id, logprobs.as_ref()?)));
        Some(match self.kind {
            Kind::Chat => {
                let entry = |id: u32, logprob: f32| {
                    let bytes = bytes(id);
                    TokenLogprob {
                        token: String::from_utf8_lossy(&bytes).into_owned(),
                        logprob: logprob.max(LOGPROB_OF_ZERO),
                        bytes,
                    }
                };
                let content = known.map(|(id, logprobs)| ChatToken {
                    token: entry(id, logprobs.logprob),
                    top_logprobs: logprobs.top.iter().map(|(id, logprob)| entry(*id, *logprob)).collect(),
                });
                Logprobs::Chat { content: content.collect(), refusal: None }
            }
            Kind::Completion => {
                let text = |id: u32| String::from_utf8_lossy(&bytes(id)).into_owned();
                let mut list = CompletionTokens::default();
                for (id, logprobs) in known {
                    let token = text(id);
                    let mut top = Map::new();
                    for (id, logprob) in &logprobs.top {
                        // Of two tokens with the same text, the more likely one came first.
                        top.entry(text(*id)).or_insert_with(|| number(*logprob));
                    }
                    // The chosen token is in the list also if it is not among the most likely ones.
                    top.entry(token.as_str()).or_insert_with(|| number(logprobs.logprob));
                    list.text_offset.push(offset);
                    offset += token.chars().count();
                    list.tokens.push(token);
                    list.token_logprobs.push(logprobs.logprob.max(LOGPROB_OF_ZERO));
                    list.top_logprobs.push(top);
                }
                Logprobs::Completion(list)
            }
        })
    }
}

/// A log-probability with the digits that it has as an f32.
fn number(logprob: f32) -> Value {
    let digits = logprob.max(LOGPROB_OF_ZERO).to_string();
    digits.parse::<f64>().map_or(Value::Null, Value::from)
}
