//! Weight files: GGUF and safetensors behind one [`Checkpoint`].
//!
//! Tensors have one set of names, GGUF's (`blk.0.attn_q.weight`), whatever the file calls them.

pub mod blocks;
mod dtype;
mod foreign;
pub mod gguf;
mod mapping;
mod tensor;

pub use dtype::DType;
pub use mapping::SharedBytes;
pub use tensor::RawTensor;
