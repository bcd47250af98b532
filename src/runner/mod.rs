//! Turns the plan of a step into tensors, runs the model and samples.

mod memory;
mod model_runner;
mod step;

pub use memory::{EngineLimits, MemoryDemand, available_memory_bytes, plan_memory};
pub use model_runner::ModelRunner;
pub use step::{RowOutput, Runner, Step, StepRow};
