//! Norms of the output of a layer's half.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable, bytes_of};

use super::Binding;
use super::backend::{Flags, GpuBackend, Work};
use super::cost::Cost;
use super::kernel::Kernel;
use super::linear::norm_of;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::norm_residual::NormResidual;
use crate::ops::weights::RmsNorm;

/// `NormResidualArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct NormResidualArgs {
    width: u32,
    inverse_width: f32,
    eps: f32,
}

/// Simdgroups that share a row.
pub(super) const SIMDGROUPS: usize = 8;

impl NormResidual for Arc<GpuBackend> {
    fn norm_residual(&self, num_rows: usize, y: &Buffer, norm: &RmsNorm, x: &mut Buffer) -> Result<()> {
        let (width, (weight, eps)) = (x.width(), norm_of(self, norm)?);
        let args = NormResidualArgs { width: width as u32, inverse_width: 1.0 / width as f32, eps };
        let (y, x) = (y.held().on(self)?.values()?, x.held().on(self)?.values()?);
        self.launch(
            Kernel::NormResidual,
            Flags::default(),
            Work {
                args: bytes_of(&args),
                buffers: &[Binding::read(y), weight, Binding::read_write(x)],
                threadgroup_memory: 4 * SIMDGROUPS,
                grid: [num_rows, 1, 1],
                num_threads: 32 * SIMDGROUPS,
                // Twice in, and out.
                cost: Cost::bytes(3 * 4 * num_rows * width),
            },
        )
    }
}
