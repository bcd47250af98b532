//! Attention: the choice of kernels for a step, their launches, and the memory for partial results.

mod decode;
mod decode_latent;
mod expanded;
mod grouped;
mod latent;
mod prefill;

pub(super) use decode::max_dim as max_decode_dim;
pub(super) use decode_latent::HEADS as DECODE_LATENT_HEADS;
pub(super) use expanded::ExpandedOperands;
pub(crate) use expanded::GpuExpandedAttention;
pub(crate) use grouped::GpuAttention;
pub(super) use grouped::{AttentionSizes, Pages, Pools, Rope, rope_kv_write};
pub(crate) use latent::GpuLatentAttention;
pub(super) use latent::{LatentRows, LatentSizes, LatentWrite, latent_kv_write};
pub(super) use prefill::{NUM_THREADS as PREFILL_THREADS, Variant};
