//! Vectors of sixteen f32 lanes, for whichever instruction set the machine has.
//!
//! A kernel is written once, over [`F32x16`], and compiled once per [`CpuLevel`]: [`CpuLevel::run`] is
//! the only place where an instruction set is chosen. Every operation has a fixed order, so that a
//! kernel's result depends on the level, but never on the other rows, the threads or the chunking.

mod int8;

pub use int8::Int8Dot;

/// An instruction set that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CpuLevel {
    /// Plain Rust; the compiler vectorises it for the target's baseline (NEON on aarch64).
    Portable,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
}

/// A computation that is generic over the vector type.
pub trait Kernel {
    /// What it returns.
    type Output;
    /// Does the work. Implementations are `#[inline(always)]`, so that the code is compiled for the
    /// instruction set of the function it is inlined into.
    fn run<V: F32x16>(self) -> Self::Output;
}

impl CpuLevel {
    /// The best level of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self::available().last().copied().unwrap_or(Self::Portable)
    }

    /// Every level that this machine can run, slowest first.
    #[must_use]
    pub fn available() -> &'static [Self] {
        #[cfg(target_arch = "x86_64")]
        {
            if !(is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c"))
            {
                return &[Self::Portable];
            }
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                return &[Self::Portable, Self::Avx2, Self::Avx512Vnni];
            }
            &[Self::Portable, Self::Avx2]
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            &[Self::Portable]
        }
    }

    /// The name that is printed and that `TINYVLLM_CPU_LEVEL` takes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "aarch64")]
            Self::Portable => "neon",
            #[cfg(not(target_arch = "aarch64"))]
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => "avx512-vnni",
        }
    }

    /// Runs `kernel` compiled for this level.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Portable => kernel.run::<PortableVector>(),
            // SAFETY: `detect` and `available`, the only makers of these values outside this file's
            // tests, have checked that the machine has the instruction set.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => unsafe { run_avx512(kernel) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<x86::Avx2Vector>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<x86::Avx512Vector>()
}

/// Sixteen f32 lanes.
///
/// # Safety
/// Methods that take a pointer read or write sixteen elements there, unaligned. All methods must only
/// be reached through [`CpuLevel::run`], which makes sure that the machine has the instructions.
#[expect(clippy::missing_safety_doc, reason = "the contract of every method is the trait's")]
pub unsafe trait F32x16: Int8Dot {
    /// All lanes equal to `value`.
    fn splat(value: f32) -> Self;
    /// Reads sixteen f32.
    unsafe fn load(source: *const f32) -> Self;
    /// Reads sixteen f16.
    unsafe fn load_f16(source: *const u16) -> Self;
    /// Reads sixteen bf16.
    unsafe fn load_bf16(source: *const u16) -> Self;
    /// Reads sixteen pairs of bf16: the first of each pair, and the second.
    unsafe fn load_bf16_pairs(source: *const u8) -> (Self, Self);
    /// Writes sixteen f32.
    unsafe fn store(self, target: *mut f32);
    /// Writes sixteen f16, rounded to nearest even.
    unsafe fn store_f16(self, target: *mut u16);
    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self * other`.
    fn mul(self, other: Self) -> Self;
    /// `self / other`.
    fn div(self, other: Self) -> Self;
    /// The larger of each lane.
    fn max(self, other: Self) -> Self;
    /// The smaller of each lane.
    fn min(self, other: Self) -> Self;
    /// `self * factor + addend`, fused where the machine can.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Each lane rounded to the nearest integer, ties to even.
    fn round(self) -> Self;
    /// `self · 2^exponent`, where `exponent` holds integers in -126..=127.
    fn scale_by_power_of_two(self, exponent: Self) -> Self;
    /// The sum of the lanes, in the fixed order of a binary tree.
    fn sum(self) -> f32;
    /// The largest lane.
    fn max_lane(self) -> f32;

    /// e^self with a relative error below 2.5e-7 between -87 and 88. Below -87.3 it stays at e^-87.3, about
    /// 1.2e-38, and above 88.7 at its value there: never zero, never infinite.
    ///
    /// Range reduction to ±ln2/2 and the minimax polynomial that the Cephes library uses for `expf`.
    #[inline(always)]
    fn exp(self) -> Self {
        let x = self.min(Self::splat(88.7)).max(Self::splat(-87.3));
        let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
        let n = n.min(Self::splat(127.0)).max(Self::splat(-126.0));
        // ln 2 in two parts, so that the product with n is exact in the first.
        let r = n.mul_add(Self::splat(-0.693_359_4), x);
        let r = n.mul_add(Self::splat(2.121_944_4e-4), r);
        let mut p = Self::splat(1.987_569_1e-4);
        p = p.mul_add(r, Self::splat(1.398_199_9e-3));
        p = p.mul_add(r, Self::splat(8.333_452e-3));
        p = p.mul_add(r, Self::splat(4.166_579_6e-2));
        p = p.mul_add(r, Self::splat(1.666_666_5e-1));
        p = p.mul_add(r, Self::splat(0.5));
        let p = p.mul_add(r.mul(r), r.add(Self::splat(1.0)));
        p.scale_by_power_of_two(n)
    }
}

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
pub struct PortableVector([f32; 16]);

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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::F32x16;

    /// Two AVX2 registers.
    #[derive(Debug, Clone, Copy)]
    pub(super) struct Avx2Vector(pub(super) __m256, pub(super) __m256);

    /// One AVX-512 register.
    #[derive(Debug, Clone, Copy)]
    pub(super) struct Avx512Vector(pub(super) __m512);

    macro_rules! lanewise {
        ($self:expr, $other:expr, $op:ident) => {
            // SAFETY: this type is only used inside `run_avx2`, on machines with AVX2.
            unsafe { Self($op($self.0, $other.0), $op($self.1, $other.1)) }
        };
    }

    // SAFETY: loads and stores are of sixteen elements, unaligned.
    unsafe impl F32x16 for Avx2Vector {
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
    }

    macro_rules! whole {
        ($op:ident($($argument:expr),*)) => {
            // SAFETY: this type is only used inside `run_avx512`, on machines with AVX-512.
            unsafe { Self($op($($argument),*)) }
        };
    }

    // SAFETY: loads and stores are of sixteen elements, unaligned.
    unsafe impl F32x16 for Avx512Vector {
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
                let eight =
                    _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Exp<'a>(&'a [f32; 16], &'a mut [f32; 16]);

    impl Kernel for Exp<'_> {
        type Output = (f32, f32);
        #[inline(always)]
        fn run<V: F32x16>(self) -> (f32, f32) {
            // SAFETY: both arrays have sixteen elements.
            unsafe {
                let x = V::load(self.0.as_ptr());
                x.exp().store(self.1.as_mut_ptr());
                (x.sum(), x.max_lane())
            }
        }
    }

    #[test]
    fn every_f16_has_its_value() {
        for bits in 0..=u16::MAX {
            let (value, wanted) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(value.to_bits() == wanted.to_bits() || value.is_nan() && wanted.is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn exp_sum_and_max_agree_with_f64_on_every_level() {
        for &level in CpuLevel::available() {
            for step in -700..700 {
                let input: [f32; 16] = std::array::from_fn(|lane| step as f32 * 0.125 + lane as f32 * 0.0071);
                let mut output = [0.0; 16];
                let (sum, max) = level.run(Exp(&input, &mut output));
                let wanted: f64 = input.iter().map(|&x| f64::from(x)).sum();
                assert!((f64::from(sum) - wanted).abs() < 1e-3, "{level:?} sum {sum} {wanted}");
                assert_eq!(max, input[15]);
                for (&x, &y) in input.iter().zip(&output) {
                    if !(-87.0..88.0).contains(&x) {
                        continue;
                    }
                    let wanted = f64::from(x).exp();
                    let error = (f64::from(y) - wanted).abs() / wanted;
                    assert!(error < 2.5e-7, "{level:?} exp({x}) = {y}, wanted {wanted}, error {error}");
                }
            }
        }
    }
}
