//! Turns the plan of a step into tensors, runs the model and samples.

mod available_memory;
mod cache_blocks;
mod device_sampling;
mod draft_model;
mod host_sampling;
mod memory;
mod model_runner;
mod mtp;
mod probe;
mod step;

pub use available_memory::{available_memory_bytes, check_addresses};
pub use cache_blocks::WindowDemand;
pub use draft_model::DraftModel;
pub use memory::{EngineLimits, ExpertDemand, ExpertWeights, MemoryDemand, MemoryPlan, plan_memory};
pub use model_runner::ModelRunner;
pub use probe::Probe;
pub use step::{DraftRequest, Runner, ScheduledSequence, SequenceOutput, Step, StepDraft};

/// What is wanted of a position of a step.
pub use crate::models::Wanted;

/// A [`Runner`]'s view of its cache.
pub use crate::ops::{HostBlocks, KvCache};
