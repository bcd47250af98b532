//! The lists of a step, where kernels read them.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable, cast_slice};

use super::attention::GpuAttention;
use super::attention::GpuExpandedAttention;
use super::backend::GpuBackend;
use super::{Binding, GpuBuffer, Placement, Ticket};
use crate::ops::kv_cache::KvCache;
use crate::ops::step_inputs::{InputLimits, InputOps, StepInputs};
use crate::ops::{AttentionMetadata, RowForm};
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

/// Words that a list begins at multiples of.
const LIST_UNIT: usize = 64;

/// Where the lists of the current step begin in their slot, in words.
#[derive(Debug, Clone, Copy, Default)]
struct Lists {
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
        let prefill_form = match layout.has_values {
            true => PrefillForm::Tiles(GpuAttention::tokens_per_tile(
                self,
                heads_per_kv_head,
                dtype,
                layout.head_dim,
            )),
            false => PrefillForm::Latent(GpuExpandedAttention::tokens_per_tile(self, dtype)),
        };
        let StepInputs { token_ids, positions, outputs, attention, .. } = *step;
        inputs.upload(self, token_ids, positions, outputs, attention, prefill_form)
    }
}

/// The lists of the current step and of the one before.
#[derive(Debug)]
pub(crate) struct GpuInputs {
    buffer: GpuBuffer,
    slot_words: usize,
    slot: usize,
    in_use: [Option<Ticket>; NUM_SLOTS],
    lists: Lists,
    /// Tokens of the current step that attend by themselves; of the others, tokens or tiles.
    decode: Vec<DecodeRow>,
    prefill_rows: Vec<DecodeRow>,
    prefill: Vec<PrefillTile>,
    expanded: Vec<ExpandedRow>,
    /// Some of the tokens by themselves read what others of the same step write.
    has_drafts: bool,
    /// All of the lists, as they are written.
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
            lists: Lists::default(),
            decode: Vec::with_capacity(max_num_rows),
            prefill_rows: Vec::with_capacity(max_num_tokens),
            prefill: Vec::with_capacity(max_num_tokens),
            expanded: Vec::with_capacity(max_num_rows),
            has_drafts: false,
            words: Vec::with_capacity(slot_words),
        })
    }

    /// Writes the lists of a step, in the place of those of the step before the last one. Token ids that are not
    /// given are the sampled ones.
    fn upload(
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
        // Block tables come last: the others of a step that only generates are at the same place in every step.
        self.lists = Lists {
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
                "the lists of a step have {} words; there is room for {}",
                self.words.len(),
                self.slot_words
            )));
        }
        gpu.device().write(&self.buffer, 4 * self.slot * self.slot_words, cast_slice(&self.words))
    }

    fn describe_rows(&mut self, attention: &AttentionMetadata, prefill_form: PrefillForm) -> Result<()> {
        self.decode.clear();
        self.prefill_rows.clear();
        self.prefill.clear();
        self.expanded.clear();
        self.has_drafts = false;
        for row in 0..attention.num_rows() {
            let seq_len = attention.seq_lens[row];
            let (Some(&[start, end]), Some(&table_start), Some(form)) = (
                attention.query_start_loc.get(row..row + 2).and_then(<[usize]>::as_array),
                attention.block_table_starts.get(row),
                attention.forms.get(row),
            ) else {
                return Err(Error::internal(format!(
                    "row {row} of a step has no tokens, no block table, or no form"
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
            let tokens_per_tile = match (*form, prefill_form) {
                (RowForm::Decode, _) => {
                    self.decode.extend((start..end).map(row_of));
                    self.has_drafts |= end - start > 1;
                    continue;
                }
                (RowForm::Prefill, PrefillForm::Latent(_)) => {
                    self.prefill_rows.extend((start..end).map(row_of));
                    continue;
                }
                (RowForm::Expanded, PrefillForm::Latent(tokens_per_tile))
                | (_, PrefillForm::Tiles(tokens_per_tile)) => tokens_per_tile,
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

    /// Whether some tokens by themselves are of one sequence, so that the later ones read keys and values of the earlier ones.
    pub(super) fn has_drafts(&self) -> bool {
        self.has_drafts
    }

    /// Tokens by themselves.
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
        let binding = self.binding(self.lists.decode_rows);
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
