//! Sums over the ranks that compute a model together.

use std::fmt;

use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::context::Context;

/// The connection of a rank to the others.
pub trait Communicator: fmt::Debug + Send + Sync {
    /// Replaces `values` by their sums over all ranks (an all-reduce), which have the same bits on every rank: routers
    /// choose by them. All ranks call it equally often, with equally many values, and wait for each other.
    ///
    /// # Errors
    /// If another rank has failed or cannot be reached.
    fn sum(&self, values: &mut [f32]) -> Result<()>;
}

/// `x = Σ x` over all ranks; nothing on a single one.
///
/// `x` is `[num_rows, hidden]`. Values go through the host, which waits for a GPU.
///
/// # Errors
/// Those of [`Communicator::sum`]; [`crate::ErrorKind::Internal`] if there are fewer rows.
pub fn sum_over_ranks(context: &Context, num_rows: usize, x: &mut Buffer) -> Result<()> {
    match context.communicator() {
        None => Ok(()),
        Some(communicator) => x.write(num_rows, |values| communicator.sum(values))?,
    }
}

/// `x = 0` on all ranks but the first, before something is added that [`sum_over_ranks`] follows: the sum then has `x`
/// once. Nothing on a single rank.
///
/// `x` is `[num_rows, hidden]`, with the same values on all ranks.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if there are fewer rows.
pub fn keep_on_first_rank(context: &Context, num_rows: usize, x: &mut Buffer) -> Result<()> {
    if context.shard().is_first() {
        return Ok(());
    }
    x.write(num_rows, |values| values.fill(0.0))
}
