//! Configuration: of the model, as its files give it.

mod architecture;
mod model;

pub use architecture::{ARCHITECTURES, Architecture, Decoder, RopeStyle};
pub use model::{ModelConfig, RopeConfig, RopeScaling};
