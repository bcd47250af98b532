//! Products of 8-bit codes, the integer half of a quantised matrix product.
//!
//! A vector of codes has sixteen lanes of four bytes: lane r holds row r of a weight tile at four
//! consecutive columns. One [`Int8Dot::dot`] adds the four products of every lane to its sum. Integer
//! sums are exact, so these operations give the same result at every level.

use super::PortableVector;

/// Integer vectors that go with a vector of sixteen f32.
///
/// # Safety
/// As for [`super::F32x16`]: only reached through [`super::CpuLevel::run`], and pointers are valid for
/// the elements that a method names, without alignment.
#[expect(clippy::missing_safety_doc, reason = "the contract of every method is the trait's")]
pub unsafe trait Int8Dot: Copy {
    /// Sixteen lanes of four bytes.
    type Codes: Copy;
    /// Sixteen i32.
    type Sums: Copy;
    /// What [`Int8Dot::dot_signed`] adds to every code; the sums must start with minus this many times
    /// the sum of the activations.
    const SIGNED_BIAS: i32;

    /// Reads 64 bytes.
    unsafe fn load_codes(source: *const u8) -> Self::Codes;
    /// Each byte `& mask`.
    fn and(codes: Self::Codes, mask: u8) -> Self::Codes;
    /// Each byte `a | b`.
    fn or(a: Self::Codes, b: Self::Codes) -> Self::Codes;
    /// Each lane, as a u32, `<< count`.
    fn shift_left(codes: Self::Codes, count: u32) -> Self::Codes;
    /// Each lane, as a u32, `>> count`.
    fn shift_right(codes: Self::Codes, count: u32) -> Self::Codes;
    /// The lowest byte of each lane, unsigned.
    fn lowest_byte(codes: Self::Codes) -> Self;

    /// All sums equal to `value`.
    fn splat_sum(value: i32) -> Self::Sums;
    /// Adds to each lane's sum its four codes, 0..=63, times the four i8 at `activations`.
    unsafe fn dot(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums;
    /// The same for codes that are i8 (−128 included); activations are above −128.
    unsafe fn dot_signed(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums;
    /// The sums as f32.
    fn from_sums(sums: Self::Sums) -> Self;

    /// Reads sixteen i8.
    unsafe fn load_i8(source: *const i8) -> Self;
    /// Writes sixteen i8; the lanes hold integers in −127..=127.
    unsafe fn store_i8(self, target: *mut i8);
}

// SAFETY: plain Rust on arrays; the pointer methods touch the elements that they name.
unsafe impl Int8Dot for PortableVector {
    type Codes = [u32; 16];
    type Sums = [i32; 16];
    const SIGNED_BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn load_codes(source: *const u8) -> Self::Codes {
        // SAFETY: the caller guarantees 64 readable bytes.
        unsafe { source.cast::<[u32; 16]>().read_unaligned() }.map(u32::from_le)
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
    unsafe fn dot(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
        // SAFETY: the caller guarantees four readable i8; unsigned codes below 64 are i8 as well.
        unsafe { Self::dot_signed(sums, codes, activations) }
    }
    #[inline(always)]
    unsafe fn dot_signed(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
        // SAFETY: the caller guarantees four readable i8.
        let [a, b, c, d] = unsafe { activations.cast::<[i8; 4]>().read_unaligned() }.map(i32::from);
        // Shifts of whole lanes, not bytes, because those are what baseline vector units have.
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
    unsafe fn store_i8(self, target: *mut i8) {
        // SAFETY: the caller guarantees sixteen writable i8.
        unsafe { target.cast::<[i8; 16]>().write_unaligned(self.0.map(|lane| lane as i8)) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::x86::{Avx2Vector, Avx512Vector};
    use super::Int8Dot;

    /// Applies an operation to both halves.
    macro_rules! halves {
        ($op:ident($a:expr $(, $rest:expr)*)) => {
            // SAFETY: `Avx2Vector` is only used on machines with AVX2.
            unsafe { ($op($a.0 $(, $rest.0)*), $op($a.1 $(, $rest.1)*)) }
        };
    }

    // SAFETY: loads and stores touch the elements that the trait names.
    unsafe impl Int8Dot for Avx2Vector {
        type Codes = (__m256i, __m256i);
        type Sums = (__m256i, __m256i);
        const SIGNED_BIAS: i32 = 0;

        #[inline(always)]
        unsafe fn load_codes(source: *const u8) -> Self::Codes {
            // SAFETY: the caller guarantees 64 readable bytes.
            unsafe { (_mm256_loadu_si256(source.cast()), _mm256_loadu_si256(source.add(32).cast())) }
        }
        #[inline(always)]
        fn and(codes: Self::Codes, mask: u8) -> Self::Codes {
            // SAFETY: see `halves`.
            let mask = unsafe { _mm256_set1_epi8(mask as i8) };
            halves!(_mm256_and_si256(codes, (mask, mask)))
        }
        #[inline(always)]
        fn or(a: Self::Codes, b: Self::Codes) -> Self::Codes {
            halves!(_mm256_or_si256(a, b))
        }
        #[inline(always)]
        fn shift_left(codes: Self::Codes, count: u32) -> Self::Codes {
            // SAFETY: see `halves`.
            let count = unsafe { _mm_cvtsi32_si128(count as i32) };
            halves!(_mm256_sll_epi32(codes, (count, count)))
        }
        #[inline(always)]
        fn shift_right(codes: Self::Codes, count: u32) -> Self::Codes {
            // SAFETY: see `halves`.
            let count = unsafe { _mm_cvtsi32_si128(count as i32) };
            halves!(_mm256_srl_epi32(codes, (count, count)))
        }
        #[inline(always)]
        fn lowest_byte(codes: Self::Codes) -> Self {
            // SAFETY: see `halves`.
            let mask = unsafe { _mm256_set1_epi32(255) };
            Self::from_sums(halves!(_mm256_and_si256(codes, (mask, mask))))
        }
        #[inline(always)]
        fn splat_sum(value: i32) -> Self::Sums {
            // SAFETY: see `halves`.
            unsafe { (_mm256_set1_epi32(value), _mm256_set1_epi32(value)) }
        }
        #[inline(always)]
        unsafe fn dot(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
            // SAFETY: the caller guarantees four readable i8.
            let four = unsafe { _mm256_set1_epi32(activations.cast::<i32>().read_unaligned()) };
            // SAFETY: see `halves`.
            let ones = unsafe { _mm256_set1_epi16(1) };
            // A pair is at most 2 · 63 · 127, far from the limit of i16.
            let pairs = halves!(_mm256_maddubs_epi16(codes, (four, four)));
            let quads = halves!(_mm256_madd_epi16(pairs, (ones, ones)));
            halves!(_mm256_add_epi32(sums, quads))
        }
        #[inline(always)]
        unsafe fn dot_signed(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
            // SAFETY: the caller guarantees four readable i8.
            let four = unsafe { _mm256_set1_epi32(activations.cast::<i32>().read_unaligned()) };
            // SAFETY: see `halves`.
            let ones = unsafe { _mm256_set1_epi16(1) };
            // The sign moves to the activation. A pair is at most 2 · 128 · 127 = 32,512: no saturation.
            let magnitudes = halves!(_mm256_abs_epi8(codes));
            let signed = halves!(_mm256_sign_epi8((four, four), codes));
            let pairs = halves!(_mm256_maddubs_epi16(magnitudes, signed));
            let quads = halves!(_mm256_madd_epi16(pairs, (ones, ones)));
            halves!(_mm256_add_epi32(sums, quads))
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
        unsafe fn store_i8(self, target: *mut i8) {
            // SAFETY: the caller guarantees sixteen writable i8.
            unsafe {
                let words = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
                // The pack works within 128-bit halves; this puts the quarters back in order.
                let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
                let bytes =
                    _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
                _mm_storeu_si128(target.cast(), bytes);
            }
        }
    }

    // SAFETY: loads and stores touch the elements that the trait names. Every intrinsic here is only
    // reached inside `run_avx512`, on machines with AVX-512 VNNI.
    unsafe impl Int8Dot for Avx512Vector {
        type Codes = __m512i;
        type Sums = __m512i;
        const SIGNED_BIAS: i32 = 128;

        #[inline(always)]
        unsafe fn load_codes(source: *const u8) -> Self::Codes {
            // SAFETY: the caller guarantees 64 readable bytes.
            unsafe { _mm512_loadu_si512(source.cast()) }
        }
        #[inline(always)]
        fn and(codes: Self::Codes, mask: u8) -> Self::Codes {
            // SAFETY: see the implementation's note.
            unsafe { _mm512_and_si512(codes, _mm512_set1_epi8(mask as i8)) }
        }
        #[inline(always)]
        fn or(a: Self::Codes, b: Self::Codes) -> Self::Codes {
            // SAFETY: see the implementation's note.
            unsafe { _mm512_or_si512(a, b) }
        }
        #[inline(always)]
        fn shift_left(codes: Self::Codes, count: u32) -> Self::Codes {
            // SAFETY: see the implementation's note.
            unsafe { _mm512_sll_epi32(codes, _mm_cvtsi32_si128(count as i32)) }
        }
        #[inline(always)]
        fn shift_right(codes: Self::Codes, count: u32) -> Self::Codes {
            // SAFETY: see the implementation's note.
            unsafe { _mm512_srl_epi32(codes, _mm_cvtsi32_si128(count as i32)) }
        }
        #[inline(always)]
        fn lowest_byte(codes: Self::Codes) -> Self {
            // SAFETY: see the implementation's note.
            unsafe { Self(_mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(255)))) }
        }
        #[inline(always)]
        fn splat_sum(value: i32) -> Self::Sums {
            // SAFETY: see the implementation's note.
            unsafe { _mm512_set1_epi32(value) }
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
            // SAFETY: see the implementation's note.
            unsafe { Self(_mm512_cvtepi32_ps(sums)) }
        }
        #[inline(always)]
        unsafe fn load_i8(source: *const i8) -> Self {
            // SAFETY: the caller guarantees sixteen readable i8.
            unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source.cast())))) }
        }
        #[inline(always)]
        unsafe fn store_i8(self, target: *mut i8) {
            // SAFETY: the caller guarantees sixteen writable i8.
            unsafe {
                _mm_storeu_si128(target.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0)));
            }
        }
    }
}
