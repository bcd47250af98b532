//! AWQ: codes of four bits, eight rows of the matrix in a word, which is stored turned over.
//!
//! `qweight [cols, rows / 8]`, `qzeros [groups, rows / 8]`, `scales [groups, rows]`.

use std::ops::RangeInclusive;

use ::safetensors::Dtype;

use super::config::QuantConfig;
use super::gptq::group_len;
use super::integers::{Codes, Groups, Integers, Scales, range_of};
use super::module::{ComponentTensor, Module, WAY_OUT};
use super::packed::Codec;
use crate::{Error, Result};

/// Which four bits of a word, counted from the lowest, belong to each of its eight rows: rows are in the order
/// 0, 2, 4, 6, 1, 3, 5, 7.
const NIBBLES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Rows whose codes share a line of the processor's cache.
const ROWS_AT_ONCE: usize = 128;

#[derive(Debug)]
struct Awq {
    words: ComponentTensor,
    zeros: ComponentTensor,
    zero_range: RangeInclusive<i16>,
    rows: usize,
    cols: usize,
}

/// Whether `qweight` is AWQ's and not GPTQ's, which has as many columns as there are scales.
pub(super) fn is_packed_like_this(module: &Module<'_>, config: &QuantConfig) -> bool {
    match (
        module.get(".qweight").map(ComponentTensor::shape),
        module.get(".scales").map(ComponentTensor::shape),
    ) {
        (Some(&[_, words]), Some(&[_, rows])) if words == rows => false,
        (Some(&[_, words]), Some(&[_, rows])) if words.checked_mul(8) == Some(rows) => true,
        _ => config.method().is_some_and(|method| method.contains("awq")) || config.str("version").is_some(),
    }
}

/// # Errors
/// If the tensors do not match, or the layout is another one.
pub(super) fn open(module: &Module<'_>, config: &QuantConfig) -> Result<Box<dyn Codec>> {
    let words = module.need(".qweight")?.of_type(&[Dtype::I32])?;
    let bits = config.size(&["bits", "w_bit"])?.unwrap_or(4);
    let version = config.str("version").unwrap_or("gemm").to_ascii_lowercase();
    if bits != 4 || !["gemm", "exllama"].contains(&&*version) {
        return Err(Error::unsupported(format!(
            "tensor {:?} has AWQ's version {version:?} with {bits} bits; \"gemm\" with 4 is supported",
            words.name()
        ))
        .with_hint(WAY_OUT));
    }
    let [cols, packed_rows] = words.matrix()?;
    let scales = module.need_floats(".scales")?;
    let [num_groups, rows] = scales.matrix()?;
    if packed_rows.checked_mul(8) != Some(rows) {
        return Err(scales.wrong_shape(format!("{:?} has {packed_rows} columns of 8", words.name())));
    }
    let zeros = module.need(".qzeros")?.of_type(&[Dtype::I32])?.of_shape(&[num_groups, packed_rows])?;
    let groups = Groups::Of(group_len(config, scales, cols, num_groups)?);
    let zero_range = range_of(
        (0..zeros.num_elements()).flat_map(|index| (0..8).map(move |nibble| code(zeros, index, nibble))),
    );
    let codes = Awq { words: words.clone(), zeros: zeros.clone(), zero_range, rows, cols };
    Ok(Box::new(Integers::new(codes, groups, Scales::ByGroup(scales.clone()), 1.0)))
}

fn code(words: &ComponentTensor, index: usize, nibble: usize) -> i16 {
    ((words.word(index) >> (4 * nibble)) & 15) as i16
}

impl Codes for Awq {
    fn method(&self) -> String {
        "AWQ with 4 bits".to_owned()
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.rows, self.cols]
    }

    fn rows_at_once(&self) -> usize {
        ROWS_AT_ONCE
    }

    fn codes(&self, row: usize, out: &mut [i16]) {
        let nibble = NIBBLES[row % 8];
        for (col, out) in out.iter_mut().enumerate() {
            *out = code(&self.words, col * (self.rows / 8) + row / 8, nibble);
        }
    }

    fn zero(&self, row: usize, group: usize) -> i16 {
        code(&self.zeros, group * (self.rows / 8) + row / 8, NIBBLES[row % 8])
    }

    fn code_range(&self) -> RangeInclusive<i16> {
        0..=15
    }

    fn zero_range(&self) -> RangeInclusive<i16> {
        self.zero_range.clone()
    }
}
