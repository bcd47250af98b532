//! `x[i] = x[rows[i]]`.

use super::Result;
use super::{ReferenceBackend, ReferenceBuffer};

pub(crate) fn gather_rows(
    backend: &ReferenceBackend,
    rows: &[usize],
    max_rows: usize,
    x: &mut ReferenceBuffer,
) -> Result<()> {
    let rows = backend.indices(rows.iter().copied())?;
    x.set_rows(&x.rows(max_rows)?.index_select(&rows, 0)?)
}
