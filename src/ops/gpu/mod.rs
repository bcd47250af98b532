//! GPUs: the kernels of `metal_kernels` and everything that launches them, on those of Apple and of NVIDIA.

#[cfg(all(target_os = "macos", feature = "metal"))]
mod apple;
mod attention;
mod backend;
#[cfg(any(test, all(target_os = "macos", feature = "metal")))]
mod chip;
mod cost;
#[cfg(target_os = "linux")]
mod cuda;
mod decode_attention;
mod decode_latent_attention;
mod device;
mod dry_run;
mod expanded;
mod experts;
mod inputs;
mod kernel;
mod latent;
mod layout;
mod library;
mod linear;
mod matrix;
mod prefill_attention;
mod probe;
mod rounded;
mod rows;
mod sampling;
mod tensor_cores;
mod tiles;
mod tuning;
mod unpack;

#[cfg(all(target_os = "macos", feature = "metal"))]
pub use apple::AppleGpu;
#[cfg(target_os = "linux")]
pub use cuda::{CudaGpu, compile_messages};
pub use device::{
    Access, Binding, ChipClass, Constant, Gpu, GpuBuffer, GpuMemory, Launch, Pipeline, PipelineLimits,
    Placement, Ticket,
};
pub use kernel::{CUDA_LIBRARIES, LIBRARIES};
pub use library::Library;
pub use probe::{KernelLimits, Probe};

pub(crate) use attention::{AttentionSizes, GpuAttention, Pools, Rope, rope_kv_write};
pub(crate) use backend::GpuBackend;
pub(crate) use expanded::{ExpandedOperands, GpuExpandedAttention};
pub(crate) use experts::{GpuRouting, RouterForm, RoutingSizes};
pub(crate) use inputs::{GpuInputs, InputLimits, PrefillForm};
pub(crate) use latent::{GpuLatentAttention, LatentRows, LatentSizes, LatentWrite, latent_kv_write};
pub(crate) use linear::{Operands, Part, Stacked, matmul, silu_mul, swiglu};
pub(crate) use matrix::{GpuMatrix, GpuStack};
pub(crate) use probe::{kernel_limits, probe};
pub(crate) use rounded::Rounded;
pub(crate) use rows::{copy_block, embed, gather_rows};
pub(crate) use sampling::GpuSampler;
pub(crate) use tuning::Tuning;
