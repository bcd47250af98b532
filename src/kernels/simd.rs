//! Vectors of sixteen f32 lanes, for whichever instruction set the machine has.
//!
//! A kernel is written once, over [`F32x16`], and compiled once per [`CpuLevel`]: only [`CpuLevel::run`] selects an
//! instruction set. Every operation has a fixed order, so that a kernel's result depends on the level, but never on the
//! other rows, the threads or the chunking.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod int8;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod tiles;

#[cfg(target_arch = "x86_64")]
pub(super) use amx::{Bf16Unit, MatrixUnit};
pub use int8::Int8Dot;
use portable::PortableVector;
#[cfg(test)]
pub(super) use tiles::SoftwareTiles;
#[cfg(not(target_arch = "x86_64"))]
pub(super) use tiles::{Bf16Unit, MatrixUnit};
pub(super) use tiles::{ByteTiles, TileSums};

/// An instruction set that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CpuLevel {
    /// Plain Rust; the compiler vectorises it for the target's baseline.
    Portable,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 with VNNI for 256 bits: AVX-VNNI, or AVX-512 VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// The same, and matmuls of BF16 matrices with AVX-512 BF16: their activations are rounded to bf16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// The same, and matmuls by the matrix unit, AMX: of quantised matrices with many rows, of BF16 ones with any.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// NEON with half precision and SDOT.
    #[cfg(target_arch = "aarch64")]
    NeonDotprod,
    /// The same, and SMMLA where several rows are multiplied.
    #[cfg(target_arch = "aarch64")]
    NeonI8mm,
}

/// A computation that is generic over the vector type.
pub trait Kernel {
    /// Its result.
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
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            let levels =
                &[Self::Portable, Self::Avx2, Self::AvxVnni, Self::Avx512Vnni, Self::Avx512Bf16, Self::Amx];
            let avx512_bf16 = avx512 && is_x86_feature_detected!("avx512bf16");
            let num_levels = match () {
                () if avx512_bf16 && amx::is_available() => 6,
                () if avx512_bf16 => 5,
                () if avx512 => 4,
                () if avx2 && is_x86_feature_detected!("avxvnni") => 3,
                () if avx2 => 2,
                () => 1,
            };
            &levels[..num_levels]
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected as has;
            let levels = &[Self::Portable, Self::NeonDotprod, Self::NeonI8mm];
            let dotprod = has!("fp16") && has!("dotprod");
            let num_levels = if dotprod && has!("i8mm") { 3 } else { 1 + usize::from(dotprod) };
            &levels[..num_levels]
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            &[Self::Portable]
        }
    }

    /// The name that is printed and that `--cpu-level` takes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "avx-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Self::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod => "neon-dotprod",
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => "neon-i8mm",
        }
    }

    /// Whether matmuls with BF16 matrices take activations in bf16.
    #[must_use]
    pub fn has_bf16_dot(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self, Self::Avx512Bf16 | Self::Amx);
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// True if there is a unit for matmuls of tiles.
    pub(super) fn has_matrix_unit(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self == Self::Amx;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// The unit of the calling thread for matmuls of tiles, if this level has one. A thread has one at a time.
    pub(super) fn matrix_unit(self) -> Option<MatrixUnit> {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `available` has checked that this process may use the unit.
        return self.has_matrix_unit().then(|| unsafe { MatrixUnit::new() });
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// True if a kernel can keep 32 vectors in registers.
    #[must_use]
    pub fn has_32_vectors(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self, Self::Avx512Vnni | Self::Avx512Bf16 | Self::Amx);
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Runs `kernel` compiled for this level without byte dot products: levels that differ in these alone share the
    /// code.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY, of all: `detect` and `available`, the only makers of these values outside this file's
        // tests, have checked that the machine has the instruction set.
        match self {
            Self::Portable => kernel.run::<PortableVector>(),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: see above.
            Self::Avx2 | Self::AvxVnni => unsafe { run_avx2(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: see above.
            Self::Avx512Vnni | Self::Avx512Bf16 | Self::Amx => unsafe { run_avx512(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: see above.
            Self::NeonDotprod | Self::NeonI8mm => unsafe { run_neon_dotprod(kernel) },
        }
    }

    /// Runs `kernel` compiled for this level, with its byte dot products ([`Int8Dot`]).
    #[inline]
    pub fn run_int8<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`; one of the two encodings is there.
            Self::AvxVnni if is_x86_feature_detected!("avxvnni") => unsafe { run_avx_vnni(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Self::AvxVnni => unsafe { run_avx512_vnni_of_256_bits(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as in `run`.
            Self::NeonI8mm => unsafe { run_neon_i8mm(kernel) },
            other => other.run(kernel),
        }
    }

    /// Runs `kernel` compiled for this level, and for [`F32x16::dot_bf16`] where the level has it. Other
    /// kernels do without, so that they are not compiled twice.
    #[inline]
    pub fn run_bf16<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Self::Avx512Bf16 => unsafe { run_avx512_bf16(kernel) },
            other => other.run(kernel),
        }
    }

    /// The same for bf16 dot products with `num_rows` input rows, 1 to 16; its sums are zero.
    pub(super) fn bf16_unit(self, num_rows: usize) -> Option<Bf16Unit> {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `available` has checked that this process may use the unit.
        return self.has_matrix_unit().then(|| unsafe { Bf16Unit::new(num_rows) });
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = num_rows;
            None
        }
    }

    /// Runs `kernel`, which is for machines with a matrix unit, compiled for this level. In tests, whose unit may be
    /// software, at every level; else it is only compiled for those that have one.
    ///
    /// # Panics
    /// If this level has none.
    #[inline]
    pub(super) fn run_tiles<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Self::Amx => unsafe { run_avx512(kernel) },
            #[cfg(test)]
            other => other.run(kernel),
            #[cfg(not(test))]
            _ => {
                drop(kernel);
                panic!("{} has no matrix unit", self.name())
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx2::Avx2Vector<{ avx2::WITHOUT_VNNI }>>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn run_avx_vnni<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx2::Avx2Vector<{ avx2::AVX_VNNI }>>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl,avx512vnni")]
fn run_avx512_vnni_of_256_bits<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx2::Avx2Vector<{ avx2::AVX512_VNNI }>>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx512::Avx512Vector<false>>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run_avx512_bf16<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx512::Avx512Vector<true>>()
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,fp16,dotprod")]
fn run_neon_dotprod<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<neon::NeonVector<false>>()
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,fp16,dotprod,i8mm")]
fn run_neon_i8mm<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<neon::NeonVector<true>>()
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
    /// `self + first weight · first activation + second weight · second activation` for the sixteen pairs
    /// of bf16 weights at `weights` and one pair of bf16 activations, the first in the lower half.
    #[inline(always)]
    unsafe fn dot_bf16(self, weights: *const u8, activations: u32) -> Self {
        // SAFETY: the caller guarantees sixteen readable pairs.
        unsafe { dot_bf16_in_f32(self, weights, activations) }
    }
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
    /// The larger of each lane; `other` where `self` is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller of each lane; `other` where `self` is NaN.
    fn min(self, other: Self) -> Self;
    /// `self * factor + addend`, fused where the machine can.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Each lane rounded to the nearest integer, ties to even.
    fn round(self) -> Self;
    /// `self · 2^exponent`, where `exponent` holds integers in -126..=127.
    fn scale_by_power_of_two(self, exponent: Self) -> Self;
    /// `2^self`, where the lanes hold integers in -128..=127; the lowest two are below the normal numbers.
    #[inline(always)]
    fn power_of_two(self) -> Self {
        let normal = self.max(Self::splat(-126.0));
        Self::splat(1.0).scale_by_power_of_two(normal).scale_by_power_of_two(self.sub(normal))
    }
    /// The sum of the lanes, in the fixed order of a binary tree.
    fn sum(self) -> f32;
    /// The largest lane.
    fn max_lane(self) -> f32;
    /// The largest magnitude of the lanes of both; infinite or NaN if any lane is.
    #[inline(always)]
    fn largest_magnitude(self, other: Self) -> f32 {
        let zero = Self::splat(0.0);
        let largest = self.max(zero.sub(self)).max(other.max(zero.sub(other))).max_lane();
        // x · 0 is 0 for a finite x and NaN otherwise.
        largest + self.mul(zero).add(other.mul(zero)).sum()
    }

    /// e^self with a relative error below 2.5e-7 between -87 and 88. Below -87.3 it stays at e^-87.3, about
    /// 1.2e-38, and above 88.7 at its value there: never zero, never infinite.
    ///
    /// Range reduction to ±ln2/2 and the minimax polynomial that the Cephes library uses for `expf`.
    #[inline(always)]
    fn exp(self) -> Self {
        let x = self.min(Self::splat(88.7)).max(Self::splat(-87.3));
        let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
        let n = n.min(Self::splat(127.0)).max(Self::splat(-126.0));
        // ln 2 as the sum of two numbers, so that n times the first is exact.
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

/// [`F32x16::dot_bf16`] of machines that have no instruction for it.
///
/// # Safety
/// As for the method.
#[inline(always)]
unsafe fn dot_bf16_in_f32<V: F32x16>(sum: V, weights: *const u8, activations: u32) -> V {
    // SAFETY: the caller guarantees sixteen readable pairs.
    let (first, second) = unsafe { V::load_bf16_pairs(weights) };
    let sum = first.mul_add(V::splat(f32::from_bits(activations << 16)), sum);
    second.mul_add(V::splat(f32::from_bits(activations & 0xffff_0000)), sum)
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

    struct SmallSums<'a>(&'a [i32; 16], [&'a mut [f32; 16]; 2]);

    impl Kernel for SmallSums<'_> {
        type Output = ();
        #[inline(always)]
        fn run<V: F32x16>(self) {
            let Self(sums, [small, any]) = self;
            // SAFETY: the arrays have sixteen elements.
            unsafe {
                let sums = V::load_sums(sums.as_ptr());
                V::from_small_sums(sums).store(small.as_mut_ptr());
                V::from_sums(sums).store(any.as_mut_ptr());
            }
        }
    }

    #[test]
    fn small_sums_become_the_same_f32_either_way() {
        const LIMIT: i32 = (1 << 22) - 1;
        // The largest codes 32 times are among them.
        let largest = 32 * 128 * 127;
        let sums = [0, 1, -1, 2, -3, 255, -256, 65_535, -65_536, largest, -largest, 1 << 21, -(1 << 21)];
        let sums: [i32; 16] = std::array::from_fn(|lane| match lane {
            0..13 => sums[lane],
            13 => LIMIT,
            14 => -LIMIT,
            _ => LIMIT / 3,
        });
        for &level in CpuLevel::available() {
            let (mut small, mut any) = ([f32::NAN; 16], [f32::NAN; 16]);
            level.run(SmallSums(&sums, [&mut small, &mut any]));
            let wanted = sums.map(|sum| (sum as f32).to_bits());
            assert_eq!(small.map(f32::to_bits), wanted, "{level:?}");
            assert_eq!(any.map(f32::to_bits), wanted, "{level:?}");
        }
    }

    struct LargestMagnitude<'a>(&'a [f32; 32]);

    impl Kernel for LargestMagnitude<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<V: F32x16>(self) -> f32 {
            // SAFETY: the array has 32 elements.
            unsafe { V::load(self.0.as_ptr()).largest_magnitude(V::load(self.0.as_ptr().add(16))) }
        }
    }

    #[test]
    fn the_largest_magnitude_is_found_in_every_lane() {
        for &level in CpuLevel::available() {
            for lane in 0..32 {
                for value in [3.5, -3.5, f32::MAX, -f32::MAX, 1e-42] {
                    let mut values = [value.abs() / -2.0; 32];
                    values[lane] = value;
                    assert_eq!(level.run(LargestMagnitude(&values)), value.abs(), "{level:?} lane {lane}");
                }
                for invalid in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut values = [f32::MAX; 32];
                    values[lane] = invalid;
                    assert!(!level.run(LargestMagnitude(&values)).is_finite(), "{level:?} lane {lane}");
                }
            }
            assert_eq!(level.run(LargestMagnitude(&[-0.0; 32])).to_bits(), 0);
        }
    }

    struct StoreBytes<'a>(&'a [f32; 16], &'a mut [i8; 16]);

    impl Kernel for StoreBytes<'_> {
        type Output = i32;
        #[inline(always)]
        fn run<V: F32x16>(self) -> i32 {
            // SAFETY: both arrays have sixteen elements.
            unsafe { V::load(self.0.as_ptr()).store_i8(self.1.as_mut_ptr()) }
        }
    }

    #[test]
    fn bytes_are_stored_with_their_sum() {
        for &level in CpuLevel::available() {
            for step in 0..255 {
                let lanes: [i8; 16] =
                    std::array::from_fn(|lane| (step * (lane as i32 + 1) % 255 - 127) as i8);
                let mut stored = [0; 16];
                let sum = level.run(StoreBytes(&lanes.map(f32::from), &mut stored));
                assert_eq!((sum, stored), (lanes.map(i32::from).iter().sum(), lanes), "{level:?}");
            }
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
