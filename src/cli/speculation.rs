//! Flags of speculation.

use std::str::FromStr;

use clap::Args;
use tinyvllm::Error;
use tinyvllm::config::{SpeculativeConfig, SpeculativeMethod};

use super::value::parse_value;

/// Which tokens are tried before they are sampled. None of it changes an answer.
#[derive(Debug, Clone, Args)]
pub(crate) struct SpeculationArgs {
    /// How tokens are drafted, as JSON with vLLM's names: "method" (suffix, ngram, draft_model, mtp or forced), "model"
    /// for draft_model, "num_speculative_tokens", for ngram "prompt_lookup_min" and "prompt_lookup_max", and "adaptive", which is
    /// true unless all drafts are to be tried [default: suffix, 8 tokens]
    #[arg(
        long,
        value_parser = parse_value::<Speculation>,
        value_name = "JSON",
        overrides_with = "no_speculation",
        hide_short_help = true
    )]
    speculative_config: Option<Speculation>,
    /// Compute tokens one by one
    #[arg(long, overrides_with = "speculative_config", hide_short_help = true)]
    no_speculation: bool,
}

/// What the JSON says.
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
    /// As the library's type.
    pub(crate) fn config(&self) -> SpeculativeConfig {
        self.config_or(SpeculativeMethod::Suffix)
    }

    /// The same, with this method if none is given.
    pub(crate) fn config_or(&self, method: SpeculativeMethod) -> SpeculativeConfig {
        match &self.speculative_config {
            _ if self.no_speculation => SpeculativeConfig::off(),
            Some(given) => given.config,
            None => SpeculativeConfig::of(method),
        }
    }

    /// The model that drafts, if one is to.
    pub(crate) fn draft_model(&self) -> Option<&str> {
        let given = self.speculative_config.as_ref().filter(|_| !self.no_speculation)?;
        given.draft_model.as_deref().filter(|_| given.config.num_speculative_tokens > 0)
    }
}
