//! The matrices and biases of experts, in all the ways in which checkpoints keep them.

use super::{Cut, Loader};
use crate::config::ExpertsConfig;
use crate::ops::{Matrix, Vector};
use crate::weights::{DType, OwnedTensor, RawTensor};
use crate::{Error, Result};

impl Loader<'_> {
    /// The shard's part of the matrices of `num` experts, `[rows, cols]` each: of the stack `{prefix}_exps.weight` or, in
    /// checkpoints that keep them apart, of `{prefix}.0.weight` and so on.
    fn experts(&self, prefix: &str, num: usize, shape: [usize; 2], cut: Cut) -> Result<Vec<Matrix>> {
        let tensors = if self.checkpoint.contains(&format!("{prefix}.0.weight")) {
            let own = |index| self.take_whole(&format!("{prefix}.{index}.weight"), shape, cut);
            (0..num).map(own).collect::<Result<Vec<_>>>()?
        } else {
            let [rows, cols] = cut.whole(self.shard, shape);
            let stacked = self.take(&format!("{prefix}_exps.weight"))?.expect_shape(&[num, rows, cols])?;
            (0..num).map(|index| stacked.matrix(index)).collect::<Result<_>>()?
        };
        self.repack_parts(&tensors, shape, cut, self.expert_file.as_ref())
    }

    /// The first two projections of experts, cut by rows, `[num, inside, hidden]` each: `{prefix}.ffn_gate_exps.weight` and
    /// `{prefix}.ffn_up_exps.weight`, or the same of each expert by itself, or both in one tensor
    /// `{prefix}.ffn_gate_up_exps.weight`, in which the rows of an expert's gate come first or in turns with those of its
    /// other half.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn gated_experts(
        &self,
        prefix: &str,
        experts: &ExpertsConfig,
        hidden: usize,
    ) -> Result<(Vec<Matrix>, Vec<Matrix>)> {
        let ExpertsConfig { num_experts: num, intermediate_size: inside, .. } = *experts;
        let shape = [inside, hidden];
        let name = format!("{prefix}.ffn_gate_up_exps.weight");
        if !self.checkpoint.contains(&name) {
            let all = |part: &str| self.experts(&format!("{prefix}.ffn_{part}"), num, shape, Cut::Rows);
            return Ok((all("gate")?, all("up")?));
        }
        if experts.is_interleaved {
            let both = self.in_turns(&name, num, shape, Cut::Rows)?;
            return Ok(both.into_iter().map(|[gate, up]| (gate, up)).unzip());
        }
        let half_shape = Cut::Rows.whole(self.shard, shape);
        let both = self.take(&name)?.expect_shape(&[num, 2 * half_shape[0], hidden])?;
        let halves = |first: usize| {
            let half = |index| both.matrix(index)?.rows(first, &half_shape);
            let halves = (0..num).map(half).collect::<Result<Vec<_>>>()?;
            self.repack_parts(&halves, shape, Cut::Rows, self.expert_file.as_ref())
        };
        Ok((halves(0)?, halves(half_shape[0])?))
    }

    /// The last projection of experts, cut by columns, `[num, hidden, inside]`, as [`Self::gated_experts`] finds the others.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn down_experts(&self, prefix: &str, experts: &ExpertsConfig, hidden: usize) -> Result<Vec<Matrix>> {
        let ExpertsConfig { num_experts: num, intermediate_size: inside, .. } = *experts;
        let name = format!("{prefix}.ffn_down_exps.weight");
        if experts.is_interleaved && self.checkpoint.contains(&name) {
            let all = self.in_turns(&name, num, [hidden, inside], Cut::Columns)?;
            return Ok(all.into_iter().map(|[down]| down).collect());
        }
        self.experts(&format!("{prefix}.ffn_down"), num, [hidden, inside], Cut::Columns)
    }

    /// The shard's biases of the three projections of experts, `[num, inside]` twice and `[num, hidden]`; those of the first
    /// two as [`Self::gated_experts`] finds the rows. The last ones are the first rank's.
    ///
    /// # Errors
    /// If one is missing or has another shape.
    pub fn expert_biases(
        &self,
        prefix: &str,
        experts: &ExpertsConfig,
        hidden: usize,
    ) -> Result<[Option<Vector>; 3]> {
        let ExpertsConfig { num_experts: num, intermediate_size: own_inside, .. } = *experts;
        let inside = own_inside * self.shard.size();
        let values =
            |part: &str, len: usize| self.values(&format!("{prefix}.ffn_{part}_exps.bias"), &[num, len]);
        let (gate, up) = if self.checkpoint.contains(&format!("{prefix}.ffn_gate_up_exps.bias")) {
            let both = values("gate_up", 2 * inside)?;
            let half = |part: usize| {
                let of_expert = |both: &[f32]| match experts.is_interleaved {
                    true => both.iter().skip(part).step_by(2).copied().collect::<Vec<_>>(),
                    false => both[part * inside..][..inside].to_vec(),
                };
                both.chunks_exact(2 * inside).flat_map(of_expert).collect::<Vec<_>>()
            };
            (half(0), half(1))
        } else {
            (values("gate", inside)?, values("up", inside)?)
        };
        let down = values("down", hidden)?;
        let first = self.shard.rank() * own_inside;
        let own = |values: &[f32]| {
            let of_expert = |values: &[f32]| values[first..][..own_inside].to_vec();
            Vector::new(self.context, values.chunks_exact(inside).flat_map(of_expert).collect())
        };
        // A sum over ranks has them once.
        let down = self.shard.is_first().then(|| Vector::new(self.context, down)).transpose()?;
        Ok([Some(own(&gate)?), Some(own(&up)?), down])
    }

    /// Of each expert the shard's parts of `N` matrices, `[rows, cols]` each, of which the tensor `name` has the rows in
    /// turns. A dense one has rows and columns exchanged, one that another program has quantised has not.
    fn in_turns<const N: usize>(
        &self,
        name: &str,
        num: usize,
        shape: [usize; 2],
        cut: Cut,
    ) -> Result<Vec<[Matrix; N]>> {
        let all = self.take(name)?;
        let [rows, cols] = cut.whole(self.shard, shape);
        let stacked = if all.is_packed() { [num, N * rows, cols] } else { [num, cols, N * rows] };
        let all = all.expect_shape(&stacked)?;
        let of_expert = |index| {
            let matrices = self.turned(&all.matrix(index)?, N, shape, cut)?;
            matrices.try_into().map_err(|_| Error::internal("a matrix of an expert is not there"))
        };
        (0..num).map(of_expert).collect()
    }

    /// The shard's parts of `num` matrices, `[rows, cols]` each, of which `tensor` has the rows in turns.
    fn turned(&self, tensor: &RawTensor<'_>, num: usize, shape: [usize; 2], cut: Cut) -> Result<Vec<Matrix>> {
        let missing = || Error::internal("a tensor is not there converted");
        let [rows, cols] = shape;
        let cut = if self.shard.is_whole() { Cut::Whole } else { cut };
        let quantizer = self.quantizer_for(tensor);
        let dtype = match quantizer {
            Some(quantizer) if tensor.is_packed() => quantizer.loaded_dtype_of(tensor),
            Some(quantizer) => quantizer.loaded_dtype(tensor.name, &shape, tensor.dtype),
            None => tensor.dtype,
        };
        if cut == Cut::Columns {
            self.check_columns(tensor, cols, dtype)?;
        }
        if self.context.is_dry_run() {
            let without = |_| Matrix::without_weights(self.context, dtype, rows, cols);
            return (0..num).map(without).collect();
        }
        let file = self.expert_file.as_ref();
        let mut matrices = Vec::with_capacity(num);
        if let Some(file) = file {
            while matrices.len() < num
                && let Some(matrix) = Matrix::next_in_file(file, dtype, rows, cols)?
            {
                matrices.push(matrix);
            }
        }
        if matrices.is_empty() {
            let upright = match quantizer {
                Some(quantizer) if tensor.is_packed() => {
                    quantizer.quantize(std::slice::from_ref(tensor), &|_| ())?.pop().ok_or_else(missing)?
                }
                _ => tensor.transposed(DType::F16)?,
            };
            for part in 0..num {
                let all = upright.as_raw().every(num, part)?;
                let columns = match cut {
                    Cut::Columns => all.as_raw().columns(self.shard.rank() * cols, cols)?,
                    Cut::Rows | Cut::Whole => all,
                };
                let own = columns.as_raw();
                let own = match cut {
                    Cut::Rows => own.rows(self.shard.rank() * rows, &shape)?,
                    Cut::Columns | Cut::Whole => own,
                };
                let quantizer = quantizer.filter(|_| !tensor.is_packed());
                let converted = quantizer
                    .map(|quantizer| {
                        quantizer.quantize(std::slice::from_ref(&own), &|_| ())?.pop().ok_or_else(missing)
                    })
                    .transpose()?;
                let converted = converted.as_ref().map(OwnedTensor::as_raw);
                matrices.push(self.upload(converted.as_ref().unwrap_or(&own), file)?);
            }
        }
        self.progress.advance(tensor.num_bytes());
        tensor.release();
        Ok(matrices)
    }
}
