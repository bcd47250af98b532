//! The engine: token ids in, token ids out.
//!
//! [`EngineCore`] is the engine as a value whose owner calls `step`; [`Engine`] runs one on its own thread and returns
//! iterators.

mod channel;
mod constrained;
mod core;
mod drafting;
mod following;
mod handle;
mod masks;
mod output;
mod predicting;
mod prefixes;
mod reporting;
mod request;
mod resolver;
mod scout;
mod sink;
mod step_time;
mod thread;

pub use self::core::{EngineCore, EngineStats, HostTierStats};
pub use drafting::SpeculationStats;
pub use handle::{AbortHandle, Engine, RequestStream};
pub use output::{Event, FinishReason, PromptProgress, SequenceStats, StepSizes};
pub use request::{ModelLimits, Request, RequestId};
pub use sink::{EventSink, OnAccepted, OnCacheEvents};

pub use crate::kv_cache::{BlockMiss, CacheEvent, Medium};
pub use crate::runner::Wanted;
pub use crate::scheduler::{ClientId, PrefixMiss, Weight};
