//! Token embeddings.

use super::CpuBackend;
use super::rows::RowsMut;
use crate::ops::buffer::Buffer;
use crate::ops::embed::Embed;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::Matrix;
use crate::{Error, Result};

/// Tokens of a task.
const TOKENS_PER_TASK: usize = 8;

impl Embed for CpuBackend {
    fn embed(&self, step: &StepInputs<'_>, table: &Matrix, scale: f32, out: &mut Buffer) -> Result<()> {
        if step.sampled.is_some() {
            return Err(Error::internal("embed: tokens were sampled on another device"));
        }
        let (token_ids, width, table) = (step.token_ids, out.width(), table.held().on(self)?);
        let rows = RowsMut::new(self.rows_mut(out, token_ids.len())?, width);
        self.pool.run(token_ids.len().div_ceil(TOKENS_PER_TASK), |task| {
            let first = task * TOKENS_PER_TASK;
            for (index, &token) in token_ids.iter().enumerate().skip(first).take(TOKENS_PER_TASK) {
                // SAFETY: each token has a row of its own, and each token is in one task.
                let row = unsafe { rows.get(index) };
                table.dequantize_row(token as usize, row);
                if scale != 1.0 {
                    row.iter_mut().for_each(|value| *value *= scale);
                }
            }
        });
        Ok(())
    }
}
