//! Blocks of one type into blocks of another one that has the same values.

use super::check_lengths;
use super::scaled::ScaledBlock;
use crate::{DType, Error, FileType, RepackedType, Result};

/// Whether [`repack`] can convert `source` to `target`.
#[must_use]
pub fn can_repack(source: FileType, target: DType) -> bool {
    source.kept_as() == target
}

/// Converts whole blocks of `source` to those of `target` that decode to the same values, if possible: to the type
/// itself, or to the type that it is [kept as](FileType::kept_as).
///
/// # Errors
/// [`crate::ErrorKind::InvalidModel`] if the lengths do not fit together, [`crate::ErrorKind::Internal`] if there is no way.
pub fn repack(source: FileType, target: DType, bytes: &[u8], out: &mut [u8]) -> Result<()> {
    let num_values = bytes.len() / source.block_bytes() * source.block_len();
    check_lengths(source, num_values, bytes.len())?;
    check_lengths(target.into(), num_values, out.len())?;
    match (source, target) {
        (FileType::Kept(dtype), target) if dtype == target => out.copy_from_slice(bytes),
        (FileType::Repacked(repacked), target) if target == repacked.kept_as() => {
            let blocks = bytes.chunks_exact(source.block_bytes());
            let len = source.block_len() / target.block_len() * target.block_bytes();
            for (block, out) in blocks.zip(out.chunks_exact_mut(len)) {
                pack(&ScaledBlock::take_apart(repacked, block), repacked, out);
            }
        }
        _ => return Err(Error::internal(format!("{source} is not exact in {target}"))),
    }
    Ok(())
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
