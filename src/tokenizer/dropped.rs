//! Characters that a text has and a vocabulary lacks: dropped from the tokens, and reported to callers.
//!
//! Encoding happens within one call, on one thread, deep under templates and requests. So dropped characters are
//! collected per thread, between the start and the end of [`dropped_in`].

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::byte_level;

/// Most names that are kept; a text in another script has thousands.
const MAX_NAMES: usize = 16;

thread_local! {
    static FOUND: RefCell<Option<BTreeSet<String>>> = const { RefCell::new(None) };
}

/// The meaning of the characters of pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Alphabet {
    /// Each for a byte.
    #[default]
    Bytes,
    /// Themselves.
    Characters,
}

/// Runs `work`, and returns the bytes (`0x07`) and characters (`U+4E00`) that were dropped during it because the
/// vocabulary has no token for them; of many, the first ones in order.
pub fn dropped_in<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    /// The outer collection, which is restored even after a panic.
    struct Outer(Option<BTreeSet<String>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            FOUND.set(self.0.take());
        }
    }
    let outer = Outer(FOUND.replace(Some(BTreeSet::new())));
    let result = work();
    let found = FOUND.take().unwrap_or_default();
    drop(outer);
    (result, found.into_iter().collect())
}

/// `c` was dropped.
pub(super) fn note(c: char, alphabet: Alphabet) {
    FOUND.with_borrow_mut(|found| {
        let Some(found) = found else { return };
        let byte = byte_level::byte_of_char(c).filter(|_| alphabet == Alphabet::Bytes);
        let name = byte.map_or_else(|| format!("U+{:04X}", u32::from(c)), |byte| format!("0x{byte:02X}"));
        if found.len() < MAX_NAMES {
            found.insert(name);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_collected_on_demand() {
        note('Ġ', Alphabet::Bytes);
        let ((inner, during), outer) = dropped_in(|| {
            note('Ġ', Alphabet::Bytes);
            let inner = dropped_in(|| note('字', Alphabet::Characters));
            note('Ġ', Alphabet::Characters);
            (inner.1, "result")
        });
        assert_eq!((inner, during), (vec!["U+5B57".to_owned()], "result"));
        // A nested call collects its own.
        assert_eq!(outer, ["0x20", "U+0120"]);
        assert_eq!(dropped_in(|| note('字', Alphabet::Bytes)).1, ["U+5B57"]);
        let many = dropped_in(|| ('a'..='z').for_each(|c| note(c, Alphabet::Characters))).1;
        assert_eq!(many.len(), MAX_NAMES);
    }
}
