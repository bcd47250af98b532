//! Responses in OpenAI's format, complete and as events.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::super::super::access::new_id;
use super::super::super::auth::Caller;
use super::super::super::error::ApiError;
use super::super::super::generation::Totals;
use super::super::super::history::Identity;
use super::super::super::memory::StoredResponse;
use super::super::super::state::{App, unix_seconds};
use super::super::blocks::{Block, BlockKind, BlockStyle, Blocks, Step};
use super::super::stream::write_event;

/// The envelope around the blocks of a response.
pub(super) struct ResponseStyle {
    id: String,
    created: u64,
    model_name: String,
    /// Settings of the request that the response repeats.
    settings: Map<String, Value>,
    /// The ids of the items so far.
    item_ids: Vec<String>,
    num_events: u64,
    keeper: Option<Keeper>,
}

/// Stores the response for later requests.
pub(super) struct Keeper {
    pub(super) app: Arc<App>,
    pub(super) caller: Caller,
    pub(super) question: StoredResponse,
}

impl ResponseStyle {
    pub(super) fn new(model_name: &str, settings: Map<String, Value>, keeper: Option<Keeper>) -> Self {
        Self {
            id: format!("resp_{}", new_id()),
            created: unix_seconds(),
            model_name: model_name.to_owned(),
            settings,
            item_ids: Vec::new(),
            num_events: 0,
            keeper,
        }
    }

    /// The response so far.
    fn response(&self, blocks: &Blocks, status: &str, error: &Value) -> Value {
        let is_cut_off = blocks.finish_reason() == Some("length");
        let output = blocks.all().iter().zip(&self.item_ids).enumerate();
        let output = output.map(|(index, (block, id))| item(block, id, item_status(blocks, index)));
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": (status == "completed").then(unix_seconds),
            "status": status,
            "background": false,
            "error": error,
            "incomplete_details": is_cut_off.then(|| json!({"reason": "max_output_tokens"})),
            "model": self.model_name,
            "output": output.collect::<Vec<_>>(),
            "usage": blocks.finish_reason().map(|_| usage(&blocks.totals)),
        });
        if let Value::Object(fields) = &mut response {
            fields.extend(self.settings.clone());
        }
        response
    }

    /// The final response, which is then stored.
    fn finished(&mut self, blocks: &Blocks) -> Value {
        let is_cut_off = blocks.finish_reason() == Some("length");
        let response =
            self.response(blocks, if is_cut_off { "incomplete" } else { "completed" }, &Value::Null);
        if let Some(Keeper { app, caller, question }) = self.keeper.take() {
            app.memory.keep(caller, &self.id, &response, question);
        }
        response
    }

    fn write(&mut self, bytes: &mut Vec<u8>, name: &str, mut event: Value) {
        event["type"] = name.into();
        event["sequence_number"] = self.num_events.into();
        self.num_events += 1;
        write_event(bytes, name, &event);
    }

    fn add_item_id(&mut self, block: &Block) {
        let prefix = match block.kind {
            BlockKind::Reasoning => "rs",
            BlockKind::Text => "msg",
            BlockKind::Call { .. } => "fc",
        };
        self.item_ids.push(format!("{prefix}_{}", new_id()));
    }
}

impl BlockStyle for ResponseStyle {
    const KEEP_ALIVE: &'static [u8] = b": waiting\n\n";

    fn identity(&self, request_id: Arc<str>, caller: Caller) -> Identity {
        Identity { id: self.id.clone(), request_id, caller, object: "response", created: self.created }
    }

    fn whole(&mut self, blocks: &Blocks) -> Value {
        blocks.all().iter().for_each(|block| self.add_item_id(block));
        self.finished(blocks)
    }

    fn write_begin(&mut self, blocks: &Blocks, bytes: &mut Vec<u8>) {
        let response = self.response(blocks, "in_progress", &Value::Null);
        for name in ["response.created", "response.in_progress"] {
            self.write(bytes, name, json!({"response": response}));
        }
    }

    fn write_step(&mut self, blocks: &Blocks, step: Step, bytes: &mut Vec<u8>) {
        match step {
            Step::Begin(index) => {
                let block = &blocks.all()[index];
                self.add_item_id(block);
                let empty = Block { kind: block.kind.clone(), text: String::new(), tokens: Vec::new() };
                let mut item = item(&empty, &self.item_ids[index], "in_progress");
                let part = item.get_mut("content").map(|content| std::mem::replace(content, json!([])));
                let event = json!({"output_index": index, "item": item});
                self.write(bytes, "response.output_item.added", event);
                if let Some(part) = part {
                    let mut event = self.locate(index, true);
                    event["part"] = part[0].clone();
                    self.write(bytes, "response.content_part.added", event);
                }
            }
            Step::Delta { index, text, tokens } => {
                let (name, has_part) = match blocks.all()[index].kind {
                    BlockKind::Reasoning => ("response.reasoning_text.delta", true),
                    BlockKind::Text => ("response.output_text.delta", true),
                    BlockKind::Call { .. } => ("response.function_call_arguments.delta", false),
                };
                let mut event = self.locate(index, has_part);
                event["delta"] = text.into();
                if blocks.all()[index].kind == BlockKind::Text {
                    event["logprobs"] = json!(tokens);
                }
                self.write(bytes, name, event);
            }
            Step::End(index) => self.write_item_end(blocks, index, bytes),
        }
    }

    fn write_end(&mut self, blocks: &Blocks, bytes: &mut Vec<u8>) {
        let response = self.finished(blocks);
        let name = match blocks.finish_reason() {
            Some("length") => "response.incomplete",
            _ => "response.completed",
        };
        self.write(bytes, name, json!({"response": response}));
    }

    fn write_error(&mut self, blocks: &Blocks, error: &ApiError, bytes: &mut Vec<u8>) {
        let error = error.body()["error"].take();
        let code = if error["code"].is_null() { "server_error".into() } else { error["code"].clone() };
        let event = json!({"code": code, "message": error["message"], "param": error["param"]});
        self.write(bytes, "error", event);
        let error = json!({"code": code, "message": error["message"]});
        let response = self.response(blocks, "failed", &error);
        self.write(bytes, "response.failed", json!({"response": response}));
    }
}

impl ResponseStyle {
    /// The fields that locate an event.
    fn locate(&self, index: usize, has_part: bool) -> Value {
        let mut location = json!({"item_id": self.item_ids[index], "output_index": index});
        if has_part {
            location["content_index"] = 0.into();
        }
        location
    }

    fn write_item_end(&mut self, blocks: &Blocks, index: usize, bytes: &mut Vec<u8>) {
        let block = &blocks.all()[index];
        let item = item(block, &self.item_ids[index], item_status(blocks, index));
        match &block.kind {
            BlockKind::Call { name, .. } => {
                let mut event = self.locate(index, false);
                event["name"] = name.as_str().into();
                event["arguments"] = block.text.as_str().into();
                self.write(bytes, "response.function_call_arguments.done", event);
            }
            kind => {
                let mut event = self.locate(index, true);
                event["text"] = block.text.as_str().into();
                let name = match kind {
                    BlockKind::Reasoning => "response.reasoning_text.done",
                    _ => {
                        event["logprobs"] = json!(block.tokens);
                        "response.output_text.done"
                    }
                };
                self.write(bytes, name, event);
                let mut event = self.locate(index, true);
                event["part"] = item["content"][0].clone();
                self.write(bytes, "response.content_part.done", event);
            }
        }
        self.write(bytes, "response.output_item.done", json!({"output_index": index, "item": item}));
    }
}

fn item_status(blocks: &Blocks, index: usize) -> &'static str {
    // After a failure, the last block is incomplete.
    let breaks_off = blocks.finish_reason().is_none() && index + 1 == blocks.all().len();
    if breaks_off || blocks.is_cut_off(index) { "incomplete" } else { "completed" }
}

fn item(block: &Block, id: &str, status: &str) -> Value {
    match &block.kind {
        BlockKind::Reasoning => json!({
            "id": id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [{"type": "reasoning_text", "text": block.text}],
            "encrypted_content": null,
        }),
        BlockKind::Text => json!({
            "id": id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [{"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.tokens}],
        }),
        BlockKind::Call { id: call_id, name } => json!({
            "id": id,
            "type": "function_call",
            "status": status,
            "call_id": call_id,
            "name": name,
            "arguments": block.text,
        }),
    }
}

fn usage(totals: &Totals) -> Value {
    json!({
        "input_tokens": totals.num_prompt_tokens,
        // Tokens that were written to the cache are not counted separately.
        "input_tokens_details": {"cached_tokens": totals.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": totals.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": totals.num_reasoning_tokens},
        "total_tokens": totals.num_prompt_tokens + totals.num_output_tokens,
    })
}
