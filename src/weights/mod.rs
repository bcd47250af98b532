//! Weight files: GGUF and safetensors behind one [`Checkpoint`].
//!
//! Tensors have one set of names, GGUF's (`blk.0.attn_q.weight`), in every format. All claims of a file are checked
//! before use; data is mapped and decoded only on request. This module does not depend on models: the caller decides
//! which tensors there have to be, and of what shape.

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
