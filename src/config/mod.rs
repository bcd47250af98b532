//! Settings of the engine and what the files say of the model, typed and checked before anything heavy
//! starts.

mod architecture;
mod defaults;
mod engine;
mod model;

pub use architecture::{ARCHITECTURES, Architecture, Decoder, RouterDefaults};
pub use engine::EngineConfig;
pub use model::{ExpertsConfig, LatentAttentionConfig, ModelConfig, RopeConfig, RopeScaling, Scoring};
pub use tinyvllm_kernels::rope::RopeStyle;
