//! Sorting by a comparison that can fail.
//!
//! The library's sort may panic where the order is none, as with numbers that are no number, and cannot be ended.

use std::cmp::Ordering;

use super::Result;

/// Sorts stably; the first failure ends it.
pub(super) fn try_sort<T>(items: Vec<T>, compare: &impl Fn(&T, &T) -> Result<Ordering>) -> Result<Vec<T>> {
    let mut runs: Vec<Vec<T>> = items.into_iter().map(|item| vec![item]).collect();
    while runs.len() > 1 {
        let mut merged = Vec::with_capacity(runs.len().div_ceil(2));
        let mut rest = runs.into_iter();
        while let Some(left) = rest.next() {
            merged.push(match rest.next() {
                Some(right) => merge(left, right, compare)?,
                None => left,
            });
        }
        runs = merged;
    }
    Ok(runs.pop().unwrap_or_default())
}

fn merge<T>(left: Vec<T>, right: Vec<T>, compare: &impl Fn(&T, &T) -> Result<Ordering>) -> Result<Vec<T>> {
    let mut merged = Vec::with_capacity(left.len() + right.len());
    let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
    while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
        let next = if compare(b, a)? == Ordering::Less { right.next() } else { left.next() };
        merged.extend(next);
    }
    merged.extend(left);
    merged.extend(right);
    Ok(merged)
}
