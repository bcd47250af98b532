//! From raw text to ids, piece by piece: normalise, split into pieces, convert to the vocabulary's characters, look up.

use tokenizers::normalizer::Range;
use tokenizers::utils::SysRegex;
use tokenizers::{
    NormalizedString, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _,
    PreTokenizerWrapper,
};

use super::added::{AddedTokens, Fragment};
use super::allowance::Allowance;
use super::bpe::PieceModel;
use super::normalizer::Normalizer;
use super::split::Splitter;
use super::{byte_level, spm};
use crate::{Error, Result};

/// A stretch of text, in bytes.
pub(super) type Span = std::ops::Range<usize>;

/// The steps from text without added tokens to ids.
#[derive(Debug)]
pub(super) struct PiecePipeline {
    pub(super) normalizer: Option<Normalizer>,
    pub(super) pieces: Pieces,
    pub(super) model: PieceModel,
}

/// The splitting of text into pieces that are encoded separately.
#[derive(Debug)]
pub(super) enum Pieces {
    /// By expressions, one after the other, before and after bytes are written as characters.
    ByteLevel { splits: Vec<Splitter>, byte_splits: Vec<Splitter> },
    /// None, and blanks become the vocabulary's character for them.
    Marked,
    /// The file's rule, by the library.
    Library(Vec<LibraryStep>),
    /// Not at all.
    Whole,
}

/// One of the library's ways to split. Some write more than they read.
#[derive(Debug)]
pub(super) struct LibraryStep {
    step: PreTokenizerWrapper,
    /// Where it splits, if the file has an expression for it.
    pattern: Option<SysRegex>,
}

impl LibraryStep {
    /// `pattern` is the expression that the step has from the file.
    ///
    /// # Errors
    /// If that is none.
    pub(super) fn new(step: PreTokenizerWrapper, pattern: Option<&str>) -> Result<Self> {
        let pattern = pattern.map(SysRegex::new).transpose();
        let pattern = pattern.map_err(|error| {
            Error::invalid_model(format!("an expression of the pre-tokenizer is not valid: {error}"))
        })?;
        Ok(Self { step, pattern })
    }

    fn split(&self, pieces: &mut PreTokenizedString, allowance: &mut Allowance) -> Result<()> {
        allowance.look()?;
        if let Some(pattern) = &self.pattern {
            // A limit ends long work here, and not in the library.
            for (piece, ..) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None) {
                for _ in pattern.find_iter(piece) {
                    allowance.look()?;
                }
            }
        }
        self.step
            .pre_tokenize(pieces)
            .map_err(|error| Error::invalid_request(format!("the text cannot be split: {error}")))?;
        let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::None);
        allowance.check(splits.iter().map(|(piece, ..)| piece.len()).sum())
    }
}

/// The whole text that is being encoded.
#[derive(Debug)]
pub(super) struct Source<'t> {
    text: &'t str,
    /// Spans of plain text, which never produce special tokens.
    protected: &'t [Span],
    /// The text with its alignment, made when a step needs it.
    aligned: Option<NormalizedString>,
    /// The remaining allowance of normalising its segments.
    allowance: Allowance,
}

impl<'t> Source<'t> {
    /// `protected` spans are sorted and disjoint.
    pub(super) fn new(text: &'t str, protected: &'t [Span]) -> Self {
        Self { text, protected, aligned: None, allowance: Allowance::of(text) }
    }

    /// Cuts out the added tokens that are looked for in raw text.
    pub(super) fn split(&self, added: &AddedTokens) -> Vec<Fragment> {
        added.split_raw(self.text, |span| overlaps(self.protected, &span))
    }
}

impl PiecePipeline {
    /// Appends the ids of a span of the source that contains no added token in its raw spelling.
    ///
    /// # Errors
    /// If the library cannot normalise, split or tokenize it.
    pub(super) fn encode(
        &self,
        source: &mut Source<'_>,
        span: Span,
        added: &AddedTokens,
        ids: &mut Vec<u32>,
    ) -> Result<()> {
        if let (None, false, Pieces::ByteLevel { splits, byte_splits }) =
            (&self.normalizer, added.has_normalized(), &self.pieces)
        {
            let text = &source.text[span];
            return self.encode_byte_level(text, splits, byte_splits, &mut source.allowance, ids);
        }
        if let (None, false, Pieces::Marked) = (&self.normalizer, added.has_normalized(), &self.pieces) {
            return self.model.encode(&mark(&source.text[span]), ids);
        }
        let aligned = source.aligned.get_or_insert_with(|| NormalizedString::from(source.text));
        // The slice remembers its offset in the text, which some pre-tokenizers need. It is not normalised yet, so both
        // kinds of offset are equal, and this one needs no search.
        let mut normalized = slice(aligned, Range::Normalized(span.clone()))?;
        if let Some(normalizer) = &self.normalizer {
            normalizer.normalize(&mut normalized, &mut source.allowance)?;
        }
        for part in split_normalized(added, &normalized, &span, source.protected) {
            match part.id {
                Some(id) => ids.push(id),
                None => self.encode_normalized(&normalized, part.range, &mut source.allowance, ids)?,
            }
        }
        Ok(())
    }

    fn encode_normalized(
        &self,
        text: &NormalizedString,
        span: Span,
        allowance: &mut Allowance,
        ids: &mut Vec<u32>,
    ) -> Result<()> {
        match &self.pieces {
            Pieces::ByteLevel { splits, byte_splits } => {
                self.encode_byte_level(&text.get()[span], splits, byte_splits, allowance, ids)
            }
            Pieces::Whole => self.model.encode(&text.get()[span], ids),
            Pieces::Marked => self.model.encode(&mark(&text.get()[span]), ids),
            Pieces::Library(steps) => {
                let mut pieces = PreTokenizedString::from(slice(text, Range::Normalized(span))?);
                steps.iter().try_for_each(|step| step.split(&mut pieces, allowance))?;
                for (piece, ..) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None) {
                    self.model.encode(piece, ids)?;
                }
                Ok(())
            }
        }
    }

    fn encode_byte_level(
        &self,
        text: &str,
        splits: &[Splitter],
        byte_splits: &[Splitter],
        allowance: &mut Allowance,
        ids: &mut Vec<u32>,
    ) -> Result<()> {
        for piece in cut(text, splits, allowance)? {
            let characters = byte_level::encode_text(piece);
            match byte_splits {
                [] => self.model.encode(&characters, ids)?,
                _ => {
                    for piece in cut(&characters, byte_splits, allowance)? {
                        self.model.encode(piece, ids)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// The text with the character for blanks in SentencePiece's vocabularies.
fn mark(text: &str) -> String {
    text.chars().map(|c| if c == ' ' { spm::SPACE } else { c }).collect()
}

/// The pieces after each splitter has split those of the previous one.
///
/// # Errors
/// If that takes too long.
pub(super) fn cut<'t>(text: &'t str, splits: &[Splitter], allowance: &mut Allowance) -> Result<Vec<&'t str>> {
    let mut pieces: Vec<&str> = (!text.is_empty()).then_some(text).into_iter().collect();
    for split in splits {
        let mut next = Vec::with_capacity(pieces.len());
        for piece in pieces {
            split.split(piece, allowance, &mut next)?;
        }
        pieces = next;
    }
    Ok(pieces)
}

/// Cuts out the added tokens that are looked for in normalised text, which came from `span`.
fn split_normalized(
    added: &AddedTokens,
    normalized: &NormalizedString,
    span: &Span,
    protected: &[Span],
) -> Vec<Fragment> {
    let text = normalized.get();
    if !added.has_normalized() {
        return vec![Fragment { range: 0..text.len(), id: None }];
    }
    added.split_normalized(text, |part| {
        normalized
            .convert_offsets(Range::Normalized(part))
            .is_some_and(|part| overlaps(protected, &(span.start + part.start..span.start + part.end)))
    })
}

/// Whether a span shares a byte with one of several sorted, disjoint spans.
fn overlaps(sorted: &[Span], span: &Span) -> bool {
    let next = sorted.partition_point(|other| other.end <= span.start);
    sorted.get(next).is_some_and(|other| other.start < span.end)
}

fn slice(text: &NormalizedString, range: Range<Span>) -> Result<NormalizedString> {
    text.slice(range).ok_or_else(|| Error::internal("a segment of the text is not on a character boundary"))
}
