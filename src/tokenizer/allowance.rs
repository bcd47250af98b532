//! What a tokenizer file may make of a text: the steps in it are those of whoever wrote the file, any number of them, and
//! each may write many times what it reads or take a time that grows faster than the text.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::{Error, Result};

/// What a text may become in any case.
const MIN_BYTES: usize = 1 << 20;
/// How many times as long as it was it may be. Unicode's longest decomposition is eleven times what it stands for.
const MAX_GROWTH: usize = 16;
/// Time of the processor in any case, and for each byte: ten times what the slowest known files take.
const MIN_TIME: Duration = Duration::from_secs(2);
const TIME_PER_BYTE: Duration = Duration::from_micros(10);
/// The most steps of one kind that a file may have. Known ones have at most eleven.
const MAX_STEPS: usize = 64;

/// How much the parts of one text may still become together, and until when.
#[derive(Debug)]
pub(super) struct Allowance {
    left: usize,
    deadline: Deadline,
}

impl Allowance {
    pub(super) fn of(text: &str) -> Self {
        Self::for_bytes(text.len(), MIN_BYTES)
    }

    /// For texts of so many bytes, which may become `least` bytes in any case.
    pub(super) fn for_bytes(num_bytes: usize, least: usize) -> Self {
        let factor = u32::try_from(num_bytes).unwrap_or(u32::MAX);
        Self {
            left: least.saturating_add(num_bytes.saturating_mul(MAX_GROWTH)),
            deadline: Deadline::new(MIN_TIME.saturating_add(TIME_PER_BYTE.saturating_mul(factor))),
        }
    }

    /// Makes sure that a part may become so long.
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

    /// Takes what a part has become.
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
            "the steps of the tokenizer's file take longer with the text than {MIN_TIME:?} and {TIME_PER_BYTE:?} a byte, \
             which is the most allowed"
        )))
    }
}

/// Makes sure that a part of a file has no more steps than one may have.
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
