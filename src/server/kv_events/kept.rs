//! The latest batches. Peers have no queues; each has an index into these.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::watch;

/// Most bytes that are kept, for any number of batches and peers: about ten million tokens.
pub(super) const MAX_KEPT_BYTES: usize = 64 << 20;
/// Memory for a batch in addition to its payload.
const BATCH_BYTES: usize = 128;

/// The latest batches. Indices count every batch from the first one; batch numbers can have gaps.
#[derive(Debug)]
pub(super) struct KeptBatches {
    max_batches: usize,
    max_replayed: usize,
    batches: Mutex<Batches>,
    end: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Batches {
    latest: VecDeque<(u64, Bytes)>,
    num_bytes: usize,
    /// The index of the oldest batch.
    start: u64,
}

impl Batches {
    fn end(&self) -> u64 {
        self.start + self.latest.len() as u64
    }
}

/// A batch that is kept.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct KeptBatch {
    pub(super) index: u64,
    pub(super) number: u64,
    pub(super) payload: Bytes,
}

impl KeptBatches {
    /// Keeps this many batches. The latest `max_replayed` of them can be replayed.
    pub(super) fn new(max_batches: usize, max_replayed: usize) -> Self {
        let (end, _) = watch::channel(0);
        Self { max_batches: max_batches.max(max_replayed), max_replayed, batches: Mutex::default(), end }
    }

    /// Adds a batch, and drops the oldest ones beyond the limits.
    pub(super) fn push(&self, number: u64, payload: Bytes) {
        let mut batches = self.batches();
        batches.num_bytes += payload.len() + BATCH_BYTES;
        batches.latest.push_back((number, payload));
        while batches.latest.len() > self.max_batches || batches.num_bytes > MAX_KEPT_BYTES {
            let Some((_, oldest)) = batches.latest.pop_front() else { break };
            batches.num_bytes -= oldest.len() + BATCH_BYTES;
            batches.start += 1;
        }
        self.end.send_replace(batches.end());
    }

    /// The batch at this index, or the oldest one if that was dropped; `None` if it does not exist yet.
    pub(super) fn from(&self, index: u64) -> Option<KeptBatch> {
        let batches = self.batches();
        let index = index.max(batches.start);
        let (number, payload) = batches.latest.get(usize::try_from(index - batches.start).ok()?)?.clone();
        Some(KeptBatch { index, number, payload })
    }

    /// The range of indices of batches from this number on that can be replayed.
    pub(super) fn replay(&self, number: u64) -> (u64, u64) {
        let batches = self.batches();
        let index = batches.latest.partition_point(|(kept, _)| *kept < number);
        let oldest = batches.latest.len().saturating_sub(self.max_replayed);
        (batches.start + index.max(oldest) as u64, batches.end())
    }

    /// The index of the next batch.
    pub(super) fn end(&self) -> u64 {
        self.batches().end()
    }

    /// A receiver that is notified of new batches.
    pub(super) fn news(&self) -> watch::Receiver<u64> {
        self.end.subscribe()
    }

    fn batches(&self) -> MutexGuard<'_, Batches> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(kept: &KeptBatches, index: u64) -> Option<u64> {
        kept.from(index).map(|batch| batch.number)
    }

    #[test]
    fn the_latest_batches_are_kept() {
        let kept = KeptBatches::new(3, 3);
        assert_eq!((kept.from(0), kept.end(), kept.replay(0)), (None, 0, (0, 0)));
        // 2 was lost.
        for number in [0, 1, 3, 4] {
            kept.push(number, Bytes::from(vec![number as u8]));
        }
        assert_eq!((kept.end(), *kept.news().borrow()), (4, 4));
        let batch = kept.from(0).unwrap();
        assert_eq!((batch.index, batch.number, &batch.payload[..]), (1, 1, &[1][..]), "0 is forgotten");
        assert_eq!([1, 2, 3, 4].map(|index| number(&kept, index)), [Some(1), Some(3), Some(4), None]);
        assert_eq!([0, 1, 2, 3, 4, 5].map(|number| kept.replay(number).0), [1, 1, 2, 2, 3, 4]);
    }

    #[test]
    fn bytes_bound_what_is_kept() {
        let kept = KeptBatches::new(3, 3);
        kept.push(0, Bytes::from_static(b"x"));
        kept.push(1, Bytes::from(vec![0; MAX_KEPT_BYTES - BATCH_BYTES]));
        assert_eq!(number(&kept, 0), Some(1), "the other is too many bytes");
        kept.push(2, Bytes::from(vec![0; MAX_KEPT_BYTES]));
        assert_eq!((number(&kept, 0), kept.end()), (None, 3));
        kept.push(3, Bytes::new());
        assert_eq!(number(&kept, 0), Some(3));
    }

    #[test]
    fn more_may_wait_than_can_be_asked_for_again() {
        let kept = KeptBatches::new(10, 2);
        (0..5).for_each(|number| kept.push(number, Bytes::new()));
        assert_eq!((kept.replay(0), kept.replay(4), kept.replay(99)), ((3, 5), (4, 5), (5, 5)));
        assert_eq!(number(&kept, 0), Some(0));
        let kept = KeptBatches::new(1, 4);
        (0..5).for_each(|number| kept.push(number, Bytes::new()));
        assert_eq!(kept.replay(0), (1, 5));
    }
}
