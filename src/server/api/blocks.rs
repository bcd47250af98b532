//! Answers that consist of blocks: reasoning, text and tool calls, one after the other. OpenAI's responses,
//! Anthropic's messages and ollama's interface share this.
//!
//! A stream writes the steps by which blocks grow, and a complete answer writes the blocks, so the two cannot
//! differ.

use std::sync::Arc;

use axum::response::Response;
use serde_json::Value;

use super::super::auth::Caller;
use super::super::error::{ApiError, ok};
use super::super::generation::{Generation, Totals};
use super::super::history::Identity;
use super::answer::Answer;
use super::options::StreamOptions;
use super::shape::chat_tokens;
use super::stream::StreamWriter;
use super::turn::{Turn, TurnDelta, TurnFormat};
use super::types::ChatToken;
use tinyvllm::engine::Request;
use tinyvllm::llm::TextEvent;
use tinyvllm::sampling::TokenLogprobs;
use tinyvllm::tokenizer::Tokenizer;

/// A block of an answer.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) kind: BlockKind,
    /// The reasoning, the text, or the arguments of the call, so far.
    pub(super) text: String,
    /// The report on the tokens of the text, if requested.
    pub(super) tokens: Vec<ChatToken>,
}

/// The kind of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BlockKind {
    Reasoning,
    Text,
    Call { id: String, name: String },
}

/// Changes of the blocks, which are given by their index. A block ends before the next one begins.
#[derive(Debug)]
pub(super) enum Step {
    /// A new block. Its contents come in further steps.
    Begin(usize),
    /// The block continues.
    Delta { index: usize, text: String, tokens: Vec<ChatToken> },
    /// The block is complete or cut off.
    End(usize),
}

/// The blocks of an answer so far.
#[derive(Debug)]
pub(super) struct Blocks {
    turn: Turn,
    blocks: Vec<Block>,
    is_open: bool,
    has_logprobs: bool,
    /// Tokens whose text is still held back.
    pending: Vec<(u32, Option<TokenLogprobs>)>,
    pub(super) totals: Totals,
    /// Why the answer ended, as chats name it, and the stop string that was found.
    end: Option<(&'static str, Option<String>)>,
}

impl Blocks {
    /// An empty answer to this request, with this parser.
    pub(super) fn new(request: &Request, turns: TurnFormat) -> Self {
        let totals = Totals {
            num_prompt_tokens: request.prompt_token_ids.len(),
            num_sequences: 1,
            counts_reasoning: turns.answers.reasoning.is_some(),
            ..Totals::default()
        };
        Self {
            turn: Turn::new(&Arc::new(turns)),
            blocks: Vec::new(),
            is_open: false,
            has_logprobs: request.params.logprobs.is_some(),
            pending: Vec::new(),
            totals,
            end: None,
        }
    }

    pub(super) fn all(&self) -> &[Block] {
        &self.blocks
    }

    /// Why the answer ended, as chats name it; `None` if it has not ended.
    pub(super) fn finish_reason(&self) -> Option<&'static str> {
        self.end.as_ref().map(|(reason, _)| *reason)
    }

    /// The stop string that ended it.
    pub(super) fn matched_stop(&self) -> Option<&str> {
        self.end.as_ref()?.1.as_deref()
    }

    /// Whether this block is the one in which the answer was cut off.
    pub(super) fn is_cut_off(&self, index: usize) -> bool {
        let is_broken = |block: &Block| {
            matches!(block.kind, BlockKind::Call { .. }) && self.finish_reason() == Some("stop")
        };
        let is_cut_off = self.finish_reason() == Some("length") || self.blocks.last().is_some_and(is_broken);
        is_cut_off && index + 1 == self.blocks.len()
    }

    /// Applies the next event.
    pub(super) fn push(&mut self, event: TextEvent, tokenizer: Option<&Tokenizer>) -> Vec<Step> {
        let mut steps = Vec::new();
        match event {
            TextEvent::PromptLogprobs { .. } | TextEvent::PromptProgress { .. } => {}
            TextEvent::Delta { text, token_id, logprobs, .. } => {
                if let Some(token_id) = token_id {
                    self.totals.num_output_tokens += 1;
                    if self.has_logprobs {
                        self.pending.push((token_id, logprobs));
                    }
                }
                for delta in self.turn.push(&text, token_id.is_some(), &mut self.totals) {
                    self.add(delta, tokenizer, &mut steps);
                }
            }
            TextEvent::Finished { index, reason, stats, matched_stop, .. } => {
                self.totals.add(index, &stats);
                let (reason, has_matched_stop) = (reason.name(), matched_stop.is_some());
                for delta in self.turn.finish(reason, has_matched_stop) {
                    self.add(delta, tokenizer, &mut steps);
                }
                self.end = Some((self.turn.finish_reason(reason, has_matched_stop), matched_stop));
                self.close(&mut steps);
            }
        }
        steps
    }

    fn add(&mut self, delta: TurnDelta, tokenizer: Option<&Tokenizer>, steps: &mut Vec<Step>) {
        match delta {
            TurnDelta::Reasoning(text) => self.extend(BlockKind::Reasoning, text, tokenizer, steps),
            TurnDelta::Content(text) => self.extend(BlockKind::Text, text, tokenizer, steps),
            TurnDelta::Call { id, name, .. } => self.begin(BlockKind::Call { id, name }, steps),
            // They come after the beginning of their call.
            TurnDelta::Arguments { text, .. } => self.append(text, Vec::new(), steps),
        }
    }

    fn extend(
        &mut self,
        kind: BlockKind,
        text: String,
        tokenizer: Option<&Tokenizer>,
        steps: &mut Vec<Step>,
    ) {
        let pending = std::mem::take(&mut self.pending);
        let tokens = if kind == BlockKind::Text { chat_tokens(&pending, tokenizer) } else { Vec::new() };
        if !self.is_open || self.blocks.last().is_none_or(|block| block.kind != kind) {
            self.begin(kind, steps);
        }
        self.append(text, tokens, steps);
    }

    fn begin(&mut self, kind: BlockKind, steps: &mut Vec<Step>) {
        self.close(steps);
        self.pending.clear();
        self.blocks.push(Block { kind, text: String::new(), tokens: Vec::new() });
        self.is_open = true;
        steps.push(Step::Begin(self.blocks.len() - 1));
    }

    fn append(&mut self, text: String, tokens: Vec<ChatToken>, steps: &mut Vec<Step>) {
        let index = self.blocks.len().saturating_sub(1);
        if let Some(block) = self.blocks.last_mut() {
            block.text.push_str(&text);
            block.tokens.extend(tokens.iter().cloned());
            steps.push(Step::Delta { index, text, tokens });
        }
    }

    fn close(&mut self, steps: &mut Vec<Step>) {
        if std::mem::replace(&mut self.is_open, false) {
            steps.push(Step::End(self.blocks.len() - 1));
        }
    }
}

/// How an interface writes blocks.
pub(super) trait BlockStyle: Send + Unpin + 'static {
    /// The media type of a stream.
    const CONTENT_TYPE: &'static str = "text/event-stream";
    /// Shows proxies that the stream is alive.
    const KEEP_ALIVE: &'static [u8];

    /// The ids of the request in the history.
    fn identity(&self, request_id: Arc<str>, caller: Caller) -> Identity;

    /// The complete answer.
    fn whole(&mut self, blocks: &Blocks) -> Value;

    /// Writes the beginning of a stream.
    fn write_begin(&mut self, blocks: &Blocks, bytes: &mut Vec<u8>);

    /// Writes a step, which `blocks` already includes.
    fn write_step(&mut self, blocks: &Blocks, step: Step, bytes: &mut Vec<u8>);

    /// Writes the end of a stream.
    fn write_end(&mut self, blocks: &Blocks, bytes: &mut Vec<u8>);

    /// Writes the end of a stream whose generation failed.
    fn write_error(&mut self, blocks: &Blocks, error: &ApiError, bytes: &mut Vec<u8>);
}

/// An answer of blocks in the style of one interface.
pub(super) struct BlockResponse<S> {
    pub(super) blocks: Blocks,
    pub(super) style: S,
}

impl<S: BlockStyle> Answer for BlockResponse<S> {
    type Writer = BlockWriter<S>;

    fn identity(&self, request_id: Arc<str>, caller: Caller) -> Identity {
        self.style.identity(request_id, caller)
    }

    async fn collect(mut self, mut generation: Generation) -> Result<Response, ApiError> {
        while let Some(event) = generation.next().await {
            let (_, event) = event?;
            self.blocks.push(event, generation.model.llm.tokenizer());
        }
        Ok(ok(&self.style.whole(&self.blocks)))
    }

    fn into_writer(mut self, _: StreamOptions) -> BlockWriter<S> {
        let mut bytes = Vec::new();
        self.style.write_begin(&self.blocks, &mut bytes);
        BlockWriter { shape: self, bytes }
    }
}

/// Converts events into those of the interface.
pub(super) struct BlockWriter<S> {
    shape: BlockResponse<S>,
    bytes: Vec<u8>,
}

impl<S: BlockStyle> StreamWriter for BlockWriter<S> {
    const CONTENT_TYPE: &'static str = S::CONTENT_TYPE;
    const KEEP_ALIVE: &'static [u8] = S::KEEP_ALIVE;

    fn write_event(&mut self, generation: &Generation, _prompt: usize, event: TextEvent, _is_last: bool) {
        let BlockResponse { blocks, style } = &mut self.shape;
        for step in blocks.push(event, generation.model.llm.tokenizer()) {
            style.write_step(blocks, step, &mut self.bytes);
        }
    }

    fn write_end(&mut self, _: &Generation) {
        let BlockResponse { blocks, style } = &mut self.shape;
        style.write_end(blocks, &mut self.bytes);
    }

    fn write_error(&mut self, error: &ApiError) {
        let BlockResponse { blocks, style } = &mut self.shape;
        style.write_error(blocks, error, &mut self.bytes);
    }

    fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinyvllm::chat::{AnswerFormat, ReasoningFormat, ToolCallFormat};
    use tinyvllm::engine::{FinishReason, SequenceStats};

    const TEXT: &str = "<think>\nRome?\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": \
        {\"city\": \"Rome\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";

    fn blocks() -> Blocks {
        let answers = AnswerFormat {
            tool_calls: ToolCallFormat::named("hermes"),
            reasoning: Some(ReasoningFormat::think()),
        };
        let turns = TurnFormat { answers, includes_reasoning: true, ..TurnFormat::default() };
        Blocks::new(&Request::default(), turns)
    }

    fn push(blocks: &mut Blocks, text: &str, size: usize, reason: FinishReason) -> Vec<Step> {
        let characters: Vec<char> = text.chars().collect();
        let mut steps = Vec::new();
        for delta in characters.chunks(size) {
            let text = delta.iter().collect();
            steps.extend(
                blocks.push(TextEvent::Delta { index: 0, text, token_id: Some(1), logprobs: None }, None),
            );
        }
        let stats = SequenceStats::default();
        let end = TextEvent::Finished {
            index: 0,
            reason,
            error: None,
            error_kind: None,
            stats,
            matched_stop: None,
            stop_token_id: None,
        };
        steps.extend(blocks.push(end, None));
        steps
    }

    #[test]
    fn steps_add_up_to_the_blocks_and_each_ends_before_the_next() {
        for size in [1, 3, 1_000] {
            let mut blocks = blocks();
            let mut built: Vec<String> = Vec::new();
            let mut open = None;
            for step in push(&mut blocks, TEXT, size, FinishReason::Stop) {
                match step {
                    Step::Begin(index) => {
                        assert_eq!((open, index), (None, built.len()));
                        (open, _) = (Some(index), built.push(String::new()));
                    }
                    Step::Delta { index, text, .. } => {
                        assert!(open == Some(index) && !text.is_empty());
                        built[index].push_str(&text);
                    }
                    Step::End(index) => assert_eq!(open.take(), Some(index)),
                }
            }
            assert_eq!(open, None);
            let texts: Vec<&str> = blocks.all().iter().map(|block| block.text.as_str()).collect();
            assert_eq!(texts, built);
            assert_eq!(texts, ["Rome?", "Let me see.", "{\"city\": \"Rome\"}", "{}"]);
            let names = blocks.all().iter().map(|block| match &block.kind {
                BlockKind::Reasoning => "(reasoning)",
                BlockKind::Text => "(text)",
                BlockKind::Call { name, .. } => name,
            });
            assert_eq!(names.collect::<Vec<_>>(), ["(reasoning)", "(text)", "weather", "time"]);
            assert_eq!(blocks.finish_reason(), Some("tool_calls"));
        }
    }

    #[test]
    fn only_the_last_block_is_cut_off() {
        let mut blocks = blocks();
        push(&mut blocks, "<think>A</think>B and", 2, FinishReason::Length);
        assert_eq!([0, 1].map(|index| blocks.is_cut_off(index)), [false, true]);
        let mut empty = self::blocks();
        assert!(push(&mut empty, "", 1, FinishReason::Stop).is_empty());
        assert_eq!((empty.all().len(), empty.finish_reason()), (0, Some("stop")));
    }
}
