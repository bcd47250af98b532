//! Products of heads, each with a matrix of its own.

use std::ops::Range;

use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context};
use crate::ops::cpu::matmul::{Forms, RowGroup, matmul_groups};
use crate::ops::cpu::rows::RowsMut;
use crate::ops::gpu::{self, Stacked};
use crate::ops::linear::{CpuScratch, LinearScratch, gpu_operands};
use crate::ops::reference;
use crate::ops::weights::MatrixStack;
use crate::{Error, Result};

/// Where the heads of a row are: head `h` begins at `h · stride`.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// `[num_rows, num_heads · stride or more]`.
    pub rows: &'a Buffer,
    /// Values from one head to the next.
    pub stride: usize,
}

/// `out[h] = W[h] · x[h]` for the heads of each of these rows, where the first values of a head of `x` are multiplied and the
/// first ones of a head of `out` are written, whose heads begin `out_stride` values apart.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
pub fn heads_linear(
    context: &Context,
    scratch: &mut LinearScratch,
    rows: Range<usize>,
    x: Heads<'_>,
    heads: &MatrixStack,
    out: &mut Buffer,
    out_stride: usize,
) -> Result<()> {
    let num_heads = heads.len();
    let fits = |width: usize, stride: usize, len: usize| len <= stride && num_heads * stride <= width;
    if !fits(x.rows.width(), x.stride, heads.cols()) || !fits(out.width(), out_stride, heads.rows()) {
        return Err(Error::internal(format!(
            "heads_linear: {num_heads} heads of {} values, {} apart in rows of {}, do not become {} values, \
             {out_stride} apart in rows of {}",
            heads.cols(),
            x.stride,
            x.rows.width(),
            heads.rows(),
            out.width()
        )));
    }
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Reference(backend) => {
            let (values, out) = (x.rows.reference()?, out.reference_mut()?);
            return backend.run(rows.len(), || {
                reference::heads_linear(backend, rows, values, x.stride, heads.reference()?, out, out_stride)
            });
        }
        Backend::Gpu(gpu) => {
            let stacked = Stacked::Heads { num_heads, x_stride: x.stride, out_stride };
            let operands = gpu_operands(scratch, rows.end, x.rows, None, out)?.of_rows(rows);
            return gpu::matmul(
                gpu,
                &[gpu::Part::of_stack(heads.gpu()?)],
                &gpu::Operands { stacked, ..operands },
            );
        }
    };
    let matrices = heads.cpu()?;
    let CpuScratch { activations, groups } = scratch.cpu()?;
    let (first_row, num_rows) = (rows.start, rows.len());
    let rows_of_head = num_rows.next_multiple_of(RowGroup::ALIGNMENT);
    groups.clear();
    groups.extend((0..num_heads).map(|head| RowGroup {
        first_row: head * rows_of_head,
        num_rows,
        matrix: head,
    }));
    let (width, out_width) = (x.rows.width(), out.width());
    let start_of = |row: usize| (first_row + row % rows_of_head) * width + row / rows_of_head * x.stride;
    let forms = Forms::of(matrices.iter().map(|matrix| matrix.dtype()), cpu.level);
    x.rows.read(rows.end, |values| {
        activations.prepare_groups(values, start_of, groups, heads.cols(), None, forms, &cpu.pool, cpu.level);
    })?;
    out.write(rows.end, |out| {
        let out = RowsMut::new(out, out_width);
        let write = |row: usize, first: usize, products: &[f32]| {
            let (head, row) = (row / rows_of_head, first_row + row % rows_of_head);
            // SAFETY: every head of a row has outputs of its own, each of which is written once.
            let part = unsafe { out.part(row, head * out_stride + first, products.len()) };
            part.copy_from_slice(products);
        };
        matmul_groups(activations, groups, |head| &matrices[head], write, &cpu.pool, cpu.level);
    })
}
