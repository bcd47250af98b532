//! Fused layer operations on preallocated buffers, one file each, with the choice of the device inside.
//!
//! An op checks its operands, counts itself as a dispatch and calls the kernel of the device. The layers
//! above are written in ops alone; a layer of a Llama-like model is six of them.

mod attention_spec;
mod bandwidth;
mod buffer;
mod context;
pub mod cpu;
mod device;
mod embed;
mod expanded_attention;
mod experts;
mod gated;
mod gather_rows;
pub mod gpu;
mod heads_linear;
mod kv_cache;
mod latent_kv_write;
mod linear;
mod norm_part;
mod norm_residual;
mod paged_attention;
mod probe;
pub mod reference;
mod rope_attention;
mod rope_kv_write;
mod sample;
mod step_inputs;
mod sum_over_ranks;
#[cfg(test)]
mod tests;
mod weights;

pub use attention_spec::AttentionSpec;
pub use bandwidth::{MemoryBandwidth, measure_bandwidth};
pub use buffer::Buffer;
pub use context::Context;
pub use cpu::CpuBackend;
pub use cpu::attention::AttentionHeads;
pub use cpu::paged_cache::KvCacheDType;
pub use cpu::{AttentionMetadata, EXPANDED_GROUP, RowMode};
pub use embed::embed;
pub use expanded_attention::{ExpandedLimits, ExpandedScratch, expanded_attention};
pub use experts::{Router, Routing, experts_gated, experts_residual, fetch_experts, route};
pub use gated::gated;
pub use gather_rows::gather_rows;
pub use heads_linear::{Heads, heads_linear};
pub use kv_cache::{HostBlocks, KvCache};
pub use latent_kv_write::latent_kv_write;
pub use linear::{
    LinearScratch, linear, linear_residual, norm_linear, norm_logits, norm_swiglu, norm_swiglu_biased,
};
pub use norm_part::norm_part;
pub use norm_residual::norm_residual;
pub use paged_attention::{AttentionLimits, AttentionScratch, paged_attention};
pub use rope_attention::rope_attention;
pub use rope_kv_write::{HeadNorms, RopeTable, rope_kv_write};
pub use sample::{DeviceSampler, SampleParams, SampledTokens};
pub use step_inputs::{DeviceInputs, StepInputs};
pub use sum_over_ranks::{Communicator, keep_on_first_rank, sum_over_ranks};
pub use weights::{Linear, LinearStack, Matrix, MatrixStack, RmsNorm, Vector};

pub(crate) use probe::{kernel_limits, probe};
