//! Norms of a range of each row.

use tinyvllm_kernels::norm::norm_part;

use super::CpuBackend;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::norm_part::NormPart;
use crate::ops::weights::RmsNorm;

impl NormPart for CpuBackend {
    fn norm_part(&self, num_rows: usize, x: &mut Buffer, first: usize, norm: &RmsNorm) -> Result<()> {
        let width = x.width();
        norm_part(norm.into(), self.rows_mut(x, num_rows)?, width, first, &self.pool, self.level);
        Ok(())
    }
}
