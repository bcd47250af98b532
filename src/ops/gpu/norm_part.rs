//! Norms of a range of each row.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable, bytes_of};

use super::Binding;
use super::backend::{Flags, GpuBackend, Work};
use super::cost::Cost;
use super::kernel::Kernel;
use super::linear::norm_of;
use super::norm_residual::SIMDGROUPS;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::norm_part::NormPart;
use crate::ops::weights::RmsNorm;

/// `NormPartArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct NormPartArgs {
    len: u32,
    inverse_len: f32,
    eps: f32,
    first: u32,
    width: u32,
}

impl NormPart for Arc<GpuBackend> {
    fn norm_part(&self, num_rows: usize, x: &mut Buffer, first: usize, norm: &RmsNorm) -> Result<()> {
        let (len, (weight, eps)) = (norm.weight.len(), norm_of(self, norm)?);
        let args = NormPartArgs {
            len: len as u32,
            inverse_len: 1.0 / len as f32,
            eps,
            first: first as u32,
            width: x.width() as u32,
        };
        self.launch(
            Kernel::NormPart,
            Flags::default(),
            Work {
                args: bytes_of(&args),
                buffers: &[weight, Binding::read_write(x.held().on(self)?.values()?)],
                threadgroup_memory: 4 * SIMDGROUPS,
                grid: [num_rows, 1, 1],
                num_threads: 32 * SIMDGROUPS,
                // Once in, and out.
                cost: Cost::bytes(2 * 4 * num_rows * len),
            },
        )
    }
}
