//! Matrices that a block has in addition to those of the model, and that are mostly copies of them.

use super::{Cut, Loader};
use crate::Result;
use crate::ops::Matrix;

impl Loader<'_> {
    /// The matrix `name` of the shape `[rows, cols]`, which every rank has whole; none if there is no such tensor or it is a
    /// copy of `original`, which then replaces it.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn matrix_unless_copied(
        &self,
        name: &str,
        original: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Matrix>> {
        if !self.checkpoint.contains(name) {
            return Ok(None);
        }
        if self.is_copy(name, original)? {
            self.ignore(name);
            self.progress.advance(self.checkpoint.tensor(name)?.num_bytes());
            return Ok(None);
        }
        self.matrix(name, rows, cols, Cut::Whole).map(Some)
    }

    /// Whether two tensors are the same. Where weights are not read, those of the same type and shape count as the same: the
    /// kernels for them are.
    fn is_copy(&self, name: &str, original: &str) -> Result<bool> {
        let (one, other) = (self.checkpoint.tensor(name)?, self.checkpoint.tensor(original)?);
        if one.is_packed() || other.is_packed() {
            return Ok(false);
        }
        let is_alike = one.stored() == other.stored() && one.shape == other.shape;
        Ok(is_alike && (self.context.is_dry_run() || one.data()? == other.data()?))
    }
}
