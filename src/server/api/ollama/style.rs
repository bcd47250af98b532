//! Answers in ollama's format: an object, or a line of JSON for each chunk.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use serde_json::{Map, Value, json};

use super::super::super::access::new_id;
use super::super::super::auth::Caller;
use super::super::super::error::ApiError;
use super::super::super::history::Identity;
use super::super::super::state::unix_seconds;
use super::super::blocks::{Block, BlockKind, BlockStyle, Blocks, Step};
use super::super::messages::call_arguments;
use tinyvllm::chat::format_time;

/// The requested path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `/api/chat`: the answer is a message.
    Chat,
    /// `/api/generate`: the answer is text.
    Prompt,
}

/// The envelope around the blocks of an answer.
pub(super) struct LineStyle {
    id: String,
    created: u64,
    start: Instant,
    model_name: String,
    kind: Kind,
    /// Whether the request only loads the model.
    is_load: bool,
}

/// A time in ollama's format.
pub(super) fn written(time: SystemTime) -> String {
    format_time(time, "%Y-%m-%dT%H:%M:%S.%fZ")
}

impl LineStyle {
    pub(super) fn new(model_name: &str, kind: Kind, is_load: bool) -> Self {
        Self {
            id: format!("gen-{}", new_id()),
            created: unix_seconds(),
            start: Instant::now(),
            model_name: model_name.to_owned(),
            kind,
            is_load,
        }
    }

    /// An answer or a chunk with this content.
    fn line(&self, thinking: &str, content: &str, calls: Vec<Value>) -> Map<String, Value> {
        let mut line = Map::new();
        line.insert("model".to_owned(), self.model_name.as_str().into());
        line.insert("created_at".to_owned(), written(SystemTime::now()).into());
        let mut said = Map::new();
        let field = match self.kind {
            Kind::Chat => {
                said.insert("role".to_owned(), "assistant".into());
                "content"
            }
            Kind::Prompt => "response",
        };
        said.insert(field.to_owned(), content.into());
        if !thinking.is_empty() {
            said.insert("thinking".to_owned(), thinking.into());
        }
        if !calls.is_empty() {
            said.insert("tool_calls".to_owned(), calls.into());
        }
        match self.kind {
            Kind::Chat => drop(line.insert("message".to_owned(), said.into())),
            Kind::Prompt => line.extend(said),
        }
        line.insert("done".to_owned(), false.into());
        line
    }

    /// Adds the finish reason and the statistics to the last line. Times are in nanoseconds.
    fn ended(&self, mut line: Map<String, Value>, blocks: &Blocks) -> Value {
        let reason = match blocks.finish_reason() {
            _ if self.is_load => "load",
            Some("length") => "length",
            _ => "stop",
        };
        line.insert("done".to_owned(), true.into());
        line.insert("done_reason".to_owned(), reason.into());
        if !self.is_load {
            let nanos = |time: std::time::Duration| Value::from(time.as_nanos() as u64);
            let totals = &blocks.totals;
            let counts = [
                ("total_duration", nanos(self.start.elapsed())),
                // The model was loaded when the server started.
                ("load_duration", 0.into()),
                ("prompt_eval_count", totals.num_prompt_tokens.into()),
                ("prompt_eval_duration", nanos(totals.slowest.prefill_time)),
                ("eval_count", totals.num_output_tokens.into()),
                ("eval_duration", nanos(totals.slowest.decode_time)),
            ];
            line.extend(counts.map(|(name, value)| (name.to_owned(), value)));
        }
        line.into()
    }
}

impl BlockStyle for LineStyle {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";
    /// A blank before the next line. Clients parse every line as JSON, even an empty one.
    const KEEP_ALIVE: &'static [u8] = b" ";

    fn identity(&self, request_id: Arc<str>, caller: Caller) -> Identity {
        let object = match self.kind {
            Kind::Chat => "chat",
            Kind::Prompt => "generate",
        };
        Identity { id: self.id.clone(), request_id, caller, object, created: self.created }
    }

    fn whole(&mut self, blocks: &Blocks) -> Value {
        let text = |kind: &BlockKind| {
            let blocks = blocks.all().iter().filter(|block| block.kind == *kind);
            blocks.map(|block| block.text.as_str()).collect::<String>()
        };
        let calls = blocks.all().iter().filter_map(call).collect();
        self.ended(self.line(&text(&BlockKind::Reasoning), &text(&BlockKind::Text), calls), blocks)
    }

    fn write_begin(&mut self, _: &Blocks, _: &mut Vec<u8>) {}

    fn write_step(&mut self, blocks: &Blocks, step: Step, bytes: &mut Vec<u8>) {
        let line = match step {
            Step::Begin(_) => return,
            Step::Delta { index, text, .. } => match blocks.all()[index].kind {
                BlockKind::Reasoning => self.line(&text, "", Vec::new()),
                BlockKind::Text => self.line("", &text, Vec::new()),
                // A call is written as a whole when it ends.
                BlockKind::Call { .. } => return,
            },
            Step::End(index) => match call(&blocks.all()[index]) {
                Some(call) => self.line("", "", vec![call]),
                None => return,
            },
        };
        write_line(bytes, &line.into());
    }

    fn write_end(&mut self, blocks: &Blocks, bytes: &mut Vec<u8>) {
        write_line(bytes, &self.ended(self.line("", "", Vec::new()), blocks));
    }

    fn write_error(&mut self, _: &Blocks, error: &ApiError, bytes: &mut Vec<u8>) {
        write_line(bytes, &error.ollama_body());
    }
}

fn write_line(bytes: &mut Vec<u8>, line: &Value) {
    // Values have string keys, and writing to a vector does not fail.
    let _ = serde_json::to_writer(&mut *bytes, line);
    bytes.push(b'\n');
}

fn call(block: &Block) -> Option<Value> {
    let BlockKind::Call { id, name } = &block.kind else { return None };
    // This work is not charged, so nothing is refused.
    let arguments = call_arguments(&block.text).unwrap_or_default();
    Some(json!({"id": id, "function": {"name": name, "arguments": arguments}}))
}
