//! Computes throughput and latencies from the outcomes of requests, with vLLM's definitions.

use std::time::Duration;

use super::load::Run;
use super::request::Outcome;
use super::statistics::Distribution;

/// Service levels: a request is good if it meets all that are given.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct ServiceLevels {
    pub(super) ttft_ms: Option<f64>,
    pub(super) tpot_ms: Option<f64>,
    pub(super) e2el_ms: Option<f64>,
}

/// The results of a run. Rates are per second; times are in milliseconds. Only successful requests count.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Summary {
    pub(super) duration: f64,
    pub(super) completed: usize,
    pub(super) failed: usize,
    pub(super) total_input_tokens: usize,
    pub(super) total_output_tokens: usize,
    pub(super) request_throughput: f64,
    /// `None` if no service level was given.
    pub(super) request_goodput: Option<f64>,
    pub(super) output_throughput: f64,
    pub(super) total_token_throughput: f64,
    /// The maximum over the seconds from the first request on.
    pub(super) max_output_tokens_per_s: f64,
    pub(super) max_concurrent_requests: usize,
    /// Time to the first token.
    pub(super) ttft: Distribution,
    /// Mean time per token after the first one, for requests with several tokens.
    pub(super) tpot: Distribution,
    /// Time between two events with output.
    pub(super) itl: Distribution,
    /// Time to the last token.
    pub(super) e2el: Distribution,
    /// Time until a request was sent, because of the limit on concurrency.
    pub(super) queue_time: Distribution,
    pub(super) max_scheduling_delay_ms: f64,
    /// Requests whose tokens the server did not report.
    pub(super) num_without_usage: usize,
}

impl Summary {
    pub(super) fn of(run: &Run, levels: ServiceLevels) -> Self {
        let good: Vec<&Outcome> = run.outcomes.iter().filter(|outcome| outcome.error.is_none()).collect();
        let duration = run.duration.as_secs_f64().max(f64::MIN_POSITIVE);
        let total_input_tokens = good.iter().map(|outcome| outcome.num_prompt_tokens).sum::<usize>();
        let total_output_tokens = good.iter().map(|outcome| outcome.num_output_tokens).sum::<usize>();
        let distribution = |time: fn(&Outcome) -> Duration| {
            Distribution::of(good.iter().map(|outcome| milliseconds(time(outcome))))
        };
        let num_kept = good.iter().filter(|outcome| levels.are_kept_by(outcome)).count();
        Self {
            duration,
            completed: good.len(),
            failed: run.outcomes.len() - good.len(),
            total_input_tokens,
            total_output_tokens,
            request_throughput: good.len() as f64 / duration,
            request_goodput: levels.is_any_given().then_some(num_kept as f64 / duration),
            output_throughput: total_output_tokens as f64 / duration,
            total_token_throughput: (total_input_tokens + total_output_tokens) as f64 / duration,
            max_output_tokens_per_s: busiest_second(&good),
            max_concurrent_requests: most_at_once(&good),
            ttft: distribution(|outcome| outcome.ttft),
            tpot: Distribution::of(good.iter().filter_map(|outcome| time_per_output_token(outcome))),
            itl: Distribution::of(good.iter().flat_map(|outcome| &outcome.itls).copied().map(milliseconds)),
            e2el: distribution(|outcome| outcome.latency),
            queue_time: distribution(|outcome| outcome.queue_time),
            max_scheduling_delay_ms: milliseconds(run.max_scheduling_delay),
            num_without_usage: good.iter().filter(|outcome| !outcome.has_usage).count(),
        }
    }
}

impl ServiceLevels {
    fn is_any_given(&self) -> bool {
        *self != Self::default()
    }

    fn are_kept_by(&self, outcome: &Outcome) -> bool {
        let keeps = |limit: Option<f64>, value: f64| limit.is_none_or(|limit| value <= limit);
        keeps(self.ttft_ms, milliseconds(outcome.ttft))
            && keeps(self.tpot_ms, time_per_output_token(outcome).unwrap_or(0.0))
            && keeps(self.e2el_ms, milliseconds(outcome.latency))
    }
}

/// `None` if there is no second token.
fn time_per_output_token(outcome: &Outcome) -> Option<f64> {
    let num_gaps = outcome.num_output_tokens.checked_sub(1).filter(|num| *num > 0)?;
    Some(milliseconds(outcome.latency.saturating_sub(outcome.ttft)) / num_gaps as f64)
}

/// Output tokens in the busiest second. An event counts as the mean number of tokens per event of its
/// request.
fn busiest_second(outcomes: &[&Outcome]) -> f64 {
    let Some(first) = outcomes.iter().map(|outcome| outcome.start).min() else { return 0.0 };
    let mut seconds: Vec<f64> = Vec::new();
    for outcome in outcomes {
        let tokens_per_event = outcome.num_output_tokens as f64 / (outcome.itls.len() + 1) as f64;
        let mut time = outcome.start - first + outcome.ttft;
        for gap in std::iter::once(&Duration::ZERO).chain(&outcome.itls) {
            time += *gap;
            let second = usize::try_from(time.as_secs()).unwrap_or(usize::MAX - 1);
            if seconds.len() <= second {
                seconds.resize(second + 1, 0.0);
            }
            seconds[second] += tokens_per_event;
        }
    }
    seconds.into_iter().fold(0.0, f64::max)
}

/// The maximum of concurrent requests. A request that ends when another begins does not overlap with it.
fn most_at_once(outcomes: &[&Outcome]) -> usize {
    let begins = outcomes.iter().map(|outcome| (outcome.start, true));
    let ends = outcomes.iter().map(|outcome| (outcome.start + outcome.latency, false));
    let mut changes: Vec<(Duration, bool)> = begins.chain(ends).collect();
    // False, which is an end, sorts before true.
    changes.sort_unstable();
    let mut num_running = 0_usize;
    let mut most = 0;
    for (_, is_begin) in changes {
        num_running = if is_begin { num_running + 1 } else { num_running.saturating_sub(1) };
        most = most.max(num_running);
    }
    most
}

pub(super) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(start_ms: u64, ttft_ms: u64, itls_ms: &[u64], num_output_tokens: usize) -> Outcome {
        let itls: Vec<Duration> = itls_ms.iter().copied().map(Duration::from_millis).collect();
        Outcome {
            start: Duration::from_millis(start_ms),
            ttft: Duration::from_millis(ttft_ms),
            latency: Duration::from_millis(ttft_ms) + itls.iter().sum::<Duration>(),
            itls,
            num_prompt_tokens: 10,
            num_output_tokens,
            has_usage: true,
            ..Outcome::default()
        }
    }

    fn run(outcomes: Vec<Outcome>) -> Run {
        Run { outcomes, duration: Duration::from_secs(4), ..Run::default() }
    }

    #[test]
    fn only_successes_count() {
        let failed = Outcome { error: Some("x".to_owned()), ..outcome(0, 9_000, &[], 99) };
        let run = run(vec![outcome(0, 100, &[20, 40], 3), failed, outcome(500, 300, &[], 1)]);
        let summary = Summary::of(&run, ServiceLevels::default());
        assert_eq!((summary.completed, summary.failed), (2, 1));
        assert_eq!((summary.total_input_tokens, summary.total_output_tokens), (20, 4));
        assert_eq!((summary.request_throughput, summary.output_throughput), (0.5, 1.0));
        assert_eq!((summary.total_token_throughput, summary.request_goodput), (6.0, None));
        assert_eq!((summary.ttft.mean(), summary.e2el.mean()), (200.0, 230.0));
        assert_eq!((summary.tpot.mean(), summary.itl.mean()), (30.0, 30.0));
    }

    #[test]
    fn several_tokens_in_one_event_are_several_tokens() {
        let summary = Summary::of(&run(vec![outcome(0, 100, &[400], 9)]), ServiceLevels::default());
        assert_eq!((summary.tpot.mean(), summary.itl.mean()), (50.0, 400.0));
        assert_eq!(summary.max_output_tokens_per_s, 9.0);
    }

    #[test]
    fn goodput_asks_for_every_level() {
        let run = run(vec![
            outcome(0, 100, &[20], 2),
            outcome(0, 201, &[20], 2),
            outcome(0, 100, &[60], 2),
            outcome(0, 200, &[], 1),
        ]);
        let check = |levels: ServiceLevels, wanted| {
            assert_eq!(Summary::of(&run, levels).request_goodput, wanted, "{levels:?}");
        };
        let levels = ServiceLevels { ttft_ms: Some(200.0), ..ServiceLevels::default() };
        check(levels, Some(0.75));
        check(ServiceLevels { tpot_ms: Some(50.0), ..levels }, Some(0.5));
        check(ServiceLevels { tpot_ms: Some(50.0), e2el_ms: Some(150.0), ..levels }, Some(0.25));
    }

    #[test]
    fn the_busiest_second_and_the_most_at_once() {
        let outcomes = [
            outcome(1_000, 500, &[300, 300], 3),
            outcome(1_200, 300, &[], 1),
            // Begins when the second one ends.
            outcome(1_500, 100, &[], 1),
        ];
        let outcomes: Vec<&Outcome> = outcomes.iter().collect();
        assert_eq!((busiest_second(&outcomes), most_at_once(&outcomes)), (4.0, 2));
        assert_eq!((busiest_second(&[]), most_at_once(&[])), (0.0, 0));
    }
}
