//! Vectors of one AVX-512 register.

use std::arch::x86_64::*;

use super::avx2::{largest_of_eight, sum_of_bytes};
use super::int8::pairs_of_rows;
use super::{F32x16, Int8Dot};

/// One AVX-512 register. `BF16` is true where the machine has bf16 dot products.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512Vector<const BF16: bool>(pub(super) __m512);

macro_rules! whole {
    ($op:ident($($argument:expr),*)) => {
        // SAFETY: this type is only used inside functions of `simd` that enable AVX-512 with VNNI and, with `BF16`,
        // BF16.
        unsafe { Self($op($($argument),*)) }
    };
}

// SAFETY: loads and stores are of sixteen elements, unaligned.
unsafe impl<const BF16: bool> F32x16 for Avx512Vector<BF16> {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        whole!(_mm512_set1_ps(value))
    }
    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        // SAFETY: the caller guarantees sixteen readable f32.
        unsafe { Self(_mm512_loadu_ps(source)) }
    }
    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> Self {
        // SAFETY: the caller guarantees sixteen readable f16.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(source.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: the caller guarantees sixteen readable bf16.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(source: *const u8) -> (Self, Self) {
        // SAFETY: the caller guarantees sixteen readable pairs.
        unsafe {
            let pairs = _mm512_loadu_si512(source.cast());
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))), Self(_mm512_castsi512_ps(odd)))
        }
    }
    #[inline(always)]
    unsafe fn dot_bf16(self, weights: *const u8, activations: u32) -> Self {
        if !BF16 {
            // SAFETY: the caller guarantees sixteen readable pairs.
            return unsafe { super::dot_bf16_in_f32(self, weights, activations) };
        }
        // SAFETY: the caller guarantees sixteen readable pairs; vectors of bf16 and of integers have the
        // same bits.
        unsafe {
            let weights = std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(weights.cast()));
            let activations = _mm512_set1_epi32(activations.cast_signed());
            Self(_mm512_dpbf16_ps(self.0, weights, std::mem::transmute::<__m512i, __m512bh>(activations)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: the caller guarantees sixteen writable f32.
        unsafe { _mm512_storeu_ps(target, self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, target: *mut u16) {
        // SAFETY: the caller guarantees sixteen writable f16.
        unsafe {
            _mm256_storeu_si256(target.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        whole!(_mm512_add_ps(self.0, other.0))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        whole!(_mm512_sub_ps(self.0, other.0))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        whole!(_mm512_mul_ps(self.0, other.0))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        whole!(_mm512_div_ps(self.0, other.0))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        whole!(_mm512_max_ps(self.0, other.0))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        whole!(_mm512_min_ps(self.0, other.0))
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        whole!(_mm512_fmadd_ps(self.0, factor.0, addend.0))
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: see `whole`.
        unsafe { Self(_mm512_roundscale_ps::<0>(self.0)) }
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, exponent: Self) -> Self {
        whole!(_mm512_scalef_ps(self.0, exponent.0))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see `whole`.
        unsafe {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        // SAFETY: see `whole`.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    fn largest_magnitude(self, other: Self) -> f32 {
        // SAFETY: see `whole`. Magnitudes are in the order of their bits, infinity and NaN above all others.
        unsafe {
            let magnitude =
                |lanes| _mm512_and_si512(_mm512_castps_si512(lanes), _mm512_set1_epi32(0x7fff_ffff));
            let lanes = _mm512_max_epu32(magnitude(self.0), magnitude(other.0));
            let halves = (_mm512_castsi512_si256(lanes), _mm512_extracti32x8_epi32::<1>(lanes));
            largest_of_eight(_mm256_max_epu32(halves.0, halves.1))
        }
    }
}

// SAFETY: loads and stores touch the elements that the trait names. For the
// intrinsics see `whole`.
unsafe impl<const BF16: bool> Int8Dot for Avx512Vector<BF16> {
    type Codes = __m512i;
    type Sums = __m512i;
    const SIGNED_BIAS: i32 = 128;

    pairs_of_rows!();

    #[inline(always)]
    unsafe fn load_codes(source: *const u8) -> Self::Codes {
        // SAFETY: the caller guarantees 64 readable bytes.
        unsafe { _mm512_loadu_si512(source.cast()) }
    }
    #[inline(always)]
    unsafe fn store_codes(codes: Self::Codes, target: *mut u8) {
        // SAFETY: the caller guarantees 64 writable bytes.
        unsafe { _mm512_storeu_si512(target.cast(), codes) }
    }
    #[inline(always)]
    unsafe fn load_u16(source: *const u16) -> Self::Codes {
        // SAFETY: the caller guarantees sixteen readable u16.
        unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast())) }
    }
    #[inline(always)]
    fn lookup(codes: Self::Codes, table: &[u8; 16]) -> Self::Codes {
        // SAFETY: see `whole`; the table has sixteen bytes.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, codes)
        }
    }
    #[inline(always)]
    fn and(codes: Self::Codes, mask: u8) -> Self::Codes {
        // SAFETY: see `whole`.
        unsafe { _mm512_and_si512(codes, _mm512_set1_epi8(mask as i8)) }
    }
    #[inline(always)]
    fn or(a: Self::Codes, b: Self::Codes) -> Self::Codes {
        // SAFETY: see `whole`.
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    fn sub_bytes(codes: Self::Codes, value: u8) -> Self::Codes {
        // SAFETY: see `whole`.
        unsafe { _mm512_sub_epi8(codes, _mm512_set1_epi8(value.cast_signed())) }
    }
    #[inline(always)]
    fn shift_left(codes: Self::Codes, count: u32) -> Self::Codes {
        // SAFETY: see `whole`.
        unsafe { _mm512_sll_epi32(codes, _mm_cvtsi32_si128(count as i32)) }
    }
    #[inline(always)]
    fn shift_right(codes: Self::Codes, count: u32) -> Self::Codes {
        // SAFETY: see `whole`.
        unsafe { _mm512_srl_epi32(codes, _mm_cvtsi32_si128(count as i32)) }
    }
    #[inline(always)]
    fn lowest_byte(codes: Self::Codes) -> Self {
        // SAFETY: see `whole`.
        unsafe { Self(_mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(255)))) }
    }
    #[inline(always)]
    fn splat_sum(value: i32) -> Self::Sums {
        // SAFETY: see `whole`.
        unsafe { _mm512_set1_epi32(value) }
    }
    #[inline(always)]
    unsafe fn load_sums(source: *const i32) -> Self::Sums {
        // SAFETY: the caller guarantees sixteen readable i32.
        unsafe { _mm512_loadu_si512(source.cast()) }
    }
    #[inline(always)]
    unsafe fn dot(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
        // SAFETY: the caller guarantees four readable i8.
        unsafe {
            let four = _mm512_set1_epi32(activations.cast::<i32>().read_unaligned());
            _mm512_dpbusd_epi32(sums, codes, four)
        }
    }
    #[inline(always)]
    unsafe fn dot_signed(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
        // SAFETY: the caller guarantees four readable i8. Flipping the top bit of an i8 adds 128 to
        // it as a u8.
        unsafe { Self::dot(sums, _mm512_xor_si512(codes, _mm512_set1_epi8(-128)), activations) }
    }
    #[inline(always)]
    fn from_sums(sums: Self::Sums) -> Self {
        // SAFETY: see `whole`.
        unsafe { Self(_mm512_cvtepi32_ps(sums)) }
    }
    /// While tiles are multiplied, one of the two ports for vectors does additions but no conversions and
    /// multiplications. 1.5 · 2²³ has a mantissa of whole numbers, so that the bits of `UNITS` and a sum are those of
    /// UNITS + sum.
    #[inline(always)]
    fn from_small_sums(sums: Self::Sums) -> Self {
        const UNITS: f32 = 12_582_912.0;
        // SAFETY: see `whole`.
        unsafe {
            let moved = _mm512_add_epi32(sums, _mm512_set1_epi32(UNITS.to_bits().cast_signed()));
            Self(_mm512_sub_ps(_mm512_castsi512_ps(moved), _mm512_set1_ps(UNITS)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(source: *const i8) -> Self {
        // SAFETY: the caller guarantees sixteen readable i8.
        unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, target: *mut i8) -> i32 {
        // SAFETY: the caller guarantees sixteen writable i8.
        unsafe {
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0));
            _mm_storeu_si128(target.cast(), bytes);
            sum_of_bytes(bytes)
        }
    }
}
