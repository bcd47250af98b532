//! Matmuls of BF16 matrices by a matrix unit that multiplies bf16.
//!
//! Its rounding is not that of vectors, so every row goes through it, also a single one. Sums stay in the unit over all
//! columns, in one order for every row. A sum waits for the one before it, so several panels at a time keep the unit busy.

use super::kernels::{PanelOutput, prefetch};
use super::layout::WORD;
use crate::simd::{Bf16Unit, CpuLevel};

/// Panels that are multiplied at once: the maximum whose sums fit into the unit.
pub(super) const PANELS_AT_ONCE: usize = Bf16Unit::MAX_PANELS;

/// Words of a tile: pairs of columns.
const WORDS: usize = 16;
const TILE_BYTES: usize = WORDS * WORD;

/// Sixteen rows of weights and some panels of input rows.
pub(super) struct DenseTiles {
    pub(super) tiles: *const u8,
    /// Pairs of columns.
    pub(super) num_tiles: usize,
    /// The first panel.
    pub(super) panel: *const u8,
    /// Bytes of a panel; the next one follows.
    pub(super) panel_bytes: usize,
    /// Rows of a panel, 1 to 16.
    pub(super) width: usize,
}

impl DenseTiles {
    /// Writes the outputs of `N` panels, 1 or [`PANELS_AT_ONCE`], into their first `width` rows.
    ///
    /// # Safety
    /// The tiles and the panels have the columns of `num_tiles` tiles.
    pub(super) unsafe fn multiply<const N: usize>(self, out: &mut [PanelOutput; N], level: CpuLevel) {
        let Some(mut unit) = level.bf16_unit(self.width) else { return };
        let (mut tiles, mut panel) = (self.tiles, self.panel);
        // SAFETY: the caller's tiles and panels; panels have whole blocks of columns.
        unsafe {
            for _ in 0..self.num_tiles / WORDS {
                prefetch(tiles, TILE_BYTES);
                unit.add::<N>(panel, self.panel_bytes, tiles);
                tiles = tiles.add(TILE_BYTES);
                panel = panel.add(self.width * WORD);
            }
            let rest = self.num_tiles % WORDS;
            if rest > 0 {
                let mut last = [0; TILE_BYTES];
                tiles.copy_to_nonoverlapping(last.as_mut_ptr(), rest * WORD);
                unit.add::<N>(panel, self.panel_bytes, last.as_ptr());
            }
            for (panel, out) in out.iter_mut().enumerate() {
                unit.store(panel, out.as_mut_ptr().cast());
            }
        }
    }
}
