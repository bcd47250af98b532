//! Markers in a text that comes character by character.

/// Holds text back for as long as it could be the beginning of a marker.
#[derive(Debug, Default)]
pub(super) struct MarkerScan {
    held: String,
}

impl MarkerScan {
    /// Takes a character and returns the number of the marker that it completes. Text that certainly belongs to no
    /// marker goes to `released`. No marker may be a prefix of another one; empty ones are ignored.
    pub(super) fn push(&mut self, c: char, markers: &[&str], released: &mut String) -> Option<usize> {
        self.held.push(c);
        while !self.held.is_empty() {
            if let Some(found) = markers.iter().position(|marker| **marker == self.held) {
                self.held.clear();
                return Some(found);
            }
            if markers.iter().any(|marker| marker.starts_with(&self.held)) {
                return None;
            }
            released.push(self.held.remove(0));
        }
        None
    }

    /// Whether there is text that may be the beginning of a marker.
    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// The text was cut off: drops held text, which is the beginning of a marker. A single character is too common in
    /// texts, and stays. Returns whether there was such a beginning.
    pub(super) fn drop_beginning(&mut self) -> bool {
        let is_beginning = self.held.chars().nth(1).is_some();
        if is_beginning {
            self.held.clear();
        }
        is_beginning
    }

    /// The text has ended: held text is not a marker.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
