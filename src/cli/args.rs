//! The commands of the program, and what holds for every flag.
//!
//! A command is made of groups ([`flags`](super::flags)) by `flatten`, and its own flags are next to the command. From
//! these definitions `clap` makes the help, the completions and, by the one rule in [`command`], the environment
//! variables. Definitions only say what was typed, with a library type where there is one; they open no file and ask no
//! terminal.

use clap::builder::BoolishValueParser;
use clap::{ArgAction, CommandFactory, Parser, Subcommand};

use super::bench::BenchArgs;
use super::cache::CacheCommand;
use super::chat::ChatArgs;
use super::generate::GenerateArgs;
use super::info::InfoArgs;
use super::list::ListArgs;
use super::ps::PsArgs;
use super::pull::PullArgs;
use super::rm::RmArgs;
use super::run::RunArgs;
use super::self_test::SelfTestArgs;
use super::serve::ServeArgs;
use super::stop::StopArgs;
use super::top::TopArgs;
use super::verify::VerifyArgs;

const EXAMPLES: &str = "\
Examples:
  tinyvllm                                  The built-in model tells a story
  tinyvllm -m tinyllama                     Download TinyLlama and chat with it
  tinyvllm run llama3.2 'Why is the sky blue?'
  tinyvllm serve llama3.2                   A chat page, and the interfaces of OpenAI, Anthropic and ollama
  tinyvllm -m model.gguf --raw --prompt 'The sky is' --max-tokens 20
  cat letter.txt | tinyvllm -m qwen3-0.6b --system 'Say it in one sentence.'";

const MORE_EXAMPLES: &str = "\
Examples:
  tinyvllm                                  The built-in model tells a story
  tinyvllm -m tinyllama                     Download TinyLlama and chat with it
  tinyvllm run llama3.2 'Why is the sky blue?'
  tinyvllm serve llama3.2                   A chat page, and the interfaces of OpenAI, Anthropic and ollama
  tinyvllm -m model.gguf --raw --prompt 'The sky is' --max-tokens 20
  cat letter.txt | tinyvllm -m qwen3-0.6b --system 'Say it in one sentence.'

  Several prompts run as one batch; --json prints one object per sequence:
  tinyvllm -m model.gguf --prompt One --prompt Two --json
  tinyvllm -m model.gguf --prompt-ids 5,6,7 --temperature 0 --ignore-eos --max-tokens 32 --json

  tinyvllm info -m model.gguf               What is in the file, and the memory it needs
  tinyvllm pull Qwen/Qwen3-0.6B             Download, and print where it is

Environment:
  Every flag can be set by a variable: --max-model-len by TINYVLLM_MAX_MODEL_LEN, and so on.
  HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to the Hugging Face tools.
  NO_COLOR switches colours off.

Exit status:
  0 success, 1 error, 2 wrong usage, 130 interrupted.";

/// Runs a language model on this machine.
///
/// Without a command it generates: from --prompt, from text on standard input, or, on a terminal and
/// with a model given, in a chat. Without arguments it runs the small built-in model.
#[derive(Debug, Parser)]
#[command(
    name = "tinyvllm",
    version,
    args_conflicts_with_subcommands = true,
    after_help = EXAMPLES,
    after_long_help = MORE_EXAMPLES
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) generate: GenerateArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue or answer prompts (the same as without a command)
    Generate(Box<GenerateArgs>),
    /// Chat with a model
    Chat(Box<ChatArgs>),
    /// Chat with a model, or answer the prompt after its name
    Run(Box<RunArgs>),
    /// Serve a model over HTTP, with OpenAI's interface and others
    Serve(Box<ServeArgs>),
    /// Show the servers that run on this machine
    Ps(PsArgs),
    /// Stop a server that runs on this machine
    Stop(StopArgs),
    /// Measure tokens per second; `bench serve` measures a running server
    Bench(Box<BenchArgs>),
    /// Watch what a running server does
    ///
    /// Reads /metrics of this server or of vLLM's: requests, tokens/s, KV cache, prefix cache and latencies of the
    /// last interval. On a terminal it redraws the screen (q quits, p pauses); in a pipe it writes a line for each
    /// interval.
    Top(TopArgs),
    /// Download a model and print where it is
    Pull(PullArgs),
    /// List the models that were downloaded
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Remove models that were downloaded
    Rm(RmArgs),
    /// Show, check or clear a directory of cached prefixes
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Show what a model is, the memory it needs and its speed limit
    #[command(visible_alias = "show")]
    Info(Box<InfoArgs>),
    /// Compare logits and greedy tokens with a reference file
    Verify(Box<VerifyArgs>),
    /// Check every op and the built-in model on this machine's device, and measure
    SelfTest(SelfTestArgs),
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// The command with what holds for every flag: `--max-model-len` is also `TINYVLLM_MAX_MODEL_LEN`.
pub(crate) fn command() -> clap::Command {
    with_rules(Cli::command())
}

fn with_rules(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let Some(long) = arg.get_long().filter(|long| !is_negation(long)) else { return arg };
        let variable = format!("TINYVLLM_{}", long.replace('-', "_").to_uppercase());
        let keeps_empty = long == "api-key";
        // `TINYVLLM_JSON=1` is what people write; by itself a flag takes `true` and `false` only.
        let arg = match arg.get_action() {
            ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
            _ => arg,
        };
        // `--temperature -1` is a value out of range, not an unknown flag.
        let takes_values = arg.get_action().takes_values();
        let arg = arg.allow_negative_numbers(takes_values);
        // An empty variable counts as unset, as shell scripts switch one off. But an empty key must not open a server.
        let is_unset = std::env::var_os(&variable).is_some_and(|value| value.is_empty());
        if is_unset && !keeps_empty { arg } else { arg.env(variable).hide_env(true) }
    });
    command.mut_subcommands(with_rules)
}

/// `--no-x` has no variable: `TINYVLLM_X=false` says it.
fn is_negation(long: &str) -> bool {
    long.starts_with("no-")
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;
    use tinyvllm::llm::DeviceChoice;
    use tinyvllm::sampling::SamplingDefaults;
    use tinyvllm::weights::Quantization;

    use super::*;

    fn parse(words: &[&str]) -> Result<Cli, clap::Error> {
        let matches = command().try_get_matches_from([&["tinyvllm"], words].concat())?;
        Cli::from_arg_matches(&matches)
    }

    #[test]
    fn definitions_are_consistent() {
        command().debug_assert();
    }

    #[test]
    fn every_flag_has_a_variable_and_a_line_of_help() {
        fn check(command: &clap::Command) {
            let is_flag = |arg: &&clap::Arg| arg.get_long().is_some_and(|long| !is_negation(long));
            for arg in command.get_arguments().filter(is_flag) {
                let variable = arg.get_env().unwrap_or_else(|| panic!("{arg} has no variable"));
                assert!(variable.to_str().unwrap().starts_with("TINYVLLM_"), "{arg}");
                assert!(arg.get_help().is_some(), "{arg} has no help");
            }
            command.get_subcommands().for_each(check);
        }
        check(&command());
    }

    #[test]
    fn flags_become_library_values() {
        let words = "--prompt-ids 5,6,7 --prompt-ids 8 --kv-cache-memory-bytes 2M --device cuda:1 \
                     --gpu-memory-utilization 0.5 --quantization q4_k --logit-bias 5=-1.5 --stop-token-ids 1,2 -c 64 --temperature 0";
        let cli = parse(&words.split_whitespace().collect::<Vec<_>>()).unwrap();
        let GenerateArgs { prompt, answers, engine, .. } = cli.generate;
        let ids: Vec<_> = prompt.prompt_ids.into_iter().map(|ids| ids.0).collect();
        assert_eq!(ids, [vec![5, 6, 7], vec![8]]);
        let options = engine.options().unwrap();
        assert_eq!(options.limits.kv_cache_memory_bytes, Some(2 << 20));
        assert_eq!((options.limits.max_model_len, options.limits.gpu_memory_utilization), (Some(64), 0.5));
        assert!(options.limits.enable_prefix_caching);
        assert_eq!((options.device, options.quantization), (DeviceChoice::Cuda(1), Some(Quantization::Q4K)));
        let params = answers.sampling.params(&SamplingDefaults::default());
        assert_eq!((params.logit_bias[&5], params.stop_token_ids), (-1.5, vec![1, 2]));
        assert_eq!(params.temperature, 0.0);
    }

    #[test]
    fn the_last_of_two_opposite_flags_counts() {
        let check = |words: &[&str], expected: bool| {
            let engine = parse(words).unwrap().generate.engine;
            assert_eq!(engine.options().unwrap().limits.enable_prefix_caching, expected, "{words:?}");
        };
        check(&[], true);
        check(&["--enable-prefix-caching"], true);
        check(&["--no-enable-prefix-caching"], false);
        check(&["--enable-prefix-caching=false"], false);
        check(&["--no-enable-prefix-caching", "--enable-prefix-caching"], true);
        check(&["--enable-prefix-caching", "--no-enable-prefix-caching"], false);
    }

    #[test]
    fn contradictions_are_refused() {
        for words in [
            "--prompt a --prompt-ids 1",
            "--raw --system be-brief",
            "--prompt-ids 1 --system be-brief",
            "--quiet --verbose",
            "--logprobs 2",
            "chat --prompt a",
            "chat --n 2",
            "verify",
            "completions",
            "completions cmd",
            "nonsense",
        ] {
            let error = parse(&words.split_whitespace().collect::<Vec<_>>()).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{words}");
        }
    }
}
