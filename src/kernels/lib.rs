//! The CPU kernels: products with weights of every type and attention, for each instruction set, and what they stand on.
//!
//! They are a crate of their own because they are what has to be optimised in every build; the crate above, where
//! nothing is done for each weight or each cached value, is compiled as it is by developers' builds. Nothing here knows
//! models, devices or tensors: a matrix is its rows of blocks, a cache is its pools.

pub mod attention;
mod attention_metadata;
pub mod blocks;
mod dtype;
mod error;
mod file_type;
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

pub use attention_metadata::{AttentionMetadata, EXPANDED_GROUP, RowForm};
pub use dtype::DType;
pub use error::{Error, ErrorKind, Result, quoted, shortened, visible};
pub use file_type::{FileType, RepackedType};
pub use memory::{AlignedFloats, keep_little_free_memory, keep_one_heap, return_free_memory};
pub use pool::ThreadPool;
pub use simd::CpuLevel;
