//! Blocks that the cache gives away, in memory of the host and back.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tinyvllm::ErrorKind;
use tinyvllm::engine::{CacheEvent, Event, Medium, Request};
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{DeviceChoice, Llm, LlmOptions, NoProgress, OffloadOptions};
use tinyvllm::ops::gpu::{ChipClass, Gpu};
use tinyvllm::prefix_store::StoreOptions;
use tinyvllm::sampling::SamplingParams;

use crate::emulator::{Emulator, Timing, Variant};
use crate::host_blocks;

const BLOCK_SIZE: usize = 8;
/// This many prompts of this many tokens are more than the cache has space for.
const NUM_PROMPTS: u32 = 6;
const PROMPT_LEN: u32 = 28;
const NUM_FULL: usize = 24;
/// Blocks of the cache.
const NUM_BLOCKS: u64 = 12;

fn model() -> ResolvedModel {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/llama");
    let (display_name, files) = ("llama".to_owned(), ModelFiles::Folder(folder));
    ResolvedModel { display_name, files, revision: None, notice: None }
}

/// Bytes of this many blocks.
fn blocks(num_blocks: u64) -> u64 {
    let report = Llm::inspect(&model(), &LlmOptions { gpu: gpu(), ..LlmOptions::default() }).unwrap();
    num_blocks * BLOCK_SIZE as u64 * report.demand.kv_bytes_per_token
}

fn options(max_bytes: Option<u64>) -> LlmOptions {
    let kv_offload = max_bytes.map(|max_bytes| OffloadOptions { max_bytes, on_notice: Arc::new(|_| ()) });
    let mut options = LlmOptions { kv_offload, ..LlmOptions::default() };
    options.limits.max_model_len = Some(64);
    options.limits.block_size = BLOCK_SIZE;
    options.limits.kv_cache_memory_bytes = Some(blocks(NUM_BLOCKS));
    options
}

/// A GPU that does its work as late as it may.
fn gpu() -> Option<Arc<dyn Gpu>> {
    let gpu = Emulator::new(Variant::Fast)?.with_timing(Timing::Late);
    Some(Arc::new(gpu.with_class(ChipClass::Nvidia).with_working_set(2 << 30)))
}

fn load(num_host_blocks: Option<u64>) -> Option<Llm> {
    load_with(num_host_blocks, |_| ())
}

/// One whose host has this many blocks.
fn load_with(num_host_blocks: Option<u64>, change: impl FnOnce(&mut LlmOptions)) -> Option<Llm> {
    let gpu = gpu()?;
    let mut options = LlmOptions { gpu: Some(gpu), ..options(num_host_blocks.map(blocks)) };
    change(&mut options);
    Some(Llm::load(&model(), &options, &NoProgress).unwrap())
}

fn request(seed: u32) -> Request {
    let prompt = (0..PROMPT_LEN).map(|i| 10 + (seed * 37 + i * 11 + i * i % 7) % 90).collect();
    Request::new(prompt, SamplingParams { max_tokens: Some(2), ignore_eos: true, ..SamplingParams::greedy() })
}

/// The answer, the tokens of its prompt that were found, and those of them that came from the host.
fn answer(llm: &Llm, seed: u32) -> (Vec<u32>, usize, usize) {
    let (mut tokens, mut num_cached, mut num_host) = (Vec::new(), 0, 0);
    for event in llm.engine().submit(request(seed)).unwrap() {
        match event {
            Event::Token { token_id, .. } => tokens.push(token_id),
            Event::Finished { stats, error, .. } => {
                assert_eq!(error, None);
                (num_cached, num_host) = (stats.num_cached_tokens, stats.num_host_tokens);
            }
            _ => {}
        }
    }
    (tokens, num_cached, num_host)
}

#[test]
fn what_the_cache_gives_away_comes_back_from_the_host() {
    let Some(plain) = load(None) else { return };
    let wanted: Vec<_> = (0..NUM_PROMPTS).map(|seed| answer(&plain, seed).0).collect();
    assert_eq!(answer(&plain, 0).1, 0, "the first ones are evicted");
    let llm = load(Some(1_000)).unwrap();
    for round in 0..3 {
        for seed in 0..NUM_PROMPTS {
            let (tokens, num_cached, num_host) = answer(&llm, seed);
            assert_eq!(tokens, wanted[seed as usize], "{seed} in round {round}");
            assert_eq!(num_cached, if round > 0 { NUM_FULL } else { 0 }, "{seed} in round {round}");
            assert!(round == 0 || num_host > 0, "{seed} in round {round}");
        }
    }
    let stats = llm.engine().stats().unwrap();
    let tier = stats.host_tier.unwrap();
    assert_eq!(tier.num_dropped_blocks, 0);
    assert!(tier.num_read_blocks >= u64::from(NUM_PROMPTS) && tier.num_bytes <= tier.max_bytes, "{tier:?}");
    assert_eq!(tier.num_stored_blocks, tier.num_blocks, "each is copied there once");
}

#[test]
fn the_limit_holds_and_the_events_say_what_is_there() {
    let Some(llm) = load(Some(5)) else { return };
    let heard = Arc::new(Mutex::new(HashMap::new()));
    let blocks = Arc::clone(&heard);
    let listener = move |events| {
        let mut blocks = blocks.lock().unwrap();
        for event in events {
            match event {
                CacheEvent::Stored { hash, token_ids, medium, .. } => {
                    assert_eq!(blocks.insert((medium, hash), token_ids), None, "stored twice");
                }
                CacheEvent::Removed { hash, medium } => assert!(blocks.remove(&(medium, hash)).is_some()),
            }
        }
    };
    llm.engine().watch_cache(Box::new(listener)).unwrap();
    let plain = load(None).unwrap();
    for seed in (0..NUM_PROMPTS).chain(0..NUM_PROMPTS) {
        assert_eq!(answer(&llm, seed).0, answer(&plain, seed).0, "{seed}");
    }
    let tier = || llm.engine().stats().unwrap().host_tier.unwrap();
    let heard_of =
        || heard.lock().unwrap().keys().filter(|(medium, _)| *medium == Medium::Host).count() as u64;
    // Blocks that the cache would evict next are copied while no request runs, and copying ends.
    let start = Instant::now();
    let mut before = tier();
    loop {
        std::thread::sleep(Duration::from_millis(20));
        let now = tier();
        if now == before && heard_of() == now.num_blocks {
            break;
        }
        before = now;
        assert!(start.elapsed() < Duration::from_secs(20), "{now:?}");
    }
    assert!(
        before.num_blocks == 5 && before.num_stored_blocks > 5 && before.num_dropped_blocks == 0,
        "{before:?}"
    );
    assert!(before.num_bytes <= before.max_bytes);
}

/// Also for more blocks than a step would take.
#[test]
fn while_nothing_runs_the_host_gets_what_there_is_room_for() {
    for (num_host_blocks, expected) in [(100, 3), (2, 2)] {
        let small_steps = |options: &mut LlmOptions| {
            options.limits.max_num_batched_tokens = Some(BLOCK_SIZE);
            options.limits.max_num_seqs = 1;
        };
        let Some(llm) = load_with(Some(num_host_blocks), small_steps) else { return };
        answer(&llm, 0);
        let start = Instant::now();
        let tier = || llm.engine().stats().unwrap().host_tier.unwrap();
        while tier().num_blocks < expected {
            assert!(start.elapsed() < Duration::from_secs(20), "{:?}", tier());
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(tier().num_stored_blocks, expected, "{:?}", tier());
    }
}

/// Blocks that exceed the host's memory are in files, and a prefix may come from both.
#[test]
fn files_are_behind_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let store =
        StoreOptions { directory, max_bytes: 64 << 20, reads_always: true, on_notice: Arc::new(|_| ()) };
    let Some(llm) = load_with(Some(5), |options| options.prefix_store = Some(store)) else { return };
    let plain = load(None).unwrap();
    for seed in (0..NUM_PROMPTS).chain(0..NUM_PROMPTS) {
        assert_eq!(answer(&llm, seed).0, answer(&plain, seed).0, "{seed}");
    }
    let stats = llm.engine().stats().unwrap();
    assert!(stats.host_tier.is_some() && stats.prefix_store.is_some());
}

#[test]
fn blocks_are_copied_after_earlier_and_before_later_work() {
    if let Some(gpu) = gpu() {
        host_blocks::copies_are_in_order(&gpu);
        host_blocks::many_are_read_exactly(&gpu);
    }
}

#[test]
fn what_cannot_be_is_refused_with_the_way_out() {
    let refused = |options: LlmOptions| Llm::inspect(&model(), &options).map(drop).unwrap_err();
    let on_cpu = refused(LlmOptions { device: DeviceChoice::Cpu, ..options(Some(1 << 30)) });
    assert_eq!(on_cpu.kind(), ErrorKind::Unsupported);
    assert!(
        on_cpu.message().contains("--kv-offload-gb") && on_cpu.hint().unwrap().contains("--kv-cache-memory")
    );
    let Some(gpu) = gpu() else { return };
    let mut without = LlmOptions { gpu: Some(Arc::clone(&gpu)), ..options(Some(1 << 30)) };
    without.limits.enable_prefix_caching = false;
    assert!(refused(without).message().contains("prefix cache"));
    let too_much = refused(LlmOptions { gpu: Some(Arc::clone(&gpu)), ..options(Some(1 << 60)) });
    assert!(too_much.kind() == ErrorKind::Capacity && too_much.message().contains("GB are available"));
    // And less than a block.
    let none = LlmOptions { gpu: Some(gpu), ..options(Some(1_000)) };
    let none = Llm::load(&model(), &none, &NoProgress).map(drop).unwrap_err();
    assert!(none.hint().unwrap().contains("--kv-offload-gb"), "{none}");
}
