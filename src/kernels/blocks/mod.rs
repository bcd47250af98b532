//! The block formats of ggml: f32 values out of and into their packed bytes, and from one format into another.
//!
//! All formats are little endian and made of independent blocks, so any whole number of blocks can be converted on its
//! own. The code is plain scalar Rust: it is the reference that fast kernels are tested against and the encoder for
//! quantisation at load. It does not depend on files, tensors or threads.

pub(crate) mod code_books;
pub(crate) mod decode;
mod encode;
mod encode_k;
mod repack;
mod scaled;

use half::{bf16, f16};

pub use decode::{iq4_xs_scale, mxfp4_scale, signed_six_bit_scales};
pub use repack::{can_repack, repack};

use crate::{DType, Error, FileType, RepackedType, Result};

/// Unpacks whole blocks of a type into f32 values, exactly as the format defines them.
///
/// # Errors
/// [`crate::ErrorKind::InvalidModel`] if `out` is not a whole number of blocks or `bytes` does not hold
/// exactly that many.
pub fn dequantize(file_type: impl Into<FileType>, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let file_type = file_type.into();
    check_lengths(file_type, out.len(), bytes.len())?;
    let dtype = match file_type {
        FileType::Kept(dtype) => dtype,
        FileType::Repacked(repacked) => {
            dequantize_repacked(repacked, bytes, out);
            return Ok(());
        }
    };
    match dtype {
        DType::F32 => each_block(bytes, out, |block, out| *out = [f32::from_le_bytes(*block)]),
        DType::F16 => each_block(bytes, out, |block, out| *out = [f16::from_le_bytes(*block).to_f32()]),
        DType::BF16 => each_block(bytes, out, |block, out| *out = [bf16::from_le_bytes(*block).to_f32()]),
        DType::Q4_0 => each_block(bytes, out, decode::q4_0),
        DType::Q4_1 => each_block(bytes, out, decode::q4_1),
        DType::Q5_0 => each_block(bytes, out, decode::q5_0),
        DType::Q5_1 => each_block(bytes, out, decode::q5_1),
        DType::Q8_0 => each_block(bytes, out, decode::q8_0),
        DType::Q4K => each_block(bytes, out, decode::q4_k),
        DType::Q5K => each_block(bytes, out, decode::q5_k),
        DType::Q6K => each_block(bytes, out, decode::q6_k),
        DType::Q2K => each_block(bytes, out, decode::q2_k),
        DType::Q3K => each_block(bytes, out, decode::q3_k),
        DType::Iq4Nl => each_block(bytes, out, decode::iq4_nl),
        DType::Iq4Xs => each_block(bytes, out, decode::iq4_xs),
        DType::Mxfp4 => each_block(bytes, out, decode::mxfp4),
        DType::Q8S => each_block(bytes, out, decode::q8_s),
    }
    Ok(())
}

/// The lengths were checked.
fn dequantize_repacked(repacked: RepackedType, bytes: &[u8], out: &mut [f32]) {
    let file_type = FileType::Repacked(repacked);
    let blocks = bytes.chunks_exact(file_type.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(file_type.block_len())) {
        scaled::ScaledBlock::take_apart(repacked, block).values(out);
    }
}

/// True if [`quantize`] can produce `dtype`.
#[must_use]
pub fn can_quantize(dtype: DType) -> bool {
    use DType::{Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q8S};
    !matches!(dtype, Q2K | Q3K | Iq4Nl | Iq4Xs | Mxfp4 | Q8S)
}

/// Packs f32 values into whole blocks of `dtype`.
///
/// Q4_0, Q5_0 and Q8_0 follow ggml's reference rounding, so the bytes equal those of other GGUF writers.
/// Q4_1 and Q5_1 search for the scale and the minimum with the least error, Q4_K, Q5_K and Q6_K for the scales with
/// the least weighted error.
///
/// # Errors
/// [`crate::ErrorKind::Unsupported`] if there is no encoder for `dtype` (see [`can_quantize`]);
/// [`crate::ErrorKind::InvalidModel`] if the lengths do not fit together, or if a value is infinite, not a
/// number, or too large for the f16 numbers of the format.
pub fn quantize(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<()> {
    check_lengths(dtype.into(), values.len(), out.len())?;
    if let Some(index) = values.iter().position(|value| !value.is_finite()) {
        return Err(Error::invalid_model(format!(
            "value {index} is {} and cannot be stored as {dtype}",
            values[index]
        )));
    }
    match dtype {
        DType::F32 => encode_blocks(values, out, |[value], block| {
            *block = value.to_le_bytes();
            Ok(())
        }),
        DType::F16 => encode_blocks(values, out, |[value], block: &mut [u8; 2]| store_f16(*value, block)),
        DType::BF16 => encode_blocks(values, out, |[value], block| {
            *block = bf16::from_f32(*value).to_le_bytes();
            Ok(())
        }),
        DType::Q4_0 => encode_blocks(values, out, encode::q4_0),
        DType::Q4_1 => encode_blocks(values, out, encode::q4_1),
        DType::Q5_0 => encode_blocks(values, out, encode::q5_0),
        DType::Q5_1 => encode_blocks(values, out, encode::q5_1),
        DType::Q8_0 => encode_blocks(values, out, encode::q8_0),
        DType::Q4K => encode_blocks(values, out, encode_k::q4_k),
        DType::Q5K => encode_blocks(values, out, encode_k::q5_k),
        DType::Q6K => encode_blocks(values, out, encode_k::q6_k),
        DType::Q2K | DType::Q3K | DType::Iq4Nl | DType::Iq4Xs | DType::Mxfp4 | DType::Q8S => {
            Err(Error::unsupported(format!("values cannot be quantised to {dtype}"))
                .with_hint("use q4_0, q8_0 or q4_k"))
        }
    }
}

/// Packs 32 integers, less their zero, with their scale into a block of Q4_0, Q5_0 or Q8_0, of which they have to be in
/// range. The scale is rounded to half precision.
///
/// # Errors
/// [`crate::ErrorKind::InvalidModel`] if `out` is no block or the scale is beyond the range of f16;
/// [`crate::ErrorKind::Unsupported`] for another type.
pub fn pack(dtype: DType, scale: f32, codes: &[i8; 32], out: &mut [u8]) -> Result<()> {
    check_lengths(dtype.into(), codes.len(), out.len())?;
    encode::integers(dtype, scale, codes, out)
}

fn check_lengths(file_type: FileType, num_values: usize, num_bytes: usize) -> Result<()> {
    let expected = file_type.row_bytes(num_values)?;
    if num_bytes != expected {
        return Err(Error::invalid_model(format!(
            "{num_values} values of {file_type} take {expected} bytes, not {num_bytes}"
        )));
    }
    Ok(())
}

/// Runs `decode` over all blocks. The lengths were checked, so there are no remainders.
fn each_block<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    let (blocks, _) = bytes.as_chunks::<BYTES>();
    let (out, _) = out.as_chunks_mut::<LEN>();
    for (block, out) in blocks.iter().zip(out) {
        decode(block, out);
    }
}

/// Runs `encode` over all blocks and reports the one that failed.
fn encode_blocks<const LEN: usize, const BYTES: usize>(
    values: &[f32],
    out: &mut [u8],
    encode: impl Fn(&[f32; LEN], &mut [u8; BYTES]) -> Result<()>,
) -> Result<()> {
    let (values, _) = values.as_chunks::<LEN>();
    let (blocks, _) = out.as_chunks_mut::<BYTES>();
    for (index, (values, block)) in values.iter().zip(blocks).enumerate() {
        encode(values, block).map_err(|error| error.context(format!("block {index}")))?;
    }
    Ok(())
}

fn read_f16(bytes: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([bytes[offset], bytes[offset + 1]]).to_f32()
}

/// Writes `value` to the first two bytes of `out`, or fails if f16 would make it infinite.
fn store_f16(value: f32, out: &mut [u8]) -> Result<()> {
    let half = f16::from_f32(value);
    if !half.is_finite() {
        return Err(Error::invalid_model(format!(
            "{value} is beyond the range of f16 (±{})",
            f16::MAX.to_f32()
        )));
    }
    out[..2].copy_from_slice(&half.to_le_bytes());
    Ok(())
}
