//! What happens to named blocks, for whoever wants to know which prefixes are cached here.

use super::BlockHash;

/// A block got a name or lost it. Names are the low 64 bits of [`BlockHash`].
///
/// Blocks of requests with a salt are never told of: whoever hears of a block sees its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheEvent {
    /// A full block can be found from now on.
    Stored {
        /// Its name.
        hash: u64,
        /// The name of the block before it; none if it is the first of a prompt.
        parent: Option<u64>,
        /// Its tokens, as many as a block has.
        token_ids: Vec<u32>,
    },
    /// A block was given to somebody else.
    Removed {
        /// Its name.
        hash: u64,
    },
}

/// What has happened since somebody asked last.
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
            let parent = (parent != self.root).then(|| parent.low_bits());
            self.events.push(CacheEvent::Stored {
                hash: hash.low_bits(),
                parent,
                token_ids: token_ids.to_vec(),
            });
        }
    }

    pub(super) fn removed(&mut self, hash: BlockHash) {
        if !hash.is_private() {
            self.events.push(CacheEvent::Removed { hash: hash.low_bits() });
        }
    }

    pub(super) fn take(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }
}
