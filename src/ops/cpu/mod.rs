//! CPU kernels.

pub(crate) mod attention;
pub(crate) mod latent;
pub mod matmul;
pub mod pool;
pub(crate) mod rope;
pub(crate) mod rows;
pub mod simd;

pub use pool::ThreadPool;
pub use simd::CpuLevel;
