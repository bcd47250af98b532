//! The activation between the two halves of a gated network.

use tinyvllm_kernels::gated::gated;

use super::CpuBackend;
use crate::Result;
use crate::config::Activation;
use crate::ops::buffer::Buffer;
use crate::ops::gated::Gated;

impl Gated for CpuBackend {
    fn gated(
        &self,
        activation: Activation,
        num_rows: usize,
        halves: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        let (width, halves) = (out.width(), self.rows(halves, num_rows)?);
        gated(activation, halves, self.rows_mut(out, num_rows)?, width, &self.pool, self.level);
        Ok(())
    }
}
