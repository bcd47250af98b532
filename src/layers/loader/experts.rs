//! The matrices and biases of experts, in all the ways in which checkpoints keep them.

use super::Loader;
use crate::config::ExpertsConfig;
use crate::ops::{Matrix, Vector};
use crate::weights::{DType, RawTensor};
use crate::{Error, Result};

impl Loader<'_> {
    /// The matrices of `num` experts: the tensor `{prefix}_exps.weight` of the shape `[num, rows, cols]` or, in
    /// checkpoints that keep them apart, `{prefix}.0.weight` and so on.
    fn experts(&self, prefix: &str, num: usize, rows: usize, cols: usize) -> Result<Vec<Matrix>> {
        let tensors = if self.checkpoint.contains(&format!("{prefix}.0.weight")) {
            let own = |index| self.take(&format!("{prefix}.{index}.weight"))?.expect_shape(&[rows, cols]);
            (0..num).map(own).collect::<Result<Vec<_>>>()?
        } else {
            let stacked = self.take(&format!("{prefix}_exps.weight"))?.expect_shape(&[num, rows, cols])?;
            (0..num).map(|index| stacked.matrix(index)).collect::<Result<_>>()?
        };
        self.repack_all(&tensors, self.expert_file.as_ref())
    }

    /// The first two projections of experts, `[num, inside, hidden]` each: `{prefix}.ffn_gate_exps.weight` and
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
        let ExpertsConfig { num_experts: num, intermediate_size: rows, .. } = *experts;
        let name = format!("{prefix}.ffn_gate_up_exps.weight");
        if !self.checkpoint.contains(&name) {
            let all = |part: &str| self.experts(&format!("{prefix}.ffn_{part}"), num, rows, hidden);
            return Ok((all("gate")?, all("up")?));
        }
        if experts.is_interleaved {
            let both = self.in_turns(&name, num, [rows, hidden])?;
            return Ok(both.into_iter().map(|[gate, up]| (gate, up)).unzip());
        }
        let both = self.take(&name)?.expect_shape(&[num, 2 * rows, hidden])?;
        let shape = [rows, hidden];
        let halves = |first: usize| {
            let half = |index| both.matrix(index)?.rows(first, &shape);
            self.repack_all(&(0..num).map(half).collect::<Result<Vec<_>>>()?, self.expert_file.as_ref())
        };
        Ok((halves(0)?, halves(rows)?))
    }

    /// The last projection of experts, `[num, hidden, inside]`, as [`Self::gated_experts`] finds the others.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn down_experts(&self, prefix: &str, experts: &ExpertsConfig, hidden: usize) -> Result<Vec<Matrix>> {
        let ExpertsConfig { num_experts: num, intermediate_size: inside, .. } = *experts;
        let name = format!("{prefix}.ffn_down_exps.weight");
        if experts.is_interleaved && self.checkpoint.contains(&name) {
            let all = self.in_turns(&name, num, [hidden, inside])?;
            return Ok(all.into_iter().map(|[down]| down).collect());
        }
        self.experts(&format!("{prefix}.ffn_down"), num, hidden, inside)
    }

    /// The biases of the three projections of experts, `[num, inside]` twice and `[num, hidden]`; those of the first two
    /// as [`Self::gated_experts`] finds the rows.
    ///
    /// # Errors
    /// If one is missing or has another shape.
    pub fn expert_biases(&self, prefix: &str, experts: &ExpertsConfig, hidden: usize) -> Result<[Vector; 3]> {
        let ExpertsConfig { num_experts: num, intermediate_size: inside, .. } = *experts;
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
        let vector = |values| Vector::new(self.context, values);
        Ok([vector(gate)?, vector(up)?, vector(values("down", hidden)?)?])
    }

    /// Of each expert `N` matrices of `rows` × `cols`, of which the tensor `name` has the rows in turns. A dense one has
    /// rows and columns exchanged, one that another program has quantised has not.
    fn in_turns<const N: usize>(
        &self,
        name: &str,
        num: usize,
        [rows, cols]: [usize; 2],
    ) -> Result<Vec<[Matrix; N]>> {
        let all = self.take(name)?;
        let shape = if all.is_packed() { [num, N * rows, cols] } else { [num, cols, N * rows] };
        let all = all.expect_shape(&shape)?;
        let of_expert = |index| {
            let matrices = self.turned(&all.matrix(index)?, N, [rows, cols])?;
            matrices.try_into().map_err(|_| Error::internal("a matrix of an expert is not there"))
        };
        (0..num).map(of_expert).collect()
    }

    /// `num` matrices of `rows` × `cols` of which `tensor` has the rows in turns.
    fn turned(&self, tensor: &RawTensor<'_>, num: usize, [rows, cols]: [usize; 2]) -> Result<Vec<Matrix>> {
        let missing = || Error::internal("a tensor is not there converted");
        let shape = [rows, cols];
        let quantizer = self.quantizer_for(tensor);
        let dtype = match quantizer {
            Some(quantizer) if tensor.is_packed() => quantizer.loaded_dtype_of(tensor),
            Some(quantizer) => quantizer.loaded_dtype(tensor.name, &shape, tensor.dtype),
            None => tensor.dtype,
        };
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
                let own = upright.as_raw().every(num, part)?;
                let converted = match quantizer.filter(|_| !tensor.is_packed()) {
                    Some(quantizer) => {
                        let own = own.as_raw();
                        quantizer.quantize(std::slice::from_ref(&own), &|_| ())?.pop().ok_or_else(missing)?
                    }
                    None => own,
                };
                matrices.push(self.upload(&converted.as_raw(), file)?);
            }
        }
        self.progress.advance(tensor.num_bytes());
        tensor.release();
        Ok(matrices)
    }
}
