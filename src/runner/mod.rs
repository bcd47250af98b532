//! Turns the plan of a step into tensors, runs the model and samples.

mod step;

pub use step::{RowOutput, Runner, Step, StepRow};
