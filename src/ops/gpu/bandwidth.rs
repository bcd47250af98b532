//! How fast a GPU copies its memory.

use std::sync::Arc;

use super::backend::GpuBackend;
use crate::ops::bandwidth::{Bandwidth, MemoryBandwidth};

impl Bandwidth for Arc<GpuBackend> {
    fn bandwidth(&self) -> Option<MemoryBandwidth> {
        // What is measured against it is worth telling without it, too.
        let bytes_per_second = self.device().measure_copy_bandwidth().ok().flatten()?;
        Some(MemoryBandwidth { bytes_per_second, access: "copying" })
    }
}
