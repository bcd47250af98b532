//! How long launches keep a GPU, by arithmetic, so that none keeps it for too long.
//!
//! macOS ends a command buffer that holds the GPU for seconds ("Impacting Interactivity"), and windows stutter long
//! before. A GPU that has begun with a dispatch also finishes it before it turns to the screen. So every launch says
//! what it costs; one that takes long is made in pieces, and the device is given what is queued before there is too
//! much of it. Pieces are whole rows, tokens or tiles, each computed as ever, so that they do not show in a result.

use std::ops::Range;
use std::time::Duration;

/// The smallest chip that the kernels run on, an M1: operations and bytes in a nanosecond.
const OPERATIONS_PER_NANOSECOND: u64 = 2_000;
const BYTES_PER_NANOSECOND: u64 = 68;

/// What a launch makes a GPU do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::ops::gpu) struct Cost {
    /// Multiplications and additions, also those with zeros that fill a tile.
    pub(in crate::ops::gpu) operations: u64,
    /// Bytes that come from memory or go there.
    pub(in crate::ops::gpu) bytes: u64,
}

impl Cost {
    pub(in crate::ops::gpu) fn bytes(bytes: usize) -> Self {
        Self { operations: 0, bytes: bytes as u64 }
    }

    /// Time on the smallest chip, if it does nothing else.
    pub(in crate::ops::gpu) fn nanoseconds(self) -> u64 {
        (self.operations / OPERATIONS_PER_NANOSECOND).max(self.bytes / BYTES_PER_NANOSECOND)
    }
}

impl std::ops::Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { operations: self.operations + other.operations, bytes: self.bytes + other.bytes }
    }
}

impl std::iter::Sum for Cost {
    fn sum<I: Iterator<Item = Self>>(costs: I) -> Self {
        costs.fold(Self::default(), |sum, cost| sum + cost)
    }
}

/// How long a dispatch may take, and all dispatches between two commits, on the smallest chip.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct Patience {
    pub(in crate::ops::gpu) nanoseconds: u64,
}

impl Patience {
    pub(in crate::ops::gpu) fn new(limit: Duration) -> Self {
        Self { nanoseconds: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX) }
    }

    /// How many of many equal things a launch may do: at least one, and whole multiples of `unit` if there are such.
    pub(in crate::ops::gpu) fn share(self, cost_of_one: Cost, unit: usize) -> usize {
        let most = self.nanoseconds / cost_of_one.nanoseconds().max(1);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        if most < unit { most.max(1) } else { most / unit * unit }
    }

    /// Cuts a list of things with these costs into pieces for a launch each, of one thing or more.
    pub(in crate::ops::gpu) fn pieces(
        self,
        costs: impl Iterator<Item = Cost>,
    ) -> impl Iterator<Item = (Range<usize>, Cost)> {
        let mut costs = costs.enumerate().peekable();
        std::iter::from_fn(move || {
            let (first, mut sum) = costs.next()?;
            let mut end = first + 1;
            while let Some((_, next)) =
                costs.next_if(|(_, next)| (sum + *next).nanoseconds() <= self.nanoseconds)
            {
                sum = sum + next;
                end += 1;
            }
            Some((first..end, sum))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_both_counts() {
        let check = |operations, bytes, nanoseconds| {
            assert_eq!(Cost { operations, bytes }.nanoseconds(), nanoseconds, "{operations} {bytes}");
        };
        check(200_000_000_000, 0, 100_000_000);
        check(200_000_000_000, 6_800_000_000, 100_000_000);
        check(1, 6_800_000_000, 100_000_000);
        check(2_000, 680, 10);
    }

    #[test]
    fn pieces_are_as_long_as_patience_allows_and_never_empty() {
        let patience = Patience { nanoseconds: 10 };
        let cut = |times: &[u64]| -> Vec<Range<usize>> {
            let costs = times.iter().map(|time| Cost { operations: 2_000 * time, bytes: 0 });
            patience.pieces(costs).map(|(range, _)| range).collect()
        };
        assert!(cut(&[]).is_empty());
        assert_eq!(cut(&[99, 98]), [0..1, 1..2]);
        assert_eq!(cut(&[4, 6, 1]), [0..2, 2..3]);
        assert_eq!(cut(&[4, 7, 11, 3, 3, 3, 3]), [0..1, 1..2, 2..3, 3..6, 6..7]);
        let share = |time: u64, unit| patience.share(Cost { operations: 2_000 * time, bytes: 0 }, unit);
        assert_eq!([share(1, 4), share(3, 2), share(3, 4), share(11, 4), share(0, 4)], [8, 2, 3, 1, 8]);
    }
}
