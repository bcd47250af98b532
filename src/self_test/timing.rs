//! The time of kernels for shapes of real models, and the memory that they move.

use std::time::Instant;

use super::attention::one_layer;
use super::oracle::{buffer, noise, random_matrix};
use crate::Result;
use crate::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, AttentionScratch, AttentionSpec, Buffer, Context,
    DeviceInputs, DeviceSampler, KvCache, KvCacheDType, Linear, LinearScratch, RowMode, SampleParams,
    StepInputs, linear_residual, paged_attention,
};
use crate::weights::DType;

/// Rows and columns of the feed-forward matrices of an 8B model.
const SHAPES: [(usize, usize); 2] = [(14336, 4096), (4096, 14336)];

/// Bytes of the matrices that take turns, so that none of them is still in a cache.
const MATRIX_BYTES: usize = 400 << 20;

/// Tokens of a prompt.
const PROMPT: usize = 2048;

/// Tokens of a large vocabulary.
const VOCAB_SIZE: usize = 151_936;

/// How long one op took.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// The op and its shape.
    pub name: String,
    /// Seconds of one call, on average over many that follow one another.
    pub seconds: f64,
    /// Bytes of weights or of cached keys and values that a call has to read.
    pub bytes: usize,
    /// Multiplications and additions of a call.
    pub operations: f64,
}

impl std::fmt::Display for Timing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}: {:.1} us, {:.1} GB/s, {:.2} TFLOP/s",
            self.name,
            self.seconds * 1e6,
            self.bytes as f64 / self.seconds / 1e9,
            self.operations / self.seconds / 1e12
        )
    }
}

/// Measures matmuls and attention and reports each result as it comes.
///
/// # Errors
/// If the device has no memory or fails.
pub fn timings(context: &Context, report: &mut dyn FnMut(Timing)) -> Result<()> {
    for dtype in [DType::Q4_0, DType::Q8_0, DType::Q4K, DType::Q6K, DType::F16] {
        for (rows, cols) in SHAPES {
            for num_tokens in [1, 2, 4, 8, 16, 512] {
                report(matmul(context, dtype, rows, cols, num_tokens)?);
            }
        }
    }
    for (num_sequences, context_len) in [(1, 512), (1, 4096), (32, 4096)] {
        report(attention(context, num_sequences, context_len - 1, 1)?);
    }
    report(attention(context, 1, 0, PROMPT)?);
    for (variant, context) in context.alternatives() {
        let timing = attention(&context, 1, 0, PROMPT)?;
        report(Timing { name: format!("{}, {variant}", timing.name), ..timing });
    }
    for (top_k, top_p) in [(0, 1.0), (40, 1.0), (0, 0.9)] {
        if let Some(timing) = sampling(context, top_k, top_p)? {
            report(timing);
        }
    }
    Ok(())
}

/// Seconds of one call of `run`, which is given the number of the call. Reading `probe` waits for all of them.
fn measure(probe: &Buffer, mut run: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    const MIN_SECONDS: f64 = 0.2;
    let mut num_calls = 8;
    (0..num_calls).try_for_each(&mut run)?;
    probe.read(1, |_| ())?;
    loop {
        let start = Instant::now();
        (0..num_calls).try_for_each(&mut run)?;
        // A GPU works while the host queues; reading waits for all of it.
        probe.read(1, |_| ())?;
        let seconds = start.elapsed().as_secs_f64();
        if seconds >= MIN_SECONDS || num_calls > 1 << 14 {
            return Ok(seconds / num_calls as f64);
        }
        num_calls *= 2;
    }
}

fn matmul(context: &Context, dtype: DType, rows: usize, cols: usize, num_tokens: usize) -> Result<Timing> {
    let bytes = rows * cols / dtype.block_len() * dtype.block_bytes();
    let num_matrices = MATRIX_BYTES.div_ceil(bytes);
    let linears = (0..num_matrices)
        .map(|_| Ok(Linear { weight: random_matrix(context, dtype, rows, cols)?, bias: None }))
        .collect::<Result<Vec<_>>>()?;
    let mut scratch = LinearScratch::new(context, num_tokens, cols)?;
    let input = buffer(context, &noise(1, num_tokens * cols), cols, num_tokens)?;
    let mut out = Buffer::new(context, num_tokens, rows)?;
    let probe = Buffer::new(context, 1, 1)?;
    let seconds = measure(&probe, |call| {
        let linear = &linears[call % num_matrices];
        linear_residual(context, &mut scratch, num_tokens, &input, linear, &mut out)
    })?;
    Ok(Timing {
        name: format!("linear_residual {dtype} {rows}×{cols}, {num_tokens} rows"),
        seconds,
        bytes,
        operations: 2.0 * (rows * cols * num_tokens) as f64,
    })
}

/// Attention of `num_tokens` tokens for each sequence, after `first` others: 32 heads over 8 of 128 values.
fn attention(context: &Context, num_sequences: usize, first: usize, num_tokens: usize) -> Result<Timing> {
    const HEADS: (usize, usize, usize) = (32, 8, 128);
    const BLOCK_SIZE: usize = 32;
    let (num_heads, num_kv_heads, head_dim) = HEADS;
    let context_len = first + num_tokens;
    let blocks_each = context_len.div_ceil(BLOCK_SIZE);
    let num_rows = num_sequences * num_tokens;
    let heads = AttentionHeads::new(num_heads, num_kv_heads, head_dim);
    let spec = AttentionSpec::plain(heads, 1.0 / (head_dim as f64).sqrt());
    let limits = AttentionLimits {
        heads,
        max_window: None,
        max_model_len: context_len,
        max_num_tokens: num_rows,
        max_num_rows: num_sequences,
    };
    let mut config = one_layer(num_heads, num_kv_heads, head_dim);
    let bytes = num_sequences * context_len * num_kv_heads * head_dim * 2 * 2;
    config.num_layers = MATRIX_BYTES.div_ceil(bytes);
    let cache = KvCache::new(context, &config, num_sequences * blocks_each, BLOCK_SIZE, KvCacheDType::F16)?;
    let mut scratch = AttentionScratch::new(context, limits)?;
    let mut inputs = DeviceInputs::new(context, &limits, BLOCK_SIZE)?;
    let mut metadata = AttentionMetadata { block_size: BLOCK_SIZE, ..Default::default() };
    metadata.clear();
    for sequence in 0..num_sequences {
        // The blocks of a sequence are not adjacent, as in practice.
        let block = |position: usize| position / BLOCK_SIZE * num_sequences + sequence;
        let slots = (first..context_len).map(|at| block(at) * BLOCK_SIZE + at % BLOCK_SIZE);
        metadata.slot_mapping.extend(slots);
        metadata.query_start_loc.push((sequence + 1) * num_tokens);
        metadata.seq_lens.push(context_len);
        metadata.modes.push(RowMode::of(num_tokens));
        metadata.block_tables.extend((0..blocks_each).map(|index| block(index * BLOCK_SIZE) as u32));
        metadata.block_table_starts.push(metadata.block_tables.len());
    }
    let positions = (first as u32..context_len as u32).collect::<Vec<_>>().repeat(num_sequences);
    let step = StepInputs::new(&positions, &positions, &[], &metadata);
    let step = inputs.upload(context, step, &cache)?;
    let width = (num_heads + 2 * num_kv_heads) * head_dim;
    let qkv = buffer(context, &noise(1, num_rows * width), width, num_rows)?;
    let mut out = Buffer::new(context, num_rows, num_heads * head_dim)?;
    let probe = Buffer::new(context, 1, 1)?;
    let seconds = measure(&probe, |call| {
        let layer = call % config.num_layers;
        paged_attention(context, &mut scratch, &spec, &qkv, &cache, layer, &step, None, &mut out)
    })?;
    let num_pairs: usize = positions.iter().map(|position| *position as usize + 1).sum();
    Ok(Timing {
        name: format!(
            "paged_attention f16 {num_sequences} × {num_tokens} of {context_len} tokens, 32 heads over 8 of 128"
        ),
        seconds,
        bytes,
        operations: (4 * num_pairs * num_heads * head_dim) as f64,
    })
}

/// A token for one row, if the device has a sampler.
fn sampling(context: &Context, top_k: usize, top_p: f32) -> Result<Option<Timing>> {
    const NUM_CALLS: usize = 64;
    let Some(mut sampler) = DeviceSampler::new(context)? else { return Ok(None) };
    // Close to a normal distribution with a standard deviation of 2.5. Sampling changes a row, so each call has its
    // own.
    let uniform = noise(1, 4 * VOCAB_SIZE);
    let row: Vec<f32> = uniform.chunks_exact(4).map(|four| 2.17 * four.iter().sum::<f32>()).collect();
    let rows = (0..NUM_CALLS).map(|_| buffer(context, &row, VOCAB_SIZE, 1)).collect::<Result<Vec<_>>>()?;
    let params = SampleParams { top_k, top_p, ..SampleParams::plain() };
    sampler.begin(context, std::iter::once(params), NUM_CALLS)?;
    let (warm_up, rows) = rows.split_at(NUM_CALLS / 4);
    let mut sample = |rows: &[Buffer], last: usize| {
        rows.iter().try_for_each(|row| sampler.launch(context, row))?;
        sampler.tokens(context, last, &mut Vec::new())
    };
    sample(warm_up, warm_up.len() - 1)?;
    let start = Instant::now();
    sample(rows, NUM_CALLS - 1)?;
    Ok(Some(Timing {
        name: format!("sample of {VOCAB_SIZE} tokens, top-k {top_k}, top-p {top_p}"),
        seconds: start.elapsed().as_secs_f64() / rows.len() as f64,
        bytes: 4 * VOCAB_SIZE,
        operations: 0.0,
    }))
}
