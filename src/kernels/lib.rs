//! The CPU kernels, for each instruction set: matmuls with weights of every type, attention, and their foundations.
//!
//! They are a separate crate because every build has to optimise them. Developers' builds compile the crate above,
//! which does no work per weight or per cached value, with its own settings. No kernel depends on models, devices or
//! tensors: a matrix is its rows of blocks, a cache is its pools.

pub mod attention;
mod attention_metadata;
pub mod blocks;
mod dtype;
mod error;
mod file_type;
pub mod fp8;
pub mod gated;
pub mod latent_row;
pub mod matmul;
mod memory;
pub mod noise;
pub mod norm;
pub mod paged_cache;
pub mod pool;
pub mod q8_0;
pub mod range;
pub mod rope;
pub mod rows;
pub mod simd;

pub use attention_metadata::{AttentionMetadata, EXPANDED_GROUP, RowMode};
pub use dtype::DType;
pub use error::{Error, ErrorKind, Result, quoted, shortened, visible};
pub use file_type::{FileType, RepackedType};
pub use memory::{AlignedFloats, keep_little_free_memory, keep_one_heap, return_free_memory};
pub use pool::ThreadPool;
pub use simd::CpuLevel;
