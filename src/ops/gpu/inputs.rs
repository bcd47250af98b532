//! The lists of a step, where kernels read them.

use std::ops::Range;

use bytemuck::{Pod, Zeroable, cast_slice};

use super::backend::GpuBackend;
use super::{Binding, GpuBuffer, Placement, Ticket};
use crate::ops::AttentionMetadata;
use crate::{Error, Result};

/// Steps whose lists are kept: while the device reads those of one step, the host writes those of the next.
const NUM_SLOTS: usize = 2;

/// A token that attends by itself: of a sequence of which a step computes one token or, if there are no tiles, any.
/// `DecodeRow` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DecodeRow {
    token: u32,
    seq_len: u32,
    table_start: u32,
}

/// Neighbouring tokens of a sequence of which a step computes several. `PrefillTile` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PrefillTile {
    first_token: u32,
    num_tokens: u32,
    first_position: u32,
    table_start: u32,
}

/// Which threadgroups the tokens of a sequence go to of which a step computes several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrefillForm {
    /// So many neighbours go together.
    Tiles(usize),
    /// The same, if keys and values are made for the sequence; otherwise each goes by itself.
    Latent(usize),
}

/// A sequence for which keys and values are made.
#[derive(Debug, Clone)]
pub(super) struct ExpandedRow {
    pub(super) seq_len: usize,
    /// Its tiles, in the list of all.
    pub(super) tiles: Range<usize>,
    /// Where its block table begins in the list of all.
    table_start: usize,
}

/// Some tokens that attend by themselves.
#[derive(Debug, Clone, Copy)]
pub(super) struct DecodeRows<'a> {
    /// Where in the list they begin.
    begin: usize,
    rows: &'a [DecodeRow],
}

impl DecodeRows<'_> {
    /// How many positions each attends to.
    pub(super) fn lens(&self) -> impl Iterator<Item = usize> {
        self.rows.iter().map(|row| row.seq_len as usize)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn max_len(&self) -> usize {
        self.lens().max().unwrap_or(0)
    }
}

/// A list with room for so many words, from `begin` on in each slot.
#[derive(Debug, Clone, Copy)]
struct List {
    begin: usize,
    capacity: usize,
}

impl List {
    /// The part of it behind the first `len` words.
    fn from(self, len: usize) -> Self {
        Self { begin: self.begin + len, capacity: self.capacity.saturating_sub(len) }
    }
}

/// What a step's lists are made for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InputLimits {
    pub(crate) max_num_tokens: usize,
    pub(crate) max_num_rows: usize,
    pub(crate) max_num_blocks: usize,
}

/// The lists of the current step and of the one before.
#[derive(Debug)]
pub(crate) struct GpuInputs {
    buffer: GpuBuffer,
    slot_words: usize,
    slot: usize,
    in_use: [Option<Ticket>; NUM_SLOTS],
    token_ids: List,
    positions: List,
    slots: List,
    outputs: List,
    block_tables: List,
    decode_rows: List,
    prefill_tiles: List,
    /// Sequences of one token of the current step; of the others, tokens or tiles.
    decode: Vec<DecodeRow>,
    prefill_rows: Vec<DecodeRow>,
    prefill: Vec<PrefillTile>,
    expanded: Vec<ExpandedRow>,
    /// Kept for its memory.
    words: Vec<u32>,
}

impl GpuInputs {
    pub(crate) fn new(gpu: &GpuBackend, limits: InputLimits) -> Result<Self> {
        let mut slot_words = 0;
        let mut list = |capacity: usize| {
            let begin = slot_words;
            slot_words += capacity.next_multiple_of(64);
            List { begin, capacity }
        };
        let InputLimits { max_num_tokens, max_num_rows, max_num_blocks, .. } = limits;
        let token_ids = list(max_num_tokens);
        let positions = list(max_num_tokens);
        let slots = list(max_num_tokens);
        let outputs = list(max_num_tokens);
        let block_tables = list(max_num_blocks);
        let decode_rows = list((max_num_rows + max_num_tokens) * size_of::<DecodeRow>() / 4);
        let prefill_tiles = list(max_num_tokens * size_of::<PrefillTile>() / 4);
        Ok(Self {
            buffer: gpu.device().allocate(NUM_SLOTS * slot_words * 4, Placement::Shared)?,
            slot_words,
            slot: 0,
            in_use: [None; NUM_SLOTS],
            token_ids,
            positions,
            slots,
            outputs,
            block_tables,
            decode_rows,
            prefill_tiles,
            decode: Vec::with_capacity(max_num_rows),
            prefill_rows: Vec::with_capacity(max_num_tokens),
            prefill: Vec::with_capacity(max_num_tokens),
            expanded: Vec::with_capacity(max_num_rows),
            words: Vec::new(),
        })
    }

    /// Writes the lists of a step, in the place of those of the step before the last one. Token ids that are not
    /// given are the sampled ones.
    pub(crate) fn upload(
        &mut self,
        gpu: &GpuBackend,
        token_ids: &[u32],
        positions: &[u32],
        outputs: &[usize],
        attention: &AttentionMetadata,
        prefill_form: PrefillForm,
    ) -> Result<()> {
        // What was queued up to now reads the lists of the step before.
        self.in_use[self.slot] = Some(gpu.commit()?);
        self.slot = (self.slot + 1) % NUM_SLOTS;
        if let Some(ticket) = self.in_use[self.slot].take() {
            gpu.wait(ticket)?;
        }
        self.describe_rows(attention, prefill_form)?;
        self.write(gpu, self.token_ids, token_ids)?;
        self.write(gpu, self.positions, positions)?;
        self.write_all(gpu, self.slots, &attention.slot_mapping)?;
        self.write_all(gpu, self.outputs, outputs)?;
        self.write(gpu, self.block_tables, &attention.block_tables)?;
        self.write(gpu, self.decode_rows, cast_slice(&self.decode))?;
        let behind = self.decode_rows.from(self.decode.len() * size_of::<DecodeRow>() / 4);
        self.write(gpu, behind, cast_slice(&self.prefill_rows))?;
        self.write(gpu, self.prefill_tiles, cast_slice(&self.prefill))
    }

    fn describe_rows(&mut self, attention: &AttentionMetadata, prefill_form: PrefillForm) -> Result<()> {
        self.decode.clear();
        self.prefill_rows.clear();
        self.prefill.clear();
        self.expanded.clear();
        for row in 0..attention.num_rows() {
            let seq_len = attention.seq_lens[row];
            let (Some(&[start, end]), Some(&table_start)) = (
                attention.query_start_loc.get(row..row + 2).and_then(<[usize]>::as_array),
                attention.block_table_starts.get(row),
            ) else {
                return Err(Error::internal(format!("row {row} of a step has no tokens or no block table")));
            };
            if start >= end || seq_len < end - start {
                return Err(Error::internal(format!(
                    "row {row} has tokens {start}..{end} of a sequence of {seq_len}"
                )));
            }
            let row_of = |token: usize| DecodeRow {
                token: token as u32,
                seq_len: (seq_len - (end - 1 - token)) as u32,
                table_start: table_start as u32,
            };
            let tokens_per_tile = match prefill_form {
                PrefillForm::Latent(tokens_per_tile) if attention.is_expanded(row) => tokens_per_tile,
                _ if end - start == 1 => {
                    self.decode.push(row_of(start));
                    continue;
                }
                PrefillForm::Latent(_) => {
                    self.prefill_rows.extend((start..end).map(row_of));
                    continue;
                }
                PrefillForm::Tiles(tokens_per_tile) => tokens_per_tile,
            };
            let first_tile = self.prefill.len();
            let mut first = start;
            while first < end {
                let num_tokens = tokens_per_tile.min(end - first);
                self.prefill.push(PrefillTile {
                    first_token: first as u32,
                    num_tokens: num_tokens as u32,
                    first_position: (seq_len - (end - first)) as u32,
                    table_start: table_start as u32,
                });
                first += num_tokens;
            }
            if matches!(prefill_form, PrefillForm::Latent(_)) {
                let tiles = first_tile..self.prefill.len();
                self.expanded.push(ExpandedRow { seq_len, tiles, table_start });
            }
        }
        Ok(())
    }

    fn write(&self, gpu: &GpuBackend, list: List, words: &[u32]) -> Result<()> {
        if words.len() > list.capacity {
            return Err(Error::internal(format!(
                "a list of {} words does not fit into {} of a step's lists",
                words.len(),
                list.capacity
            )));
        }
        gpu.device().write(&self.buffer, self.offset(list), cast_slice(words))
    }

    fn write_all(&mut self, gpu: &GpuBackend, list: List, values: &[usize]) -> Result<()> {
        let mut words = std::mem::take(&mut self.words);
        words.clear();
        words.extend(values.iter().map(|value| *value as u32));
        let result = self.write(gpu, list, &words);
        self.words = words;
        result
    }

    fn offset(&self, list: List) -> usize {
        4 * (self.slot * self.slot_words + list.begin)
    }

    fn binding(&self, list: List) -> Binding<'_> {
        Binding::read(&self.buffer).at(self.offset(list))
    }

    pub(crate) fn token_ids(&self) -> Binding<'_> {
        self.binding(self.token_ids)
    }

    pub(crate) fn positions(&self) -> Binding<'_> {
        self.binding(self.positions)
    }

    pub(crate) fn slots(&self) -> Binding<'_> {
        self.binding(self.slots)
    }

    pub(crate) fn outputs(&self) -> Binding<'_> {
        self.binding(self.outputs)
    }

    pub(super) fn block_tables(&self) -> Binding<'_> {
        self.binding(self.block_tables)
    }

    /// The sequences of one token.
    pub(super) fn decode(&self) -> DecodeRows<'_> {
        DecodeRows { begin: 0, rows: &self.decode }
    }

    /// Tokens of the tiles.
    pub(super) fn num_prefill_tokens(&self) -> usize {
        self.prefill.iter().map(|tile| tile.num_tokens as usize).sum()
    }

    /// The tokens of the others, if they go by themselves.
    pub(super) fn prefill_rows(&self) -> DecodeRows<'_> {
        DecodeRows { begin: self.decode.len(), rows: &self.prefill_rows }
    }

    /// Tokens that attend by themselves, from `first` of these on.
    pub(super) fn rows_from(&self, rows: DecodeRows<'_>, first: usize) -> Binding<'_> {
        let binding = self.binding(self.decode_rows);
        binding.at(binding.offset + (rows.begin + first) * size_of::<DecodeRow>())
    }

    /// The sequences for which keys and values are made.
    pub(super) fn expanded_rows(&self) -> &[ExpandedRow] {
        &self.expanded
    }

    pub(super) fn block_table(&self, row: &ExpandedRow) -> Binding<'_> {
        let binding = self.block_tables();
        binding.at(binding.offset + 4 * row.table_start)
    }

    /// The tiles of the other sequences, from `first` on.
    pub(super) fn prefill_tiles(&self, first: usize) -> Binding<'_> {
        let binding = self.binding(self.prefill_tiles);
        binding.at(binding.offset + first * size_of::<PrefillTile>())
    }

    pub(super) fn num_tiles(&self) -> usize {
        self.prefill.len()
    }

    /// The positions of the tokens of each of some tiles.
    pub(super) fn tile_positions(&self, tiles: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        self.prefill[tiles].iter().map(|tile| {
            let first = tile.first_position as usize;
            first..first + tile.num_tokens as usize
        })
    }
}
