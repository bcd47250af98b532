//! Blocks of one type into blocks of another one that has the same values.

use super::code_books::IQ4_VALUES;
use super::decode::signed_six_bit_scales;
use super::scaled::ScaledBlock;
use super::{check_lengths, dequantize};
use crate::{DType, Error, FileType, RepackedType, Result};

/// Whether [`repack`] brings values of `source` to `target`.
#[must_use]
pub fn can_repack(source: FileType, target: DType) -> bool {
    match source {
        FileType::Kept(DType::Iq4Nl) if target == DType::Q8_0 => true,
        FileType::Kept(DType::Q3K) if target == DType::Q6K => true,
        _ => source.kept_as() == target || target == DType::F32,
    }
}

/// Turns whole blocks of `source` into those of `target` that decode to the same values, if there is a way: to the type
/// itself, to what it is [kept as](FileType::kept_as), from `IQ4_NL` to `Q8_0`, from `Q3_K` to `Q6_K`, and to F32.
///
/// # Errors
/// [`crate::ErrorKind::InvalidModel`] if the lengths do not fit together, [`crate::ErrorKind::Internal`] if there is no way.
pub fn repack(source: FileType, target: DType, bytes: &[u8], out: &mut [u8]) -> Result<()> {
    let num_values = bytes.len() / source.block_bytes() * source.block_len();
    check_lengths(source, num_values, bytes.len())?;
    check_lengths(target.into(), num_values, out.len())?;
    match (source, target) {
        (FileType::Kept(dtype), target) if dtype == target => out.copy_from_slice(bytes),
        (FileType::Kept(DType::Iq4Nl), DType::Q8_0) => each_block(bytes, out, iq4_nl_to_q8_0),
        (FileType::Kept(DType::Q3K), DType::Q6K) => each_block(bytes, out, q3_k_to_q6_k),
        (FileType::Repacked(repacked), target) if target == repacked.kept_as() => {
            let blocks = bytes.chunks_exact(source.block_bytes());
            let len = source.block_len() / target.block_len() * target.block_bytes();
            for (block, out) in blocks.zip(out.chunks_exact_mut(len)) {
                pack(&ScaledBlock::take_apart(repacked, block), repacked, out);
            }
        }
        (source, DType::F32) => {
            // Of the types with the longest blocks one block at a time.
            let mut values = [0.0; 256];
            let values = &mut values[..source.block_len()];
            let blocks = bytes.chunks_exact(source.block_bytes());
            for (block, out) in blocks.zip(out.chunks_exact_mut(4 * values.len())) {
                dequantize(source, block, values)?;
                for (value, out) in values.iter().zip(out.as_chunks_mut::<4>().0) {
                    *out = value.to_le_bytes();
                }
            }
        }
        _ => return Err(Error::internal(format!("{source} is not exact in {target}"))),
    }
    Ok(())
}

fn each_block<const FROM: usize, const TO: usize>(
    bytes: &[u8],
    out: &mut [u8],
    repack: impl Fn(&[u8; FROM], &mut [u8; TO]),
) {
    for (block, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        repack(block, out);
    }
}

/// Writes a block of the type that `repacked` is kept as.
fn pack(block: &ScaledBlock, repacked: RepackedType, out: &mut [u8]) {
    let d = block.d.to_le_bytes();
    match repacked.kept_as() {
        DType::Q8S => {
            out[..2].copy_from_slice(&d);
            copy_signed(&block.scales, &mut out[2..18]);
            copy_signed(&block.codes, &mut out[18..]);
        }
        DType::Q6K => {
            copy_signed(&block.scales, &mut out[192..208]);
            out[208..].copy_from_slice(&d);
            pack_q6_k(&block.codes, out);
        }
        DType::Q2K => {
            // A scale and a minimum of one, so that codes from 0 on are values from −1 on.
            out[..16].fill(0x11);
            out[16..80].fill(0);
            out[80..82].copy_from_slice(&d);
            out[82..].copy_from_slice(&d);
            for (k, code) in block.codes.iter().enumerate() {
                let code = (code + 1).cast_unsigned();
                out[16 + 32 * (k / 128) + k % 32] |= code << (2 * (k % 128 / 32));
            }
        }
        _ => {
            // Q4_0.
            for (out, codes) in out.chunks_exact_mut(18).zip(block.codes.chunks_exact(32)) {
                out[..2].copy_from_slice(&d);
                for (index, out) in out[2..].iter_mut().enumerate() {
                    let [low, high] =
                        [codes[index], codes[index + 16]].map(|code| (code + 8).cast_unsigned());
                    *out = low | high << 4;
                }
            }
        }
    }
}

fn copy_signed(from: &[i8], to: &mut [u8]) {
    for (from, to) in from.iter().zip(to) {
        *to = from.cast_unsigned();
    }
}

/// Writes codes of −32 to 31 where a Q6_K block has them.
fn pack_q6_k(codes: &[i8; 256], out: &mut [u8]) {
    out[..192].fill(0);
    for (k, code) in codes.iter().enumerate() {
        let (half, group, l) = (k / 128, k % 128 / 32, k % 32);
        let code = (code + 32).cast_unsigned();
        out[64 * half + 32 * (group % 2) + l] |= (code & 15) << (4 * (group / 2));
        out[128 + 32 * half + l] |= (code >> 4) << (2 * group);
    }
}

fn iq4_nl_to_q8_0(block: &[u8; 18], out: &mut [u8; 34]) {
    out[..2].copy_from_slice(&block[..2]);
    for (index, byte) in block[2..].iter().enumerate() {
        let value = |code: u8| IQ4_VALUES[usize::from(code)].cast_unsigned();
        (out[2 + index], out[18 + index]) = (value(byte & 15), value(byte >> 4));
    }
}

fn q3_k_to_q6_k(block: &[u8; 110], out: &mut [u8; 210]) {
    let codes = std::array::from_fn(|k| {
        let low = (block[32 + 32 * (k / 128) + k % 32] >> (2 * (k % 128 / 32))) & 3;
        let high = (block[k % 32] >> (k / 32)) & 1;
        (low | (high << 2)).cast_signed() - 4
    });
    pack_q6_k(&codes, out);
    copy_signed(&signed_six_bit_scales(&block[96..108]), &mut out[192..208]);
    out[208..].copy_from_slice(&block[108..]);
}
