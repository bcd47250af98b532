//! The flags of `tinyvllm bench serve`, with vLLM's names and meanings.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{BoolishValueParser, NonEmptyStringValueParser, RangedU64ValueParser};
use clap::{ArgAction, Args, ValueEnum};
use tinyvllm::config::EngineConfig;

use super::summary::ServiceLevels;
use crate::flags::MessageArgs;
use crate::value::parse_seconds;

/// The flags of `tinyvllm bench serve`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServeBenchArgs {
    #[command(flatten)]
    pub(super) server: TargetArgs,
    #[command(flatten)]
    pub(super) workload: WorkloadArgs,
    #[command(flatten)]
    pub(super) traffic: TrafficArgs,
    #[command(flatten)]
    pub(super) sampling: RequestArgs,
    #[command(flatten)]
    pub(super) result: ResultArgs,
    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// The server to measure.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub(super) struct TargetArgs {
    /// The server, such as http://127.0.0.1:8000 or https://example.com [default: from --host and --port]
    #[arg(long, visible_alias = "url", value_name = "URL")]
    pub(super) base_url: Option<String>,
    /// Host, if --base-url is not given
    #[arg(long, default_value = "127.0.0.1", value_parser = NonEmptyStringValueParser::new())]
    pub(super) host: String,
    /// Port, if --base-url is not given
    #[arg(long, default_value_t = 8_000)]
    pub(super) port: u16,
    /// Interface of the server [default: openai-chat if the endpoint ends with chat/completions, otherwise
    /// openai]
    #[arg(long, value_name = "NAME")]
    pub(super) backend: Option<Backend>,
    /// Path of the interface [default: /v1/completions, or /v1/chat/completions for openai-chat]
    #[arg(long, value_name = "PATH")]
    pub(super) endpoint: Option<String>,
    /// Name of the model in requests [default: the first one of /v1/models]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub(super) model: Option<String>,
    /// Key of the server [default: OPENAI_API_KEY of the environment]
    #[arg(long, value_name = "KEY", hide_env_values = true)]
    pub(super) api_key: Option<String>,
    /// Seconds to wait for the server to be ready; 0 tries once
    #[arg(long, default_value = "0", value_name = "S", value_parser = parse_seconds)]
    pub(super) ready_check_timeout_sec: Duration,
}

/// Interface of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Backend {
    /// Completions
    #[value(alias = "vllm")]
    Openai,
    /// Chat completions
    OpenaiChat,
}

impl Backend {
    /// Its name in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Openai => "openai",
            Self::OpenaiChat => "openai-chat",
        }
    }
}

/// The prompts to send.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Workload")]
pub(super) struct WorkloadArgs {
    /// random, prefix_repetition (some prefixes, shared by many requests) or custom (a file)
    #[arg(long, default_value = "random", value_name = "NAME")]
    pub(super) dataset_name: DatasetName,
    /// File for custom: one JSON value a line: {"prompt": "…", "output_tokens": 100}, a text, or a ShareGPT
    /// conversation
    #[arg(long, value_name = "FILE")]
    pub(super) dataset_path: Option<PathBuf>,
    /// Number of requests
    #[arg(long, default_value_t = 1_000, value_name = "N", value_parser = number(1..=MOST_REQUESTS))]
    pub(super) num_prompts: usize,
    /// Seed of prompts and arrivals
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(super) seed: u64,
    /// Tokens in a prompt, for every dataset with such a length
    #[arg(long, value_name = "TOKENS", value_parser = number(1..=LONGEST))]
    pub(super) input_len: Option<usize>,
    /// Tokens to generate, for every dataset
    #[arg(long, value_name = "TOKENS", value_parser = number(1..=LONGEST))]
    pub(super) output_len: Option<usize>,
    /// random: tokens in a prompt after the shared prefix [default: 1024, or fewer if the context is shorter]
    #[arg(long, value_name = "TOKENS", value_parser = number(1..=LONGEST))]
    pub(super) random_input_len: Option<usize>,
    /// random: tokens to generate
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = number(1..=LONGEST))]
    pub(super) random_output_len: usize,
    /// random: relative range of lengths, 0 to 1, to both sides
    #[arg(long, default_value_t = 0.0, value_name = "X", value_parser = parse_fraction)]
    pub(super) random_range_ratio: f64,
    /// random: tokens of a prefix that all prompts share
    #[arg(long, default_value_t = 0, value_name = "TOKENS", value_parser = number(0..=LONGEST))]
    pub(super) random_prefix_len: usize,
    /// prefix_repetition: tokens of each prefix
    #[arg(long, default_value_t = 256, value_name = "TOKENS", value_parser = number(1..=LONGEST))]
    pub(super) prefix_repetition_prefix_len: usize,
    /// prefix_repetition: tokens after the prefix
    #[arg(long, default_value_t = 256, value_name = "TOKENS", value_parser = number(0..=LONGEST))]
    pub(super) prefix_repetition_suffix_len: usize,
    /// prefix_repetition: number of prefixes
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = number(1..=MOST_REQUESTS))]
    pub(super) prefix_repetition_num_prefixes: usize,
    /// prefix_repetition: tokens to generate
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = number(1..=LONGEST))]
    pub(super) prefix_repetition_output_len: usize,
    /// custom: tokens to generate if a line does not set them
    #[arg(long, default_value_t = 256, value_name = "TOKENS", value_parser = number(1..=LONGEST))]
    pub(super) custom_output_len: usize,
    /// Size of the vocabulary, for prompts of token ids on a server without /tokenize
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=LARGEST_VOCABULARY))]
    pub(super) vocab_size: Option<u32>,
}

/// The source of prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum DatasetName {
    /// Random tokens
    Random,
    /// Shared prefixes
    #[value(name = "prefix_repetition", alias = "prefix-repetition")]
    PrefixRepetition,
    /// A file
    Custom,
}

/// The times of requests.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Traffic")]
pub(super) struct TrafficArgs {
    /// Requests per second; inf sends all at once
    #[arg(long, default_value = "inf", value_name = "RATE", value_parser = parse_rate)]
    pub(super) request_rate: f64,
    /// 1 is a Poisson process; lower values are burstier, higher ones more even; inf is a fixed interval
    #[arg(long, default_value = "1", value_name = "X", value_parser = parse_burstiness)]
    pub(super) burstiness: f64,
    /// Maximum number of concurrent requests
    #[arg(long, value_name = "N", value_parser = number(1..=MOST_REQUESTS))]
    pub(super) max_concurrency: Option<usize>,
    /// Number of warm-up requests, which are not measured
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = number(0..=MOST_REQUESTS))]
    pub(super) num_warmups: usize,
    /// Seconds after which a request has failed
    #[arg(long, default_value = "21600", value_name = "S", value_parser = parse_seconds, hide_short_help = true)]
    pub(super) request_timeout: Duration,
}

/// Parameters of every request.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Requests")]
pub(super) struct RequestArgs {
    /// Generate to the full length [default: true for random, otherwise false]
    #[arg(
        long,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_name = "BOOL",
        action = ArgAction::Set,
        value_parser = BoolishValueParser::new()
    )]
    pub(super) ignore_eos: Option<bool>,
    /// 0 always picks the most likely token [default: the server's]
    #[arg(long, value_name = "X", value_parser = parse_finite)]
    pub(super) temperature: Option<f64>,
    /// Sample from the most likely tokens that together have this probability
    #[arg(long, value_name = "X", value_parser = parse_finite, hide_short_help = true)]
    pub(super) top_p: Option<f64>,
    /// Sample from this many most likely tokens
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub(super) top_k: Option<i64>,
    /// JSON object with further parameters of every request
    #[arg(long, value_name = "JSON", value_parser = parse_object, hide_short_help = true)]
    pub(super) extra_body: Option<serde_json::Map<String, serde_json::Value>>,
}

/// The output.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Results")]
pub(super) struct ResultArgs {
    /// Distributions to report: ttft, tpot, itl, e2el, client_queue_time
    #[arg(long, value_delimiter = ',', default_value = "ttft,tpot,itl,e2el", value_name = "NAMES")]
    pub(super) percentile_metrics: Vec<MetricName>,
    /// Percentiles of them, such as 50,90,99.9
    #[arg(long, value_delimiter = ',', default_value = "99", value_name = "LIST", value_parser = parse_percent)]
    pub(super) metric_percentiles: Vec<f64>,
    /// Count the requests that keep these service levels in milliseconds, such as ttft:200 tpot:50
    #[arg(long, num_args = 1.., value_name = "NAME:MS")]
    pub(super) goodput: Vec<ServiceLevel>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(super) json: bool,
    /// Write the JSON object to a file
    #[arg(long)]
    pub(super) save_result: bool,
    /// Include lengths, times, texts and errors of every request
    #[arg(long)]
    pub(super) save_detailed: bool,
    /// Folder of that file
    #[arg(long, value_name = "DIR")]
    pub(super) result_dir: Option<PathBuf>,
    /// Name of that file [default: from backend, rate, model and date]
    #[arg(long, value_name = "NAME")]
    pub(super) result_filename: Option<PathBuf>,
    /// Further keys of the JSON object, such as machine=laptop
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub(super) metadata: Vec<(String, String)>,
    /// Show no progress bar
    #[arg(long, visible_alias = "no-progress")]
    pub(super) disable_tqdm: bool,
}

/// A measured distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum MetricName {
    /// Time to first token
    Ttft,
    /// Time per output token after the first
    Tpot,
    /// Inter-token latency
    Itl,
    /// End-to-end latency
    E2el,
    /// Wait under --max-concurrency
    #[value(name = "client_queue_time", alias = "client-queue-time")]
    ClientQueueTime,
}

/// A limit on a latency.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ServiceLevel {
    name: LevelName,
    milliseconds: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LevelName {
    Ttft,
    Tpot,
    E2el,
}

impl FromStr for ServiceLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write it as ttft:200, tpot:50 or e2el:3000, in milliseconds".to_owned();
        let (name, milliseconds) = text.split_once(':').ok_or_else(wrong)?;
        let name = match name {
            "ttft" => LevelName::Ttft,
            "tpot" => LevelName::Tpot,
            "e2el" => LevelName::E2el,
            _ => return Err(wrong()),
        };
        let milliseconds = milliseconds.parse().ok().filter(|limit| *limit >= 0.0).ok_or_else(wrong)?;
        Ok(Self { name, milliseconds })
    }
}

impl ResultArgs {
    /// All service levels together.
    pub(super) fn service_levels(&self) -> ServiceLevels {
        let mut levels = ServiceLevels::default();
        for level in &self.goodput {
            let limit = match level.name {
                LevelName::Ttft => &mut levels.ttft_ms,
                LevelName::Tpot => &mut levels.tpot_ms,
                LevelName::E2el => &mut levels.e2el_ms,
            };
            *limit = Some(level.milliseconds);
        }
        levels
    }
}

/// The most requests of a run, which are all in memory.
const MOST_REQUESTS: u64 = 1_000_000;
/// The most tokens of a length; no context has more.
const LONGEST: u64 = EngineConfig::LONGEST as u64;
/// No vocabulary is larger, in tokens.
const LARGEST_VOCABULARY: i64 = 1 << 24;

fn number(range: RangeInclusive<u64>) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(range)
}

/// Requests per second. A lower rate than the least one would not end.
fn parse_rate(text: &str) -> Result<f64, String> {
    parse_positive(text, 1e-4..=1e9)
}

fn parse_burstiness(text: &str) -> Result<f64, String> {
    parse_positive(text, 1e-3..=1e6)
}

/// A number in the range, or infinite.
fn parse_positive(text: &str, range: RangeInclusive<f64>) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(number) if range.contains(&number) || number == f64::INFINITY => Ok(number),
        _ => Err(format!("it must be at least {} and at most {}, or inf", range.start(), range.end())),
    }
}

/// JSON has no other numbers.
fn parse_finite(text: &str) -> Result<f64, String> {
    let number = text.trim().parse::<f64>().ok().filter(|number| number.is_finite());
    number.ok_or_else(|| "it must be a number such as 0.7".to_owned())
}

fn parse_fraction(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(number) if (0.0..1.0).contains(&number) => Ok(number),
        _ => Err("it must be at least 0 and below 1".to_owned()),
    }
}

fn parse_percent(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(number) if (0.0..=100.0).contains(&number) => Ok(number),
        _ => Err("it must be 0 to 100".to_owned()),
    }
}

fn parse_object(text: &str) -> Result<serde_json::Map<String, serde_json::Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("it must be a JSON object: {error}"))
}

fn parse_pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write it as KEY=VALUE")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_levels() {
        assert_eq!("ttft:200".parse(), Ok(ServiceLevel { name: LevelName::Ttft, milliseconds: 200.0 }));
        for wrong in ["", "ttft", "ttft:", "ttft:-1", "ttft:NaN", "itl:5", "ttft=5"] {
            assert!(wrong.parse::<ServiceLevel>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_in_their_ranges() {
        assert_eq!(parse_rate("inf"), Ok(f64::INFINITY));
        assert_eq!((parse_rate("0.5"), parse_burstiness("0.5")), (Ok(0.5), Ok(0.5)));
        for wrong in ["0", "-1", "NaN", "", "x", "1e-20", "1e-300", "1e300", "-inf"] {
            assert!(parse_rate(wrong).is_err() && parse_burstiness(wrong).is_err(), "{wrong}");
        }
        for wrong in ["NaN", "inf", "1e999", ""] {
            assert!(parse_finite(wrong).is_err(), "{wrong}");
        }
        assert!(parse_fraction("1").is_err() && parse_fraction("0.99").is_ok());
        assert!(parse_percent("100.1").is_err() && parse_percent("99.9").is_ok());
        assert!(parse_object("[1]").is_err() && parse_object("{\"a\":1}").is_ok());
        assert_eq!(parse_pair("a = b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
    }
}
