//! Token embeddings.

use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context};
use crate::ops::cpu::rows::RowsMut;
use crate::ops::gpu;
use crate::ops::reference;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::Matrix;
use crate::{Error, Result};

/// Tokens of a task.
const TOKENS_PER_TASK: usize = 8;

/// `out[i] = table[token_ids[i]]` for the tokens of a step, decoded if the table is quantised.
///
/// `table` is `[vocabulary, hidden]`, `out` is `[num_tokens, hidden]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if a token is not in the vocabulary or shapes do not fit together.
pub fn embed(context: &Context, step: &StepInputs<'_>, table: &Matrix, out: &mut Buffer) -> Result<()> {
    let token_ids = step.token_ids;
    // Sampled tokens are not known here; one that is none is embedded as zeros.
    let known = if step.sampled.is_some() { &[] } else { token_ids };
    if let Some(token) = known.iter().find(|token| **token as usize >= table.rows()) {
        return Err(Error::internal(format!(
            "token {token} is outside the vocabulary of {} tokens",
            table.rows()
        )));
    }
    if out.width() != table.cols() {
        return Err(Error::internal(format!(
            "embed: its output has {} values in a row, not {}",
            out.width(),
            table.cols()
        )));
    }
    let width = out.width();
    let cpu = match context.launch() {
        Backend::Cpu(_) | Backend::Reference(_) if step.sampled.is_some() => {
            return Err(Error::internal("embed: tokens were sampled on another device"));
        }
        Backend::Cpu(cpu) => cpu,
        Backend::Reference(backend) => {
            let (table, out) = (table.reference()?, out.reference_mut()?);
            return backend.run(token_ids.len(), || reference::embed(backend, token_ids, table, out));
        }
        Backend::Gpu(gpu) => {
            let ids = match step.sampled {
                Some(sampled) => sampled.gpu(),
                None => step.gpu()?.token_ids(),
            };
            return gpu::embed(gpu, table.gpu()?, step.num_tokens(), ids, out.gpu()?);
        }
    };
    let table = table.cpu()?;
    out.write(token_ids.len(), |out| {
        let rows = RowsMut::new(out, width);
        cpu.pool.run(token_ids.len().div_ceil(TOKENS_PER_TASK), |task| {
            let first = task * TOKENS_PER_TASK;
            for (index, &token) in token_ids.iter().enumerate().skip(first).take(TOKENS_PER_TASK) {
                // SAFETY: each token has a row of its own, and each token is in one task.
                let row = unsafe { rows.get(index) };
                table.dequantize_row(token as usize, row);
            }
        });
    })
}
