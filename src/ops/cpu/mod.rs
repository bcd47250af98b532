//! The CPU: ops on the kernels of `tinyvllm-kernels`, a file each.

mod bandwidth;
mod batches;
mod buffer;
mod embed;
mod expanded_attention;
mod experts;
mod gated;
mod gather_rows;
mod heads_linear;
mod kv_cache;
mod latent_kv_write;
mod linear;
mod norm_part;
mod norm_residual;
mod paged_attention;
mod rope_attention;
mod rope_kv_write;
mod sample;
mod step_inputs;
mod weights;

use std::convert::Infallible;

use crate::ops::device::{Device, device_access};
use crate::ops::experts::HostRouting;

pub use tinyvllm_kernels::{
    AlignedFloats, AttentionMetadata, CpuLevel, EXPANDED_GROUP, RowMode, ThreadPool, attention, blocks, fp8,
    latent_row, matmul, noise, paged_cache, pool, range, rope, rows, simd,
};

use self::linear::LinearScratch;
use self::matmul::PackedMatrix;
use self::weights::CpuStack;

/// The resources of CPU kernels.
#[derive(Debug)]
pub struct CpuBackend {
    /// The threads.
    pub pool: ThreadPool,
    /// The instruction set.
    pub level: CpuLevel,
}

impl Device for CpuBackend {
    type Buffer = AlignedFloats;
    type Matrix = PackedMatrix;
    type Stack = CpuStack;
    /// The host's own.
    type Vector = ();
    type LinearScratch = LinearScratch;
    type Routing = HostRouting;
    type Pools = kv_cache::CpuPools;
    /// The host's own.
    type Inputs = ();
    type Sampler = Infallible;
    type Table = ();
    type AttentionScratch = attention::AttentionScratch;
    type ExpandedScratch = Box<attention::expanded::ExpandedScratch>;

    device_access!(Cpu);
}
