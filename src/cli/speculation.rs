//! Flags of speculation.

use clap::Args;
use tinyvllm::config::{SpeculativeConfig, SpeculativeMethod};

use super::value::parse_value;

/// Which tokens are tried before they are sampled. None of it changes an answer.
#[derive(Debug, Clone, Args)]
pub(crate) struct SpeculationArgs {
    /// How tokens are drafted, as JSON with vLLM's names: "method" (suffix, ngram or forced), "num_speculative_tokens" for ngram
    /// "prompt_lookup_min" and "prompt_lookup_max", and "adaptive", which is true unless all drafts are to be tried [default: suffix, 8 tokens]
    #[arg(
        long,
        value_parser = parse_value::<SpeculativeConfig>,
        value_name = "JSON",
        overrides_with = "no_speculation",
        hide_short_help = true
    )]
    speculative_config: Option<SpeculativeConfig>,
    /// Compute tokens one by one
    #[arg(long, overrides_with = "speculative_config", hide_short_help = true)]
    no_speculation: bool,
}

impl SpeculationArgs {
    /// The library's form.
    pub(crate) fn config(&self) -> SpeculativeConfig {
        self.config_or(SpeculativeMethod::Suffix)
    }

    /// The same, with this method if none is given.
    pub(crate) fn config_or(&self, method: SpeculativeMethod) -> SpeculativeConfig {
        match self.speculative_config {
            _ if self.no_speculation => SpeculativeConfig::off(),
            Some(config) => config,
            None => SpeculativeConfig::of(method),
        }
    }
}
