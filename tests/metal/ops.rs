//! Every kernel against its definition, through the same launches as on a Mac.

use std::sync::Arc;

use tinyvllm::ops::Context;
use tinyvllm::self_test::{self, Effort};

use crate::emulator::{Emulator, Order, Timing, Variant};

fn check(gpu: Option<Emulator>) {
    let Some(gpu) = gpu else { return };
    let context = Context::gpu(Arc::new(gpu));
    let mut failures = Vec::new();
    self_test::ops(&context, Effort::Small, &mut |check| {
        if !check.passed {
            failures.push(format!("{}: {}", check.name, check.detail));
        }
    });
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn in_order() {
    check(Emulator::new(Variant::Fast).map(|gpu| gpu.with_timing(Timing::Late)));
}

#[test]
fn reversed() {
    check(Emulator::new(Variant::Fast).map(|gpu| gpu.with_order(Order::Reversed)));
}

#[test]
fn checked() {
    check(Emulator::new(Variant::Checked));
}

#[test]
fn fast_math() {
    check(Emulator::new(Variant::FastMath));
}
