//! The kernels' assumptions about a GPU and its compiler. These checks come first: if one of them fails, the GPU
//! differs from those that the kernels were written for, and that explains later failures.

use half::f16;

use super::oracle::{buffer, matrix, noise, rms_norm};
use super::{Check, Report};
use crate::Result;
use crate::ops::gpu::{KernelLimits, Probe};
use crate::ops::{Buffer, Context, LinearScratch, kernel_limits, norm_logits, probe};

/// The way out on a GPU that differs.
const WAY_OUT: &str = "the kernels are wrong on this GPU; --kernels reference computes without them";

pub(super) fn run(context: &Context, report: &mut dyn Report) {
    let probes: [(&str, Probed); 6] = [
        ("halves as floats", half_to_float),
        ("floats as halves", float_to_half),
        ("matrices of halves", matrices),
        ("cells of matrices", cells),
        ("powers and gates", functions),
        ("rows by themselves and with others", batches),
    ];
    for (name, probe) in probes {
        let name = format!("probe: {name}");
        if !report.wants(&name) {
            continue;
        }
        match probe(context) {
            Ok(None) => {}
            Ok(Some(Outcome { num_values, first })) => report.hear(Check {
                name,
                passed: first.is_none(),
                detail: match first {
                    None => format!("{num_values} values are right"),
                    Some(first) => format!("{first}; {WAY_OUT}"),
                },
            }),
            Err(error) => report.hear(Check::failed(name, &error)),
        }
    }
    match kernel_limits(context, &mut |kernel| report.wants(&limits_of(kernel))) {
        Ok(limits) => limits.iter().for_each(|limits| report.hear(check_limits(limits))),
        Err(error) => report.hear(Check::failed("probe: limits of kernels".to_owned(), &error)),
    }
}

/// Runs a probe on a device; none if the device has no probes.
type Probed = fn(&Context) -> Result<Option<Outcome>>;

/// How many values were tried, and the first that is not as it should be.
struct Outcome {
    num_values: usize,
    first: Option<String>,
}

/// Compares the results for some words with the expected ones; none on a device without these kernels.
fn compare(
    context: &Context,
    function: Probe,
    words: &[u32],
    describe: impl Fn(u32, u32) -> Option<String>,
) -> Result<Option<Outcome>> {
    let Some(results) = probe(context, function, words)? else { return Ok(None) };
    let first = words.iter().zip(results).find_map(|(word, result)| describe(*word, result));
    Ok(Some(Outcome { num_values: words.len(), first }))
}

/// All halves that are numbers, the high bits of a word anything.
fn all_halves() -> Vec<u32> {
    (0..=u32::from(u16::MAX))
        .filter(|bits| f16::from_bits(*bits as u16).is_finite())
        .map(|bits| bits | 0xABCD_0000)
        .collect()
}

fn low_half(word: u32) -> f16 {
    f16::from_bits(word as u16)
}

/// The difference between a number and the expected one, if it matters.
fn differs(what: &str, actual: f32, expected: f32) -> Option<String> {
    let flushed =
        if actual == 0.0 && expected != 0.0 { ", as if it were too small to be a number" } else { "" };
    // Zeros of either sign are equal; NaN equals nothing.
    (actual != expected).then(|| format!("{what} is {actual:e} and not {expected:e}{flushed}"))
}

fn half_to_float(context: &Context) -> Result<Option<Outcome>> {
    compare(context, Probe::HalfToFloat, &all_halves(), |word, result| {
        let what = format!("the half {:#06x} as a float", word as u16);
        differs(&what, f32::from_bits(result), low_half(word).to_f32())
    })
}

fn float_to_half(context: &Context) -> Result<Option<Outcome>> {
    // Each half, and a value at a third of the distance to the next one.
    let words: Vec<u32> = all_halves()
        .into_iter()
        .flat_map(|word| {
            let exact = low_half(word).to_f32();
            [exact, exact * (1.0 + 1.0 / 3072.0)].map(f32::to_bits)
        })
        .filter(|bits| f16::from_f32(f32::from_bits(*bits)).is_finite())
        .collect();
    compare(context, Probe::FloatToHalf, &words, |word, result| {
        let value = f32::from_bits(word);
        differs(&format!("{value:e} as a half"), low_half(result).to_f32(), f16::from_f32(value).to_f32())
    })
}

fn matrices(context: &Context) -> Result<Option<Outcome>> {
    let words: Vec<u32> = (0..1024).flat_map(|bits| [bits, bits | 0x8000]).collect();
    compare(context, Probe::Matrices, &words, |word, result| {
        let what = format!("1024 times the half {:#06x} in a matrix", word as u16);
        differs(&what, f32::from_bits(result), 1024.0 * low_half(word).to_f32())
    })
}

/// Apple does not document which values of a matrix a lane has.
fn cells(context: &Context) -> Result<Option<Outcome>> {
    let words: Vec<u32> = (0..128).map(|cell| (cell as f32).to_bits()).collect();
    compare(context, Probe::Cells, &words, |word, result| {
        let what = format!("cell {} of a matrix", f32::from_bits(word));
        differs(&what, f32::from_bits(result), f32::from_bits(word))
    })
}

/// Values of functions where fast arithmetic may go wrong: far from zero, and where one has to be exact.
fn functions(context: &Context) -> Result<Option<Outcome>> {
    const CASES: [(Probe, f32, f32); 12] = [
        (Probe::Exp2, 0.0, 1.0),
        (Probe::Exp2, -1.0, 0.5),
        (Probe::Exp2, -1000.0, 0.0),
        (Probe::Exp2, -1e30, 0.0),
        (Probe::Exp, 0.0, 1.0),
        (Probe::Exp, -1000.0, 0.0),
        (Probe::Exp, -1e30, 0.0),
        (Probe::Silu, 0.0, 0.0),
        (Probe::Silu, -1000.0, 0.0),
        (Probe::Silu, -100.0, 0.0),
        (Probe::Silu, 100.0, 100.0),
        (Probe::Silu, 1e4, 1e4),
    ];
    for (function, x, expected) in CASES {
        let outcome = compare(context, function, &[x.to_bits()], |_, result| {
            let result = f32::from_bits(result);
            // The weight of the most likely token, and of a segment by itself, is 1.
            let limit = if expected == 1.0 { 0.0 } else { 1e-30 + 1e-5 * expected };
            let is_right = (result - expected).abs() <= limit;
            (!is_right).then(|| format!("{function:?} of {x:e} is {result:e} and not {expected:e}"))
        })?;
        let is_right = matches!(outcome, Some(Outcome { first: None, .. }));
        if !is_right {
            return Ok(outcome);
        }
    }
    Ok(Some(Outcome { num_values: CASES.len(), first: None }))
}

/// A row of a matmul has the same bits in every batch, although a compiler with fast arithmetic may compile the kernel
/// of each number of rows differently.
fn batches(context: &Context) -> Result<Option<Outcome>> {
    const ROWS: usize = 70;
    const MOST: usize = 37;
    if probe(context, Probe::Exp, &[0])?.is_none() {
        return Ok(None);
    }
    let mut num_values = 0;
    for dtype in context.own_types() {
        let cols = 3 * dtype.block_len().max(64);
        let weights = matrix(context, dtype, ROWS, cols, 1)?;
        let norm = rms_norm(context, 2, cols, 1e-5)?;
        let x = noise(3, MOST * cols);
        let mut scratch = LinearScratch::new(context, MOST, cols)?;
        let mut matmul = |num_rows: usize| -> Result<Vec<f32>> {
            let x = buffer(context, &x[..num_rows * cols], cols, num_rows)?;
            let mut out = Buffer::new(context, num_rows, ROWS)?;
            norm_logits(context, &mut scratch, num_rows, &x, &norm, &weights, &mut out)?;
            out.read(num_rows, <[f32]>::to_vec)
        };
        // One order of additions for few rows, and one for many.
        for counts in [&[4, 1, 2, 3][..], &[MOST, 5, 8, 9, 16, 17]] {
            let together = matmul(counts[0])?;
            for &num_rows in &counts[1..] {
                let alone = matmul(num_rows)?;
                let differs = (0..alone.len()).find(|&index| alone[index] != together[index]);
                if let Some(index) = differs {
                    let (row, column) = (index / ROWS, index % ROWS);
                    let first = format!(
                        "{dtype}: value {column} of row {row} is {:e} in a matmul of {num_rows} rows and {:e} in \
                         one of {}",
                        alone[index], together[index], counts[0]
                    );
                    return Ok(Some(Outcome { num_values, first: Some(first) }));
                }
                num_values += alone.len();
            }
        }
    }
    Ok(Some(Outcome { num_values, first: None }))
}

/// The name of the check of a kernel's limits.
fn limits_of(kernel: &str) -> String {
    format!("limits of {kernel}")
}

fn check_limits(kernel: &KernelLimits) -> Check {
    let KernelLimits { name, limits, num_threads } = kernel;
    let numbers = format!(
        "{} threads in a group where it takes {num_threads}, simdgroups of {}, {} of {} bytes of threadgroup memory \
         before its launch",
        limits.max_threads, limits.simd_width, limits.static_memory, limits.max_memory
    );
    let passed = limits.max_threads >= *num_threads;
    let detail = if passed { numbers } else { format!("{numbers}; {WAY_OUT}") };
    Check { name: limits_of(name), detail, passed }
}
