//! Matmuls with weights.

use super::CpuBackend;
use super::matmul::{
    ActivationFormats, Activations, Mode, Projection, RowGroup, matmul, matmul_swiglu, matmul_swiglu_biased,
};
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::linear::{LinearOps, LinearScratch as AnyScratch, side_by_side};
use crate::ops::weights::{Linear, Matrix, RmsNorm};

/// The inputs of matmuls in the kernels' format.
#[derive(Debug, Default)]
pub(crate) struct LinearScratch {
    pub(super) activations: Activations,
    pub(super) groups: Vec<RowGroup>,
}

impl CpuBackend {
    /// The first `num_rows` rows of `x`, with the first `cols` values of each, for matmuls with `matrices`.
    pub(super) fn prepare<'a>(
        &self,
        scratch: &'a mut AnyScratch,
        x: &Buffer,
        num_rows: usize,
        cols: usize,
        norm: Option<&RmsNorm>,
        matrices: &[&Matrix],
    ) -> Result<&'a Activations> {
        let activations = &mut scratch.held_mut().on_mut(self)?.activations;
        let norm = norm.map(|norm| (&norm.weight[..], norm.eps));
        let formats = ActivationFormats::of(matrices.iter().map(|matrix| matrix.dtype()), self.level);
        let values = self.rows(x, num_rows)?;
        activations.prepare(values, x.width(), num_rows, cols, norm, formats, &self.pool, self.level);
        Ok(activations)
    }
}

impl CpuBackend {
    /// A matmul without a norm, which is written to `out` or added to it.
    fn add_or_store(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        h: &Buffer,
        linear: &Linear,
        out: &mut Buffer,
        mode: Mode,
    ) -> Result<()> {
        let width = out.width();
        let matrix = linear.weight.held().on(self)?;
        let projection = Projection { matrix, out_offset: 0, bias: linear.bias.as_deref() };
        let h = self.prepare(scratch, h, num_rows, linear.weight.cols(), None, &[&linear.weight])?;
        let out = self.rows_mut(out, num_rows)?;
        matmul(h, &[projection], out, width, mode, &self.pool, self.level);
        Ok(())
    }
}

impl LinearOps for CpuBackend {
    fn linear_scratch(&self, max_rows: usize, max_cols: usize) -> Result<LinearScratch> {
        let mut scratch = LinearScratch::default();
        scratch.activations.reserve(max_rows, max_cols, ActivationFormats::all(self.level));
        Ok(scratch)
    }

    fn reserve_groups(
        &self,
        scratch: &mut LinearScratch,
        max_groups: usize,
        max_rows: usize,
        max_cols: usize,
    ) -> Result<()> {
        let max_rows = max_rows + max_groups * RowGroup::ALIGNMENT;
        scratch.activations.reserve(max_rows, max_cols, ActivationFormats::all(self.level));
        scratch.groups.reserve(max_groups);
        Ok(())
    }

    fn norm_linear<const N: usize>(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        x: &Buffer,
        norm: Option<&RmsNorm>,
        linears: [&Linear; N],
        out: &mut Buffer,
    ) -> Result<()> {
        let width = out.width();
        let projections = side_by_side(linears, |linear, out_offset| {
            let matrix = linear.weight.held().on(self)?;
            Ok(Projection { matrix, out_offset, bias: linear.bias.as_deref() })
        })?;
        let matrices = linears.map(|linear| &linear.weight);
        let cols = linears.first().map_or(0, |linear| linear.weight.cols());
        let x = self.prepare(scratch, x, num_rows, cols, norm, &matrices)?;
        let out = self.rows_mut(out, num_rows)?;
        matmul(x, &projections, out, width, Mode::Store, &self.pool, self.level);
        Ok(())
    }

    fn linear(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        h: &Buffer,
        linear: &Linear,
        out: &mut Buffer,
    ) -> Result<()> {
        self.add_or_store(scratch, num_rows, h, linear, out, Mode::Store)
    }

    fn linear_residual(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        h: &Buffer,
        linear: &Linear,
        x: &mut Buffer,
    ) -> Result<()> {
        self.add_or_store(scratch, num_rows, h, linear, x, Mode::Add)
    }

    fn norm_swiglu(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &Matrix,
        up: &Matrix,
        _reader: Option<&Linear>,
        out: &mut Buffer,
    ) -> Result<()> {
        let width = out.width();
        let (own_gate, own_up) = (gate.held().on(self)?, up.held().on(self)?);
        let x = self.prepare(scratch, x, num_rows, x.width(), Some(norm), &[gate, up])?;
        let out = self.rows_mut(out, num_rows)?;
        matmul_swiglu(x, own_gate, own_up, out, width, &self.pool, self.level);
        Ok(())
    }

    fn norm_swiglu_biased(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &Linear,
        up: &Linear,
        out: &mut Buffer,
    ) -> Result<()> {
        let width = out.width();
        let matrices = [gate.weight.held().on(self)?, up.weight.held().on(self)?];
        let biases = [gate, up].map(|linear| linear.bias.as_deref());
        let x = self.prepare(scratch, x, num_rows, x.width(), Some(norm), &[&gate.weight, &up.weight])?;
        let out = self.rows_mut(out, num_rows)?;
        matmul_swiglu_biased(x, matrices, biases, out, width, &self.pool, self.level);
        Ok(())
    }

    fn norm_logits(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        head: &Matrix,
        logits: &mut Buffer,
    ) -> Result<()> {
        let width = logits.width();
        let projection = Projection { matrix: head.held().on(self)?, out_offset: 0, bias: None };
        let x = self.prepare(scratch, x, num_rows, x.width(), Some(norm), &[head])?;
        let logits = self.rows_mut(logits, num_rows)?;
        matmul(x, &[projection], logits, width, Mode::Store, &self.pool, self.level);
        Ok(())
    }
}
