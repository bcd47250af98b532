//! Estimates how long launches occupy a GPU, so that none occupies it for too long.
//!
//! macOS ends a command buffer that holds the GPU for seconds ("Impacting Interactivity"), and windows stutter long
//! before. A GPU finishes a dispatch before it draws the screen. So every launch has a cost: a long one is divided into
//! chunks, and queued work is committed before it exceeds the budget. Chunks are whole rows, tokens or tiles, each
//! computed in the same way, so chunks do not change results.

use std::ops::Range;
use std::time::Duration;

/// The smallest chip that the kernels run on, an M1: operations and bytes in a nanosecond.
const OPERATIONS_PER_NANOSECOND: u64 = 2_000;
const BYTES_PER_NANOSECOND: u64 = 68;

/// The work of a launch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::ops::gpu) struct Cost {
    /// Multiplications and additions, including those with padding zeros.
    pub(in crate::ops::gpu) operations: u64,
    /// Bytes read from and written to memory.
    pub(in crate::ops::gpu) bytes: u64,
}

impl Cost {
    pub(in crate::ops::gpu) fn bytes(bytes: usize) -> Self {
        Self { operations: 0, bytes: bytes as u64 }
    }

    /// Time on the smallest chip without other work.
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
pub(in crate::ops::gpu) struct DispatchBudget {
    pub(in crate::ops::gpu) nanoseconds: u64,
}

impl DispatchBudget {
    pub(in crate::ops::gpu) fn new(limit: Duration) -> Self {
        Self { nanoseconds: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX) }
    }

    /// The number of equal units that a launch may process: at least one, and a multiple of `unit` if possible.
    pub(in crate::ops::gpu) fn num_within(self, cost_of_one: Cost, unit: usize) -> usize {
        let most = self.nanoseconds / cost_of_one.nanoseconds().max(1);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        if most < unit { most.max(1) } else { most / unit * unit }
    }

    /// Divides a list of units with these costs into chunks for a launch each, with at least one unit.
    pub(in crate::ops::gpu) fn chunks(
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
    fn chunks_fill_the_dispatch_budget_and_are_never_empty() {
        let budget = DispatchBudget { nanoseconds: 10 };
        let cut = |times: &[u64]| -> Vec<Range<usize>> {
            let costs = times.iter().map(|time| Cost { operations: 2_000 * time, bytes: 0 });
            budget.chunks(costs).map(|(range, _)| range).collect()
        };
        assert!(cut(&[]).is_empty());
        assert_eq!(cut(&[99, 98]), [0..1, 1..2]);
        assert_eq!(cut(&[4, 6, 1]), [0..2, 2..3]);
        assert_eq!(cut(&[4, 7, 11, 3, 3, 3, 3]), [0..1, 1..2, 2..3, 3..6, 6..7]);
        let share = |time: u64, unit| budget.num_within(Cost { operations: 2_000 * time, bytes: 0 }, unit);
        assert_eq!([share(1, 4), share(3, 2), share(3, 4), share(11, 4), share(0, 4)], [8, 2, 3, 1, 8]);
    }
}
