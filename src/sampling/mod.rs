//! From logits to a token: the parameters of a request and the sampler.

mod params;
mod philox;
mod sampler;

pub use params::SamplingParams;
pub(crate) use params::{at_most_logprobs, token_in_vocabulary};
pub use sampler::{RankedLogprobs, SampledToken, Sampler, SamplerInput, TokenLogprobs};
