//! Attention over the paged cache: GB/s where sequences generate, and Gop/s where prompts are computed.
//!
//! `cargo bench --bench attention -- [level=avx2] [threads=2] [heads=32] [kv_heads=4] [head_dim=64] [dtypes=f16,q8_0]`
//!
//! As many layers are used in turn as fill 64 MB, so that keys and values come from memory and not from a
//! cache. A key or value counts once for all heads that share it; an operation is an addition or a
//! multiplication of scores and weighted values. Types of the cache are measured in turns. Every figure is of the fastest tenth of the calls.
#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::time::Instant;

use tinyvllm::config::{ModelConfig, RopeStyle};
use tinyvllm::ops::cpu::pool::ThreadPool;
use tinyvllm::ops::cpu::simd::CpuLevel;
use tinyvllm::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, AttentionScratch, AttentionSpec, Buffer, Context,
    KvCache, KvCacheDType, RopeTable, RowMode, StepInputs, paged_attention, rope_kv_write,
};
use tinyvllm::self_test::one_layer;

const BLOCK_SIZE: usize = 16;
const CACHE_BYTES: usize = 64 << 20;

fn main() {
    let option = |name: &str| {
        std::env::args().find_map(|argument| Some(argument.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
    };
    let number =
        |name: &str, default: usize| option(name).and_then(|value| value.parse().ok()).unwrap_or(default);
    let level = option("level")
        .and_then(|name| CpuLevel::available().iter().copied().find(|level| level.name() == name))
        .unwrap_or_else(CpuLevel::detect);
    let context = Context::cpu(number("threads", ThreadPool::default_num_threads()), level);
    let config = one_layer(number("heads", 32), number("kv_heads", 4), number("head_dim", 64));
    let ModelConfig { num_heads, num_kv_heads, head_dim, .. } = config;
    let dtypes = option("dtypes").unwrap_or_else(|| "f16,q8_0".to_owned());
    let dtypes: Vec<KvCacheDType> =
        dtypes.split(',').map(|name| name.parse().expect("a type of the cache")).collect();
    println!(
        "{num_heads} heads over {num_kv_heads}, dimension {head_dim}, {}, {} threads",
        level.name(),
        context.num_threads()
    );
    for (num_sequences, num_new, context_len) in [
        (1, 1, 128),
        (1, 1, 1_900),
        (1, 1, 3_800),
        (1, 1, 8_000),
        (8, 1, 128),
        (8, 1, 1_900),
        (1, 512, 0),
        (1, 512, 1_900),
        (8, 64, 448),
    ] {
        for dtype in &dtypes {
            measure(&context, config.clone(), *dtype, num_sequences, num_new, context_len);
        }
    }
}

/// `num_sequences` sequences that each compute `num_new` tokens after `context_len` others.
fn measure(
    context: &Context,
    mut config: ModelConfig,
    dtype: KvCacheDType,
    num_sequences: usize,
    num_new: usize,
    context_len: usize,
) {
    let seq_len = context_len + num_new;
    let num_tokens = num_sequences * num_new;
    let blocks_each = seq_len.div_ceil(BLOCK_SIZE);
    let layer_bytes = num_sequences * seq_len * KvCache::bytes_per_token(&config, BLOCK_SIZE, dtype);
    config.num_layers = CACHE_BYTES.div_ceil(layer_bytes).min(1_000);
    let num_blocks = num_sequences * blocks_each;
    let mut cache = KvCache::new(context, &config, num_blocks, BLOCK_SIZE, dtype).expect("memory");
    fill(context, &config, &mut cache);
    let heads = AttentionHeads::new(config.num_heads, config.num_kv_heads, config.head_dim);
    let spec = AttentionSpec::plain(heads, 1.0 / (config.head_dim as f64).sqrt());
    let limits = AttentionLimits {
        heads,
        max_window: None,
        max_model_len: seq_len,
        max_num_tokens: num_tokens,
        max_num_rows: num_sequences,
    };
    let mut scratch = AttentionScratch::new(context, limits).expect("memory");
    let mut metadata = AttentionMetadata { block_size: BLOCK_SIZE, ..AttentionMetadata::default() };
    metadata.clear();
    for sequence in 0..num_sequences {
        let first_block = sequence * blocks_each;
        metadata.slot_mapping.extend((context_len..seq_len).map(|at| first_block * BLOCK_SIZE + at));
        let block = |index: usize| (first_block + index) as u32;
        metadata.push(context_len..seq_len, 0, RowMode::of(num_new), block);
    }
    let qkv_width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim;
    let mut qkv = Buffer::new(context, num_tokens, qkv_width).expect("memory");
    let mut out = Buffer::new(context, num_tokens, config.num_heads * config.head_dim).expect("memory");
    qkv.write(num_tokens, waves).expect("space");

    let step = StepInputs::new(&[], &[], &[], &metadata);
    let mut times = Vec::new();
    let started = Instant::now();
    while times.len() < 2 * config.num_layers || started.elapsed().as_secs_f64() < 0.5 {
        let layer = times.len() % config.num_layers;
        let start = Instant::now();
        paged_attention(context, &mut scratch, &spec, &qkv, &cache, layer, &step, None, &mut out)
            .expect("it fits");
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let best = times[times.len() / 10];
    // Each new token attends to the context and to the new tokens up to itself.
    let pairs = num_sequences * (num_new * context_len + num_new * (num_new + 1) / 2);
    let gigaops = (4 * config.num_heads * config.head_dim * pairs) as f64 / best / 1e9;
    println!(
        "{num_sequences} × {num_new:3} tokens after {context_len:4}, {dtype:4}: {:7.1} us, {:5.1} GB/s, {gigaops:5.0} Gop/s",
        best * 1e6,
        layer_bytes as f64 / best / 1e9
    );
}

/// Fills a block of each layer by the op that does so, and all others with copies: what is not written takes no memory.
fn fill(context: &Context, config: &ModelConfig, cache: &mut KvCache) {
    let width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim;
    let mut qkv = Buffer::new(context, BLOCK_SIZE, width).expect("memory");
    qkv.write(BLOCK_SIZE, waves).expect("space");
    let mut table = RopeTable::new(context, RopeStyle::HalfSplit, Vec::new(), 1.0, 1).expect("memory");
    table.extend_to(1).expect("space");
    let metadata =
        AttentionMetadata { slot_mapping: (0..BLOCK_SIZE).collect(), ..AttentionMetadata::default() };
    let step = StepInputs::new(&[], &[0; BLOCK_SIZE], &[], &metadata);
    for layer in 0..config.num_layers {
        rope_kv_write(context, &mut qkv, &step, None, &table, cache, layer).expect("it fits");
    }
    for block in 1..cache.num_blocks() {
        cache.copy_block(0, block as u32).expect("it is there");
    }
}

fn waves(values: &mut [f32]) {
    for (index, value) in values.iter_mut().enumerate() {
        *value = (index as f32 * 0.37).sin();
    }
}
