//! `x += norm(y)`.

use super::ReferenceBackend;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::norm_residual::NormResidual;
use crate::ops::weights::RmsNorm;

impl NormResidual for ReferenceBackend {
    fn norm_residual(&self, num_rows: usize, y: &Buffer, norm: &RmsNorm, x: &mut Buffer) -> Result<()> {
        let x = x.held_mut().on_mut(self)?;
        self.run(num_rows, || {
            let sum = (x.rows(num_rows)? + self.normed(y, num_rows, norm)?)?;
            x.set_rows(&sum)
        })
    }
}
