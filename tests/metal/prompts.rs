//! Attention of prompts on tensor cores, cut into chunks.

use std::ops::Range;
use std::sync::Arc;

use tinyvllm::config::RopeStyle;
use tinyvllm::ops::gpu::{CUDA_LIBRARIES, ChipClass};
use tinyvllm::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, AttentionScratch, AttentionSpec, Buffer, Context,
    DeviceInputs, KvCache, KvCacheDType, RopeTable, RowMode, StepInputs, paged_attention, rope_kv_write,
};
use tinyvllm::self_test::one_layer;

use crate::emulator::{Emulator, Variant};

const NUM_TOKENS: usize = 200;
const BLOCK_SIZE: usize = 16;

#[derive(Debug)]
struct Shape {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
}

/// The results of all tokens of a sequence, whose chunks are a step each.
fn attention(context: &Context, shape: &Shape, chunks: &[Range<usize>]) -> Vec<u32> {
    let &Shape { num_heads, num_kv_heads, head_dim, window } = shape;
    let heads = AttentionHeads::new(num_heads, num_kv_heads, head_dim);
    let spec = AttentionSpec { window, ..AttentionSpec::plain(heads, 0.1) };
    let limits = AttentionLimits {
        heads,
        max_window: window,
        max_model_len: NUM_TOKENS,
        max_num_tokens: NUM_TOKENS,
        max_num_rows: 1,
    };
    let config = one_layer(num_heads, num_kv_heads, head_dim);
    let num_blocks = NUM_TOKENS.div_ceil(BLOCK_SIZE);
    let mut cache = KvCache::new(context, &config, num_blocks, BLOCK_SIZE, KvCacheDType::F16).unwrap();
    let mut scratch = AttentionScratch::new(context, limits).unwrap();
    let frequencies = (0..head_dim / 2).map(|pair| 0.3 / (pair + 1) as f32).collect();
    let mut table = RopeTable::new(context, RopeStyle::HalfSplit, frequencies, 1.0, NUM_TOKENS).unwrap();
    table.extend_to(NUM_TOKENS).unwrap();
    let mut results = Vec::new();
    for chunk in chunks {
        let width = (num_heads + 2 * num_kv_heads) * head_dim;
        let values = chunk.start * width..chunk.end * width;
        let mut qkv = Buffer::new(context, chunk.len(), width).unwrap();
        qkv.write(chunk.len(), |rows| {
            for (row, index) in rows.iter_mut().zip(values) {
                *row = (index * 7919 % 1013) as f32 / 506.0 - 1.0;
            }
        })
        .unwrap();
        let mut out = Buffer::new(context, chunk.len(), num_heads * head_dim).unwrap();
        let metadata = AttentionMetadata {
            query_start_loc: vec![0, chunk.len()],
            seq_lens: vec![chunk.end],
            block_tables: (0..num_blocks as u32).collect(),
            block_table_starts: vec![0, num_blocks],
            slot_mapping: chunk.clone().collect(),
            block_size: BLOCK_SIZE,
            modes: vec![RowMode::of(chunk.len())],
        };
        let positions: Vec<u32> = (chunk.start as u32..chunk.end as u32).collect();
        let mut inputs = DeviceInputs::new(context, &limits, BLOCK_SIZE).unwrap();
        let step = StepInputs::new(&positions, &positions, &[], &metadata);
        let step = inputs.upload(context, step, &cache).unwrap();
        rope_kv_write(context, &mut qkv, &step, None, &table, &mut cache, 0).unwrap();
        paged_attention(context, &mut scratch, &spec, &qkv, &cache, 0, &step, None, &mut out).unwrap();
        results.extend(
            out.read(chunk.len(), |rows| rows.iter().map(|value| value.to_bits()).collect::<Vec<_>>())
                .unwrap(),
        );
    }
    results
}

/// Results that differ in some bit from those of a prompt that is one step.
fn num_differences(gpu: &Arc<Emulator>, shape: &Shape) -> usize {
    let context = Context::gpu(gpu.clone());
    let whole = attention(&context, shape, std::slice::from_ref(&(0..NUM_TOKENS)));
    let cuts = [&[0, 64, 200][..], &[0, 33, 150, 200], &[0, 2, 131, 133, 200]];
    let chunks = cuts.map(|cuts| cuts.windows(2).map(|cut| cut[0]..cut[1]).collect::<Vec<_>>());
    let results = chunks.iter().flat_map(|chunks| attention(&context, shape, chunks));
    results.zip(whole.iter().cycle()).filter(|(chunk, whole)| chunk != *whole).count()
}

#[test]
fn a_token_has_the_same_bits_in_every_chunk_of_a_prompt() {
    let library = CUDA_LIBRARIES.into_iter().find(|library| library.name == "prefill_attention").unwrap();
    // Tiles of keys that begin where the window of the first token does.
    let (right, wrong) = ("window_begin / KEYS * KEYS", "window_begin");
    assert_eq!(library.text().matches(right).count(), 1);
    for (num_heads, num_kv_heads, head_dim, window) in [
        (16, 2, 64, None),
        (2, 2, 64, Some(70)),
        (3, 1, 128, Some(70)),
        (4, 2, 128, None),
        (2, 1, 256, Some(40)),
    ] {
        let shape = Shape { num_heads, num_kv_heads, head_dim, window };
        let gpu = || Some(Emulator::new(Variant::Fast)?.with_class(ChipClass::Nvidia));
        let (Some(gpu), Some(other)) = (gpu(), gpu()) else { return };
        let gpu = Arc::new(gpu);
        assert_eq!(num_differences(&gpu, &shape), 0, "{shape:?}");
        assert!(gpu.num_dispatches().keys().any(|kernel| kernel.starts_with("prefill_attention_f16_")));
        let other = Arc::new(other.with_text(library, library.text().replace(right, wrong)));
        assert_eq!(num_differences(&other, &shape) > 0, window.is_some(), "{shape:?}");
    }
}
