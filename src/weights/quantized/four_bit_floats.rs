//! Floats of four bits, two in a byte, with a scale for a few columns: MXFP4 (32 columns, powers of two) and NVFP4 (16
//! columns, FP8, and one more scale for the matrix).

use ::safetensors::Dtype;

use super::config::QuantConfig;
use super::fp8::power_of_two;
use super::grid::ScaleGrid;
use super::module::{ComponentTensor, Module};
use super::packed::{Codec, Fidelity, PackedType};
use crate::weights::{DType, blocks};
use crate::{Error, Result};

/// Twice the values: one sign, two bits of exponent, one of mantissa.
const DOUBLED: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

#[derive(Debug)]
struct FourBitFloats {
    method: &'static str,
    codes: ComponentTensor,
    shape: Vec<usize>,
    scales: ScaleGrid,
    /// The factor of scales; none if they are powers of two.
    factor: Option<f32>,
    packed_type: PackedType,
}

/// `{stem}_blocks [.., rows, cols / 32, 16]` and `{stem}_scales [.., rows, cols / 32]`: MXFP4.
///
/// # Errors
/// If the tensors do not match.
pub(super) fn open_blocks(module: &Module<'_>, config: &QuantConfig) -> Result<Box<dyn Codec>> {
    let codes = module.need("_blocks")?.of_type(&[Dtype::U8])?;
    let scales = module.need("_scales")?.of_type(&[Dtype::U8, Dtype::F8_E8M0])?;
    match codes.shape() {
        [before @ .., num_blocks, 16] if !before.is_empty() && codes.num_elements() > 0 => {
            let mut shape = before.to_vec();
            shape.push(num_blocks * 32);
            powers_of_two(codes, shape, scales, config)
        }
        _ => Err(codes.wrong_shape("it has to be rows of blocks of 16 bytes")),
    }
}

/// compressed-tensors: `weight_packed [rows, cols / 2]` with `weight_scale`, and `weight_global_scale` if that is FP8.
///
/// # Errors
/// If the tensors do not match.
pub(super) fn open_packed(module: &Module<'_>, config: &QuantConfig) -> Result<Box<dyn Codec>> {
    let codes = module.need(".weight_packed")?;
    let scales = module.need_floats(".weight_scale")?;
    let shape = doubled(codes)?;
    if matches!(scales.dtype(), Dtype::U8 | Dtype::F8_E8M0) {
        return powers_of_two(codes, shape, scales, config);
    }
    let all = one_float(module.need_floats(".weight_global_scale")?)?;
    with_factor(codes, shape, scales, 1.0 / all, config)
}

/// ModelOpt: `weight [rows, cols / 2]` with `weight_scale` and `weight_scale_2`.
///
/// # Errors
/// If the tensors do not match.
pub(super) fn open_weight(module: &Module<'_>, config: &QuantConfig) -> Result<Box<dyn Codec>> {
    let codes = module.need(".weight")?;
    let scales = module.need_floats(".weight_scale")?;
    let all = one_float(module.need_floats(".weight_scale_2")?)?;
    with_factor(codes, doubled(codes)?, scales, all, config)
}

fn doubled(codes: &ComponentTensor) -> Result<Vec<usize>> {
    match codes.shape() {
        [before @ .., half] if !before.is_empty() && codes.num_elements() > 0 => {
            Ok([before, &[half * 2]].concat())
        }
        _ => Err(codes.wrong_shape("it has to be a matrix")),
    }
}

fn one_float(part: &ComponentTensor) -> Result<f32> {
    let value = part.of_shape(&[1]).or_else(|_| part.of_shape(&[]))?.float(0);
    if value.is_finite() && value != 0.0 {
        return Ok(value);
    }
    Err(Error::invalid_model(format!("tensor {:?} is {value}, which is no scale", part.name())))
}

fn powers_of_two(
    codes: &ComponentTensor,
    shape: Vec<usize>,
    scales: &ComponentTensor,
    config: &QuantConfig,
) -> Result<Box<dyn Codec>> {
    let cols = shape.last().copied().unwrap_or(0);
    let grid = ScaleGrid::new(scales, &shape, config)?;
    let packed_type = if grid.group_len() == 32 && cols.is_multiple_of(32) {
        PackedType { dtype: DType::Mxfp4, fidelity: Fidelity::Exact }
    } else {
        PackedType::encoded("its groups of columns are no whole blocks of 32", cols)
    };
    Ok(Box::new(FourBitFloats {
        method: "MXFP4",
        codes: codes.clone(),
        shape,
        scales: grid,
        factor: None,
        packed_type,
    }))
}

fn with_factor(
    codes: &ComponentTensor,
    shape: Vec<usize>,
    scales: &ComponentTensor,
    factor: f32,
    config: &QuantConfig,
) -> Result<Box<dyn Codec>> {
    let scales = ScaleGrid::new(scales.of_type(&[Dtype::F8_E4M3])?, &shape, config)?;
    let packed_type = PackedType::encoded(
        "no type of our own has four bits with an exponent and scales of 16 columns",
        shape.last().copied().unwrap_or(0),
    );
    let codes = codes.clone();
    Ok(Box::new(FourBitFloats { method: "NVFP4", codes, shape, scales, factor: Some(factor), packed_type }))
}

impl FourBitFloats {
    /// The codes of a row, of which the even ones are in the lower halves of bytes.
    fn codes(&self, row: usize, cols: usize) -> impl Iterator<Item = usize> {
        let bytes = &self.codes.bytes()[row * cols / 2..][..cols / 2];
        bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).map(usize::from)
    }

    /// Half of the scale of a group.
    fn half_scale(&self, row: usize, group: usize) -> f32 {
        match self.factor {
            Some(factor) => self.scales.scale(row, group) * factor * 0.5,
            None => power_of_two(i32::from(self.scales.part().bytes()[self.scales.index(row, group)]) - 128),
        }
    }
}

impl Codec for FourBitFloats {
    fn method(&self) -> String {
        self.method.to_owned()
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn packed_type(&self) -> PackedType {
        self.packed_type
    }

    fn values(&self, row: usize, out: &mut [f32]) {
        let len = self.scales.group_len();
        let mut codes = self.codes(row, out.len());
        for (group, out) in out.chunks_mut(len).enumerate() {
            let scale = self.half_scale(row, group);
            out.iter_mut().zip(&mut codes).for_each(|(out, code)| *out = DOUBLED[code] * scale);
        }
    }

    fn blocks(&self, row: usize, values: &mut [f32], out: &mut [u8]) -> Result<()> {
        let dtype = self.packed_type.dtype;
        if let Fidelity::Encoded(_) = self.packed_type.fidelity {
            self.values(row, values);
            return blocks::quantize(dtype, values, out);
        }
        let mut all = self.codes(row, values.len());
        for (group, out) in out.chunks_exact_mut(dtype.block_bytes()).enumerate() {
            // The exponent, then codes of which the second half is in the upper halves of bytes.
            let mut codes = [0; 32];
            codes.iter_mut().zip(&mut all).for_each(|(to, code)| *to = code as u8);
            out[0] = self.scales.part().bytes()[self.scales.index(row, group)];
            for (i, byte) in out[1..].iter_mut().enumerate() {
                *byte = codes[i] | (codes[i + 16] << 4);
            }
        }
        Ok(())
    }
}
