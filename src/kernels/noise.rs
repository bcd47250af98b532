//! Pseudo-random numbers, the same ones in each run, for tests and measurements of ops.

use half::{bf16, f16};

use crate::DType;

/// `len` values in -1..1.
#[must_use]
pub fn noise(seed: u64, len: usize) -> Vec<f32> {
    sequence(seed).map(|bits| bits as f32 / (1 << 23) as f32 - 1.0).take(len).collect()
}

/// Numbers of 24 bits.
fn sequence(seed: u64) -> impl Iterator<Item = u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as u32
    })
}

/// Blocks of `num_values` weights. Any bit pattern is a block, but scales have to be finite and similar for meaningful
/// sums. Weights are below 1, so that sums stay where an error of a gate is not amplified exponentially.
#[must_use]
pub fn random_blocks(dtype: DType, num_values: usize, seed: u64) -> Vec<u8> {
    let values = noise(seed, num_values);
    match dtype {
        DType::F32 => return values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DType::F16 => return values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        DType::BF16 => {
            return values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
        }
        _ => {}
    }
    let len = num_values / dtype.block_len() * dtype.block_bytes();
    let mut bytes: Vec<u8> = sequence(seed).map(|bits| (bits >> 9) as u8).take(len).collect();
    // Of blocks with scales in two steps, the lower one goes up to 15, 31, 63 or 127, or codes have 8 bits.
    let size = match dtype {
        DType::Q2K => 0.02 / 8.0,
        DType::Iq4Nl => 0.02 / 16.0,
        DType::Q3K | DType::Q4K | DType::Q5K | DType::Q6K | DType::Q8S => 0.02 / 64.0,
        DType::Iq4Xs => 0.02 / 256.0,
        _ => 0.02,
    };
    let num_scales = 2 * (num_values / dtype.block_len());
    let mut scales =
        noise(seed + 1, num_scales).into_iter().map(|value| f16::from_f32(size * (1.0 + 0.5 * value)));
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for (&at, scale) in factors_of_block(dtype).iter().zip(&mut scales) {
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        if dtype == DType::Mxfp4 {
            block[0] = 122 + block[0] % 4;
        }
    }
    bytes
}

/// Where a block of a quantised type has its f16 factors.
pub(crate) fn factors_of_block(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        DType::Mxfp4 => &[],
        _ => &[0],
    }
}
