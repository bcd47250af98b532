//! Every op as a few lines of candle's tensors: the definition that kernels are tested against, a fallback if a kernel
//! fails on a machine (`--kernels reference`), and the start for a new op.
//!
//! One file per op, named like the op. The code is meant to be read: no layout but rows, no fusion, no memory that is
//! kept from step to step except weights and the cache. In f64 it is the oracle of the tests; in f32 it runs on every
//! device of candle's.

mod backend;
mod bandwidth;
mod buffer;
mod embed;
mod expanded_attention;
mod experts;
mod gated;
mod gather_rows;
mod heads_linear;
mod kv_cache;
mod latent_kv_write;
mod linear;
mod matrix;
mod norm_part;
mod norm_residual;
mod paged_attention;
mod rope_attention;
mod rope_kv_write;
mod sample;
mod step_inputs;
mod weights;

pub use backend::ReferenceBackend;

pub(crate) use buffer::ReferenceBuffer;
pub(crate) use kv_cache::ReferencePools;
pub(crate) use matrix::ReferenceMatrix;

use std::convert::Infallible;

use crate::ops::device::{Device, device_access};
use crate::ops::experts::HostRouting;

impl Device for ReferenceBackend {
    type Buffer = ReferenceBuffer;
    type Matrix = ReferenceMatrix;
    type Stack = Vec<ReferenceMatrix>;
    /// The host's own.
    type Vector = ();
    type LinearScratch = ();
    type Routing = HostRouting;
    type Pools = ReferencePools;
    /// The host's own.
    type Inputs = ();
    type Sampler = Infallible;
    type Table = ();
    type AttentionScratch = ();
    type ExpandedScratch = ();

    device_access!(Reference);
}

/// Errors of candle and of this folder, until they become a [`crate::Error`].
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
