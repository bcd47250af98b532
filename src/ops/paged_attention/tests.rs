//! Attention against double precision, and against itself for every division of the work.

use proptest::prelude::*;

use super::*;
use crate::config::RopeStyle;
use crate::ops::cpu::CpuLevel;
use crate::ops::reference::ReferenceBackend;
use crate::ops::{self, KvCacheDType, RopeTable, RowMode, Vector};
use crate::self_test::one_layer;

/// Deterministic values in -1..1, without a pattern.
fn noise(seed: u64, index: usize) -> f32 {
    let mut bits =
        (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((bits >> 40) as f32) / (1 << 23) as f32 - 1.0
}

/// Sequences with query, key and value heads for every position.
#[derive(Debug, Clone)]
struct Case {
    heads: AttentionHeads,
    window: Option<usize>,
    soft_cap: Option<f64>,
    has_sinks: bool,
    dtype: KvCacheDType,
    block_size: usize,
    seq_lens: Vec<usize>,
}

impl Case {
    fn width(&self) -> usize {
        (self.heads.num_heads + 2 * self.heads.num_kv_heads) * self.heads.head_dim
    }

    /// Values of a token: queries, keys, values.
    fn row(&self, sequence: usize, position: usize) -> Vec<f32> {
        let width = self.width();
        (0..width).map(|i| 2.0 * noise(sequence as u64 + 1, position * width + i)).collect()
    }

    /// Memory for steps of this many tokens.
    fn limits(&self, max_num_tokens: usize) -> AttentionLimits {
        AttentionLimits {
            heads: self.heads,
            max_window: self.window,
            max_model_len: self.seq_lens.iter().copied().max().unwrap_or(0),
            max_num_tokens,
            max_num_rows: self.seq_lens.len(),
        }
    }

    /// Sinks that vary as much as scores, and a cap that most scores come close to.
    fn spec(&self, context: &Context) -> AttentionSpec {
        let AttentionHeads { num_heads, head_dim, .. } = self.heads;
        let sinks = || (0..num_heads).map(|head| 6.0 * noise(77, head)).collect();
        AttentionSpec {
            window: self.window,
            soft_cap: self.soft_cap,
            sinks: self.has_sinks.then(|| Vector::new(context, sinks()).unwrap()),
            ..AttentionSpec::plain(self.heads, 1.0 / (head_dim as f64).sqrt())
        }
    }

    fn cache(&self, context: &Context, num_blocks: usize) -> KvCache {
        let AttentionHeads { num_heads, num_kv_heads, head_dim, .. } = self.heads;
        let config = one_layer(num_heads, num_kv_heads, head_dim);
        KvCache::new(context, &config, num_blocks, self.block_size, self.dtype).unwrap()
    }

    /// A table that rotates nothing.
    fn table(&self, context: &Context) -> RopeTable {
        let max_len = self.seq_lens.iter().copied().max().unwrap_or(0);
        let no_frequencies = vec![0.0; self.heads.head_dim / 2];
        let mut table = RopeTable::new(context, RopeStyle::HalfSplit, no_frequencies, 1.0, max_len).unwrap();
        table.extend_to(max_len).unwrap();
        table
    }

    /// Runs all sequences in steps: `steps` lists the number of tokens of each sequence for each step.
    fn run(&self, steps: &[Vec<usize>], num_threads: usize, level: CpuLevel) -> Vec<Vec<f32>> {
        let context = Context::cpu(num_threads, level);
        let blocks_each: Vec<usize> = self.seq_lens.iter().map(|len| len.div_ceil(self.block_size)).collect();
        let num_blocks = blocks_each.iter().sum::<usize>() + 3;
        let mut cache = self.cache(&context, num_blocks);
        poison(&context, &mut cache);
        // Blocks in an order that is neither ascending nor contiguous.
        let mut order: Vec<u32> = (0..num_blocks as u32).collect();
        order.sort_by_key(|block| (noise(99, *block as usize) * 1e6) as i64);
        let mut tables = Vec::new();
        for blocks in blocks_each {
            tables.push(order.split_off(order.len() - blocks));
        }
        let max_tokens = steps.iter().map(|step| step.iter().sum()).max().unwrap_or(0);
        let mut scratch = AttentionScratch::new(&context, self.limits(max_tokens)).unwrap();
        let table = self.table(&context);

        let mut results = vec![Vec::new(); self.seq_lens.len()];
        let mut done = vec![0; self.seq_lens.len()];
        for step in steps {
            let mut metadata = AttentionMetadata { block_size: self.block_size, ..Default::default() };
            metadata.clear();
            let (mut rows, mut positions) = (Vec::new(), Vec::new());
            let mut lens = Vec::new();
            for (sequence, &num_new) in step.iter().enumerate().filter(|(_, num_new)| **num_new > 0) {
                for position in done[sequence]..done[sequence] + num_new {
                    rows.extend(self.row(sequence, position));
                    positions.push(position as u32);
                    let block = tables[sequence][position / self.block_size] as usize;
                    metadata.slot_mapping.push(block * self.block_size + position % self.block_size);
                }
                done[sequence] += num_new;
                metadata.query_start_loc.push(positions.len());
                metadata.seq_lens.push(done[sequence]);
                metadata.modes.push(RowMode::of(num_new));
                metadata.block_tables.extend(&tables[sequence]);
                metadata.block_table_starts.push(metadata.block_tables.len());
                lens.push((sequence, num_new));
            }
            let out = self.attend(&context, &mut scratch, &rows, &positions, &metadata, &table, &mut cache);
            let mut out = out.chunks_exact(self.heads.num_heads * self.heads.head_dim);
            for (sequence, num_new) in lens {
                results[sequence].extend(out.by_ref().take(num_new).flatten().map(|value| *value as f32));
            }
        }
        assert_eq!(done, self.seq_lens);
        results
    }

    /// A step: writes the keys and values of `rows` to the cache and attends.
    #[expect(clippy::too_many_arguments, reason = "all that a step has")]
    fn attend(
        &self,
        context: &Context,
        scratch: &mut AttentionScratch,
        rows: &[f32],
        positions: &[u32],
        metadata: &AttentionMetadata,
        table: &RopeTable,
        cache: &mut KvCache,
    ) -> Vec<f64> {
        let num_tokens = positions.len();
        let step = StepInputs::new(positions, positions, &[], metadata);
        let mut qkv = Buffer::new(context, num_tokens, self.width()).unwrap();
        qkv.write(num_tokens, |out| out.copy_from_slice(rows)).unwrap();
        ops::rope_kv_write(context, &mut qkv, &step, None, table, cache, 0).unwrap();
        let mut out = Buffer::new(context, num_tokens, self.heads.num_heads * self.heads.head_dim).unwrap();
        let spec = self.spec(context);
        paged_attention(context, scratch, &spec, &qkv, cache, 0, &step, None, &mut out).unwrap();
        out.read_exact(num_tokens).unwrap()
    }

    fn in_one_step(&self) -> Vec<Vec<usize>> {
        vec![self.seq_lens.clone()]
    }

    /// The definition, in double precision, over blocks in their order.
    fn oracle(&self, sequence: usize) -> Vec<f64> {
        let context = Context::reference(ReferenceBackend::oracle());
        let len = self.seq_lens[sequence];
        let num_blocks = len.div_ceil(self.block_size);
        let positions: Vec<u32> = (0..len as u32).collect();
        let metadata = AttentionMetadata {
            query_start_loc: vec![0, len],
            seq_lens: vec![len],
            block_tables: (0..num_blocks as u32).collect(),
            block_table_starts: vec![0, num_blocks],
            slot_mapping: (0..len).collect(),
            block_size: self.block_size,
            modes: vec![RowMode::of(len)],
        };
        let rows: Vec<f32> = (0..len).flat_map(|position| self.row(sequence, position)).collect();
        let mut scratch = AttentionScratch::new(&context, self.limits(len)).unwrap();
        let (table, mut cache) = (self.table(&context), self.cache(&context, num_blocks));
        self.attend(&context, &mut scratch, &rows, &positions, &metadata, &table, &mut cache)
    }
}

/// Fills the cache with values that no kernel may read: NaN in every type.
fn poison(context: &Context, cache: &mut KvCache) {
    let cpu = context.cpu_backend().unwrap();
    let pools = cache.layer_mut(0).on_mut(cpu).unwrap().view_mut();
    pools.k.fill(0xff);
    pools.v.unwrap().fill(0xff);
}

/// Attention of the plain kind over half precision.
fn case(num_heads: usize, num_kv_heads: usize, head_dim: usize, seq_lens: Vec<usize>) -> Case {
    Case {
        heads: AttentionHeads::new(num_heads, num_kv_heads, head_dim),
        window: None,
        soft_cap: None,
        has_sinks: false,
        dtype: KvCacheDType::F16,
        block_size: 16,
        seq_lens,
    }
}

fn check_against_oracle(case: &Case) {
    // If keys and values are integers, queries and weights may be too, with fifteen bits.
    let limit = if case.dtype == KvCacheDType::Q8_0 { 1e-7 } else { 1e-11 };
    for &level in CpuLevel::available() {
        let results = case.run(&case.in_one_step(), 2, level);
        for (sequence, result) in results.iter().enumerate() {
            let expected = case.oracle(sequence);
            assert_eq!(result.len(), expected.len());
            let error: f64 = result.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
            let nmse = error / expected.iter().map(|b| b * b).sum::<f64>();
            assert!(
                nmse < limit,
                "{case:?} on {level:?}: error {nmse} for {} tokens",
                case.seq_lens[sequence]
            );
        }
    }
}

#[test]
fn every_head_dim_and_group_agrees_with_double_precision() {
    for (num_heads, num_kv_heads, head_dim) in [
        (4, 2, 24),
        (3, 3, 16),
        (7, 1, 32),
        (8, 1, 64),
        (6, 2, 80),
        (4, 1, 96),
        (5, 5, 128),
        (2, 1, 256),
        (40, 1, 8),
    ] {
        for dtype in KvCacheDType::ALL {
            check_against_oracle(&Case { dtype, ..case(num_heads, num_kv_heads, head_dim, vec![1, 37]) });
        }
    }
}

#[test]
fn contexts_of_several_splits_and_windows_agree_with_double_precision() {
    for window in [None, Some(1), Some(20), Some(256), Some(300)] {
        for block_size in [1, 24, 32, 512] {
            for dtype in KvCacheDType::ALL
                .into_iter()
                .filter(|dtype| !matches!(dtype, KvCacheDType::F16 | KvCacheDType::Bf16))
            {
                let plain = case(4, 2, 16, vec![600, 3, 257]);
                check_against_oracle(&Case { window, dtype, block_size, ..plain });
            }
        }
    }
}

#[test]
fn sinks_and_soft_caps_agree_with_double_precision() {
    for (has_sinks, soft_cap) in [(true, None), (false, Some(1.5)), (true, Some(50.0))] {
        for window in [None, Some(128)] {
            let plain = case(6, 2, 32, vec![600, 1, 257]);
            check_against_oracle(&Case { has_sinks, soft_cap, window, ..plain });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn results_have_the_same_bits_however_the_work_is_divided(
        (num_kv_heads, group, head_dim) in (1_usize..4, 1_usize..10, prop::sample::select(vec![8, 24, 64, 80])),
        dtype in prop::sample::select(KvCacheDType::ALL.to_vec()),
        window in prop::option::of(1_usize..700),
        soft_cap in prop::option::of(1.0..50.0),
        has_sinks in prop::bool::ANY,
        block_sizes in prop::array::uniform2(prop::sample::select(vec![1, 8, 16, 24, 32, 100])),
        seq_lens in prop::collection::vec(1_usize..700, 1..4),
        chunks in prop::collection::vec(1_usize..300, 12),
        num_threads in 1_usize..4,
    ) {
        let mut case = Case {
            window,
            soft_cap,
            has_sinks,
            dtype,
            block_size: block_sizes[0],
            ..case(num_kv_heads * group, num_kv_heads, head_dim, seq_lens)
        };
        // Some of the sequences in each step, in chunks of many lengths.
        let mut steps = Vec::new();
        let mut left = case.seq_lens.clone();
        let mut chunks = chunks.iter().cycle().enumerate();
        while left.iter().any(|left| *left > 0) {
            let step: Vec<usize> = left
                .iter_mut()
                .map(|left| {
                    let (index, chunk) = chunks.next().unwrap();
                    let num_new = if index % 5 == 0 { (*left).min(1) } else { *chunk.min(left) };
                    *left -= num_new;
                    num_new
                })
                .collect();
            steps.push(step);
        }
        for &level in CpuLevel::available() {
            case.block_size = block_sizes[0];
            let whole = case.run(&case.in_one_step(), 1, level);
            case.block_size = block_sizes[1];
            let divided = case.run(&steps, num_threads, level);
            prop_assert!(whole == divided, "{case:?} on {level:?}");
        }
    }
}

#[test]
fn a_decode_of_a_long_context_is_divided_without_changing_a_bit() {
    let steps = vec![vec![1490], vec![1], vec![1], vec![8]];
    let all = KvCacheDType::ALL
        .into_iter()
        .flat_map(|dtype| CpuLevel::available().iter().map(move |level| (dtype, *level)));
    for (dtype, level) in all {
        let case = Case { dtype, block_size: 32, has_sinks: true, ..case(8, 1, 64, vec![1500]) };
        let alone = case.run(&steps, 1, level);
        assert_eq!(case.run(&steps, 4, level), alone, "{level:?}");
        assert_eq!(case.run(&case.in_one_step(), 2, level), alone, "{level:?}");
    }
}
