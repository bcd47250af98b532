//! `out[i] = scale · table[token_ids[i]]`.

use super::ReferenceBackend;
use crate::ops::buffer::Buffer;
use crate::ops::embed::Embed;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::Matrix;
use crate::{Error, Result};

impl Embed for ReferenceBackend {
    fn embed(&self, step: &StepInputs<'_>, table: &Matrix, scale: f32, out: &mut Buffer) -> Result<()> {
        if step.sampled.is_some() {
            return Err(Error::internal("embed: tokens were sampled on another device"));
        }
        let (table, out) = (table.held().on(self)?, out.held_mut().on_mut(self)?);
        self.run(step.token_ids.len(), || {
            let rows = table.rows(self, step.token_ids.iter().map(|token| *token as usize))?;
            out.set_rows(&(rows * f64::from(scale))?)
        })
    }
}
