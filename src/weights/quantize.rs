//! Conversion at load: dense tensors of a checkpoint to block types or another dense type, on several threads.
//!
//! Which tensor gets which type follows the habits of GGUF files, so that a model quantised here is as good
//! as one that was converted: vectors, norms and routers stay F32, the output matrix gets at least six bits, and
//! rows that are no whole number of blocks get the next type that fits.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::quantized::PackedTensor;
use super::tensor::OwnedTensor;
use super::{Checkpoint, DType, FileType, RawTensor, TypeSummary, blocks, names};
use crate::{Error, Result};

/// Values that a thread converts at a time: large enough to hide the hand-over, small enough for progress
/// to move and for the last thread to end soon.
const CHUNK_LEN: usize = 1 << 16;

/// The type to quantise a dense model to. The matrix that computes logits gets at least eight bits, or Q6_K: its errors
/// reach the output directly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantization {
    /// 4.5 bits per weight.
    Q4_0,
    /// 5 bits per weight.
    Q4_1,
    /// 5.5 bits per weight.
    Q5_0,
    /// 6 bits per weight.
    Q5_1,
    /// 8.5 bits per weight.
    Q8_0,
    /// 4.5 bits per weight.
    Q4K,
    /// 5.5 bits per weight.
    Q5K,
    /// 6.6 bits per weight.
    Q6K,
}

impl Quantization {
    /// Every choice.
    pub const ALL: [Self; 8] =
        [Self::Q4_0, Self::Q4_1, Self::Q5_0, Self::Q5_1, Self::Q8_0, Self::Q4K, Self::Q5K, Self::Q6K];
    /// Every choice, as spelled in flags.
    pub const NAMES: [&str; 8] = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"];

    /// The type of a matrix, and those that replace it where rows are not a multiple of its blocks.
    fn types(self) -> &'static [DType] {
        match self {
            Self::Q4_0 => &[DType::Q4_0],
            Self::Q4_1 => &[DType::Q4_1],
            Self::Q5_0 => &[DType::Q5_0],
            Self::Q5_1 => &[DType::Q5_1],
            Self::Q8_0 => &[DType::Q8_0],
            Self::Q4K => &[DType::Q4K, DType::Q5_0],
            Self::Q5K => &[DType::Q5K, DType::Q5_1],
            Self::Q6K => &[DType::Q6K, DType::Q8_0],
        }
    }

    /// The same of the matrix that makes logits.
    fn output_types(self) -> &'static [DType] {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => &[DType::Q8_0],
            Self::Q4K | Self::Q5K | Self::Q6K => &[DType::Q6K, DType::Q8_0],
        }
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::NAMES[*self as usize])
    }
}

impl FromStr for Quantization {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::NAMES.iter().position(|own| own.eq_ignore_ascii_case(name));
        found.map(|index| Self::ALL[index]).ok_or_else(|| {
            Error::invalid_request(format!("{name:?} is not a quantisation")).with_hint(format!(
                "use one of {}; a quantised model (awq, gptq, fp8) is recognised from its files, so omit it",
                Self::NAMES.join(", ")
            ))
        })
    }
}

/// Chunks after which the file's pages are given back that were read before: pages are taken in larger chunks than a
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
    /// The type that a tensor has: of those in formats of other programs.
    Own,
}

/// The target type of a matrix.
enum Wanted {
    Dense(DType),
    OneOf(&'static [DType]),
}

impl Quantizer {
    /// To block types. `num_threads` is by default the number that the operating system allows this process.
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

    /// To a dense type; quantised tensors are unchanged.
    #[must_use]
    pub fn to_dense(dtype: DType, num_threads: NonZeroUsize) -> Self {
        Self { target: Target::Dense(dtype), output_matrix: "", num_threads: num_threads.get() }
    }

    /// For matrices in formats of other programs, to the nearest types; other tensors are unchanged. `num_threads` is
    /// by default the number that the operating system allows this process.
    #[must_use]
    pub fn unpacking(num_threads: Option<NonZeroUsize>) -> Self {
        let num_threads = num_threads.or_else(|| thread::available_parallelism().ok());
        Self { target: Target::Own, output_matrix: "", num_threads: num_threads.map_or(1, NonZeroUsize::get) }
    }

    /// Whether a tensor has to be converted, or refused because it cannot be.
    #[must_use]
    pub fn applies_to(&self, tensor: &RawTensor<'_>) -> bool {
        match self.target {
            _ if tensor.is_packed() => true,
            Target::Blocks(_) => true,
            Target::Dense(_) => {
                !tensor.dtype.is_quantized() && tensor.dtype != self.dtype_of(tensor.name, tensor.shape)
            }
            Target::Own => false,
        }
    }

    /// Whether matrices get a chosen type.
    #[must_use]
    pub fn is_chosen(&self) -> bool {
        !matches!(self.target, Target::Own)
    }

    /// Bytes of all tensors of the checkpoint after conversion, on a device that keeps types of files as `kept_as`
    /// returns.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn planned_bytes(
        &self,
        checkpoint: &Checkpoint,
        kept_as: impl Fn(FileType) -> FileType,
    ) -> Result<u64> {
        let mut total = 0;
        for name in checkpoint.tensor_names() {
            // A tensor that cannot be read is either refused at load or one that no model uses.
            let Ok(tensor) = checkpoint.tensor(name) else { continue };
            let kept = kept_as(self.loaded_type_of(&tensor));
            total += kept.row_bytes(tensor.num_elements())? as u64;
        }
        Ok(total)
    }

    /// The type that a tensor of this canonical name, row-major shape and stored type is loaded in, before a device
    /// repacks it.
    #[must_use]
    pub fn loaded_type(&self, name: &str, shape: &[usize], stored: FileType) -> FileType {
        let dtype = self.loaded_dtype(name, shape, stored.kept_as());
        if dtype == stored.kept_as() { stored } else { dtype.into() }
    }

    /// The same of a tensor.
    #[must_use]
    pub fn loaded_type_of(&self, tensor: &RawTensor<'_>) -> FileType {
        let (dtype, stored) = (self.loaded_dtype_of(tensor), tensor.stored());
        if dtype == stored.kept_as() { stored } else { dtype.into() }
    }

    /// The type that a tensor of this canonical name, row-major shape and stored type is loaded in.
    #[must_use]
    pub fn loaded_dtype(&self, name: &str, shape: &[usize], stored: DType) -> DType {
        match self.target {
            Target::Own => stored,
            _ if stored.is_quantized() => stored,
            _ => self.dtype_of(name, shape),
        }
    }

    /// The type that a tensor is loaded in.
    #[must_use]
    pub fn loaded_dtype_of(&self, tensor: &RawTensor<'_>) -> DType {
        if tensor.is_packed() && self.is_chosen() {
            return self.dtype_of(tensor.name, tensor.shape);
        }
        self.loaded_dtype(tensor.name, tensor.shape, tensor.dtype)
    }

    /// The chosen type for a tensor of this canonical name and row-major shape.
    fn dtype_of(&self, name: &str, shape: &[usize]) -> DType {
        if stays_exact(name, shape) {
            return DType::F32;
        }
        let row_len = shape[shape.len() - 1];
        let fits = |dtype: &&DType| row_len.is_multiple_of(dtype.block_len());
        match self.wanted(name) {
            Wanted::Dense(dtype) => dtype,
            Wanted::OneOf(types) => types.iter().find(fits).copied().unwrap_or(DType::F16),
        }
    }

    /// How the tensors of the checkpoint are kept after conversion, the type with the most bytes first.
    ///
    /// # Errors
    /// If a row is no whole number of blocks.
    pub fn type_summaries(&self, checkpoint: &Checkpoint) -> Result<Vec<TypeSummary>> {
        let mut types = Vec::new();
        for name in checkpoint.tensor_names().filter(|name| !names::is_unread(name)) {
            let Ok(tensor) = checkpoint.tensor(name) else { continue };
            let dtype = self.loaded_dtype_of(&tensor);
            types.push((dtype.to_string(), dtype.row_bytes(tensor.num_elements())?));
        }
        Ok(TypeSummary::of(types))
    }

    /// A notice, if so, about how many matrices of the checkpoint get another type than requested,
    /// because their rows are no whole number of its blocks.
    #[must_use]
    pub fn notice(&self, checkpoint: &Checkpoint) -> Option<String> {
        let Target::Blocks(quantization) = self.target else { return None };
        let (mut num_matrices, mut block_len) = (0, 0);
        let mut instead = BTreeMap::<DType, usize>::new();
        for name in checkpoint.tensor_names().filter(|name| !names::is_unread(name)) {
            let Ok(tensor) = checkpoint.tensor(name) else { continue };
            let Wanted::OneOf([first, ..]) = self.wanted(name) else { continue };
            if stays_exact(name, tensor.shape) {
                continue;
            }
            num_matrices += 1;
            let dtype = self.dtype_of(name, tensor.shape);
            if dtype != *first {
                *instead.entry(dtype).or_default() += 1;
                block_len = block_len.max(first.block_len());
            }
        }
        let num_others: usize = instead.values().sum();
        if num_others == 0 {
            return None;
        }
        let types: Vec<_> = instead.iter().map(|(dtype, num)| format!("{num} as {dtype}")).collect();
        Some(format!(
            "--quantization {quantization}: {num_others} of {num_matrices} matrices have rows that are no multiple \
             of \
             {block_len} values and are kept in another type, {}",
            types.join(" and ")
        ))
    }

    /// The types that a matrix of this name is to have, the best one first.
    fn wanted(&self, name: &str) -> Wanted {
        match self.target {
            Target::Dense(dtype) => Wanted::Dense(dtype),
            Target::Own => Wanted::Dense(DType::F32),
            Target::Blocks(quantization) if name == self.output_matrix => {
                Wanted::OneOf(quantization.output_types())
            }
            Target::Blocks(quantization) => Wanted::OneOf(quantization.types()),
        }
    }

    /// Converts tensors to the types that `dtype_of` gives them, all of them by all threads: a small one, such as
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
            let mut values = Vec::new();
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(mut chunk) = next else { return };
                match chunk.convert(&mut values) {
                    Ok(()) => progress(chunk.num_bytes()),
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
        if tensor.dtype.is_quantized() && !tensor.is_packed() {
            let target = match self.target {
                Target::Blocks(quantization) => quantization.to_string(),
                Target::Dense(dtype) => dtype.to_string(),
                Target::Own => "another type".to_owned(),
            };
            return Err(Error::invalid_request(format!(
                "tensor {:?} is already quantised to {} and cannot be converted to {target}",
                tensor.name,
                tensor.stored()
            ))
            .with_hint("quantisation at load is for models in F32, F16 or BF16"));
        }
        let dtype = self.loaded_dtype_of(tensor);
        let source = match tensor.packed_rows() {
            None => Source::Stored { data: tensor.data()?, chunk_bytes: tensor.dtype.row_bytes(CHUNK_LEN)? },
            Some((packed, rows)) => {
                let fitting = CHUNK_LEN / tensor.row_len().max(1);
                let rows_per_chunk = fitting.max(1).next_multiple_of(packed.rows_at_once().max(1));
                Source::Packed { packed, rows, rows_per_chunk }
            }
        };
        let out_chunk_bytes = match source {
            Source::Stored { .. } => dtype.row_bytes(CHUNK_LEN)?,
            Source::Packed { rows_per_chunk, .. } => dtype.row_bytes(tensor.row_len())? * rows_per_chunk,
        };
        let data = vec![0; dtype.row_bytes(tensor.num_elements())?];
        Ok(Conversion { tensor, dtype, source, out_chunk_bytes, data })
    }
}

/// True for tensors that are small or sensitive to rounding: vectors, norms, biases and routers.
fn stays_exact(name: &str, shape: &[usize]) -> bool {
    let is_vector = shape.len() < 2 || name.ends_with(".bias");
    is_vector || name.ends_with("_norm.weight") || name.ends_with("ffn_gate_inp.weight")
}

/// A tensor on the way to another type, in chunks of whole blocks. A row is a whole number of blocks in both types, so
/// chunks need not end with rows.
struct Conversion<'t> {
    tensor: &'t RawTensor<'t>,
    dtype: DType,
    source: Source<'t>,
    out_chunk_bytes: usize,
    data: Vec<u8>,
}

/// Where the values come from.
enum Source<'t> {
    Stored { data: &'t [u8], chunk_bytes: usize },
    Packed { packed: &'t PackedTensor, rows: Range<usize>, rows_per_chunk: usize },
}

/// A chunk of a tensor for one thread.
struct Chunk<'t, 'd> {
    tensor: &'t RawTensor<'t>,
    dtype: DType,
    input: Input<'t>,
    output: &'d mut [u8],
}

enum Input<'t> {
    Stored(&'t [u8]),
    Packed(&'t PackedTensor, Range<usize>),
}

impl<'t> Conversion<'t> {
    fn num_chunks(&self) -> usize {
        self.data.len().div_ceil(self.out_chunk_bytes.max(1))
    }

    fn chunks(&mut self) -> impl Iterator<Item = Chunk<'t, '_>> {
        let (tensor, dtype, source) = (self.tensor, self.dtype, &self.source);
        self.data.chunks_mut(self.out_chunk_bytes.max(1)).enumerate().map(move |(index, output)| {
            let input = match source {
                Source::Stored { data, chunk_bytes } => {
                    release_before(tensor, index, *chunk_bytes);
                    let rest = &data[index * chunk_bytes..];
                    Input::Stored(&rest[..rest.len().min(*chunk_bytes)])
                }
                Source::Packed { packed, rows, rows_per_chunk } => {
                    let first = rows.start + index * rows_per_chunk;
                    Input::Packed(packed, first..rows.end.min(first + rows_per_chunk))
                }
            };
            Chunk { tensor, dtype, input, output }
        })
    }

    fn finish(self) -> OwnedTensor {
        OwnedTensor::new(self.tensor.name, self.dtype, self.tensor.shape, self.data)
    }
}

impl Chunk<'_, '_> {
    /// Bytes of the file.
    fn num_bytes(&self) -> usize {
        match &self.input {
            Input::Stored(bytes) => bytes.len(),
            Input::Packed(packed, rows) => packed.bytes_of(rows),
        }
    }

    /// With memory for the values of a chunk.
    fn convert(&mut self, values: &mut Vec<f32>) -> Result<()> {
        match &self.input {
            Input::Stored(bytes) => {
                values.resize(bytes.len() / self.tensor.dtype.block_bytes(), 0.0);
                blocks::dequantize(self.tensor.dtype, bytes, values)?;
                blocks::quantize(self.dtype, values, self.output)
            }
            Input::Packed(packed, rows) => packed.convert(rows.clone(), self.dtype, values, self.output),
        }
    }
}

/// Gives the memory of chunks back that were converted before chunk `index`, so that a large tensor is never in memory
/// twice. A chunk that a thread is still at would be read from the file again.
fn release_before(tensor: &RawTensor<'_>, index: usize, chunk_bytes: usize) {
    if index.is_multiple_of(CHUNKS_TO_RELEASE) && index >= 2 * CHUNKS_TO_RELEASE {
        let end = (index - CHUNKS_TO_RELEASE) * chunk_bytes;
        tensor.release_range(end - CHUNKS_TO_RELEASE * chunk_bytes..end);
    }
}

#[cfg(test)]
mod tests;
