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

    /// The block table of row `row`.
    #[must_use]
    pub fn block_table(&self, row: usize) -> &[u32] {
        &self.block_tables[self.block_table_starts[row]..self.block_table_starts[row + 1]]
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
