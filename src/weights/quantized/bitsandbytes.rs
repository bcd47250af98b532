//! bitsandbytes: codes of four bits into a code book of the file (NF4, FP4), with a scale for blocks of values that pay
//! no heed to rows, which may be quantised in turn; and codes of eight bits with a scale for each row.

use ::safetensors::Dtype;
use serde::Deserialize;

use super::config::QuantConfig;
use super::grid::ScaleGrid;
use super::integers::{Bytes, Groups, Integers, Scales};
use super::module::{ComponentTensor, Module, WAY_OUT};
use super::packed::{Codec, PackedType};
use crate::{Error, Result};

/// A file's description of a matrix, as JSON in a tensor.
#[derive(Debug, Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// The scales of blocks, if they are quantised themselves.
#[derive(Debug)]
struct Nested {
    book: ComponentTensor,
    scales: ComponentTensor,
    block_len: usize,
    offset: f32,
}

#[derive(Debug)]
struct FourBits {
    method: String,
    codes: ComponentTensor,
    shape: Vec<usize>,
    book: [f32; 16],
    scales: ComponentTensor,
    block_len: usize,
    nested: Option<Nested>,
}

/// # Errors
/// If the tensors do not match.
pub(super) fn open_four_bits(module: &Module<'_>, _config: &QuantConfig) -> Result<Box<dyn Codec>> {
    let codes = module.need(".weight")?.of_type(&[Dtype::U8])?;
    let endings = [".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4"];
    let state = module.need(endings.into_iter().find(|ending| module.has(ending)).unwrap_or(endings[0]))?;
    let wrong = |what: String| Error::invalid_model(format!("tensor {:?} {what}", state.name()));
    let State { quant_type, blocksize: block_len, shape, nested_blocksize, nested_offset } =
        serde_json::from_slice(state.of_type(&[Dtype::U8])?.bytes())
            .map_err(|error| wrong(format!("cannot be read: {error}")).with_source(error))?;
    let num_values = shape.iter().try_fold(1_usize, |num, size| num.checked_mul(*size)).unwrap_or(0);
    if shape.len() < 2 || num_values == 0 || codes.num_elements() != num_values.div_ceil(2) {
        return Err(codes.wrong_shape(format!("{:?} declares values of the shape {shape:?}", state.name())));
    }
    if block_len == 0 || nested_blocksize == Some(0) {
        return Err(wrong("has blocks of 0 values".to_owned()));
    }
    let book = module.need_floats(".weight.quant_map")?.of_shape(&[16])?;
    let num_blocks = num_values.div_ceil(block_len);
    let scales = module.need(".weight.absmax")?.of_shape(&[num_blocks])?;
    let nested = if module.has(".weight.nested_absmax") || module.has(".weight.nested_quant_map") {
        let block_len = nested_blocksize.ok_or_else(|| wrong("has no nested_blocksize".to_owned()))?;
        scales.of_type(&[Dtype::U8])?;
        let nested_scales = module.need_floats(".weight.nested_absmax")?;
        Some(Nested {
            book: module.need_floats(".weight.nested_quant_map")?.of_shape(&[256])?.clone(),
            scales: nested_scales.of_shape(&[num_blocks.div_ceil(block_len)])?.clone(),
            block_len,
            offset: nested_offset.unwrap_or(0.0),
        })
    } else {
        scales.of_type(&[Dtype::F32, Dtype::F16, Dtype::BF16])?;
        None
    };
    Ok(Box::new(FourBits {
        method: format!("bitsandbytes {}", quant_type.to_uppercase()),
        codes: codes.clone(),
        shape,
        book: std::array::from_fn(|code| book.float(code)),
        scales: scales.clone(),
        block_len,
        nested,
    }))
}

/// # Errors
/// If the tensors do not match, or the order of the values is that of certain GPUs.
pub(super) fn open_eight_bits(module: &Module<'_>, config: &QuantConfig) -> Result<Box<dyn Codec>> {
    let weight = module.need(".weight")?.of_type(&[Dtype::I8])?;
    let [rows, _] = weight.matrix()?;
    if let Some(format) = module.get(".weight_format")
        && format.bytes().first().is_some_and(|order| *order != 0)
    {
        return Err(Error::unsupported(format!(
            "tensor {:?} declares that {:?} is in an order for certain GPUs",
            format.name(),
            weight.name()
        ))
        .with_hint(WAY_OUT));
    }
    let scales = module.need_floats(".SCB")?.of_shape(&[rows])?;
    let grid = ScaleGrid::new(scales, weight.shape(), config)?;
    let groups = Groups::Of(grid.group_len());
    let codes = Bytes { method: "bitsandbytes with 8 bits", weight: weight.clone(), zeros: None };
    // Scales are the largest values of their rows.
    Ok(Box::new(Integers::new(codes, groups, Scales::Grid(grid), 1.0 / 127.0)))
}

impl FourBits {
    fn scale(&self, block: usize) -> f32 {
        let Some(Nested { book, scales, block_len, offset }) = &self.nested else {
            return self.scales.float(block);
        };
        book.float(usize::from(self.scales.bytes()[block])) * scales.float(block / block_len) + offset
    }
}

impl Codec for FourBits {
    fn method(&self) -> String {
        self.method.clone()
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn packed_type(&self) -> PackedType {
        PackedType::encoded("no type of our own has its code book", self.shape[self.shape.len() - 1])
    }

    fn values(&self, row: usize, out: &mut [f32]) {
        let first = row * out.len();
        let mut known = (usize::MAX, 0.0);
        for (index, out) in (first..).zip(out) {
            let block = index / self.block_len;
            if known.0 != block {
                known = (block, self.scale(block));
            }
            let byte = self.codes.bytes()[index / 2];
            // The upper half comes first.
            let code = if index.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
            *out = self.book[usize::from(code)] * known.1;
        }
    }
}
