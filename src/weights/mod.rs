//! Weight files: GGUF and safetensors behind one [`Checkpoint`].
//!
//! Tensors have one set of names, GGUF's (`blk.0.attn_q.weight`), whatever the file calls them. Everything
//! that a file claims is checked before it is used; data is mapped and decoded only on request. This module
//! knows no model: which tensors there have to be, and of what shape, is for the caller to say.

mod checkpoint;
mod foreign;
pub mod gguf;
mod mapping;
mod names;
mod quantize;
mod quantized;
mod safetensors;
mod tensor;
#[cfg(test)]
mod tests;

pub use checkpoint::{Checkpoint, Repacking, TensorSummary, TypeSummary};
pub use mapping::{FileStamp, MappedPages, SharedBytes};
pub use quantize::{Quantization, Quantizer};
pub use tensor::{OwnedTensor, RawTensor};
pub use tinyvllm_kernels::{DType, FileType, RepackedType, blocks};
