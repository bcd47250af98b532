//! How fast memory is: what the speed of generation is measured against.

use std::hint::black_box;
use std::time::Instant;

use super::Context;
use super::context::Backend;
use crate::ops::cpu::pool::ThreadPool;

/// Bytes that are read in a pass: more than the last-level cache of any machine this is likely to run
/// on, so that a pass starts with none of its data cached.
const NUM_BYTES: usize = 512 << 20;

/// Bytes of a task: long enough for the prefetchers, short enough to spread evenly.
const TASK_BYTES: usize = 2 << 20;

/// Passes of which the best counts: anything else on the machine can only make one slower.
const NUM_PASSES: usize = 8;

/// How fast a memory is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryBandwidth {
    /// As measured.
    pub bytes_per_second: f64,
    /// What was measured: `reading`, or `copying`, which counts what is read and what is written.
    pub access: &'static str,
}

/// The measured bandwidth of the memory that the context computes in: on the CPU what all of its threads read, on a GPU
/// what a copy reads and writes.
///
/// Takes half a gibibyte of that memory and some tenths of a second.
///
/// None if there is no such measurement for what computes, or a GPU has no memory left for it.
#[must_use]
pub fn measure_bandwidth(context: &Context) -> Option<MemoryBandwidth> {
    match context.backend() {
        Backend::Cpu(cpu) => {
            let bytes_per_second = best_pass(&cpu.pool, NUM_BYTES, NUM_PASSES);
            Some(MemoryBandwidth { bytes_per_second, access: "reading" })
        }
        // What is measured against it is worth telling without it, too.
        Backend::Gpu(gpu) => {
            let bytes_per_second = gpu.device().measure_copy_bandwidth().ok().flatten()?;
            Some(MemoryBandwidth { bytes_per_second, access: "copying" })
        }
        Backend::Reference(_) => None,
    }
}

fn best_pass(pool: &ThreadPool, num_bytes: usize, num_passes: usize) -> f64 {
    // Written, because the pages of a fresh zeroed allocation may all be one and the same.
    let words: Vec<u64> = (0..num_bytes as u64 / 8).collect();
    let tasks: Vec<&[u64]> = words.chunks(TASK_BYTES / 8).collect();
    let mut best = 0.0_f64;
    for _ in 0..num_passes {
        let start = Instant::now();
        pool.run(tasks.len(), |task| {
            black_box(sum(tasks[task]));
        });
        best = best.max(num_bytes as f64 / start.elapsed().as_secs_f64());
    }
    best
}

/// Eight independent sums, so that the additions do not wait for one another.
fn sum(words: &[u64]) -> u64 {
    let (lines, rest) = words.as_chunks::<8>();
    let mut sums = [0_u64; 8];
    for line in lines {
        for (sum, word) in sums.iter_mut().zip(line) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(rest).fold(0, |all, word| all.wrapping_add(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_word() {
        let words: Vec<u64> = (0..1_003).collect();
        assert_eq!(sum(&words), 1_003 * 1_002 / 2);
    }

    #[test]
    fn a_machine_reads_faster_than_a_disk_and_slower_than_its_registers() {
        let bytes_per_second = best_pass(&ThreadPool::new(2), 32 << 20, 2);
        assert!((1e8..1e13).contains(&bytes_per_second), "{bytes_per_second}");
    }
}
