//! Defects that are planted on purpose, in kernels and in launches. The checks of their family have to notice each.
//!
//! A check that has never failed says little. Here each of them has something to find: what a slip of the pen would
//! be, a bound that is one off, a term that is left out, the wrong one of two strides. Whoever changes a kernel sees
//! in these tables whether the checks still look where it matters: a defect whose text is no longer in its file is
//! an error, and so is one that nothing notices.

mod kernels;
mod launches;
mod lines;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use tinyvllm::ops::Context;
use tinyvllm::ops::metal::Gpu;
use tinyvllm::self_test::{Effort, Family};

use crate::emulator::{Emulator, Timing, Variant};

use kernels::{Planted, in_project};
use launches::Altered;
use lines::LINES;

/// The first check of a family that finds something wrong with a device.
fn first_failure(gpu: Arc<dyn Gpu>, family: Family) -> Option<String> {
    let mut failure = None;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        family.check(&Context::gpu(gpu), Effort::Small, &mut |check| {
            if !check.passed {
                failure = Some(format!("{}: {}", check.name, check.detail));
                // One is enough. Unlike a panic, this says nothing.
                resume_unwind(Box::new("noticed"));
            }
        });
    }));
    match outcome {
        Ok(()) => None,
        Err(_) => failure.or_else(|| Some("a panic".to_owned())),
    }
}

/// Fails with the defects that nothing notices, of those that `noticed` is called for.
fn assert_all_noticed(defects: impl Iterator<Item = String>, noticed: impl Fn(usize) -> Option<String>) {
    let mut survivors = Vec::new();
    for (index, name) in defects.enumerate() {
        let start = std::time::Instant::now();
        match noticed(index) {
            Some(failure) => println!("{:.1} s: {name}\n    {failure}", start.elapsed().as_secs_f64()),
            None => survivors.push(name),
        }
    }
    assert!(survivors.is_empty(), "no check notices:\n{}", survivors.join("\n"));
}

/// The first check of a family that finds something wrong with one of two devices: one that allows much, and one of
/// few threads, which gets its launches in pieces.
fn noticed(
    device: impl Fn(Emulator) -> Arc<dyn Gpu>,
    gpu: impl Fn() -> Option<Emulator>,
    family: Family,
) -> Option<String> {
    let small = |gpu: Emulator| gpu.with_max_threads(384).with_patience(Duration::from_nanos(1));
    first_failure(device(gpu()?), family).or_else(|| first_failure(device(small(gpu()?)), family))
}

fn every_defect_is_noticed(file: &str) {
    let Some(planted) = Planted::new() else { return };
    let own: Vec<usize> = planted.of_file(file).collect();
    assert!(!own.is_empty(), "there are no defects of {file}");
    assert_all_noticed(own.iter().map(|&number| planted.name(number)), |index| {
        let gpu = || planted.device_with(own[index]);
        noticed(|gpu| Arc::new(gpu), gpu, planted.family(own[index]))
    });
}

#[test]
fn without_a_defect_all_is_right() {
    let Some(planted) = Planted::new() else { return };
    for family in Family::ALL {
        assert_eq!(noticed(|gpu| Arc::new(gpu), || planted.device(None), family), None);
    }
}

#[test]
fn launches() {
    let defects: Vec<_> =
        LINES.iter().flat_map(|lines| lines.defects.iter().map(move |one| (lines, one))).collect();
    let names = defects.iter().map(|(lines, (text, what, _))| format!("{}: {what} ({text})", lines.file));
    assert_all_noticed(names, |index| {
        let (lines, (text, what, change)) = defects[index];
        let source = fs::read_to_string(in_project("src/ops/metal").join(lines.file)).unwrap();
        let times = source.matches(text).count();
        assert_eq!(times, 1, "{} has {times} times what {what:?} is about, not once: {text}", lines.file);
        // Whatever leaves its memory is found there, and work that nobody waits for is not done.
        let gpu = || Some(Emulator::new(Variant::Checked)?.with_timing(Timing::Late));
        noticed(|gpu| Arc::new(Altered::new(gpu, lines.kernels, *change)), gpu, lines.family)
    });
}

#[test]
fn rope() {
    every_defect_is_noticed("rope.metal");
}

#[test]
fn rows() {
    every_defect_is_noticed("rows.metal");
}

#[test]
fn paged_attention() {
    every_defect_is_noticed("paged_attention.metal");
}

#[test]
fn flash_attention() {
    every_defect_is_noticed("flash_attention.metal");
}

#[test]
fn kv_cache() {
    every_defect_is_noticed("kv_cache.h");
}

#[test]
fn sampling() {
    every_defect_is_noticed("sampling.metal");
}

#[test]
fn matvec() {
    every_defect_is_noticed("matvec.metal");
}

#[test]
fn matmul() {
    every_defect_is_noticed("matmul.metal");
}

#[test]
fn formats() {
    every_defect_is_noticed("formats.h");
}

#[test]
fn threads() {
    every_defect_is_noticed("threads.h");
}

#[test]
fn zz_times() {
    let Some(planted) = Planted::new() else { return };
    let gpu = planted.device(None).unwrap();
    let mut start = std::time::Instant::now();
    let context = Context::gpu(Arc::new(gpu));
    tinyvllm::self_test::ops(&context, Effort::Small, &mut |check| {
        println!("{:.2} s {} {}", start.elapsed().as_secs_f64(), check.name, check.detail);
        start = std::time::Instant::now();
    });
}

#[test]
fn zz_errors() {
    use tinyvllm::ops::cpu::CpuLevel;
    use crate::emulator::Order;
    let mut contexts = Vec::new();
    for &level in CpuLevel::available() {
        contexts.push((format!("{level:?}"), Context::cpu(2, level)));
    }
    for order in [Order::Forward, Order::Reversed, Order::Random(1)] {
        for variant in [Variant::Fast, Variant::FastMath] {
            let gpu = Emulator::new(variant).unwrap().with_order(order);
            contexts.push((format!("{order:?} {variant:?}"), Context::gpu(Arc::new(gpu))));
        }
    }
    for (name, context) in contexts {
        for family in [Family::Products, Family::Attention] {
            let mut worst = std::collections::BTreeMap::new();
            family.check(&context, Effort::Small, &mut |check| {
                let limit = check.detail.split("limit ").nth(1).unwrap_or("?").to_owned();
                let error: f64 = check.detail["error ".len()..].split(',').next().unwrap().parse().unwrap_or(f64::NAN);
                let group = format!("{} {limit} {}", check.name.split(|c| c == ',' || c == ' ').nth(1).unwrap(), check.name.contains("large"));
                let slot = worst.entry(group).or_insert((0.0, String::new()));
                if !(error <= slot.0) { *slot = (error, check.name.clone()); }
            });
            for (group, (error, what)) in worst { println!("{name}: {group}: {error:.1e} {what}"); }
        }
    }
}
