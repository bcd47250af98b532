//! CPU kernels.

pub mod pool;
pub mod simd;
