//! From logits to a token: the parameters of a request and the sampler.

mod params;
mod philox;
mod sampler;

pub use params::SamplingParams;
pub(crate) use params::token_in_vocabulary;
pub use sampler::{SampledToken, Sampler, SamplerInput, TokenLogprobs};
