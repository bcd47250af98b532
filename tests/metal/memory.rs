//! The plan of a GPU's memory, the messages if there is less, and its bandwidth.

use std::sync::Arc;
use std::time::Duration;

use tinyvllm::ErrorKind;
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{Llm, LlmOptions, NoProgress};
use tinyvllm::ops::MemoryBandwidth;
use tinyvllm::ops::gpu::ChipClass;

use crate::emulator::{Emulator, Variant};
use crate::recorder::Recorder;

const MEBIBYTE: u64 = 1 << 20;

fn demo() -> ResolvedModel {
    let (display_name, files) = ("demo".to_owned(), ModelFiles::Demo);
    ResolvedModel { display_name, files, revision: None, notice: None }
}

/// Bytes that may be used, and the cache's fraction of the rest after the weights.
fn planned(class: ChipClass, memory_utilization: Option<f64>) -> Option<(u64, f64)> {
    // Little enough that the cache could be larger.
    let gpu = Emulator::new(Variant::Fast)?.with_class(class).with_working_set(300 * MEBIBYTE);
    let mut options = LlmOptions { gpu: Some(Arc::new(gpu)), ..LlmOptions::default() };
    if let Some(share) = memory_utilization {
        options.limits.gpu_memory_utilization = share;
    }
    let report = Llm::inspect(&demo(), &options).unwrap();
    let plan = report.plan.unwrap().engine;
    let left = report.demand.available_bytes - report.demand.weight_bytes;
    let cache = plan.kv_cache_tokens() as u64 * report.demand.kv_bytes_per_token;
    Some((report.demand.available_bytes, cache as f64 / left as f64))
}

#[test]
fn the_share_is_of_memory_that_is_the_gpus_own() {
    // 256 MiB are reserved for everything except weights and cache.
    for (class, share, mebibytes, part) in [
        (ChipClass::Nvidia, None, 270 - 256, 1.0),
        (ChipClass::Nvidia, Some(0.9), 270 - 256, 1.0),
        (ChipClass::Nvidia, Some(1.0), 300 - 256, 1.0),
        (ChipClass::Base, None, 300 - 256, 0.5),
        (ChipClass::Base, Some(0.9), 300 - 256, 0.5),
    ] {
        let Some((available, of_rest)) = planned(class, share) else { return };
        assert_eq!(available, mebibytes * MEBIBYTE, "{class:?} {share:?}");
        assert!((part * 0.9..=part).contains(&of_rest), "{class:?} {share:?}: {of_rest}");
    }
}

#[test]
fn memory_that_is_gone_at_load_is_an_error_with_the_plan() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let gpu = gpu.with_class(ChipClass::Nvidia).with_working_set(600 * MEBIBYTE).with_largest_buffer(8 << 20);
    let mut options = LlmOptions { gpu: Some(Arc::new(gpu)), ..LlmOptions::default() };
    options.limits.kv_cache_memory_bytes = Some(200 * MEBIBYTE);
    options.limits.max_num_seqs = 256;
    let error = Llm::load(&demo(), &options, &NoProgress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Capacity, "{error}");
    for words in
        ["of 284 MiB of memory", "MiB for weights", "for a KV cache of", "contexts of 1024", "no buffer"]
    {
        assert!(error.message().contains(words), "{words} in: {error}");
    }
}

#[test]
fn the_bandwidth_of_a_gpu_is_that_of_a_copy_in_its_memory() {
    let measured = |gpu: Recorder| {
        LlmOptions { gpu: Some(Arc::new(gpu)), ..LlmOptions::default() }.measure_bandwidth().unwrap()
    };
    assert_eq!(measured(Recorder::new(Duration::MAX)), None);
    let copying = MemoryBandwidth { bytes_per_second: 4.3e12, access: "copying" };
    assert_eq!(measured(Recorder::new(Duration::MAX).with_copy_bandwidth(4.3e12)), Some(copying));
}
