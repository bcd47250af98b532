//! Conversion at load: dense tensors of a checkpoint to block types or another dense type, on several threads.
//!
//! Which tensor gets which type follows the habits of GGUF files, so that a model quantised here is as good
//! as one that was converted: vectors, norms and routers stay F32, Q4_K gives the output matrix Q6_K, and
//! rows that are no whole number of blocks get the next type that fits.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::tensor::OwnedTensor;
use super::{Checkpoint, DType, RawTensor, blocks};
use crate::{Error, Result};

/// Values that a thread converts at a time: large enough to hide the hand-over, small enough for progress
/// to move and for the last thread to end soon.
const CHUNK_LEN: usize = 1 << 16;

/// What to quantise a dense model to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantization {
    /// Q4_0 throughout: 4.5 bits per weight.
    Q4_0,
    /// Q8_0 throughout: 8.5 bits per weight.
    Q8_0,
    /// Q4_K with a Q6_K output matrix: 4.5 to 5 bits per weight.
    Q4K,
}

impl Quantization {
    /// Every choice, as it is spelled in flags.
    pub const NAMES: [&str; 3] = ["q4_0", "q8_0", "q4_k"];
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Q4_0 => "q4_0",
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4_k",
        })
    }
}

impl FromStr for Quantization {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name.to_ascii_lowercase().as_str() {
            "q4_0" => Ok(Self::Q4_0),
            "q8_0" => Ok(Self::Q8_0),
            "q4_k" => Ok(Self::Q4K),
            _ => Err(Error::invalid_request(format!("{name:?} is not a quantisation"))
                .with_hint(format!("use one of {}", Self::NAMES.join(", ")))),
        }
    }
}

/// Chunks after which the file's pages are given back that were read before: pages are taken in larger pieces than a
/// chunk has, and each call waits for all threads.
const CHUNKS_TO_RELEASE: usize = 64;

/// Converts the tensors of one checkpoint: to block types, or to another dense type.
#[derive(Debug, Clone)]
pub struct Quantizer {
    target: Target,
    /// The matrix that makes logits: its errors reach the output directly.
    output_matrix: &'static str,
    num_threads: usize,
}

#[derive(Debug, Clone, Copy)]
enum Target {
    Blocks(Quantization),
    Dense(DType),
}

impl Quantizer {
    /// To block types. `num_threads` is by default what the operating system grants this process.
    #[must_use]
    pub fn new(
        quantization: Quantization,
        checkpoint: &Checkpoint,
        num_threads: Option<NonZeroUsize>,
    ) -> Self {
        let tied = !checkpoint.contains("output.weight");
        let num_threads = num_threads.or_else(|| thread::available_parallelism().ok());
        Self {
            target: Target::Blocks(quantization),
            output_matrix: if tied { "token_embd.weight" } else { "output.weight" },
            num_threads: num_threads.map_or(1, NonZeroUsize::get),
        }
    }

    /// To a dense type; tensors that are quantised already stay as they are.
    #[must_use]
    pub fn to_dense(dtype: DType, num_threads: NonZeroUsize) -> Self {
        Self { target: Target::Dense(dtype), output_matrix: "", num_threads: num_threads.get() }
    }

    /// Whether a tensor has to be converted, or refused because it cannot be.
    #[must_use]
    pub fn applies_to(&self, tensor: &RawTensor<'_>) -> bool {
        match self.target {
            Target::Blocks(_) => true,
            Target::Dense(_) => {
                !tensor.dtype.is_quantized() && tensor.dtype != self.dtype_of(tensor.name, tensor.shape)
            }
        }
    }

    /// Bytes of all tensors of the checkpoint after conversion.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn planned_bytes(&self, checkpoint: &Checkpoint) -> Result<u64> {
        let mut total = 0;
        for name in checkpoint.tensor_names() {
            // A tensor that cannot be read is either refused at load or one that no model uses.
            let Ok(tensor) = checkpoint.tensor(name) else { continue };
            let dtype = self.loaded_dtype(name, tensor.shape, tensor.dtype);
            total += dtype.row_bytes(tensor.num_elements())? as u64;
        }
        Ok(total)
    }

    /// The type that a tensor of this canonical name, row-major shape and stored type is loaded in.
    #[must_use]
    pub fn loaded_dtype(&self, name: &str, shape: &[usize], stored: DType) -> DType {
        if stored.is_quantized() { stored } else { self.dtype_of(name, shape) }
    }

    /// The type that a tensor of this canonical name and row-major shape gets.
    #[must_use]
    pub fn dtype_of(&self, name: &str, shape: &[usize]) -> DType {
        let stays_exact =
            shape.len() < 2 || name.ends_with("_norm.weight") || name.ends_with("ffn_gate_inp.weight");
        if stays_exact {
            return DType::F32;
        }
        let row_len = shape[shape.len() - 1];
        let candidates: &[DType] = match self.target {
            Target::Dense(dtype) => return dtype,
            Target::Blocks(Quantization::Q4_0) => &[DType::Q4_0],
            Target::Blocks(Quantization::Q8_0) => &[DType::Q8_0],
            Target::Blocks(Quantization::Q4K) if name == self.output_matrix => &[DType::Q6K, DType::Q8_0],
            Target::Blocks(Quantization::Q4K) => &[DType::Q4K, DType::Q5_0],
        };
        let fits = |dtype: &&DType| row_len.is_multiple_of(dtype.block_len());
        candidates.iter().find(fits).copied().unwrap_or(DType::F16)
    }

    /// Converts tensors to the types that [`Self::dtype_of`] gives them, all of them by all threads: a small one, such as
    /// an expert, would be done before its threads had begun. `progress` is called from any of the threads with the
    /// number of the file's bytes that are done since the last call.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidRequest`] if a tensor is quantised already,
    /// [`crate::ErrorKind::InvalidModel`] if it holds infinities or NaN; both name the tensor.
    pub fn quantize(
        &self,
        tensors: &[RawTensor<'_>],
        progress: &(dyn Fn(usize) + Sync),
    ) -> Result<Vec<OwnedTensor>> {
        let mut conversions = tensors.iter().map(|tensor| self.begin(tensor)).collect::<Result<Vec<_>>>()?;
        self.convert(&mut conversions, progress)?;
        Ok(conversions.into_iter().map(Conversion::finish).collect())
    }

    fn convert(&self, conversions: &mut [Conversion<'_>], progress: &(dyn Fn(usize) + Sync)) -> Result<()> {
        let num_chunks = conversions.iter().map(Conversion::num_chunks).sum();
        let queue = Mutex::new(conversions.iter_mut().flat_map(Conversion::chunks));
        let failure = Mutex::new(None);
        let work = || {
            let mut values = vec![0.0; CHUNK_LEN];
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(mut chunk) = next else { return };
                match chunk.convert(&mut values) {
                    Ok(()) => progress(chunk.input.len()),
                    Err(error) => {
                        let error = error.context(format!("tensor {:?}", chunk.tensor.name));
                        *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                        return;
                    }
                }
            }
        };
        thread::scope(|scope| {
            // The calling thread works as well.
            for _ in 1..self.num_threads.min(num_chunks) {
                scope.spawn(work);
            }
            work();
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    fn begin<'t>(&self, tensor: &'t RawTensor<'t>) -> Result<Conversion<'t>> {
        if tensor.dtype.is_quantized() {
            let target = match self.target {
                Target::Blocks(quantization) => quantization.to_string(),
                Target::Dense(dtype) => dtype.to_string(),
            };
            return Err(Error::invalid_request(format!(
                "tensor {:?} is already quantised to {} and cannot be converted to {target}",
                tensor.name, tensor.dtype
            ))
            .with_hint("quantisation at load is for models in F32, F16 or BF16"));
        }
        let dtype = self.dtype_of(tensor.name, tensor.shape);
        Ok(Conversion {
            tensor,
            dtype,
            chunk_bytes: [tensor.dtype.row_bytes(CHUNK_LEN)?, dtype.row_bytes(CHUNK_LEN)?],
            data: vec![0; dtype.row_bytes(tensor.num_elements())?],
        })
    }
}

/// A tensor on the way to another type, in chunks of whole blocks. A row is a whole number of blocks in both types, so
/// chunks need not end with rows.
struct Conversion<'t> {
    tensor: &'t RawTensor<'t>,
    dtype: DType,
    /// Bytes of a chunk before and after.
    chunk_bytes: [usize; 2],
    data: Vec<u8>,
}

/// A piece of a tensor for one thread.
struct Chunk<'t, 'd> {
    tensor: &'t RawTensor<'t>,
    dtype: DType,
    input: &'t [u8],
    output: &'d mut [u8],
}

impl<'t> Conversion<'t> {
    fn num_chunks(&self) -> usize {
        self.tensor.num_elements().div_ceil(CHUNK_LEN)
    }

    fn chunks(&mut self) -> impl Iterator<Item = Chunk<'t, '_>> {
        let (tensor, dtype, [in_bytes, out_bytes]) = (self.tensor, self.dtype, self.chunk_bytes);
        let pairs = tensor.data.chunks(in_bytes).zip(self.data.chunks_mut(out_bytes));
        pairs.enumerate().map(move |(index, (input, output))| {
            release_before(tensor, index, in_bytes);
            Chunk { tensor, dtype, input, output }
        })
    }

    fn finish(self) -> OwnedTensor {
        OwnedTensor::new(self.tensor.name, self.dtype, self.tensor.shape, self.data)
    }
}

impl Chunk<'_, '_> {
    /// With memory for the values of a chunk.
    fn convert(&mut self, values: &mut [f32]) -> Result<()> {
        let values = &mut values[..self.input.len() / self.tensor.dtype.block_bytes()];
        blocks::dequantize(self.tensor.dtype, self.input, values)?;
        blocks::quantize(self.dtype, values, self.output)
    }
}

/// Gives the memory of chunks back that were converted before chunk `index`, so that a large tensor is never in memory
/// twice. A chunk that a thread is still at would be read from the file again.
fn release_before(tensor: &RawTensor<'_>, index: usize, chunk_bytes: usize) {
    if index.is_multiple_of(CHUNKS_TO_RELEASE) && index >= 2 * CHUNKS_TO_RELEASE {
        let end = (index - CHUNKS_TO_RELEASE) * chunk_bytes;
        tensor.release_part(end - CHUNKS_TO_RELEASE * chunk_bytes..end);
    }
}

#[cfg(test)]
mod tests;
