//! The results of `tinyvllm bench serve`: JSON with vLLM's keys, and vLLM's table.

use std::fmt::{self, Write as _};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::args::{Backend, MetricName};
use super::load::Run;
use super::statistics::Distribution;
use super::summary::Summary;

/// Width of the table in columns.
const WIDTH: usize = 50;
/// Most error messages that are shown.
const MAX_ERRORS: usize = 5;

/// Settings of the run that the result repeats.
#[derive(Debug, Clone)]
pub(super) struct Setup {
    pub(super) backend: Backend,
    pub(super) model: String,
    /// The model whose tokenizer made the prompts: the server's, or none.
    pub(super) tokenizer: Option<String>,
    pub(super) num_prompts: usize,
    pub(super) request_rate: f64,
    pub(super) burstiness: f64,
    pub(super) max_concurrency: Option<usize>,
    pub(super) metrics: Vec<MetricName>,
    pub(super) percentiles: Vec<f64>,
    pub(super) metadata: Vec<(String, String)>,
    pub(super) time: SystemTime,
}

/// The whole result.
#[derive(Debug)]
pub(super) struct Report<'a> {
    pub(super) setup: &'a Setup,
    pub(super) summary: &'a Summary,
    pub(super) run: &'a Run,
}

impl MetricName {
    /// Names in keys, in lines, and in headings.
    fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Ttft => ("ttft", "TTFT", "Time to First Token"),
            Self::Tpot => ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
            Self::Itl => ("itl", "ITL", "Inter-token Latency"),
            Self::E2el => ("e2el", "E2EL", "End-to-end Latency"),
            Self::ClientQueueTime => ("client_queue_time", "Client Queue Time", "Client-side Queueing"),
        }
    }

    fn of(self, summary: &Summary) -> &Distribution {
        match self {
            Self::Ttft => &summary.ttft,
            Self::Tpot => &summary.tpot,
            Self::Itl => &summary.itl,
            Self::E2el => &summary.e2el,
            Self::ClientQueueTime => &summary.queue_time,
        }
    }
}

impl Report<'_> {
    /// The JSON object. `with_details` adds the numbers of every request.
    pub(super) fn json(&self, with_details: bool) -> Value {
        let Self { setup, summary, run } = self;
        let rate = match setup.request_rate {
            rate if rate.is_finite() => json!(rate),
            _ => json!("inf"),
        };
        // JSON has no infinity.
        let burstiness = match setup.burstiness {
            burstiness if burstiness.is_finite() => json!(burstiness),
            _ => json!("inf"),
        };
        let Value::Object(mut result) = json!({
            "date": date(setup.time),
            "endpoint_type": setup.backend.name(),
            "backend": setup.backend.name(),
            "label": null,
            "model_id": setup.model,
            "tokenizer_id": setup.tokenizer,
            "num_prompts": setup.num_prompts,
        }) else {
            return Value::Null;
        };
        result.extend(setup.metadata.iter().map(|(key, value)| (key.clone(), json!(value))));
        let Value::Object(numbers) = json!({
            "request_rate": rate,
            "burstiness": burstiness,
            "max_concurrency": setup.max_concurrency,
            "duration": summary.duration,
            "completed": summary.completed,
            "failed": summary.failed,
            "total_input_tokens": summary.total_input_tokens,
            "total_output_tokens": summary.total_output_tokens,
            "request_throughput": summary.request_throughput,
            "request_goodput": summary.request_goodput,
            "output_throughput": summary.output_throughput,
            "total_token_throughput": summary.total_token_throughput,
            "max_output_tokens_per_s": summary.max_output_tokens_per_s,
            "max_concurrent_requests": summary.max_concurrent_requests,
            "max_scheduling_delay_ms": summary.max_scheduling_delay_ms,
            "interrupted": run.is_interrupted,
        }) else {
            return Value::Null;
        };
        result.extend(numbers);
        if with_details {
            result.extend(details(run));
        }
        for metric in &setup.metrics {
            let (key, _, _) = metric.names();
            for (prefix, value) in statistics(metric.of(summary), &setup.percentiles) {
                result.insert(format!("{}_{key}_ms", prefix.to_lowercase()), json!(value));
            }
        }
        Value::Object(result)
    }

    /// The default name of the result's file.
    pub(super) fn file_name(&self) -> PathBuf {
        let setup = self.setup;
        let concurrency = setup.max_concurrency.map(|max| format!("-concurrency{max}")).unwrap_or_default();
        let model = setup.model.rsplit(['/', '\\']).next().unwrap_or_default();
        let (backend, date) = (setup.backend.name(), date(setup.time));
        format!("{backend}-{}qps{concurrency}-{model}-{date}.json", setup.request_rate).into()
    }

    /// The distinct error messages of failed requests, with their counts.
    pub(super) fn errors(&self) -> Vec<String> {
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for error in self.run.outcomes.iter().filter_map(|outcome| outcome.error.as_deref()) {
            match counts.iter_mut().find(|(known, _)| *known == error) {
                Some((_, count)) => *count += 1,
                None => counts.push((error, 1)),
            }
        }
        let num_kinds = counts.len();
        let mut lines: Vec<String> =
            counts.iter().take(MAX_ERRORS).map(|(error, count)| format!("{count} × {error}")).collect();
        if num_kinds > MAX_ERRORS {
            lines.push(format!("and {} other messages", num_kinds - MAX_ERRORS));
        }
        lines
    }
}

/// Lists with an entry for each request, in seconds, as in vLLM.
fn details(run: &Run) -> Map<String, Value> {
    let outcomes = &run.outcomes;
    let seconds = |time: &Duration| time.as_secs_f64();
    let output_lens = outcomes.iter().map(|outcome| match outcome.error {
        None => outcome.num_output_tokens,
        Some(_) => 0,
    });
    let times = |time: fn(&super::request::Outcome) -> Duration| -> Vec<f64> {
        outcomes.iter().map(|outcome| seconds(&time(outcome))).collect()
    };
    let itls: Vec<Vec<f64>> =
        outcomes.iter().map(|outcome| outcome.itls.iter().map(seconds).collect()).collect();
    let texts: Vec<&str> = outcomes.iter().map(|outcome| outcome.text.as_str()).collect();
    let errors: Vec<&str> =
        outcomes.iter().map(|outcome| outcome.error.as_deref().unwrap_or_default()).collect();
    let Value::Object(details) = json!({
        "input_lens": outcomes.iter().map(|outcome| outcome.num_prompt_tokens).collect::<Vec<_>>(),
        "output_lens": output_lens.collect::<Vec<_>>(),
        "ttfts": times(|outcome| outcome.ttft),
        "itls": itls,
        "latencies": times(|outcome| outcome.latency),
        "start_times": times(|outcome| outcome.start),
        "queue_times": times(|outcome| outcome.queue_time),
        "generated_texts": texts,
        "errors": errors,
    }) else {
        return Map::new();
    };
    details
}

/// Statistics of a distribution with their names in lines.
fn statistics(distribution: &Distribution, percentiles: &[f64]) -> Vec<(String, f64)> {
    let mut all = vec![
        ("Mean".to_owned(), distribution.mean()),
        ("Median".to_owned(), distribution.median()),
        ("Std".to_owned(), distribution.standard_deviation()),
    ];
    // `{}` writes 99 as 99 and 99.9 as 99.9.
    all.extend(percentiles.iter().map(|percent| (format!("P{percent}"), distribution.percentile(*percent))));
    all
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setup, summary, run } = self;
        writeln!(f, "{:=^WIDTH$}", " Serving Benchmark Result ")?;
        let mut count = |name: &str, value: usize| line(f, name, &value.to_string());
        count("Successful requests:", summary.completed)?;
        count("Failed requests:", summary.failed)?;
        if run.is_interrupted {
            count("Not finished:", setup.num_prompts.saturating_sub(run.outcomes.len()))?;
        }
        if let Some(max) = setup.max_concurrency {
            count("Maximum request concurrency:", max)?;
        }
        let mut number = |name: &str, value: f64| line(f, name, &format!("{value:.2}"));
        if setup.request_rate.is_finite() {
            number("Request rate configured (RPS):", setup.request_rate)?;
        }
        number("Benchmark duration (s):", summary.duration)?;
        line(f, "Total input tokens:", &summary.total_input_tokens.to_string())?;
        line(f, "Total generated tokens:", &summary.total_output_tokens.to_string())?;
        let mut number = |name: &str, value: f64| line(f, name, &format!("{value:.2}"));
        number("Request throughput (req/s):", summary.request_throughput)?;
        if let Some(goodput) = summary.request_goodput {
            number("Request goodput (req/s):", goodput)?;
        }
        number("Output token throughput (tok/s):", summary.output_throughput)?;
        number("Peak output token throughput (tok/s):", summary.max_output_tokens_per_s)?;
        number("Peak concurrent requests:", summary.max_concurrent_requests as f64)?;
        number("Total token throughput (tok/s):", summary.total_token_throughput)?;
        number("Max scheduling delay (ms):", summary.max_scheduling_delay_ms)?;
        for metric in &setup.metrics {
            let (_, name, title) = metric.names();
            writeln!(f, "{title:-^WIDTH$}")?;
            for (statistic, value) in statistics(metric.of(summary), &setup.percentiles) {
                line(f, &format!("{statistic} {name} (ms):"), &format!("{value:.2}"))?;
            }
        }
        f.write_str(&"=".repeat(WIDTH))?;
        f.write_char('\n')
    }
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, value: &str) -> fmt::Result {
    writeln!(f, "{name:<40} {value}")
}

/// `20260131-235959`, in UTC.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant's algorithm: years begin in March, so that a leap day is the last one.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second_of_day / 3_600, second_of_day / 60 % 60, second_of_day % 60);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

#[cfg(test)]
mod tests {
    use super::super::request::Outcome;
    use super::super::summary::ServiceLevels;
    use super::*;

    fn setup() -> Setup {
        Setup {
            backend: Backend::OpenaiChat,
            model: "org/model".to_owned(),
            tokenizer: None,
            num_prompts: 4,
            request_rate: 2.5,
            burstiness: f64::INFINITY,
            max_concurrency: Some(3),
            metrics: vec![MetricName::Ttft, MetricName::ClientQueueTime],
            percentiles: vec![99.0, 99.9],
            metadata: vec![("machine".to_owned(), "x".to_owned())],
            time: UNIX_EPOCH + Duration::from_secs(1_709_251_199),
        }
    }

    #[test]
    fn dates() {
        let check = |seconds: u64, wanted: &str| {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), wanted);
        };
        check(0, "19700101-000000");
        check(951_782_399, "20000228-235959");
        check(951_782_400, "20000229-000000");
        check(1_709_251_199, "20240229-235959");
        check(4_102_444_800, "21000101-000000");
    }

    #[test]
    fn the_selected_metrics_and_percentiles_are_there() {
        let failed = |error: &str| Outcome { error: Some(error.to_owned()), ..Outcome::default() };
        let good = Outcome { ttft: Duration::from_millis(3), num_output_tokens: 2, ..Outcome::default() };
        let run = Run {
            outcomes: vec![failed("busy"), good, failed("busy"), failed("cut off")],
            duration: Duration::from_secs(1),
            ..Run::default()
        };
        let summary = Summary::of(&run, ServiceLevels::default());
        let setup = setup();
        let report = Report { setup: &setup, summary: &summary, run: &run };
        let json = report.json(true);
        for (key, wanted) in [
            ("date", json!("20240229-235959")),
            ("machine", json!("x")),
            ("burstiness", json!("inf")),
            ("failed", json!(3)),
            ("p99_ttft_ms", json!(3.0)),
            ("p99.9_ttft_ms", json!(3.0)),
            ("std_client_queue_time_ms", json!(0.0)),
            ("output_lens", json!([0, 2, 0, 0])),
            ("errors", json!(["busy", "", "busy", "cut off"])),
        ] {
            assert_eq!(json[key], wanted, "{key}");
        }
        assert!(json.get("mean_itl_ms").is_none());
        assert!(report.json(false).get("ttfts").is_none());
        assert_eq!(report.errors(), ["2 × busy", "1 × cut off"]);
        let name = report.file_name();
        assert_eq!(name.to_str(), Some("openai-chat-2.5qps-concurrency3-model-20240229-235959.json"));
        let table = report.to_string();
        assert!(table.contains("P99.9 TTFT (ms):                         3.00\n"), "{table}");
        assert!(table.lines().next().is_some_and(|line| line.len() == WIDTH), "{table}");
    }
}
