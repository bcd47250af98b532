//! `tinyvllm bench`: tokens per second, and the fraction of the machine's memory bandwidth that they use.
//!
//! Generating a token reads all of its weights once, so memory limits the speed on most machines. Compared
//! with the measured bandwidth, tokens per second show the headroom.

mod measure;
mod predictions;
mod report;
mod serve;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use tinyvllm::config::{EngineConfig, SpeculativeConfig, SpeculativeMethod};
use tinyvllm::llm::Llm;
use tinyvllm::ops::{KvCache, MemoryBandwidth, measure_bandwidth};

use self::measure::{GenerationRun, PromptShape, RandomPrompts};
use self::report::{GenerationResult, PromptResult, Report, Spread};
use super::console::Console;
use super::flags::{EngineArgs, MessageArgs, ModelArgs, PositionalModel};
use super::load::{engine_options, load, merge_model};
use super::value::parse_fraction;

/// The flags of `tinyvllm bench`.
#[derive(Debug, Clone, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BenchCommand>,
    #[command(flatten)]
    pub(crate) positional: PositionalModel,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Prompt lengths in tokens, such as 128,512 [default: 512, or less in a small context window]
    #[arg(long, short, value_delimiter = ',', value_name = "TOKENS")]
    pub(crate) prompt_lens: Vec<usize>,
    /// Tokens in the cache before each prompt, such as 0,1900
    #[arg(long, short = 'd', value_delimiter = ',', value_name = "TOKENS", default_value = "0")]
    pub(crate) prompt_depths: Vec<usize>,
    /// Prompts of each length that are computed at once, such as 1,8
    #[arg(long, value_delimiter = ',', value_name = "PROMPTS", default_value = "1")]
    pub(crate) prompts_at_once: Vec<usize>,
    /// Sequences that generate at once, such as 1,4,8
    #[arg(long, value_delimiter = ',', value_name = "SEQUENCES", default_value = "1")]
    pub(crate) batch_sizes: Vec<usize>,
    /// Tokens in each sequence when generation starts [default: 128, or less in a small context window]
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    pub(crate) context_lens: Vec<usize>,
    /// Tokens to generate for each sequence [default: 64, or less in a small context window]
    #[arg(long, short = 'n', value_name = "TOKENS")]
    pub(crate) output_len: Option<usize>,
    /// Measure generation also with predictions in which these fractions of the tokens are right, such as
    /// 0.7,1. Drafts have no other source then, unless --speculative-config is given
    #[arg(long, value_delimiter = ',', value_name = "SHARES", value_parser = parse_fraction)]
    pub(crate) prediction_accuracies: Vec<f64>,
    /// Measurements of each combination, after one warm-up
    #[arg(long, short, default_value_t = 3)]
    pub(crate) repeats: usize,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) messages: MessageArgs,
}

/// Other measurements.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure a running server: throughput and latencies under load
    ///
    /// Sends requests to any server with OpenAI's interface and measures the distributions of the time to the
    /// first token, between tokens and to the end. The times of the requests are fixed before the first one
    /// (--request-rate, --burstiness), so a slow server gets the same load. Flags and JSON keys have the
    /// names of vLLM's `bench serve`.
    Serve(Box<serve::ServeBenchArgs>),
}

/// The measurements to make, with all defaults.
#[derive(Debug)]
struct Plan {
    prompt_lens: Vec<usize>,
    prompt_depths: Vec<usize>,
    prompts_at_once: Vec<usize>,
    batch_sizes: Vec<usize>,
    context_lens: Vec<usize>,
    output_len: usize,
    prediction_accuracies: Vec<f64>,
    repeats: usize,
}

impl Plan {
    fn new(args: &BenchArgs, max_model_len: usize) -> Self {
        let or_default = |given: &[usize], default: usize| match given {
            [] => vec![default.max(1)],
            given => given.to_vec(),
        };
        let plan = Self {
            prompt_lens: or_default(&args.prompt_lens, 512.min(max_model_len / 2)),
            prompt_depths: args.prompt_depths.clone(),
            prompts_at_once: args.prompts_at_once.clone(),
            batch_sizes: args.batch_sizes.clone(),
            context_lens: or_default(&args.context_lens, 128.min(max_model_len / 4)),
            output_len: args.output_len.unwrap_or_else(|| 64.min(max_model_len / 8).max(1)),
            prediction_accuracies: args.prediction_accuracies.clone(),
            repeats: args.repeats,
        };
        // A prompt length of 0 turns off the measurement of prompts.
        Self { prompt_lens: plan.prompt_lens.iter().copied().filter(|len| *len > 0).collect(), ..plan }
    }
}

/// The most measurements of a combination.
const MOST_REPEATS: usize = 10_000;

/// Checks what depends on no model. Lengths are compared with its context.
fn check_counts(args: &BenchArgs) -> tinyvllm::Result<()> {
    let output_len = args.output_len.unwrap_or(1);
    let lists = [
        ("--prompts-at-once", &args.prompts_at_once[..], EngineConfig::MOST_SEQUENCES),
        ("--batch-sizes", &args.batch_sizes[..], EngineConfig::MOST_SEQUENCES),
        ("--context-lens", &args.context_lens[..], EngineConfig::LONGEST),
        ("--output-len", &[output_len][..], EngineConfig::LONGEST),
        ("--repeats", &[args.repeats][..], MOST_REPEATS),
    ];
    for (flag, values, most) in lists {
        if let Some(wrong) = values.iter().find(|value| !(1..=most).contains(value)) {
            let message = format!("{flag} is {wrong}; it must be at least 1 and at most {most}");
            return Err(tinyvllm::Error::invalid_request(message));
        }
    }
    Ok(())
}

/// Measures and prints the results.
///
/// # Errors
/// If the model cannot be loaded, a combination does not fit into its context, or a measurement fails.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    if let Some(BenchCommand::Serve(args)) = &args.command {
        return serve::run(args);
    }
    let console = Console::new(args.messages);
    check_counts(args)?;
    let mut options = engine_options(&args.engine, console)?;
    let largest_batch = args.batch_sizes.iter().copied().max().unwrap_or(1);
    options.limits.max_num_seqs = options.limits.max_num_seqs.max(largest_batch);
    options.limits.speculative = args.engine.speculation.config_or(SpeculativeMethod::Forced);
    let llm = load(&merge_model(&args.positional, &args.model)?, &options, console)?;
    let plan = Plan::new(args, llm.engine().config().max_model_len);
    if !plan.prediction_accuracies.is_empty() && llm.engine().config().speculative == SpeculativeConfig::off()
    {
        console.note("note: predictions have no effect: speculative decoding is off");
    }
    for shape in plan.prompts() {
        measure::check_prompts(&llm, shape)?;
    }
    for (batch_size, context_len) in plan.generations() {
        measure::check_generation(&llm, batch_size, context_len, plan.output_len)?;
    }
    let block_size = llm.engine().config().block_size;
    let kv_bytes_per_token =
        KvCache::bytes_per_token(llm.model_config(), block_size, options.kv_cache_dtype.planned());
    let report = measure_all(&llm, &plan, kv_bytes_per_token, console)?;
    let mut output = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut output, &report).map_err(io::Error::from)?;
        writeln!(output)?;
    } else {
        write!(output, "{report}")?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Plan {
    fn prompts(&self) -> impl Iterator<Item = PromptShape> + '_ {
        let shapes = move |depth: usize, num_tokens: usize| {
            let shape =
                move |num_prompts: &usize| PromptShape { num_prompts: *num_prompts, num_tokens, depth };
            self.prompts_at_once.iter().map(shape)
        };
        let of_depth = move |depth: &usize| {
            let depth = *depth;
            self.prompt_lens.iter().flat_map(move |len| shapes(depth, *len))
        };
        self.prompt_depths.iter().flat_map(of_depth)
    }

    fn predictions(&self) -> impl Iterator<Item = (usize, f64)> + '_ {
        let accuracies = |len: usize| self.prediction_accuracies.iter().map(move |accuracy| (len, *accuracy));
        self.context_lens.iter().flat_map(move |len| accuracies(*len))
    }

    fn generations(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let pairs = |context_len: usize| self.batch_sizes.iter().map(move |size| (*size, context_len));
        self.context_lens.iter().flat_map(move |context_len| pairs(*context_len))
    }
}

fn measure_all(
    llm: &Llm,
    plan: &Plan,
    kv_bytes_per_token: usize,
    console: Console,
) -> anyhow::Result<Report> {
    let mut random = RandomPrompts::new(llm.model_config().vocab_size);
    // A warm-up run touches every page of the weights.
    let num_tokens = 8.min(llm.engine().config().max_model_len - 1);
    measure::prompts(llm, &mut random, PromptShape { num_prompts: 1, num_tokens, depth: 0 })?;

    let mut prompts = Vec::new();
    for shape in plan.prompts() {
        let PromptShape { num_prompts, num_tokens, depth } = shape;
        console.detail(format_args!("measuring {num_prompts} prompts of {num_tokens} tokens at {depth}"));
        let mut rates = Vec::with_capacity(plan.repeats);
        for _ in 0..plan.repeats {
            rates.push(measure::prompts(llm, &mut random, shape)?);
        }
        let tokens_per_second = Spread::of(rates);
        prompts.push(PromptResult { num_prompts, num_prompt_tokens: num_tokens, depth, tokens_per_second });
    }
    let mut generations = Vec::new();
    for (batch_size, context_len) in plan.generations() {
        console.detail(format_args!("measuring {batch_size} × {} tokens at {context_len}", plan.output_len));
        let mut runs = Vec::with_capacity(plan.repeats);
        for _ in 0..plan.repeats {
            runs.push(measure::generation(llm, &mut random, batch_size, context_len, plan.output_len)?);
        }
        generations.push((batch_size, context_len, runs));
    }
    let mut predictions = Vec::new();
    for (context_len, accuracy) in plan.predictions() {
        console.detail(format_args!("measuring predictions with an accuracy of {accuracy}"));
        let lens = (context_len, plan.output_len, plan.repeats);
        predictions.push(predictions::generation(llm, &mut random, lens, accuracy)?);
    }
    let peak_memory_bytes = peak_memory_bytes();
    let traffic = llm.weight_traffic();
    let kv_per_position = kv_bytes_per_token as u64;
    let mut generations: Vec<GenerationResult> = generations
        .into_iter()
        .map(|(batch_size, context_len, runs)| {
            let bytes = BytesRead { weights_per_step: traffic.bytes_per_step(batch_size), kv_per_position };
            generation_result(&runs, batch_size, context_len, plan.output_len, bytes)
        })
        .collect();
    let bandwidth = believable_bandwidth(&generations, || measure_bandwidth(llm.context()));
    let bytes_per_second = bandwidth.map(|memory| memory.bytes_per_second);
    let memory_bandwidth_disturbed = set_bandwidth_fraction(&mut generations, bytes_per_second);
    Ok(Report {
        version: env!("CARGO_PKG_VERSION"),
        model: llm.summary(),
        num_threads: llm.context().num_threads(),
        cpu_level: llm.context().cpu_level().map_or("none", tinyvllm::ops::cpu::CpuLevel::name),
        load_seconds: llm.load_time().as_secs_f64(),
        peak_memory_bytes,
        memory_bandwidth: bytes_per_second,
        memory_bandwidth_disturbed,
        memory_access: bandwidth.map(|memory| memory.access),
        weight_bytes_per_step: traffic.bytes_per_step(1),
        kv_bytes_per_token: kv_per_position,
        prompts,
        generations,
        predictions,
    })
}

/// What a generated token reads from memory.
#[derive(Debug, Clone, Copy)]
struct BytesRead {
    weights_per_step: u64,
    kv_per_position: u64,
}

fn generation_result(
    runs: &[GenerationRun],
    batch_size: usize,
    context_len: usize,
    output_len: usize,
    bytes: BytesRead,
) -> GenerationResult {
    let of_all = |value: &dyn Fn(&GenerationRun) -> f64| Spread::of(runs.iter().map(value).collect());
    let bandwidth = of_all(&|run| {
        let num_steps = run.num_tokens as f64 / batch_size as f64;
        let weights = num_steps * bytes.weights_per_step as f64;
        let kv = run.num_cache_positions as f64 * bytes.kv_per_position as f64;
        (weights + kv) / run.seconds
    });
    GenerationResult {
        batch_size,
        context_len,
        output_len,
        tokens_per_second: of_all(&|run| run.num_tokens as f64 / run.seconds),
        bytes_per_second: bandwidth.median,
        bandwidth_fraction: None,
        dispatches_per_token: of_all(&|run| run.dispatches_per_token).median,
        host_microseconds_per_token: of_all(&|run| run.host_seconds_per_token * 1e6).median,
    }
}

/// The best of up to four measurements. It is repeated while generation was faster than the bandwidth,
/// because then something disturbed the measurement.
fn believable_bandwidth(
    generations: &[GenerationResult],
    measure: impl Fn() -> Option<MemoryBandwidth>,
) -> Option<MemoryBandwidth> {
    let mut best = measure()?;
    for _ in 1..4 {
        if generations.iter().all(|result| result.bytes_per_second <= best.bytes_per_second) {
            break;
        }
        best = measure().filter(|again| again.bytes_per_second > best.bytes_per_second).unwrap_or(best);
    }
    Some(best)
}

/// Sets the fraction of the bandwidth that each generation used. Returns whether one is above 1.
fn set_bandwidth_fraction(generations: &mut [GenerationResult], bytes_per_second: Option<f64>) -> bool {
    for result in &mut *generations {
        result.bandwidth_fraction = bytes_per_second.map(|most| result.bytes_per_second / most);
    }
    generations.iter().any(|result| result.bandwidth_fraction.is_some_and(|fraction| fraction > 1.0))
}

/// The peak memory of this process, where the system reports it.
fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1_024)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn bandwidth_counts_weights_once_a_step_and_the_cache_of_every_sequence() {
        let run = GenerationRun {
            num_tokens: 40,
            seconds: 2.0,
            num_cache_positions: 1_000,
            dispatches_per_token: 2.5,
            host_seconds_per_token: 25e-6,
        };
        let bytes = BytesRead { weights_per_step: 500, kv_per_position: 3 };
        let result = generation_result(&[run], 4, 8, 10, bytes);
        assert_eq!(result.tokens_per_second.median, 20.0);
        assert_eq!(result.bytes_per_second, (10.0 * 500.0 + 3_000.0) / 2.0);
        assert_eq!(result.dispatches_per_token, 2.5);
        assert!((result.host_microseconds_per_token - 25.0).abs() < 1e-9);
    }

    #[test]
    fn a_bandwidth_below_what_was_read_is_measured_again_and_reported_as_disturbed() {
        let check = |measured: &[f64], expected_passes: usize, expected: f64, disturbed: bool| {
            let run = GenerationRun {
                num_tokens: 10,
                seconds: 1.0,
                num_cache_positions: 0,
                dispatches_per_token: 0.0,
                host_seconds_per_token: 0.0,
            };
            let bytes = BytesRead { weights_per_step: 400, kv_per_position: 0 };
            let mut generations = [generation_result(&[run], 1, 8, 10, bytes)];
            let passes = Cell::new(0);
            let measure = || {
                let bytes_per_second = measured[passes.get()];
                passes.set(passes.get() + 1);
                Some(MemoryBandwidth { bytes_per_second, access: "reading" })
            };
            let best = believable_bandwidth(&generations, measure).unwrap();
            assert_eq!((passes.get(), best.bytes_per_second), (expected_passes, expected), "{measured:?}");
            assert_eq!(set_bandwidth_fraction(&mut generations, Some(best.bytes_per_second)), disturbed);
            assert_eq!(generations[0].bandwidth_fraction, Some(4_000.0 / expected));
        };
        check(&[8_000.0], 1, 8_000.0, false);
        check(&[2_000.0, 5_000.0], 2, 5_000.0, false);
        check(&[2_000.0, 1_000.0, 3_000.0, 2_000.0], 4, 3_000.0, true);
    }
}
