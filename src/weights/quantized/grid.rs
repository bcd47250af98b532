//! Scales for chunks of a matrix: one for all, for each row, for groups of columns, or for blocks of both.

use super::config::QuantConfig;
use super::module::ComponentTensor;
use crate::Result;

/// Where the scale of a value is.
#[derive(Debug, Clone)]
pub(super) struct ScaleGrid {
    scales: ComponentTensor,
    /// Rows of a matrix of the stack.
    num_rows: usize,
    /// Rows and columns of a matrix that share a scale.
    block: [usize; 2],
    /// Scales of a matrix, in rows of this many columns.
    shape: [usize; 2],
    /// One if all matrices of the stack share theirs.
    num_matrices: usize,
}

impl ScaleGrid {
    /// The scales of a tensor of this shape, which has at least two dimensions. Whether they are for rows, columns or
    /// blocks is given by their number.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if they fit none of these.
    pub(super) fn new(scales: &ComponentTensor, shape: &[usize], config: &QuantConfig) -> Result<Self> {
        let (&[rows, cols], stack) = shape.split_last_chunk().map_or((&[1, 1], &[][..]), |(a, b)| (b, a));
        let num_matrices: usize = stack.iter().product();
        let misfit = || {
            scales.wrong_shape(format!(
                "scales for {shape:?} values are one, one for each row, or one for each block of them"
            ))
        };
        let own = scales.shape();
        let (own_matrices, own_grid) = match num_matrices {
            _ if scales.num_elements() == 1 => (1, &[][..]),
            1 if !stack.is_empty() && own.len() == shape.len() && own.starts_with(stack) => {
                (1, &own[stack.len()..])
            }
            1 => (1, own),
            _ if own.first() == Some(&num_matrices) => (num_matrices, &own[1..]),
            _ => return Err(misfit()),
        };
        let grid = match *own_grid {
            [] => [1, 1],
            [grid_rows] => [grid_rows, 1],
            [grid_rows, grid_cols] => [grid_rows, grid_cols],
            _ => return Err(misfit()),
        };
        let block = config.block();
        let size_of = |len: usize, num: usize, given: Option<usize>| match given {
            _ if num == 1 => Some(len),
            _ if num == len => Some(1),
            Some(size) if len.div_ceil(size) == num => Some(size),
            _ => (num > 0 && len.is_multiple_of(num)).then(|| len / num),
        };
        let row_block = size_of(rows, grid[0], block.map(|[rows, _]| rows)).ok_or_else(misfit)?;
        let col_block = size_of(cols, grid[1], block.map(|[_, cols]| cols)).ok_or_else(misfit)?;
        Ok(Self {
            scales: scales.clone(),
            num_rows: rows,
            block: [row_block.max(1), col_block.max(1)],
            shape: grid,
            num_matrices: own_matrices,
        })
    }

    /// Columns that share a scale.
    pub(super) fn group_len(&self) -> usize {
        self.block[1]
    }

    /// The scale of a group of columns in a row, counted over all matrices.
    pub(super) fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.float(self.index(row, group))
    }

    /// The index of that scale.
    pub(super) fn index(&self, row: usize, group: usize) -> usize {
        let [grid_rows, grid_cols] = self.shape;
        let matrix = if self.num_matrices == 1 { 0 } else { row / self.num_rows };
        let row = row % self.num_rows.max(1);
        (matrix * grid_rows + row / self.block[0]) * grid_cols + group
    }

    pub(super) fn part(&self) -> &ComponentTensor {
        &self.scales
    }
}
