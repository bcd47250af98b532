//! Every op as a few lines of candle's tensors: the definition that kernels are tested against, a way out where a
//! kernel fails on a machine (`--kernels reference`), and the way in for a new op.
//!
//! One file per op, named like the op. What is computed here is meant to be read: no layout but rows, no fusion, no
//! memory that is kept from step to step except weights and the cache. In f64 it is the oracle of the tests; in f32
//! it runs on every device that candle has.

mod backend;
mod embed;
mod expanded_attention;
mod experts;
mod gather_rows;
mod heads_linear;
mod kv_cache;
mod latent_kv_write;
mod linear;
mod matrix;
mod paged_attention;
mod rope_kv_write;

pub use backend::ReferenceBackend;

pub(crate) use backend::ReferenceBuffer;
pub(crate) use embed::embed;
pub(crate) use expanded_attention::{ExpandedAttention, expanded_attention};
pub(crate) use experts::{experts_residual, experts_swiglu, router_logits};
pub(crate) use gather_rows::gather_rows;
pub(crate) use heads_linear::heads_linear;
pub(crate) use kv_cache::ReferencePools;
pub(crate) use latent_kv_write::{LatentKvWrite, latent_kv_write};
pub(crate) use linear::{linear_residual, norm_linear, norm_logits, norm_swiglu, norm_swiglu_biased};
pub(crate) use matrix::ReferenceMatrix;
pub(crate) use paged_attention::paged_attention;
pub(crate) use rope_kv_write::{RopeKvWrite, rope_kv_write};

/// What candle or this folder failed with, on its way to whoever knows [`crate::Error`] only.
#[derive(Debug)]
pub(crate) struct Failure(crate::Error);

type Result<T> = std::result::Result<T, Failure>;

impl From<candle_core::Error> for Failure {
    fn from(source: candle_core::Error) -> Self {
        Self(crate::Error::internal(format!("tensor operation failed: {source}")).with_source(source))
    }
}

impl From<crate::Error> for Failure {
    fn from(error: crate::Error) -> Self {
        Self(error)
    }
}

impl From<Failure> for crate::Error {
    fn from(Failure(error): Failure) -> Self {
        error
    }
}
