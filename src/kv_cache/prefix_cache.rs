//! Finds full blocks by their content.
//!
//! A block's name is a 128-bit hash over its tokens and the name of the block before it, so it identifies the whole
//! prefix. The hash is keyed per process and by an optional salt; and because a hash can collide, a hit also compares
//! the token ids and the parent's name. So another prompt's cache is never served, not even to a client that can
//! compute hashes.
//!
//! To explain misses, blocks with the same parent are linked to each other, and the names of evicted blocks are
//! remembered, as many as there are blocks.

use std::collections::{HashMap, HashSet, VecDeque};

use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::BlockId;
use super::log::{CacheEvent, CacheLog};

/// The name of a full block together with everything before it.
///
/// The highest bit is set for names with a salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHash(u128);

impl BlockHash {
    const PRIVATE: u128 = 1 << 127;

    fn new(hash: u128, is_private: bool) -> Self {
        Self(if is_private { hash | Self::PRIVATE } else { hash & !Self::PRIVATE })
    }

    /// Whether the prefix has a salt.
    #[must_use]
    pub fn is_private(self) -> bool {
        self.0 & Self::PRIVATE != 0
    }

    /// The lower half.
    pub(super) fn low_bits(self) -> u64 {
        self.0 as u64
    }
}

/// Computes block names under a key.
#[derive(Debug, Clone, Copy)]
pub struct BlockHasher {
    key: u64,
}

impl BlockHasher {
    /// A hasher with this key; the engine draws a random one per process.
    #[must_use]
    pub fn new(key: u64) -> Self {
        Self { key }
    }

    /// The name of the empty prefix for this salt: requests with different salts have no blocks in common.
    #[must_use]
    pub fn root(&self, cache_salt: Option<&str>) -> BlockHash {
        match cache_salt {
            None => BlockHash::new(xxh3_128_with_seed(b"no salt", self.key), false),
            Some(salt) => {
                BlockHash::new(xxh3_128_with_seed(salt.as_bytes(), self.key.rotate_left(32) ^ 1), true)
            }
        }
    }

    /// The name of a block with these tokens after `parent`, the first `num_grouped` of which are computed in groups of
    /// a prompt: blocks computed differently have other last bits, and so another name.
    #[must_use]
    pub fn child(&self, parent: BlockHash, token_ids: &[u32], num_grouped: usize) -> BlockHash {
        let tokens = xxh3_128_with_seed(bytemuck::cast_slice(token_ids), self.key);
        let mut link = [0; 40];
        link[..16].copy_from_slice(&parent.0.to_le_bytes());
        link[16..32].copy_from_slice(&tokens.to_le_bytes());
        link[32..].copy_from_slice(&(num_grouped as u64).to_le_bytes());
        BlockHash::new(xxh3_128_with_seed(&link, self.key), parent.is_private())
    }
}

/// Blocks that a missing one is compared with, the latest published first.
const MAX_COMPARED: usize = 64;

/// Why a block is not in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockMiss {
    /// It was, and its memory was needed for another one.
    Evicted,
    /// There are others with the same parent. The one with the longest match differs after this many tokens.
    Differs {
        /// Tokens of the block that agree.
        num_equal: usize,
        /// The token that the missing block has then.
        token_id: u32,
        /// The token that the cached block has then.
        cached_token_id: u32,
    },
    /// The same tokens are there, but of some of them it differs whether they are of a prompt's whole groups or not, and so
    /// how they were computed.
    OtherGrouping,
    /// There is no block with this parent.
    Unseen,
}

/// The index from names to blocks, with each block's tokens for comparison.
#[derive(Debug)]
pub struct PrefixCache {
    block_size: usize,
    blocks: HashMap<BlockHash, BlockId>,
    /// For each block its name and its parent's name, while published.
    names: Vec<Option<(BlockHash, BlockHash)>>,
    /// For each block its tokens; only meaningful while published.
    token_ids: Vec<u32>,
    /// For each name the block that was last published after it.
    latest_child: HashMap<BlockHash, BlockId>,
    /// For each published block the next younger and the next older one with the same parent.
    siblings: Vec<(Option<BlockId>, Option<BlockId>)>,
    evicted: Evicted,
    /// Present if there is a subscriber.
    log: Option<CacheLog>,
}

/// The names of the blocks evicted last.
#[derive(Debug)]
struct Evicted {
    capacity: usize,
    order: VecDeque<BlockHash>,
    names: HashSet<BlockHash>,
}

impl Evicted {
    fn add(&mut self, name: BlockHash) {
        if self.capacity == 0 || !self.names.insert(name) {
            return;
        }
        self.order.push_back(name);
        if self.order.len() > self.capacity
            && let Some(oldest) = self.order.pop_front()
        {
            self.names.remove(&oldest);
        }
    }
}

impl PrefixCache {
    /// An empty index for `num_blocks` blocks of `block_size` tokens.
    #[must_use]
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            block_size,
            blocks: HashMap::new(),
            names: vec![None; num_blocks],
            token_ids: vec![0; num_blocks * block_size],
            latest_child: HashMap::new(),
            siblings: vec![(None, None); num_blocks],
            evicted: Evicted { capacity: num_blocks, order: VecDeque::new(), names: HashSet::new() },
            log: None,
        }
    }

    /// Keeps a record from now on of the blocks that get and lose names. `root` is the name of the empty prefix
    /// without a salt.
    pub fn record_events(&mut self, root: BlockHash) {
        self.log = Some(CacheLog::new(root));
    }

    /// Takes the events since the last call, in order.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.log.as_mut().map(CacheLog::take).unwrap_or_default()
    }

    /// The block that holds `token_ids` after `parent`, if there is one.
    #[must_use]
    pub fn lookup(&self, hash: BlockHash, parent: BlockHash, token_ids: &[u32]) -> Option<BlockId> {
        let block = *self.blocks.get(&hash)?;
        let same = self.names[block.index()] == Some((hash, parent)) && self.tokens(block) == token_ids;
        same.then_some(block)
    }

    /// Names a computed full block. If another block already has the name, this one stays unnamed:
    /// its content is a duplicate. Returns whether the block was named.
    pub fn publish(&mut self, block: BlockId, hash: BlockHash, parent: BlockHash, token_ids: &[u32]) -> bool {
        debug_assert_eq!(token_ids.len(), self.block_size, "only full blocks are published");
        if self.blocks.contains_key(&hash) || self.names[block.index()].is_some() {
            return false;
        }
        self.blocks.insert(hash, block);
        self.names[block.index()] = Some((hash, parent));
        let older = self.latest_child.insert(parent, block);
        self.siblings[block.index()] = (None, older);
        if let Some(older) = older {
            self.siblings[older.index()].0 = Some(block);
        }
        let start = block.index() * self.block_size;
        self.token_ids[start..start + self.block_size].copy_from_slice(token_ids);
        if let Some(log) = &mut self.log {
            log.stored(hash, parent, token_ids);
        }
        true
    }

    /// Forgets a block's content, because the block is about to be overwritten.
    pub fn forget(&mut self, block: BlockId) {
        let Some((hash, parent)) = self.names[block.index()].take() else { return };
        self.blocks.remove(&hash);
        self.evicted.add(hash);
        if let Some(log) = &mut self.log {
            log.removed(hash);
        }
        let (younger, older) = std::mem::take(&mut self.siblings[block.index()]);
        if let Some(older) = older {
            self.siblings[older.index()].0 = younger;
        }
        match (younger, older) {
            (Some(younger), _) => self.siblings[younger.index()].1 = older,
            (None, Some(older)) => {
                self.latest_child.insert(parent, older);
            }
            (None, None) => {
                self.latest_child.remove(&parent);
            }
        }
    }

    /// Why [`lookup`](Self::lookup) finds no block with this name, parent and tokens. Takes as long as
    /// comparing the tokens with those of a bounded number of blocks.
    #[must_use]
    pub fn explain(&self, hash: BlockHash, parent: BlockHash, token_ids: &[u32]) -> BlockMiss {
        if self.evicted.names.contains(&hash) {
            return BlockMiss::Evicted;
        }
        let first = self.latest_child.get(&parent).copied();
        let children =
            std::iter::successors(first, |child| self.siblings[child.index()].1).take(MAX_COMPARED);
        if children.clone().any(|child| self.tokens(child) == token_ids) {
            return BlockMiss::OtherGrouping;
        }
        let compared = children.filter_map(|child| {
            let cached = self.tokens(child);
            let num_equal = token_ids.iter().zip(cached).position(|(wanted, cached)| wanted != cached)?;
            Some((num_equal, token_ids[num_equal], cached[num_equal]))
        });
        // The first of those that agree longest: the one published last.
        let closest = compared.reduce(|best, other| if other.0 > best.0 { other } else { best });
        match closest {
            Some((num_equal, token_id, cached_token_id)) => {
                BlockMiss::Differs { num_equal, token_id, cached_token_id }
            }
            None => BlockMiss::Unseen,
        }
    }

    /// Whether the block has a name.
    #[must_use]
    pub fn is_published(&self, block: BlockId) -> bool {
        self.names[block.index()].is_some()
    }

    /// The block's name, that of the block before it, and its tokens, if it has a name.
    #[must_use]
    pub fn published(&self, block: BlockId) -> Option<(BlockHash, BlockHash, &[u32])> {
        let (hash, parent) = self.names[block.index()]?;
        Some((hash, parent, self.tokens(block)))
    }

    /// Published blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is published.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn check_integrity(&self) -> Result<(), String> {
        let named = self.names.iter().filter(|name| name.is_some()).count();
        if named != self.blocks.len() {
            return Err(format!("{named} named blocks, but {} in the index", self.blocks.len()));
        }
        for (hash, block) in &self.blocks {
            if self.names[block.index()].is_none_or(|(name, _)| name != *hash) {
                return Err(format!("the index entry of {block:?} does not match its name"));
            }
        }
        let mut num_linked = 0;
        for (parent, first) in &self.latest_child {
            let (mut block, mut younger) = (Some(*first), None);
            while let Some(child) = block {
                let is_child = self.names[child.index()].is_some_and(|(_, name)| name == *parent);
                let (back, older) = self.siblings[child.index()];
                num_linked += 1;
                if !is_child || back != younger || num_linked > named {
                    return Err(format!("the children are not linked properly at {child:?}"));
                }
                (younger, block) = (block, older);
            }
        }
        if num_linked != named || self.evicted.order.len() != self.evicted.names.len() {
            return Err(format!("{named} named blocks, but {num_linked} linked as children"));
        }
        Ok(())
    }

    fn tokens(&self, block: BlockId) -> &[u32] {
        let start = block.index() * self.block_size;
        &self.token_ids[start..start + self.block_size]
    }
}
