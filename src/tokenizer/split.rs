//! Splitting text with a pre-tokenizer's regular expression, in time linear in the text.
//!
//! Nearly all of these expressions end in `\s+(?!\S)|\s+`, and that lookahead forces a backtracking
//! matcher, which gives up on runs of about a million blanks. It has an exact equivalent: match `\s+`, and
//! give the last character back if more than one was matched and text follows.

use tokenizers::utils::SysRegex;

use crate::{Error, Result};

const LOOKAHEAD_TAIL: &str = r"|\s+(?!\S)|\s+";
const NEWLINE_RUN: &str = r"|\s*[\r\n]+";
/// Every character that `\s` matches, twice, so that an expression which wants a run finds one.
const ALL_WHITESPACE: &str = "\t\n\u{b}\u{c}\r \u{85}\u{a0}\u{1680}\u{2000}\u{2001}\u{2002}\u{2003}\u{2004}\
    \u{2005}\u{2006}\u{2007}\u{2008}\u{2009}\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}";

/// An expression whose matches, and the text between them, become pieces.
#[derive(Debug)]
pub(super) struct SplitRegex {
    regex: SysRegex,
    blanks: Blanks,
}

/// What to do with a match that is nothing but whitespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blanks {
    /// Take it as it is.
    Whole,
    /// Give the last character back to the text that follows.
    GiveBackLast,
    /// The same, except that a run which ends in a line break was matched as such and stays whole.
    GiveBackLastUnlessNewline,
}

impl SplitRegex {
    /// # Errors
    /// If `pattern` is not a regular expression that the matcher knows.
    pub(super) fn new(pattern: &str) -> Result<Self> {
        let compile = |pattern: &str| {
            SysRegex::new(pattern).map_err(|error| {
                Error::invalid_model(format!(
                    "the pre-tokenizer's expression {pattern:?} is not valid: {error}"
                ))
            })
        };
        if let Some(head) = pattern.strip_suffix(LOOKAHEAD_TAIL) {
            let words = head.strip_suffix(NEWLINE_RUN);
            if ignores_context(words.unwrap_or(head)) && !matches_blanks(&compile(words.unwrap_or(head))?) {
                let blanks =
                    if words.is_some() { Blanks::GiveBackLastUnlessNewline } else { Blanks::GiveBackLast };
                return Ok(Self { regex: compile(&format!(r"{head}|\s+"))?, blanks });
            }
        }
        Ok(Self { regex: compile(pattern)?, blanks: Blanks::Whole })
    }

    /// Appends the pieces of `text`, in order and without gaps.
    pub(super) fn split<'t>(&self, text: &'t str, pieces: &mut Vec<&'t str>) {
        let mut done = 0;
        'rest: loop {
            let base = done;
            for (start, end) in self.regex.find_iter(&text[base..]) {
                let (start, mut end) = (base + start, base + end);
                if start == end {
                    continue;
                }
                let kept = self.without_last_blank(&text[start..end], end < text.len());
                let shortened = kept < end - start;
                end = start + kept;
                if done < start {
                    pieces.push(&text[done..start]);
                }
                pieces.push(&text[start..end]);
                done = end;
                if shortened {
                    continue 'rest;
                }
            }
            break;
        }
        if done < text.len() {
            pieces.push(&text[done..]);
        }
    }

    /// How many bytes of the match to keep.
    fn without_last_blank(&self, matched: &str, text_follows: bool) -> usize {
        let Some(last) = matched.chars().next_back() else { return 0 };
        let give_back = match self.blanks {
            Blanks::Whole => false,
            Blanks::GiveBackLast => true,
            Blanks::GiveBackLastUnlessNewline => !matches!(last, '\r' | '\n'),
        };
        let rest = matched.len() - last.len_utf8();
        if give_back && text_follows && rest > 0 && matched.chars().all(char::is_whitespace) {
            rest
        } else {
            matched.len()
        }
    }
}

/// Whether a match never depends on what stands before it, so that matching may resume anywhere.
fn ignores_context(pattern: &str) -> bool {
    let outside_classes = pattern.replace("[^", "[").replace(r"\^", "");
    !["(?=", "(?!", "(?<", "^", r"\b", r"\B", r"\A", r"\G", r"\K"]
        .iter()
        .any(|construct| outside_classes.contains(construct))
}

fn matches_blanks(regex: &SysRegex) -> bool {
    let doubled: String = ALL_WHITESPACE.chars().flat_map(|c| [c, c]).collect();
    regex.find_iter(&doubled).next().is_some()
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use proptest::prelude::*;

    const LLAMA: &str =
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const GPT2: &str = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

    fn split<'t>(regex: &SplitRegex, text: &'t str) -> Vec<&'t str> {
        let mut pieces = Vec::new();
        regex.split(text, &mut pieces);
        pieces
    }

    /// Each expression as this module runs it and as it is written.
    static REGEXES: LazyLock<[(SplitRegex, SplitRegex); 2]> = LazyLock::new(|| {
        [LLAMA, GPT2].map(|pattern| {
            let as_written = SplitRegex { regex: SysRegex::new(pattern).unwrap(), blanks: Blanks::Whole };
            (SplitRegex::new(pattern).unwrap(), as_written)
        })
    });

    #[test]
    fn known_endings_need_no_lookahead() {
        assert_eq!(SplitRegex::new(LLAMA).unwrap().blanks, Blanks::GiveBackLastUnlessNewline);
        assert_eq!(SplitRegex::new(GPT2).unwrap().blanks, Blanks::GiveBackLast);
        assert_eq!(SplitRegex::new(r"\p{N}").unwrap().blanks, Blanks::Whole);
        // Alternatives that match blanks themselves, or look around, leave the expression as it is.
        assert_eq!(SplitRegex::new(r" {2}|\s+(?!\S)|\s+").unwrap().blanks, Blanks::Whole);
        assert_eq!(SplitRegex::new(r"^a|\s+(?!\S)|\s+").unwrap().blanks, Blanks::Whole);
    }

    #[test]
    fn a_long_run_of_blanks_gives_back_one() {
        let text = format!("a{}b", " ".repeat(3_000_000));
        let pieces = split(&SplitRegex::new(LLAMA).unwrap(), &text);
        assert_eq!(pieces.iter().map(|piece| piece.len()).collect::<Vec<_>>(), [1, 2_999_999, 2]);
    }

    #[test]
    fn invalid_expressions_are_errors() {
        assert!(SplitRegex::new("(").unwrap_err().message().contains("not valid"));
        assert!(SplitRegex::new(r"(|\s+(?!\S)|\s+").is_err());
    }

    proptest! {
        #[test]
        fn pieces_equal_those_of_the_lookahead(text in r"([a1!é \t\r\n\u{3000}]|  |\n ){0,40}") {
            for (regex, with_lookahead) in REGEXES.iter() {
                let pieces = split(regex, &text);
                prop_assert_eq!(&pieces, &split(with_lookahead, &text));
                prop_assert_eq!(pieces.concat(), text.clone());
            }
        }
    }
}
