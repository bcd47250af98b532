//! How many blocks the KV cache gets, in layers without and with a window.

use super::memory::{EngineLimits, MemoryDemand};
use crate::config::{EngineConfig, WindowLimits};

/// Layers whose tokens attend to a window only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowDemand {
    /// Bytes of K and V for one token in these layers, included in [`MemoryDemand::kv_bytes_per_token`].
    pub bytes_per_token: u64,
    /// The longest window, in tokens.
    pub window: usize,
    /// Positions that the device's kernels read together (see [`WindowLimits::tile`]).
    pub tile: usize,
}

impl WindowDemand {
    fn limits(&self, num_blocks: usize) -> WindowLimits {
        WindowLimits { window: self.window, tile: self.tile, num_blocks }
    }
}

/// Blocks of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CacheBlocks {
    pub(super) num_blocks: usize,
    pub(super) windows: Option<WindowLimits>,
}

impl CacheBlocks {
    /// As many as `budget` bytes allow and sequences of up to `longest` tokens can use. Layers with a window get fewer
    /// blocks where others then get more.
    pub(super) fn plan(demand: &MemoryDemand, limits: &EngineLimits, budget: u64, longest: usize) -> Self {
        let sizes = Sizes::new(demand, limits, longest);
        let affordable = budget / (sizes.block_bytes + sizes.window_block_bytes).max(1);
        let num_blocks = usize::try_from(affordable).unwrap_or(usize::MAX).min(sizes.useful);
        let uniform = Self { num_blocks, windows: None };
        let apart = demand.windows.and_then(|windows| sizes.plan_apart(windows, limits, budget));
        apart.filter(|apart| apart.num_blocks > num_blocks).unwrap_or(uniform)
    }

    /// The fewest bytes with which a sequence of `len` tokens can be computed.
    pub(super) fn least_bytes(demand: &MemoryDemand, limits: &EngineLimits, len: usize) -> u64 {
        let uniform = demand.kv_bytes_per_token.saturating_mul(len as u64);
        let sizes = Sizes::new(demand, limits, len);
        demand.windows.map_or(uniform, |windows| {
            let in_windows = sizes.for_sequence(windows) as u64 * sizes.window_block_bytes;
            let others = sizes.longest as u64 * sizes.block_bytes;
            uniform.min(in_windows.saturating_add(others))
        })
    }

    /// Bytes of this cache.
    pub(super) fn num_bytes(&self, demand: &MemoryDemand, block_size: usize) -> u64 {
        let num_tokens = |num_blocks: usize| num_blocks.saturating_mul(block_size) as u64;
        let num_all = num_tokens(self.num_blocks);
        match (self.windows, demand.windows) {
            (Some(limits), Some(windows)) => {
                let others = demand.kv_bytes_per_token.saturating_sub(windows.bytes_per_token);
                let in_windows = windows.bytes_per_token.saturating_mul(num_tokens(limits.num_blocks));
                others.saturating_mul(num_all).saturating_add(in_windows)
            }
            _ => demand.kv_bytes_per_token.saturating_mul(num_all),
        }
    }
}

/// Sizes in blocks and of blocks.
struct Sizes {
    block_size: usize,
    /// Bytes of a block in layers without a window, and in the others.
    block_bytes: u64,
    window_block_bytes: u64,
    /// Blocks of the longest sequence.
    longest: usize,
    /// Blocks of as many of them as may run.
    useful: usize,
    /// Most tokens of a sequence in a step.
    step_tokens: usize,
}

impl Sizes {
    fn new(demand: &MemoryDemand, limits: &EngineLimits, longest: usize) -> Self {
        let block_size = limits.block_size.max(1);
        let in_windows = demand.windows.map_or(0, |windows| windows.bytes_per_token);
        let others = demand.kv_bytes_per_token.saturating_sub(in_windows);
        let longest = longest.div_ceil(block_size);
        let useful = longest.saturating_mul(limits.max_num_seqs.max(1));
        let batched = limits.max_num_batched_tokens.unwrap_or(demand.useful_batched_tokens);
        Self {
            block_size,
            block_bytes: others.saturating_mul(block_size as u64),
            window_block_bytes: in_windows.saturating_mul(block_size as u64),
            longest,
            useful: useful.min(u32::MAX as usize / block_size),
            step_tokens: EngineConfig::reserved_tokens(batched, limits.num_scheduler_steps),
        }
    }

    /// Blocks of layers with these windows with which one sequence can be computed.
    fn for_sequence(&self, windows: WindowDemand) -> usize {
        windows.limits(0).blocks_per_sequence(self.step_tokens, self.block_size).min(self.longest)
    }

    /// Blocks for layers with windows apart from the others, if the budget allows it.
    ///
    /// Long sequences need few blocks in windows, short ones as many as in the other layers. So windows get the blocks
    /// of as many longest sequences as the other layers can hold, twice, for prefixes of earlier ones, and at least a
    /// quarter of the memory if the longest sequence still fits.
    fn plan_apart(&self, windows: WindowDemand, limits: &EngineLimits, budget: u64) -> Option<CacheBlocks> {
        let max_num_seqs = limits.max_num_seqs.max(1);
        let least = self.for_sequence(windows);
        let per_sequence = windows.limits(0).blocks_per_sequence(0, self.block_size);
        if self.longest <= per_sequence {
            return None;
        }
        let for_sequences =
            |num: usize| per_sequence.saturating_mul(num - 1).saturating_add(least).saturating_mul(2);
        let num_others = |num_windows: usize| {
            let rest = budget.checked_sub(self.window_block_bytes.saturating_mul(num_windows as u64))?;
            let num_blocks = rest.checked_div(self.block_bytes).unwrap_or(u64::MAX);
            Some(usize::try_from(num_blocks).unwrap_or(usize::MAX).min(self.useful))
        };
        let holds = |num_windows: usize, num_sequences: usize| {
            num_others(num_windows).is_some_and(|num| num >= self.longest.saturating_mul(num_sequences))
        };
        let whole = (1..=max_num_seqs).rev().find(|num| holds(for_sequences(*num), *num));
        let quarter = usize::try_from(budget / 4 / self.window_block_bytes.max(1)).unwrap_or(usize::MAX);
        let enough = for_sequences(max_num_seqs).min(self.useful);
        let usual = whole.map_or(least, for_sequences);
        let num_windows = [usual.max(quarter), usual, least]
            .map(|num| num.min(enough))
            .into_iter()
            .find(|num| holds(*num, 1))
            .unwrap_or(least);
        let num_blocks = num_others(num_windows)?;
        let windows = Some(windows.limits(num_windows));
        (num_windows < num_blocks).then_some(CacheBlocks { num_blocks, windows })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::plan_memory;

    /// Gemma 3 27B in f16: 52 of 62 layers have a window of 1,024.
    fn demand(available_bytes: u64) -> MemoryDemand {
        let layer_bytes = 16 * 128 * 2 * 2;
        MemoryDemand {
            weight_bytes: 0,
            kv_bytes_per_token: 62 * layer_bytes,
            windows: Some(WindowDemand { bytes_per_token: 52 * layer_bytes, window: 1_024, tile: 64 }),
            max_position_embeddings: 1 << 17,
            usual_model_len: 1 << 17,
            context_hint: None,
            available_bytes,
            is_gpu_memory: true,
            useful_batched_tokens: 2_048,
            step_cost: 8,
            prompt_group: None,
            experts: None,
        }
    }

    #[test]
    fn a_long_context_pays_for_its_windows_only() {
        let limits = EngineLimits::default();
        // All layers of 131,072 tokens take 62 GiB, those without a window 10 GiB.
        let whole = demand(62 << 30);
        let least = CacheBlocks::least_bytes(&whole, &limits, 1 << 17);
        assert!((10 << 30..12 << 30).contains(&least), "{least}");
        let plan = plan_memory(&demand(least), &limits).unwrap().engine;
        assert_eq!(plan.max_model_len, 1 << 17);
        let windows = plan.windows.unwrap();
        assert_eq!(windows.num_blocks, (1_024 + 64 + 2_048) / 32 + 1);
        let plan = plan_memory(&demand(least - (1 << 20)), &limits).unwrap().engine;
        assert!(plan.max_model_len < 1 << 17, "{plan:?}");
        // More memory is for more of everything.
        let plan = plan_memory(&demand(30 << 30), &limits).unwrap().engine;
        let windows = plan.windows.unwrap();
        let num_bytes = demand(0).kv_cache_bytes(&plan);
        assert!((29 << 30..=30 << 30).contains(&num_bytes), "{num_bytes}");
        assert!(plan.num_blocks * 32 > 2 << 17 && windows.num_blocks * 32 > 10_000, "{plan:?}");
        // With memory for everything, nothing is given up.
        let limits = EngineLimits { max_num_seqs: 1, ..limits };
        let plan = plan_memory(&whole, &limits).unwrap().engine;
        assert_eq!((plan.windows, plan.num_blocks), (None, (1 << 17) / 32));
    }

    #[test]
    fn contexts_within_the_window_have_the_same_blocks_in_all_layers() {
        let limits = EngineLimits { max_model_len: Some(1_000), ..EngineLimits::default() };
        assert_eq!(plan_memory(&demand(1 << 30), &limits).unwrap().engine.windows, None);
    }

    #[test]
    fn every_plan_is_valid_and_within_its_budget() {
        let mut num_apart = 0;
        for mebibytes in [300_u64, 500, 1_000, 3_000, 10_000, 20_000, 40_000, 70_000] {
            for (max_num_seqs, block_size) in [(1, 16), (4, 32), (32, 64), (256, 1)] {
                for (window, share) in [(1, 10), (128, 31), (1_024, 52), (4_096, 62)] {
                    for max_model_len in [None, Some(300), Some(5_000)] {
                        let mut demand = demand(mebibytes << 20);
                        let bytes_per_token = demand.kv_bytes_per_token / 62 * share;
                        demand.windows = Some(WindowDemand { bytes_per_token, window, tile: 64 });
                        let limits = EngineLimits {
                            max_num_seqs,
                            block_size,
                            max_model_len,
                            ..EngineLimits::default()
                        };
                        // Too little memory for the length is an error.
                        let Ok(plan) = plan_memory(&demand, &limits) else { continue };
                        let num_bytes = demand.kv_cache_bytes(&plan.engine);
                        assert!(num_bytes <= demand.available_bytes, "{num_bytes} of {mebibytes} MiB");
                        num_apart += usize::from(plan.engine.windows.is_some());
                    }
                }
            }
        }
        assert!(num_apart > 100, "{num_apart}");
    }
}
