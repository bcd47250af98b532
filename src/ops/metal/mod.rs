//! Apple GPUs: the kernels of `metal_kernels` and everything that launches them.

mod gpu;
mod library;

pub use gpu::{
    Access, Binding, ChipClass, Constant, Gpu, GpuBuffer, GpuMemory, Launch, Pipeline, Placement, Ticket,
};
pub use library::Library;
