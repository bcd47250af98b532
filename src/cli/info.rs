//! `tinyvllm info`: what a model is and the memory it needs, from its headers alone.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;

use serde_json::{Map, Value, json};
use tinyvllm::llm::{Llm, ModelReport};

use super::args::InfoArgs;
use super::console::Console;
use super::load::{merge_model, resolve};
use super::value::human_bytes;

/// Prints the report.
///
/// # Errors
/// If the model cannot be had, is damaged, or is none that can be run.
pub(crate) fn run(args: &InfoArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    let options = args.engine.options();
    options.open_device()?;
    let model = resolve(&merge_model(&args.positional, &args.model)?, console)?;
    let report = Llm::inspect(&model, &options)?;
    let text = if args.json { format!("{}\n", to_json(&report)) } else { to_text(&report) };
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn to_text(report: &ModelReport) -> String {
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
                    Some(size) => format!("{size} tokens"),
                    None => "none; give prompts with --prompt-ids".to_owned(),
                },
            ),
            line("chat template", if report.has_chat_template { "yes" } else { "none" }.to_owned()),
        ],
    );
    let config: Vec<_> = report.config.iter().map(|(name, value)| line(name, value.clone())).collect();
    section("config", &config);
    let types = report.types.iter().map(|summary| {
        let plural = if summary.num_tensors == 1 { "tensor" } else { "tensors" };
        let size = human_bytes(summary.num_bytes);
        line(&summary.type_name, format!("{} {plural}, {size}", summary.num_tensors))
    });
    section("weights", &types.collect::<Vec<_>>());

    let mut memory = vec![
        line("weights", human_bytes(report.demand.weight_bytes).to_string()),
        line("KV cache per token", human_bytes(report.demand.kv_bytes_per_token).to_string()),
        line("available", human_bytes(report.demand.available_bytes).to_string()),
    ];
    match &report.plan {
        Ok(plan) => {
            let tokens = plan.kv_cache_tokens();
            let bytes = report.demand.kv_bytes_per_token.saturating_mul(tokens as u64);
            memory.push(line(
                "KV cache",
                format!("{}, {tokens} tokens in blocks of {}", human_bytes(bytes), plan.block_size),
            ));
            memory.push(line("context", format!("{} tokens", plan.max_model_len)));
        }
        Err(why) => memory.push(line("does not fit", why.clone())),
    }
    section("memory", &memory);
    text
}

fn to_json(report: &ModelReport) -> Value {
    let config: Map<_, _> =
        report.config.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into())).collect();
    let types: Vec<_> = report
        .types
        .iter()
        .map(|summary| {
            json!({
                "type": summary.type_name,
                "num_tensors": summary.num_tensors,
                "num_bytes": summary.num_bytes,
            })
        })
        .collect();
    let plan = match &report.plan {
        Ok(plan) => json!({
            "max_model_len": plan.max_model_len,
            "kv_cache_tokens": plan.kv_cache_tokens(),
            "kv_cache_bytes":
                report.demand.kv_bytes_per_token.saturating_mul(plan.kv_cache_tokens() as u64),
            "block_size": plan.block_size,
            "num_blocks": plan.num_blocks,
            "max_num_seqs": plan.max_num_seqs,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
        }),
        Err(why) => json!({ "error": why }),
    };
    json!({
        "name": report.name,
        "architecture": report.architecture,
        "config": config,
        "weight_types": types,
        "weight_bytes": report.demand.weight_bytes,
        "kv_bytes_per_token": report.demand.kv_bytes_per_token,
        "available_bytes": report.demand.available_bytes,
        "plan": plan,
        "tokenizer_vocab_size": report.tokenizer_vocab_size,
        "has_chat_template": report.has_chat_template,
    })
}
