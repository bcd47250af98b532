//! From logits to a token: the parameters of a request, its constraint and the sampler.

mod constraint;
mod defaults;
mod params;
mod philox;
mod sampler;

pub use constraint::{Constraint, ConstraintState, TokenMask};
pub use defaults::SamplingDefaults;
pub use params::SamplingParams;
pub(crate) use params::{at_most_logprobs, token_in_vocabulary};
pub use sampler::{RankedLogprobs, SampledToken, Sampler, SamplerInput, TokenLogprobs};
