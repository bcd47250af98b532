//! GPTQ: codes of two to eight bits, packed along the columns of the matrix, which is stored turned over.
//!
//! `qweight [cols · bits / 32, rows]`, `qzeros [groups, rows · bits / 32]`, `scales [groups, rows]`, and the group of
//! each column where they are in another order (`g_idx`). The first version of the files stores zeros less one, which its
//! writers take from whole words of them where codes fill these.

use std::ops::RangeInclusive;

use ::safetensors::Dtype;

use super::config::QuantConfig;
use super::integers::{Codes, Groups, Integers, Scales, range_of, unpack, unpack_one};
use super::module::{ComponentTensor, Module, WAY_OUT};
use super::packed::Codec;
use crate::{Error, Result};

/// Rows whose codes share a line of the processor's cache.
const ROWS_AT_ONCE: usize = 16;

#[derive(Debug)]
struct Gptq {
    words: ComponentTensor,
    zeros: Option<ComponentTensor>,
    bits: usize,
    /// The offsets of a word of stored zeros, and of a stored zero.
    zero_offset: (u32, i16),
    zero_range: RangeInclusive<i16>,
    rows: usize,
    cols: usize,
}

/// # Errors
/// If the tensors do not match, or the layout is another one.
pub(super) fn open(module: &Module<'_>, config: &QuantConfig) -> Result<Box<dyn Codec>> {
    let words = module.need(".qweight")?.of_type(&[Dtype::I32])?;
    let named = ["checkpoint_format", "packing_format"].iter().find_map(|key| config.str(key));
    let format = match config.bool("is_marlin_format") {
        Some(true) => "marlin",
        _ => named.unwrap_or("gptq"),
    };
    let known = ["gptq", "gptq_v2", "auto_round:gptq", "auto_round:auto_gptq"];
    if !known.contains(&format) {
        return Err(Error::unsupported(format!("tensor {:?} has GPTQ's format {format:?}", words.name()))
            .with_hint(WAY_OUT));
    }
    let [packed_cols, rows] = words.matrix()?;
    let scales = module.need_floats(".scales")?;
    let [num_groups, num_scales] = scales.matrix()?;
    if num_scales != rows {
        return Err(scales.wrong_shape(format!("{:?} has {rows} columns", words.name())));
    }
    let given = config.size(&["bits", "w_bit"])?;
    let zeros = module.get(".qzeros");
    let bits = match zeros {
        Some(zeros) => {
            // Some matrices may have more bits than the configuration's default.
            let num_words = zeros.of_type(&[Dtype::I32])?.matrix()?[1];
            let fits = |bits: &usize| (rows * bits).div_ceil(32) == num_words;
            given.into_iter().chain([4, 8, 2, 3]).find(fits).unwrap_or(0)
        }
        None => given.unwrap_or(4),
    };
    if !(2..=8).contains(&bits) || !(packed_cols * 32).is_multiple_of(bits) {
        return Err(words.wrong_shape(format!("{bits} bits a code do not fit it")));
    }
    if let Some(zeros) = zeros {
        zeros.of_shape(&[num_groups, (rows * bits).div_ceil(32)])?;
    } else if config.bool("sym") != Some(true) {
        module.need(".qzeros")?;
    }
    let cols = packed_cols * 32 / bits;
    let groups = match module.get(".g_idx") {
        Some(list) => Groups::from_list(list, cols, num_groups)?,
        None => Groups::Of(group_len(config, scales, cols, num_groups)?),
    };
    let zero_offset = match format {
        "gptq_v2" => (0, 0),
        _ if 32 % bits == 0 => ((0..32).step_by(bits).fold(0, |ones, bit| ones | 1 << bit), 0),
        _ => (0, 1),
    };
    let mut codes = Gptq {
        words: words.clone(),
        zeros: zeros.cloned(),
        bits,
        zero_offset,
        zero_range: 0..=0,
        rows,
        cols,
    };
    // Words repeat where all zeros are the same, which spares a large model that many looks.
    let repeats = |zeros: &ComponentTensor| {
        32 % bits == 0 && (0..zeros.num_elements()).all(|i| zeros.word(i) == zeros.word(0))
    };
    codes.zero_range = if zeros.is_none_or(repeats) {
        range_of((0..rows.min(32 / bits)).map(|row| codes.zero(row, 0)))
    } else {
        let all = (0..num_groups).flat_map(|group| (0..rows).map(move |row| (row, group)));
        range_of(all.map(|(row, group)| codes.zero(row, group)))
    };
    Ok(Box::new(Integers::new(codes, groups, Scales::ByGroup(scales.clone()), 1.0)))
}

/// Columns of a group, by the configuration and by the number of groups.
pub(super) fn group_len(
    config: &QuantConfig,
    scales: &ComponentTensor,
    cols: usize,
    num_groups: usize,
) -> Result<usize> {
    let given = config.size(&["group_size", "q_group_size"])?.unwrap_or(cols);
    if cols.div_ceil(given) == num_groups {
        return Ok(given);
    }
    // Some matrices may have groups of their own.
    if num_groups > 0 && cols.is_multiple_of(num_groups) {
        return Ok(cols / num_groups);
    }
    Err(scales.wrong_shape(format!("{cols} columns in groups of {given} need {}", cols.div_ceil(given))))
}

impl Codes for Gptq {
    fn method(&self) -> String {
        format!("GPTQ with {} bits", self.bits)
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.rows, self.cols]
    }

    fn rows_at_once(&self) -> usize {
        ROWS_AT_ONCE
    }

    fn codes(&self, row: usize, out: &mut [i16]) {
        let num_words = self.cols * self.bits / 32;
        unpack(self.bits, (0..num_words).map(|index| self.words.word(index * self.rows + row)), out);
    }

    fn zero(&self, row: usize, group: usize) -> i16 {
        let Some(zeros) = &self.zeros else { return 1 << (self.bits - 1) };
        let num_words = zeros.shape()[1];
        let (in_word, in_code) = self.zero_offset;
        let word = |index| zeros.word(group * num_words + index).wrapping_add(in_word);
        (unpack_one(self.bits, word, row) + in_code) & ((1 << self.bits) - 1)
    }

    fn code_range(&self) -> RangeInclusive<i16> {
        0..=(1 << self.bits) - 1
    }

    fn zero_range(&self) -> RangeInclusive<i16> {
        self.zero_range.clone()
    }
}
