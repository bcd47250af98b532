//! Vectors of two AVX2 registers, with or without the instruction for byte dot products.

use std::arch::x86_64::*;

use super::int8::pairs_of_rows;
use super::{F32x16, Int8Dot};

/// AVX2 alone: byte dot products take three instructions.
pub(super) const WITHOUT_VNNI: u8 = 0;
/// One instruction, in the encoding of AVX-VNNI.
pub(super) const AVX_VNNI: u8 = 1;
/// One instruction, in the encoding of AVX-512 VL and VNNI.
pub(super) const AVX512_VNNI: u8 = 2;

/// Two AVX2 registers. `VNNI` is one of the constants above.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2Vector<const VNNI: u8>(pub(super) __m256, pub(super) __m256);

macro_rules! lanewise {
    ($self:expr, $other:expr, $op:ident) => {
        // SAFETY: this type is only used inside functions of `simd` that enable AVX2 and, with `VNNI`, VNNI.
        unsafe { Self($op($self.0, $other.0), $op($self.1, $other.1)) }
    };
}

// SAFETY: loads and stores are of sixteen elements, unaligned.
unsafe impl<const VNNI: u8> F32x16 for Avx2Vector<VNNI> {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: see `lanewise`.
        unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        // SAFETY: the caller guarantees sixteen readable f32.
        unsafe { Self(_mm256_loadu_ps(source), _mm256_loadu_ps(source.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> Self {
        // SAFETY: the caller guarantees sixteen readable f16.
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(source.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(source.add(8).cast())),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: the caller guarantees sixteen readable bf16.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.add(8).cast()));
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(source: *const u8) -> (Self, Self) {
        // SAFETY: the caller guarantees sixteen readable pairs.
        unsafe {
            let [low, high] = [0, 32].map(|at| _mm256_loadu_si256(source.add(at).cast()));
            let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let even = |pairs| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
            let odd = |pairs| _mm256_castsi256_ps(_mm256_and_si256(pairs, upper));
            (Self(even(low), even(high)), Self(odd(low), odd(high)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: the caller guarantees sixteen writable f32.
        unsafe {
            _mm256_storeu_ps(target, self.0);
            _mm256_storeu_ps(target.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, target: *mut u16) {
        // SAFETY: the caller guarantees sixteen writable f16.
        unsafe {
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1);
            _mm_storeu_si128(target.cast(), low);
            _mm_storeu_si128(target.add(8).cast(), high);
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        lanewise!(self, other, _mm256_add_ps)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        lanewise!(self, other, _mm256_sub_ps)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        lanewise!(self, other, _mm256_mul_ps)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        lanewise!(self, other, _mm256_div_ps)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        lanewise!(self, other, _mm256_max_ps)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        lanewise!(self, other, _mm256_min_ps)
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see `lanewise`.
        unsafe {
            Self(_mm256_fmadd_ps(self.0, factor.0, addend.0), _mm256_fmadd_ps(self.1, factor.1, addend.1))
        }
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: see `lanewise`.
        unsafe {
            Self(
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0),
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.1),
            )
        }
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, exponent: Self) -> Self {
        // SAFETY: see `lanewise`.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(exponent.0), bias));
            let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(exponent.1), bias));
            Self(
                _mm256_mul_ps(self.0, _mm256_castsi256_ps(low)),
                _mm256_mul_ps(self.1, _mm256_castsi256_ps(high)),
            )
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see `lanewise`.
        unsafe {
            let eight = _mm256_add_ps(self.0, self.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        // SAFETY: see `lanewise`.
        unsafe {
            let eight = _mm256_max_ps(self.0, self.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn largest_magnitude(self, other: Self) -> f32 {
        // SAFETY: see `lanewise`. Magnitudes are in the order of their bits, infinity and NaN above all others.
        unsafe {
            let magnitude =
                |lanes| _mm256_and_si256(_mm256_castps_si256(lanes), _mm256_set1_epi32(0x7fff_ffff));
            let own = _mm256_max_epu32(magnitude(self.0), magnitude(self.1));
            let others = _mm256_max_epu32(magnitude(other.0), magnitude(other.1));
            largest_of_eight(_mm256_max_epu32(own, others))
        }
    }
}

/// The largest of eight floats that are not negative; NaN is larger than infinity.
#[inline(always)]
pub(super) fn largest_of_eight(lanes: __m256i) -> f32 {
    // SAFETY: used by vectors whose functions enable AVX2.
    unsafe {
        let four = _mm_max_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
        let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b11_10_11_10>(four));
        let one = _mm_max_epu32(two, _mm_shuffle_epi32::<0b01_01_01_01>(two));
        _mm_cvtss_f32(_mm_castsi128_ps(one))
    }
}

/// The sum of sixteen i8.
#[inline(always)]
pub(super) fn sum_of_bytes(bytes: __m128i) -> i32 {
    // SAFETY: part of every x86-64. Flipping the top bit of an i8 adds 128 to it as a u8.
    unsafe {
        let biased = _mm_xor_si128(bytes, _mm_set1_epi8(i8::MIN));
        let eights = _mm_sad_epu8(biased, _mm_setzero_si128());
        let sum = _mm_add_epi64(eights, _mm_unpackhi_epi64(eights, eights));
        _mm_cvtsi128_si32(sum) - 16 * 128
    }
}

/// Applies an operation to both halves.
macro_rules! halves {
    ($op:ident($a:expr $(, $rest:expr)*)) => {
        // SAFETY: see `lanewise`.
        unsafe { ($op($a.0 $(, $rest.0)*), $op($a.1 $(, $rest.1)*)) }
    };
}

// SAFETY: loads and stores touch the elements that the trait names.
unsafe impl<const VNNI: u8> Int8Dot for Avx2Vector<VNNI> {
    type Codes = (__m256i, __m256i);
    type Sums = (__m256i, __m256i);
    const SIGNED_BIAS: i32 = if VNNI == WITHOUT_VNNI { 0 } else { 128 };

    pairs_of_rows!();

    #[inline(always)]
    unsafe fn load_codes(source: *const u8) -> Self::Codes {
        // SAFETY: the caller guarantees 64 readable bytes.
        unsafe { (_mm256_loadu_si256(source.cast()), _mm256_loadu_si256(source.add(32).cast())) }
    }
    #[inline(always)]
    unsafe fn store_codes(codes: Self::Codes, target: *mut u8) {
        // SAFETY: the caller guarantees 64 writable bytes.
        unsafe {
            _mm256_storeu_si256(target.cast(), codes.0);
            _mm256_storeu_si256(target.add(32).cast(), codes.1);
        }
    }
    #[inline(always)]
    unsafe fn load_u16(source: *const u16) -> Self::Codes {
        // SAFETY: the caller guarantees sixteen readable u16.
        let load = |at| unsafe { _mm256_cvtepu16_epi32(_mm_loadu_si128(source.add(at).cast())) };
        (load(0), load(8))
    }
    #[inline(always)]
    fn lookup(codes: Self::Codes, table: &[u8; 16]) -> Self::Codes {
        // SAFETY: see `lanewise`; the table has sixteen bytes.
        let table = unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) };
        halves!(_mm256_shuffle_epi8((table, table), codes))
    }
    #[inline(always)]
    fn and(codes: Self::Codes, mask: u8) -> Self::Codes {
        // SAFETY: see `lanewise`.
        let mask = unsafe { _mm256_set1_epi8(mask as i8) };
        halves!(_mm256_and_si256(codes, (mask, mask)))
    }
    #[inline(always)]
    fn or(a: Self::Codes, b: Self::Codes) -> Self::Codes {
        halves!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn sub_bytes(codes: Self::Codes, value: u8) -> Self::Codes {
        // SAFETY: see `lanewise`.
        let value = unsafe { _mm256_set1_epi8(value.cast_signed()) };
        halves!(_mm256_sub_epi8(codes, (value, value)))
    }
    #[inline(always)]
    fn shift_left(codes: Self::Codes, count: u32) -> Self::Codes {
        // SAFETY: see `lanewise`.
        let count = unsafe { _mm_cvtsi32_si128(count as i32) };
        halves!(_mm256_sll_epi32(codes, (count, count)))
    }
    #[inline(always)]
    fn shift_right(codes: Self::Codes, count: u32) -> Self::Codes {
        // SAFETY: see `lanewise`.
        let count = unsafe { _mm_cvtsi32_si128(count as i32) };
        halves!(_mm256_srl_epi32(codes, (count, count)))
    }
    #[inline(always)]
    fn lowest_byte(codes: Self::Codes) -> Self {
        // SAFETY: see `lanewise`.
        let mask = unsafe { _mm256_set1_epi32(255) };
        Self::from_sums(halves!(_mm256_and_si256(codes, (mask, mask))))
    }
    #[inline(always)]
    fn splat_sum(value: i32) -> Self::Sums {
        // SAFETY: see `lanewise`.
        unsafe { (_mm256_set1_epi32(value), _mm256_set1_epi32(value)) }
    }
    #[inline(always)]
    unsafe fn load_sums(source: *const i32) -> Self::Sums {
        // SAFETY: the caller guarantees sixteen readable i32.
        unsafe { (_mm256_loadu_si256(source.cast()), _mm256_loadu_si256(source.add(8).cast())) }
    }
    #[inline(always)]
    unsafe fn dot(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
        // SAFETY: the caller guarantees four readable i8.
        let four = unsafe { _mm256_set1_epi32(activations.cast::<i32>().read_unaligned()) };
        match VNNI {
            AVX_VNNI => halves!(_mm256_dpbusd_avx_epi32(sums, codes, (four, four))),
            AVX512_VNNI => halves!(_mm256_dpbusd_epi32(sums, codes, (four, four))),
            // A pair is at most 2 · 63 · 127, far from the limit of i16.
            _ => add_pairs(sums, halves!(_mm256_maddubs_epi16(codes, (four, four)))),
        }
    }
    #[inline(always)]
    unsafe fn dot_signed(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
        if VNNI != WITHOUT_VNNI {
            // SAFETY: see `lanewise`.
            let top = unsafe { _mm256_set1_epi8(-128) };
            // Flipping the top bit of an i8 adds 128 to it as a u8.
            let codes = halves!(_mm256_xor_si256(codes, (top, top)));
            // SAFETY: the caller guarantees four readable i8.
            return unsafe { Self::dot(sums, codes, activations) };
        }
        // SAFETY: the caller guarantees four readable i8.
        let four = unsafe { _mm256_set1_epi32(activations.cast::<i32>().read_unaligned()) };
        // The sign moves to the activation. A pair is at most 2 · 128 · 127 = 32,512: no saturation.
        let magnitudes = halves!(_mm256_abs_epi8(codes));
        let signed = halves!(_mm256_sign_epi8((four, four), codes));
        add_pairs(sums, halves!(_mm256_maddubs_epi16(magnitudes, signed)))
    }
    #[inline(always)]
    fn from_sums(sums: Self::Sums) -> Self {
        let (low, high) = halves!(_mm256_cvtepi32_ps(sums));
        Self(low, high)
    }
    #[inline(always)]
    unsafe fn load_i8(source: *const i8) -> Self {
        // SAFETY: the caller guarantees sixteen readable i8.
        unsafe {
            let bytes = _mm_loadu_si128(source.cast());
            let low = _mm256_cvtepi8_epi32(bytes);
            let high = _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes));
            Self(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, target: *mut i8) -> i32 {
        // SAFETY: the caller guarantees sixteen writable i8.
        unsafe {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            // The pack works within 128-bit halves; this puts the quarters back in order.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(target.cast(), bytes);
            sum_of_bytes(bytes)
        }
    }
}

/// Adds pairs of i16 to sums of i32.
#[inline(always)]
fn add_pairs(sums: (__m256i, __m256i), pairs: (__m256i, __m256i)) -> (__m256i, __m256i) {
    // SAFETY: see `lanewise`.
    let ones = unsafe { _mm256_set1_epi16(1) };
    let quads = halves!(_mm256_madd_epi16(pairs, (ones, ones)));
    halves!(_mm256_add_epi32(sums, quads))
}
