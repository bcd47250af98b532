//! Norms of the output of a layer's half.

use tinyvllm_kernels::norm::norm_residual;

use super::CpuBackend;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::norm_residual::NormResidual;
use crate::ops::weights::RmsNorm;

impl NormResidual for CpuBackend {
    fn norm_residual(&self, num_rows: usize, y: &Buffer, norm: &RmsNorm, x: &mut Buffer) -> Result<()> {
        let (y, x) = (self.rows(y, num_rows)?, self.rows_mut(x, num_rows)?);
        norm_residual(norm.into(), y, x, &self.pool, self.level);
        Ok(())
    }
}
