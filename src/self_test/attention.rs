//! Rotation, the way into the cache, and attention over it: as one, because what the cache holds shows in what
//! attention reads from it.

use super::oracle::{Rows, buffer, compare, noise, rms_norm};
use super::{Check, Effort, check};
use crate::Result;
use crate::config::{ARCHITECTURES, ModelConfig, RopeConfig, RopeScaling, RopeStyle};
use crate::ops::{
    AttentionLimits, AttentionMetadata, AttentionScratch, Buffer, Context, DeviceInputs, HeadNorms, KvCache,
    KvCacheDType, RopeTable, StepInputs, paged_attention, rope_kv_write,
};

const EPS: f32 = 1e-6;

/// Sequences that compute their first tokens in one step and some more in the next, over shuffled blocks.
#[derive(Debug, Clone)]
struct Case {
    heads: (usize, usize),
    head_dim: usize,
    num_pairs: usize,
    style: RopeStyle,
    has_norms: bool,
    window: Option<usize>,
    dtype: KvCacheDType,
    block_size: usize,
    /// Tokens of each sequence in each step.
    sequences: Vec<[usize; 2]>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            heads: (4, 2),
            head_dim: 64,
            num_pairs: 32,
            style: RopeStyle::HalfSplit,
            has_norms: false,
            window: None,
            dtype: KvCacheDType::F16,
            block_size: 16,
            sequences: vec![[37, 1], [5, 1], [0, 1], [40, 1]],
        }
    }
}

pub(super) fn run(context: &Context, effort: Effort, report: &mut dyn FnMut(Check)) {
    let mut run = |case: &Case| {
        let name = format!(
            "attention {}, {} heads over {} of {}, blocks of {}{}{}{}, tokens {:?}",
            case.dtype,
            case.heads.0,
            case.heads.1,
            case.head_dim,
            case.block_size,
            if case.has_norms { ", norms" } else { "" },
            if case.style == RopeStyle::Interleaved { ", interleaved" } else { "" },
            case.window.map_or(String::new(), |window| format!(", window {window}")),
            case.sequences
        );
        // Queries are rounded to half precision beside keys of half precision, and a rotated key may fall on the
        // other side of what bf16 rounds up.
        let limit = match case.dtype {
            KvCacheDType::F16 => 2e-7,
            KvCacheDType::Bf16 => 2e-6,
            KvCacheDType::F32 => 1e-12,
        };
        report(check(name, limit, compare(context, |context| case.run(context))));
    };
    for dtype in [KvCacheDType::F16, KvCacheDType::Bf16, KvCacheDType::F32] {
        run(&Case { dtype, ..Case::default() });
        for head_dim in [16, 24, 64, 128, 256] {
            for heads in [(2, 2), (4, 2), (4, 1)] {
                let sequences = vec![[20, 1], [0, 1]];
                run(&Case { dtype, heads, head_dim, num_pairs: head_dim / 2, sequences, ..Case::default() });
            }
        }
        // More heads for a key than a simdgroup takes.
        run(&Case { dtype, heads: (8, 1), head_dim: 16, num_pairs: 8, ..Case::default() });
    }
    for (head_dim, num_pairs) in [(24, 12), (40, 8), (80, 40), (96, 48)] {
        for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
            run(&Case { head_dim, num_pairs, style, has_norms: true, ..Case::default() });
        }
    }
    run(&Case { heads: (7, 1), block_size: 24, ..Case::default() });
    // Pieces of prompts, of one token up to more than a tile, in one step with tokens that are generated.
    let sequences = vec![[3, 50], [33, 2], [30, 1], [0, 12]];
    run(&Case { sequences: sequences.clone(), block_size: 8, ..Case::default() });
    for window in [1, 7, 32] {
        run(&Case { window: Some(window), sequences: sequences.clone(), ..Case::default() });
    }
    // More than one piece of the context.
    let sequences = vec![[600, 1], [255, 1], [10, 1], [256, 1]];
    let small = Case { head_dim: 16, num_pairs: 8, heads: (2, 1), sequences, ..Case::default() };
    run(&small);
    run(&Case { window: Some(300), ..small });
    if effort == Effort::Full {
        let sequences = vec![[3000, 1], [1, 1], [700, 65], [2047, 1]];
        for heads in [(32, 8), (32, 4), (16, 16)] {
            run(&Case {
                heads,
                head_dim: 128,
                num_pairs: 64,
                block_size: 32,
                sequences: sequences.clone(),
                ..Case::default()
            });
        }
    }
}

/// A model of one layer with this attention and next to nothing else, to check and to measure attention with.
#[must_use]
pub fn one_layer(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> ModelConfig {
    ModelConfig {
        architecture: &ARCHITECTURES[0],
        vocab_size: 1,
        hidden_size: 1,
        num_layers: 1,
        num_heads,
        num_kv_heads,
        head_dim,
        intermediate_size: 1,
        rms_norm_eps: EPS,
        rope: RopeConfig {
            theta: 1e4,
            dim: head_dim,
            style: RopeStyle::HalfSplit,
            scaling: RopeScaling::None,
        },
        max_position_embeddings: 1 << 16,
        tie_word_embeddings: true,
        sliding_window: None,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
    }
}

impl Case {
    /// Values of one token before rotation.
    fn width(&self) -> usize {
        (self.heads.0 + 2 * self.heads.1) * self.head_dim
    }

    /// What attention gives for each token and head.
    fn run(&self, context: &Context) -> Result<Rows> {
        let (num_heads, num_kv_heads) = self.heads;
        let max_len = self.sequences.iter().map(|steps| steps[0] + steps[1]).max().unwrap_or(1);
        let num_tokens = |step: usize| self.sequences.iter().map(|steps| steps[step]).sum::<usize>();
        let limits = AttentionLimits {
            num_heads,
            num_kv_heads,
            head_dim: self.head_dim,
            sliding_window: self.window,
            max_model_len: max_len,
            max_num_tokens: num_tokens(0).max(num_tokens(1)),
            max_num_rows: self.sequences.len(),
        };
        let blocks_each = max_len.div_ceil(self.block_size);
        let num_blocks = blocks_each * self.sequences.len();
        let config = one_layer(num_heads, num_kv_heads, self.head_dim);
        let mut cache = KvCache::new(context, &config, num_blocks, self.block_size, self.dtype)?;
        let mut scratch = AttentionScratch::new(context, limits)?;
        let mut inputs = DeviceInputs::new(context, &limits, self.block_size)?;
        let frequencies = (0..self.num_pairs).map(|pair| 0.3 / (pair + 1) as f32).collect();
        let mut table = RopeTable::new(context, self.style, frequencies, 1.0, max_len)?;
        table.extend_to(max_len)?;
        let norms = (rms_norm(context, 8, self.head_dim, EPS)?, rms_norm(context, 9, self.head_dim, EPS)?);
        let head_norms = self.has_norms.then_some(HeadNorms { q: &norms.0, k: &norms.1 });

        let tokens: Vec<Vec<f32>> = (0..self.sequences.len())
            .map(|index| {
                let len: usize = self.sequences[index].iter().sum();
                noise(100 + index as u64, len * self.width())
            })
            .collect();
        let mut results = Rows { values: Vec::new(), width: self.head_dim };
        for step in 0..2 {
            let mut metadata = AttentionMetadata { block_size: self.block_size, ..Default::default() };
            metadata.clear();
            let (mut qkv, mut positions) = (Vec::new(), Vec::new());
            for (index, steps) in self.sequences.iter().enumerate().filter(|(_, steps)| steps[step] > 0) {
                let first = if step == 0 { 0 } else { steps[0] };
                let end = first + steps[step];
                // Neighbours in a sequence are not neighbours in the cache.
                let block = |position: usize| {
                    num_blocks - 1 - (position / self.block_size * self.sequences.len() + index)
                };
                let table: Vec<u32> =
                    (0..end.div_ceil(self.block_size)).map(|at| block(at * self.block_size) as u32).collect();
                for position in first..end {
                    positions.push(position as u32);
                    let slot = block(position) * self.block_size + position % self.block_size;
                    metadata.slot_mapping.push(slot);
                }
                qkv.extend_from_slice(&tokens[index][first * self.width()..end * self.width()]);
                metadata.query_start_loc.push(positions.len());
                metadata.seq_lens.push(end);
                metadata.block_tables.extend(table);
                metadata.block_table_starts.push(metadata.block_tables.len());
            }
            if positions.is_empty() {
                continue;
            }
            let lists = StepInputs::new(&positions, &positions, &[], &metadata);
            let lists = inputs.upload(context, lists, &cache)?;
            let mut qkv = buffer(context, &qkv, self.width(), positions.len())?;
            let mut out = Buffer::new(context, positions.len(), num_heads * self.head_dim)?;
            rope_kv_write(context, &mut qkv, &lists, head_norms, &table, &mut cache, 0)?;
            paged_attention(context, &mut scratch, &qkv, &cache, 0, &lists, &mut out)?;
            results.values.extend(out.read_exact(positions.len())?);
        }
        Ok(results)
    }
}
