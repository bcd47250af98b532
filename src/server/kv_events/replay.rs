//! Batches that were sent, for those that missed some.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// Most bytes that are kept, whatever the number of batches: those of some ten million tokens.
const MAX_BYTES: usize = 64 << 20;

/// The latest batches.
#[derive(Debug)]
pub(super) struct Buffer {
    max_batches: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    batches: VecDeque<(u64, Bytes)>,
    num_bytes: usize,
}

impl Buffer {
    pub(super) fn new(max_batches: usize) -> Self {
        Self { max_batches, kept: Mutex::default() }
    }

    /// Keeps a batch, and forgets the oldest ones that are too many.
    pub(super) fn push(&self, number: u64, payload: Bytes) {
        let mut kept = self.kept();
        kept.num_bytes += payload.len();
        kept.batches.push_back((number, payload));
        while kept.batches.len() > self.max_batches || kept.num_bytes > MAX_BYTES {
            let Some((_, oldest)) = kept.batches.pop_front() else { break };
            kept.num_bytes -= oldest.len();
        }
    }

    /// The oldest batch of this number or a later one.
    pub(super) fn first_from(&self, number: u64) -> Option<(u64, Bytes)> {
        let kept = self.kept();
        let index = kept.batches.partition_point(|(kept, _)| *kept < number);
        kept.batches.get(index).cloned()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_batches_are_kept() {
        let buffer = Buffer::new(3);
        assert_eq!(buffer.first_from(0), None);
        // 2 was lost.
        for number in [0, 1, 3, 4] {
            buffer.push(number, Bytes::from(vec![number as u8]));
        }
        let number = |from: u64| buffer.first_from(from).map(|(number, _)| number);
        assert_eq!((number(0), number(2), number(4), number(5)), (Some(1), Some(3), Some(4), None));
        buffer.push(5, Bytes::from(vec![0; MAX_BYTES]));
        assert_eq!(number(0), Some(5), "the others are too many bytes");
        buffer.push(6, Bytes::from(vec![0; MAX_BYTES + 1]));
        assert_eq!(number(0), None);
    }
}
