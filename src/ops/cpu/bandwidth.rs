//! The bandwidth of the threads' reads.

use super::CpuBackend;
use crate::ops::bandwidth::{Bandwidth, DURATION, MemoryBandwidth, NUM_BYTES, best_pass};

impl Bandwidth for CpuBackend {
    fn bandwidth(&self) -> Option<MemoryBandwidth> {
        let bytes_per_second = best_pass(&self.pool, self.level, NUM_BYTES, DURATION)?;
        Some(MemoryBandwidth { bytes_per_second, access: "reading" })
    }
}
