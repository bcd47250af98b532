//! Vectors of four NEON registers, with byte dot products by SDOT or SMMLA.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{F32x16, Int8Dot};

/// Four NEON registers. `I8MM` is true where the machine has SMMLA.
#[derive(Debug, Clone, Copy)]
pub(super) struct NeonVector<const I8MM: bool>([float32x4_t; 4]);

/// Applies an intrinsic to each of the four registers of its arguments.
macro_rules! quarters {
    (|$quarter:ident| $value:expr) => {
        // SAFETY: NEON is part of every aarch64 target; the functions of `simd` inside which this type is used enable
        // the rest.
        [0, 1, 2, 3].map(|$quarter: usize| unsafe { $value })
    };
}

// SAFETY: loads and stores are of sixteen elements, unaligned.
unsafe impl<const I8MM: bool> F32x16 for NeonVector<I8MM> {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self(quarters!(|_q| vdupq_n_f32(value)))
    }
    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        Self(quarters!(|q| vld1q_f32(source.add(4 * q))))
    }
    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> Self {
        Self(quarters!(|q| vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(source.add(4 * q))))))
    }
    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        Self(quarters!(|q| vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(source.add(4 * q))))))
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(source: *const u8) -> (Self, Self) {
        let pairs = quarters!(|q| vreinterpretq_u32_u8(vld1q_u8(source.add(16 * q))));
        let upper = 0xffff_0000;
        (
            Self(quarters!(|q| vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs[q])))),
            Self(quarters!(|q| vreinterpretq_f32_u32(vandq_u32(pairs[q], vdupq_n_u32(upper))))),
        )
    }
    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        let [(), (), (), ()] = quarters!(|q| vst1q_f32(target.add(4 * q), self.0[q]));
    }
    #[inline(always)]
    unsafe fn store_f16(self, target: *mut u16) {
        let [(), (), (), ()] =
            quarters!(|q| vst1_u16(target.add(4 * q), vreinterpret_u16_f16(vcvt_f16_f32(self.0[q]))));
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(quarters!(|q| vaddq_f32(self.0[q], other.0[q])))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(quarters!(|q| vsubq_f32(self.0[q], other.0[q])))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(quarters!(|q| vmulq_f32(self.0[q], other.0[q])))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(quarters!(|q| vdivq_f32(self.0[q], other.0[q])))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(quarters!(|q| vmaxnmq_f32(self.0[q], other.0[q])))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(quarters!(|q| vminnmq_f32(self.0[q], other.0[q])))
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        Self(quarters!(|q| vfmaq_f32(addend.0[q], self.0[q], factor.0[q])))
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(quarters!(|q| vrndnq_f32(self.0[q])))
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, exponent: Self) -> Self {
        Self(quarters!(|q| {
            let biased = vaddq_s32(vcvtnq_s32_f32(exponent.0[q]), vdupq_n_s32(127));
            vmulq_f32(self.0[q], vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased)))
        }))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let [a, b, c, d] = self.0;
        // SAFETY: see `quarters`.
        unsafe {
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        let [a, b, c, d] = self.0;
        // SAFETY: see `quarters`.
        unsafe { vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a, b), vmaxnmq_f32(c, d))) }
    }
}

/// Each of the four lanes plus the dot product of its four bytes.
#[inline(always)]
fn sdot(mut sums: int32x4_t, codes: uint8x16_t, activations: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction only computes; the machine has it, see `quarters`. It is written out because
    // its intrinsic is not stable yet.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sums:v}.4s, {codes:v}.16b, {activations:v}.16b",
            sums = inout(vreg) sums,
            codes = in(vreg) codes,
            activations = in(vreg) activations,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Both rows of eight bytes of `codes` with both of `activations`: [0·0, 0·1, 1·0, 1·1].
#[inline(always)]
fn smmla(mut sums: int32x4_t, codes: uint8x16_t, activations: int8x16_t) -> int32x4_t {
    // SAFETY: as for `sdot`.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {sums:v}.4s, {codes:v}.16b, {activations:v}.16b",
            sums = inout(vreg) sums,
            codes = in(vreg) codes,
            activations = in(vreg) activations,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

// SAFETY: loads and stores touch the elements that the trait names. For the intrinsics see `quarters`.
unsafe impl<const I8MM: bool> Int8Dot for NeonVector<I8MM> {
    type Codes = [uint8x16_t; 4];
    type Sums = [int32x4_t; 4];
    const SIGNED_BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn load_codes(source: *const u8) -> Self::Codes {
        quarters!(|q| vld1q_u8(source.add(16 * q)))
    }
    #[inline(always)]
    unsafe fn store_codes(codes: Self::Codes, target: *mut u8) {
        let [(), (), (), ()] = quarters!(|q| vst1q_u8(target.add(16 * q), codes[q]));
    }
    #[inline(always)]
    unsafe fn load_u16(source: *const u16) -> Self::Codes {
        quarters!(|q| vreinterpretq_u8_u32(vmovl_u16(vld1_u16(source.add(4 * q)))))
    }
    #[inline(always)]
    fn lookup(codes: Self::Codes, table: &[u8; 16]) -> Self::Codes {
        quarters!(|q| vqtbl1q_u8(vld1q_u8(table.as_ptr()), codes[q]))
    }
    #[inline(always)]
    fn and(codes: Self::Codes, mask: u8) -> Self::Codes {
        quarters!(|q| vandq_u8(codes[q], vdupq_n_u8(mask)))
    }
    #[inline(always)]
    fn or(a: Self::Codes, b: Self::Codes) -> Self::Codes {
        quarters!(|q| vorrq_u8(a[q], b[q]))
    }
    #[inline(always)]
    fn sub_bytes(codes: Self::Codes, value: u8) -> Self::Codes {
        quarters!(|q| vsubq_u8(codes[q], vdupq_n_u8(value)))
    }
    #[inline(always)]
    fn shift_left(codes: Self::Codes, count: u32) -> Self::Codes {
        let count = count.cast_signed();
        quarters!(|q| vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(codes[q]), vdupq_n_s32(count))))
    }
    #[inline(always)]
    fn shift_right(codes: Self::Codes, count: u32) -> Self::Codes {
        // A shift to the left by a negative count goes to the right.
        let count = -count.cast_signed();
        quarters!(|q| vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(codes[q]), vdupq_n_s32(count))))
    }
    #[inline(always)]
    fn lowest_byte(codes: Self::Codes) -> Self {
        Self(quarters!(|q| vcvtq_f32_u32(vandq_u32(vreinterpretq_u32_u8(codes[q]), vdupq_n_u32(255)))))
    }
    #[inline(always)]
    fn splat_sum(value: i32) -> Self::Sums {
        quarters!(|_q| vdupq_n_s32(value))
    }
    #[inline(always)]
    unsafe fn load_sums(source: *const i32) -> Self::Sums {
        quarters!(|q| vld1q_s32(source.add(4 * q)))
    }
    #[inline(always)]
    unsafe fn dot(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
        // SAFETY: the caller guarantees four readable i8; unsigned codes below 64 are i8 as well.
        unsafe { Self::dot_signed(sums, codes, activations) }
    }
    #[inline(always)]
    unsafe fn dot_signed(sums: Self::Sums, codes: Self::Codes, activations: *const i8) -> Self::Sums {
        // SAFETY: the caller guarantees four readable i8.
        let four = unsafe { vreinterpretq_s8_s32(vdupq_n_s32(activations.cast::<i32>().read_unaligned())) };
        [0, 1, 2, 3].map(|q: usize| sdot(sums[q], codes[q], four))
    }

    /// With SMMLA, register j is [row 2j of the tile with the first row of activations, with the second, row
    /// 2j + 1 with the first, with the second]. Without, the first four are sums of the first row and the
    /// last four of the second.
    type PairSums = [int32x4_t; 8];

    #[inline(always)]
    fn splat_pair(first: i32, second: i32) -> Self::PairSums {
        let (a, b) = (Self::splat_sum(first), Self::splat_sum(second));
        // SAFETY: see `quarters`.
        let both = |q: usize| unsafe { vzip1q_s32(a[q], b[q]) };
        let separate = |j: usize| if j < 4 { a[j] } else { b[j - 4] };
        [0, 1, 2, 3, 4, 5, 6, 7].map(|j: usize| if I8MM { both(j % 4) } else { separate(j) })
    }
    #[inline(always)]
    unsafe fn dot_pair(
        sums: Self::PairSums,
        codes: [Self::Codes; 2],
        first: *const i8,
        second: *const i8,
    ) -> Self::PairSums {
        // SAFETY: the caller guarantees eight readable i8 at both; codes below 64 are i8 as well.
        unsafe { Self::dot_pair_signed(sums, codes, first, second) }
    }
    #[inline(always)]
    unsafe fn dot_pair_signed(
        sums: Self::PairSums,
        codes: [Self::Codes; 2],
        first: *const i8,
        second: *const i8,
    ) -> Self::PairSums {
        if I8MM {
            // SAFETY: the caller guarantees eight readable i8 at both.
            let activations = unsafe { vcombine_s8(vld1_s8(first), vld1_s8(second)) };
            // Rows 2j and 2j + 1, eight columns each.
            let rows = |j: usize| {
                // SAFETY: see `quarters`.
                unsafe {
                    let [a, b] = codes.map(|word| vreinterpretq_u32_u8(word[j / 2]));
                    vreinterpretq_u8_u32(if j.is_multiple_of(2) {
                        vzip1q_u32(a, b)
                    } else {
                        vzip2q_u32(a, b)
                    })
                }
            };
            return [0, 1, 2, 3, 4, 5, 6, 7].map(|j: usize| smmla(sums[j], rows(j), activations));
        }
        let [a, b, c, d, e, f, g, h] = sums;
        let (mut a, mut b) = ([a, b, c, d], [e, f, g, h]);
        for (word, codes) in codes.into_iter().enumerate() {
            // SAFETY: the caller guarantees eight readable i8 at both.
            unsafe {
                a = Self::dot_signed(a, codes, first.add(4 * word));
                b = Self::dot_signed(b, codes, second.add(4 * word));
            }
        }
        let ([a, b, c, d], [e, f, g, h]) = (a, b);
        [a, b, c, d, e, f, g, h]
    }
    #[inline(always)]
    fn split_pair(sums: Self::PairSums) -> (Self::Sums, Self::Sums) {
        if I8MM {
            return (
                quarters!(|q| vuzp1q_s32(sums[2 * q], sums[2 * q + 1])),
                quarters!(|q| vuzp2q_s32(sums[2 * q], sums[2 * q + 1])),
            );
        }
        let [a, b, c, d, e, f, g, h] = sums;
        ([a, b, c, d], [e, f, g, h])
    }
    #[inline(always)]
    fn from_sums(sums: Self::Sums) -> Self {
        Self(quarters!(|q| vcvtq_f32_s32(sums[q])))
    }
    #[inline(always)]
    unsafe fn load_i8(source: *const i8) -> Self {
        // SAFETY: the caller guarantees sixteen readable i8.
        let bytes = unsafe { vld1q_s8(source) };
        // SAFETY: see `quarters`.
        let (low, high) = unsafe { (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))) };
        Self(quarters!(|q| {
            let half = if q < 2 { low } else { high };
            let words = if q.is_multiple_of(2) { vget_low_s16(half) } else { vget_high_s16(half) };
            vcvtq_f32_s32(vmovl_s16(words))
        }))
    }
    #[inline(always)]
    unsafe fn store_i8(self, target: *mut i8) -> i32 {
        let words = quarters!(|q| vqmovn_s32(vcvtnq_s32_f32(self.0[q])));
        // SAFETY: the caller guarantees sixteen writable i8.
        unsafe {
            let low = vqmovn_s16(vcombine_s16(words[0], words[1]));
            let high = vqmovn_s16(vcombine_s16(words[2], words[3]));
            let bytes = vcombine_s8(low, high);
            vst1q_s8(target, bytes);
            i32::from(vaddlvq_s8(bytes))
        }
    }
}
