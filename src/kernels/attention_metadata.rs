//! What attention has to know about a step: where each row's tokens are in the cache.

/// The layout of a step's tokens.
///
/// A step computes `num_tokens` tokens, grouped in rows: row `r` owns the tokens
/// `query_start_loc[r]..query_start_loc[r + 1]`, which are consecutive tokens of one sequence and its
/// last ones up to `seq_lens[r]`. A prompt, a piece of a prompt and a decode differ in their length
/// only.
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
}

/// New tokens from which a row of latent attention is computed with keys and values made of the latent rows.
/// Measured with Youtu-2B on two threads of a Xeon with AVX-512: behind 1,900 tokens, pieces of 16 are slower so and pieces of
/// 32 faster.
const EXPANDED_TOKENS: usize = 32;

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

    /// With latent attention: whether keys and values of the heads are made for row `row`
    /// ([`expanded_attention`](crate::attention::expanded::expanded_attention)), or its queries and results are projected
    /// instead ([`paged_attention`](crate::attention::paged_attention)).
    ///
    /// A function of the row alone, so that what else is in a step changes nothing.
    #[must_use]
    pub fn is_expanded(&self, row: usize) -> bool {
        self.num_new_tokens(row) >= EXPANDED_TOKENS
    }

    /// The rows that are expanded.
    pub fn expanded_rows(&self) -> impl Iterator<Item = usize> {
        (0..self.num_rows()).filter(|row| self.is_expanded(*row))
    }

    /// The tokens up to the end of the last row that is not expanded; none, if all rows are.
    #[must_use]
    pub fn num_absorbed_tokens(&self) -> usize {
        let last = (0..self.num_rows()).rev().find(|row| !self.is_expanded(*row));
        last.map_or(0, |row| self.query_start_loc[row + 1])
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_the_absorbed_form_end_with_its_last_row() {
        let check = |lens: &[usize], num_absorbed: usize| {
            let mut metadata = AttentionMetadata::default();
            metadata.clear();
            for len in lens {
                metadata.seq_lens.push(*len);
                metadata.query_start_loc.push(metadata.query_start_loc.last().unwrap() + len);
            }
            assert_eq!(metadata.num_absorbed_tokens(), num_absorbed, "{lens:?}");
        };
        check(&[], 0);
        check(&[EXPANDED_TOKENS], 0);
        check(&[1, 1, 40], 2);
        check(&[1, 40, 1], 42);
        check(&[40, EXPANDED_TOKENS - 1], 40 + EXPANDED_TOKENS - 1);
    }
}
