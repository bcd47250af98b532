//! Matmuls with weights, and the ops fused with them. Shapes are those of [`crate::ops`].

use candle_core::Tensor;
use candle_nn::ops;

use super::{Failure, ReferenceBackend};
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::linear::{LinearOps, LinearScratch};
use crate::ops::weights::{Linear, Matrix, RmsNorm};

impl ReferenceBackend {
    /// The first rows of `x`, `w · x / √(mean(x²) + eps)` over the norm's length.
    pub(super) fn normed(&self, x: &Buffer, num_rows: usize, norm: &RmsNorm) -> Result<Tensor, Failure> {
        let rows = x.held().on(self)?.rows(num_rows)?;
        rms_norm(self, &rows.narrow(1, 0, norm.weight.len())?.contiguous()?, norm)
    }

    /// `W·x + b` for each row of `x`.
    pub(super) fn matmul(&self, x: &Tensor, linear: &Linear) -> Result<Tensor, Failure> {
        let projected = linear.weight.held().on(self)?.matmul(self, x)?;
        match &linear.bias {
            Some(bias) => Ok(projected.broadcast_add(&self.tensor(bias, bias.len())?)?),
            None => Ok(projected),
        }
    }
}

/// `w · x / √(mean(x²) + eps)` over the last dimension.
pub(super) fn rms_norm(backend: &ReferenceBackend, x: &Tensor, norm: &RmsNorm) -> Result<Tensor, Failure> {
    let weight = backend.tensor(&norm.weight, norm.weight.len())?;
    // candle's fused function does not support f64.
    Ok(ops::rms_norm_slow(x, &weight, norm.eps)?)
}

impl LinearOps for ReferenceBackend {
    fn linear_scratch(&self, _max_rows: usize, _max_cols: usize) -> Result<()> {
        Ok(())
    }

    fn reserve_groups(
        &self,
        _scratch: &mut (),
        _max_groups: usize,
        _max_rows: usize,
        _max_cols: usize,
    ) -> Result<()> {
        Ok(())
    }

    fn norm_linear<const N: usize>(
        &self,
        _scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: Option<&RmsNorm>,
        linears: [&Linear; N],
        out: &mut Buffer,
    ) -> Result<()> {
        let out = out.held_mut().on_mut(self)?;
        self.run(num_rows, || {
            let x = match norm {
                Some(norm) => self.normed(x, num_rows, norm)?,
                None => {
                    let hidden = linears.first().map_or(0, |linear| linear.weight.cols());
                    x.held().on(self)?.rows(num_rows)?.narrow(1, 0, hidden)?.contiguous()?
                }
            };
            let parts = linears.iter().map(|own| self.matmul(&x, own)).collect::<Result<Vec<_>, _>>()?;
            out.set_rows(&Tensor::cat(&parts, 1)?)
        })
    }

    fn linear(
        &self,
        _scratch: &mut LinearScratch,
        num_rows: usize,
        h: &Buffer,
        linear: &Linear,
        out: &mut Buffer,
    ) -> Result<()> {
        let (h, out) = (h.held().on(self)?, out.held_mut().on_mut(self)?);
        self.run(num_rows, || out.set_rows(&self.matmul(&h.rows(num_rows)?, linear)?))
    }

    fn linear_residual(
        &self,
        _scratch: &mut LinearScratch,
        num_rows: usize,
        h: &Buffer,
        linear: &Linear,
        x: &mut Buffer,
    ) -> Result<()> {
        let (h, x) = (h.held().on(self)?, x.held_mut().on_mut(self)?);
        self.run(num_rows, || {
            let sum = (x.rows(num_rows)? + self.matmul(&h.rows(num_rows)?, linear)?)?;
            x.set_rows(&sum)
        })
    }

    fn norm_swiglu(
        &self,
        _scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &Matrix,
        up: &Matrix,
        _reader: Option<&Linear>,
        out: &mut Buffer,
    ) -> Result<()> {
        let (gate, up) = (gate.held().on(self)?, up.held().on(self)?);
        let out = out.held_mut().on_mut(self)?;
        self.run(num_rows, || {
            let x = self.normed(x, num_rows, norm)?;
            out.set_rows(&(gate.matmul(self, &x)?.silu()? * up.matmul(self, &x)?)?)
        })
    }

    fn norm_swiglu_biased(
        &self,
        _scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &Linear,
        up: &Linear,
        out: &mut Buffer,
    ) -> Result<()> {
        let out = out.held_mut().on_mut(self)?;
        self.run(num_rows, || {
            let x = self.normed(x, num_rows, norm)?;
            out.set_rows(&(self.matmul(&x, gate)?.silu()? * self.matmul(&x, up)?)?)
        })
    }

    fn norm_logits(
        &self,
        _scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        head: &Matrix,
        logits: &mut Buffer,
    ) -> Result<()> {
        let (head, logits) = (head.held().on(self)?, logits.held_mut().on_mut(self)?);
        self.run(num_rows, || logits.set_rows(&head.matmul(self, &self.normed(x, num_rows, norm)?)?))
    }
}
