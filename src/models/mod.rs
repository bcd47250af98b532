//! models

mod batch;

pub use batch::InputBatch;
