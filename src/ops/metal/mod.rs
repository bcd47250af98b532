//! Apple GPUs: the kernels of `metal_kernels` and everything that launches them.

#[cfg(all(target_os = "macos", feature = "metal"))]
mod apple;
#[cfg(any(test, all(target_os = "macos", feature = "metal")))]
mod chip;
mod gpu;
mod library;

#[cfg(all(target_os = "macos", feature = "metal"))]
pub use apple::AppleGpu;
pub use gpu::{
    Access, Binding, ChipClass, Constant, Gpu, GpuBuffer, GpuMemory, Launch, Pipeline, Placement, Ticket,
};
pub use library::Library;
