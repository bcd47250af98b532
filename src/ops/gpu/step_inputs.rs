//! The batch metadata of a step in device memory.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable, cast_slice};

use super::attention::GpuAttention;
use super::attention::GpuExpandedAttention;
use super::backend::GpuBackend;
use super::{Binding, GpuBuffer, Placement, Ticket};
use crate::ops::kv_cache::KvCache;
use crate::ops::step_inputs::{InputLimits, InputOps, StepInputs};
use crate::ops::{AttentionMetadata, RowMode};
use crate::{Error, Result};

/// Steps whose batch metadata are kept: the host writes those of the next step while the device reads those of the
/// current one.
const NUM_SLOTS: usize = 2;

/// A single token of attention: of a sequence with one token in the step or, without tiles, any. `DecodeRow` of the
/// kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DecodeRow {
    token: u32,
    seq_len: u32,
    table_start: u32,
}

/// Neighbouring tokens of a sequence with several tokens in the step. `PrefillTile` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PrefillTile {
    first_token: u32,
    num_tokens: u32,
    first_position: u32,
    table_start: u32,
}

/// The division of a sequence's tokens among threadgroups, for sequences with several tokens in the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrefillGrouping {
    /// Tiles of this many neighbours.
    Tiles(usize),
    /// The same, if keys and values are expanded for the sequence; otherwise single tokens.
    Latent(usize),
}

/// A sequence whose keys and values are expanded.
#[derive(Debug, Clone)]
pub(super) struct ExpandedRow {
    pub(super) seq_len: usize,
    /// Its tiles, in the list of all tiles.
    pub(super) tiles: Range<usize>,
    /// The offset of its block table in the list of all tables.
    table_start: usize,
}

/// A range of single tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct DecodeRows<'a> {
    /// Their offset in the list.
    begin: usize,
    rows: &'a [DecodeRow],
}

impl DecodeRows<'_> {
    /// The number of positions that each attends to.
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

/// Alignment of the lists, in words.
const LIST_UNIT: usize = 64;

/// Offsets of the current step's batch metadata in their slot, in words.
#[derive(Debug, Clone, Copy, Default)]
struct MetadataOffsets {
    token_ids: usize,
    positions: usize,
    slots: usize,
    outputs: usize,
    decode_rows: usize,
    prefill_tiles: usize,
    block_tables: usize,
}

impl InputOps for Arc<GpuBackend> {
    fn inputs(&self, limits: InputLimits) -> Result<GpuInputs> {
        GpuInputs::new(self, limits)
    }

    fn upload(
        &self,
        inputs: &mut GpuInputs,
        step: &StepInputs<'_>,
        cache: &KvCache,
        heads_per_kv_head: usize,
    ) -> Result<()> {
        let (layout, dtype) = (cache.layout(), cache.dtype());
        let prefill_grouping = match layout.has_values {
            true => PrefillGrouping::Tiles(GpuAttention::tokens_per_tile(
                self,
                heads_per_kv_head,
                dtype,
                layout.head_dim,
            )),
            false => PrefillGrouping::Latent(GpuExpandedAttention::tokens_per_tile(self, dtype)),
        };
        let StepInputs { token_ids, positions, outputs, attention, .. } = *step;
        inputs.upload(self, token_ids, positions, outputs, attention, prefill_grouping)
    }
}

/// The batch metadata of the current and the previous step.
#[derive(Debug)]
pub(crate) struct GpuInputs {
    buffer: GpuBuffer,
    slot_words: usize,
    slot: usize,
    in_use: [Option<Ticket>; NUM_SLOTS],
    lists: MetadataOffsets,
    /// Single tokens of the current step; of the others, tokens or tiles.
    decode: Vec<DecodeRow>,
    prefill_rows: Vec<DecodeRow>,
    prefill: Vec<PrefillTile>,
    expanded: Vec<ExpandedRow>,
    /// Whether some single tokens read rows of the cache that others of the same step write.
    has_drafts: bool,
    /// All metadata in their order in memory.
    words: Vec<u32>,
}

impl GpuInputs {
    fn new(gpu: &GpuBackend, limits: InputLimits) -> Result<Self> {
        let InputLimits { max_num_tokens, max_num_rows, max_num_blocks, .. } = limits;
        // Token ids, positions, slots and outputs; rows; tiles; block tables.
        let slot_words = [
            max_num_tokens,
            max_num_tokens,
            max_num_tokens,
            max_num_tokens,
            (max_num_rows + max_num_tokens) * size_of::<DecodeRow>() / 4,
            max_num_tokens * size_of::<PrefillTile>() / 4,
            max_num_blocks,
        ]
        .iter()
        .map(|len| len.next_multiple_of(LIST_UNIT))
        .sum();
        Ok(Self {
            buffer: gpu.device().allocate(NUM_SLOTS * slot_words * 4, Placement::Shared)?,
            slot_words,
            slot: 0,
            in_use: [None; NUM_SLOTS],
            lists: MetadataOffsets::default(),
            decode: Vec::with_capacity(max_num_rows),
            prefill_rows: Vec::with_capacity(max_num_tokens),
            prefill: Vec::with_capacity(max_num_tokens),
            expanded: Vec::with_capacity(max_num_rows),
            has_drafts: false,
            words: Vec::with_capacity(slot_words),
        })
    }

    /// Writes the batch metadata of a step, over those of the step before the previous one. Missing token ids are the
    /// sampled ones.
    fn upload(
        &mut self,
        gpu: &GpuBackend,
        token_ids: &[u32],
        positions: &[u32],
        outputs: &[usize],
        attention: &AttentionMetadata,
        prefill_grouping: PrefillGrouping,
    ) -> Result<()> {
        // Work queued up to now reads the previous step's metadata.
        self.in_use[self.slot] = Some(gpu.commit()?);
        self.slot = (self.slot + 1) % NUM_SLOTS;
        if let Some(ticket) = self.in_use[self.slot].take() {
            gpu.wait(ticket)?;
        }
        self.describe_rows(attention, prefill_grouping)?;
        let words = &mut self.words;
        words.clear();
        let mut list = |add: &mut dyn FnMut(&mut Vec<u32>)| {
            words.resize(words.len().next_multiple_of(LIST_UNIT), 0);
            let begin = words.len();
            add(words);
            begin
        };
        let as_words =
            |values: &[usize], words: &mut Vec<u32>| words.extend(values.iter().map(|value| *value as u32));
        // Block tables come last: in decode steps, the other offsets are the same in every step.
        self.lists = MetadataOffsets {
            token_ids: list(&mut |words| words.extend_from_slice(token_ids)),
            positions: list(&mut |words| words.extend_from_slice(positions)),
            slots: list(&mut |words| as_words(&attention.slot_mapping, words)),
            outputs: list(&mut |words| as_words(outputs, words)),
            decode_rows: list(&mut |words| {
                words.extend_from_slice(cast_slice(&self.decode));
                words.extend_from_slice(cast_slice(&self.prefill_rows));
            }),
            prefill_tiles: list(&mut |words| words.extend_from_slice(cast_slice(&self.prefill))),
            block_tables: list(&mut |words| words.extend_from_slice(&attention.block_tables)),
        };
        if self.words.len() > self.slot_words {
            return Err(Error::internal(format!(
                "the batch metadata of a step has {} words; the buffer holds {}",
                self.words.len(),
                self.slot_words
            )));
        }
        gpu.device().write(&self.buffer, 4 * self.slot * self.slot_words, cast_slice(&self.words))
    }

    fn describe_rows(
        &mut self,
        attention: &AttentionMetadata,
        prefill_grouping: PrefillGrouping,
    ) -> Result<()> {
        self.decode.clear();
        self.prefill_rows.clear();
        self.prefill.clear();
        self.expanded.clear();
        self.has_drafts = false;
        for row in 0..attention.num_rows() {
            let seq_len = attention.seq_lens[row];
            let (Some(&[start, end]), Some(&table_start), Some(mode)) = (
                attention.query_start_loc.get(row..row + 2).and_then(<[usize]>::as_array),
                attention.block_table_starts.get(row),
                attention.modes.get(row),
            ) else {
                return Err(Error::internal(format!(
                    "row {row} of a step has no tokens, no block table, or no mode"
                )));
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
            let tokens_per_tile = match (*mode, prefill_grouping) {
                (RowMode::Decode, _) => {
                    self.decode.extend((start..end).map(row_of));
                    self.has_drafts |= end - start > 1;
                    continue;
                }
                (RowMode::Prefill, PrefillGrouping::Latent(_)) => {
                    self.prefill_rows.extend((start..end).map(row_of));
                    continue;
                }
                (RowMode::Expanded, PrefillGrouping::Latent(tokens_per_tile))
                | (_, PrefillGrouping::Tiles(tokens_per_tile)) => tokens_per_tile,
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
            if matches!(prefill_grouping, PrefillGrouping::Latent(_)) {
                let tiles = first_tile..self.prefill.len();
                self.expanded.push(ExpandedRow { seq_len, tiles, table_start });
            }
        }
        Ok(())
    }

    fn binding(&self, list: usize) -> Binding<'_> {
        Binding::read(&self.buffer).at(4 * (self.slot * self.slot_words + list))
    }

    pub(crate) fn token_ids(&self) -> Binding<'_> {
        self.binding(self.lists.token_ids)
    }

    pub(crate) fn positions(&self) -> Binding<'_> {
        self.binding(self.lists.positions)
    }

    pub(crate) fn slots(&self) -> Binding<'_> {
        self.binding(self.lists.slots)
    }

    pub(crate) fn outputs(&self) -> Binding<'_> {
        self.binding(self.lists.outputs)
    }

    pub(super) fn block_tables(&self) -> Binding<'_> {
        self.binding(self.lists.block_tables)
    }

    /// Whether some single tokens are of one sequence, so that later ones read keys and values of earlier ones.
    pub(super) fn has_drafts(&self) -> bool {
        self.has_drafts
    }

    /// Single tokens.
    pub(super) fn decode(&self) -> DecodeRows<'_> {
        DecodeRows { begin: 0, rows: &self.decode }
    }

    /// Tokens of the tiles.
    pub(super) fn num_prefill_tokens(&self) -> usize {
        self.prefill.iter().map(|tile| tile.num_tokens as usize).sum()
    }

    /// The tokens of the other sequences, if they are single.
    pub(super) fn prefill_rows(&self) -> DecodeRows<'_> {
        DecodeRows { begin: self.decode.len(), rows: &self.prefill_rows }
    }

    /// Single tokens, from index `first` on.
    pub(super) fn rows_from(&self, rows: DecodeRows<'_>, first: usize) -> Binding<'_> {
        let binding = self.binding(self.lists.decode_rows);
        binding.at(binding.offset + (rows.begin + first) * size_of::<DecodeRow>())
    }

    /// The sequences whose keys and values are expanded.
    pub(super) fn expanded_rows(&self) -> &[ExpandedRow] {
        &self.expanded
    }

    pub(super) fn block_table(&self, row: &ExpandedRow) -> Binding<'_> {
        let binding = self.block_tables();
        binding.at(binding.offset + 4 * row.table_start)
    }

    /// The tiles of the other sequences, from `first` on.
    pub(super) fn prefill_tiles(&self, first: usize) -> Binding<'_> {
        let binding = self.binding(self.lists.prefill_tiles);
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
