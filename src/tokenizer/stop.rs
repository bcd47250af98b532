//! Stop strings in a stream of text.
//!
//! Invariant: no text that belongs to a stop string is handed out before it is certain that the string
//! does not occur. So the longest end of the text that could still grow into one is held back.

use crate::{Error, Result};

/// Looks for stop strings in one sequence's text.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// For each pattern, how many of its bytes the text so far ends with.
    progress: Vec<usize>,
    include_stop: bool,
    held: String,
    stopped: bool,
}

#[derive(Debug, Clone)]
struct Pattern {
    text: Vec<u8>,
    /// For each prefix, the length of the longest shorter prefix that it also ends with.
    borders: Vec<usize>,
}

/// The result for one text chunk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that can be handed out.
    pub text: String,
    /// The index of the stop string that was found; the sequence is over.
    pub matched: Option<usize>,
}

impl StopMatcher {
    /// `include_stop` includes the stop string in the text.
    ///
    /// # Errors
    /// If a stop string is empty.
    pub fn new(stop: &[String], include_stop: bool) -> Result<Self> {
        if let Some(index) = stop.iter().position(String::is_empty) {
            return Err(Error::invalid_request(format!("stop string {index} is empty")));
        }
        Ok(Self {
            patterns: stop.iter().map(|text| Pattern::new(text.as_bytes())).collect(),
            progress: vec![0; stop.len()],
            include_stop,
            held: String::new(),
            stopped: false,
        })
    }

    /// Takes the next text chunk. Of several stop strings, the one that is complete first is used, and of those the
    /// longest. After a match, further text is dropped.
    pub fn push(&mut self, delta: &str) -> StopOutcome {
        self.advance(delta, true)
    }

    /// Takes a text chunk in which no stop string ends the sequence. One that begins in it still may, later.
    pub fn pass(&mut self, delta: &str) -> String {
        self.advance(delta, false).text
    }

    /// Takes a text chunk that overlaps no stop string, and returns it after the held text.
    pub fn skip(&mut self, delta: &str) -> String {
        if self.stopped { String::new() } else { self.finish() + delta }
    }

    fn advance(&mut self, delta: &str, may_stop: bool) -> StopOutcome {
        if self.stopped {
            return StopOutcome::default();
        }
        let already = self.held.len();
        self.held.push_str(delta);
        for at in already..self.held.len() {
            let byte = self.held.as_bytes()[at];
            let mut found: Option<usize> = None;
            for (index, pattern) in self.patterns.iter().enumerate() {
                let progress = &mut self.progress[index];
                *progress = pattern.advance(*progress, byte);
                if *progress == pattern.text.len() && !may_stop {
                    *progress = pattern.borders[*progress];
                }
                if *progress == pattern.text.len()
                    && found.is_none_or(|other| self.patterns[other].text.len() < pattern.text.len())
                {
                    found = Some(index);
                }
            }
            if let Some(index) = found {
                let end = at + 1;
                let length = if self.include_stop { 0 } else { self.patterns[index].text.len() };
                let mut text = std::mem::take(&mut self.held);
                text.truncate(end - length);
                self.stopped = true;
                return StopOutcome { text, matched: Some(index) };
            }
        }
        let num_held = self.progress.iter().copied().max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - num_held);
        StopOutcome { text: std::mem::replace(&mut self.held, held), matched: None }
    }

    /// Ends the text without a match and releases the held text.
    pub fn finish(&mut self) -> String {
        self.progress.fill(0);
        std::mem::take(&mut self.held)
    }
}

impl Pattern {
    fn new(text: &[u8]) -> Self {
        let mut borders = vec![0; text.len() + 1];
        for at in 1..text.len() {
            let mut border = borders[at];
            while border > 0 && text[border] != text[at] {
                border = borders[border];
            }
            borders[at + 1] = border + usize::from(text[border] == text[at]);
        }
        Self { text: text.to_vec(), borders }
    }

    /// How many bytes match after `byte`, if `matched` (less than all) matched before it.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && self.text[matched] != byte {
            matched = self.borders[matched];
        }
        matched + usize::from(self.text[matched] == byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matcher(stop: &[&str], include_stop: bool) -> StopMatcher {
        let stop: Vec<String> = stop.iter().map(|text| (*text).to_owned()).collect();
        StopMatcher::new(&stop, include_stop).unwrap()
    }

    fn check(stop: &[&str], deltas: &[&str], expected: &[&str], matched: Option<usize>) {
        let mut matcher = matcher(stop, false);
        let outcomes: Vec<_> = deltas.iter().map(|delta| matcher.push(delta)).collect();
        assert_eq!(outcomes.iter().map(|outcome| outcome.text.as_str()).collect::<Vec<_>>(), expected);
        assert_eq!(outcomes.iter().find_map(|outcome| outcome.matched), matched);
    }

    #[test]
    fn nothing_of_a_stop_string_leaks() {
        check(&["END"], &["text E", "N", "D more"], &["text ", "", ""], Some(0));
        check(&["END"], &["text E", "N", "X"], &["text ", "", "ENX"], None);
        check(&["aab"], &["aa", "aa", "b"], &["", "aa", ""], Some(0));
        check(&["\n\n", "User:"], &["hi\n", "Us", "er:"], &["hi", "\n", ""], Some(1));
        check(&["é"], &["caf", "é!"], &["caf", ""], Some(0));
        check(&[], &["a", ""], &["a", ""], None);
        // The longer of two strings that end at the same position removes more.
        check(&["lo", "hello"], &["say hel", "lo"], &["say ", ""], Some(1));
        // Text after the end is dropped.
        check(&["x"], &["ax", "b"], &["a", ""], Some(0));
    }

    #[test]
    fn a_stop_string_can_be_passed() {
        let mut matcher = matcher(&["aba"], false);
        assert_eq!(matcher.pass("xaba"), "xab");
        assert_eq!(matcher.push("b"), StopOutcome { text: String::new(), matched: None });
        // The end of the one that was passed is the beginning of this one.
        assert_eq!(matcher.push("a!"), StopOutcome { text: String::new(), matched: Some(0) });
    }

    #[test]
    fn the_held_text_is_released_at_the_end() {
        let mut matcher = matcher(&["stop"], false);
        assert_eq!(matcher.push("no sto").text, "no ");
        assert_eq!(matcher.finish(), "sto");
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn an_empty_stop_string_is_an_error() {
        let error = StopMatcher::new(&["a".to_owned(), String::new()], false).unwrap_err();
        assert_eq!(error.message(), "stop string 1 is empty");
    }

    /// The text and the match, given the whole text.
    fn naively(stop: &[String], text: &str, include_stop: bool) -> (String, Option<usize>) {
        for end in (1..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let found = (0..stop.len())
                .filter(|index| text[..end].ends_with(stop[*index].as_str()))
                .max_by_key(|index| (stop[*index].len(), usize::MAX - index));
            if let Some(index) = found {
                let length = if include_stop { 0 } else { stop[index].len() };
                return (text[..end - length].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn equals_the_naive_search_under_any_split(
            deltas in prop::collection::vec("[abé]{0,4}", 0..12),
            stop in prop::collection::vec("[abé]{1,4}", 0..4),
            include_stop in any::<bool>(),
        ) {
            let mut matcher = StopMatcher::new(&stop, include_stop).unwrap();
            let (mut text, mut matched) = (String::new(), None);
            let (expected, expected_match) = naively(&stop, &deltas.concat(), include_stop);
            for delta in &deltas {
                let outcome = matcher.push(delta);
                text.push_str(&outcome.text);
                matched = matched.or(outcome.matched);
                prop_assert!(expected.starts_with(&text));
            }
            text.push_str(&matcher.finish());
            prop_assert_eq!((text, matched), (expected, expected_match));
        }
    }
}
