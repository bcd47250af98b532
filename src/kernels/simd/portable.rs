//! Vectors in plain Rust, for every machine.

use super::int8::pairs_of_rows;
use super::{F32x16, Int8Dot};

/// The value of an f16, without branches, so that the compiler vectorises it.
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // The exponent's bias is 127 instead of 15: scale by 2^112, which also normalises subnormals.
    let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let is_finite = bits & 0x7c00 != 0x7c00;
    let unsigned = if is_finite { finite } else { magnitude | 0x7f80_0000 };
    f32::from_bits(unsigned | (u32::from(bits & 0x8000) << 16))
}

/// Sixteen lanes in an array.
#[derive(Debug, Clone, Copy)]
pub(super) struct PortableVector([f32; 16]);

impl PortableVector {
    #[inline(always)]
    fn zip(self, other: Self, op: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|lane| op(self.0[lane], other.0[lane])))
    }
}

// SAFETY: plain Rust on arrays; the pointer methods read and write sixteen elements.
unsafe impl F32x16 for PortableVector {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; 16])
    }
    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        // SAFETY: the caller guarantees sixteen readable f32.
        Self(unsafe { source.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> Self {
        // SAFETY: the caller guarantees sixteen readable f16.
        let bits = unsafe { source.cast::<[u16; 16]>().read_unaligned() };
        Self(bits.map(f16_to_f32))
    }
    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: the caller guarantees sixteen readable bf16.
        let bits = unsafe { source.cast::<[u16; 16]>().read_unaligned() };
        Self(bits.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(source: *const u8) -> (Self, Self) {
        // SAFETY: the caller guarantees sixteen readable pairs.
        let pairs = unsafe { source.cast::<[u32; 16]>().read_unaligned() }.map(u32::from_le);
        (
            Self(pairs.map(|pair| f32::from_bits(pair << 16))),
            Self(pairs.map(|pair| f32::from_bits(pair & 0xffff_0000))),
        )
    }
    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: the caller guarantees sixteen writable f32.
        unsafe { target.cast::<[f32; 16]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, target: *mut u16) {
        let bits = self.0.map(|value| half::f16::from_f32(value).to_bits());
        // SAFETY: the caller guarantees sixteen writable f16.
        unsafe { target.cast::<[u16; 16]>().write_unaligned(bits) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // `f32::mul_add` is a library call where the target has no fused instruction.
        if cfg!(target_arch = "aarch64") {
            Self(std::array::from_fn(|lane| self.0[lane].mul_add(factor.0[lane], addend.0[lane])))
        } else {
            self.mul(factor).add(addend)
        }
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, exponent: Self) -> Self {
        self.zip(exponent, |value, n| value * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = self.0;
        for width in [8, 4, 2, 1] {
            for lane in 0..width {
                lanes[lane] += lanes[lane + width];
            }
        }
        lanes[0]
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

// SAFETY: plain Rust on arrays; the pointer methods touch the elements that they name.
unsafe impl Int8Dot for PortableVector {
    type Codes = [u32; 16];
    type Sums = [i32; 16];
    const SIGNED_BIAS: i32 = 0;

    pairs_of_rows!();

    #[inline(always)]
    unsafe fn load_codes(source: *const u8) -> Self::Codes {
        // SAFETY: the caller guarantees 64 readable bytes.
        unsafe { source.cast::<[u32; 16]>().read_unaligned() }.map(u32::from_le)
    }
    #[inline(always)]
    unsafe fn store_codes(codes: Self::Codes, target: *mut u8) {
        // SAFETY: the caller guarantees 64 writable bytes.
        unsafe { target.cast::<[u32; 16]>().write_unaligned(codes.map(u32::to_le)) }
    }
    #[inline(always)]
    unsafe fn load_u16(source: *const u16) -> Self::Codes {
        // SAFETY: the caller guarantees sixteen readable u16.
        unsafe { source.cast::<[u16; 16]>().read_unaligned() }.map(|bits| u32::from(u16::from_le(bits)))
    }
    #[inline(always)]
    fn lookup(codes: Self::Codes, table: &[u8; 16]) -> Self::Codes {
        codes.map(|lane| u32::from_ne_bytes(lane.to_ne_bytes().map(|code| table[usize::from(code & 15)])))
    }
    #[inline(always)]
    fn and(codes: Self::Codes, mask: u8) -> Self::Codes {
        let mask = u32::from_ne_bytes([mask; 4]);
        codes.map(|lane| lane & mask)
    }
    #[inline(always)]
    fn or(a: Self::Codes, b: Self::Codes) -> Self::Codes {
        std::array::from_fn(|lane| a[lane] | b[lane])
    }
    #[inline(always)]
    fn sub_bytes(codes: Self::Codes, value: u8) -> Self::Codes {
        codes.map(|lane| u32::from_ne_bytes(lane.to_ne_bytes().map(|byte| byte.wrapping_sub(value))))
    }
    #[inline(always)]
    fn shift_left(codes: Self::Codes, count: u32) -> Self::Codes {
        codes.map(|lane| lane << count)
    }
    #[inline(always)]
    fn shift_right(codes: Self::Codes, count: u32) -> Self::Codes {
        codes.map(|lane| lane >> count)
    }
    #[inline(always)]
    fn lowest_byte(codes: Self::Codes) -> Self {
        Self(codes.map(|lane| (lane & 255) as f32))
    }
    #[inline(always)]
    fn splat_sum(value: i32) -> Self::Sums {
        [value; 16]
    }
    #[inline(always)]
    unsafe fn load_sums(source: *const i32) -> Self::Sums {
        // SAFETY: the caller guarantees sixteen readable i32.
        unsafe { source.cast::<[i32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn dot(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
        // SAFETY: the caller guarantees four readable i8; unsigned codes below 64 are i8 as well.
        unsafe { Self::dot_signed(sums, codes, activations) }
    }
    #[inline(always)]
    unsafe fn dot_signed(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
        // SAFETY: the caller guarantees four readable i8.
        let [a, b, c, d] = unsafe { activations.cast::<[i8; 4]>().read_unaligned() }.map(i32::from);
        // Shifts of whole lanes, not bytes, because baseline vector units have only those.
        std::array::from_fn(|lane| {
            let code = codes[lane] as i32;
            sums[lane]
                + ((code << 24) >> 24) * a
                + ((code << 16) >> 24) * b
                + ((code << 8) >> 24) * c
                + (code >> 24) * d
        })
    }
    #[inline(always)]
    fn from_sums(sums: Self::Sums) -> Self {
        Self(sums.map(|sum| sum as f32))
    }
    #[inline(always)]
    unsafe fn load_i8(source: *const i8) -> Self {
        // SAFETY: the caller guarantees sixteen readable i8.
        Self(unsafe { source.cast::<[i8; 16]>().read_unaligned() }.map(f32::from))
    }
    #[inline(always)]
    unsafe fn store_i8(self, target: *mut i8) -> i32 {
        let bytes = self.0.map(|lane| lane as i8);
        // SAFETY: the caller guarantees sixteen writable i8.
        unsafe { target.cast::<[i8; 16]>().write_unaligned(bytes) };
        bytes.into_iter().map(i32::from).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_has_its_value() {
        for bits in 0..=u16::MAX {
            let (value, wanted) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(value.to_bits() == wanted.to_bits() || value.is_nan() && wanted.is_nan(), "{bits:#x}");
        }
    }
}
