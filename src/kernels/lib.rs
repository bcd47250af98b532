//! The CPU kernels that take long to compile: products with weights of every type, for each instruction set, and what
//! they stand on.
//!
//! They are a crate of their own so that nobody compiles them twice: neither the tests of the crate above nor a change
//! there. Nothing here knows models, caches or tensors; a matrix is its rows of blocks.

mod dtype;
mod error;
pub mod matmul;
pub mod pool;
pub mod simd;

pub use dtype::DType;
pub use error::{Error, ErrorKind, Result};
