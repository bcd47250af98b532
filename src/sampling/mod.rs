//! From logits to a token: the parameters of a request, its constraint and the sampler.

mod constraint;
mod params;
mod philox;
mod sampler;

pub use constraint::{Constraint, ConstraintState, TokenMask};
pub use params::SamplingParams;
pub(crate) use params::token_in_vocabulary;
pub use sampler::{SampledToken, Sampler, SamplerInput, TokenLogprobs};
