//! `x = norm(x)` for a range of each row.

use candle_core::Tensor;

use super::ReferenceBackend;
use super::linear::rms_norm;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::norm_part::NormPart;
use crate::ops::weights::RmsNorm;

impl NormPart for ReferenceBackend {
    fn norm_part(&self, num_rows: usize, x: &mut Buffer, first: usize, norm: &RmsNorm) -> Result<()> {
        let (width, end) = (x.width(), first + norm.weight.len());
        let x = x.held_mut().on_mut(self)?;
        self.run(num_rows, || {
            let rows = x.rows(num_rows)?;
            let part = rms_norm(self, &rows.narrow(1, first, end - first)?.contiguous()?, norm)?;
            let parts = [rows.narrow(1, 0, first)?, part, rows.narrow(1, end, width - end)?];
            x.set_rows(&Tensor::cat(&parts, 1)?)
        })
    }
}
