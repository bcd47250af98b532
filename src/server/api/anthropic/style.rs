//! Messages in Anthropic's format, complete and as events.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use serde_json::{Value, json};

use super::super::super::access::new_id;
use super::super::super::auth::Caller;
use super::super::super::error::ApiError;
use super::super::super::generation::Totals;
use super::super::super::history::Identity;
use super::super::super::state::unix_seconds;
use super::super::blocks::{Block, BlockKind, BlockStyle, Blocks, Step};
use super::super::messages::call_arguments;
use super::super::stream::write_event;

/// The envelope around the blocks of an answer.
pub(super) struct MessageStyle {
    id: String,
    created: u64,
    model_name: String,
    /// Whether the context had fewer tokens left than requested.
    is_clamped: bool,
}

impl MessageStyle {
    pub(super) fn new(model_name: &str, is_clamped: bool) -> Self {
        Self {
            id: format!("msg_{}", new_id()),
            created: unix_seconds(),
            model_name: model_name.to_owned(),
            is_clamped,
        }
    }

    fn message(&self, content: &[Value], end: (Option<&str>, Option<&str>), totals: &Totals) -> Value {
        let (stop_reason, stop_sequence) = end;
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model_name,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage(totals),
        })
    }

    /// The stop reason, and the stop sequence that was found.
    fn end<'a>(&self, blocks: &'a Blocks) -> (Option<&'static str>, Option<&'a str>) {
        let stop = blocks.matched_stop();
        match blocks.finish_reason() {
            None => (None, None),
            Some("tool_calls") => (Some("tool_use"), None),
            Some("length") if self.is_clamped => (Some("model_context_window_exceeded"), None),
            Some("length") => (Some("max_tokens"), None),
            Some(_) if stop.is_some() => (Some("stop_sequence"), stop),
            Some(_) => (Some("end_turn"), None),
        }
    }
}

impl BlockStyle for MessageStyle {
    const KEEP_ALIVE: &'static [u8] = b"event: ping\ndata: {\"type\":\"ping\"}\n\n";

    fn identity(&self, request_id: Arc<str>, caller: Caller) -> Identity {
        Identity { id: self.id.clone(), request_id, caller, object: "message", created: self.created }
    }

    fn whole(&mut self, blocks: &Blocks) -> Value {
        let content: Vec<Value> = blocks.all().iter().map(block).collect();
        self.message(&content, self.end(blocks), &blocks.totals)
    }

    fn write_begin(&mut self, blocks: &Blocks, bytes: &mut Vec<u8>) {
        // Cached tokens are known only when the answer ends.
        let message = self.message(&[], (None, None), &blocks.totals);
        write_event(bytes, "message_start", &json!({"type": "message_start", "message": message}));
        bytes.extend_from_slice(Self::KEEP_ALIVE);
    }

    fn write_step(&mut self, blocks: &Blocks, step: Step, bytes: &mut Vec<u8>) {
        let mut write_delta = |index: usize, delta: Value| {
            let event = json!({"type": "content_block_delta", "index": index, "delta": delta});
            write_event(bytes, "content_block_delta", &event);
        };
        match step {
            Step::Begin(index) => {
                let block = match &blocks.all()[index].kind {
                    BlockKind::Reasoning => json!({"type": "thinking", "thinking": "", "signature": ""}),
                    BlockKind::Text => json!({"type": "text", "text": ""}),
                    BlockKind::Call { id, name } => {
                        json!({"type": "tool_use", "id": id, "name": name, "input": {}})
                    }
                };
                let event = json!({"type": "content_block_start", "index": index, "content_block": block});
                write_event(bytes, "content_block_start", &event);
            }
            Step::Delta { index, text, .. } => write_delta(
                index,
                match blocks.all()[index].kind {
                    BlockKind::Reasoning => json!({"type": "thinking_delta", "thinking": text}),
                    BlockKind::Text => json!({"type": "text_delta", "text": text}),
                    BlockKind::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
                },
            ),
            Step::End(index) => {
                let block = &blocks.all()[index];
                if block.kind == BlockKind::Reasoning {
                    write_delta(
                        index,
                        json!({"type": "signature_delta", "signature": signature(&block.text)}),
                    );
                }
                let event = json!({"type": "content_block_stop", "index": index});
                write_event(bytes, "content_block_stop", &event);
            }
        }
    }

    fn write_end(&mut self, blocks: &Blocks, bytes: &mut Vec<u8>) {
        let (stop_reason, stop_sequence) = self.end(blocks);
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        let event = json!({"type": "message_delta", "delta": delta, "usage": usage(&blocks.totals)});
        write_event(bytes, "message_delta", &event);
        write_event(bytes, "message_stop", &json!({"type": "message_stop"}));
    }

    fn write_error(&mut self, _: &Blocks, error: &ApiError, bytes: &mut Vec<u8>) {
        write_event(bytes, "error", &error.anthropic_body(None));
    }
}

fn block(block: &Block) -> Value {
    let text = &block.text;
    match &block.kind {
        BlockKind::Reasoning => json!({"type": "thinking", "thinking": text, "signature": signature(text)}),
        BlockKind::Text => json!({"type": "text", "text": text}),
        BlockKind::Call { id, name } => {
            // This work is not charged, so nothing is refused.
            let input = call_arguments(text).unwrap_or_default();
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

/// Clients send thinking back only if it has a signature. This one is never checked.
fn signature(text: &str) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Here, cached tokens are not part of the input tokens. They have their own field.
fn usage(totals: &Totals) -> Value {
    let num_cached = totals.num_cached_tokens;
    let mut usage = json!({
        "input_tokens": totals.num_prompt_tokens.saturating_sub(num_cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": totals.num_output_tokens,
    });
    if totals.counts_reasoning {
        usage["output_tokens_details"] = json!({"thinking_tokens": totals.num_reasoning_tokens});
    }
    usage
}
