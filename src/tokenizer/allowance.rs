//! Limits of a tokenizer file's steps: a file may have any number of them, and each may multiply the text or take
//! superlinear time.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::{Error, Result};

/// The length of output that is always allowed.
const MIN_BYTES: usize = 1 << 20;
/// The allowed growth factor of a text. Unicode's longest decomposition has a factor of eleven.
const MAX_GROWTH: usize = 16;
/// The allowed processor time, fixed and per byte: ten times that of the slowest known files.
const MIN_TIME: Duration = Duration::from_secs(2);
const TIME_PER_BYTE: Duration = Duration::from_micros(10);
/// Maximum steps of one kind in a file. Known ones have at most eleven.
const MAX_STEPS: usize = 64;

/// The remaining output of a text's segments, and their deadline.
#[derive(Debug)]
pub(super) struct Allowance {
    left: usize,
    deadline: Deadline,
}

impl Allowance {
    pub(super) fn of(text: &str) -> Self {
        Self::for_bytes(text.len(), MIN_BYTES)
    }

    /// For texts of this many bytes, which may become `least` bytes in any case.
    pub(super) fn for_bytes(num_bytes: usize, least: usize) -> Self {
        let factor = u32::try_from(num_bytes).unwrap_or(u32::MAX);
        Self {
            left: least.saturating_add(num_bytes.saturating_mul(MAX_GROWTH)),
            deadline: Deadline::new(MIN_TIME.saturating_add(TIME_PER_BYTE.saturating_mul(factor))),
        }
    }

    /// Checks that a segment may become this long.
    ///
    /// # Errors
    /// If it may not.
    pub(super) fn check(&self, num_bytes: usize) -> Result<()> {
        if num_bytes <= self.left {
            return Ok(());
        }
        Err(Error::invalid_request(format!(
            "the steps of the tokenizer's file would make more than {MAX_GROWTH} times as much of the text as it is, \
             which is the most allowed"
        )))
    }

    /// Charges the output of a segment.
    pub(super) fn take(&mut self, num_bytes: usize) {
        self.left = self.left.saturating_sub(num_bytes);
    }

    /// Makes sure that there is time left.
    ///
    /// # Errors
    /// If there is not.
    pub(super) fn look(&mut self) -> Result<()> {
        if !self.deadline.is_over() {
            return Ok(());
        }
        Err(Error::invalid_request(format!(
            "the tokenizer needs more time for the text than the limit of {MIN_TIME:?} and {TIME_PER_BYTE:?} a byte"
        )))
    }
}

/// Checks the number of steps in a section of a file.
///
/// # Errors
/// If it has.
pub(super) fn check_steps(what: &str, num_steps: usize) -> Result<()> {
    if num_steps <= MAX_STEPS {
        return Ok(());
    }
    Err(Error::invalid_model(format!(
        "the {what} of tokenizer.json has {num_steps} steps, more than the {MAX_STEPS} that it may have"
    )))
}
