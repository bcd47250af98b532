//! Integer codes with scales: `value = scale · (code − zero)`, for each row and group of columns.
//!
//! Such a matrix is one of our own types exactly if the codes less their zeros have few enough bits, groups are whole
//! blocks, and scales are numbers of half precision.

use std::ops::RangeInclusive;

use ::safetensors::Dtype;
use half::f16;

use super::config::QuantConfig;
use super::grid::ScaleGrid;
use super::module::{ComponentTensor, Module};
use super::packed::{Codec, Fidelity, PackedType};
use crate::weights::{DType, blocks};
use crate::{Error, Result};

/// Values of a block of the types that hold integers.
const BLOCK_LEN: usize = 32;

/// How a method stores codes.
pub(super) trait Codes: std::fmt::Debug + Send + Sync {
    /// The method, in words.
    fn method(&self) -> String;

    /// Dimensions of the tensor.
    fn shape(&self) -> Vec<usize>;

    /// The number of rows that are interleaved.
    fn rows_at_once(&self) -> usize;

    /// The stored codes of a row.
    fn codes(&self, row: usize, out: &mut [i16]);

    /// The zero point of a row and a group of columns.
    fn zero(&self, row: usize, group: usize) -> i16;

    /// The least and the largest code.
    fn code_range(&self) -> RangeInclusive<i16>;

    /// The least and the largest zero.
    fn zero_range(&self) -> RangeInclusive<i16>;
}

/// Where scales are.
#[derive(Debug)]
pub(super) enum Scales {
    Grid(ScaleGrid),
    /// `[groups, rows]`
    ByGroup(ComponentTensor),
}

/// Which group a column belongs to.
#[derive(Debug)]
pub(super) enum Groups {
    /// This many columns each.
    Of(usize),
    /// Any, for each column.
    Any(Vec<u32>),
}

impl Groups {
    /// From a list of the groups of all columns, of which there are `num`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if it names a group that is not there.
    pub(super) fn from_list(list: &ComponentTensor, cols: usize, num: usize) -> Result<Self> {
        list.of_type(&[Dtype::I32, Dtype::U32])?.of_shape(&[cols])?;
        let groups: Vec<u32> = (0..cols).map(|col| list.word(col)).collect();
        if let Some(col) = groups.iter().position(|group| *group as usize >= num) {
            return Err(Error::invalid_model(format!(
                "tensor {:?} puts column {col} into group {}, but there are {num} groups",
                list.name(),
                groups[col].cast_signed()
            )));
        }
        let len = cols.div_ceil(num.max(1));
        let in_order = groups.iter().enumerate().all(|(col, group)| col / len == *group as usize);
        Ok(if in_order { Self::Of(len) } else { Self::Any(groups) })
    }

    fn of(&self, col: usize) -> usize {
        match self {
            Self::Of(len) => col / len,
            Self::Any(groups) => groups[col] as usize,
        }
    }

    /// Whether each block of columns is of one group.
    fn are_whole_blocks(&self, cols: usize) -> bool {
        let same = |groups: &[u32]| groups.iter().all(|group| *group == groups[0]);
        match self {
            Self::Of(len) => len.is_multiple_of(BLOCK_LEN) || *len >= cols,
            Self::Any(groups) => groups.chunks(BLOCK_LEN).all(same),
        }
    }
}

/// Codes with their scales.
#[derive(Debug)]
pub(super) struct Integers<C> {
    codes: C,
    groups: Groups,
    scales: Scales,
    /// The factor of scales.
    factor: f32,
    packed_type: PackedType,
}

impl<C: Codes> Integers<C> {
    /// The tensors have to match.
    pub(super) fn new(codes: C, groups: Groups, scales: Scales, factor: f32) -> Self {
        let (all, zeros) = (codes.code_range(), codes.zero_range());
        let [least, most] = [all.start() - zeros.end(), all.end() - zeros.start()];
        let fits =
            |dtype: &&(DType, RangeInclusive<i16>)| dtype.1.contains(&least) && dtype.1.contains(&most);
        let types = [(DType::Q4_0, -8..=7), (DType::Q5_0, -16..=15), (DType::Q8_0, -128..=127)];
        let cols = codes.shape().last().copied().unwrap_or(0);
        let packed_type = match types.iter().find(fits) {
            Some((dtype, _)) if cols.is_multiple_of(BLOCK_LEN) && groups.are_whole_blocks(cols) => {
                let part = match &scales {
                    Scales::Grid(grid) => grid.part(),
                    Scales::ByGroup(part) => part,
                };
                let is_exact = match part.dtype() {
                    Dtype::F16 | Dtype::F8_E4M3 => factor == 1.0,
                    _ => (0..part.num_elements()).all(|index| is_f16(part.float(index) * factor)),
                };
                let fidelity = if is_exact { Fidelity::Exact } else { Fidelity::RoundedScales };
                PackedType { dtype: *dtype, fidelity }
            }
            Some(_) => PackedType::encoded("its groups of columns are no whole blocks of 32", cols),
            None => PackedType::encoded("its codes less their zeros have more than eight bits", cols),
        };
        Self { codes, groups, scales, factor, packed_type }
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        let scale = match &self.scales {
            Scales::Grid(grid) => grid.scale(row, group),
            Scales::ByGroup(part) => part.float(group * part.shape()[1] + row),
        };
        scale * self.factor
    }
}

fn is_f16(value: f32) -> bool {
    f16::from_f32(value).to_f32() == value
}

impl<C: Codes> Codec for Integers<C> {
    fn method(&self) -> String {
        self.codes.method()
    }

    fn shape(&self) -> Vec<usize> {
        self.codes.shape()
    }

    fn packed_type(&self) -> PackedType {
        self.packed_type
    }

    fn rows_at_once(&self) -> usize {
        self.codes.rows_at_once()
    }

    fn values(&self, row: usize, out: &mut [f32]) {
        let mut codes = vec![0; out.len()];
        self.codes.codes(row, &mut codes);
        let of_group = |group: usize| (self.codes.zero(row, group), self.scale(row, group));
        let value = |code: &i16, (zero, scale): (i16, f32)| f32::from(code - zero) * scale;
        match &self.groups {
            Groups::Of(len) => {
                for (group, (out, codes)) in out.chunks_mut(*len).zip(codes.chunks(*len)).enumerate() {
                    let of_group = of_group(group);
                    out.iter_mut().zip(codes).for_each(|(out, code)| *out = value(code, of_group));
                }
            }
            Groups::Any(groups) => {
                let num_groups = groups.iter().max().map_or(0, |last| *last as usize + 1);
                let all: Vec<_> = (0..num_groups).map(of_group).collect();
                for ((out, code), group) in out.iter_mut().zip(&codes).zip(groups) {
                    *out = value(code, all[*group as usize]);
                }
            }
        }
    }

    fn blocks(&self, row: usize, values: &mut [f32], out: &mut [u8]) -> Result<()> {
        let dtype = self.packed_type.dtype;
        if let Fidelity::Encoded(_) = self.packed_type.fidelity {
            self.values(row, values);
            return blocks::quantize(dtype, values, out);
        }
        let mut codes = vec![0; values.len()];
        self.codes.codes(row, &mut codes);
        let blocks_of_codes = codes.as_chunks::<BLOCK_LEN>().0.iter().enumerate();
        for ((index, codes), out) in blocks_of_codes.zip(out.chunks_exact_mut(dtype.block_bytes())) {
            let group = self.groups.of(index * BLOCK_LEN);
            let zero = self.codes.zero(row, group);
            // In range, or the format would be another one.
            let codes = codes.map(|code| (code - zero) as i8);
            blocks::pack(dtype, self.scale(row, group), &codes, out)?;
        }
        Ok(())
    }
}

/// Codes of this many bits each, one after the other in words whose lowest bits come first.
pub(super) fn unpack(bits: usize, words: impl IntoIterator<Item = u32>, out: &mut [i16]) {
    let mask = (1_u64 << bits) - 1;
    let (mut buffer, mut have) = (0_u64, 0);
    let mut words = words.into_iter();
    for out in out {
        if have < bits {
            buffer |= u64::from(words.next().unwrap_or(0)) << have;
            have += 32;
        }
        *out = (buffer & mask) as i16;
        buffer >>= bits;
        have -= bits;
    }
}

/// Code `index` of such a sequence of words.
pub(super) fn unpack_one(bits: usize, word: impl Fn(usize) -> u32, index: usize) -> i16 {
    let (first, shift) = (index * bits / 32, index * bits % 32);
    let low = u64::from(word(first)) >> shift;
    let high = if shift + bits > 32 { u64::from(word(first + 1)) << (32 - shift) } else { 0 };
    ((low | high) & ((1 << bits) - 1)) as i16
}

/// Codes in 32-bit words along the rows: compressed-tensors' `pack-quantized`.
#[derive(Debug)]
struct Compressed {
    words: ComponentTensor,
    bits: usize,
    shape: Vec<usize>,
    /// `[rows · bits / 32, groups]`, packed along the columns.
    zeros: Option<ComponentTensor>,
    zero_range: RangeInclusive<i16>,
}

/// # Errors
/// If the tensors do not match.
pub(super) fn open_compressed(module: &Module<'_>, config: &QuantConfig) -> Result<Box<dyn Codec>> {
    let words = module.need(".weight_packed")?.of_type(&[Dtype::I32])?;
    let shape = shape_of(module.need(".weight_shape")?)?;
    let &[ref stack @ .., rows, cols] = &shape[..] else {
        return Err(words.wrong_shape("it has to be a matrix"));
    };
    let packed_cols = words.shape().last().copied().unwrap_or(0);
    let bits =
        (1..=8).find(|bits| cols.checked_mul(*bits).map(|bits| bits.div_ceil(32)) == Some(packed_cols));
    let misfit = || words.wrong_shape(format!("weight_shape is {shape:?}"));
    let bits = bits.ok_or_else(misfit)?;
    words.of_shape(&[stack, &[rows, packed_cols]].concat()).map_err(|_| misfit())?;
    let grid = ScaleGrid::new(module.need_floats(".weight_scale")?, &shape, config)?;
    let num_groups = cols.div_ceil(grid.group_len());
    let middle = 1 << (bits - 1);
    let zeros = module.get(".weight_zero_point");
    let zero_range = match zeros {
        None => middle..=middle,
        Some(zeros) if stack.is_empty() => {
            zeros.of_type(&[Dtype::I32])?.of_shape(&[(rows * bits).div_ceil(32), num_groups])?;
            let all = (0..num_groups).flat_map(|group| (0..rows).map(move |row| (row, group)));
            range_of(all.map(|(row, group)| zero_of(zeros, bits, row, group)))
        }
        Some(zeros) => return Err(zeros.wrong_shape("zeros of a stack of matrices cannot be read")),
    };
    let groups = match module.get(".weight_g_idx") {
        // Unused lists have -1 everywhere.
        Some(list) if !list.bytes().iter().all(|byte| *byte == 255) => {
            Groups::from_list(list, cols, num_groups)?
        }
        _ => Groups::Of(grid.group_len()),
    };
    let codes =
        Compressed { words: words.clone(), bits, shape: shape.clone(), zeros: zeros.cloned(), zero_range };
    Ok(Box::new(Integers::new(codes, groups, Scales::Grid(grid), 1.0)))
}

/// The numbers of a tensor that holds a shape.
fn shape_of(part: &ComponentTensor) -> Result<Vec<usize>> {
    part.of_type(&[Dtype::I64, Dtype::I32])?;
    let len = if part.dtype() == Dtype::I64 { 8 } else { 4 };
    let sizes: Vec<usize> = part
        .bytes()
        .chunks_exact(len)
        .map(|bytes| bytes.iter().rev().fold(0_u64, |value, byte| (value << 8) | u64::from(*byte)))
        .map(|value| usize::try_from(value).unwrap_or(usize::MAX))
        .collect();
    let num = sizes.iter().try_fold(1_usize, |num, size| num.checked_mul(*size));
    if sizes.len() < 2 || num.is_none_or(|num| num == 0 || num > isize::MAX as usize) {
        return Err(Error::invalid_model(format!(
            "tensor {:?} has {sizes:?}, which is not a shape",
            part.name()
        )));
    }
    Ok(sizes)
}

fn zero_of(zeros: &ComponentTensor, bits: usize, row: usize, group: usize) -> i16 {
    let num_groups = zeros.shape()[1];
    unpack_one(bits, |index| zeros.word(index * num_groups + group), row)
}

pub(super) fn range_of(values: impl Iterator<Item = i16>) -> RangeInclusive<i16> {
    let (least, most) =
        values.fold((i16::MAX, i16::MIN), |(least, most), value| (least.min(value), most.max(value)));
    least..=most
}

impl Codes for Compressed {
    fn method(&self) -> String {
        format!("compressed-tensors with {} bits", self.bits)
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn rows_at_once(&self) -> usize {
        1
    }

    fn codes(&self, row: usize, out: &mut [i16]) {
        let len = self.words.shape().last().copied().unwrap_or(0);
        unpack(self.bits, (row * len..(row + 1) * len).map(|index| self.words.word(index)), out);
    }

    fn zero(&self, row: usize, group: usize) -> i16 {
        match &self.zeros {
            Some(zeros) => zero_of(zeros, self.bits, row, group),
            None => *self.zero_range.start(),
        }
    }

    fn code_range(&self) -> RangeInclusive<i16> {
        0..=(1 << self.bits) - 1
    }

    fn zero_range(&self) -> RangeInclusive<i16> {
        self.zero_range.clone()
    }
}

/// Codes in bytes: compressed-tensors' `int-quantized`, bitsandbytes with eight bits.
#[derive(Debug)]
pub(super) struct Bytes {
    pub(super) method: &'static str,
    pub(super) weight: ComponentTensor,
    /// Of the same positions as scales.
    pub(super) zeros: Option<(ComponentTensor, ScaleGrid)>,
}

/// # Errors
/// If the tensors do not match.
pub(super) fn open_bytes(module: &Module<'_>, config: &QuantConfig) -> Result<Box<dyn Codec>> {
    let weight = module.need(".weight")?;
    if weight.shape().len() < 2 || weight.num_elements() == 0 {
        return Err(weight.wrong_shape("it has to be a matrix"));
    }
    let scales = module.need_floats(".weight_scale")?;
    let grid = ScaleGrid::new(scales, weight.shape(), config)?;
    let zeros = module.get(".weight_zero_point").map(|zeros| {
        zeros.of_type(&[Dtype::I8])?.of_shape(scales.shape())?;
        Ok::<_, Error>((zeros.clone(), grid.clone()))
    });
    let groups = Groups::Of(grid.group_len());
    let codes =
        Bytes { method: "compressed-tensors with 8 bits", weight: weight.clone(), zeros: zeros.transpose()? };
    Ok(Box::new(Integers::new(codes, groups, Scales::Grid(grid), 1.0)))
}

fn signed(byte: u8) -> i16 {
    i16::from(byte.cast_signed())
}

impl Codes for Bytes {
    fn method(&self) -> String {
        self.method.to_owned()
    }

    fn shape(&self) -> Vec<usize> {
        self.weight.shape().to_vec()
    }

    fn rows_at_once(&self) -> usize {
        1
    }

    fn codes(&self, row: usize, out: &mut [i16]) {
        let bytes = &self.weight.bytes()[row * out.len()..][..out.len()];
        out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = signed(*byte));
    }

    fn zero(&self, row: usize, group: usize) -> i16 {
        self.zeros.as_ref().map_or(0, |(zeros, grid)| signed(zeros.bytes()[grid.index(row, group)]))
    }

    fn code_range(&self) -> RangeInclusive<i16> {
        -128..=127
    }

    fn zero_range(&self) -> RangeInclusive<i16> {
        match &self.zeros {
            Some((zeros, _)) => range_of(zeros.bytes().iter().map(|byte| signed(*byte))),
            None => 0..=0,
        }
    }
}
