//! Computes the displayed numbers from two pages of metrics.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::snapshot::{Histogram, Increase, Quantile, Snapshot};

/// What a server did in an interval, and its current state. `None` if its metrics lack a number.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Readings {
    pub(super) models: Vec<String>,
    pub(super) interval: Duration,
    pub(super) num_running: Option<f64>,
    pub(super) num_waiting: Option<f64>,
    /// Fraction of the KV cache in use.
    pub(super) kv_cache_usage: Option<f64>,
    /// Number of blocks of the KV cache, and tokens in each.
    pub(super) kv_cache_blocks: Option<(u64, u64)>,
    /// Tokens and preemptions per second.
    pub(super) prompt_throughput: Option<f64>,
    pub(super) generation_throughput: Option<f64>,
    pub(super) preemptions: Option<f64>,
    /// Fraction of the interval's prompt tokens that the prefix cache had; `None` if there was no prompt.
    pub(super) prefix_cache_hit_rate: Option<f64>,
    /// Of the tokens that it lacked and that were looked up in files or elsewhere, the fraction that was
    /// found; `None` if there was no look-up.
    pub(super) external_hit_rate: Option<f64>,
    /// Where they were looked up, if the server reports it.
    pub(super) external_tier: &'static str,
    /// Fraction of the interval's drafted tokens that were accepted; `None` if there were none.
    pub(super) draft_acceptance_rate: Option<f64>,
    /// Finished requests per second, by reason.
    pub(super) finished: BTreeMap<String, f64>,
    pub(super) ttft: Latency,
    pub(super) itl: Latency,
    pub(super) e2e: Latency,
}

/// Quantiles of an interval, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Latency {
    pub(super) median: Option<Quantile>,
    pub(super) p95: Option<Quantile>,
}

impl Readings {
    /// Computes the differences between two pages that are `interval` apart.
    pub(super) fn between(before: &Snapshot, after: &Snapshot, interval: Duration) -> Self {
        let increase = Increase { before, after };
        let seconds = interval.as_secs_f64().max(1e-3);
        let rate = |names: &[&str]| increase.of(names).map(|grown| grown / seconds);
        let hit_rate = || {
            let queries = increase.of(&["vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"])?;
            let hits = increase.of(&["vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"])?;
            (queries > 0.0).then(|| (hits / queries).clamp(0.0, 1.0))
        };
        let external_hit_rate = || {
            let queries = increase.of(&["vllm:external_prefix_cache_queries"])?;
            let hits = increase.of(&["vllm:external_prefix_cache_hits"])?;
            (queries > 0.0).then(|| (hits / queries).clamp(0.0, 1.0))
        };
        let has = |name: &str| after.sum(&[name]).is_some();
        let acceptance_rate = || {
            let tried = increase.of(&["vllm:spec_decode_num_draft_tokens"])?;
            let accepted = increase.of(&["vllm:spec_decode_num_accepted_tokens"])?;
            (tried > 0.0).then(|| (accepted / tried).clamp(0.0, 1.0))
        };
        let finished = increase.by_label(&["vllm:request_success"], "finished_reason").unwrap_or_default();
        let latency = |names: &[&str]| Latency::of(increase.histogram(names).as_ref());
        let config = |label: &str| after.label("vllm:cache_config_info", label)?.parse().ok();
        Self {
            models: after.label_values("model_name").into_iter().map(str::to_owned).collect(),
            interval,
            num_running: after.sum(&["vllm:num_requests_running"]),
            num_waiting: after.sum(&["vllm:num_requests_waiting"]),
            kv_cache_usage: after.mean(&["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"]),
            kv_cache_blocks: config("num_gpu_blocks").zip(config("block_size")),
            prompt_throughput: rate(&["vllm:prompt_tokens"]),
            generation_throughput: rate(&["vllm:generation_tokens"]),
            preemptions: rate(&["vllm:num_preemptions"]),
            prefix_cache_hit_rate: hit_rate(),
            external_hit_rate: external_hit_rate(),
            external_tier: match (has("tinyvllm_kv_offload_blocks"), has("tinyvllm_prefix_store_packs")) {
                (true, true) => "cpu or disk",
                (true, false) => "from cpu",
                (false, _) => "from disk",
            },
            draft_acceptance_rate: acceptance_rate(),
            finished: finished.into_iter().map(|(reason, grown)| (reason, grown / seconds)).collect(),
            ttft: latency(&["vllm:time_to_first_token_seconds"]),
            itl: latency(&["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"]),
            e2e: latency(&["vllm:e2e_request_latency_seconds"]),
        }
    }

    /// Whether all displayed metrics are missing: then this is not a model server.
    pub(super) fn is_empty(&self) -> bool {
        self.num_running.is_none() && self.generation_throughput.is_none()
    }

    /// JSON for programs. Rates are per second, latencies in milliseconds.
    pub(super) fn json(&self, url: &str) -> Value {
        let latency = |latency: &Latency| {
            let of = |quantile: Option<Quantile>| {
                quantile.map(|(Quantile::About(seconds) | Quantile::Above(seconds))| seconds * 1e3)
            };
            json!({"median": of(latency.median), "p95": of(latency.p95)})
        };
        json!({
            "url": url,
            "models": self.models,
            "interval_s": self.interval.as_secs_f64(),
            "num_requests_running": self.num_running,
            "num_requests_waiting": self.num_waiting,
            "kv_cache_usage": self.kv_cache_usage,
            "num_kv_cache_blocks": self.kv_cache_blocks.map(|(blocks, _)| blocks),
            "prompt_throughput": self.prompt_throughput,
            "generation_throughput": self.generation_throughput,
            "preemptions_per_s": self.preemptions,
            "prefix_cache_hit_rate": self.prefix_cache_hit_rate,
            "external_prefix_cache_hit_rate": self.external_hit_rate,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "finished_per_s": self.finished,
            "ttft_ms": latency(&self.ttft),
            "itl_ms": latency(&self.itl),
            "e2e_ms": latency(&self.e2e),
        })
    }
}

impl Latency {
    fn of(histogram: Option<&Histogram>) -> Self {
        let quantile = |fraction| histogram.and_then(|histogram| histogram.quantile(fraction));
        Self { median: quantile(0.5), p95: quantile(0.95) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page as vLLM 0.10 writes it, with an old name among the new ones.
    fn page(tokens: u32, hits: u32, requests: u32) -> Snapshot {
        Snapshot::parse(&format!(
            "# TYPE vllm:num_requests_running gauge\n\
             vllm:num_requests_running{{engine=\"0\",model_name=\"m\"}} 3.0\n\
             vllm:num_requests_waiting{{engine=\"0\",model_name=\"m\"}} 1.0\n\
             vllm:gpu_cache_usage_perc{{engine=\"0\",model_name=\"m\"}} 0.25\n\
             vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"100\"}} 1.0\n\
             vllm:generation_tokens_total{{model_name=\"m\"}} {tokens}\n\
             vllm:prefix_cache_queries_total{{model_name=\"m\"}} 100\n\
             vllm:prefix_cache_hits_total{{model_name=\"m\"}} {hits}\n\
             vllm:request_success_total{{finished_reason=\"stop\",model_name=\"m\"}} {requests}\n\
             vllm:request_success_total{{finished_reason=\"length\",model_name=\"m\"}} 2\n\
             vllm:e2e_request_latency_seconds_bucket{{le=\"1.0\",model_name=\"m\"}} {requests}\n\
             vllm:e2e_request_latency_seconds_bucket{{le=\"+Inf\",model_name=\"m\"}} {requests}\n"
        ))
        .unwrap()
    }

    #[test]
    fn rates_are_of_the_interval() {
        let (before, after) = (page(1_000, 10, 4), page(1_500, 10, 8));
        let readings = Readings::between(&before, &after, Duration::from_secs(2));
        assert_eq!((readings.num_running, readings.num_waiting), (Some(3.0), Some(1.0)));
        assert_eq!((readings.kv_cache_usage, readings.kv_cache_blocks), (Some(0.25), Some((100, 16))));
        assert_eq!((readings.generation_throughput, readings.prompt_throughput), (Some(250.0), None));
        assert_eq!(readings.finished["stop"], 2.0);
        assert_eq!(readings.e2e.median, Some(Quantile::About(0.5)));
        assert_eq!((readings.ttft, readings.prefix_cache_hit_rate), (Latency::default(), None));
        assert_eq!(readings.models, ["m"]);
        assert!(!readings.is_empty());
        let json = readings.json("http://x");
        assert_eq!(json["e2e_ms"]["median"], 500.0);
        assert_eq!(json["ttft_ms"]["p95"], Value::Null);
    }

    #[test]
    fn what_files_gave_is_a_share_of_what_was_looked_up_in_them() {
        let page = |queries: u32, hits: u32| {
            let text = format!(
                "vllm:external_prefix_cache_queries_total {queries}\nvllm:external_prefix_cache_hits_total {hits}\n"
            );
            Snapshot::parse(&text).unwrap()
        };
        let rate =
            |before, after| Readings::between(&before, &after, Duration::from_secs(1)).external_hit_rate;
        assert_eq!(rate(page(100, 50), page(300, 200)), Some(0.75));
        assert_eq!(rate(page(100, 50), page(100, 50)), None);
    }

    #[test]
    fn a_page_of_something_else() {
        let page = Snapshot::parse("go_goroutines 8\n").unwrap();
        assert!(Readings::between(&page, &page, Duration::from_secs(1)).is_empty());
    }
}
