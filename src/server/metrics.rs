//! Counters and histograms with vLLM's names, so that gateways, dashboards and autoscalers know them.
//!
//! Recording is a few atomic additions. A scrape reads atomics and the engine's latest totals. Neither waits
//! for the other or for a step.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::account::RequestMemory;
use super::kv_events::KvEventTotals;
use tinyvllm::config::EngineConfig;
use tinyvllm::engine::{EngineStats, FinishReason, SequenceStats, SpeculationStats, StepSizes};

const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const BETWEEN_TOKENS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const LATENCY: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
/// Bounds for the number of sequences of a request.
const SEQUENCES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
const REASONS: [FinishReason; 4] =
    [FinishReason::Stop, FinishReason::Length, FinishReason::Abort, FinishReason::Error];

/// Everything that is counted outside the engine.
#[derive(Debug)]
pub(super) struct Metrics {
    labels: String,
    prompt_tokens: AtomicU64,
    /// Without the tokens that are discarded because a stop string came before them.
    generated_tokens: AtomicU64,
    finished: [AtomicU64; REASONS.len()],
    pub(super) time_to_first_token: Histogram,
    pub(super) inter_token_latency: Histogram,
    time_per_output_token: Histogram,
    e2e_latency: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    inference_time: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    request_max_generation_tokens: Histogram,
    request_n: Histogram,
    request_max_tokens: Histogram,
}

impl Metrics {
    pub(super) fn new(model_name: &str, max_model_len: usize) -> Self {
        let counts = one_two_five(max_model_len);
        Self {
            labels: format!("model_name=\"{}\",engine=\"0\"", escape(model_name)),
            prompt_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
            finished: Default::default(),
            time_to_first_token: Histogram::new(FIRST_TOKEN.to_vec()),
            inter_token_latency: Histogram::new(BETWEEN_TOKENS.to_vec()),
            time_per_output_token: Histogram::new(BETWEEN_TOKENS.to_vec()),
            e2e_latency: Histogram::new(LATENCY.to_vec()),
            queue_time: Histogram::new(LATENCY.to_vec()),
            prefill_time: Histogram::new(LATENCY.to_vec()),
            decode_time: Histogram::new(LATENCY.to_vec()),
            inference_time: Histogram::new(LATENCY.to_vec()),
            request_prompt_tokens: Histogram::new(counts.clone()),
            request_generation_tokens: Histogram::new(counts.clone()),
            request_max_generation_tokens: Histogram::new(counts.clone()),
            request_n: Histogram::new(SEQUENCES.to_vec()),
            request_max_tokens: Histogram::new(counts),
        }
    }

    /// Counts a computed prompt.
    pub(super) fn count_prompt(&self, num_tokens: usize) {
        self.prompt_tokens.fetch_add(num_tokens as u64, Ordering::Relaxed);
    }

    /// Counts a token that is sent to a client.
    pub(super) fn count_token(&self) {
        self.generated_tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a sequence that ended by itself.
    pub(super) fn count_finished(&self, reason: FinishReason, stats: &SequenceStats) {
        self.count_reason(reason);
        let inference_time = stats.prefill_time + stats.decode_time;
        self.e2e_latency.observe_time(stats.queue_time + inference_time);
        self.queue_time.observe_time(stats.queue_time);
        self.prefill_time.observe_time(stats.prefill_time);
        self.decode_time.observe_time(stats.decode_time);
        self.inference_time.observe_time(inference_time);
        self.request_prompt_tokens.observe(stats.num_prompt_tokens as f64);
        self.request_generation_tokens.observe(stats.num_output_tokens as f64);
        if let Some(num_gaps) = stats.num_output_tokens.checked_sub(1).filter(|gaps| *gaps > 0) {
            self.time_per_output_token.observe(stats.decode_time.as_secs_f64() / num_gaps as f64);
        }
    }

    /// Counts a request whose sequences have all ended, the longest one with `num_generated` tokens.
    pub(super) fn count_request(&self, n: usize, max_tokens: Option<usize>, num_generated: usize) {
        self.request_n.observe(n as f64);
        self.request_max_generation_tokens.observe(num_generated as f64);
        if let Some(max_tokens) = max_tokens {
            self.request_max_tokens.observe(max_tokens as f64);
        }
    }

    /// Counts the reason for which a sequence ended.
    pub(super) fn count_reason(&self, reason: FinishReason) {
        for (counter, known) in self.finished.iter().zip(REASONS) {
            if known == reason {
                counter.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Renders Prometheus's text format.
    pub(super) fn render(
        &self,
        stats: &EngineStats,
        config: &EngineConfig,
        device: &str,
        http: &[(&'static str, u16, u64)],
        kv_event_totals: Option<KvEventTotals>,
        request_memory: &RequestMemory,
    ) -> String {
        let mut page = Page { text: String::with_capacity(32 << 10), labels: &self.labels };
        let usage = stats.num_used_blocks as f64 / config.num_blocks.max(1) as f64;
        page.gauge("vllm:num_requests_running", "Sequences that hold blocks", stats.num_running as f64);
        page.gauge("vllm:num_requests_waiting", "Sequences in the queue", stats.num_waiting as f64);
        // Dashboards and gateways know this metric, and some of the counters, by older names too.
        for name in ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"] {
            page.gauge(name, "Fraction of the KV cache in use, 0 to 1", usage);
        }
        page.head("vllm:lora_requests_info", "Adapters (always none)", "gauge");
        let adapters = "max_lora=\"0\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"";
        page.sample("vllm:lora_requests_info", adapters, super::state::unix_seconds() as f64);
        page.head("vllm:cache_config_info", "The KV cache", "gauge");
        let cache = format!("block_size=\"{}\",num_gpu_blocks=\"{}\"", config.block_size, config.num_blocks);
        page.sample("vllm:cache_config_info", &cache, 1.0);

        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        page.counter("vllm:prompt_tokens_total", "Prompt tokens processed", load(&self.prompt_tokens));
        page.counter("vllm:generation_tokens_total", "Tokens delivered", load(&self.generated_tokens));
        page.head("vllm:request_success_total", "Finished sequences", "counter");
        for (counter, reason) in self.finished.iter().zip(REASONS) {
            let label = format!("finished_reason=\"{}\"", reason.name());
            page.sample("vllm:request_success_total", &label, load(counter) as f64);
        }
        let scheduler = &stats.scheduler;
        page.counter("vllm:num_preemptions_total", "Sequences computed again", scheduler.num_preemptions);
        for name in ["vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"] {
            page.counter(name, "Prompt tokens looked up in the prefix cache", scheduler.prefix_cache_queries);
        }
        for name in ["vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"] {
            page.counter(name, "Prompt tokens found in the prefix cache", scheduler.prefix_cache_hits);
        }
        prefix_tiers(&mut page, stats);
        speculation(&mut page, &stats.speculation, config.speculative.num_speculative_tokens);
        page.head("tinyvllm_http_requests_total", "Answers by path and status", "counter");
        for (path, status, count) in http {
            let labels = format!("path=\"{path}\",status=\"{status}\"");
            page.sample("tinyvllm_http_requests_total", &labels, *count as f64);
        }

        let name = "tinyvllm_request_memory_bytes";
        page.gauge(name, "Memory that requests take for what they sent", request_memory.used() as f64);
        let name = "tinyvllm_request_memory_limit_bytes";
        page.gauge(name, "Limit of that memory (--max-request-memory)", request_memory.limit() as f64);

        if let Some(totals) = kv_event_totals {
            let name = "tinyvllm_kv_event_batches_total";
            page.counter(name, "Batches of events of the prefix cache", totals.batches);
            let name = "tinyvllm_kv_event_batches_lost_total";
            page.counter(name, "Batches of events that were not sent, because too many waited", totals.lost);
            let name = "tinyvllm_kv_event_batches_missed_total";
            page.counter(
                name,
                "Batches of events that slow subscribers missed, counted for each subscriber",
                totals.missed,
            );
            let name = "tinyvllm_kv_event_peers_closed_total";
            let help = "Peers of the event sockets that were closed because of a limit or invalid data";
            page.counter(name, help, totals.closed_peers);
        }

        for (name, help, histogram) in [
            ("vllm:time_to_first_token_seconds", "Until the first token", &self.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Between two tokens", &self.inter_token_latency),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean time of a token after the first",
                &self.time_per_output_token,
            ),
            ("vllm:e2e_request_latency_seconds", "From submission to the end", &self.e2e_latency),
            ("vllm:request_queue_time_seconds", "Until the first step", &self.queue_time),
            (
                "vllm:request_prefill_time_seconds",
                "From the first step to the first token",
                &self.prefill_time,
            ),
            ("vllm:request_decode_time_seconds", "From the first token to the last", &self.decode_time),
            (
                "vllm:request_inference_time_seconds",
                "From the first step to the last token",
                &self.inference_time,
            ),
            ("vllm:request_prompt_tokens", "Prompt tokens of a request", &self.request_prompt_tokens),
            (
                "vllm:request_generation_tokens",
                "Generated tokens of a request",
                &self.request_generation_tokens,
            ),
            (
                "vllm:request_max_num_generation_tokens",
                "Generated tokens of the longest sequence of a request",
                &self.request_max_generation_tokens,
            ),
            ("vllm:request_params_n", "Sequences that a request asks for", &self.request_n),
            (
                "vllm:request_params_max_tokens",
                "The most tokens that a request asks for",
                &self.request_max_tokens,
            ),
        ] {
            let (counts, sum) = histogram.read();
            page.histogram(name, help, &histogram.bounds, &counts, sum);
        }
        page.histogram(
            "vllm:iteration_tokens_total",
            "Tokens computed in a step",
            &StepSizes::BOUNDS.map(|bound| bound as f64),
            &stats.step_sizes.counts,
            stats.num_computed_tokens as f64,
        );
        page.head("tinyvllm_build_info", "This program", "gauge");
        let features = if cfg!(feature = "metal") { "metal" } else { "" };
        let build = format!(
            "version=\"{}\",device=\"{}\",features=\"{features}\"",
            env!("CARGO_PKG_VERSION"),
            escape(device)
        );
        page.sample("tinyvllm_build_info", &build, 1.0);
        page.text
    }
}

/// Metrics of prefixes in host memory or in files.
fn prefix_tiers(page: &mut Page<'_>, stats: &EngineStats) {
    if stats.prefix_store.is_none() && stats.host_tier.is_none() {
        return;
    }
    page.counter(
        "vllm:external_prefix_cache_queries_total",
        "Tokens looked up in host memory and in files, because the prefix cache lacked them",
        stats.num_external_queries,
    );
    page.counter(
        "vllm:external_prefix_cache_hits_total",
        "Tokens found in host memory or in files",
        stats.num_external_hits,
    );
    if let Some(tier) = &stats.host_tier {
        for (name, help, value) in [
            ("tinyvllm_kv_offload_stored_blocks_total", "Blocks copied to the host", tier.num_stored_blocks),
            ("tinyvllm_kv_offload_read_blocks_total", "Blocks copied back", tier.num_read_blocks),
            (
                "tinyvllm_kv_offload_dropped_blocks_total",
                "Blocks that were not copied, because a copy failed or all slots were in use",
                tier.num_dropped_blocks,
            ),
        ] {
            page.counter(name, help, value);
        }
        page.gauge("tinyvllm_kv_offload_blocks", "Blocks in host memory", tier.num_blocks as f64);
        page.gauge("tinyvllm_kv_offload_bytes", "Bytes of these", tier.num_bytes as f64);
        let name = "tinyvllm_kv_offload_max_bytes";
        page.gauge(name, "Limit of bytes (--kv-offload-gb)", tier.max_bytes as f64);
    }
    let Some(store) = &stats.prefix_store else { return };
    for (name, help, value) in [
        ("tinyvllm_prefix_store_written_blocks_total", "Blocks written to files", store.num_written_blocks),
        ("tinyvllm_prefix_store_written_bytes_total", "Bytes of these", store.num_written_bytes),
        (
            "tinyvllm_prefix_store_dropped_blocks_total",
            "Blocks that were not written, because too many waited or writing failed",
            store.num_dropped_blocks,
        ),
        ("tinyvllm_prefix_store_read_blocks_total", "Blocks read from files", store.num_read_blocks),
        ("tinyvllm_prefix_store_read_bytes_total", "Bytes of these", store.num_read_bytes),
        (
            "tinyvllm_prefix_store_failed_reads_total",
            "Blocks that were missing or damaged",
            store.num_failed_reads,
        ),
    ] {
        page.counter(name, help, value);
    }
    page.gauge("tinyvllm_prefix_store_packs", "Files with blocks of this model", store.num_packs as f64);
    let name = "tinyvllm_prefix_store_bytes";
    page.gauge(name, "Bytes of the folder (--prefix-cache-dir)", store.num_directory_bytes as f64);
}

/// A histogram.
#[derive(Debug)]
pub(super) struct Histogram {
    bounds: Vec<f64>,
    /// Not cumulative; one more than there are bounds.
    counts: Vec<AtomicU64>,
    /// The bits of an f64.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: Vec<f64>) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0) }
    }

    pub(super) fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let add = |bits| Some((f64::from_bits(bits) + value).to_bits());
        // The closure always returns a value, so this cannot fail.
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    pub(super) fn observe_time(&self, time: Duration) {
        self.observe(time.as_secs_f64());
    }

    fn read(&self) -> (Vec<u64>, f64) {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        (counts, f64::from_bits(self.sum.load(Ordering::Relaxed)))
    }
}

/// Metrics of speculative decoding with vLLM's names; none without it.
fn speculation(page: &mut Page<'_>, stats: &SpeculationStats, num_tokens: usize) {
    if num_tokens == 0 {
        return;
    }
    let counters = [
        ("vllm:spec_decode_num_drafts_total", "Drafts tried", stats.num_drafts),
        ("vllm:spec_decode_num_draft_tokens_total", "Drafted tokens tried", stats.num_draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens_total", "Accepted drafted tokens", stats.num_accepted_tokens),
    ];
    counters.into_iter().for_each(|(name, help, value)| page.counter(name, help, value));
    let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
    page.head(name, "Accepted drafted tokens, by their position in the draft", "counter");
    for (position, count) in stats.num_accepted_at.iter().take(num_tokens).enumerate() {
        page.sample(name, &format!("position=\"{position}\""), *count as f64);
    }
}

/// The page being written.
struct Page<'a> {
    text: String,
    labels: &'a str,
}

impl Page<'_> {
    fn head(&mut self, name: &str, help: &str, kind: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, more_labels: &str, value: f64) {
        let comma = if more_labels.is_empty() { "" } else { "," };
        let _ = writeln!(self.text, "{name}{{{}{comma}{more_labels}}} {value}", self.labels);
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, help, "gauge");
        self.sample(name, "", value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, help, "counter");
        self.sample(name, "", value as f64);
    }

    fn histogram(&mut self, name: &str, help: &str, bounds: &[f64], counts: &[u64], sum: f64) {
        self.head(name, help, "histogram");
        let mut total = 0;
        for (index, count) in counts.iter().enumerate() {
            total += count;
            let bound = bounds.get(index).map_or("+Inf".to_owned(), |bound| format!("{bound:?}"));
            self.sample(&format!("{name}_bucket"), &format!("le=\"{bound}\""), total as f64);
        }
        self.sample(&format!("{name}_sum"), "", sum);
        self.sample(&format!("{name}_count"), "", total as f64);
    }
}

/// 1, 2, 5, 10, 20, 50 … up to `limit`.
fn one_two_five(limit: usize) -> Vec<f64> {
    let decades = (0..).map(|exponent| 10_f64.powi(exponent));
    let all = decades.flat_map(|decade| [decade, 2.0 * decade, 5.0 * decade]);
    all.take_while(|bound| *bound <= limit as f64).collect()
}

/// Escapes a label's value.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_cumulative_buckets_and_escaped_labels() {
        let metrics = Metrics::new("a\"b\\c\nd", 300);
        let stats = SequenceStats {
            num_prompt_tokens: 5,
            num_output_tokens: 3,
            decode_time: Duration::from_millis(40),
            ..SequenceStats::default()
        };
        metrics.count_finished(FinishReason::Stop, &stats);
        metrics.inter_token_latency.observe(0.06);
        metrics.inter_token_latency.observe(100.0);
        let mut totals = EngineStats { num_used_blocks: 32, num_computed_tokens: 9, ..Default::default() };
        totals.step_sizes.counts[1] = 2;
        metrics.count_request(2, Some(7), 3);
        metrics.count_token();
        let http = [("/health", 429, 3)];
        let events = KvEventTotals { batches: 7, lost: 2, missed: 3, closed_peers: 1 };
        let config = EngineConfig::default();
        let page = metrics.render(&totals, &config, "cpu", &http, Some(events), &RequestMemory::new(9));
        let labels = "model_name=\"a\\\"b\\\\c\\nd\",engine=\"0\"";
        for line in [
            format!("vllm:kv_cache_usage_perc{{{labels}}} 0.25"),
            format!("vllm:request_success_total{{{labels},finished_reason=\"stop\"}} 1"),
            format!("vllm:request_prompt_tokens_bucket{{{labels},le=\"2.0\"}} 0"),
            format!("vllm:request_prompt_tokens_bucket{{{labels},le=\"5.0\"}} 1"),
            format!("vllm:request_prompt_tokens_bucket{{{labels},le=\"+Inf\"}} 1"),
            format!("vllm:request_time_per_output_token_seconds_sum{{{labels}}} 0.02"),
            format!("vllm:inter_token_latency_seconds_bucket{{{labels},le=\"0.05\"}} 0"),
            format!("vllm:inter_token_latency_seconds_bucket{{{labels},le=\"80.0\"}} 1"),
            format!("vllm:inter_token_latency_seconds_count{{{labels}}} 2"),
            format!("vllm:iteration_tokens_total_bucket{{{labels},le=\"8.0\"}} 2"),
            format!("vllm:iteration_tokens_total_sum{{{labels}}} 9"),
            format!("vllm:gpu_cache_usage_perc{{{labels}}} 0.25"),
            format!("vllm:gpu_prefix_cache_hits_total{{{labels}}} 0"),
            format!("vllm:generation_tokens_total{{{labels}}} 1"),
            format!("vllm:request_params_n_bucket{{{labels},le=\"2.0\"}} 1"),
            format!("vllm:request_params_max_tokens_sum{{{labels}}} 7"),
            format!("vllm:request_max_num_generation_tokens_sum{{{labels}}} 3"),
            format!("tinyvllm_http_requests_total{{{labels},path=\"/health\",status=\"429\"}} 3"),
            format!("tinyvllm_kv_event_batches_lost_total{{{labels}}} 2"),
            format!("tinyvllm_kv_event_batches_missed_total{{{labels}}} 3"),
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is missing in\n{page}");
        }
        assert_eq!(one_two_five(300), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
    }
}
