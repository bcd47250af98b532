//! What attention has to know about a step: where each row's tokens are in the cache.

use std::ops::Range;

/// How attention computes a row. Forms may differ in the last bits; within a form a token has the same bits whatever else is
/// in its row and in the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowForm {
    /// Tokens of a prompt, which share what is read of the cache.
    Prefill,
    /// Generated tokens, and those that are drafted behind one: each as if it were the only one of its row.
    Decode,
    /// With latent attention: keys and values of the heads are made for the row
    /// ([`expanded_attention`](crate::attention::expanded::expanded_attention)). In the other forms its queries and results
    /// are projected instead ([`paged_attention`](crate::attention::paged_attention)).
    Expanded,
}

impl RowForm {
    /// That of a row with so many tokens of which none is drafted: one goes by itself, several share what they read.
    #[must_use]
    pub fn of(num_tokens: usize) -> Self {
        if num_tokens == 1 { Self::Decode } else { Self::Prefill }
    }
}

/// The layout of a step's tokens.
///
/// A step computes `num_tokens` tokens, grouped in rows: row `r` owns the tokens
/// `query_start_loc[r]..query_start_loc[r + 1]`, which are consecutive tokens of one sequence and its
/// last ones up to `seq_lens[r]`. A prompt, a chunk of a prompt and a decode differ in their length and their form
/// only. A sequence has two rows, one after the other, if some of its tokens are expanded and others are not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttentionMetadata {
    /// Start of each row's tokens, and at the end `num_tokens`. Length `num_rows + 1`.
    pub query_start_loc: Vec<usize>,
    /// For each row the length of its sequence after this step, so the row's last token has position
    /// `seq_lens[r] - 1`.
    pub seq_lens: Vec<usize>,
    /// The block tables of all rows, one after the other.
    pub block_tables: Vec<u32>,
    /// Start of each row's block table in `block_tables`, and at the end its length.
    pub block_table_starts: Vec<usize>,
    /// For each token the slot (`block · block_size + offset`) that its K and V go to.
    pub slot_mapping: Vec<usize>,
    /// Tokens in a block.
    pub block_size: usize,
    /// The form of each row. Length `num_rows`.
    ///
    /// Whether a token is expanded is decided by its position and the length of its prompt ([`EXPANDED_GROUP`]), so that it is
    /// the same however the prompt is divided and whatever else is in a step.
    pub forms: Vec<RowForm>,
}

/// Tokens of whole groups of a prompt, counted from its beginning, are expanded with latent attention.
///
/// So many, because that is where it begins to pay: measured with Youtu-2B on two threads of a Xeon with AVX-512, behind 1,900
/// tokens, pieces of 16 are slower so and pieces of 32 faster.
pub const EXPANDED_GROUP: usize = 32;

impl AttentionMetadata {
    /// Rows of the step.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.seq_lens.len()
    }

    /// Tokens of the step.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.slot_mapping.len()
    }

    /// New tokens of row `row`.
    #[must_use]
    pub fn num_new_tokens(&self, row: usize) -> usize {
        self.query_start_loc[row + 1] - self.query_start_loc[row]
    }

    /// Whether row `row` is expanded.
    #[must_use]
    pub fn is_expanded(&self, row: usize) -> bool {
        self.forms.get(row) == Some(&RowForm::Expanded)
    }

    /// Tokens of rows of the form [`RowForm::Decode`].
    #[must_use]
    pub fn num_decode_tokens(&self) -> usize {
        let rows = self.forms.iter().zip(self.query_start_loc.windows(2));
        rows.filter(|(form, _)| **form == RowForm::Decode).map(|(_, tokens)| tokens[1] - tokens[0]).sum()
    }

    /// Adds the tokens at these positions of a sequence: one row, or two if the first of them are expanded, those before
    /// position `num_expanded`, and others are not, which have this form. `block` tells the blocks of the sequence. Slots are
    /// added apart.
    pub fn push(
        &mut self,
        positions: Range<usize>,
        num_expanded: usize,
        form: RowForm,
        block: impl Fn(usize) -> u32,
    ) {
        let boundary = num_expanded.clamp(positions.start, positions.end);
        for (part, form) in [(positions.start..boundary, RowForm::Expanded), (boundary..positions.end, form)]
        {
            if part.is_empty() {
                continue;
            }
            let start = self.query_start_loc.last().copied().unwrap_or(0);
            self.query_start_loc.push(start + part.len());
            self.seq_lens.push(part.end);
            self.block_tables.extend((0..part.end.div_ceil(self.block_size)).map(&block));
            self.block_table_starts.push(self.block_tables.len());
            self.forms.push(form);
        }
    }

    /// The rows that are expanded.
    pub fn expanded_rows(&self) -> impl Iterator<Item = usize> {
        (0..self.num_rows()).filter(|row| self.is_expanded(*row))
    }

    /// The tokens from the first to the last row that is not expanded; none, if all rows are.
    #[must_use]
    pub fn absorbed_tokens(&self) -> Range<usize> {
        let mut rows = (0..self.num_rows()).filter(|row| !self.is_expanded(*row));
        let Some(first) = rows.next() else { return 0..0 };
        self.query_start_loc[first]..self.query_start_loc[rows.next_back().unwrap_or(first) + 1]
    }

    /// The block table of row `row`.
    #[must_use]
    pub fn block_table(&self, row: usize) -> &[u32] {
        &self.block_tables[self.block_table_starts[row]..self.block_table_starts[row + 1]]
    }

    /// The slot of a position of row `row`.
    #[must_use]
    pub fn slot(&self, row: usize, position: usize) -> usize {
        let block = self.block_table(row)[position / self.block_size] as usize;
        block * self.block_size + position % self.block_size
    }

    /// Empties all lists and keeps their memory.
    pub fn clear(&mut self) {
        self.query_start_loc.clear();
        self.query_start_loc.push(0);
        self.seq_lens.clear();
        self.block_tables.clear();
        self.block_table_starts.clear();
        self.block_table_starts.push(0);
        self.slot_mapping.clear();
        self.forms.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_the_absorbed_form_begin_and_end_with_its_rows() {
        let check = |rows: &[(usize, bool)], absorbed: Range<usize>| {
            let mut metadata = AttentionMetadata { block_size: 16, ..AttentionMetadata::default() };
            metadata.clear();
            for (len, is_expanded) in rows {
                metadata.push(0..*len, if *is_expanded { *len } else { 0 }, RowForm::Prefill, |_| 0);
            }
            assert_eq!(metadata.absorbed_tokens(), absorbed, "{rows:?}");
        };
        check(&[], 0..0);
        check(&[(32, true)], 0..0);
        check(&[(1, false), (1, false), (40, true)], 0..2);
        check(&[(1, false), (40, true), (1, false)], 0..42);
        check(&[(40, true), (31, false), (32, true)], 40..71);
    }
}
