//! Events of named blocks, for subscribers that follow the prefixes cached here.

use super::BlockHash;

/// Where a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Medium {
    /// In the cache, whose memory is the device's.
    Cache,
    /// In memory of the host, from where it has to be copied.
    Host,
    /// In a file.
    Disk,
}

/// A block got a name or lost it. Names are the low 64 bits of [`BlockHash`].
///
/// Blocks of requests with a salt are never reported: a subscriber sees a block's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheEvent {
    /// A full block can be found from now on.
    Stored {
        /// Its name.
        hash: u64,
        /// The name of the block before it; none if it is the first of a prompt.
        parent: Option<u64>,
        /// The tokens of the block.
        token_ids: Vec<u32>,
        /// Where.
        medium: Medium,
    },
    /// A block is no longer there: in the cache, it was given to another sequence.
    Removed {
        /// Its name.
        hash: u64,
        /// Where.
        medium: Medium,
    },
}

impl CacheEvent {
    /// A block without a salt is to be found in `medium`. The first one of a prompt has no parent.
    #[must_use]
    pub fn stored(hash: BlockHash, parent: Option<BlockHash>, token_ids: Vec<u32>, medium: Medium) -> Self {
        Self::Stored { hash: hash.low_bits(), parent: parent.map(BlockHash::low_bits), token_ids, medium }
    }

    /// It no longer is.
    #[must_use]
    pub fn removed(hash: BlockHash, medium: Medium) -> Self {
        Self::Removed { hash: hash.low_bits(), medium }
    }
}

/// The events since the last call.
#[derive(Debug)]
pub(super) struct CacheLog {
    /// The name before the first block of a prompt without a salt.
    root: BlockHash,
    events: Vec<CacheEvent>,
}

impl CacheLog {
    pub(super) fn new(root: BlockHash) -> Self {
        Self { root, events: Vec::new() }
    }

    pub(super) fn stored(&mut self, hash: BlockHash, parent: BlockHash, token_ids: &[u32]) {
        if !hash.is_private() {
            let parent = (parent != self.root).then_some(parent);
            self.events.push(CacheEvent::stored(hash, parent, token_ids.to_vec(), Medium::Cache));
        }
    }

    pub(super) fn removed(&mut self, hash: BlockHash) {
        if !hash.is_private() {
            self.events.push(CacheEvent::removed(hash, Medium::Cache));
        }
    }

    pub(super) fn take(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }
}
