//! How long kernels take on shapes of real models, and how much memory they move meanwhile.

use std::time::Instant;

use super::attention::one_layer;
use super::oracle::{buffer, noise, random_matrix};
use crate::Result;
use crate::ops::{
    AttentionLimits, AttentionMetadata, AttentionScratch, Buffer, Context, DeviceInputs, KvCache,
    KvCacheDType, Linear, LinearScratch, StepInputs, linear_residual, paged_attention,
};
use crate::weights::DType;

/// Rows and columns of the feed-forward matrices of an 8B model.
const SHAPES: [(usize, usize); 2] = [(14336, 4096), (4096, 14336)];

/// Bytes of the matrices that take turns, so that none of them is still in a cache.
const MATRIX_BYTES: usize = 400 << 20;

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

/// Measures products and attention and tells each result as it comes.
///
/// # Errors
/// If the device has no memory or fails.
pub fn timings(context: &Context, report: &mut dyn FnMut(Timing)) -> Result<()> {
    for dtype in [DType::Q4_0, DType::Q8_0, DType::Q4K, DType::Q6K, DType::F16] {
        for (rows, cols) in SHAPES {
            for num_tokens in [1, 2, 4, 8, 16, 512] {
                report(product(context, dtype, rows, cols, num_tokens)?);
            }
        }
    }
    for (num_sequences, context_len) in [(1, 512), (1, 4096), (32, 4096)] {
        report(decode(context, num_sequences, context_len)?);
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

fn product(context: &Context, dtype: DType, rows: usize, cols: usize, num_tokens: usize) -> Result<Timing> {
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

/// Attention of one token for each sequence: 32 heads over 8 of 128 values.
fn decode(context: &Context, num_sequences: usize, context_len: usize) -> Result<Timing> {
    const HEADS: (usize, usize, usize) = (32, 8, 128);
    const BLOCK_SIZE: usize = 32;
    let (num_heads, num_kv_heads, head_dim) = HEADS;
    let blocks_each = context_len.div_ceil(BLOCK_SIZE);
    let limits = AttentionLimits {
        num_heads,
        num_kv_heads,
        head_dim,
        sliding_window: None,
        max_model_len: context_len,
        max_num_tokens: num_sequences,
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
        metadata.slot_mapping.push(sequence * blocks_each * BLOCK_SIZE);
        metadata.query_start_loc.push(sequence + 1);
        metadata.seq_lens.push(context_len);
        // Blocks of a sequence lie apart, as they come to do.
        metadata.block_tables.extend((0..blocks_each).map(|block| (block * num_sequences + sequence) as u32));
        metadata.block_table_starts.push(metadata.block_tables.len());
    }
    let positions = vec![context_len as u32 - 1; num_sequences];
    let step = StepInputs::new(&positions, &positions, &[], &metadata);
    let step = inputs.upload(context, step, &cache)?;
    let width = (num_heads + 2 * num_kv_heads) * head_dim;
    let qkv = buffer(context, &noise(1, num_sequences * width), width, num_sequences)?;
    let mut out = Buffer::new(context, num_sequences, num_heads * head_dim)?;
    let probe = Buffer::new(context, 1, 1)?;
    let seconds = measure(&probe, |call| {
        let layer = call % config.num_layers;
        paged_attention(context, &mut scratch, &qkv, &cache, layer, &step, &mut out)
    })?;
    Ok(Timing {
        name: format!("paged_attention f16 {num_sequences} × {context_len} tokens, 32 heads over 8 of 128"),
        seconds,
        bytes,
        operations: (4 * num_sequences * context_len * num_heads * head_dim) as f64,
    })
}
