//! Settings of the engine and the model's properties from its files, typed and checked before any expensive work.

mod architecture;
mod defaults;
mod engine;
mod model;
mod shard;
mod speculative;

pub use architecture::{ARCHITECTURES, Architecture, Decoder, LocalBase, QkNorm, RouterDefaults};
pub(crate) use engine::EngineFlag;
pub use engine::{EngineConfig, WindowLimits};
pub use model::{
    ExpertsConfig, LatentAttentionConfig, LayerAttention, ModelConfig, QueryGrowth, RopeConfig, RopeScaling,
    Rotation, Scoring,
};
pub use shard::Shard;
pub use speculative::{SpeculativeConfig, SpeculativeMethod};
pub use tinyvllm_kernels::gated::Activation;
pub use tinyvllm_kernels::rope::RopeStyle;
