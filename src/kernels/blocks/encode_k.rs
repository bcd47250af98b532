//! Encoders of the 256-value super-blocks Q4_K, Q5_K and Q6_K.
//!
//! All minimise the weighted square error Σ w·(x − x̂)² in three stages: a grid search over the step size
//! of each sub-block on its own, with a least-squares fit for every candidate; rounding of the sub-block
//! scales to the format's integers, with their neighbours tried as well; and a last least-squares fit of
//! the super-block's f16 factors to the codes found. Weights are σ + |x| with σ the sub-block's root mean
//! square: large weights matter more, small ones are not ignored.
//!
//! The inner loops run over eight lanes and round by adding 2²³, so that the compiler can vectorise them
//! for the baseline instruction set: a model is encoded while the user waits.

use half::f16;

use super::store_f16;
use crate::Result;

/// Step sizes tried for Q4_K and Q5_K, as how many steps more or fewer than there are codes for span the range of the
/// sub-block.
const AFFINE_STEPS: [f32; 6] = [0.0, -1.4, -0.8, -0.4, 0.4, 1.0];
/// Step sizes tried for Q6_K, as the code that the value of largest magnitude gets, negated.
const Q6_K_STEPS: [f32; 7] = [32.0, 31.1, 31.4, 31.7, 32.3, 32.6, 32.9];

const LANES: usize = 8;

pub(super) fn q4_k(values: &[f32; 256], block: &mut [u8; 144]) -> Result<()> {
    let (head, nibbles) = block.split_at_mut(16);
    let codes = super_block(values, 15.0, head)?;
    store_nibbles(&codes, nibbles);
    Ok(())
}

pub(super) fn q5_k(values: &[f32; 256], block: &mut [u8; 176]) -> Result<()> {
    let (head, rest) = block.split_at_mut(16);
    let (high, nibbles) = rest.split_at_mut(32);
    let codes = super_block(values, 31.0, head)?;
    store_nibbles(&codes.map(|codes| codes.map(|code| code & 15)), nibbles);
    for (l, byte) in high.iter_mut().enumerate() {
        *byte = codes.iter().enumerate().fold(0, |bits, (j, codes)| bits | ((codes[l] >> 4) << j));
    }
    Ok(())
}

/// The codes, up to `max_code`, of a super-block with minima, whose factors and levels go into `head`.
fn super_block(values: &[f32; 256], max_code: f32, head: &mut [u8]) -> Result<[[u8; 32]; 8]> {
    let (values, _) = values.as_chunks::<32>();
    let sub_blocks: [SubBlock<'_>; 8] = std::array::from_fn(|j| SubBlock::new(&values[j], max_code));
    let fits = sub_blocks.each_ref().map(fit_affine);
    let largest = |part: fn(&Affine) -> f32| fits.iter().map(part).fold(0.0_f32, f32::max);
    let mut factors = Factors::new(largest(|fit| fit.scale) / 63.0, largest(|fit| fit.min) / 63.0);
    let levels: [Levels; 8] = std::array::from_fn(|j| round_levels(&sub_blocks[j], fits[j], factors));
    let refitted = refit_factors(&sub_blocks, &levels, factors);
    if total_error(&sub_blocks, &levels, refitted) < total_error(&sub_blocks, &levels, factors) {
        factors = refitted;
    }

    store_f16(factors.scale, &mut head[0..2])?;
    store_f16(factors.min, &mut head[2..4])?;
    pack_levels(&levels, &mut head[4..16]);
    Ok(std::array::from_fn(|j| sub_blocks[j].codes(levels[j].under(factors))))
}

/// Two sub-blocks share 32 bytes: the even one has the low halves.
fn store_nibbles(codes: &[[u8; 32]; 8], out: &mut [u8]) {
    for (pair, bytes) in codes.as_chunks::<2>().0.iter().zip(out.chunks_exact_mut(32)) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = pair[0][l] | (pair[1][l] << 4);
        }
    }
}

pub(super) fn q6_k(values: &[f32; 256], block: &mut [u8; 210]) -> Result<()> {
    let (sub_blocks, _) = values.as_chunks::<16>();
    let weights: [[f32; 16]; 16] = std::array::from_fn(|j| importance(&sub_blocks[j]));
    let scales: [f32; 16] = std::array::from_fn(|j| fit_symmetric(&sub_blocks[j], &weights[j]));
    let extreme = scales.iter().fold(0.0_f32, |a, &b| if b.abs() > a.abs() { b } else { a });
    // The largest scale gets −128, the level that has no positive counterpart.
    let d = round_to_f16(extreme / -128.0);
    let levels: [f32; 16] =
        std::array::from_fn(|j| round_symmetric(&sub_blocks[j], &weights[j], scales[j], d));

    store_f16(d, &mut block[208..])?;
    for (j, level) in levels.iter().enumerate() {
        block[192 + j] = (*level as i8).cast_unsigned();
    }
    block[..192].fill(0);
    for (j, x) in sub_blocks.iter().enumerate() {
        let inverse = reciprocal(d * levels[j]);
        for (i, &x) in x.iter().enumerate() {
            let k = 16 * j + i;
            let (half, group, l) = (k / 128, k % 128 / 32, k % 32);
            let code = (symmetric_code(x, inverse) + 32.0) as u8;
            block[64 * half + 32 * (group % 2) + l] |= (code & 15) << (4 * (group / 2));
            block[128 + 32 * half + l] |= (code >> 4) << (2 * group);
        }
    }
    Ok(())
}

/// A sub-block's code before rounding: x ≈ scale·q − min, with both ≥ 0 and q in 0..=15, or 0..=31.
#[derive(Clone, Copy)]
struct Affine {
    scale: f32,
    min: f32,
}

/// The 6-bit integers of a sub-block, as floats.
#[derive(Clone, Copy)]
struct Levels {
    scale: f32,
    min: f32,
}

/// The f16 factors of a super-block.
#[derive(Clone, Copy)]
struct Factors {
    scale: f32,
    min: f32,
}

impl Factors {
    fn new(scale: f32, min: f32) -> Self {
        Self { scale: round_to_f16(scale), min: round_to_f16(min) }
    }
}

impl Levels {
    fn under(self, factors: Factors) -> Affine {
        Affine { scale: factors.scale * self.scale, min: factors.min * self.min }
    }
}

/// A sub-block with its weights and the sums over them that no choice of codes changes.
struct SubBlock<'a> {
    x: &'a [f32; 32],
    /// The largest code.
    max_code: f32,
    weights: [f32; 32],
    sum_w: f32,
    sum_wx: f32,
    sum_wxx: f32,
}

/// Weighted sums over a sub-block's codes q and its values.
#[derive(Clone, Copy)]
struct CodeSums {
    wq: f32,
    wqq: f32,
    wxq: f32,
}

impl<'a> SubBlock<'a> {
    fn new(x: &'a [f32; 32], max_code: f32) -> Self {
        let weights = importance(x);
        let sum = |term: fn(f32, f32) -> f32| x.iter().zip(&weights).map(|(x, w)| term(*x, *w)).sum();
        let (sum_w, sum_wx, sum_wxx) = (sum(|_, w| w), sum(|x, w| w * x), sum(|x, w| w * x * x));
        Self { x, max_code, weights, sum_w, sum_wx, sum_wxx }
    }

    /// The nearest codes.
    fn codes(&self, Affine { scale, min }: Affine) -> [u8; 32] {
        let inverse = reciprocal(scale);
        self.x.map(|x| affine_code(x, min, inverse, self.max_code) as u8)
    }

    /// The sums for the codes nearest to the values under `scale` and `min`.
    fn code_sums(&self, Affine { scale, min }: Affine) -> CodeSums {
        let inverse = reciprocal(scale);
        let mut lanes = [[0.0_f32; LANES]; 3];
        for (x, weights) in self.x.as_chunks::<LANES>().0.iter().zip(self.weights.as_chunks::<LANES>().0) {
            for lane in 0..LANES {
                let q = affine_code(x[lane], min, inverse, self.max_code);
                let wq = weights[lane] * q;
                lanes[0][lane] += wq;
                lanes[1][lane] += wq * q;
                lanes[2][lane] += wq * x[lane];
            }
        }
        let [wq, wqq, wxq] = lanes.map(|lane| lane.iter().sum());
        CodeSums { wq, wqq, wxq }
    }

    /// The weighted square error of x ≈ scale·q − min.
    fn error(&self, sums: CodeSums, Affine { scale, min }: Affine) -> f32 {
        self.sum_wxx
            + scale * (scale * sums.wqq - 2.0 * sums.wxq)
            + min * (min * self.sum_w + 2.0 * self.sum_wx - 2.0 * scale * sums.wq)
    }

    /// The least-squares scale and min for these codes, if there is one with min ≥ 0.
    fn fit(&self, sums: CodeSums) -> Option<Affine> {
        let determinant = self.sum_w * sums.wqq - sums.wq * sums.wq;
        if determinant > 0.0 {
            let scale = (self.sum_w * sums.wxq - self.sum_wx * sums.wq) / determinant;
            let min = (scale * sums.wq - self.sum_wx) / self.sum_w;
            if scale > 0.0 && min >= 0.0 {
                return Some(Affine { scale, min });
            }
        }
        let scale = sums.wxq / sums.wqq;
        (scale.is_finite() && scale > 0.0).then_some(Affine { scale, min: 0.0 })
    }
}

fn fit_affine(sub_block: &SubBlock<'_>) -> Affine {
    // The format has no positive offset, so the range always includes zero.
    let low = sub_block.x.iter().fold(0.0_f32, |low, &x| low.min(x));
    let high = sub_block.x.iter().fold(0.0_f32, |high, &x| high.max(x));
    let range = high - low;
    if range < f32::MIN_POSITIVE * 64.0 {
        return Affine { scale: 0.0, min: 0.0 };
    }
    let mut best = Affine { scale: range / sub_block.max_code, min: -low };
    let mut best_error = f32::INFINITY;
    for more in AFFINE_STEPS {
        let scale = range / (sub_block.max_code + more);
        let sums = sub_block.code_sums(Affine { scale, min: -low });
        let Some(fit) = sub_block.fit(sums) else { continue };
        let error = sub_block.error(sums, fit);
        if error < best_error {
            best_error = error;
            best = fit;
        }
    }
    // The codes that belong to the fit may differ from those it was made for.
    sub_block.fit(sub_block.code_sums(best)).unwrap_or(best)
}

/// Rounds a fit to 6-bit integers: for the nearest scale and its two neighbours, the best min.
fn round_levels(sub_block: &SubBlock<'_>, fit: Affine, factors: Factors) -> Levels {
    let nearest = round_level(fit.scale, factors.scale, 63.0);
    let mut best = Levels { scale: nearest, min: round_level(fit.min, factors.min, 63.0) };
    let mut best_error = f32::INFINITY;
    for scale in [nearest, nearest - 1.0, nearest + 1.0] {
        if !(0.0..=63.0).contains(&scale) {
            continue;
        }
        let guess = Levels { scale, min: best.min };
        let sums = sub_block.code_sums(guess.under(factors));
        let min = (scale * factors.scale * sums.wq - sub_block.sum_wx) / sub_block.sum_w;
        let levels = Levels { scale, min: round_level(min, factors.min, 63.0) };
        let error = sub_block.error(sums, levels.under(factors));
        if error < best_error {
            best_error = error;
            best = levels;
        }
    }
    best
}

/// Least squares for x ≈ scale·(level·q) − min·(level), the two factors being unknown.
fn refit_factors(sub_blocks: &[SubBlock<'_>; 8], levels: &[Levels; 8], factors: Factors) -> Factors {
    let (mut aa, mut ab, mut bb, mut ax, mut bx) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (sub_block, level) in sub_blocks.iter().zip(levels) {
        let sums = sub_block.code_sums(level.under(factors));
        aa += level.scale * level.scale * sums.wqq;
        ab += level.scale * level.min * sums.wq;
        bb += level.min * level.min * sub_block.sum_w;
        ax += level.scale * sums.wxq;
        bx += level.min * sub_block.sum_wx;
    }
    let determinant = aa * bb - ab * ab;
    let scale = (ax * bb - bx * ab) / determinant;
    let min = (ax * ab - bx * aa) / determinant;
    let usable = determinant > 0.0 && scale.is_finite() && min.is_finite() && min >= 0.0;
    if usable { Factors::new(scale, min) } else { factors }
}

fn total_error(sub_blocks: &[SubBlock<'_>; 8], levels: &[Levels; 8], factors: Factors) -> f32 {
    let error = |(sub_block, level): (&SubBlock<'_>, &Levels)| {
        let affine = level.under(factors);
        sub_block.error(sub_block.code_sums(affine), affine)
    };
    sub_blocks.iter().zip(levels).map(error).sum()
}

/// The code of `x`, before clamping, is `(x + min)·inverse`.
fn affine_code(x: f32, min: f32, inverse: f32, max_code: f32) -> f32 {
    round_positive(((x + min) * inverse).clamp(0.0, max_code))
}

/// The inverse of the unpacking in `decode`.
fn pack_levels(levels: &[Levels; 8], packed: &mut [u8]) {
    packed.fill(0);
    for (j, level) in levels.iter().enumerate() {
        let (scale, min) = (level.scale as u8, level.min as u8);
        if j < 4 {
            packed[j] |= scale;
            packed[j + 4] |= min;
        } else {
            packed[j + 4] = (scale & 15) | (min << 4);
            packed[j - 4] |= (scale >> 4) << 6;
            packed[j] |= (min >> 4) << 6;
        }
    }
}

/// The scale of x ≈ scale·q, q in −32..=31; its sign is free.
fn fit_symmetric(x: &[f32; 16], weights: &[f32; 16]) -> f32 {
    let extreme = x.iter().fold(0.0_f32, |a, &b| if b.abs() > a.abs() { b } else { a });
    if extreme.abs() < f32::MIN_POSITIVE * 64.0 {
        return 0.0;
    }
    let mut best = extreme / -32.0;
    let mut best_gain = 0.0;
    for steps in Q6_K_STEPS {
        let (xq, qq) = symmetric_moments(x, weights, steps / -extreme);
        // With the least-squares scale xq/qq the error is Σwx² less this.
        let gain = xq * xq / qq;
        if gain > best_gain && gain.is_finite() {
            best_gain = gain;
            best = xq / qq;
        }
    }
    best
}

/// The best integer level in −128..=127 among the nearest one and its neighbours.
fn round_symmetric(x: &[f32; 16], weights: &[f32; 16], scale: f32, d: f32) -> f32 {
    let nearest = (scale * reciprocal(d)).round().clamp(-128.0, 127.0);
    let mut best = nearest;
    let mut best_gain = f32::NEG_INFINITY;
    for level in [nearest, nearest - 1.0, nearest + 1.0] {
        if !(-128.0..=127.0).contains(&level) {
            continue;
        }
        let scale = d * level;
        let (xq, qq) = symmetric_moments(x, weights, reciprocal(scale));
        let gain = scale * (2.0 * xq - scale * qq);
        if gain > best_gain {
            best_gain = gain;
            best = level;
        }
    }
    best
}

fn symmetric_moments(x: &[f32; 16], weights: &[f32; 16], inverse: f32) -> (f32, f32) {
    let mut lanes = [[0.0_f32; LANES]; 2];
    for (x, weights) in x.as_chunks::<LANES>().0.iter().zip(weights.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            let q = symmetric_code(x[lane], inverse);
            lanes[0][lane] += weights[lane] * x[lane] * q;
            lanes[1][lane] += weights[lane] * q * q;
        }
    }
    let [xq, qq] = lanes.map(|lane| lane.iter().sum());
    (xq, qq)
}

fn symmetric_code(x: f32, inverse: f32) -> f32 {
    round_positive((x * inverse + 32.0).clamp(0.0, 63.0)) - 32.0
}

fn importance<const N: usize>(x: &[f32; N]) -> [f32; N] {
    let mean_square = x.iter().map(|x| x * x).sum::<f32>() / N as f32;
    let sigma = mean_square.sqrt();
    x.map(|x| sigma + x.abs())
}

/// `value / step` as an integer in 0..=`limit`.
fn round_level(value: f32, step: f32, limit: f32) -> f32 {
    round_positive((value * reciprocal(step)).clamp(0.0, limit))
}

/// Rounds 0 ≤ x < 2²² to the nearest integer: the sum has no capacity for a fraction.
fn round_positive(x: f32) -> f32 {
    const NO_FRACTION: f32 = 8_388_608.0;
    (x + NO_FRACTION) - NO_FRACTION
}

fn round_to_f16(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

/// 1/x, but 0 where that is not finite, so that all codes of an empty step are equal.
fn reciprocal(x: f32) -> f32 {
    let inverse = 1.0 / x;
    if inverse.is_finite() { inverse } else { 0.0 }
}
