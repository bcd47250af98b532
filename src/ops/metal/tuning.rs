//! What is chosen by the size of the chip.

use super::ChipClass;

/// Parameters of launches. None of them depends on a batch, so that results do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tuning {
    /// Simdgroups that a product with a vector should have in flight, so that enough reads are under way. A
    /// matrix of fewer rows is divided along its columns.
    pub(super) simdgroups_in_flight: usize,
}

impl Tuning {
    pub(crate) fn of(class: ChipClass) -> Self {
        match class {
            ChipClass::Base => Self { simdgroups_in_flight: 512 },
            ChipClass::Max => Self { simdgroups_in_flight: 1536 },
            ChipClass::Ultra => Self { simdgroups_in_flight: 3072 },
        }
    }
}
