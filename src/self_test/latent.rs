//! Matmuls of heads, and attention over latent rows.

use super::attention::one_layer;
use super::oracle::{Rows, buffer, matrix, noise, rms_norm, unwritten};
use super::{Report, matmul};
use crate::Result;
use crate::config::{LatentAttentionConfig, ModelConfig, RopeStyle};
use crate::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, AttentionScratch, AttentionSpec, Context,
    DeviceInputs, EXPANDED_GROUP, ExpandedLimits, ExpandedScratch, Heads, KvCache, KvCacheDType,
    LinearScratch, Matrix, MatrixStack, RopeTable, RowMode, StepInputs, expanded_attention, heads_linear,
    latent_kv_write, paged_attention,
};
use crate::weights::DType;

const EPS: f32 = 1e-2;
const SCALE: f64 = 0.1;

pub(super) fn run(context: &Context, report: &mut dyn Report) {
    let large = Case { num_heads: 16, rank: 512, ..Case::default() };
    let cases = [
        Case::default(),
        // Two and three groups of eight heads, and more than a threadgroup of a GPU has.
        Case { num_heads: 9, dtype: KvCacheDType::Bf16, ..Case::default() },
        Case { num_heads: 17, dtype: KvCacheDType::Bf16, ..Case::default() },
        Case { num_heads: 12, dtype: KvCacheDType::F32, ..Case::default() },
        Case { num_heads: 37, dtype: KvCacheDType::F32, ..Case::default() },
        Case { dtype: KvCacheDType::Bf16, ..Case::default() },
        Case { dtype: KvCacheDType::F32, block_size: 16, style: RopeStyle::HalfSplit, ..Case::default() },
        Case { dtype: KvCacheDType::F32, block_size: 7, ..Case::default() },
        Case { num_heads: 3, rank: 72, block_size: 24, ..Case::default() },
        large,
        Case { num_heads: 20, ..large },
        Case { num_heads: 20, dtype: KvCacheDType::F32, ..large },
        Case { dtype: KvCacheDType::Q8_0, ..Case::default() },
        Case { num_heads: 9, dtype: KvCacheDType::Q8_0, block_size: 7, ..Case::default() },
        // A group of values of which some are rotated.
        Case { num_heads: 3, rank: 72, block_size: 24, dtype: KvCacheDType::Q8_0, ..Case::default() },
        Case { num_heads: 20, dtype: KvCacheDType::Q8_0, ..large },
        Case { dtype: KvCacheDType::Fp8E4m3, ..Case::default() },
        Case { num_heads: 9, rank: 72, dtype: KvCacheDType::Fp8E4m3, block_size: 7, ..Case::default() },
        Case { num_heads: 20, dtype: KvCacheDType::Fp8E4m3, ..large },
    ];
    for case in cases {
        let limit = match case.dtype {
            // A GPU's queries and weights are in half precision too.
            KvCacheDType::F16 if context.is_gpu() => 2e-6,
            KvCacheDType::F16 => 2e-7,
            KvCacheDType::Bf16 => 1e-5,
            KvCacheDType::Q8_0 | KvCacheDType::Fp8E4m3 => 1e-4,
            KvCacheDType::F32 => 1e-11,
        };
        let name = format!("latent attention, {case:?}");
        report.compare(context, name, limit, |context| case.run(context));
        // GPUs have no matmuls of such rows, and no special case for few heads.
        if context.is_gpu() && (!case.rank.is_multiple_of(16) || case.num_heads > 4) {
            continue;
        }
        // Long contexts take long in double precision, and are the same for all widths and types.
        let sequences = match case {
            _ if case.rank == large.rank => &EXPANDED[..2],
            Case { dtype: KvCacheDType::F16, .. } => &EXPANDED[..],
            _ => &EXPANDED[..EXPANDED.len() - 1],
        };
        let expanded = Case { sequences, is_expanded: true, ..case };
        let name = format!("expanded attention, {expanded:?}");
        report.compare(context, name, limit, |context| expanded.run(context));
    }
    if context.has_tensor_cores() {
        run_on_tensor_cores(context, report);
    }
    // Into the latent row and out of it, of DeepSeek-V2-Lite and GLM-4.7-Flash.
    for (num_heads, inputs, outputs) in [(16, 128, 512), (20, 192, 512), (16, 512, 128), (20, 512, 256)] {
        for dtype in [DType::F32, DType::F16, DType::Q5_0, DType::Q8_0] {
            for num_rows in [1, 9] {
                let name =
                    format!("heads_linear {dtype}, {num_heads} of {inputs} to {outputs}, {num_rows} rows");
                let case = |context: &Context| heads(context, num_heads, inputs, outputs, dtype, num_rows);
                report.compare(context, name, matmul::limit(context, dtype, num_rows), case);
            }
        }
    }
    // Of Youtu-LLM and DeepSeek-V2-Lite, and of GLM-4.7-Flash.
    let few =
        Case { num_heads: 2, rank: 512, sequences: &EXPANDED[..2], is_expanded: true, ..Case::default() };
    for (nope, value_dim) in [(128, 128), (192, 256)] {
        for (dtype, limit) in
            [(KvCacheDType::F16, 2e-6), (KvCacheDType::Bf16, 1e-5), (KvCacheDType::F32, 1e-11)]
        {
            let own = Case { nope, value_dim, dtype, ..few };
            let name = format!("expanded attention, {own:?}");
            report.compare(context, name, limit, |context| own.run(context));
        }
    }
    // With matmuls on tensor cores, of many rows and, in so short a context, of few.
    let limit = if context.cpu_level().is_some() { 4e-3 } else { 2e-6 };
    for sequences in [few.sequences, &[[8, 40]]] {
        let quantized = Case { weights: DType::Q8_0, sequences, ..few };
        let name = format!("expanded attention, {quantized:?}");
        report.compare(context, name, limit, |context| quantized.run(context));
    }
}

/// Cases for the tensor core kernel alone: tiles of positions, heads and values, and contexts in KV splits of more than
/// the usual length.
fn run_on_tensor_cores(context: &Context, report: &mut dyn Report) {
    let tiles = Case { sequences: &TILES, ..Case::default() };
    let cases = [
        Case { num_heads: 1, ..tiles },
        Case { num_heads: 16, rank: 96, dtype: KvCacheDType::Bf16, block_size: 7, ..tiles },
        Case { num_heads: 33, rank: 208, ..tiles },
        Case { num_heads: 16, rank: 512, dtype: KvCacheDType::Bf16, ..tiles },
        Case { num_heads: 17, rank: 208, dtype: KvCacheDType::Q8_0, block_size: 7, ..tiles },
        Case { num_heads: 17, rank: 208, dtype: KvCacheDType::Fp8E4m3, block_size: 7, ..tiles },
        Case { num_heads: 32, rank: 512, sequences: &[[70, 1], [3, 2]], ..tiles },
        Case { query_size: 300.0, ..tiles },
        Case { query_size: 300.0, dtype: KvCacheDType::Bf16, ..tiles },
        Case { num_heads: 2, rank: 16, sequences: &[[16_500, 1], [8_000, 1]], ..tiles },
    ];
    for case in cases {
        // The error of exponents from queries in half precision.
        let limit = match case.dtype {
            _ if case.query_size > 1.0 => 1e-3,
            KvCacheDType::Q8_0 | KvCacheDType::Fp8E4m3 => 1e-4,
            _ => 2e-6,
        };
        let name = format!("latent attention, {case:?}");
        report.compare(context, name, limit, |context| case.run(context));
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
    scratch.reserve_groups(context, num_heads, num_heads * num_rows, inputs)?;
    let (width, out_width) = (num_heads * stride + 32, num_heads * out_stride);
    let x = buffer(context, &noise(1, num_rows * width), width, num_rows)?;
    let mut out = buffer(context, &noise(2, num_rows * out_width), out_width, num_rows)?;
    let x = Heads { rows: &x, stride };
    // Again for some rows alone.
    for rows in [0..num_rows, num_rows / 2..num_rows] {
        heads_linear(context, &mut scratch, rows, x, &stack, &mut out, out_stride)?;
    }
    Rows::of(&out, num_rows)
}

#[derive(Debug, Clone, Copy)]
struct Case {
    num_heads: usize,
    rank: usize,
    nope: usize,
    value_dim: usize,
    dtype: KvCacheDType,
    block_size: usize,
    style: RopeStyle,
    /// The factor of queries.
    query_size: f32,
    /// Of the projection of values.
    weights: DType,
    /// Tokens of each sequence that are in the cache before, and those that are computed.
    sequences: &'static [[usize; 2]],
    /// The mode whose results are compared.
    is_expanded: bool,
}

impl Default for Case {
    fn default() -> Self {
        let (dtype, weights) = (KvCacheDType::F16, DType::F32);
        Self {
            num_heads: 4,
            rank: 64,
            nope: 32,
            value_dim: 24,
            dtype,
            block_size: 32,
            style: RopeStyle::Interleaved,
            query_size: 1.0,
            weights,
            sequences: &ABSORBED,
            is_expanded: false,
        }
    }
}

/// At and around the ends of KV splits.
const ABSORBED: [[usize; 2]; 6] = [[0, 9], [255, 1], [256, 1], [300, 1], [17, 31], [250, 12]];
/// The same, also at and around the end of a span, and a row for more than one task.
const EXPANDED: [[usize; 2]; 6] = [[200, 60], [3, 31], [256, 64], [0, 130], [980, 80], [2040, 32]];
/// At and around the ends of tiles and KV splits.
const TILES: [[usize; 2]; 7] = [[30, 1], [31, 1], [32, 1], [48, 3], [254, 1], [511, 1], [512, 1]];
const ROTATED: usize = 64;

impl Case {
    fn config(self) -> ModelConfig {
        let latent_attention = Some(LatentAttentionConfig {
            q_lora_rank: None,
            kv_lora_rank: self.rank,
            qk_nope_head_dim: self.nope,
            v_head_dim: self.value_dim,
            softmax_scale: SCALE as f32,
            lora_norm_eps: EPS,
        });
        let one_layer = one_layer(self.num_heads, 1, self.nope + ROTATED);
        let rope = crate::config::RopeConfig { dim: ROTATED, ..one_layer.rope.clone() };
        ModelConfig { latent_attention, rope, ..one_layer }
    }

    /// Results of the rows that have the mode of the case's sequences.
    fn run(self, context: &Context) -> Result<Rows> {
        let Self { num_heads, rank, dtype, block_size, style, sequences, is_expanded, .. } = self;
        let (row_dim, query_dim) = (rank + ROTATED, self.nope + ROTATED);
        let max_len = sequences.iter().map(|lens| lens[0] + lens[1]).max().unwrap_or(0);
        let blocks_each = max_len.div_ceil(block_size);
        let num_tokens_of = |step: usize| sequences.iter().map(|lens| lens[step]).sum();
        let max_num_tokens = (0..2).map(num_tokens_of).max().unwrap_or(0).max(block_size);
        let num_blocks = sequences.len() * blocks_each;
        let mut cache = KvCache::new(context, &self.config(), num_blocks, block_size, dtype)?;
        let heads = AttentionHeads { num_heads, num_kv_heads: 1, head_dim: row_dim, value_dim: rank };
        let spec = AttentionSpec::plain(heads, SCALE);
        let limits = AttentionLimits {
            heads,
            max_window: None,
            max_model_len: max_len,
            max_num_tokens,
            max_num_rows: sequences.len(),
        };
        let mut scratch = AttentionScratch::new(context, limits)?;
        let mut inputs = DeviceInputs::new(context, &limits, block_size)?;
        let mut expanded = ExpandedScratch::new(
            context,
            ExpandedLimits {
                num_heads,
                rank,
                nope: self.nope,
                rotated: ROTATED,
                value_dim: self.value_dim,
                scale: SCALE,
                max_model_len: max_len,
                max_num_tokens,
                max_num_rows: sequences.len(),
            },
        )?;
        let projections = is_expanded.then(|| self.projections(context)).transpose()?;
        let frequencies = (0..ROTATED / 2).map(|pair| 0.3 / (pair + 1) as f32).collect();
        let mut table = RopeTable::new(context, style, frequencies, 1.0, max_len)?;
        table.extend_to(max_len)?;
        let norm = rms_norm(context, 8, rank, EPS)?;
        // Slots without a token are NaN. The definition may read more.
        if !context.is_reference() {
            for block in 0..num_blocks {
                let metadata = AttentionMetadata {
                    slot_mapping: (block * block_size..(block + 1) * block_size).collect(),
                    ..AttentionMetadata::default()
                };
                let positions = vec![0; block_size];
                let step = StepInputs::new(&positions, &positions, &[], &metadata);
                let step = inputs.upload(context, step, &cache)?;
                let nothing = unwritten(context, num_heads * query_dim + row_dim, block_size)?;
                let mut out = unwritten(context, num_heads * row_dim, block_size)?;
                let queries = Heads { rows: &nothing, stride: query_dim };
                latent_kv_write(context, queries, &nothing, &step, &norm, &table, &mut cache, 0, &mut out)?;
            }
        }
        let out_width = num_heads * if is_expanded { self.value_dim } else { rank };
        let mut results = Rows { values: Vec::new(), width: out_width };
        for step in 0..2 {
            let mut metadata = AttentionMetadata { block_size, ..AttentionMetadata::default() };
            metadata.clear();
            metadata.block_size = block_size;
            let mut positions = Vec::new();
            for (sequence, lens) in sequences.iter().enumerate().filter(|(_, lens)| lens[step] > 0) {
                let (first, end) = if step == 0 { (0, lens[0]) } else { (lens[0], lens[0] + lens[1]) };
                // The blocks of a sequence are not adjacent.
                let block = |index: usize| index * sequences.len() + sequence;
                metadata
                    .slot_mapping
                    .extend((first..end).map(|at| block(at / block_size) * block_size + at % block_size));
                let num_expanded = if end - first >= EXPANDED_GROUP { end } else { 0 };
                let mode = RowMode::of(end - first);
                metadata.push(first..end, num_expanded, mode, |index| block(index) as u32);
                positions.extend(first as u32..end as u32);
            }
            let num_tokens = positions.len();
            let width = num_heads * query_dim + row_dim;
            let mut rows = noise(3 + step as u64, num_tokens * width);
            let mut absorbed = noise(7 + step as u64, num_tokens * num_heads * row_dim);
            let queries = rows.chunks_exact_mut(width).flat_map(|row| &mut row[..num_heads * query_dim]);
            queries.chain(&mut absorbed).for_each(|value| *value *= self.query_size);
            let rows = buffer(context, &rows, width, num_tokens)?;
            let mut absorbed = buffer(context, &absorbed, num_heads * row_dim, num_tokens)?;
            let mut out = unwritten(context, out_width, num_tokens)?;
            let lists = StepInputs::new(&positions, &positions, &[], &metadata);
            let lists = &inputs.upload(context, lists, &cache)?;
            let queries = Heads { rows: &rows, stride: query_dim };
            latent_kv_write(context, queries, &rows, lists, &norm, &table, &mut cache, 0, &mut absorbed)?;
            // Earlier steps only fill the cache.
            if step == 0 {
                continue;
            }
            match &projections {
                None => paged_attention(
                    context,
                    &mut scratch,
                    &spec,
                    &absorbed,
                    &cache,
                    0,
                    lists,
                    None,
                    &mut out,
                )?,
                Some([keys, values]) => {
                    let (scratch, absorbed, out) = (&mut expanded, &absorbed, &mut out);
                    expanded_attention(
                        context, scratch, queries, absorbed, &cache, 0, lists, keys, values, out,
                    )?;
                }
            }
            let values = out.read_exact(num_tokens)?;
            for row in (0..metadata.num_rows()).filter(|row| metadata.is_expanded(*row) == is_expanded) {
                let tokens = metadata.query_start_loc[row]..metadata.query_start_loc[row + 1];
                results.values.extend(&values[tokens.start * out_width..tokens.end * out_width]);
            }
        }
        Ok(results)
    }

    /// Of keys, `[heads, rank, nope]`, and of values, `[heads, value, rank]`.
    fn projections(self, context: &Context) -> Result<[MatrixStack; 2]> {
        let Self { num_heads, rank, nope, value_dim, weights, .. } = self;
        let (mut keys, mut transposed, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for head in 0..num_heads {
            let seed = 20 + 2 * head as u64;
            let mut own = noise(seed, rank * nope);
            // Scores have the same magnitude for all widths.
            let size = (2048.0 / own.len() as f32).sqrt();
            own.iter_mut().for_each(|value| *value *= size);
            let dense = |values: &mut dyn Iterator<Item = f32>, rows: usize, cols: usize| {
                let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
                Matrix::from_bytes(context, DType::F32, &bytes, rows, cols)
            };
            let by_column = |at: usize| own[at % rank * nope + at / rank];
            keys.push(dense(&mut own.iter().copied(), rank, nope)?);
            transposed.push(dense(&mut (0..rank * nope).map(by_column), nope, rank)?);
            values.push(matrix(context, weights, value_dim, rank, 90 + seed)?);
        }
        let keys = MatrixStack::new(context, keys)?;
        let is_reference = context.is_reference();
        let keys = if is_reference { keys } else { keys.with_transposed(context, transposed)? };
        Ok([keys, MatrixStack::new(context, values)?])
    }
}
