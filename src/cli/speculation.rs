//! Flags of speculative decoding.

use std::str::FromStr;

use clap::Args;
use tinyvllm::Error;
use tinyvllm::config::{SpeculativeConfig, SpeculativeMethod};

use super::value::parse_value;

/// How tokens are drafted. It changes no answer.
#[derive(Debug, Clone, Args)]
pub(crate) struct SpeculationArgs {
    /// How tokens are drafted, as JSON with vLLM's names: "method" (suffix, ngram, draft_model, mtp or
    /// forced), "model" for draft_model, "num_speculative_tokens", for ngram "prompt_lookup_min" and
    /// "prompt_lookup_max", and "adaptive", which is false to try every draft [default: suffix, 8 tokens]
    #[arg(
        long,
        value_parser = parse_value::<Speculation>,
        value_name = "JSON",
        hide_short_help = true
    )]
    speculative_config: Option<Speculation>,
    /// Generate tokens one by one
    #[arg(long, hide_short_help = true)]
    no_speculation: bool,
}

/// The variable of --speculative-config.
const VARIABLE: &str = "TINYVLLM_SPECULATIVE_CONFIG";

/// The parsed JSON.
#[derive(Debug, Clone)]
struct Speculation {
    config: SpeculativeConfig,
    draft_model: Option<String>,
}

impl FromStr for Speculation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Ok(Self { config: text.parse()?, draft_model: SpeculativeConfig::draft_model(text) })
    }
}

impl SpeculationArgs {
    /// # Errors
    /// If tokens are to be drafted and not to be drafted.
    pub(crate) fn check(&self) -> tinyvllm::Result<()> {
        // An argument wins over a variable, as everywhere.
        let is_typed = std::env::var_os(VARIABLE).is_none_or(|value| value.is_empty());
        if self.no_speculation && is_typed && self.speculative_config.is_some() {
            let message = "--speculative-config and --no-speculation contradict each other";
            return Err(Error::invalid_request(message).with_hint("leave one of them out"));
        }
        Ok(())
    }

    /// The flags as the library's type.
    pub(crate) fn config(&self) -> SpeculativeConfig {
        self.config_or(SpeculativeMethod::Suffix)
    }

    /// The same, with this method by default.
    pub(crate) fn config_or(&self, method: SpeculativeMethod) -> SpeculativeConfig {
        match &self.speculative_config {
            _ if self.no_speculation => SpeculativeConfig::off(),
            Some(given) => given.config,
            None => SpeculativeConfig::of(method),
        }
    }

    /// The draft model, if there is one.
    pub(crate) fn draft_model(&self) -> Option<&str> {
        let given = self.speculative_config.as_ref().filter(|_| !self.no_speculation)?;
        given.draft_model.as_deref().filter(|_| given.config.num_speculative_tokens > 0)
    }
}
