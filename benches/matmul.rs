//! Weight matrices of every type: GB/s at one row, where memory is the limit, and Gop/s at many.
//!
//! `cargo bench --bench matmul -- [type …] [level=avx2] [threads=2] [rows=1,8,512] [shape=5632x2048] [total=256]`
//!
//! The matrices of a type take `total` MB together and are used in turn, so that weights come from memory
//! and not from a cache; `shape=256x2048 total=0` shows what the arithmetic alone could do. Every figure is
//! of the fastest tenth of the calls; `pack` is the mean and counts the bytes of the file.
#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::time::Instant;

use tinyvllm::ops::cpu::AlignedFloats;
use tinyvllm::ops::cpu::matmul::{ActivationFormats, Activations, Mode, PackedMatrix, Projection, matmul};
use tinyvllm::ops::cpu::pool::ThreadPool;
use tinyvllm::ops::cpu::simd::CpuLevel;
use tinyvllm::weights::DType;

/// What is measured.
struct Setup {
    outputs: usize,
    cols: usize,
    total_bytes: usize,
    batches: Vec<usize>,
    pool: ThreadPool,
    level: CpuLevel,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let option = |name: &str| {
        arguments
            .iter()
            .find_map(|argument| argument.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
    };
    let levels = CpuLevel::available();
    let level = option("level")
        .and_then(|name| levels.iter().copied().find(|level| level.name() == name))
        .unwrap_or_else(CpuLevel::detect);
    let threads = option("threads").and_then(|threads| threads.parse().ok());
    let pool = ThreadPool::new(threads.unwrap_or_else(ThreadPool::default_num_threads));
    let batches: Vec<usize> = option("rows")
        .unwrap_or_else(|| "1,2,4,8,16,512".to_owned())
        .split(',')
        .filter_map(|rows| rows.parse().ok())
        .collect();
    let (outputs, cols) = option("shape")
        .and_then(|shape| {
            let (outputs, cols) = shape.split_once('x')?;
            Some((outputs.parse().ok()?, cols.parse().ok()?))
        })
        .unwrap_or((5632, 2048));
    let total_bytes = option("total").and_then(|total| total.parse().ok()).unwrap_or(256_usize) << 20;
    let setup = Setup { outputs, cols, total_bytes, batches, pool, level };
    let named: Vec<&String> = arguments.iter().filter(|argument| !argument.contains('=')).collect();

    println!("{outputs} × {cols}, {}, {} threads", level.name(), setup.pool.num_threads());
    for dtype in DType::ALL {
        if named.is_empty() || named.iter().any(|name| name.eq_ignore_ascii_case(dtype.name())) {
            measure(dtype, &setup);
        }
    }
}

fn measure(dtype: DType, setup: &Setup) {
    let Setup { outputs, cols, total_bytes, ref batches, ref pool, level } = *setup;
    let num_bytes = outputs * dtype.row_bytes(cols).unwrap_or(0);
    // Blocks of ones: the values do not change the time, as long as none is subnormal.
    let file = vec![0x3c_u8; num_bytes];
    let num_matrices = total_bytes.div_ceil(num_bytes).max(1);
    let start = Instant::now();
    let matrices: Vec<PackedMatrix> = (0..num_matrices)
        .filter_map(|_| PackedMatrix::pack(dtype, &file, outputs, cols, pool, level).ok())
        .collect();
    let total = (num_matrices * num_bytes) as f64;
    print!("{:5} pack {:5.1} GB/s", dtype.name(), total / start.elapsed().as_secs_f64() / 1e9);
    for &rows in batches {
        let x: Vec<f32> = (0..rows * cols).map(|at| (at as f32 * 0.37).sin()).collect();
        let mut activations = Activations::new();
        let mut out = AlignedFloats::zeroed(rows * outputs);
        let used = if rows > 64 { &matrices[..matrices.len().min(2)] } else { &matrices[..] };
        let (mut times, mut prepare_times) = (Vec::new(), Vec::new());
        for _ in 0..(200 / used.len()).clamp(5, 50) {
            let start = Instant::now();
            activations.prepare(
                &x,
                cols,
                rows,
                cols,
                None,
                ActivationFormats::of([dtype], level),
                pool,
                level,
            );
            prepare_times.push(start.elapsed().as_secs_f64());
            for matrix in used {
                let start = Instant::now();
                matmul(
                    &activations,
                    &[Projection::new(matrix, 0)],
                    &mut out,
                    outputs,
                    Mode::Store,
                    pool,
                    level,
                );
                times.push(start.elapsed().as_secs_f64());
            }
        }
        let (best, prepare) = (fastest_tenth(times), fastest_tenth(prepare_times));
        let gigabytes = num_bytes as f64 / best / 1e9;
        let gigaops = 2.0 * (rows * outputs * cols) as f64 / best / 1e9;
        print!(" | m={rows}: {gigabytes:.1} GB/s, {gigaops:.0} Gop/s, prepare {:.0} us", prepare * 1e6);
    }
    println!();
}

/// The time that one call in ten stays below: what the machine does while nothing else runs on it.
fn fastest_tenth(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 10]
}
