//! Rows that parallel tasks write.

use std::marker::PhantomData;

/// A matrix of which each task writes ranges of its own.
#[derive(Debug)]
pub struct RowsMut<'a> {
    start: *mut f32,
    len: usize,
    width: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: see the contracts of the methods: ranges in use at a time are disjoint.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// Rows of `width` values.
    pub fn new(values: &'a mut [f32], width: usize) -> Self {
        Self { start: values.as_mut_ptr(), len: values.len(), width, lifetime: PhantomData }
    }

    /// Row `row`.
    ///
    /// # Panics
    /// If there is no such row.
    ///
    /// # Safety
    /// No other overlapping range of this row may be in use.
    #[expect(clippy::mut_from_ref, reason = "the caller makes sure that ranges are disjoint")]
    pub unsafe fn get(&self, row: usize) -> &mut [f32] {
        // SAFETY: the caller's guarantee.
        unsafe { self.range(row, 0, self.width) }
    }

    /// `len` values of row `row` from column `column` on.
    ///
    /// # Panics
    /// If the row does not have them.
    ///
    /// # Safety
    /// None of them may be in use elsewhere.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the caller makes sure that ranges are disjoint")]
    pub unsafe fn range(&self, row: usize, column: usize, len: usize) -> &mut [f32] {
        assert!(
            column + len <= self.width && (row + 1) * self.width <= self.len,
            "row {row} does not have the columns {column}..{}",
            column + len
        );
        // SAFETY: the range is inside the matrix, and no other code uses it, as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.width + column), len) }
    }
}
