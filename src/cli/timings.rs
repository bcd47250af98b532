//! Computes rates from counts and times, for JSON and for the summary line. Pure.

use std::time::Duration;

use serde::Serialize;
use tinyvllm::engine::SequenceStats;

/// Token counts of a sequence.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    cached_tokens: usize,
    preemptions: usize,
    /// Drafted and accepted tokens.
    draft_tokens: usize,
    accepted_draft_tokens: usize,
}

/// Times of a sequence. A rate is null if nothing was measured.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Timings {
    queue_ms: f64,
    prefill_ms: f64,
    decode_ms: f64,
    prompt_tokens_per_second: Option<f64>,
    output_tokens_per_second: Option<f64>,
}

impl From<&SequenceStats> for Usage {
    fn from(stats: &SequenceStats) -> Self {
        Self {
            prompt_tokens: stats.num_prompt_tokens,
            completion_tokens: stats.num_output_tokens,
            cached_tokens: stats.num_cached_tokens,
            preemptions: stats.num_preemptions,
            draft_tokens: stats.num_accepted_draft_tokens + stats.num_rejected_draft_tokens,
            accepted_draft_tokens: stats.num_accepted_draft_tokens,
        }
    }
}

impl From<&SequenceStats> for Timings {
    fn from(stats: &SequenceStats) -> Self {
        // Cached tokens are not computed, and the first output token is computed together with the prompt.
        let num_computed = stats.num_prompt_tokens.saturating_sub(stats.num_cached_tokens);
        let num_decoded = stats.num_output_tokens.saturating_sub(1);
        Self {
            queue_ms: milliseconds(stats.queue_time),
            prefill_ms: milliseconds(stats.prefill_time),
            decode_ms: milliseconds(stats.decode_time),
            prompt_tokens_per_second: rate(num_computed, stats.prefill_time),
            output_tokens_per_second: rate(num_decoded, stats.decode_time),
        }
    }
}

/// Counts and times of a run, for its summary line.
#[derive(Debug, Clone, Default)]
pub(crate) struct Summary {
    sequences: Vec<SequenceStats>,
}

impl Summary {
    pub(crate) fn add(&mut self, stats: SequenceStats) {
        self.sequences.push(stats);
    }

    /// The summary line. `elapsed` is the time from the first submission to the last token. Sequences run at
    /// the same time, so their own times do not add up to it.
    pub(crate) fn line(&self, elapsed: Duration) -> String {
        let num_output: usize = self.sequences.iter().map(|stats| stats.num_output_tokens).sum();
        if let [stats] = self.sequences.as_slice() {
            let timings = Timings::from(stats);
            let cached = match stats.num_cached_tokens {
                0 => String::new(),
                cached => format!(", {cached} of them cached"),
            };
            return format!(
                "prompt: {}{cached}{} · generation: {}{}",
                tokens(stats.num_prompt_tokens),
                per_second(timings.prompt_tokens_per_second),
                tokens(num_output),
                per_second(timings.output_tokens_per_second)
            );
        }
        let num_prompt: usize = self.sequences.iter().map(|stats| stats.num_prompt_tokens).sum();
        format!(
            "{} sequences in {:.2} s · prompt: {}{} · generation: {}{}",
            self.sequences.len(),
            elapsed.as_secs_f64(),
            tokens(num_prompt),
            per_second(rate(num_prompt, elapsed)),
            tokens(num_output),
            per_second(rate(num_output, elapsed))
        )
    }
}

fn milliseconds(duration: Duration) -> f64 {
    // Whole microseconds; further digits are noise.
    duration.as_micros() as f64 / 1e3
}

fn rate(num_tokens: usize, time: Duration) -> Option<f64> {
    let measured = num_tokens > 0 && !time.is_zero();
    measured.then(|| (num_tokens as f64 / time.as_secs_f64() * 100.0).round() / 100.0)
}

fn tokens(count: usize) -> String {
    if count == 1 { "1 token".to_owned() } else { format!("{count} tokens") }
}

fn per_second(rate: Option<f64>) -> String {
    rate.map(|rate| format!(", {rate:.1} tokens/s")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATS: SequenceStats = SequenceStats {
        num_prompt_tokens: 100,
        num_output_tokens: 11,
        prefix_miss: None,
        num_cached_tokens: 50,
        num_disk_tokens: 0,
        num_host_tokens: 0,
        num_preemptions: 0,
        num_accepted_draft_tokens: 0,
        num_rejected_draft_tokens: 0,
        queue_time: Duration::from_millis(1),
        prefill_time: Duration::from_millis(500),
        decode_time: Duration::from_millis(2_000),
    };

    #[test]
    fn rates_count_what_was_computed() {
        let timings = Timings::from(&STATS);
        assert_eq!(timings.prompt_tokens_per_second, Some(100.0));
        assert_eq!(timings.output_tokens_per_second, Some(5.0));
        assert_eq!(timings.queue_ms, 1.0);
        let one = SequenceStats { num_output_tokens: 1, decode_time: Duration::ZERO, ..STATS };
        assert_eq!(Timings::from(&one).output_tokens_per_second, None);
    }

    #[test]
    fn lines() {
        let mut summary = Summary::default();
        summary.add(STATS);
        assert_eq!(
            summary.line(Duration::from_secs(3)),
            "prompt: 100 tokens, 50 of them cached, 100.0 tokens/s · generation: 11 tokens, 5.0 tokens/s"
        );
        summary.add(SequenceStats { num_output_tokens: 9, ..STATS });
        assert_eq!(
            summary.line(Duration::from_secs(4)),
            "2 sequences in 4.00 s · prompt: 200 tokens, 50.0 tokens/s · generation: 20 tokens, 5.0 tokens/s"
        );
    }
}
