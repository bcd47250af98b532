//! Products of heads, and attention over latent rows.

use super::attention::one_layer;
use super::oracle::{Rows, buffer, compare, matrix, noise, rms_norm, unwritten};
use super::{Check, check};
use crate::Result;
use crate::config::{LatentAttentionConfig, ModelConfig, RopeStyle};
use crate::ops::{
    AttentionLimits, AttentionMetadata, AttentionScratch, Context, Heads, KvCache, KvCacheDType,
    LinearScratch, MatrixStack, RopeTable, StepInputs, heads_linear, latent_kv_write, paged_attention,
};
use crate::weights::DType;

const EPS: f32 = 1e-6;

pub(super) fn run(context: &Context, report: &mut dyn FnMut(Check)) {
    if context.is_metal() {
        return;
    }
    // Into the latent row and out of it, of DeepSeek-V2-Lite and GLM-4.7-Flash.
    for (num_heads, inputs, outputs) in [(16, 128, 512), (20, 192, 512), (16, 512, 128), (20, 512, 256)] {
        for dtype in [DType::F32, DType::F16, DType::Q5_0, DType::Q8_0] {
            for num_rows in [1, 9] {
                let name =
                    format!("heads_linear {dtype}, {num_heads} of {inputs} to {outputs}, {num_rows} rows");
                let case = |context: &Context| heads(context, num_heads, inputs, outputs, dtype, num_rows);
                let limit = match context.cpu_level() {
                    Some(_) if dtype.block_len() > 1 => 4e-3,
                    _ => 1e-11,
                };
                report(check(name, limit, compare(context, case)));
            }
        }
    }
    let large = Case { num_heads: 16, rank: 512, ..Case::default() };
    let cases = [
        Case::default(),
        large,
        Case { num_heads: 20, dtype: KvCacheDType::F32, ..large },
        Case { dtype: KvCacheDType::Bf16, ..Case::default() },
        Case { dtype: KvCacheDType::F32, block_size: 16, ..Case::default() },
        Case { dtype: KvCacheDType::F32, block_size: 7, ..Case::default() },
        Case { num_heads: 3, rank: 72, block_size: 24, ..Case::default() },
    ];
    for case in cases {
        let limit = match case.dtype {
            KvCacheDType::F16 => 2e-7,
            KvCacheDType::Bf16 => 1e-5,
            KvCacheDType::F32 => 1e-11,
        };
        report(check(
            format!("latent attention, {case:?}"),
            limit,
            compare(context, |context| case.run(context)),
        ));
    }
}

fn heads(
    context: &Context,
    num_heads: usize,
    inputs: usize,
    outputs: usize,
    dtype: DType,
    num_rows: usize,
) -> Result<Rows> {
    // Heads have more values than are multiplied or written.
    let (stride, out_stride) = (inputs + 64, outputs + 16);
    let own = |head: usize| matrix(context, dtype, outputs, inputs, 10 + 2 * head as u64);
    let stack = MatrixStack::new(context, (0..num_heads).map(own).collect::<Result<_>>()?)?;
    let mut scratch = LinearScratch::new(context, num_rows, inputs)?;
    scratch.reserve_groups(context, num_heads, num_heads * num_rows, inputs);
    let (width, out_width) = (num_heads * stride + 32, num_heads * out_stride);
    let x = buffer(context, &noise(1, num_rows * width), width, num_rows)?;
    let mut out = buffer(context, &noise(2, num_rows * out_width), out_width, num_rows)?;
    heads_linear(context, &mut scratch, num_rows, Heads { rows: &x, stride }, &stack, &mut out, out_stride)?;
    Rows::of(&out, num_rows)
}

#[derive(Debug, Clone, Copy)]
struct Case {
    num_heads: usize,
    rank: usize,
    dtype: KvCacheDType,
    block_size: usize,
}

impl Default for Case {
    fn default() -> Self {
        Self { num_heads: 4, rank: 64, dtype: KvCacheDType::F16, block_size: 32 }
    }
}

/// Tokens of each sequence that are in the cache before, and those that are computed: at and around the ends of pieces.
const SEQUENCES: [[usize; 2]; 6] = [[0, 9], [255, 1], [256, 1], [300, 1], [17, 40], [250, 12]];
const ROTATED: usize = 64;
const NOPE: usize = 32;

impl Case {
    fn config(self) -> ModelConfig {
        let latent_attention = Some(LatentAttentionConfig {
            q_lora_rank: None,
            kv_lora_rank: self.rank,
            qk_nope_head_dim: NOPE,
            v_head_dim: 1,
            softmax_scale: 0.1,
            lora_norm_eps: EPS,
        });
        let one_layer = one_layer(self.num_heads, 1, NOPE + ROTATED);
        let rope = crate::config::RopeConfig { dim: ROTATED, ..one_layer.rope.clone() };
        ModelConfig { latent_attention, rope, ..one_layer }
    }

    fn run(self, context: &Context) -> Result<Rows> {
        let Self { num_heads, rank, dtype, block_size } = self;
        let (row_dim, query_dim, max_len) = (rank + ROTATED, NOPE + ROTATED, 400_usize);
        let blocks_each = max_len.div_ceil(block_size);
        let max_num_tokens: usize =
            (0..2).map(|step| SEQUENCES.iter().map(|steps| steps[step]).sum()).max().unwrap_or(0);
        let max_num_tokens = max_num_tokens.max(block_size);
        let num_blocks = SEQUENCES.len() * blocks_each;
        let mut cache = KvCache::new(context, &self.config(), num_blocks, block_size, dtype)?;
        let mut scratch = AttentionScratch::new(
            context,
            AttentionLimits {
                num_heads,
                num_kv_heads: 1,
                head_dim: row_dim,
                value_dim: rank,
                scale: 0.1,
                sliding_window: None,
                max_model_len: max_len,
                max_num_tokens,
                max_num_rows: SEQUENCES.len(),
            },
        )?;
        let frequencies = (0..ROTATED / 2).map(|pair| 0.3 / (pair + 1) as f32).collect();
        let mut table = RopeTable::new(context, RopeStyle::Interleaved, frequencies, 1.0, max_len)?;
        table.extend_to(max_len)?;
        let norm = rms_norm(context, 8, rank, EPS)?;
        // What is not a token's is no number. The definition may read more.
        if !context.is_reference() {
            for block in 0..num_blocks {
                let metadata = AttentionMetadata {
                    slot_mapping: (block * block_size..(block + 1) * block_size).collect(),
                    ..AttentionMetadata::default()
                };
                let positions = vec![0; block_size];
                let step = StepInputs::new(&positions, &positions, &[], &metadata);
                let nothing = unwritten(context, num_heads * query_dim + row_dim, block_size)?;
                let mut out = unwritten(context, num_heads * row_dim, block_size)?;
                let queries = Heads { rows: &nothing, stride: query_dim };
                latent_kv_write(context, queries, &nothing, &step, &norm, &table, &mut cache, 0, &mut out)?;
            }
        }
        let mut results = Rows { values: Vec::new(), width: rank };
        for step in 0..2 {
            let mut metadata = AttentionMetadata { block_size, ..AttentionMetadata::default() };
            metadata.clear();
            metadata.block_size = block_size;
            let mut positions = Vec::new();
            for (sequence, lens) in SEQUENCES.iter().enumerate().filter(|(_, lens)| lens[step] > 0) {
                let (first, end) = if step == 0 { (0, lens[0]) } else { (lens[0], lens[0] + lens[1]) };
                // Blocks of a sequence lie apart.
                let block = |index: usize| index * SEQUENCES.len() + sequence;
                metadata
                    .slot_mapping
                    .extend((first..end).map(|at| block(at / block_size) * block_size + at % block_size));
                metadata.query_start_loc.push(metadata.slot_mapping.len());
                metadata.seq_lens.push(end);
                let used = 0..end.div_ceil(block_size);
                metadata.block_tables.extend(used.map(|index| block(index) as u32));
                metadata.block_table_starts.push(metadata.block_tables.len());
                positions.extend(first as u32..end as u32);
            }
            let num_tokens = positions.len();
            let width = num_heads * query_dim + row_dim;
            let rows = buffer(context, &noise(3 + step as u64, num_tokens * width), width, num_tokens)?;
            let absorbed = noise(7 + step as u64, num_tokens * num_heads * row_dim);
            let mut absorbed = buffer(context, &absorbed, num_heads * row_dim, num_tokens)?;
            let mut out = unwritten(context, num_heads * rank, num_tokens)?;
            let lists = StepInputs::new(&positions, &positions, &[], &metadata);
            let queries = Heads { rows: &rows, stride: query_dim };
            latent_kv_write(context, queries, &rows, &lists, &norm, &table, &mut cache, 0, &mut absorbed)?;
            paged_attention(context, &mut scratch, &absorbed, &cache, 0, &lists, &mut out)?;
            results.values.extend(out.read_exact(num_tokens)?);
        }
        Ok(results)
    }
}
