//! Floats of eight bits, with a scale for the matrix, for each row or for blocks.

use ::safetensors::Dtype;

use super::config::QuantConfig;
use super::grid::ScaleGrid;
use super::module::{ComponentTensor, Module};
use super::packed::{Codec, PackedType};
use crate::Result;

/// One sign, four bits of exponent with bias 7, three bits of mantissa; no infinities, one NaN of each sign.
pub(super) fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * power_of_two(-9),
        _ => (8.0 + mantissa) * power_of_two(exponent - 10),
    };
    if byte < 128 { magnitude } else { -magnitude }
}

/// One sign, five bits of exponent with bias 15, two bits of mantissa: the upper half of an f16.
fn e5m2(byte: u8) -> f32 {
    half::f16::from_bits(u16::from(byte) << 8).to_f32()
}

/// An exponent with bias 127, and a NaN.
pub(super) fn e8m0(byte: u8) -> f32 {
    if byte == 255 { f32::NAN } else { power_of_two(i32::from(byte) - 127) }
}

/// Exact where a single can be: from -149 to 127.
pub(super) fn power_of_two(exponent: i32) -> f32 {
    match exponent {
        -126..=127 => f32::from_bits(((exponent + 127) as u32) << 23),
        -149..=-127 => f32::from_bits(1 << (exponent + 149)),
        _ => f32::NAN,
    }
}

#[derive(Debug)]
struct Fp8 {
    weight: ComponentTensor,
    shape: Vec<usize>,
    scales: Option<ScaleGrid>,
    /// The value of each byte.
    table: Box<[f32; 256]>,
}

/// A matrix, or a stack of them, of FP8.
///
/// # Errors
/// If its scales do not fit.
pub(super) fn open(module: &Module<'_>, config: &QuantConfig) -> Result<Box<dyn Codec>> {
    let weight = if module.has("") { module.need("")? } else { module.need(".weight")? };
    if weight.shape().len() < 2 || weight.num_elements() == 0 {
        return Err(weight.wrong_shape("it has to be a matrix"));
    }
    let endings = [".weight_scale_inv", ".weight_scale", "_scale_inv", "_scale"];
    let scales = endings
        .into_iter()
        .find(|ending| module.has(ending))
        .map(|ending| ScaleGrid::new(module.need_floats(ending)?, weight.shape(), config));
    // Without blocks, weights may have been converted without scales.
    if scales.is_none() && config.block().is_some() {
        module.need(".weight_scale_inv")?;
    }
    let decode = if weight.dtype() == Dtype::F8_E5M2 { e5m2 } else { e4m3 };
    Ok(Box::new(Fp8 {
        weight: weight.clone(),
        shape: weight.shape().to_vec(),
        scales: scales.transpose()?,
        table: Box::new(std::array::from_fn(|byte| decode(byte as u8))),
    }))
}

impl Codec for Fp8 {
    fn method(&self) -> String {
        "FP8".to_owned()
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn packed_type(&self) -> PackedType {
        PackedType::encoded(
            "no type of our own has eight bits with an exponent",
            self.shape[self.shape.len() - 1],
        )
    }

    fn values(&self, row: usize, out: &mut [f32]) {
        let bytes = &self.weight.bytes()[row * out.len()..][..out.len()];
        let Some(scales) = &self.scales else {
            out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = self.table[usize::from(*byte)]);
            return;
        };
        let len = scales.group_len();
        for (group, (out, bytes)) in out.chunks_mut(len).zip(bytes.chunks(len)).enumerate() {
            let scale = scales.scale(row, group);
            out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = self.table[usize::from(*byte)] * scale);
        }
    }
}
