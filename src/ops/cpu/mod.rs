//! CPU kernels. Those of products, and what all kernels stand on, are in the crate `tinyvllm-kernels` (`src/kernels`).

pub(crate) mod attention;
pub(crate) mod latent;
pub(crate) mod rope;
pub(crate) mod rows;

pub use tinyvllm_kernels::{matmul, pool, simd};

pub use pool::ThreadPool;
pub use simd::CpuLevel;
