//! Apple GPUs: the kernels of `metal_kernels` and everything that launches them.

#[cfg(all(target_os = "macos", feature = "metal"))]
mod apple;
mod attention;
mod backend;
#[cfg(any(test, all(target_os = "macos", feature = "metal")))]
mod chip;
mod cost;
mod dry_run;
mod expanded;
mod experts;
mod gpu;
mod inputs;
mod kernel;
mod latent;
mod layout;
mod library;
mod linear;
mod matrix;
mod probe;
mod rows;
mod sampling;
mod tuning;

#[cfg(all(target_os = "macos", feature = "metal"))]
pub use apple::AppleGpu;
pub use gpu::{
    Access, Binding, ChipClass, Constant, Gpu, GpuBuffer, GpuMemory, Launch, Pipeline, PipelineLimits,
    Placement, Ticket,
};
pub use kernel::LIBRARIES;
pub use library::Library;
pub use probe::{KernelLimits, Probe};

pub(crate) use attention::{AttentionSizes, MetalAttention, Pools, Rope, rope_kv_write};
pub(crate) use backend::MetalBackend;
pub(crate) use expanded::{ExpandedOperands, MetalExpandedAttention};
pub(crate) use experts::{MetalRouting, RouterForm, RoutingSizes};
pub(crate) use inputs::{InputLimits, MetalInputs, PrefillForm};
pub(crate) use latent::{LatentRows, LatentSizes, LatentWrite, MetalLatentAttention, latent_kv_write};
pub(crate) use linear::{Operands, Part, Stacked, matmul, silu_mul, swiglu};
pub(crate) use matrix::{MetalMatrix, MetalStack};
pub(crate) use probe::{kernel_limits, probe};
pub(crate) use rows::{copy_block, embed, gather_rows};
pub(crate) use sampling::MetalSampler;
pub(crate) use tuning::Tuning;
