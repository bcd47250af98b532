//! The layers of models: each loads its weights and runs as a few ops.
//!
//! A layer uses its own tensors only; it does not depend on the model around it, on sequences or on requests.

mod attention;
mod decoder;
mod feed_forward;
mod latent_attention;
mod loader;
mod mlp;
mod moe;
mod output;
mod rope;

pub use attention::{Attention, SelfAttention};
pub use decoder::{Activations, LayerInput};
pub use feed_forward::FeedForward;
pub use latent_attention::{LatentActivations, LatentAttention};
pub use loader::{Cut, LoadProgress, Loader};
pub use mlp::Mlp;
pub use moe::{ExpertActivations, Moe};
pub use output::Output;
pub use rope::RopeTables;
