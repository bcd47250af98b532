//! Whole models on the emulated GPU.

use std::path::Path;
use std::sync::Arc;

use tinyvllm::ops::Context;
use tinyvllm::self_test;

use crate::emulator::{Emulator, Timing, Variant};

#[test]
fn models_give_the_tokens_of_the_cpu() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let context = Arc::new(Context::gpu(Arc::new(gpu.with_timing(Timing::Late))));
    let mut failures = Vec::new();
    let mut report = |check: self_test::Check| {
        if !check.passed {
            failures.push(format!("{}: {}", check.name, check.detail));
        }
    };
    self_test::demo_model(&context, &mut report);
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    self_test::golden_models(&context, &fixtures, &mut report);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
