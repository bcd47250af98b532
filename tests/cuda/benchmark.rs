//! How much of the memory bandwidth the kernels use, as ops launch them.

mod attention;
mod latent;
mod prompts;

use std::sync::Arc;

use tinyvllm::ops::gpu::{CudaGpu, Gpu};
use tinyvllm::ops::{
    AttentionMetadata, Buffer, Context, DeviceSampler, EXPANDED_GROUP, Linear, LinearScratch, Matrix,
    RmsNorm, RowMode, SampleParams, Vector, linear_residual, norm_linear,
};
use tinyvllm::weights::DType;
use tinyvllm::{Error, Result};

/// What a cache of the device cannot hold.
const MIN_BYTES: usize = 400 << 20;
const BLOCK_SIZE: usize = 32;
const CONTEXT: usize = 4096;
const NUM_SEQUENCES: usize = 32;

/// What is measured with, and where lines go.
struct Bench<'a> {
    gpu: &'a Arc<CudaGpu>,
    context: Context,
    copy_bandwidth: f64,
    report: &'a mut dyn FnMut(String),
    /// The shares of the copy bandwidth that have to be large.
    shares: Vec<(String, f64)>,
}

/// Measures everything; gives the shares of the bandwidth of a copy that the kernels must have.
pub(super) fn run(gpu: &Arc<CudaGpu>, report: &mut dyn FnMut(String)) -> Result<Vec<(String, f64)>> {
    let context = Context::gpu(Arc::clone(gpu) as Arc<dyn Gpu>);
    // What everything is compared with: bytes that a large copy reads and writes.
    let copy_bandwidth =
        gpu.measure_copy_bandwidth()?.ok_or_else(|| Error::internal("no bandwidth of a copy"))?;
    report(format!("{:44} {:12} {:7.0} GB/s", format!("{}: copy", gpu.name()), "", copy_bandwidth / 1e9));
    let mut bench = Bench { gpu, context, copy_bandwidth, report, shares: Vec::new() };
    for dtype in [DType::Q4_0, DType::F16, DType::Q8_0, DType::Q4K, DType::Q6K] {
        bench.matmuls(dtype, 14336, 4096, &[1, 2, 4, 8, 16])?;
        bench.matmuls(dtype, 4096, 14336, &[1])?;
    }
    for dtype in [DType::Q4_0, DType::BF16] {
        bench.matmuls(dtype, 4096, 4096, &[256, 512, 4096])?;
    }
    bench.attention()?;
    bench.prompts()?;
    bench.latent()?;
    bench.experts()?;
    bench.sampling()?;
    Ok(bench.shares)
}

impl Bench<'_> {
    /// Seconds of a call, in the median of five series in which each call has another index.
    fn seconds(&self, num_calls: usize, mut call: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        // Kernels are loaded when they are first used.
        (0..num_calls.min(4)).try_for_each(&mut call)?;
        let mut times = Vec::new();
        for _ in 0..5 {
            times.push(self.gpu.time(|| (0..num_calls).try_for_each(&mut call))? / num_calls as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[2])
    }

    /// A line with the bandwidth and the arithmetic of a call; gives the share of the bandwidth.
    fn line(&mut self, name: &str, seconds: f64, num_bytes: f64, num_operations: f64) -> f64 {
        let share = num_bytes / seconds / self.copy_bandwidth;
        (self.report)(format!(
            "{name:44} {:9.1} µs {:7.0} GB/s {:5.1} % {:7.2} TFLOP/s",
            seconds * 1e6,
            num_bytes / seconds / 1e9,
            share * 100.0,
            num_operations / seconds / 1e12
        ));
        share
    }

    /// Matmuls of `rows` × `cols` with each number of columns of activations.
    fn matmuls(&mut self, dtype: DType, rows: usize, cols: usize, columns: &[usize]) -> Result<()> {
        let len = dtype.row_bytes(cols)? * rows;
        let num_matrices = MIN_BYTES.div_ceil(len).max(8);
        let linears: Vec<Linear> = (0..num_matrices)
            .map(|index| {
                let bytes = noise_bytes(index as u64 + 1, len);
                let weight = Matrix::from_bytes(&self.context, dtype, &bytes, rows, cols)?;
                Ok(Linear { weight, bias: None })
            })
            .collect::<Result<_>>()?;
        let norm = RmsNorm { weight: Vector::new(&self.context, noise(3, cols))?, eps: 1e-5 };
        for &num_columns in columns {
            let mut scratch = LinearScratch::new(&self.context, num_columns, cols)?;
            let x = filled(&self.context, num_columns, cols)?;
            let mut out = Buffer::new(&self.context, num_columns, rows)?;
            let num_calls = num_matrices * if num_columns > 4 { 1 } else { 4 };
            let with_norm = self.seconds(num_calls, |index| {
                let linear = [&linears[index % num_matrices]];
                norm_linear(&self.context, &mut scratch, num_columns, &x, Some(&norm), linear, &mut out)
            })?;
            let with_residual = self.seconds(num_calls, |index| {
                let linear = &linears[index % num_matrices];
                linear_residual(&self.context, &mut scratch, num_columns, &x, linear, &mut out)
            })?;
            let operations = 2.0 * (rows * cols * num_columns) as f64;
            for (op, seconds) in [("norm_linear", with_norm), ("linear_residual", with_residual)] {
                let name = format!("{op} {dtype} {rows}×{cols}, {num_columns} columns");
                let share = self.line(&name, seconds, len as f64, operations);
                if num_columns == 1 && matches!(dtype, DType::Q4_0 | DType::F16) {
                    self.shares.push((name, share));
                }
            }
        }
        Ok(())
    }

    /// A token for one row of a large vocabulary.
    fn sampling(&mut self) -> Result<()> {
        const VOCAB_SIZE: usize = 151_936;
        const NUM_CALLS: usize = 12;
        // Near a normal distribution, with a standard deviation of 2.5.
        let uniform = noise(5, 4 * VOCAB_SIZE);
        let logits: Vec<f32> = uniform.chunks_exact(4).map(|four| four.iter().sum::<f32>() * 2.17).collect();
        for (name, top_k, top_p) in [("all", 0, 1.0), ("top-k 40", 40, 1.0), ("top-p 0.9", 0, 0.9)] {
            // Sampling changes its logits.
            let rows = (0..4 + 5 * NUM_CALLS)
                .map(|_| {
                    let mut row = Buffer::new(&self.context, 1, VOCAB_SIZE)?;
                    row.write(1, |target| target.copy_from_slice(&logits))?;
                    Ok(row)
                })
                .collect::<Result<Vec<_>>>()?;
            let none = Error::internal("the device has no sampler");
            let mut sampler = DeviceSampler::new(&self.context)?.ok_or(none)?;
            let params = SampleParams { top_k, top_p, ..SampleParams::plain() };
            sampler.begin(&self.context, std::iter::once(params), rows.len())?;
            let mut next = rows.iter();
            let seconds = self.seconds(NUM_CALLS, |_| match next.next() {
                Some(row) => sampler.launch(&self.context, row),
                None => Err(Error::internal("more calls than rows")),
            })?;
            let name = format!("sampling of {VOCAB_SIZE} tokens, {name}");
            self.line(&name, seconds, (4 * VOCAB_SIZE) as f64, 0.0);
        }
        Ok(())
    }
}

/// A step that computes the tokens from `first` to `end` of some of this many sequences, whose blocks are interleaved.
fn step(sequences: &[usize], num_sequences: usize, first: usize, end: usize) -> AttentionMetadata {
    let mut metadata = AttentionMetadata { block_size: BLOCK_SIZE, ..Default::default() };
    metadata.clear();
    for sequence in sequences {
        let block = |index: usize| index * num_sequences + sequence;
        let slots = (first..end).map(|at| block(at / BLOCK_SIZE) * BLOCK_SIZE + at % BLOCK_SIZE);
        metadata.slot_mapping.extend(slots);
        // Over latent rows, long chunks are of prompts.
        let num_expanded = if end - first >= EXPANDED_GROUP { end } else { 0 };
        metadata.push(first..end, num_expanded, RowMode::of(end - first), |index| block(index) as u32);
    }
    metadata
}

fn filled(context: &Context, rows: usize, width: usize) -> Result<Buffer> {
    let mut buffer = Buffer::new(context, rows, width)?;
    let values = noise(7, rows * width);
    buffer.write(rows, |target| target.copy_from_slice(&values))?;
    Ok(buffer)
}

/// A sequence of bits without a pattern.
fn bits(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    })
}

/// Values from -1 to 1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    bits(seed).take(len).map(|bits| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// Bytes in which no scale is infinite or no number, whatever the format.
fn noise_bytes(seed: u64, len: usize) -> Vec<u8> {
    let words = bits(seed).take(len.div_ceil(8));
    let mut bytes: Vec<u8> = words.flat_map(|bits| (bits & 0x3F3F_3F3F_3F3F_3F3F).to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}
