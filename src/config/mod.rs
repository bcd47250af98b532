//! Settings of the engine and what the files say of the model, typed and checked before anything heavy
//! starts.

mod architecture;
mod defaults;
mod engine;
mod model;
mod speculative;

pub use architecture::{ARCHITECTURES, Architecture, Decoder, LocalBase, QkNorm, RouterDefaults};
pub use engine::EngineConfig;
pub use model::{
    ExpertsConfig, LatentAttentionConfig, LayerAttention, ModelConfig, QueryGrowth, RopeConfig, RopeScaling,
    Rotation, Scoring,
};
pub use speculative::{SpeculativeConfig, SpeculativeMethod};
pub use tinyvllm_kernels::gated::Activation;
pub use tinyvllm_kernels::rope::RopeStyle;
