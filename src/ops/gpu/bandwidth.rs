//! The bandwidth of a GPU's memory, measured by a copy.

use std::sync::Arc;

use super::backend::GpuBackend;
use crate::ops::bandwidth::{Bandwidth, MemoryBandwidth};

impl Bandwidth for Arc<GpuBackend> {
    fn bandwidth(&self) -> Option<MemoryBandwidth> {
        // Results are worth reporting without this number, too.
        let bytes_per_second = self.device().measure_copy_bandwidth().ok().flatten()?;
        Some(MemoryBandwidth { bytes_per_second, access: "copying" })
    }
}
