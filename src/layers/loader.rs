//! Tensors out of a checkpoint: found by name, checked for shape, repacked for the device.

mod copies;
mod cut;
mod experts;
mod latent;

use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::config::Shard;
use crate::ops::cpu::matmul::MatrixFile;
use crate::ops::{Context, Linear, Matrix, RmsNorm, Vector};
use crate::weights::{Checkpoint, DType, Quantizer, RawTensor};
use crate::{Error, Result};

pub use cut::Cut;

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of the files whose tensors are loaded.
    pub loaded_bytes: u64,
    /// Bytes of all tensors.
    pub total_bytes: u64,
}

/// Bytes of the file that are converted together: many times a thread's chunk, and few compared with a model.
const GROUP_BYTES: usize = 64 << 20;

/// Loads the tensors of one model and remembers which, so that [`Loader::finish`] can report if the model
/// has left any out. Of a model that several ranks compute it loads one rank's shard: sizes are those of the shard, and a
/// [`Cut`] says how it is a part of the checkpoint's tensor.
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    context: &'a Context,
    shard: Shard,
    quantizer: Option<Quantizer>,
    expert_file: Option<Arc<MatrixFile>>,
    norm_offset: f32,
    used: RefCell<HashSet<String>>,
    progress: Progress<'a>,
}

struct Progress<'a> {
    loaded_bytes: AtomicU64,
    total_bytes: u64,
    report: &'a (dyn Fn(LoadProgress) + Sync),
}

impl Progress<'_> {
    fn advance(&self, num_bytes: usize) {
        let num_bytes = num_bytes as u64;
        let loaded_bytes = self.loaded_bytes.fetch_add(num_bytes, Ordering::Relaxed) + num_bytes;
        (self.report)(LoadProgress { loaded_bytes, total_bytes: self.total_bytes });
    }
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Loader({:?})", self.checkpoint.path())
    }
}

impl<'a> Loader<'a> {
    /// A loader that converts matrices with `quantizer`, if there is one. `on_progress` may be called from any thread.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if a tensor has a type that cannot be read.
    pub fn new(
        checkpoint: &'a Checkpoint,
        context: &'a Context,
        quantizer: Option<Quantizer>,
        on_progress: &'a (dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self> {
        checkpoint.ensure_supported()?;
        let quantizer = quantizer.or_else(|| checkpoint.has_packed().then(|| Quantizer::unpacking(None)));
        Ok(Self {
            checkpoint,
            context,
            shard: Shard::WHOLE,
            quantizer,
            expert_file: None,
            norm_offset: 0.0,
            used: RefCell::default(),
            progress: Progress {
                loaded_bytes: AtomicU64::new(0),
                total_bytes: checkpoint.tensors().iter().map(|tensor| tensor.num_bytes as u64).sum(),
                report: on_progress,
            },
        })
    }

    /// The same for a part of the model.
    #[must_use]
    pub fn of_shard(mut self, shard: Shard) -> Self {
        self.shard = shard;
        self
    }

    /// The same with experts in a file, out of which they are taken if they are there.
    #[must_use]
    pub fn with_expert_file(mut self, file: Option<Arc<MatrixFile>>) -> Self {
        self.expert_file = file;
        self
    }

    /// The same for a checkpoint whose norms leave this to be added to their weights.
    #[must_use]
    pub fn with_norm_offset(mut self, offset: f32) -> Self {
        self.norm_offset = offset;
        self
    }

    /// The device that weights are loaded for.
    #[must_use]
    pub fn context(&self) -> &'a Context {
        self.context
    }

    /// The shard's part of the matrix `name`, of the shape `[rows, cols]`.
    ///
    /// # Errors
    /// If it is missing, has another shape, or cannot be cut, quantised or repacked.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize, cut: Cut) -> Result<Matrix> {
        self.repack_part(&self.take_whole(name, [rows, cols], cut)?, [rows, cols], cut)
    }

    /// The matrix `name`, which every rank has whole, in single precision for every type of the file and of conversion:
    /// for a router, whose choice changes if its matmuls round their inputs.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn matrix_in_f32(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let tensor = self.take(name)?.expect_shape(&[rows, cols])?;
        let bytes: Vec<u8> = tensor.to_f32()?.iter().flat_map(|value| value.to_le_bytes()).collect();
        let matrix = Matrix::from_bytes(self.context, DType::F32, &bytes, rows, cols)?;
        self.progress.advance(tensor.num_bytes());
        tensor.release();
        Ok(matrix)
    }

    /// Converts a matrix, if requested, and repacks it for the device.
    fn repack(&self, tensor: &RawTensor<'_>) -> Result<Matrix> {
        let matrix = self.repack_all(std::slice::from_ref(tensor), None)?.pop();
        matrix.ok_or_else(|| Error::internal("a matrix is not there after it was repacked"))
    }

    /// The same of many, some together, so that there is work for all threads and little in memory. With a file, they
    /// are taken from there or put there.
    fn repack_all(&self, tensors: &[RawTensor<'_>], file: Option<&Arc<MatrixFile>>) -> Result<Vec<Matrix>> {
        if self.context.is_dry_run() {
            return tensors.iter().map(|tensor| self.without_weights(tensor)).collect();
        }
        let mut matrices = Vec::with_capacity(tensors.len());
        let mut rest = tensors;
        while let [first, ..] = rest {
            if let Some(file) = file
                && let (dtype, rows, cols) = self.planned(first)?
                && let Some(matrix) = Matrix::next_in_file(file, dtype, rows, cols)?
            {
                matrices.push(matrix);
                self.progress.advance(first.num_bytes());
                rest = &rest[1..];
                continue;
            }
            let Some(quantizer) = self.quantizer_for(first) else {
                matrices.push(self.copy(first, first.num_bytes(), file)?);
                rest = &rest[1..];
                continue;
            };
            let num = (GROUP_BYTES / first.num_bytes().max(1)).max(1);
            let num = rest.iter().take(num).take_while(|tensor| quantizer.applies_to(tensor)).count();
            let (group, others) = rest.split_at(num);
            let progress = &self.progress;
            let converted = quantizer.quantize(group, &|num_bytes| progress.advance(num_bytes))?;
            group.iter().for_each(RawTensor::release);
            for tensor in converted {
                matrices.push(self.upload(&tensor.as_raw(), file)?);
            }
            rest = others;
        }
        Ok(matrices)
    }

    /// The same for a matrix that was made of this many bytes of the file.
    fn repack_made(&self, tensor: &RawTensor<'_>, num_bytes: usize) -> Result<Matrix> {
        if self.context.is_dry_run() {
            return self.without_weights(tensor);
        }
        let Some(quantizer) = self.quantizer_for(tensor) else { return self.copy(tensor, num_bytes, None) };
        let converted = quantizer.quantize(std::slice::from_ref(tensor), &|_| ())?;
        self.progress.advance(num_bytes);
        let converted =
            converted.first().ok_or_else(|| Error::internal("a tensor is not there converted"))?;
        Matrix::new(self.context, &converted.as_raw())
    }

    fn quantizer_for(&self, tensor: &RawTensor<'_>) -> Option<&Quantizer> {
        self.quantizer.as_ref().filter(|quantizer| quantizer.applies_to(tensor))
    }

    /// Repacks a matrix that was made of this many bytes of the file and already has its final type.
    fn copy(
        &self,
        tensor: &RawTensor<'_>,
        num_bytes: usize,
        file: Option<&Arc<MatrixFile>>,
    ) -> Result<Matrix> {
        let matrix = self.upload(tensor, file)?;
        self.progress.advance(num_bytes);
        tensor.release();
        Ok(matrix)
    }

    fn upload(&self, tensor: &RawTensor<'_>, file: Option<&Arc<MatrixFile>>) -> Result<Matrix> {
        match file {
            Some(file) => Matrix::add_to_file(self.context, file, tensor),
            None => Matrix::new(self.context, tensor),
        }
    }

    fn without_weights(&self, tensor: &RawTensor<'_>) -> Result<Matrix> {
        let (dtype, rows, cols) = self.planned(tensor)?;
        Matrix::without_weights(self.context, dtype, rows, cols)
    }

    /// The type that a matrix is to have, its rows and its columns.
    fn planned(&self, tensor: &RawTensor<'_>) -> Result<(DType, usize, usize)> {
        let &[rows, cols] = tensor.shape else {
            return Err(Error::internal(format!("tensor {:?} is not a matrix", tensor.name)));
        };
        let dtype = match self.quantizer_for(tensor) {
            Some(quantizer) => quantizer.loaded_dtype_of(tensor),
            None => tensor.dtype,
        };
        Ok((dtype, rows, cols))
    }

    /// The type in which the matrix `name` will be stored.
    ///
    /// # Errors
    /// If it is missing.
    pub fn matrix_dtype(&self, name: &str) -> Result<DType> {
        let tensor = self.checkpoint.tensor(name)?;
        let quantizer = self.quantizer.as_ref().filter(|quantizer| quantizer.applies_to(&tensor));
        Ok(quantizer.map_or(tensor.dtype, |quantizer| quantizer.loaded_dtype_of(&tensor)))
    }

    /// The shard's part of the projection `name` (without `.weight`), with a bias if `has_bias`.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn linear(
        &self,
        name: &str,
        outputs: usize,
        inputs: usize,
        cut: Cut,
        has_bias: bool,
    ) -> Result<Linear> {
        let weight = self.matrix(&format!("{name}.weight"), outputs, inputs, cut)?;
        Ok(Linear { weight, bias: self.bias(name, outputs, cut, has_bias)? })
    }

    /// The shard's part by rows of the projections `{prefix}.{name}`, of this many values each, with biases if `has_bias`.
    /// Some checkpoints have all their weights in one tensor `{prefix}.{together}.weight`, whose rows are theirs in this order.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn linears<const N: usize>(
        &self,
        prefix: &str,
        together: &str,
        parts: [(&str, usize); N],
        inputs: usize,
        has_bias: bool,
    ) -> Result<[Linear; N]> {
        let name = format!("{prefix}.{together}.weight");
        let num_rows: usize = parts.iter().map(|(_, outputs)| outputs).sum();
        let mut linears = Vec::with_capacity(N);
        if self.checkpoint.shape(&name) == Some(&Cut::Rows.whole(self.shard, [num_rows, inputs])[..]) {
            let all = self.take(&name)?;
            let mut first = 0;
            for (part, outputs) in parts {
                let shape = Cut::Rows.whole(self.shard, [outputs, inputs]);
                let weight = self.repack_part(&all.rows(first, &shape)?, [outputs, inputs], Cut::Rows)?;
                let bias = self.bias(&format!("{prefix}.{part}"), outputs, Cut::Rows, has_bias)?;
                linears.push(Linear { weight, bias });
                first += shape[0];
            }
        } else {
            for (part, outputs) in parts {
                let name = format!("{prefix}.{part}");
                linears.push(self.linear(&name, outputs, inputs, Cut::Rows, has_bias)?);
            }
        }
        linears.try_into().map_err(|_| Error::internal("a projection is not there after it was loaded"))
    }

    /// The shard's part of the biases `{name}.bias` of a matrix with this cut, if there are any: this many values.
    ///
    /// # Errors
    /// As [`Self::vector`].
    pub fn bias(&self, name: &str, outputs: usize, cut: Cut, has_bias: bool) -> Result<Option<Vector>> {
        if !has_bias {
            return Ok(None);
        }
        let name = format!("{name}.bias");
        let values = match cut {
            Cut::Rows => self.vector_by_rows(&name, outputs)?,
            Cut::Whole => self.vector(&name, outputs)?,
            // A sum over ranks has it once.
            Cut::Columns if self.shard.is_first() => self.vector(&name, outputs)?,
            Cut::Columns => {
                self.vector(&name, outputs)?;
                return Ok(None);
            }
        };
        Vector::new(self.context, values).map(Some)
    }

    /// The norm `name` (without `.weight`) over `len` values.
    ///
    /// # Errors
    /// As [`Self::vector`].
    pub fn norm(&self, name: &str, len: usize, eps: f32) -> Result<RmsNorm> {
        self.norm_times(name, len, eps, 1.0)
    }

    /// The same whose results are multiplied by `scale`.
    ///
    /// # Errors
    /// As [`Self::vector`].
    pub fn norm_times(&self, name: &str, len: usize, eps: f32, scale: f32) -> Result<RmsNorm> {
        let mut weight = self.vector(&format!("{name}.weight"), len)?;
        weight.iter_mut().for_each(|weight| *weight = (*weight + self.norm_offset) * scale);
        Ok(RmsNorm { weight: Vector::new(self.context, weight)?, eps })
    }

    /// The norms `{prefix}.{…}` of a layer with four: after attention, before its feed-forward network and after it.
    /// Hugging Face folders may name the first one like others name the second one, and GGUF files of models that have
    /// only the second one may name it like the first one.
    pub fn norm_names(&self, prefix: &str) -> [&'static str; 3] {
        let has = |norm: &str| self.checkpoint.contains(&format!("{prefix}.{norm}.weight"));
        let (after_attention, after_network) = ("post_attention_norm", "post_ffw_norm");
        // With norms after only, a folder has the name of another one for the first of them.
        if has("pre_ffw_norm") || (!has("attn_norm") && has("ffn_norm")) {
            return ["ffn_norm", "pre_ffw_norm", after_network];
        }
        let is_only = has(after_attention) && !has("ffn_norm") && !has(after_network);
        [after_attention, if is_only { after_attention } else { "ffn_norm" }, after_network]
    }

    /// The vector `name` of `len` values, which every rank has whole.
    ///
    /// # Errors
    /// If it is missing or has another shape.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        self.values(name, &[len])
    }

    /// The shard's part of the vector `name`, of `len` values.
    ///
    /// # Errors
    /// As [`Self::vector`].
    pub fn vector_by_rows(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let mut values = self.vector(name, len * self.shard.size())?;
        values.truncate((self.shard.rank() + 1) * len);
        values.drain(..self.shard.rank() * len);
        Ok(values)
    }

    /// All values of the tensor `name`, which has this shape.
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let tensor = self.take(name)?.expect_shape(shape)?;
        self.progress.advance(tensor.num_bytes());
        tensor.to_f32()
    }

    /// Marks a tensor as known: a checkpoint may have it, but need not.
    pub fn ignore(&self, name: &str) {
        self.used.borrow_mut().insert(name.to_owned());
    }

    /// Leaves the tensors of these layers alone.
    pub fn ignore_layers(&self, layers: Range<usize>) {
        let is_of_these = |name: &str| {
            let rest = ["blk.", "model.layers."].into_iter().find_map(|prefix| name.strip_prefix(prefix));
            let layer = rest.and_then(|rest| rest.split_once('.')).and_then(|(layer, _)| layer.parse().ok());
            layer.is_some_and(|layer| layers.contains(&layer))
        };
        for tensor in self.checkpoint.tensors().iter().filter(|tensor| is_of_these(tensor.name)) {
            self.ignore(tensor.name);
            self.progress.advance(tensor.num_bytes);
        }
    }

    /// Checks that every tensor was used. One that was not belongs to something that the model does not
    /// do, so its output would be wrong.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with the names.
    pub fn finish(self) -> Result<()> {
        const MAX_NAMES: usize = 4;
        let used = self.used.into_inner();
        let mut unused = self.checkpoint.unused_tensors(|name| used.contains(name));
        unused.retain(|name| !adds_nothing(self.checkpoint, name));
        if unused.is_empty() {
            return Ok(());
        }
        let names = unused.iter().take(MAX_NAMES).copied().collect::<Vec<_>>().join(", ");
        let more = unused.len().saturating_sub(MAX_NAMES);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        Err(Error::unsupported(format!(
            "the checkpoint has {} tensors that this architecture has no use for: {names}{more}",
            unused.len()
        ))
        .with_hint(
            "the file is of a variant of the architecture that is not supported; it needs an engine that knows the \
             variant, such as llama.cpp for GGUF files and transformers for folders",
        ))
    }

    fn take(&self, name: &str) -> Result<RawTensor<'a>> {
        let tensor = self.checkpoint.tensor(name)?;
        self.used.borrow_mut().insert(name.to_owned());
        Ok(tensor)
    }
}

/// Whether a tensor is a bias of zeros: AutoGPTQ writes one for every matrix.
fn adds_nothing(checkpoint: &Checkpoint, name: &str) -> bool {
    let values = || checkpoint.tensor(name).and_then(|tensor| tensor.to_f32());
    name.ends_with(".bias") && values().is_ok_and(|values| values.iter().all(|value| *value == 0.0))
}
