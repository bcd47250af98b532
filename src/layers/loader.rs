//! Tensors out of a checkpoint: found by name, checked for shape, repacked for the device.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ops::{Context, Linear, Matrix, MatrixStack, RmsNorm, Vector};
use crate::weights::{Checkpoint, DType, Quantizer, RawTensor};
use crate::{Error, Result};

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of the files whose tensors are loaded.
    pub loaded_bytes: u64,
    /// Bytes of all tensors.
    pub total_bytes: u64,
}

/// Loads the tensors of one model and remembers which, so that [`Loader::finish`] can tell if the model
/// has left any out.
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    context: &'a Context,
    quantizer: Option<Quantizer>,
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
        Ok(Self {
            checkpoint,
            context,
            quantizer,
            used: RefCell::default(),
            progress: Progress {
                loaded_bytes: AtomicU64::new(0),
                total_bytes: checkpoint.tensors().iter().map(|tensor| tensor.num_bytes as u64).sum(),
                report: on_progress,
            },
        })
    }

    /// The device that weights are loaded for.
    #[must_use]
    pub fn context(&self) -> &'a Context {
        self.context
    }

    /// The matrix `name` of the shape `[rows, cols]`.
    ///
    /// # Errors
    /// If it is missing, has another shape, or cannot be quantised or repacked.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        self.repack(&self.take(name)?.expect_shape(&[rows, cols])?)
    }

    /// The same in single precision, whatever the file has and whatever matrices are converted to: for a router, whose
    /// choice is another one if its products are rounded.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn matrix_in_f32(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let tensor = self.take(name)?.expect_shape(&[rows, cols])?;
        let bytes: Vec<u8> = tensor.to_f32()?.iter().flat_map(|value| value.to_le_bytes()).collect();
        let matrix = Matrix::from_bytes(self.context, DType::F32, &bytes, rows, cols)?;
        self.progress.advance(tensor.data.len());
        tensor.release();
        Ok(matrix)
    }

    /// Converts a matrix, if that is asked for, and repacks it for the device.
    fn repack(&self, tensor: &RawTensor<'_>) -> Result<Matrix> {
        self.repack_from(tensor, tensor.data.len())
    }

    /// The same of a tensor that was made of so many bytes of the file.
    fn repack_from(&self, tensor: &RawTensor<'_>, num_bytes: usize) -> Result<Matrix> {
        let quantizer = self.quantizer.as_ref().filter(|quantizer| quantizer.applies_to(tensor));
        if self.context.is_dry_run() {
            let &[rows, cols] = tensor.shape else {
                return Err(Error::internal(format!("tensor {:?} is no matrix", tensor.name)));
            };
            let dtype =
                quantizer.map_or(tensor.dtype, |quantizer| quantizer.dtype_of(tensor.name, tensor.shape));
            return Matrix::without_weights(self.context, dtype, rows, cols);
        }
        let Some(quantizer) = quantizer else {
            let matrix = Matrix::new(self.context, tensor)?;
            self.progress.advance(num_bytes);
            tensor.release();
            return Ok(matrix);
        };
        let value_bytes = tensor.dtype.block_bytes();
        let progress = &self.progress;
        let quantized =
            quantizer.quantize(tensor, &|num_values| progress.advance(num_values * value_bytes))?;
        tensor.release();
        Matrix::new(self.context, &quantized.as_raw())
    }

    /// The matrices of `num` experts: the tensor `{prefix}_exps.weight` of the shape `[num, rows, cols]` or, in
    /// checkpoints that keep them apart, `{prefix}.0.weight` and so on.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn experts(&self, prefix: &str, num: usize, rows: usize, cols: usize) -> Result<MatrixStack> {
        let matrices = if self.checkpoint.contains(&format!("{prefix}.0.weight")) {
            let own = |index| self.matrix(&format!("{prefix}.{index}.weight"), rows, cols);
            (0..num).map(own).collect::<Result<_>>()?
        } else {
            let stacked = self.take(&format!("{prefix}_exps.weight"))?.expect_shape(&[num, rows, cols])?;
            (0..num).map(|index| self.repack(&stacked.matrix(index)?)).collect::<Result<_>>()?
        };
        MatrixStack::new(self.context, matrices)
    }

    /// The second projections of latent attention, for each head: of queries into the latent row,
    /// `[rank, key_dim]`, and of the latent row into values, `[value_dim, rank]`. Files have them like this, or as one
    /// matrix from the latent row to keys and values, `[heads · (key_dim + value_dim), rank]`.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn latent_projections(
        &self,
        prefix: &str,
        num_heads: usize,
        rank: usize,
        key_dim: usize,
        value_dim: usize,
    ) -> Result<(MatrixStack, MatrixStack)> {
        let stack = |matrices| MatrixStack::new(self.context, matrices);
        let [k_name, v_name] = ["attn_k_b", "attn_v_b"].map(|name| format!("{prefix}.{name}.weight"));
        if self.checkpoint.contains(&k_name) {
            let keys = self.take(&k_name)?.expect_shape(&[num_heads, rank, key_dim])?;
            let values = self.take(&v_name)?.expect_shape(&[num_heads, value_dim, rank])?;
            let all = |tensor: RawTensor<'_>| {
                (0..num_heads).map(|head| self.repack(&tensor.matrix(head)?)).collect::<Result<_>>()
            };
            return Ok((stack(all(keys)?)?, stack(all(values)?)?));
        }
        let head_dim = key_dim + value_dim;
        let both =
            self.take(&format!("{prefix}.attn_kv_b.weight"))?.expect_shape(&[num_heads * head_dim, rank])?;
        let (key_shape, value_shape) = ([key_dim, rank], [value_dim, rank]);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for head in 0..num_heads {
            let own = both.rows(head * head_dim, &key_shape)?;
            keys.push(self.repack_from(&own.transposed()?.as_raw(), own.data.len())?);
            own.release();
            values.push(self.repack(&both.rows(head * head_dim + key_dim, &value_shape)?)?);
        }
        Ok((stack(keys)?, stack(values)?))
    }

    /// The projection `name` (without `.weight`), with a bias if `has_bias`.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn linear(&self, name: &str, outputs: usize, inputs: usize, has_bias: bool) -> Result<Linear> {
        let weight = self.matrix(&format!("{name}.weight"), outputs, inputs)?;
        let bias =
            has_bias.then(|| Vector::new(self.context, self.vector(&format!("{name}.bias"), outputs)?));
        Ok(Linear { weight, bias: bias.transpose()? })
    }

    /// The norm `name` (without `.weight`) over `len` values.
    ///
    /// # Errors
    /// As [`Self::vector`].
    pub fn norm(&self, name: &str, len: usize, eps: f32) -> Result<RmsNorm> {
        let weight = Vector::new(self.context, self.vector(&format!("{name}.weight"), len)?)?;
        Ok(RmsNorm { weight, eps })
    }

    /// The vector `name` of `len` values.
    ///
    /// # Errors
    /// If it is missing or has another shape.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let tensor = self.take(name)?.expect_shape(&[len])?;
        self.progress.advance(tensor.data.len());
        tensor.to_f32()
    }

    /// Marks a tensor as known, for one that a checkpoint may have without need.
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
        let unused = self.checkpoint.unused_tensors(|name| used.contains(name));
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
        .with_hint("the file is of a variant of the architecture that is not supported"))
    }

    fn take(&self, name: &str) -> Result<RawTensor<'a>> {
        let tensor = self.checkpoint.tensor(name)?;
        self.used.borrow_mut().insert(name.to_owned());
        Ok(tensor)
    }
}
