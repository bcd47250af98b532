//! `x[i] = x[outputs[i]]`.

use super::ReferenceBackend;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::gather_rows::GatherRows;
use crate::ops::step_inputs::StepInputs;

impl GatherRows for ReferenceBackend {
    fn gather_rows(&self, step: &StepInputs<'_>, x: &mut Buffer) -> Result<()> {
        let (rows, max_rows) = (step.outputs, x.max_rows());
        let x = x.held_mut().on_mut(self)?;
        self.run(rows.len(), || {
            let rows = self.indices(rows.iter().copied())?;
            x.set_rows(&x.rows(max_rows)?.index_select(&rows, 0)?)
        })
    }
}
