//! How tokens are chosen and when a sequence ends.

use std::num::ParseIntError;

use clap::Args;
use tinyvllm::sampling::{SamplingDefaults, SamplingParams};

use crate::value::{LogitBias, TokenIds, at_most_a_sequence};

/// A seed, or none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seed(Option<u64>);

impl Seed {
    fn parse(text: &str) -> Result<Self, ParseIntError> {
        Ok(Self(if text == "-1" { None } else { Some(text.parse()?) }))
    }
}

/// −1 is as many as fit.
fn limit(text: &str) -> Result<usize, String> {
    match text {
        // To the end of the window: vLLM's and llama.cpp's number, and another one of llama.cpp's.
        "-1" | "-2" => Ok(usize::MAX),
        text => at_most_a_sequence(text.parse().map_err(|error: ParseIntError| error.to_string())?),
    }
}

/// −1 is all, as 0 is.
fn top_k(text: &str) -> Result<usize, ParseIntError> {
    if text == "-1" { Ok(0) } else { text.parse() }
}

/// How tokens are chosen and when a sequence ends.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Maximum number of tokens to generate; -1 fills the context [default: the model's, or -1]
    #[arg(long, short = 'n', aliases = ["n-predict", "predict"], value_name = "N", value_parser = limit)]
    pub(crate) max_tokens: Option<usize>,
    /// 0 always picks the most likely token, higher values vary more [default: the model's, or 0.7]
    #[arg(long, alias = "temp", value_name = "X")]
    pub(crate) temperature: Option<f32>,
    /// Sample from the most likely tokens that together have this probability [default: the model's, or 0.95]
    #[arg(long, value_name = "X", hide_short_help = true)]
    pub(crate) top_p: Option<f32>,
    /// Sample from this many most likely tokens; 0 and -1 are all [default: the model's, or 0]
    #[arg(long, value_name = "N", value_parser = top_k, hide_short_help = true)]
    pub(crate) top_k: Option<usize>,
    /// Drop tokens less likely than this times the most likely one [default: the model's, or 0]
    #[arg(long, value_name = "X", hide_short_help = true)]
    pub(crate) min_p: Option<f32>,
    /// Seed that makes each request reproducible; -1 is a new seed for each [default: -1]
    #[arg(long, short, value_name = "N", value_parser = Seed::parse)]
    pub(crate) seed: Option<Seed>,
    /// End before this text; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) stop: Vec<String>,
    /// End at these tokens too
    #[arg(long, value_name = "IDS", hide_short_help = true)]
    pub(crate) stop_token_ids: Option<TokenIds>,
    /// Minimum number of tokens before a sequence may end
    #[arg(long, default_value_t = 0, hide_short_help = true, value_name = "N")]
    pub(crate) min_tokens: usize,
    /// Do not end at the model's own end tokens
    #[arg(long, hide_short_help = true)]
    pub(crate) ignore_eos: bool,
    /// Above 1, tokens of the prompt and the output become less likely [default: the model's, or 1]
    #[arg(long, alias = "repeat-penalty", hide_short_help = true, value_name = "X")]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens in the output
    #[arg(long, default_value_t = 0.0, hide_short_help = true, value_name = "X")]
    pub(crate) presence_penalty: f32,
    /// Subtracted from the logit of a token for each time that it is in the output
    #[arg(long, default_value_t = 0.0, hide_short_help = true, value_name = "X")]
    pub(crate) frequency_penalty: f32,
    /// Add BIAS to the logit of token ID; may be repeated
    #[arg(long, value_name = "ID=BIAS", hide_short_help = true)]
    pub(crate) logit_bias: Vec<LogitBias>,
}

impl SamplingArgs {
    /// These flags as the library's type, with the values of the model's files where none was given. `max_tokens` depends on
    /// the prompt: see `Llm::default_max_tokens`.
    pub(crate) fn params(&self, model: &SamplingDefaults) -> SamplingParams {
        let own = SamplingParams { temperature: 0.7, top_p: 0.95, ..SamplingParams::default() };
        let defaults = model.apply(own);
        SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed.and_then(|seed| seed.0),
            stop: self.stop.clone(),
            stop_token_ids: self.stop_token_ids.clone().unwrap_or_default().0,
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            logit_bias: self.logit_bias.iter().map(|entry| (entry.token_id, entry.bias)).collect(),
            ..SamplingParams::default()
        }
    }
}
