//! Settings, typed and checked before anything heavy starts.

mod engine;

pub use engine::EngineConfig;
