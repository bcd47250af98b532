//! How matrices are divided among ranks, and the part of a rank.

use std::sync::Arc;

use super::Loader;
use crate::config::Shard;
use crate::ops::cpu::matmul::MatrixFile;
use crate::ops::{Linear, Matrix};
use crate::weights::{DType, RawTensor};
use crate::{Error, Result};

/// How a matrix is divided among the ranks that compute a model together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Not at all: every rank has all of it, with its bias.
    Whole,
    /// A rank has some neighbouring rows, with their biases, and so some of the outputs.
    Rows,
    /// A rank has some neighbouring columns, which are multiplied with its inputs only. The products are summed over ranks;
    /// the bias is added by the first one.
    Columns,
}

impl Cut {
    /// The rows and columns of a matrix of which a shard has this many.
    pub(super) fn whole(self, shard: Shard, [rows, cols]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Whole => [rows, cols],
            Self::Rows => [rows * shard.size(), cols],
            Self::Columns => [rows, cols * shard.size()],
        }
    }
}

impl<'a> Loader<'a> {
    /// The tensor `name`, of which the shard has a matrix of this shape.
    pub(super) fn take_whole(&self, name: &str, shape: [usize; 2], cut: Cut) -> Result<RawTensor<'a>> {
        self.take(name)?.expect_shape(&cut.whole(self.shard, shape))
    }

    /// The matrix `{name}.weight` in `num` chunks of its rows, of each of which this is the shard's part by rows, of the
    /// shape `[rows, cols]`.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn matrix_by_rows(&self, name: &str, num: usize, rows: usize, cols: usize) -> Result<Vec<Matrix>> {
        let all = self.take_whole(&format!("{name}.weight"), [num * rows, cols], Cut::Rows)?;
        let shape = [rows, cols];
        let slice = |first| all.rows(first, &shape);
        let slices = self.firsts_of(num, rows).into_iter().map(slice).collect::<Result<Vec<_>>>()?;
        self.repack_slices(&slices, None)
    }

    /// The matrix `{name}.weight` in `num` chunks of its columns, of each of which this is the shard's part by columns, of
    /// the shape `[rows, cols]`. Columns are cut in whole blocks.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn matrix_by_columns(&self, name: &str, num: usize, rows: usize, cols: usize) -> Result<Vec<Matrix>> {
        let all = self.take_whole(&format!("{name}.weight"), [rows, num * cols], Cut::Columns)?;
        self.check_columns(&all, cols, self.planned(&all)?.0)?;
        self.repack_columns(&all, &self.firsts_of(num, cols), [rows, cols])
    }

    /// The projection `{name}.weight` of two inputs side by side, `[outputs, 2 · inputs]`, as one of each. Every rank has
    /// both.
    ///
    /// # Errors
    /// As [`Self::matrix`], and if a half of a row is no whole number of blocks.
    pub fn halves(&self, name: &str, outputs: usize, inputs: usize) -> Result<[Linear; 2]> {
        let all = self.take_whole(&format!("{name}.weight"), [outputs, 2 * inputs], Cut::Whole)?;
        let halves = self.repack_columns(&all, &[0, inputs], [outputs, inputs])?.into_iter();
        let halves: Vec<_> = halves.map(|weight| Linear { weight, bias: None }).collect();
        halves
            .try_into()
            .map_err(|_| Error::internal("a half of a projection is not there after it was loaded"))
    }

    /// Where the shard's parts begin in `num` chunks one after the other, of each of which it has this many rows or columns.
    pub(super) fn firsts_of(&self, num: usize, len: usize) -> Vec<usize> {
        (0..num).map(|index| (index * self.shard.size() + self.shard.rank()) * len).collect()
    }

    /// The shard's part of a matrix, repacked.
    pub(super) fn repack_part(&self, all: &RawTensor<'_>, shape: [usize; 2], cut: Cut) -> Result<Matrix> {
        self.repack_parts(std::slice::from_ref(all), shape, cut, None)?.pop().ok_or_else(missing)
    }

    /// The shard's parts of matrices, of this shape each, repacked. With a file, they are taken from there or put there.
    pub(super) fn repack_parts(
        &self,
        tensors: &[RawTensor<'_>],
        shape: [usize; 2],
        cut: Cut,
        file: Option<&Arc<MatrixFile>>,
    ) -> Result<Vec<Matrix>> {
        let [rows, cols] = shape;
        match cut {
            Cut::Rows if !self.shard.is_whole() => {
                let first = self.shard.rank() * rows;
                let own =
                    tensors.iter().map(|tensor| tensor.rows(first, &shape)).collect::<Result<Vec<_>>>()?;
                self.repack_slices(&own, file)
            }
            Cut::Columns if !self.shard.is_whole() => {
                let firsts = [self.shard.rank() * cols];
                let own = |all| {
                    self.check_columns(all, cols, self.planned(all)?.0)?;
                    self.repack_columns(all, &firsts, shape)?.pop().ok_or_else(missing)
                };
                tensors.iter().map(own).collect()
            }
            _ => self.repack_all(tensors, file),
        }
    }

    /// Slices that the shard has of tensors, repacked. Those of the other ranks, which are as large, count as loaded.
    pub(super) fn repack_slices(
        &self,
        slices: &[RawTensor<'_>],
        file: Option<&Arc<MatrixFile>>,
    ) -> Result<Vec<Matrix>> {
        let matrices = self.repack_all(slices, file)?;
        let num_own_bytes: usize = slices.iter().map(RawTensor::num_bytes).sum();
        self.pass_over(num_own_bytes * (self.shard.size() - 1));
        Ok(matrices)
    }

    /// Counts this many bytes of other ranks as loaded.
    pub(super) fn pass_over(&self, num_bytes: usize) {
        if num_bytes > 0 {
            self.progress.advance(num_bytes);
        }
    }

    /// Columns of a matrix from each of these on, as matrices of this shape. They are whole blocks.
    pub(super) fn repack_columns(
        &self,
        all: &RawTensor<'_>,
        firsts: &[usize],
        [rows, cols]: [usize; 2],
    ) -> Result<Vec<Matrix>> {
        let matrices = match self.quantizer_for(all).filter(|_| all.is_packed()) {
            Some(_) if self.context.is_dry_run() => {
                let dtype = self.planned(all)?.0;
                let without = |_| Matrix::without_weights(self.context, dtype, rows, cols);
                firsts.iter().map(without).collect()
            }
            // Tensors without columns are converted as a whole.
            Some(quantizer) => {
                let progress = &self.progress;
                let converted = quantizer
                    .quantize(std::slice::from_ref(all), &|num_bytes| progress.advance(num_bytes))?
                    .pop()
                    .ok_or_else(missing)?;
                let own =
                    |first: &usize| self.upload(&converted.as_raw().columns(*first, cols)?.as_raw(), None);
                firsts.iter().map(own).collect()
            }
            None => {
                let own = |first: &usize| self.repack(&all.columns(*first, cols)?.as_raw());
                let matrices = firsts.iter().map(own).collect::<Result<Vec<_>>>()?;
                let num_own_bytes = all.num_bytes() * firsts.len() * cols / all.row_len().max(1);
                self.pass_over(all.num_bytes() - num_own_bytes);
                Ok(matrices)
            }
        };
        all.release();
        matrices
    }

    /// Checks that a tensor that is to have this type can be cut into this many columns for each rank.
    pub(super) fn check_columns(&self, all: &RawTensor<'_>, cols: usize, dtype: DType) -> Result<()> {
        let types = [all.stored(), dtype.into()];
        let split = types.into_iter().find(|file_type| !cols.is_multiple_of(file_type.block_len()));
        let Some(file_type) = split.filter(|_| !self.shard.is_whole()) else { return Ok(()) };
        Err(Error::unsupported(format!(
            "tensor {:?} has {cols} columns for each of {} ranks, which are no whole number of the blocks of {} values \
             of {file_type}",
            all.name,
            self.shard.size(),
            file_type.block_len()
        ))
        .with_hint("use fewer ranks, or weights in a type without blocks, such as BF16"))
    }
}

fn missing() -> Error {
    Error::internal("a part of a matrix is not there after it was loaded")
}
