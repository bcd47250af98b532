//! Attention that rotates gives the same bits as a rotation and attention after it, in its results and in the cache.

use std::sync::Arc;

use tinyvllm::config::RopeStyle;
use tinyvllm::ops::gpu::ChipClass;
use tinyvllm::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, AttentionScratch, AttentionSpec, Buffer, Context,
    DeviceInputs, HeadNorms, KvCache, KvCacheDType, RmsNorm, RopeTable, RowMode, StepInputs, Vector,
    paged_attention, rope_attention, rope_kv_write,
};
use tinyvllm::self_test::one_layer;

use crate::emulator::{Emulator, Variant};

const BLOCK_SIZE: usize = 24;
const MAX_LEN: usize = 800;

/// Tokens of each sequence before the compared steps: ends at and around those of tiles and KV splits. There are enough
/// steps that the last one reads several keys of earlier ones.
const LENS: [usize; 5] = [0, 14, 511, 767, 100];
const NUM_STEPS: usize = 4;

#[derive(Debug, Clone, Copy)]
struct Case {
    heads: (usize, usize),
    head_dim: usize,
    num_pairs: usize,
    style: RopeStyle,
    has_norms: bool,
    window: Option<usize>,
    dtype: KvCacheDType,
}

/// Values between -1 and 1.
fn noise(seed: usize, len: usize) -> Vec<f32> {
    let mut state = 1 + seed as u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn filled(context: &Context, values: &[f32], width: usize) -> Buffer {
    let num_rows = values.len() / width;
    let mut buffer = Buffer::new(context, num_rows, width).unwrap();
    buffer.write(num_rows, |target| target.copy_from_slice(values)).unwrap();
    buffer
}

/// The tokens of a range of each sequence.
fn metadata(ranges: &[(usize, usize)]) -> (AttentionMetadata, Vec<u32>) {
    let mut metadata = AttentionMetadata { block_size: BLOCK_SIZE, ..Default::default() };
    metadata.clear();
    let mut positions = Vec::new();
    for (sequence, &(begin, end)) in ranges.iter().enumerate().filter(|(_, (begin, end))| begin < end) {
        let block = |position: usize| position / BLOCK_SIZE * LENS.len() + sequence;
        metadata.slot_mapping.extend((begin..end).map(|at| block(at) * BLOCK_SIZE + at % BLOCK_SIZE));
        positions.extend(begin as u32..end as u32);
        metadata.query_start_loc.push(positions.len());
        metadata.seq_lens.push(end);
        metadata.modes.push(RowMode::of(end - begin));
        metadata.block_tables.extend((0..end).step_by(BLOCK_SIZE).map(|at| block(at) as u32));
        metadata.block_table_starts.push(metadata.block_tables.len());
    }
    (metadata, positions)
}

impl Case {
    /// Bits of the results of all steps, and launches of each.
    fn run(self, context: &Context, is_fused: bool) -> (Vec<u32>, u64) {
        let Self { heads: (num_heads, num_kv_heads), head_dim, dtype, .. } = self;
        let width = (num_heads + 2 * num_kv_heads) * head_dim;
        let num_blocks = LENS.len() * MAX_LEN.div_ceil(BLOCK_SIZE);
        let config = one_layer(num_heads, num_kv_heads, head_dim);
        let mut cache = KvCache::new(context, &config, num_blocks, BLOCK_SIZE, dtype).unwrap();
        let heads = AttentionHeads::new(num_heads, num_kv_heads, head_dim);
        let spec = AttentionSpec {
            window: self.window,
            ..AttentionSpec::plain(heads, 1.0 / (head_dim as f64).sqrt())
        };
        let limits = AttentionLimits {
            heads,
            max_window: self.window,
            max_model_len: MAX_LEN,
            max_num_tokens: LENS.iter().sum(),
            max_num_rows: LENS.len(),
        };
        let mut inputs = DeviceInputs::new(context, &limits, BLOCK_SIZE).unwrap();
        let mut scratch = AttentionScratch::new(context, limits).unwrap();
        let frequencies = (0..self.num_pairs).map(|pair| 0.7 / (pair + 1) as f32).collect();
        let mut table = RopeTable::new(context, self.style, frequencies, 1.1, MAX_LEN).unwrap();
        table.extend_to(MAX_LEN).unwrap();
        let norm = |seed| RmsNorm { weight: Vector::new(context, noise(seed, head_dim)).unwrap(), eps: 1e-3 };
        let (q, k) = (norm(1), norm(2));
        let norms = self.has_norms.then_some(HeadNorms { q: &q, k: &k });

        let (lists, positions) = metadata(&LENS.map(|len| (0, len)));
        let mut qkv = filled(context, &noise(3, positions.len() * width), width);
        let step = StepInputs::new(&positions, &positions, &[], &lists);
        let step = inputs.upload(context, step, &cache).unwrap();
        rope_kv_write(context, &mut qkv, &step, norms, &table, &mut cache, 0).unwrap();

        let mut bits = Vec::new();
        let num_before = context.num_dispatches();
        for index in 0..NUM_STEPS {
            let (lists, positions) = metadata(&LENS.map(|len| (len + index, len + index + 1)));
            let mut qkv = filled(context, &noise(4 + index, LENS.len() * width), width);
            let step = StepInputs::new(&positions, &positions, &[], &lists);
            let step = inputs.upload(context, step, &cache).unwrap();
            let mut out = Buffer::new(context, LENS.len(), num_heads * head_dim).unwrap();
            if is_fused {
                rope_attention(
                    context,
                    &mut scratch,
                    &spec,
                    &mut qkv,
                    &step,
                    norms,
                    &table,
                    &mut cache,
                    0,
                    None,
                    &mut out,
                )
                .unwrap();
            } else {
                rope_kv_write(context, &mut qkv, &step, norms, &table, &mut cache, 0).unwrap();
                paged_attention(context, &mut scratch, &spec, &qkv, &cache, 0, &step, None, &mut out)
                    .unwrap();
            }
            bits.extend(out.read(LENS.len(), <[f32]>::to_vec).unwrap().into_iter().map(f32::to_bits));
        }
        (bits, context.num_dispatches() - num_before)
    }
}

#[test]
fn attention_that_rotates_has_the_same_bits() {
    let case = Case {
        heads: (4, 2),
        head_dim: 32,
        num_pairs: 16,
        style: RopeStyle::HalfSplit,
        has_norms: false,
        window: None,
        dtype: KvCacheDType::F16,
    };
    let norms = Case { has_norms: true, ..case };
    let interleaved = Case { style: RopeStyle::Interleaved, dtype: KvCacheDType::Bf16, ..norms };
    let cases = [
        case,
        Case { heads: (3, 1), head_dim: 128, num_pairs: 64, ..norms },
        Case { heads: (8, 1), head_dim: 64, num_pairs: 32, ..interleaved },
        Case { heads: (7, 1), head_dim: 96, num_pairs: 20, window: Some(40), ..norms },
        Case { heads: (12, 1), head_dim: 80, num_pairs: 12, ..interleaved },
        Case { heads: (16, 1), head_dim: 256, num_pairs: 128, window: Some(530), ..norms },
        Case { heads: (2, 2), head_dim: 176, num_pairs: 44, window: Some(1), ..interleaved },
    ];
    for case in cases {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        let context = Context::gpu(Arc::new(gpu.with_class(ChipClass::Nvidia)));
        let (separate, num_separate) = case.run(&context, false);
        let (fused, num_fused) = case.run(&context, true);
        assert!(separate.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{case:?}");
        assert!(separate == fused, "{case:?}");
        assert_eq!(num_separate - num_fused, NUM_STEPS as u64, "{case:?}");
    }
}
