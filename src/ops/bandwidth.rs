//! Memory bandwidth: the bound on the speed of generation.

use std::time::{Duration, Instant};

use crate::ops::context::Context;
use crate::ops::cpu::matmul::Stream;
use crate::ops::cpu::pool::ThreadPool;
use crate::ops::cpu::simd::CpuLevel;
use crate::ops::device::{Device, on_device};

/// Bytes of a pass: more than the last-level cache of any likely machine, so that a pass starts uncached.
pub(super) const NUM_BYTES: usize = 512 << 20;

/// Minimum passes; the fastest counts, because other work on the machine can only make one slower.
const NUM_PASSES: usize = 8;

/// The duration of all passes. Other work on a shared machine's memory often lasts longer than a few passes.
pub(super) const DURATION: Duration = Duration::from_millis(600);

/// The bandwidth of a memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryBandwidth {
    /// The measured value.
    pub bytes_per_second: f64,
    /// The kind of measurement: `reading`, or `copying`, which counts reads and writes.
    pub access: &'static str,
}

/// The measured bandwidth of the context's memory. On the CPU all of its threads read, as they read weights in decode
/// steps; on a GPU a copy reads and writes.
///
/// Takes half a gibibyte of that memory and about a second.
///
/// None if the device has no such measurement, or no memory left for it.
#[must_use]
pub fn measure_bandwidth(context: &Context) -> Option<MemoryBandwidth> {
    on_device!(context.backend(), |device| device.bandwidth())
}

/// The operation of a device.
pub(crate) trait Bandwidth: Device {
    /// [`measure_bandwidth`].
    fn bandwidth(&self) -> Option<MemoryBandwidth> {
        None
    }
}

/// The fastest of some passes of the threads over this many bytes, in bytes per second.
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
