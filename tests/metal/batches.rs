//! A row of attention has the same bits whatever rows are beside it, also where only some contexts are cut.

use std::sync::Arc;

use tinyvllm::config::RopeStyle;
use tinyvllm::ops::gpu::ChipClass;
use tinyvllm::ops::{
    AttentionLimits, AttentionMetadata, AttentionScratch, Buffer, Context, DeviceInputs, KvCache,
    KvCacheDType, RopeTable, StepInputs, paged_attention, rope_kv_write,
};
use tinyvllm::self_test::one_layer;

use crate::emulator::{Emulator, Variant};

const NUM_HEADS: usize = 4;
const NUM_KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const BLOCK_SIZE: usize = 16;
const MAX_LEN: usize = 800;

/// The lengths of some sequences. On tensor cores only contexts of more than 512 are cut.
const LENS: [usize; 5] = [300, 790, 7, 520, 512];

/// The tokens from `first` on of each of some of the sequences.
fn step(sequences: &[usize], first: impl Fn(usize) -> usize) -> AttentionMetadata {
    let mut metadata = AttentionMetadata { block_size: BLOCK_SIZE, ..Default::default() };
    metadata.clear();
    for &sequence in sequences {
        let len = LENS[sequence];
        let block = |position: usize| position / BLOCK_SIZE * LENS.len() + sequence;
        let slots = (first(len)..len).map(|at| block(at) * BLOCK_SIZE + at % BLOCK_SIZE);
        metadata.slot_mapping.extend(slots);
        metadata.query_start_loc.push(metadata.slot_mapping.len());
        metadata.seq_lens.push(len);
        metadata.block_tables.extend((0..len).step_by(BLOCK_SIZE).map(|at| block(at) as u32));
        metadata.block_table_starts.push(metadata.block_tables.len());
    }
    metadata
}

fn noise(len: usize) -> Vec<f32> {
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Attention of the last token of each sequence, with the same queries for all.
fn attend(context: &Context, dtype: KvCacheDType) -> impl FnMut(&[usize]) -> Vec<f32> {
    let config = one_layer(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM);
    let num_blocks = LENS.len() * MAX_LEN.div_ceil(BLOCK_SIZE);
    let mut cache = KvCache::new(context, &config, num_blocks, BLOCK_SIZE, dtype).unwrap();
    let limits = AttentionLimits {
        num_heads: NUM_HEADS,
        num_kv_heads: NUM_KV_HEADS,
        head_dim: HEAD_DIM,
        value_dim: HEAD_DIM,
        scale: 1.0,
        sliding_window: None,
        max_model_len: MAX_LEN,
        max_num_tokens: MAX_LEN,
        max_num_rows: LENS.len(),
    };
    let mut inputs = DeviceInputs::new(context, &limits, BLOCK_SIZE).unwrap();
    let frequencies = vec![0.1; HEAD_DIM / 2];
    let mut table = RopeTable::new(context, RopeStyle::HalfSplit, frequencies, 1.0, MAX_LEN).unwrap();
    table.extend_to(MAX_LEN).unwrap();
    let width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM;
    let filled = |values: &[f32]| {
        let num_rows = values.len() / width;
        let mut buffer = Buffer::new(context, num_rows, width).unwrap();
        buffer.write(num_rows, |target| target.copy_from_slice(values)).unwrap();
        buffer
    };
    for (sequence, len) in LENS.into_iter().enumerate() {
        let metadata = step(&[sequence], |_| 0);
        let positions: Vec<u32> = (0..len as u32).collect();
        let mut qkv = filled(&noise(len * width));
        let lists = StepInputs::new(&positions, &positions, &[], &metadata);
        let lists = inputs.upload(context, lists, &cache).unwrap();
        rope_kv_write(context, &mut qkv, &lists, None, &table, &mut cache, 0).unwrap();
    }
    let queries = filled(&noise(width).repeat(LENS.len()));
    let mut scratch = AttentionScratch::new(context, limits).unwrap();
    move |sequences| {
        let metadata = step(sequences, |len| len - 1);
        let positions: Vec<u32> = sequences.iter().map(|sequence| LENS[*sequence] as u32 - 1).collect();
        let lists = StepInputs::new(&positions, &positions, &[], &metadata);
        let lists = inputs.upload(context, lists, &cache).unwrap();
        let mut out = Buffer::new(context, LENS.len(), NUM_HEADS * HEAD_DIM).unwrap();
        paged_attention(context, &mut scratch, &queries, &cache, 0, &lists, &mut out).unwrap();
        out.read(sequences.len(), <[f32]>::to_vec).unwrap()
    }
}

#[test]
fn a_row_of_attention_has_the_same_bits_in_every_batch() {
    for class in [ChipClass::Base, ChipClass::Nvidia] {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        let context = Context::gpu(Arc::new(gpu.with_class(class)));
        for dtype in [KvCacheDType::F16, KvCacheDType::Bf16] {
            let mut attend = attend(&context, dtype);
            let alone: Vec<f32> = (0..LENS.len()).flat_map(|sequence| attend(&[sequence])).collect();
            for together in [vec![0, 1, 2, 3, 4], vec![4, 3, 2, 1, 0], vec![2, 0], vec![3, 4]] {
                let width = NUM_HEADS * HEAD_DIM;
                for (row, sequence) in attend(&together).chunks(width).zip(&together) {
                    let expected = &alone[sequence * width..(sequence + 1) * width];
                    let bits = |row: &[f32]| row.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(row), bits(expected), "{class:?}, {dtype:?}, {sequence} of {together:?}");
                }
            }
        }
    }
}
