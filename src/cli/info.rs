//! `tinyvllm info`: the type of a model, the memory it needs and how fast this machine could run it. It reads
//! the headers of the files only.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Args;
use serde_json::{Map, Value, json};
use tinyvllm::chat::{ReasoningFormat, ToolCallFormat};
use tinyvllm::llm::{KvCacheChoice, Llm, LlmOptions, ModelReport};
use tinyvllm::ops::MemoryBandwidth;
use tinyvllm::runner::MemoryPlan;
use tinyvllm::weights::TypeSummary;

use super::console::Console;
use super::flags::{EngineArgs, MessageArgs, ModelArgs, PositionalModel};
use super::load::{check_device, merge_model, resolve};
use super::value::{human_bytes, human_count, parse_bandwidth};

/// The model to report on, and the format.
#[derive(Debug, Clone, Args)]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    pub(crate) positional: PositionalModel,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
    /// Memory bandwidth in GB/s, to compute the limit of another machine [default: measured]
    #[arg(long, value_name = "GB/S", value_parser = parse_bandwidth)]
    pub(crate) memory_bandwidth: Option<f64>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) messages: MessageArgs,
}

/// Prints the report.
///
/// # Errors
/// If the model cannot be found, is damaged, or is not supported.
pub(crate) fn run(args: &InfoArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    let prefix_store = args.engine.prefix_store.options(console)?;
    let kv_offload = args.engine.prefix_store.offload(console)?;
    let options = LlmOptions { prefix_store, kv_offload, ..args.engine.options()? };
    check_device(&options, console)?;
    let model = resolve(&merge_model(&args.positional, &args.model)?, console)?;
    let report = Llm::inspect(&model, &options)?;
    let bandwidth = match args.memory_bandwidth {
        Some(given) => Some(Bandwidth { bytes_per_second: given, source: "given".to_owned() }),
        None => options.measure_bandwidth()?.map(|MemoryBandwidth { bytes_per_second, access }| Bandwidth {
            bytes_per_second,
            source: format!("measured, {access}"),
        }),
    };
    let text = match args.json {
        true => format!("{}\n", to_json(&report, bandwidth.as_ref())),
        false => to_text(&report, bandwidth.as_ref()),
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Numbers of concurrent sequences for which the limit is reported.
const BATCH_SIZES: [usize; 2] = [1, 8];

/// The memory bandwidth.
#[derive(Debug)]
struct Bandwidth {
    bytes_per_second: f64,
    source: String,
}

fn to_text(report: &ModelReport, bandwidth: Option<&Bandwidth>) -> String {
    let mut text = String::new();
    let mut section = |title: &str, lines: &[(String, String)]| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{title}");
        let width = lines.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, value) in lines {
            let _ = writeln!(text, "  {name:width$}  {value}");
        }
    };
    let line = |name: &str, value: String| (name.to_owned(), value);

    section(
        "model",
        &[
            line("name", report.name.clone()),
            line("architecture", report.architecture.clone()),
            line(
                "tokenizer",
                match report.tokenizer_vocab_size {
                    None if report.has_broken_tokenizer => {
                        "cannot be used; give prompts with --prompt-ids".to_owned()
                    }
                    Some(size) => format!("{size} tokens"),
                    None => "none; give prompts with --prompt-ids".to_owned(),
                },
            ),
            line(
                "chat template",
                match &report.chat_problem {
                    Some(problem) => format!("unusable: {problem}"),
                    None => if report.has_chat_template { "yes" } else { "none" }.to_owned(),
                },
            ),
            line("tool calls", report.answer_format.tool_calls_line()),
            line("reasoning", report.answer_format.reasoning_line()),
        ],
    );
    let config: Vec<_> = report.config.iter().map(|(name, value)| line(name, as_text(value))).collect();
    section("config", &config);
    let types = |summaries: &[TypeSummary]| -> Vec<_> {
        let type_line = |summary: &TypeSummary| {
            let plural = if summary.num_tensors == 1 { "tensor" } else { "tensors" };
            let size = human_bytes(summary.num_bytes);
            line(&summary.type_name, format!("{} {plural}, {size}", summary.num_tensors))
        };
        summaries.iter().map(type_line).collect()
    };
    section("weights", &types(&report.types));
    if let Some(loaded) = &report.loaded_types {
        section("weights as loaded", &types(loaded));
    }

    let mut memory = vec![
        line("weights", human_bytes(report.demand.weight_bytes).to_string()),
        line("KV cache per token", kv_cache_line(report)),
        line("available", human_bytes(report.demand.available_bytes).to_string()),
    ];
    if let Some(experts) = report.demand.experts {
        let address = match &report.expert_file {
            Some(path) => format!("stay in {}", path.display()),
            None => "in memory".to_owned(),
        };
        memory.insert(1, line("  experts", format!("{}, {address}", human_bytes(experts.num_bytes))));
    }
    match &report.plan {
        Ok(MemoryPlan { engine: plan, .. }) => {
            let tokens = plan.kv_cache_tokens();
            let bytes = report.demand.kv_cache_bytes(plan);
            memory.push(line(
                "KV cache",
                format!("{}, {tokens} tokens in blocks of {}", human_bytes(bytes), plan.block_size),
            ));
            if let Some(windows) = plan.windows {
                let tokens = windows.num_blocks * plan.block_size;
                memory.push(line("  in layers with a window", format!("{tokens} tokens")));
            }
            if let Some(bytes) = report.kv_offload_bytes {
                let tokens = bytes / report.demand.kv_bytes_per_token.max(1);
                memory.push(line("  in host memory", format!("{}, {tokens} tokens", human_bytes(bytes))));
            }
            memory.push(line("context", format!("{} tokens", plan.max_model_len)));
        }
        Err(why) => memory.push(line("does not fit", why.clone())),
    }
    section("memory", &memory);
    section("generation", &generation_lines(report, bandwidth));
    for notice in &report.notices {
        let _ = writeln!(text, "note: {notice}");
    }
    text
}

/// The size of the KV cache and its type, which weights decide that are not read.
fn kv_cache_line(report: &ModelReport) -> String {
    let size = human_bytes(report.demand.kv_bytes_per_token);
    let dtype = report.kv_cache_dtype.planned();
    match report.kv_cache_dtype {
        KvCacheChoice::Auto => format!("{size} in {dtype}, or in bf16 if keys or values overflow it"),
        KvCacheChoice::Fixed(_) => format!("{size} in {dtype}"),
    }
}

/// The bytes that a step reads, and the resulting limit in tokens per second.
fn generation_lines(report: &ModelReport, bandwidth: Option<&Bandwidth>) -> Vec<(String, String)> {
    let traffic = &report.traffic;
    let megabytes = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    let mut lines = vec![
        ("parameters".to_owned(), human_count(traffic.num_parameters)),
        ("active for a token".to_owned(), human_count(traffic.num_active_parameters())),
        ("weights read for a token".to_owned(), megabytes(traffic.bytes_per_step(1))),
        ("  attention".to_owned(), megabytes(traffic.attention_bytes)),
        ("  feed-forward".to_owned(), megabytes(traffic.feed_forward_bytes)),
    ];
    if let Some(experts) = traffic.experts {
        let (chosen, all) = (experts.num_experts_per_tok, experts.num_experts);
        let read = megabytes(experts.bytes_per_step(1));
        lines.push(("  experts".to_owned(), format!("{read}, {chosen} of {all}")));
    }
    lines.push(("  head".to_owned(), megabytes(traffic.head_bytes)));
    let Some(&Bandwidth { bytes_per_second, ref source }) = bandwidth else {
        let way_out = "not measured on this device; give --memory-bandwidth for its limit";
        lines.push(("memory bandwidth".to_owned(), way_out.to_owned()));
        return lines;
    };
    lines.push(("memory bandwidth".to_owned(), format!("{:.1} GB/s ({source})", bytes_per_second / 1e9)));
    let context_len = report.usual_context_len();
    for batch_size in BATCH_SIZES {
        let name = match batch_size {
            1 => "limit of 1 sequence".to_owned(),
            _ => format!("limit of {batch_size} at once"),
        };
        let rate = report.bandwidth_limit(bytes_per_second, batch_size, context_len);
        let bytes = megabytes(report.bytes_per_step(batch_size, context_len));
        lines.push((name, format!("{rate:.1} tokens/s, {bytes} a step at context {context_len}")));
    }
    lines
}

/// A value of the configuration, formatted for people.
fn as_text(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(values) => {
            format!("[{}]", values.iter().map(as_text).collect::<Vec<_>>().join(", "))
        }
        Value::Number(number) if number.is_f64() => {
            number.as_f64().map_or_else(String::new, |number| number.to_string())
        }
        value => value.to_string(),
    }
}

fn to_json(report: &ModelReport, bandwidth: Option<&Bandwidth>) -> Value {
    let config: Map<_, _> =
        report.config.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let types = |summaries: &[TypeSummary]| -> Vec<Value> {
        let entry = |summary: &TypeSummary| {
            json!({
                "type": summary.type_name,
                "num_tensors": summary.num_tensors,
                "num_bytes": summary.num_bytes,
            })
        };
        summaries.iter().map(entry).collect()
    };
    let plan = match &report.plan {
        Ok(MemoryPlan { engine: plan, .. }) => json!({
            "max_model_len": plan.max_model_len,
            "kv_cache_tokens": plan.kv_cache_tokens(),
            "kv_cache_bytes": report.demand.kv_cache_bytes(plan),
            "window_cache_tokens": plan.windows.map(|windows| windows.num_blocks * plan.block_size),
            "block_size": plan.block_size,
            "num_blocks": plan.num_blocks,
            "max_num_seqs": plan.max_num_seqs,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
        }),
        Err(why) => json!({ "error": why }),
    };
    let traffic = &report.traffic;
    let context_len = report.usual_context_len();
    let limits: Vec<_> = BATCH_SIZES
        .into_iter()
        .map(|batch_size| {
            json!({
                "batch_size": batch_size,
                "context_len": context_len,
                "bytes_per_step": report.bytes_per_step(batch_size, context_len),
                "tokens_per_second": bandwidth
                    .map(|memory| report.bandwidth_limit(memory.bytes_per_second, batch_size, context_len)),
            })
        })
        .collect();
    json!({
        "name": report.name,
        "architecture": report.architecture,
        "config": config,
        "weight_types": types(&report.types),
        "loaded_weight_types": types(report.loaded_types.as_ref().unwrap_or(&report.types)),
        "notices": report.notices,
        "num_parameters": traffic.num_parameters,
        "num_active_parameters": traffic.num_active_parameters(),
        "weight_bytes_per_token": {
            "attention": traffic.attention_bytes,
            "feed_forward": traffic.feed_forward_bytes,
            "experts": traffic.experts.map_or(0, |experts| experts.bytes_per_step(1)),
            "head": traffic.head_bytes,
            "total": traffic.bytes_per_step(1),
        },
        "memory_bandwidth": bandwidth.map(|memory| memory.bytes_per_second),
        "limits": limits,
        "weight_bytes": report.demand.weight_bytes,
        "expert_bytes": report.demand.experts.map(|experts| experts.num_bytes),
        "expert_file": report.expert_file,
        "kv_bytes_per_token": report.demand.kv_bytes_per_token,
        "kv_cache_dtype": report.kv_cache_dtype.planned().to_string(),
        "kv_offload_bytes": report.kv_offload_bytes,
        "available_bytes": report.demand.available_bytes,
        "plan": plan,
        "tokenizer_vocab_size": report.tokenizer_vocab_size,
        "has_chat_template": report.has_chat_template,
        "chat_problem": report.chat_problem,
        "tool_calls": report.answer_format.tool_calls.as_ref().map(ToolCallFormat::name),
        "reasoning": report.answer_format.reasoning.as_ref().map(ReasoningFormat::markers),
    })
}
