//! Input rows in the format that the kernels read.
//!
//! Rows are grouped into panels of eight (four on machines with few registers; sixteen with a matrix unit), and the
//! remaining rows into panels of half that width, and so on to one: the widths of the kernels. Panels of int8 and of
//! bf16 interleave their rows, so that a kernel reads all of them at fixed offsets from one pointer; f32 rows are
//! sequential. The stored values of a row depend on that row alone ([`super::prepare`]).

use std::ops::Range;

use super::grouped::RowGroup;
use super::prepare::{DenseRow, PanelRow, PrepareRows, Target, TileRow};
use crate::DType;
use crate::memory::{AlignedBuffer, SharedPointer};
use crate::pool::ThreadPool;
use crate::simd::CpuLevel;

/// Rows of the widest panel.
pub(super) const MAX_PANEL: usize = 16;
/// Rows of the widest panel that is multiplied by vectors.
pub(super) const VECTOR_PANEL: usize = 8;
/// The number of rows from which the matrix unit is faster than vectors, because its weights are unpacked once for all
/// rows. On an Intel Xeon of family 6, model 207 with two threads (`cargo bench --bench matmul`), 32 rows took the same
/// time on both, and 48 rows took three quarters to nine tenths of the time.
const MIN_TILE_ROWS: usize = 48;
/// Columns that share a scale in the int8 format.
pub(super) const BLOCK: usize = 32;
/// Bytes of one row in one block of a panel: 32 codes, f32 scale, f32 scale · sum, i32 sum, i32 sum of the
/// first sixteen codes. In a panel of P rows, each of these five is an array of P.
pub(super) const BLOCK_BYTES: usize = BLOCK + 16;

/// Inputs up to this many values are prepared by the calling thread alone: some ten microseconds.
const SERIAL_VALUES: usize = 1 << 14;

/// The formats in which kernels read rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ActivationFormats {
    /// f32.
    pub dense: bool,
    /// 8 bits in blocks of 32 with an f32 scale.
    pub int8: bool,
    /// bf16.
    pub bf16: bool,
}

impl ActivationFormats {
    /// The formats for matmuls with matrices of these types.
    #[must_use]
    pub fn of(dtypes: impl IntoIterator<Item = DType>, level: CpuLevel) -> Self {
        let mut formats = Self::default();
        for dtype in dtypes {
            match dtype {
                _ if dtype.is_quantized() => formats.int8 = true,
                DType::BF16 if level.has_bf16_dot() => formats.bf16 = true,
                _ => formats.dense = true,
            }
        }
        formats
    }

    /// The formats for matmuls with matrices of any type.
    #[must_use]
    pub fn all(level: CpuLevel) -> Self {
        Self { dense: true, int8: true, bf16: level.has_bf16_dot() }
    }

    fn include(self, wanted: Self) -> bool {
        (self.dense || !wanted.dense) && (self.int8 || !wanted.int8) && (self.bf16 || !wanted.bf16)
    }
}

/// Rows in the formats that matmuls with weights read.
///
/// Memory is kept from one use to the next.
pub struct Activations {
    rows: usize,
    cols: usize,
    formats: ActivationFormats,
    /// [rows][cols, padded to even] of f32.
    dense: AlignedBuffer,
    /// [panels][blocks][panel rows × `BLOCK_BYTES`].
    int8: AlignedBuffer,
    /// [panels][pairs of columns][panel rows] of two bf16; for a matrix unit [panels][blocks][panel rows][32].
    bf16: AlignedBuffer,
    /// Columns of the bf16 format.
    bf16_cols: usize,
}

impl std::fmt::Debug for Activations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Activations({} × {}, {:?})", self.rows, self.cols, self.formats)
    }
}

impl Default for Activations {
    fn default() -> Self {
        Self::new()
    }
}

impl Activations {
    /// No rows.
    #[must_use]
    pub fn new() -> Self {
        Self {
            rows: 0,
            cols: 0,
            formats: ActivationFormats::default(),
            dense: AlignedBuffer::empty(),
            int8: AlignedBuffer::empty(),
            bf16: AlignedBuffer::empty(),
            bf16_cols: 0,
        }
    }

    /// Rows that were loaded.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns that were loaded.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Reserves space for `rows` × `cols` values in these formats. The memory is touched when it is used.
    ///
    /// # Panics
    /// If there is no memory, as in `Vec`.
    pub fn reserve(&mut self, rows: usize, cols: usize, formats: ActivationFormats) {
        if formats.dense {
            reserve(&mut self.dense, rows * padded(cols) * size_of::<f32>());
        }
        if formats.int8 {
            reserve(&mut self.int8, rows * cols.div_ceil(BLOCK) * BLOCK_BYTES);
        }
        if formats.bf16 {
            reserve(&mut self.bf16, rows * cols.next_multiple_of(BLOCK) * size_of::<u16>());
        }
    }

    /// Loads `rows` × `cols` values from `x`, whose rows start `stride` values apart, in the given formats.
    ///
    /// With `norm` = (weights, epsilon) each row x becomes weights · x / sqrt(mean(x²) + epsilon). Does not
    /// allocate if there is space.
    ///
    /// # Panics
    /// If `x` or the weights of the norm are too short, `cols` is not a multiple of 32 for int8, or there is
    /// no memory.
    #[expect(clippy::too_many_arguments, reason = "one call describes one fused operation")]
    pub fn prepare(
        &mut self,
        x: &[f32],
        stride: usize,
        rows: usize,
        cols: usize,
        norm: Option<(&[f32], f32)>,
        formats: ActivationFormats,
        pool: &ThreadPool,
        level: CpuLevel,
    ) {
        assert!(
            rows == 0 || x.len() >= (rows - 1) * stride + cols,
            "{rows} rows of {cols} do not fit the input"
        );
        let all = RowGroup { first_row: 0, num_rows: rows, matrix: 0 };
        self.prepare_groups(x, |row| row * stride, &[all], cols, norm, formats, pool, level);
    }

    /// The same for rows in groups, each of which begins a panel: row `r` of a group is the `cols` values of `x` from
    /// `start_of(r)` on. Rows between groups are not prepared.
    ///
    /// # Panics
    /// As [`Self::prepare`], or if a group does not begin at a multiple of [`RowGroup::ALIGNMENT`].
    #[expect(clippy::too_many_arguments, reason = "one call describes one fused operation")]
    pub fn prepare_groups(
        &mut self,
        x: &[f32],
        start_of: impl Fn(usize) -> usize + Sync,
        groups: &[RowGroup],
        cols: usize,
        norm: Option<(&[f32], f32)>,
        formats: ActivationFormats,
        pool: &ThreadPool,
        level: CpuLevel,
    ) {
        assert!(
            norm.is_none_or(|(weights, _)| weights.len() == cols),
            "the norm does not have {cols} weights"
        );
        assert!(
            !formats.int8 || cols.is_multiple_of(BLOCK),
            "{cols} columns are not whole blocks of {BLOCK}"
        );
        let aligned = |group: &RowGroup| group.first_row.is_multiple_of(RowGroup::ALIGNMENT);
        assert!(groups.iter().all(aligned), "a group begins within a panel");
        let rows = groups.iter().map(RowGroup::end_row).max().unwrap_or(0);
        self.reserve(rows, cols, formats);
        let bf16_cols = if level.has_matrix_unit() { cols.next_multiple_of(BLOCK) } else { padded(cols) };
        (self.rows, self.cols, self.formats, self.bf16_cols) = (rows, cols, formats, bf16_cols);
        let dense = SharedPointer::new(self.dense.as_mut_ptr().cast::<f32>());
        let int8 = SharedPointer::new(self.int8.as_mut_ptr());
        let bf16 = SharedPointer::new(self.bf16.as_mut_ptr().cast::<u32>());
        // Rows of one panel.
        let prepare_panel = |group: &RowGroup, rows: Range<usize>, first_row: usize, width: usize| {
            let inputs: [&[f32]; MAX_PANEL] = std::array::from_fn(|index| match rows.start + index {
                row if row < rows.end => &x[start_of(group.first_row + row)..][..cols],
                _ => &[],
            });
            let inputs = &inputs[..rows.len()];
            let index_in_panel = rows.start - first_row;
            let (index, first_row) = (group.first_row + rows.start, group.first_row + first_row);
            // SAFETY: the buffers of these formats have space for `rows` rows; a panel starts where the previous rows
            // end, and each task writes its own rows.
            unsafe {
                if formats.dense {
                    let target =
                        |next: usize| DenseRow(dense.get().wrapping_add((index + next) * padded(cols)));
                    prepare(inputs, norm, target, |kernel| level.run(kernel));
                }
                if formats.int8 {
                    let panel = int8.get().add(first_row * cols / BLOCK * BLOCK_BYTES);
                    let target = |next: usize| PanelRow { panel, width, index: index_in_panel + next };
                    prepare(inputs, norm, target, |kernel| level.run(kernel));
                }
                if formats.bf16 {
                    let panel = bf16.get().add(first_row * bf16_cols / 2);
                    if level.has_matrix_unit() {
                        let target = |next: usize| TileRow { panel, width, index: index_in_panel + next };
                        prepare(inputs, norm, target, |kernel| level.run_tiles(kernel));
                    } else {
                        let target = |next: usize| PanelRow { panel, width, index: index_in_panel + next };
                        prepare(inputs, norm, target, |kernel| level.run(kernel));
                    }
                }
            }
        };
        let prepare_rows = |group: &RowGroup, rows: Range<usize>| {
            let mut start = rows.start;
            while start < rows.end {
                let widest = widest_panel(group.num_rows, level);
                let (first_row, width) = panel_of(start, group.num_rows, widest);
                let end = rows.end.min(first_row + width);
                prepare_panel(group, start..end, first_row, width);
                start = end;
            }
        };
        let num_rows: usize = groups.iter().map(|group| group.num_rows).sum();
        // Waking the other threads costs more than a few rows.
        if num_rows * cols <= SERIAL_VALUES {
            groups.iter().for_each(|group| prepare_rows(group, 0..group.num_rows));
            return;
        }
        // Whole panels, as long as there are some for each thread.
        let rows_per_task = (num_rows / (4 * pool.num_threads())).next_power_of_two().min(MAX_PANEL);
        let num_tasks = |group: &RowGroup| group.num_rows.div_ceil(rows_per_task);
        pool.run(groups.iter().map(num_tasks).sum(), |mut task| {
            for group in groups {
                if task < num_tasks(group) {
                    let start = task * rows_per_task;
                    return prepare_rows(group, start..group.num_rows.min(start + rows_per_task));
                }
                task -= num_tasks(group);
            }
        });
    }

    /// True if the rows were loaded in these formats.
    pub(super) fn has(&self, formats: ActivationFormats) -> bool {
        self.formats.include(formats)
    }

    /// Bytes of a row in the largest format that was loaded.
    pub(super) fn row_bytes(&self) -> usize {
        match self.formats {
            ActivationFormats { dense: true, .. } => self.dense_stride(),
            ActivationFormats { bf16: true, .. } => self.dense_stride() / 2,
            _ => self.cols / BLOCK * BLOCK_BYTES,
        }
    }

    /// The f32 rows from `first_row`.
    pub(super) fn dense_panel(&self, first_row: usize) -> *const f32 {
        self.dense.as_ptr().cast::<f32>().wrapping_add(first_row * padded(self.cols))
    }

    /// Bytes between f32 rows.
    pub(super) fn dense_stride(&self) -> usize {
        padded(self.cols) * size_of::<f32>()
    }

    /// The int8 panel that starts at `first_row`.
    pub(super) fn int8_panel(&self, first_row: usize) -> *const u8 {
        self.int8.as_ptr().wrapping_add(first_row * self.cols / BLOCK * BLOCK_BYTES)
    }

    /// The bf16 panel that starts at `first_row`.
    pub(super) fn bf16_panel(&self, first_row: usize) -> *const u8 {
        self.bf16.as_ptr().wrapping_add(first_row * self.bf16_cols * size_of::<u16>())
    }
}

/// Calls `run` with a function that writes `rows` to their targets.
fn prepare<'a, T: Target>(
    rows: &'a [&'a [f32]],
    norm: Option<(&'a [f32], f32)>,
    target_of: impl Fn(usize) -> T,
    run: impl FnOnce(PrepareRows<'_, T>),
) {
    let targets: [T; MAX_PANEL] = std::array::from_fn(target_of);
    run(PrepareRows { rows, norm, targets: &targets[..rows.len()] });
}

/// The panels of rows `start..end` as (first row, rows); `start` is a multiple of `widest`.
pub(super) fn panels(start: usize, end: usize, widest: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut next = start;
    std::iter::from_fn(move || {
        let width = match end - next {
            0 => return None,
            1 => 1,
            2..4 => 2,
            4..8 => 4,
            8..16 => widest.min(VECTOR_PANEL),
            _ => widest,
        };
        next += width;
        Some((next - width, width))
    })
}

/// The panel of row `row` of `rows` as (first row, rows).
fn panel_of(row: usize, rows: usize, widest: usize) -> (usize, usize) {
    let own = |(first, width): &(usize, usize)| row < first + width;
    panels(row / widest * widest, rows, widest).find(own).unwrap_or((row, 1))
}

/// Rows of the widest panel of a group of `num_rows` rows: those of a tile of the matrix unit, or the maximum whose
/// sums a kernel keeps in registers.
pub(super) fn widest_panel(num_rows: usize, level: CpuLevel) -> usize {
    match level {
        _ if level.has_matrix_unit() && num_rows >= MIN_TILE_ROWS => MAX_PANEL,
        _ if level.has_32_vectors() => VECTOR_PANEL,
        _ => VECTOR_PANEL / 2,
    }
}

/// BF16 weights come in pairs of columns.
pub(super) fn padded(cols: usize) -> usize {
    cols.next_multiple_of(2)
}

fn reserve(buffer: &mut AlignedBuffer, len: usize) {
    if buffer.len() < len {
        // The old memory goes first; its content is not needed.
        *buffer = AlignedBuffer::empty();
        // Running out of memory here is the same as in `Vec`.
        *buffer =
            AlignedBuffer::zeroed(len).unwrap_or_else(|| panic!("no memory for {len} bytes of activations"));
    }
}
