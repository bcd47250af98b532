//! A function that is polled, as a stream.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;

/// Polls the function for each item.
pub(super) struct Polled<F>(pub(super) F);

impl<T, F: FnMut(&mut Context<'_>) -> Poll<Option<T>> + Unpin> Stream for Polled<F> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        (self.0)(context)
    }
}
