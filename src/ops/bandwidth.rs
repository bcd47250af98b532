//! How fast memory is: what the speed of generation is measured against.

use std::time::{Duration, Instant};

use crate::ops::context::Context;
use crate::ops::cpu::matmul::Stream;
use crate::ops::cpu::pool::ThreadPool;
use crate::ops::cpu::simd::CpuLevel;
use crate::ops::device::{Device, on_device};

/// Bytes that are read in a pass: more than the last-level cache of any machine this is likely to run
/// on, so that a pass starts with none of its data cached.
pub(super) const NUM_BYTES: usize = 512 << 20;

/// Passes of which the best counts, at least: anything else on the machine can only make one slower.
const NUM_PASSES: usize = 8;

/// How long passes go on. What others do to the memory of a shared machine often lasts longer than a few passes.
pub(super) const DURATION: Duration = Duration::from_millis(600);

/// How fast a memory is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryBandwidth {
    /// As measured.
    pub bytes_per_second: f64,
    /// What was measured: `reading`, or `copying`, which counts what is read and what is written.
    pub access: &'static str,
}

/// The measured bandwidth of the memory that the context computes in: on the CPU what all of its threads read, as
/// they read weights when they generate; on a GPU what a copy reads and writes.
///
/// Takes half a gibibyte of that memory and about a second.
///
/// None if there is no such measurement for what computes, or no memory left for it.
#[must_use]
pub fn measure_bandwidth(context: &Context) -> Option<MemoryBandwidth> {
    on_device!(context.backend(), |device| device.bandwidth())
}

/// What a device implements of it.
pub(crate) trait Bandwidth: Device {
    /// [`measure_bandwidth`].
    fn bandwidth(&self) -> Option<MemoryBandwidth> {
        None
    }
}

/// The best of some passes of the threads over so many bytes, in bytes per second.
pub(super) fn best_pass(
    pool: &ThreadPool,
    level: CpuLevel,
    num_bytes: usize,
    duration: Duration,
) -> Option<f64> {
    let stream = Stream::new(num_bytes, pool)?;
    let (begin, mut num_passes, mut best) = (Instant::now(), 0, 0.0_f64);
    while num_passes < NUM_PASSES || begin.elapsed() < duration {
        let start = Instant::now();
        stream.read(pool, level);
        best = best.max(stream.num_bytes() as f64 / start.elapsed().as_secs_f64());
        num_passes += 1;
    }
    Some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_reads_faster_than_a_disk_and_slower_than_its_registers() {
        let pool = ThreadPool::new(2);
        let bytes_per_second = best_pass(&pool, CpuLevel::detect(), 32 << 20, Duration::ZERO).unwrap();
        assert!((1e8..1e13).contains(&bytes_per_second), "{bytes_per_second}");
    }
}
