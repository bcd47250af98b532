//! GPUs: ops on the kernels of `metal_kernels`, a file each, on GPUs of Apple and of NVIDIA.
//!
//! Ops use [`matmul`] and attention, which know kernels; those use [`backend`], which launches them; it uses
//! [`device`], which knows no kernel.

mod attention;
mod backend;
mod bandwidth;
mod buffer;
mod device;
mod dry_run;
mod embed;
mod expanded_attention;
mod experts;
mod gated;
mod gather_rows;
mod heads_linear;
mod kernel;
mod kv_cache;
mod latent_kv_write;
mod linear;
mod matmul;
mod norm_part;
mod norm_residual;
mod paged_attention;
mod probe;
mod rope_attention;
mod rope_kv_write;
mod routing;
mod sample;
mod step_inputs;
mod tuning;
mod weights;

use std::sync::Arc;

use crate::ops::device::{Device, device_access};

use self::device::cost;

#[cfg(all(target_os = "macos", feature = "metal"))]
pub use device::AppleGpu;
pub use device::{
    Access, Binding, ChipClass, Constant, Gpu, GpuBuffer, GpuMemory, Launch, Library, Pipeline,
    PipelineLimits, Placement, Ticket,
};
#[cfg(target_os = "linux")]
pub use device::{CudaGpu, compile_messages};
pub use kernel::{CUDA_LIBRARIES, LIBRARIES};
pub use probe::{KernelLimits, Probe};

pub(crate) use backend::GpuBackend;
pub(crate) use probe::{kernel_limits, probe};
pub(crate) use tuning::Tuning;

impl Device for Arc<GpuBackend> {
    type Buffer = buffer::GpuRows;
    type Matrix = matmul::GpuMatrix;
    type Stack = weights::GpuStacks;
    type Vector = GpuBuffer;
    type LinearScratch = linear::LinearScratch;
    type Routing = routing::GpuRouting;
    type Pools = kv_cache::GpuPools;
    type Inputs = step_inputs::GpuInputs;
    type Sampler = sample::GpuSampler;
    type Table = rope_kv_write::GpuTable;
    type AttentionScratch = paged_attention::AttentionScratch;
    type ExpandedScratch = attention::GpuExpandedAttention;

    device_access!(Gpu);
}
