//! A row of attention has the same bits for all other rows, also if only some contexts are split.

use std::sync::Arc;

use tinyvllm::config::{LatentAttentionConfig, ModelConfig, RopeConfig, RopeStyle};
use tinyvllm::ops::gpu::ChipClass;
use tinyvllm::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, AttentionScratch, AttentionSpec, Buffer, Context,
    DeviceInputs, Heads, KvCache, KvCacheDType, RmsNorm, RopeTable, RowMode, StepInputs, Vector,
    latent_kv_write, paged_attention, rope_kv_write,
};
use tinyvllm::self_test::one_layer;

use crate::emulator::{Emulator, Variant};

/// The shape of attention. With latent rows there is one key head, whose first values are the values.
#[derive(Debug, Clone, Copy)]
struct Shape {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
}

const PLAIN: Shape = Shape { num_heads: 4, num_kv_heads: 2, head_dim: 32, value_dim: 32 };
const LATENT: Shape = Shape { num_heads: 18, num_kv_heads: 1, head_dim: 80, value_dim: 48 };
const ROTATED: usize = 32;
const BLOCK_SIZE: usize = 16;
const MAX_LEN: usize = 800;

/// The lengths of some sequences. On tensor cores only contexts of more than 512 are cut, over latent rows those of more
/// than 128.
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
        metadata.modes.push(RowMode::of(len - first(len)));
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

impl Shape {
    fn is_latent(self) -> bool {
        self.value_dim < self.head_dim
    }

    fn config(self) -> ModelConfig {
        let layer = one_layer(self.num_heads, self.num_kv_heads, self.head_dim);
        if !self.is_latent() {
            return layer;
        }
        let latent = LatentAttentionConfig {
            q_lora_rank: None,
            kv_lora_rank: self.value_dim,
            qk_nope_head_dim: self.head_dim - ROTATED,
            v_head_dim: self.value_dim,
            softmax_scale: 1.0,
            lora_norm_eps: 1e-6,
        };
        let rope = RopeConfig { dim: ROTATED, ..layer.rope.clone() };
        ModelConfig { latent_attention: Some(latent), rope, ..layer }
    }
}

fn filled(context: &Context, values: &[f32], width: usize) -> Buffer {
    let num_rows = values.len() / width;
    let mut buffer = Buffer::new(context, num_rows, width).unwrap();
    buffer.write(num_rows, |target| target.copy_from_slice(values)).unwrap();
    buffer
}

/// Attention of the last token of each sequence, with the same queries for all. The cached row of each one's first
/// token ends with `spoilt`, if there is such a value.
fn attend(
    context: &Context,
    shape: Shape,
    dtype: KvCacheDType,
    spoilt: Option<f32>,
) -> impl FnMut(&[usize]) -> Vec<f32> {
    let Shape { num_heads, num_kv_heads, head_dim, value_dim } = shape;
    let num_blocks = LENS.len() * MAX_LEN.div_ceil(BLOCK_SIZE);
    let mut cache = KvCache::new(context, &shape.config(), num_blocks, BLOCK_SIZE, dtype).unwrap();
    let heads = AttentionHeads { num_heads, num_kv_heads, head_dim, value_dim };
    let spec = AttentionSpec::plain(heads, 1.0 / (head_dim as f64).sqrt());
    let limits = AttentionLimits {
        heads,
        max_window: None,
        max_model_len: MAX_LEN,
        max_num_tokens: MAX_LEN,
        max_num_rows: LENS.len(),
    };
    let mut inputs = DeviceInputs::new(context, &limits, BLOCK_SIZE).unwrap();
    let frequencies = vec![0.1; ROTATED / 2];
    let mut table = RopeTable::new(context, RopeStyle::HalfSplit, frequencies, 1.0, MAX_LEN).unwrap();
    table.extend_to(MAX_LEN).unwrap();
    let norm = RmsNorm { weight: Vector::new(context, vec![1.0; value_dim]).unwrap(), eps: 1e-6 };
    let width = (num_heads + 2 * num_kv_heads) * head_dim;
    for (sequence, len) in LENS.into_iter().enumerate() {
        let metadata = step(&[sequence], |_| 0);
        let positions: Vec<u32> = (0..len as u32).collect();
        let mut values = noise(len * width);
        values[width - 1] = spoilt.unwrap_or(values[width - 1]);
        let mut rows = filled(context, &values, width);
        let lists = StepInputs::new(&positions, &positions, &[], &metadata);
        let lists = inputs.upload(context, lists, &cache).unwrap();
        if shape.is_latent() {
            let mut rotated = Buffer::new(context, len, num_heads * head_dim).unwrap();
            let queries = Heads { rows: &rows, stride: head_dim };
            latent_kv_write(context, queries, &rows, &lists, &norm, &table, &mut cache, 0, &mut rotated)
                .unwrap();
        } else {
            rope_kv_write(context, &mut rows, &lists, None, &table, &mut cache, 0).unwrap();
        }
    }
    let queries = filled(context, &noise(width).repeat(LENS.len()), width);
    let mut scratch = AttentionScratch::new(context, limits).unwrap();
    move |sequences| {
        let metadata = step(sequences, |len| len - 1);
        let positions: Vec<u32> = sequences.iter().map(|sequence| LENS[*sequence] as u32 - 1).collect();
        let lists = StepInputs::new(&positions, &positions, &[], &metadata);
        let lists = inputs.upload(context, lists, &cache).unwrap();
        let mut out = Buffer::new(context, LENS.len(), num_heads * value_dim).unwrap();
        paged_attention(context, &mut scratch, &spec, &queries, &cache, 0, &lists, None, &mut out).unwrap();
        out.read(sequences.len(), <[f32]>::to_vec).unwrap()
    }
}

#[test]
fn a_row_of_attention_has_the_same_bits_in_every_batch() {
    for class in [ChipClass::Base, ChipClass::Nvidia] {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        let context = Context::gpu(Arc::new(gpu.with_class(class)));
        for (shape, dtype) in [
            (PLAIN, KvCacheDType::F16),
            (PLAIN, KvCacheDType::Bf16),
            (LATENT, KvCacheDType::F16),
            (LATENT, KvCacheDType::Bf16),
            (PLAIN, KvCacheDType::Q8_0),
            (LATENT, KvCacheDType::Q8_0),
            (PLAIN, KvCacheDType::Fp8E4m3),
            (LATENT, KvCacheDType::Fp8E4m3),
        ] {
            let mut attend = attend(&context, shape, dtype, None);
            let alone: Vec<f32> = (0..LENS.len()).flat_map(|sequence| attend(&[sequence])).collect();
            assert!(alone.iter().all(|value| value.is_finite()));
            for together in [vec![0, 1, 2, 3, 4], vec![4, 3, 2, 1, 0], vec![2, 0], vec![3, 4]] {
                let width = shape.num_heads * shape.value_dim;
                for (row, sequence) in attend(&together).chunks(width).zip(&together) {
                    let expected = &alone[sequence * width..(sequence + 1) * width];
                    let bits = |row: &[f32]| row.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                    let what = format!("{class:?}, {shape:?}, {dtype:?}");
                    assert_eq!(bits(row), bits(expected), "{what}, {sequence} of {together:?}");
                }
            }
        }
    }
}

/// A group of q8_0 with NaN, or with values beyond its scales, shows wherever it is attended to, and so does a value of
/// fp8_e4m3 that is no number.
#[test]
fn what_is_no_number_shows_in_a_cache_of_eight_bits() {
    for class in [ChipClass::Base, ChipClass::Nvidia] {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        let context = Context::gpu(Arc::new(gpu.with_class(class)));
        for shape in [PLAIN, LATENT] {
            for (dtype, spoilt) in [
                (KvCacheDType::Q8_0, f32::NAN),
                (KvCacheDType::Q8_0, f32::NEG_INFINITY),
                (KvCacheDType::Q8_0, 8.4e6),
                (KvCacheDType::Fp8E4m3, f32::NAN),
                (KvCacheDType::Fp8E4m3, f32::NEG_INFINITY),
            ] {
                let found = attend(&context, shape, dtype, Some(spoilt))(&[0, 1, 2, 3, 4]);
                for row in found.chunks(shape.num_heads * shape.value_dim) {
                    let is_seen = row.iter().any(|value| !value.is_finite());
                    assert!(is_seen, "{class:?}, {shape:?}, {dtype}: {spoilt} does not show");
                }
            }
            // Every kernel represents all values of half precision, of fp8_e4m3 as the largest.
            for dtype in [KvCacheDType::Q8_0, KvCacheDType::Fp8E4m3] {
                let largest = attend(&context, shape, dtype, Some(6.5e4))(&[0, 1, 2, 3, 4]);
                assert!(largest.iter().all(|value| value.is_finite()), "{class:?}, {shape:?}, {dtype}");
            }
        }
    }
}
