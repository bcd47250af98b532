//! `activation(gate) · up`.

use super::ReferenceBackend;
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
            let gate = halves.narrow(1, 0, width)?;
            let gate = match activation {
                Activation::Silu => gate.silu()?,
                Activation::GeluTanh => gate.gelu()?,
            };
            out.set_rows(&(gate * halves.narrow(1, width, width)?)?)
        })
    }
}
