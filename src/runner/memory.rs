//! How much of the machine's memory goes to the KV cache, and whether experts fit, decided before anything
//! is loaded.

use std::str::FromStr;

use super::cache_blocks::{CacheBlocks, WindowDemand};
use crate::config::{EngineConfig, EngineFlag, SpeculativeConfig, SpeculativeMethod};
use crate::{Error, ErrorKind, Result};

/// Fraction of the memory after the weights that the KV cache may take by default, where other programs
/// need memory too.
const DEFAULT_FRACTION: f64 = 0.5;

/// The same where experts stay in a file: the rest is for those of them that are used.
const FRACTION_WITH_EXPERT_FILE: f64 = 0.25;

/// A context that is worth more than experts in memory, in tokens.
const USEFUL_CONTEXT: usize = 4_096;

/// Most unfinished requests of the engine. It refuses whoever comes last, so this is beyond the limits that callers
/// set: they know which clients have how many.
const MAX_NUM_REQUESTS: usize = 1 << 20;

/// Properties of the model and the machine, known before loading.
#[derive(Debug, Clone, Copy)]
pub struct MemoryDemand {
    /// Bytes of the weights as they will be in memory.
    pub weight_bytes: u64,
    /// Bytes of K and V for one token in all layers.
    pub kv_bytes_per_token: u64,
    /// Layers with a window, if their blocks are counted apart.
    pub windows: Option<WindowDemand>,
    /// The longest sequence that the model was trained for, or that its rope scaling makes possible.
    pub max_position_embeddings: usize,
    /// The longest sequence unless a longer one is requested; at most as long.
    pub usual_model_len: usize,
    /// The reason why a context longer than `max_position_embeddings` is impossible, if it is more than the model's
    /// training.
    pub context_hint: Option<&'static str>,
    /// Bytes that may be used in all.
    pub available_bytes: u64,
    /// Whether they are a GPU's dedicated memory: other processes' memory is subtracted already, so the cache may take
    /// all of the rest.
    pub is_gpu_memory: bool,
    /// Tokens of a step that the device computes well together, which is the default limit.
    pub useful_batched_tokens: usize,
    /// The fixed cost of a step, in tokens.
    pub step_cost: usize,
    /// See [`EngineConfig::prompt_group`].
    pub prompt_group: Option<usize>,
    /// The weights that may stay in a file, if there are any and the device supports it.
    pub experts: Option<ExpertDemand>,
}

/// Weights of which a step uses some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertDemand {
    /// Bytes of all experts, included in [`MemoryDemand::weight_bytes`].
    pub num_bytes: u64,
    /// Bytes of the experts of a layer.
    pub layer_bytes: u64,
}

/// Where experts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpertWeights {
    /// In memory if all weights fit, otherwise in a file.
    #[default]
    Auto,
    /// In memory.
    Memory,
    /// In a file instead of memory; the operating system caches the pages that fit.
    File,
}

impl ExpertWeights {
    /// Every choice, as spelled in flags.
    pub const NAMES: [&str; 3] = ["auto", "memory", "file"];
}

impl FromStr for ExpertWeights {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "memory" => Ok(Self::Memory),
            "file" => Ok(Self::File),
            _ => Err(Error::invalid_request(format!("unknown location of experts {name:?}"))
                .with_hint(format!("use one of {}", Self::NAMES.join(", ")))),
        }
    }
}

/// The plan.
#[derive(Debug, Clone)]
pub struct MemoryPlan {
    /// Limits of the engine, with the size of the cache.
    pub engine: EngineConfig,
    /// Whether experts stay in a file.
    pub experts_in_file: bool,
}

impl MemoryDemand {
    /// Bytes of the KV cache of this configuration.
    #[must_use]
    pub fn kv_cache_bytes(&self, config: &EngineConfig) -> u64 {
        let num_blocks = CacheBlocks { num_blocks: config.num_blocks, windows: config.windows };
        num_blocks.num_bytes(self, config.block_size)
    }
}

impl MemoryPlan {
    /// The memory plan, for callers that report less than was requested.
    #[must_use]
    pub fn describe(&self, demand: &MemoryDemand) -> String {
        let EngineConfig { max_model_len, .. } = self.engine;
        let in_file_bytes =
            demand.experts.filter(|_| self.experts_in_file).map_or(0, |experts| experts.num_bytes);
        let tokens = self.engine.kv_cache_tokens();
        format!(
            "of {} MiB of memory, the plan has {} MiB for weights and {} MiB for a KV cache of {tokens} tokens, in \
             contexts of {max_model_len}",
            mebibytes(demand.available_bytes),
            mebibytes(demand.weight_bytes.saturating_sub(in_file_bytes)),
            mebibytes(demand.kv_cache_bytes(&self.engine)),
        )
    }
}

/// The user's choice; `None` leaves it to the plan.
#[derive(Debug, Clone)]
pub struct EngineLimits {
    /// `--max-model-len`.
    pub max_model_len: Option<usize>,
    /// `--max-num-seqs`.
    pub max_num_seqs: usize,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: Option<usize>,
    /// `--block-size`.
    pub block_size: usize,
    /// `--kv-cache-memory-bytes`.
    pub kv_cache_memory_bytes: Option<u64>,
    /// `--gpu-memory-utilization`: the fraction of a GPU's dedicated memory that may be used, as far as it is free.
    pub gpu_memory_utilization: f64,
    /// `--enable-prefix-caching`.
    pub enable_prefix_caching: bool,
    /// `--num-scheduler-steps`.
    pub num_scheduler_steps: usize,
    /// `--speculative-config`.
    pub speculative: SpeculativeConfig,
    /// `--expert-weights`.
    pub expert_weights: ExpertWeights,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            max_model_len: None,
            max_num_seqs: 32,
            max_num_batched_tokens: None,
            block_size: 32,
            kv_cache_memory_bytes: None,
            gpu_memory_utilization: 0.9,
            enable_prefix_caching: true,
            num_scheduler_steps: 1,
            speculative: SpeculativeConfig::of(SpeculativeMethod::Suffix),
            expert_weights: ExpertWeights::Auto,
        }
    }
}

impl EngineLimits {
    /// Checks what depends on no model and no machine.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`] naming the flag, its value and the range.
    pub fn validate(&self) -> Result<()> {
        EngineFlag::BlockSize.check(self.block_size)?;
        EngineFlag::MaxNumSeqs.check(self.max_num_seqs)?;
        EngineFlag::NumSchedulerSteps.check(self.num_scheduler_steps)?;
        EngineFlag::NumSpeculativeTokens.check(self.speculative.num_speculative_tokens)?;
        self.max_model_len.map_or(Ok(()), |given| EngineFlag::MaxModelLen.check(given))?;
        self.max_num_batched_tokens.map_or(Ok(()), |given| EngineFlag::MaxNumBatchedTokens.check(given))?;
        self.check_gpu_memory_utilization()
    }

    /// Bytes that may be used of a GPU's own memory, of which `free_bytes` are free.
    ///
    /// # Errors
    /// As [`Self::check_gpu_memory_utilization`].
    pub fn usable_gpu_memory(&self, free_bytes: u64) -> Result<u64> {
        self.check_gpu_memory_utilization()?;
        Ok((free_bytes as f64 * self.gpu_memory_utilization) as u64)
    }

    /// Whether it is a share, wherever it has an effect.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`] if it is not more than 0 and at most 1.
    pub fn check_gpu_memory_utilization(&self) -> Result<()> {
        let fraction = self.gpu_memory_utilization;
        if fraction > 0.0 && fraction <= 1.0 {
            return Ok(());
        }
        let message = format!("--gpu-memory-utilization is {fraction}; it must be more than 0 and at most 1");
        Err(Error::invalid_request(message)
            .with_hint("give the fraction of the free memory to use, such as 0.9"))
    }
}

/// Chooses the context length, the number of blocks and the location of experts.
///
/// The cache gets `--kv-cache-memory-bytes`, or half of the rest after the weights (all of it in a GPU's dedicated
/// memory), but never more than all sequences can use. Without `--max-model-len` the context is the model's, or less if
/// the cache cannot hold one sequence of that length; a requested length that does not fit is an error.
///
/// Experts stay in a file if that is requested, or if they and a context of 4,096 tokens do not fit together. The cache
/// then gets a quarter of the rest after the other weights and the experts of a layer, which have to fit so that a step
/// reads each of them only once.
///
/// # Errors
/// [`ErrorKind::Capacity`] if the weights or a context of the asked length do not fit;
/// [`ErrorKind::InvalidRequest`] if limits contradict each other or the model.
pub fn plan_memory(demand: &MemoryDemand, limits: &EngineLimits) -> Result<MemoryPlan> {
    // First of all, because the rest multiplies them.
    limits.validate()?;
    let in_memory = || plan_with(demand, limits, None);
    let in_file = |experts| plan_with(demand, limits, Some(experts));
    match (limits.expert_weights, demand.experts) {
        (ExpertWeights::Memory, _) | (ExpertWeights::Auto, None) => in_memory(),
        (ExpertWeights::File, Some(experts)) => in_file(experts),
        (ExpertWeights::File, None) => {
            Err(Error::invalid_request("--expert-weights file is for models with experts")
                .with_hint("omit --expert-weights"))
        }
        (ExpertWeights::Auto, Some(experts)) => {
            let wanted = limits.max_model_len.unwrap_or(demand.usual_model_len).min(USEFUL_CONTEXT);
            match in_memory() {
                Ok(plan) if plan.engine.max_model_len >= wanted => Ok(plan),
                Ok(plan) => {
                    let other = in_file(experts).ok();
                    let is_longer = |it: &MemoryPlan| it.engine.max_model_len > plan.engine.max_model_len;
                    Ok(other.filter(is_longer).unwrap_or(plan))
                }
                Err(error) if error.kind() == ErrorKind::Capacity => in_file(experts),
                Err(error) => Err(error),
            }
        }
    }
}

/// With these experts in a file, or without any there.
fn plan_with(
    demand: &MemoryDemand,
    limits: &EngineLimits,
    in_file: Option<ExpertDemand>,
) -> Result<MemoryPlan> {
    let (in_file_bytes, layer) = in_file.map_or((0, 0), |experts| (experts.num_bytes, experts.layer_bytes));
    let weight_bytes = demand.weight_bytes.saturating_sub(in_file_bytes);
    let left = demand.available_bytes.checked_sub(weight_bytes.saturating_add(layer)).ok_or_else(|| {
        let mut what = format!("the weights take {} MiB", mebibytes(weight_bytes));
        if in_file.is_some() {
            what = format!(
                "the weights without experts take {} MiB, and the experts of a layer {} MiB",
                mebibytes(weight_bytes),
                mebibytes(layer)
            );
        }
        let available = mebibytes(demand.available_bytes);
        Error::new(ErrorKind::Capacity, format!("{what}, but only {available} MiB of memory are available"))
            .with_hint(if demand.is_gpu_memory {
                "use a smaller or more strongly quantised model, raise --gpu-memory-utilization, or end other \
                 programs that use the GPU"
            } else {
                "use a smaller or more strongly quantised model"
            })
    })?;
    if let Some(wanted) = limits.max_model_len
        && wanted > demand.max_position_embeddings
    {
        let made_for = demand.max_position_embeddings;
        return Err(Error::invalid_request(format!(
            "--max-model-len is {wanted}, but the model was made for {made_for} tokens"
        ))
        .with_hint(match demand.context_hint {
            Some(hint) => format!("give at most {made_for}: {hint}"),
            None => format!("give at most {made_for}, or a model whose rope scaling is for more"),
        }));
    }
    if let Some(wanted) = limits.kv_cache_memory_bytes
        && wanted > left
    {
        return Err(Error::new(
            ErrorKind::Capacity,
            format!(
                "--kv-cache-memory-bytes is {}, but only {} are free after the weights",
                size(wanted),
                size(left)
            ),
        )
        .with_hint("lower it, or omit it"));
    }
    let fraction = match in_file {
        Some(_) => FRACTION_WITH_EXPERT_FILE,
        None if demand.is_gpu_memory => 1.0,
        None => DEFAULT_FRACTION,
    };
    let budget = limits.kv_cache_memory_bytes.unwrap_or((left as f64 * fraction) as u64);
    let longest = limits.max_model_len.unwrap_or(demand.usual_model_len);
    let CacheBlocks { num_blocks, windows } = CacheBlocks::plan(demand, limits, budget, longest);
    let capacity = num_blocks * limits.block_size;
    let max_model_len = match limits.max_model_len {
        Some(wanted) if wanted > capacity => {
            return Err(Error::new(
                ErrorKind::Capacity,
                format!(
                    "--max-model-len {wanted} needs {} of KV cache, but it has {}, {capacity} tokens",
                    size(CacheBlocks::least_bytes(demand, limits, wanted)),
                    size(budget)
                ),
            )
            .with_hint("lower --max-model-len or raise --kv-cache-memory-bytes"));
        }
        Some(wanted) => wanted,
        None => demand.usual_model_len.min(capacity),
    };
    let config = EngineConfig {
        max_model_len,
        max_num_seqs: limits.max_num_seqs,
        max_num_batched_tokens: limits.max_num_batched_tokens.unwrap_or(demand.useful_batched_tokens),
        block_size: limits.block_size,
        num_blocks,
        windows,
        enable_prefix_caching: limits.enable_prefix_caching,
        num_scheduler_steps: limits.num_scheduler_steps,
        max_num_requests: MAX_NUM_REQUESTS,
        step_cost: demand.step_cost,
        prompt_group: demand.prompt_group,
        speculative: limits.speculative,
    };
    if longest < 2 {
        return Err(Error::invalid_model(format!(
            "the model's context is {longest}, expected at least 2 tokens"
        ))
        .with_hint("a prompt and an answer have one each; the number in the model's file is wrong"));
    }
    if max_model_len < 2 {
        return Err(Error::new(
            ErrorKind::Capacity,
            format!(
                "the KV cache of {} holds {capacity} tokens, in blocks of {}",
                size(budget),
                size(demand.kv_bytes_per_token.saturating_mul(limits.block_size as u64))
            ),
        )
        .with_hint("raise --kv-cache-memory-bytes"));
    }
    config.validate()?;
    Ok(MemoryPlan { engine: config, experts_in_file: in_file.is_some() })
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Sizes below a MiB in bytes: rounded, they would look like more than requested.
fn size(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{bytes} bytes"),
        _ => format!("{} MiB", mebibytes(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: MemoryDemand = MemoryDemand {
        weight_bytes: 600 << 20,
        kv_bytes_per_token: 22 << 10,
        windows: None,
        max_position_embeddings: 2_048,
        usual_model_len: 2_048,
        context_hint: None,
        available_bytes: 8 << 30,
        is_gpu_memory: false,
        useful_batched_tokens: 512,
        step_cost: 8,
        prompt_group: None,
        experts: None,
    };
    /// Of the 600 MiB, in 20 layers.
    const EXPERTS: MemoryDemand = MemoryDemand {
        experts: Some(ExpertDemand { num_bytes: 400 << 20, layer_bytes: 20 << 20 }),
        ..DEMAND
    };

    fn with(expert_weights: ExpertWeights) -> EngineLimits {
        EngineLimits { expert_weights, ..EngineLimits::default() }
    }

    #[test]
    fn takes_what_the_sequences_can_use_or_what_there_is() {
        let config = plan_memory(&DEMAND, &EngineLimits::default()).unwrap().engine;
        assert_eq!((config.max_model_len, config.num_blocks), (2_048, 64 * 32));
        let tight = MemoryDemand { available_bytes: 700 << 20, ..DEMAND };
        let config = plan_memory(&tight, &EngineLimits::default()).unwrap().engine;
        assert_eq!(config.max_model_len, 2_048);
        assert_eq!(config.num_blocks, (50 << 20) / (32 * (22 << 10)));
        let long = MemoryDemand { max_position_embeddings: 1 << 20, usual_model_len: 1 << 20, ..tight };
        let config = plan_memory(&long, &EngineLimits::default()).unwrap().engine;
        assert_eq!(config.max_model_len, config.kv_cache_tokens(), "the context shrinks to the cache");
    }

    #[test]
    fn a_gpus_own_memory_is_the_caches_up_to_the_share() {
        let limits = EngineLimits::default();
        assert_eq!(limits.usable_gpu_memory(1_000).unwrap(), 900);
        let demand = MemoryDemand { available_bytes: 700 << 20, is_gpu_memory: true, ..DEMAND };
        let plan = plan_memory(&demand, &limits).unwrap();
        assert_eq!(plan.engine.num_blocks, (100 << 20) / (32 * (22 << 10)));
        let text = plan.describe(&demand);
        let words =
            ["700 MiB of memory", "600 MiB for weights", "100 MiB for a KV cache of 4640 tokens", "2048"];
        words.iter().for_each(|words| assert!(text.contains(words), "{words} in {text}"));
        let small = MemoryDemand { available_bytes: 100 << 20, ..demand };
        let error = plan_memory(&small, &limits).unwrap_err();
        assert!(error.hint().is_some_and(|hint| hint.contains("--gpu-memory-utilization")), "{error}");
        for fraction in [0.001, 1.0] {
            let limits = EngineLimits { gpu_memory_utilization: fraction, ..EngineLimits::default() };
            assert_eq!(limits.usable_gpu_memory(1_000).unwrap(), (fraction * 1_000.0) as u64);
        }
        for fraction in [0.0, -0.5, 1.1, f64::NAN, f64::INFINITY] {
            let limits = EngineLimits { gpu_memory_utilization: fraction, ..EngineLimits::default() };
            let error = limits.usable_gpu_memory(1_000).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{fraction}");
        }
    }

    #[test]
    fn what_does_not_fit_is_an_error_with_numbers() {
        let check = |demand: MemoryDemand, limits: EngineLimits, kind: ErrorKind, wanted: &[&str]| {
            let error = plan_memory(&demand, &limits).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            wanted.iter().for_each(|text| assert!(error.message().contains(text), "{error}: {text}"));
        };
        let limits = EngineLimits::default();
        let small = MemoryDemand { available_bytes: 100 << 20, ..DEMAND };
        check(small, limits.clone(), ErrorKind::Capacity, &["600 MiB", "100 MiB"]);
        let long = EngineLimits { max_model_len: Some(4_096), ..limits.clone() };
        check(DEMAND, long, ErrorKind::InvalidRequest, &["4096", "2048"]);
        let little = EngineLimits {
            max_model_len: Some(2_048),
            kv_cache_memory_bytes: Some(10 << 20),
            ..limits.clone()
        };
        check(DEMAND, little, ErrorKind::Capacity, &["2048", "44 MiB", "10 MiB"]);
        let greedy = EngineLimits { kv_cache_memory_bytes: Some(1 << 40), ..limits.clone() };
        check(DEMAND, greedy, ErrorKind::Capacity, &["1048576 MiB"]);
        let one_token = MemoryDemand { usual_model_len: 1, ..DEMAND };
        check(one_token, limits.clone(), ErrorKind::InvalidModel, &["the model's context is 1,"]);
        let none = EngineLimits { kv_cache_memory_bytes: Some(1), ..limits };
        check(DEMAND, none, ErrorKind::Capacity, &["the KV cache of 1 bytes holds 0 tokens"]);
        for (max_model_len, kv_cache_memory_bytes) in [(0, None), (1, None), (1, Some(1))] {
            let limits = EngineLimits {
                max_model_len: Some(max_model_len),
                kv_cache_memory_bytes,
                ..EngineLimits::default()
            };
            let words = format!("--max-model-len is {max_model_len}; it must be at least 2");
            check(DEMAND, limits, ErrorKind::InvalidRequest, &[&words]);
        }
        // Before the memory, which would be a product of it.
        for block_size in [0, 1_025, usize::MAX] {
            let limits = EngineLimits { block_size, max_model_len: Some(64), ..EngineLimits::default() };
            let words = format!("--block-size is {block_size}; it must be at least 1 and at most 1024");
            check(DEMAND, limits, ErrorKind::InvalidRequest, &[&words]);
        }
    }

    #[test]
    fn experts_stay_in_a_file_if_they_do_not_fit() {
        let check = |available_mebibytes: u64, choice: ExpertWeights, in_file: bool| {
            let demand = MemoryDemand { available_bytes: available_mebibytes << 20, ..EXPERTS };
            let plan = plan_memory(&demand, &with(choice)).unwrap();
            assert_eq!(plan.experts_in_file, in_file, "{available_mebibytes} MiB, {choice:?}");
            plan.engine
        };
        check(8 << 10, ExpertWeights::Auto, false);
        check(8 << 10, ExpertWeights::Memory, false);
        check(8 << 10, ExpertWeights::File, true);
        // A context of 2,048 tokens, all that the model has, takes 44 MiB: half of the remaining memory.
        assert_eq!(check(600 + 88, ExpertWeights::Auto, false).max_model_len, 2_048);
        assert_eq!(check(600 + 87, ExpertWeights::Auto, true).max_model_len, 2_048);
        check(600 + 87, ExpertWeights::Memory, false);
        check(599, ExpertWeights::Auto, true);
        // Alongside 200 MiB of other weights and a layer's experts the cache has a quarter.
        let config = check(240, ExpertWeights::Auto, true);
        assert_eq!(config.num_blocks, (5 << 20) / (32 * (22 << 10)));
        // The request decides, not the model's maximum.
        let demand = MemoryDemand { available_bytes: 610 << 20, ..EXPERTS };
        let limits = EngineLimits { max_model_len: Some(64), ..EngineLimits::default() };
        assert!(!plan_memory(&demand, &limits).unwrap().experts_in_file);
        let limits = EngineLimits { kv_cache_memory_bytes: Some(30 << 20), ..EngineLimits::default() };
        assert!(plan_memory(&demand, &limits).unwrap().experts_in_file);
    }

    #[test]
    fn a_small_context_with_experts_is_better_than_none() {
        // Experts of one layer only: in a file they free no space.
        let experts = Some(ExpertDemand { num_bytes: 400 << 20, layer_bytes: 400 << 20 });
        let demand = MemoryDemand { available_bytes: 610 << 20, experts, ..DEMAND };
        let plan = plan_memory(&demand, &EngineLimits::default()).unwrap();
        assert_eq!((plan.engine.max_model_len, plan.experts_in_file), (7 * 32, false));
    }

    #[test]
    fn experts_that_do_not_fit_are_an_error_with_numbers() {
        let check = |demand: MemoryDemand, choice: ExpertWeights, kind: ErrorKind, wanted: &[&str]| {
            let error = plan_memory(&demand, &with(choice)).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            wanted.iter().for_each(|text| assert!(error.message().contains(text), "{error}: {text}"));
        };
        let small = MemoryDemand { available_bytes: 219 << 20, ..EXPERTS };
        for choice in [ExpertWeights::Auto, ExpertWeights::File] {
            check(small, choice, ErrorKind::Capacity, &["without experts", "200 MiB", "20 MiB", "219 MiB"]);
        }
        check(small, ExpertWeights::Memory, ErrorKind::Capacity, &["600 MiB", "219 MiB"]);
        check(DEMAND, ExpertWeights::File, ErrorKind::InvalidRequest, &["--expert-weights file"]);
        let none = EngineLimits { block_size: 0, ..EngineLimits::default() };
        assert_eq!(plan_memory(&EXPERTS, &none).unwrap_err().kind(), ErrorKind::InvalidRequest);
    }
}
