//! The attention metadata of a step: the locations of each row's tokens in the cache.

use std::ops::Range;

/// How attention computes a row. Modes may differ in the last bits. Within a mode, a token has the same bits for every
/// rest of its row and of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowMode {
    /// Tokens of a prompt, which share reads of the cache.
    Prefill,
    /// Generated tokens, and those that are drafted after one: each as if it were the only one of its row.
    Decode,
    /// With latent attention: keys and values of the heads are made for the row
    /// ([`expanded_attention`](crate::attention::expanded::expanded_attention)). In the other modes its queries and results
    /// are projected instead ([`paged_attention`](crate::attention::paged_attention)).
    Expanded,
}

impl RowMode {
    /// The mode of a row with this many tokens, none of them drafted: a single token is decoded, several are prefilled.
    #[must_use]
    pub fn of(num_tokens: usize) -> Self {
        if num_tokens == 1 { Self::Decode } else { Self::Prefill }
    }
}

/// The layout of a step's tokens.
///
/// A step computes `num_tokens` tokens, grouped in rows: row `r` owns the tokens
/// `query_start_loc[r]..query_start_loc[r + 1]`, which are consecutive tokens of one sequence and its
/// last ones up to `seq_lens[r]`. A prompt, a chunk of a prompt and a decode differ in their length and their mode
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
    /// The mode of each row. Length `num_rows`.
    ///
    /// A token's position and the length of its prompt decide whether it is expanded ([`EXPANDED_GROUP`]). So its mode
    /// is the same for every chunking of the prompt and every rest of a step.
    pub modes: Vec<RowMode>,
}

/// Tokens of whole groups of a prompt, counted from its beginning, are expanded with latent attention.
///
/// This number, because that is where it begins to pay: measured with Youtu-2B on two threads of a Xeon with AVX-512, after 1,900
/// tokens, chunks of 16 are slower so and chunks of 32 faster.
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
        self.modes.get(row) == Some(&RowMode::Expanded)
    }

    /// Tokens of rows of the mode [`RowMode::Decode`].
    #[must_use]
    pub fn num_decode_tokens(&self) -> usize {
        let rows = self.modes.iter().zip(self.query_start_loc.windows(2));
        rows.filter(|(mode, _)| **mode == RowMode::Decode).map(|(_, tokens)| tokens[1] - tokens[0]).sum()
    }

    /// Adds the tokens at these positions of a sequence: one row, or two if the first of them are expanded, those before
    /// position `num_expanded`, and others are not, which have this mode. `block` gives the blocks of the sequence. Slots are
    /// added apart.
    pub fn push(
        &mut self,
        positions: Range<usize>,
        num_expanded: usize,
        mode: RowMode,
        block: impl Fn(usize) -> u32,
    ) {
        let boundary = num_expanded.clamp(positions.start, positions.end);
        for (range, mode) in [(positions.start..boundary, RowMode::Expanded), (boundary..positions.end, mode)]
        {
            if range.is_empty() {
                continue;
            }
            let start = self.query_start_loc.last().copied().unwrap_or(0);
            self.query_start_loc.push(start + range.len());
            self.seq_lens.push(range.end);
            self.block_tables.extend((0..range.end.div_ceil(self.block_size)).map(&block));
            self.block_table_starts.push(self.block_tables.len());
            self.modes.push(mode);
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
        self.modes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absorbed_projections_begin_and_end_with_their_rows() {
        let check = |rows: &[(usize, bool)], absorbed: Range<usize>| {
            let mut metadata = AttentionMetadata { block_size: 16, ..AttentionMetadata::default() };
            metadata.clear();
            for (len, is_expanded) in rows {
                metadata.push(0..*len, if *is_expanded { *len } else { 0 }, RowMode::Prefill, |_| 0);
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
