//! Splitting text with a pre-tokenizer's regular expression, in time linear in the text.
//!
//! Nearly all of these expressions end in `\s+(?!\S)|\s+`, and that lookahead forces a backtracking
//! matcher, which fails on runs of about a million blanks. It has an exact equivalent: match `\s+`, and
//! give the last character back if more than one was matched and text follows.

use tokenizers::utils::SysRegex;

use super::allowance::Allowance;
use crate::{Error, Result};

const LOOKAHEAD_TAIL: &str = r"|\s+(?!\S)|\s+";
/// The same for runs of blanks that are split into pieces of powers of two.
const POWERS_TAIL: &str = concat!(
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)",
    r"|\s{1,2}(?!\S)|\s{1}",
);
const POWERS: [usize; 9] = [512, 256, 128, 64, 32, 16, 8, 4, 2];
/// Alternatives that may precede such an ending: runs that end in a line end, or line ends one by one.
const LINE_END_RUNS: [&str; 2] = [r"|\s*[\r\n]+", r"|\s*[\r\n]"];
const LINE_END: &str = r"|[\r\n]";
/// Every character that `\s` matches, twice, so that an expression which needs a run finds one.
const ALL_WHITESPACE: &str = "\t\n\u{b}\u{c}\r \u{85}\u{a0}\u{1680}\u{2000}\u{2001}\u{2002}\u{2003}\u{2004}\
    \u{2005}\u{2006}\u{2007}\u{2008}\u{2009}\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}";

/// One way of splitting text into pieces.
#[derive(Debug)]
pub(super) enum Splitter {
    /// Matches, and the text between them.
    At(SplitRegex),
    /// Runs of digits in groups of three, counted from their ends.
    Thousands(Thousands),
}

/// Splits runs of digits into groups of three, counted from their ends. The files' expressions use a lookahead, which
/// would search the rest of the run for each digit.
#[derive(Debug)]
pub(super) struct Thousands {
    digits: SysRegex,
    /// Characters that must not follow a run that is split.
    not_before: Option<SysRegex>,
    /// Split only before a number of whole groups, so that the first digits stay with the text before them, and the
    /// last with the text after them.
    only_between: bool,
}

impl Splitter {
    /// # Errors
    /// If `pattern` is not a regular expression that the matcher supports.
    pub(super) fn at(pattern: &str) -> Result<Self> {
        SplitRegex::new(pattern).map(Self::At)
    }

    /// Separates each match of `digits` from the text around it, and splits it into groups. With `before_no_word`,
    /// except before a letter or another word character.
    ///
    /// # Errors
    /// As [`Self::at`].
    pub(super) fn thousands(digits: &str, before_no_word: bool) -> Result<Self> {
        let not_before = before_no_word.then(|| compile(r"\w")).transpose()?;
        Ok(Self::Thousands(Thousands { digits: compile(digits)?, not_before, only_between: false }))
    }

    /// Each run is cut where whole groups follow.
    ///
    /// # Errors
    /// As [`Self::at`].
    pub(super) fn between_thousands(digits: &str) -> Result<Self> {
        Ok(Self::Thousands(Thousands { digits: compile(digits)?, not_before: None, only_between: true }))
    }

    /// Appends the pieces of `text`, in order and without gaps.
    ///
    /// # Errors
    /// If that takes too long.
    pub(super) fn split<'t>(
        &self,
        text: &'t str,
        allowance: &mut Allowance,
        pieces: &mut Vec<&'t str>,
    ) -> Result<()> {
        match self {
            Self::At(regex) => regex.split(text, allowance, pieces)?,
            Self::Thousands(thousands) => thousands.split(text, pieces),
        }
        Ok(())
    }
}

impl Thousands {
    fn split<'t>(&self, text: &'t str, pieces: &mut Vec<&'t str>) {
        let mut done = 0;
        let mut cut_at = |at: usize| {
            pieces.extend((done < at).then(|| &text[done..at]));
            done = at;
        };
        for (start, end) in self.digits.find_iter(text) {
            let next = text[end..].chars().next().map_or(end, |next| end + next.len_utf8());
            if self.not_before.as_ref().is_some_and(|no| no.find_iter(&text[end..next]).next().is_some()) {
                continue;
            }
            let run = &text[start..end];
            let num_chars = run.chars().count();
            for (index, (at, _)) in run.char_indices().enumerate() {
                if (num_chars - index).is_multiple_of(3) || index == 0 && !self.only_between {
                    cut_at(start + at);
                }
            }
            if !self.only_between {
                cut_at(end);
            }
        }
        cut_at(text.len());
    }
}

/// An expression whose matches, and the text between them, become pieces.
#[derive(Debug)]
pub(super) struct SplitRegex {
    regex: SysRegex,
    blanks: Blanks,
}

/// The treatment of a match that is only whitespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blanks {
    /// Take it unchanged.
    Whole,
    /// Give the last character back to the text that follows.
    GiveBackLast,
    /// The same, except that a run which ends in a line end was matched as such and stays whole.
    GiveBackLastUnlessLineEnd,
    /// The largest power of two that leaves a character to the text that follows, and so on; lines as above.
    Powers,
}

impl SplitRegex {
    /// # Errors
    /// If `pattern` is not a regular expression that the matcher supports.
    pub(super) fn new(pattern: &str) -> Result<Self> {
        if let Some((head, words, blanks)) = without_lookahead(pattern)
            && ignores_context(words)
            && !matches_blanks(&compile(words)?)
        {
            return Ok(Self { regex: compile(&format!(r"{head}|\s+"))?, blanks });
        }
        Ok(Self { regex: compile(pattern)?, blanks: Blanks::Whole })
    }

    /// Appends the pieces of `text`, in order and without gaps.
    ///
    /// # Errors
    /// If that takes too long.
    pub(super) fn split<'t>(
        &self,
        text: &'t str,
        allowance: &mut Allowance,
        pieces: &mut Vec<&'t str>,
    ) -> Result<()> {
        let mut done = 0;
        'rest: loop {
            let base = done;
            for (start, end) in self.regex.find_iter(&text[base..]) {
                allowance.look()?;
                let (start, end) = (base + start, base + end);
                let text_follows = end < text.len();
                // An empty match splits, too.
                pieces.extend((done < start).then(|| &text[done..start]));
                done = start;
                let mut num_blanks = self.num_blanks(&text[start..end], text_follows);
                while num_blanks > 0 {
                    // The last one may belong to a piece with the text that follows.
                    if num_blanks == 1 && text_follows && done > start {
                        continue 'rest;
                    }
                    let num_taken = self.blanks.num_taken(num_blanks, text_follows);
                    let rest = &text[done..end];
                    let length = rest.char_indices().nth(num_taken).map_or(rest.len(), |(at, _)| at);
                    pieces.push(&rest[..length]);
                    done += length;
                    num_blanks -= num_taken;
                }
                pieces.extend((done < end).then(|| &text[done..end]));
                done = end;
            }
            break;
        }
        pieces.extend((done < text.len()).then(|| &text[done..]));
        Ok(())
    }

    /// The characters of a match that is a run of blanks which may be cut; 0 for any other match.
    fn num_blanks(&self, matched: &str, text_follows: bool) -> usize {
        let ends_line = matched.ends_with(['\r', '\n']);
        let may_be_cut = match self.blanks {
            Blanks::Whole => false,
            Blanks::GiveBackLast => text_follows,
            Blanks::GiveBackLastUnlessLineEnd => text_follows && !ends_line,
            Blanks::Powers => !ends_line,
        };
        match may_be_cut && matched.chars().all(char::is_whitespace) {
            true => matched.chars().count(),
            false => 0,
        }
    }
}

impl Blanks {
    /// The number of characters in the next piece of a run of blanks.
    fn num_taken(self, num_blanks: usize, text_follows: bool) -> usize {
        let most = num_blanks - usize::from(text_follows);
        match self {
            Self::Powers => POWERS.into_iter().find(|power| *power <= most).unwrap_or(1),
            _ => most.max(1),
        }
    }
}

fn without_lines(head: &str) -> Option<&str> {
    LINE_END_RUNS.iter().find_map(|lines| head.strip_suffix(lines))
}

/// The expression without its ending, the same without the alternatives for line ends, and the replacement of the
/// ending.
fn without_lookahead(pattern: &str) -> Option<(&str, &str, Blanks)> {
    if let Some(head) = pattern.strip_suffix(POWERS_TAIL) {
        return without_lines(head).map(|words| (head, words, Blanks::Powers));
    }
    let head = pattern.strip_suffix(LOOKAHEAD_TAIL)?;
    Some(match (without_lines(head), head.strip_suffix(LINE_END)) {
        (Some(words), _) => (head, words, Blanks::GiveBackLastUnlessLineEnd),
        (None, Some(words)) => (head, words, Blanks::GiveBackLast),
        (None, None) => (head, head, Blanks::GiveBackLast),
    })
}

fn compile(pattern: &str) -> Result<SysRegex> {
    SysRegex::new(pattern).map_err(|error| {
        Error::invalid_model(format!("the pre-tokenizer's expression {pattern:?} is not valid: {error}"))
    })
}

/// Whether a match never depends on the text before it, so that matching may resume anywhere.
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
    const SPARK: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|[\r\n]|\s+(?!\S)|\s+";
    const ONE_LINE: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";

    fn split<'t>(regex: &SplitRegex, text: &'t str) -> Vec<&'t str> {
        let mut pieces = Vec::new();
        regex.split(text, &mut Allowance::of(text), &mut pieces).unwrap();
        pieces
    }

    /// Each expression as this module runs it and as it is written.
    static REGEXES: LazyLock<[(SplitRegex, SplitRegex); 5]> = LazyLock::new(|| {
        let powers = format!("[^\\r\\n\\p{{L}}\\p{{N}}]?\\p{{L}}+|\\s*[\\r\\n]+{POWERS_TAIL}");
        [LLAMA, GPT2, SPARK, ONE_LINE, &powers].map(|pattern| {
            assert_ne!(SplitRegex::new(pattern).unwrap().blanks, Blanks::Whole, "{pattern}");
            let as_written = SplitRegex { regex: SysRegex::new(pattern).unwrap(), blanks: Blanks::Whole };
            (SplitRegex::new(pattern).unwrap(), as_written)
        })
    });

    #[test]
    fn known_endings_need_no_lookahead() {
        assert_eq!(SplitRegex::new(LLAMA).unwrap().blanks, Blanks::GiveBackLastUnlessLineEnd);
        assert_eq!(SplitRegex::new(GPT2).unwrap().blanks, Blanks::GiveBackLast);
        assert_eq!(SplitRegex::new(r"\p{N}").unwrap().blanks, Blanks::Whole);
        // An expression with alternatives that match blanks themselves, or with lookaround, is unchanged.
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
    fn long_runs_of_digits_are_cut_from_their_end() {
        let splitter = Splitter::thousands(r"\d+", true).unwrap();
        let check = |text: &str, expected: &[&str]| {
            let mut pieces = Vec::new();
            splitter.split(text, &mut Allowance::of(text), &mut pieces).unwrap();
            assert_eq!(pieces, expected);
        };
        check("a 1234567, 123 12 ٣٤٥٦x", &["a ", "1", "234", "567", ", ", "123", " ", "12", " ٣٤٥٦x"]);
        check("", &[]);
        let between = Splitter::between_thousands(r"\d+").unwrap();
        let mut pieces = Vec::new();
        between.split("a12b1234c123d", &mut Allowance::of(""), &mut pieces).unwrap();
        assert_eq!(pieces, ["a12b1", "234c", "123d"]);
        let mut pieces = Vec::new();
        let text = "1".repeat(1_000_000);
        splitter.split(&text, &mut Allowance::of(&text), &mut pieces).unwrap();
        assert_eq!((pieces.len(), pieces[0]), (333_334, "1"));
    }

    #[test]
    fn an_expression_that_takes_too_long_is_an_error() {
        let text = "a".repeat(20_000);
        let regex = SplitRegex::new("(?:(?:(?!c)a?){13}b|)a").unwrap();
        let error = regex.split(&text, &mut Allowance::of(&text), &mut Vec::new()).unwrap_err();
        assert!(error.message().contains("needs more time"), "{error:?}");
    }

    #[test]
    fn a_match_of_nothing_cuts() {
        assert_eq!(split(&SplitRegex::new("(?=b)").unwrap(), "abab"), ["a", "ba", "b"]);
    }

    #[test]
    fn invalid_expressions_are_errors() {
        assert!(SplitRegex::new("(").unwrap_err().message().contains("not valid"));
        assert!(SplitRegex::new(r"(|\s+(?!\S)|\s+").is_err());
    }

    proptest! {
        #[test]
        fn pieces_equal_those_of_the_lookahead(text in r"([a1!é \t\r\n\u{3000}]|  |\n | {5,40}){0,40}") {
            for (regex, with_lookahead) in REGEXES.iter() {
                let pieces = split(regex, &text);
                prop_assert_eq!(&pieces, &split(with_lookahead, &text));
                prop_assert_eq!(pieces.concat(), text.clone());
            }
        }
    }
}
