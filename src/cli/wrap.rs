//! Wraps streamed text between words at the edge of the terminal.
//!
//! A word is held back until it is complete or as long as a line. Styles have no width. Tables and code that
//! are too wide are also wrapped, and only between words.

use unicode_width::UnicodeWidthChar;

/// Wraps text for a terminal of this width.
#[derive(Debug)]
pub(crate) struct Wrap {
    width: usize,
    column: usize,
    /// Pending blanks and the pending word, with their widths.
    blanks: String,
    word: String,
    word_width: usize,
    /// Whether the word continues one whose first part was longer than a line.
    is_continued: bool,
    /// Whether the text is within an escape sequence.
    is_escape: bool,
}

impl Wrap {
    /// `width` in columns, at least 1.
    pub(crate) fn new(width: usize) -> Self {
        Self {
            width: width.max(1),
            column: 0,
            blanks: String::new(),
            word: String::new(),
            word_width: 0,
            is_continued: false,
            is_escape: false,
        }
    }

    /// Adds text. Returns what can be printed.
    pub(crate) fn push(&mut self, text: &str) -> String {
        let mut shown = String::new();
        for letter in text.chars() {
            if self.is_escape || letter == '\x1b' {
                self.is_escape = !(self.is_escape && letter.is_ascii_alphabetic());
                self.word.push(letter);
                continue;
            }
            match letter {
                '\n' => {
                    self.flush_into(&mut shown);
                    shown.push('\n');
                    (self.column, self.is_continued) = (0, false);
                }
                ' ' => {
                    if !self.word.is_empty() {
                        self.flush_into(&mut shown);
                    }
                    self.is_continued = false;
                    self.blanks.push(' ');
                }
                _ => {
                    self.word.push(letter);
                    self.word_width += letter.width().unwrap_or(0);
                    if self.word_width >= self.width {
                        self.flush_into(&mut shown);
                        self.is_continued = true;
                    }
                }
            }
        }
        shown
    }

    /// Returns the pending text.
    pub(crate) fn flush(&mut self) -> String {
        let mut shown = String::new();
        self.flush_into(&mut shown);
        shown
    }

    fn flush_into(&mut self, shown: &mut String) {
        let width = self.blanks.len() + self.word_width;
        let is_full = self.column > 0 && self.column + width > self.width;
        if is_full && self.word_width > 0 && !self.is_continued {
            shown.push('\n');
            self.column = self.word_width;
        } else {
            shown.push_str(&self.blanks);
            self.column += width;
        }
        if self.column > self.width {
            // The terminal itself breaks a word that is longer than a line.
            self.column = (self.column - 1) % self.width + 1;
        }
        shown.push_str(&self.word);
        self.blanks.clear();
        self.word.clear();
        self.word_width = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn wrapped(chunks: &[&str], width: usize) -> String {
        let mut wrap = Wrap::new(width);
        let mut shown: String = chunks.iter().map(|chunk| wrap.push(chunk)).collect();
        shown += &wrap.flush();
        shown
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped(&["one two", " three"], 9), "one two\nthree");
        assert_eq!(wrapped(&["one tw", "o three\nfour"], 7), "one two\nthree\nfour");
        assert_eq!(wrapped(&["  a\n\n    b"], 80), "  a\n\n    b");
        assert_eq!(wrapped(&["\x1b[2mone two\x1b[0m x"], 7), "\x1b[2mone two\x1b[0m\nx");
        // Each of these characters takes two columns.
        assert_eq!(wrapped(&["漢字 漢字"], 8), "漢字\n漢字");
    }

    proptest! {
        /// For any chunks, no text is lost, and no line is too wide except for a single long word.
        #[test]
        fn only_blanks_become_line_ends(text in "[a-d \n]{0,200}", width in 1_usize..30, cut in 0_usize..200) {
            let cut = cut.min(text.len());
            let shown = wrapped(&[&text[..cut], &text[cut..]], width);
            prop_assert_eq!(&shown, &wrapped(&[&text], width));
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            prop_assert_eq!(words(&shown).concat(), words(&text).concat());
            for line in shown.lines() {
                // The indentation of a line and its first word stay unchanged.
                let indent = line.len() - line.trim_start().len();
                let first = indent + line.trim_start().split(' ').next().map_or(0, str::len);
                prop_assert!(line.trim_end().len() <= width || first >= width, "{line:?} of {width}");
            }
        }
    }
}
