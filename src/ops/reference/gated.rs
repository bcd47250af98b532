//! `activation(gate, up)`.

use candle_core::Tensor;

use super::{Failure, ReferenceBackend};
use crate::Result;
use crate::config::Activation;
use crate::ops::buffer::Buffer;
use crate::ops::gated::Gated;

impl Gated for ReferenceBackend {
    fn gated(
        &self,
        activation: Activation,
        num_rows: usize,
        halves: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        let width = out.width();
        let (halves, out) = (halves.held().on(self)?, out.held_mut().on_mut(self)?);
        self.run(num_rows, || {
            let halves = halves.rows(num_rows)?;
            out.set_rows(&activated(
                activation,
                &halves.narrow(1, 0, width)?,
                &halves.narrow(1, width, width)?,
            )?)
        })
    }
}

/// Of both halves.
pub(super) fn activated(activation: Activation, gate: &Tensor, up: &Tensor) -> Result<Tensor, Failure> {
    Ok(match activation {
        Activation::Silu => (gate.silu()? * up)?,
        Activation::GeluTanh => (gate.gelu()? * up)?,
        Activation::ClampedSwiglu { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (gate, up) = (gate.minimum(limit)?, up.clamp(-limit, limit)?);
            // g · σ(alpha · g) is silu(alpha · g) / alpha.
            (((&gate * alpha)?.silu()? / alpha)? * (up + 1.0)?)?
        }
    })
}
