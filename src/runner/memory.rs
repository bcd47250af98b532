//! How much of the machine's memory goes to the KV cache, decided before anything is loaded.

use crate::config::EngineConfig;
use crate::{Error, ErrorKind, Result};

/// Share of the memory that is left beside the weights which the KV cache may take by default.
const DEFAULT_SHARE: f64 = 0.5;

/// What is known before loading.
#[derive(Debug, Clone, Copy)]
pub struct MemoryDemand {
    /// Bytes of the weights as they will be in memory.
    pub weight_bytes: u64,
    /// Bytes of K and V for one token in all layers.
    pub kv_bytes_per_token: u64,
    /// The longest sequence that the model was trained for.
    pub max_position_embeddings: usize,
    /// Bytes that may be used in all.
    pub available_bytes: u64,
}

/// What the user asked for; `None` leaves the choice to the plan.
#[derive(Debug, Clone)]
pub struct EngineLimits {
    /// `--max-model-len`.
    pub max_model_len: Option<usize>,
    /// `--max-num-seqs`.
    pub max_num_seqs: usize,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: usize,
    /// `--block-size`.
    pub block_size: usize,
    /// `--kv-cache-memory-bytes`.
    pub kv_cache_memory_bytes: Option<u64>,
    /// `--enable-prefix-caching`.
    pub enable_prefix_caching: bool,
    /// `--num-scheduler-steps`.
    pub num_scheduler_steps: usize,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            max_model_len: None,
            max_num_seqs: 32,
            max_num_batched_tokens: 512,
            block_size: 32,
            kv_cache_memory_bytes: None,
            enable_prefix_caching: true,
            num_scheduler_steps: 1,
        }
    }
}

/// Chooses the context length and the number of blocks.
///
/// The cache gets `--kv-cache-memory-bytes`, or half of what is left beside the weights, but never more
/// than all sequences can use. Without `--max-model-len` the context is the model's, or less if the
/// cache cannot hold one sequence of that length; an asked-for length that does not fit is an error.
///
/// # Errors
/// [`ErrorKind::Capacity`] if the weights or a context of the asked length do not fit;
/// [`ErrorKind::InvalidRequest`] if limits contradict each other or the model.
pub fn plan_memory(demand: &MemoryDemand, limits: &EngineLimits) -> Result<EngineConfig> {
    if limits.block_size == 0 {
        return Err(Error::invalid_request("--block-size is 0; it must be at least 1"));
    }
    let left = demand.available_bytes.checked_sub(demand.weight_bytes).ok_or_else(|| {
        Error::new(
            ErrorKind::Capacity,
            format!(
                "the weights take {} MiB, but only {} MiB of memory are available",
                mebibytes(demand.weight_bytes),
                mebibytes(demand.available_bytes)
            ),
        )
        .with_hint("use a smaller or more strongly quantised model")
    })?;
    if let Some(wanted) = limits.max_model_len
        && wanted > demand.max_position_embeddings
    {
        return Err(Error::invalid_request(format!(
            "--max-model-len is {wanted}, but the model was trained for {} tokens",
            demand.max_position_embeddings
        )));
    }
    if let Some(wanted) = limits.kv_cache_memory_bytes
        && wanted > left
    {
        return Err(Error::new(
            ErrorKind::Capacity,
            format!(
                "--kv-cache-memory-bytes asks for {} MiB, but only {} MiB are left beside the weights",
                mebibytes(wanted),
                mebibytes(left)
            ),
        ));
    }
    let budget = limits.kv_cache_memory_bytes.unwrap_or((left as f64 * DEFAULT_SHARE) as u64);
    let block_bytes = demand.kv_bytes_per_token.max(1).saturating_mul(limits.block_size as u64);
    let affordable = usize::try_from(budget / block_bytes).unwrap_or(usize::MAX);
    let longest = limits.max_model_len.unwrap_or(demand.max_position_embeddings);
    let useful = longest.div_ceil(limits.block_size).saturating_mul(limits.max_num_seqs.max(1));
    let num_blocks = affordable.min(useful).min(u32::MAX as usize / limits.block_size);
    let capacity = num_blocks * limits.block_size;
    let max_model_len = match limits.max_model_len {
        Some(wanted) if wanted > capacity => {
            return Err(Error::new(
                ErrorKind::Capacity,
                format!(
                    "--max-model-len {wanted} needs {} MiB of KV cache, but it has {} MiB, {capacity} tokens",
                    mebibytes(demand.kv_bytes_per_token.saturating_mul(wanted as u64)),
                    mebibytes(budget)
                ),
            )
            .with_hint("lower --max-model-len or raise --kv-cache-memory-bytes"));
        }
        Some(wanted) => wanted,
        None => demand.max_position_embeddings.min(capacity),
    };
    let config = EngineConfig {
        max_model_len,
        max_num_seqs: limits.max_num_seqs,
        max_num_batched_tokens: limits.max_num_batched_tokens,
        block_size: limits.block_size,
        num_blocks,
        enable_prefix_caching: limits.enable_prefix_caching,
        num_scheduler_steps: limits.num_scheduler_steps,
        max_num_requests: 1_024,
    };
    if max_model_len < 2 {
        return Err(Error::new(
            ErrorKind::Capacity,
            format!("the KV cache of {} MiB holds {capacity} tokens", mebibytes(budget)),
        )
        .with_hint("raise --kv-cache-memory-bytes"));
    }
    config.validate()?;
    Ok(config)
}

/// Bytes of memory that this process may still take: what the system calls available, or the rest of
/// the control group's limit if that is less. Without a way to know, 8 GiB.
#[must_use]
pub fn available_memory_bytes() -> u64 {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let number = |path: &str| read(path)?.trim().parse::<u64>().ok();
    let system = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1_024)
    });
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(limit, used)| limit.saturating_sub(used));
    match (system, group) {
        (Some(system), Some(group)) => system.min(group),
        (Some(bytes), None) | (None, Some(bytes)) => bytes,
        (None, None) => 8 << 30,
    }
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: MemoryDemand = MemoryDemand {
        weight_bytes: 600 << 20,
        kv_bytes_per_token: 22 << 10,
        max_position_embeddings: 2_048,
        available_bytes: 8 << 30,
    };

    #[test]
    fn takes_what_the_sequences_can_use_or_what_there_is() {
        let config = plan_memory(&DEMAND, &EngineLimits::default()).unwrap();
        assert_eq!((config.max_model_len, config.num_blocks), (2_048, 64 * 32));
        let tight = MemoryDemand { available_bytes: 700 << 20, ..DEMAND };
        let config = plan_memory(&tight, &EngineLimits::default()).unwrap();
        assert_eq!(config.max_model_len, 2_048);
        assert_eq!(config.num_blocks, (50 << 20) / (32 * (22 << 10)));
        let long = MemoryDemand { max_position_embeddings: 1 << 20, ..tight };
        let config = plan_memory(&long, &EngineLimits::default()).unwrap();
        assert_eq!(config.max_model_len, config.kv_cache_tokens(), "the context shrinks to the cache");
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
        let none = EngineLimits { kv_cache_memory_bytes: Some(1), ..limits };
        check(DEMAND, none, ErrorKind::Capacity, &["0 tokens"]);
    }

    #[test]
    fn the_machine_has_some_memory() {
        assert!(available_memory_bytes() > 16 << 20);
    }
}
