//! CPU kernels.

pub mod matmul;
pub mod pool;
pub mod simd;
