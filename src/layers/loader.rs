//! Tensors out of a checkpoint: found by name, checked for shape, repacked for the device.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ops::{Context, Linear, Matrix, RmsNorm, Vector};
use crate::weights::{Checkpoint, Quantizer, RawTensor};
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
        let tensor = self.take(name)?.expect_shape(&[rows, cols])?;
        let quantizer = self.quantizer.as_ref().filter(|quantizer| quantizer.applies_to(&tensor));
        if self.context.is_dry_run() {
            let dtype = quantizer.map_or(tensor.dtype, |quantizer| quantizer.dtype_of(name, tensor.shape));
            return Matrix::without_weights(self.context, dtype, rows, cols);
        }
        let Some(quantizer) = quantizer else {
            let matrix = Matrix::new(self.context, &tensor)?;
            self.progress.advance(tensor.data.len());
            tensor.release();
            return Ok(matrix);
        };
        let value_bytes = tensor.dtype.block_bytes();
        let progress = &self.progress;
        let quantized =
            quantizer.quantize(&tensor, &|num_values| progress.advance(num_values * value_bytes))?;
        tensor.release();
        Matrix::new(self.context, &quantized.as_raw())
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
