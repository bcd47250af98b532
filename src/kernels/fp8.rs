//! Floats of eight bits: a sign, four bits of exponent with bias 7, and three bits of mantissa.
//!
//! This is E4M3 of the Open Compute Project's formats, which other programs call `e4m3fn`.

use half::f16;

use crate::paged_cache::{KvElement, LANES};
use crate::simd::F32x16;

/// A float from 2⁻⁹ to [`E4m3::MAX`], or zero, of either sign. There are no infinities, and one NaN of each sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4m3(u8);

/// The bits of NaN, without the sign.
const NAN: u8 = 0x7F;

impl E4m3 {
    /// The largest value.
    pub const MAX: f32 = 448.0;

    /// The value with these bits.
    #[must_use]
    #[inline(always)]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Its bits.
    #[must_use]
    #[inline(always)]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// The nearest value, of two equally near ones the even one. Values beyond [`Self::MAX`] become it, and infinity
    /// becomes NaN: it is the result of an error elsewhere.
    #[must_use]
    #[inline(always)]
    pub fn from_f32(value: f32) -> Self {
        // The smallest number whose step is above that of the smallest values.
        const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
        // Its step is 2⁻⁹, so the sum with it is rounded to that.
        const STEP_OF_SMALL: f32 = 16_384.0;
        const DROPPED: u32 = f32::MANTISSA_DIGITS - 1 - 3;
        const BIASES: u32 = (127 - 7) << 3;
        let magnitude = value.abs();
        let bits = magnitude.to_bits();
        let small = (magnitude + STEP_OF_SMALL).to_bits().wrapping_sub(STEP_OF_SMALL.to_bits());
        let rounded = bits.wrapping_add((1 << (DROPPED - 1)) - 1 + (bits >> DROPPED & 1));
        let normal = (rounded >> DROPPED).wrapping_sub(BIASES).min(u32::from(NAN) - 1);
        let code = if magnitude < SMALLEST_NORMAL { small } else { normal };
        let code = if bits < f32::INFINITY.to_bits() { code } else { u32::from(NAN) };
        Self((code | value.to_bits() >> 24 & 0x80) as u8)
    }

    /// Its value, exactly.
    #[must_use]
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        f16::from_bits(self.scaled_half()).to_f32() * Self::SCALE
    }

    /// The quotient of a value and [`Self::scaled_half`]: the biases of their exponents differ by 8.
    const SCALE: f32 = 256.0;

    /// The bits of a half that is the value divided by [`Self::SCALE`].
    #[inline(always)]
    fn scaled_half(self) -> u16 {
        let magnitude = u16::from(self.0 & NAN) << 7;
        // Only NaN has a carry; the bit makes its exponent that of NaN.
        let of_nan = (magnitude + 0x80) & 0x4000;
        magnitude | of_nan | u16::from(self.0 & 0x80) << 8
    }
}

impl KvElement for E4m3 {
    #[inline(always)]
    unsafe fn load<V: F32x16>(source: *const Self) -> V {
        // SAFETY: the caller guarantees sixteen readable values, and any bytes are values.
        let values = unsafe { source.cast::<[Self; LANES]>().read_unaligned() };
        let halves = values.map(Self::scaled_half);
        // SAFETY: the array has sixteen halves.
        unsafe { V::load_f16(halves.as_ptr()) }.mul(V::splat(Self::SCALE))
    }

    #[inline(always)]
    unsafe fn round<V: F32x16>(values: V) -> [Self; LANES] {
        let mut exact = [0.0; LANES];
        // SAFETY: the array has sixteen values.
        unsafe { values.store(exact.as_mut_ptr()) };
        exact.map(Self::from_f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{CpuLevel, Kernel};

    /// The values of all bits without a sign, by the format's definition.
    fn magnitudes() -> Vec<f64> {
        let of_bits = |bits: i32| match (bits >> 3, f64::from(bits & 7)) {
            (0, mantissa) => mantissa * 2_f64.powi(-9),
            (exponent, mantissa) => (8.0 + mantissa) * 2_f64.powi(exponent - 10),
        };
        (0..i32::from(NAN)).map(of_bits).collect()
    }

    /// The nearest of `magnitudes` in double precision, of two the one with even bits.
    fn nearest(magnitudes: &[f64], value: f32) -> u8 {
        let magnitude = f64::from(value.abs());
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        if !value.is_finite() {
            return sign | NAN;
        }
        let above = magnitudes.partition_point(|candidate| *candidate < magnitude);
        let Some(upper) = magnitudes.get(above) else { return sign | (NAN - 1) };
        let below = above.saturating_sub(1);
        let (down, up) = (magnitude - magnitudes[below], upper - magnitude);
        let is_below = down < up || down == up && below % 2 == 0;
        sign | if is_below { below as u8 } else { above as u8 }
    }

    struct RoundTrip([f32; LANES]);
    impl Kernel for RoundTrip {
        type Output = ([E4m3; LANES], [f32; LANES]);
        #[inline(always)]
        fn run<V: F32x16>(self) -> Self::Output {
            let mut read = [0.0; LANES];
            // SAFETY: all arrays have sixteen values.
            unsafe {
                let codes = E4m3::round(V::load(self.0.as_ptr()));
                E4m3::load::<V>(codes.as_ptr()).store(read.as_mut_ptr());
                (codes, read)
            }
        }
    }

    #[test]
    fn values_are_those_of_the_definition() {
        let magnitudes = magnitudes();
        assert_eq!(magnitudes.last(), Some(&f64::from(E4m3::MAX)));
        for bits in 0..=255 {
            let value = E4m3::from_bits(bits).to_f32();
            match magnitudes.get(usize::from(bits & NAN)) {
                Some(magnitude) => assert_eq!(f64::from(value.abs()), *magnitude, "{bits:#x}"),
                None => assert!(value.is_nan(), "{bits:#x}"),
            }
            assert_eq!(value.is_sign_negative(), bits >= 0x80, "{bits:#x}");
            assert_eq!(E4m3::from_f32(value).to_bits(), bits);
        }
    }

    /// All halves, and singles around every value and every middle of two, on every level.
    #[test]
    fn values_are_rounded_to_the_nearest() {
        let magnitudes = magnitudes();
        let edges =
            magnitudes.windows(2).flat_map(|pair| [pair[0], f64::midpoint(pair[0], pair[1]), pair[1]]);
        let edges = edges.chain([464.0, 480.0, 65_504.0, f64::from(f32::MAX), f64::from(f32::MIN_POSITIVE)]);
        let around = edges.flat_map(|edge| {
            let edge = edge as f32;
            [edge.next_down(), edge, edge.next_up()].into_iter().flat_map(|value| [value, -value])
        });
        let special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::from_bits(1), -0.0];
        let halves = (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32());
        let values: Vec<f32> = halves.chain(around).chain(special).collect();
        for &level in CpuLevel::available() {
            for values in values.chunks(LANES) {
                let mut padded = [0.0; LANES];
                padded[..values.len()].copy_from_slice(values);
                let (codes, read) = level.run(RoundTrip(padded));
                for ((value, code), read) in padded.iter().zip(codes).zip(read) {
                    assert_eq!(code.to_bits(), nearest(&magnitudes, *value), "{value:e} on {level:?}");
                    assert_eq!(code, E4m3::from_f32(*value), "{value:e}");
                    let exact = code.to_f32();
                    let is_same = read.to_bits() == exact.to_bits() || read.is_nan() && exact.is_nan();
                    assert!(is_same, "{value:e} on {level:?}: {read} instead of {exact}");
                }
            }
        }
    }
}
