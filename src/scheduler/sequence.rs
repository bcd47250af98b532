//! A sequence, as far as scheduling is concerned.

use super::{ClientId, PrefixMiss, Weight};
use crate::kv_cache::{BlockHash, BlockHasher, BlockId};
use crate::speculation::Draft;

/// The number of a sequence, never reused by a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// The status of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequenceStatus {
    /// In the queue, never run.
    Waiting,
    /// Has blocks and is scheduled in steps.
    Running,
    /// Its blocks were taken; in the queue to be computed again.
    Preempted,
    /// A fork that begins when the prompt of its leader is computed.
    Forking,
}

/// A caller's parameters of a new sequence.
#[derive(Debug, Clone)]
pub struct SequenceSpec {
    /// At least one token.
    pub prompt_token_ids: Vec<u32>,
    /// Length, prompt included, at which the sequence ends for certain. Multi-step looks no further.
    pub max_len: usize,
    /// Requests with different salts share no cache.
    pub cache_salt: Option<String>,
    /// Sequences that continue the prompt, this one counted in: the `n` of a request.
    pub num_sequences: usize,
    /// The logits of every prompt token are needed, so none may come from the prefix cache.
    pub prompt_logits: bool,
    /// Each token must be known before the next one can be chosen: never several tokens in a step.
    pub single_step: bool,
    /// On whose account it is served.
    pub client: ClientId,
    /// The client's, or its group's, from now on.
    pub weight: Weight,
    /// The account, shared with others of the same group. A client with its own account is its own group.
    pub group: ClientId,
    /// Of the client's waiting sequences those with the smallest number come first.
    pub priority: i32,
}

/// Prompt and output, followed by drafted tokens.
#[derive(Debug)]
pub(super) struct Tokens {
    all: Vec<u32>,
    num_known: usize,
    /// Of the drafted ones.
    chances: Vec<f32>,
}

impl Tokens {
    pub(super) fn new(prompt_token_ids: Vec<u32>) -> Self {
        Self { num_known: prompt_token_ids.len(), all: prompt_token_ids, chances: Vec::new() }
    }

    fn drop_draft(&mut self) {
        self.all.truncate(self.num_known);
        self.chances.clear();
    }
}

/// A sequence inside the scheduler.
#[derive(Debug)]
pub struct Sequence {
    pub(super) status: SequenceStatus,
    pub(super) tokens: Tokens,
    pub(super) num_prompt_tokens: usize,
    /// Of the prompt, tokens in whole groups.
    pub(super) num_grouped_tokens: usize,
    /// Tokens whose K and V are in the cache.
    pub(super) num_computed_tokens: usize,
    /// Prompt tokens that the client has been charged for.
    pub(super) num_charged_tokens: usize,
    pub(super) client: ClientId,
    pub(super) priority: i32,
    /// Of the computed tokens, the ones found in the prefix cache when the sequence was first admitted.
    pub(super) num_cached_tokens: usize,
    /// Why they are not more; none until then.
    pub(super) prefix_miss: Option<PrefixMiss>,
    pub(super) num_preemptions: usize,
    pub(super) max_len: usize,
    pub(super) block_table: Vec<BlockId>,
    /// Of these the first one that it reads in layers with a window.
    pub(super) first_window_block: usize,
    /// The name of the empty prefix.
    pub(super) cache_root: BlockHash,
    /// Names of the sequence's full blocks, as far as they have been computed.
    pub(super) block_hashes: Vec<BlockHash>,
    /// Blocks offered to the prefix cache since the last admission.
    pub(super) num_published_blocks: usize,
    /// Sequences that fork off when the prompt is computed.
    pub(super) forks: Vec<SeqId>,
    pub(super) prompt_logits: bool,
    pub(super) single_step: bool,
    /// Steps skip it: the allowed next tokens are not known yet.
    pub(super) is_held: bool,
    /// The wait of steps for its constraint, in seconds.
    pub(super) constraint_seconds: f64,
}

impl Sequence {
    /// Prompt and output tokens.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.tokens.all[..self.tokens.num_known]
    }

    /// The same and the first `num_draft_tokens` of those that may follow.
    #[must_use]
    pub fn drafted_token_ids(&self, num_draft_tokens: usize) -> &[u32] {
        let end = self.tokens.num_known + num_draft_tokens;
        &self.tokens.all[..end.min(self.tokens.all.len())]
    }

    /// How likely each drafted token is, if those before it are right.
    pub(super) fn draft_chances(&self) -> &[f32] {
        &self.tokens.chances
    }

    /// Replaces the draft.
    pub(super) fn set_draft(&mut self, draft: &Draft) {
        self.tokens.drop_draft();
        self.tokens.all.extend_from_slice(&draft.token_ids);
        self.tokens.chances.extend_from_slice(&draft.chances);
    }

    /// Adds tokens. The previous draft becomes invalid.
    pub(super) fn extend(&mut self, token_ids: &[u32]) {
        self.tokens.drop_draft();
        self.tokens.all.extend_from_slice(token_ids);
        self.tokens.num_known = self.tokens.all.len();
    }

    /// The given tokens.
    #[must_use]
    pub fn prompt_token_ids(&self) -> &[u32] {
        &self.tokens.all[..self.num_prompt_tokens]
    }

    /// The generated tokens.
    #[must_use]
    pub fn output_token_ids(&self) -> &[u32] {
        &self.token_ids()[self.num_prompt_tokens..]
    }

    /// Tokens of the prompt that are computed in groups, see
    /// [`EngineConfig::prompt_group`](crate::config::EngineConfig::prompt_group).
    #[must_use]
    pub fn num_grouped_tokens(&self) -> usize {
        self.num_grouped_tokens
    }

    /// The blocks that hold the sequence's K and V, in order.
    #[must_use]
    pub fn block_table(&self) -> &[BlockId] {
        &self.block_table
    }

    /// Those of them that it may still read in layers with a window.
    #[must_use]
    pub fn window_blocks(&self) -> &[BlockId] {
        self.block_table.get(self.first_window_block..).unwrap_or_default()
    }

    /// Tokens whose K and V are in the cache.
    #[must_use]
    pub fn num_computed_tokens(&self) -> usize {
        self.num_computed_tokens
    }

    /// Of full block `index` the tokens that are computed in groups.
    #[must_use]
    pub fn num_grouped_in(&self, index: usize, block_size: usize) -> usize {
        self.num_grouped_tokens.saturating_sub(index * block_size).min(block_size)
    }

    /// The names in the cache of full block `index` and of the block before it, once it has one.
    #[must_use]
    pub fn block_names(&self, index: usize) -> Option<(BlockHash, BlockHash)> {
        let parent =
            index.checked_sub(1).map_or(Some(&self.cache_root), |before| self.block_hashes.get(before));
        Some((*self.block_hashes.get(index)?, *parent?))
    }

    /// Full blocks that have been offered to others since the last admission, or were found then.
    #[must_use]
    pub fn num_published_blocks(&self) -> usize {
        self.num_published_blocks
    }

    /// Prompt tokens that were found in the prefix cache at the first admission.
    #[must_use]
    pub fn num_cached_tokens(&self) -> usize {
        self.num_cached_tokens
    }

    /// Why not more of them were found; none before the first admission.
    #[must_use]
    pub fn prefix_miss(&self) -> Option<PrefixMiss> {
        self.prefix_miss
    }

    /// How often the sequence's blocks were taken.
    #[must_use]
    pub fn num_preemptions(&self) -> usize {
        self.num_preemptions
    }

    /// The status of the sequence.
    #[must_use]
    pub fn status(&self) -> SequenceStatus {
        self.status
    }

    /// Whether the logits of every prompt token are needed.
    #[must_use]
    pub fn prompt_logits(&self) -> bool {
        self.prompt_logits
    }

    /// Whether steps skip it.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// Length at which the sequence ends for certain.
    #[must_use]
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Forks that wait for the prompt to be computed.
    #[must_use]
    pub fn num_unstarted_forks(&self) -> usize {
        self.forks.len()
    }

    /// Whether it waits for a permit; in the queue, unless it is held.
    pub(super) fn awaits_permit(&self) -> bool {
        matches!(self.status, SequenceStatus::Waiting | SequenceStatus::Preempted)
    }

    /// Permits that it takes: its own, and those of the forks that start with it.
    pub(super) fn num_permits(&self) -> usize {
        1 + self.forks.len()
    }

    /// Sees to it that full block `index` has a name, if all before it have one, and gives that of the block before it.
    pub(super) fn name_block(&mut self, index: usize, block_size: usize, hasher: &BlockHasher) -> BlockHash {
        let parent = index.checked_sub(1).map_or(self.cache_root, |before| self.block_hashes[before]);
        if self.block_hashes.len() == index {
            let positions = index * block_size..(index + 1) * block_size;
            let num_grouped = self.num_grouped_in(index, block_size);
            self.block_hashes.push(hasher.child(parent, &self.tokens.all[positions], num_grouped));
        }
        parent
    }

    pub(super) fn num_uncomputed_tokens(&self) -> usize {
        self.tokens.num_known - self.num_computed_tokens
    }
}
