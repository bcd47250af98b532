//! A GPU below the ops: memory, pipelines, launches and their costs, on Apple's and on NVIDIA's. Nothing here knows an
//! op or a kernel.

#[cfg(all(target_os = "macos", feature = "metal"))]
mod apple;
#[cfg(any(test, all(target_os = "macos", feature = "metal")))]
mod chip;
pub(super) mod cost;
#[cfg(target_os = "linux")]
mod cuda;
mod interface;
mod library;

#[cfg(all(target_os = "macos", feature = "metal"))]
pub use apple::AppleGpu;
#[cfg(target_os = "linux")]
pub use cuda::{CudaGpu, compile_messages};
pub use interface::{
    Access, Binding, ChipClass, Constant, Gpu, GpuBuffer, GpuMemory, Launch, Pipeline, PipelineLimits,
    Placement, Ticket,
};
pub use library::Library;

pub(super) use interface::{THREADGROUP_UNIT, WITHOUT_KERNELS};
