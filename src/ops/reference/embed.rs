//! `out[i] = table[token_ids[i]]`.

use super::Result;
use super::{ReferenceBackend, ReferenceBuffer, ReferenceMatrix};

pub(crate) fn embed(
    backend: &ReferenceBackend,
    token_ids: &[u32],
    table: &ReferenceMatrix,
    out: &mut ReferenceBuffer,
) -> Result<()> {
    out.set_rows(&table.rows(backend, token_ids.iter().map(|token| *token as usize))?)
}
