//! The ownership of the KV cache's blocks.
//!
//! The cache is divided into blocks of `block_size` token slots. [`BlockPool`] counts references and keeps the unused
//! blocks in the order of their reuse; [`PrefixCache`] finds blocks whose content is already computed. This module does
//! not depend on tensors, devices or time: `ops::KvCache` has the contents, under the same block numbers. Layers that
//! attend to a window only may have fewer blocks; [`BlockPool`] then knows which block has memory there.
//!
//! Invariant: a block is in use (reference count above 0) or in the free list, never both. A free block
//! keeps its published content until it is allocated again.

mod block_pool;
mod log;
mod prefix_cache;
mod window_slots;

pub use block_pool::{BlockId, BlockPool};
pub use log::{CacheEvent, Medium};
pub use prefix_cache::{BlockHash, BlockHasher, BlockMiss, PrefixCache};
