//! Embeddings and moved rows.

use super::Report;
use super::oracle::{Rows, buffer, matrix, noise, rms_norm, unwritten};
use crate::Result;
use crate::config::Activation;
use crate::ops::{
    AttentionHeads, AttentionLimits, AttentionMetadata, Context, DeviceInputs, DeviceSampler, KvCache,
    KvCacheDType, SampleParams, SampledTokens, StepInputs, embed, gated, gather_rows, norm_part,
    norm_residual,
};
use crate::weights::DType;

use super::attention::one_layer;

/// Rows of the table of embeddings.
const VOCABULARY: usize = 21;

pub(super) fn run(context: &Context, report: &mut dyn Report) {
    for dtype in context.own_types() {
        // A few units of a row, and more than threads of a group.
        for cols in [48_usize, 1056].map(|cols| cols.next_multiple_of(dtype.block_len())) {
            // Tiles combine scales in half precision, and have weights of two bytes as halves.
            let is_rounded = context.has_tensor_cores() && (dtype.block_len() == 256 || dtype == DType::BF16);
            let limit = if is_rounded { 3e-7 } else { 0.0 };
            let name = format!("embed {dtype}, rows of {cols}");
            report.compare(context, name, limit, |context| embedding(context, dtype, cols, 1.0));
        }
    }
    // A power of two is exact.
    let name = "embed F32, four times".to_owned();
    report.compare(context, name, 0.0, |context| embedding(context, DType::F32, 48, 4.0));
    if context.has_tensor_cores() {
        let name = "embed Q8_0, four times".to_owned();
        report.compare(context, name, 3e-7, |context| embedding(context, DType::Q8_0, 64, 4.0));
    }
    report.compare(context, "gather_rows".to_owned(), 0.0, gathering);
    let clamped = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
    for activation in [Activation::Silu, Activation::GeluTanh, clamped] {
        for width in [48, 1056] {
            let name = format!("gated {activation:?}, rows of {width}");
            report.compare(context, name, 1e-12, |context| gating(context, activation, width));
        }
    }
    // Fewer values than threads, and several for each.
    for width in [48, 1056] {
        let name = format!("norm_residual, rows of {width}");
        report.compare(context, name, 1e-12, |context| norm_residual_rows(context, width));
    }
    for (len, first) in [(48, 0), (48, 16), (1056, 32)] {
        let name = format!("norm_part, {len} values from {first} on");
        report.compare(context, name, 1e-12, |context| norm_part_of_rows(context, len, first));
    }
    // Tables in row order, and in tiles on tensor cores.
    for dtype in [DType::F32, DType::F16] {
        if let Some(sampler) = DeviceSampler::new(context).transpose() {
            let name = format!("embed what was sampled, {dtype}");
            report.check(name, 0.0, || sampled(context, sampler?, dtype));
        }
    }
}

/// Calls `run` with the batch metadata of a step, on the device if it needs it there.
fn with_step<R>(
    context: &Context,
    token_ids: &[u32],
    sampled: Option<&SampledTokens>,
    outputs: &[usize],
    run: impl FnOnce(&StepInputs<'_>) -> Result<R>,
) -> Result<R> {
    let heads = AttentionHeads::new(1, 1, 16);
    let limits = AttentionLimits {
        heads,
        max_window: None,
        max_model_len: 16,
        max_num_tokens: token_ids.len(),
        max_num_rows: 1,
    };
    let cache = KvCache::new(context, &one_layer(1, 1, 16), 1, 16, KvCacheDType::F16)?;
    let mut inputs = DeviceInputs::new(context, &limits, 16)?;
    let mut metadata = AttentionMetadata::default();
    metadata.clear();
    let mut step = StepInputs::new(token_ids, token_ids, outputs, &metadata);
    step.sampled = sampled;
    run(&inputs.upload(context, step, &cache)?)
}

fn embedding(context: &Context, dtype: DType, cols: usize, scale: f32) -> Result<Rows> {
    let table = matrix(context, dtype, VOCABULARY, cols, 1)?;
    let token_ids: Vec<u32> = (0..11).map(|index| (20 + index * 17) % VOCABULARY as u32).collect();
    let mut out = unwritten(context, cols, token_ids.len())?;
    with_step(context, &token_ids, None, &[], |step| embed(context, step, &table, scale, &mut out))?;
    Rows::of(&out, token_ids.len())
}

/// Embeddings of tokens that the device has sampled: none, because logits were NaN, one past the table, and its last
/// one. The error is 0 if the first two are zeros and the last one equals the embedding of a token that the host
/// passes.
fn sampled(context: &Context, mut sampler: DeviceSampler, dtype: DType) -> Result<f64> {
    const COLS: usize = 48;
    let vocab_size = VOCABULARY + 4;
    let peak = |token_id: usize| (0..vocab_size).map(move |id| if id == token_id { 1.0 } else { 0.0 });
    let none = std::iter::repeat_n(f32::NAN, vocab_size);
    // The second of two steps is checked.
    let steps: [Vec<f32>; 2] = [
        peak(0).chain(peak(1)).chain(peak(2)).collect(),
        none.chain(peak(VOCABULARY)).chain(peak(VOCABULARY - 1)).collect(),
    ];
    let steps = [buffer(context, &steps[0], vocab_size, 3)?, buffer(context, &steps[1], vocab_size, 3)?];
    sampler.begin(context, std::iter::repeat_n(SampleParams::greedy(), 3), steps.len())?;
    steps.iter().try_for_each(|logits| sampler.launch(context, logits))?;
    let tokens = sampler.on_device(context, 1)?;
    let table = matrix(context, dtype, VOCABULARY, COLS, 1)?;
    let mut last = unwritten(context, COLS, 1)?;
    let last_id = [VOCABULARY as u32 - 1];
    with_step(context, &last_id, None, &[], |step| embed(context, step, &table, 1.0, &mut last))?;
    let expected = [vec![0.0; 2 * COLS], last.read(1, <[f32]>::to_vec)?].concat();
    let mut out = unwritten(context, COLS, 3)?;
    with_step(context, &[0; 3], Some(&tokens), &[], |step| embed(context, step, &table, 1.0, &mut out))?;
    // Of two values that are no numbers, none equals the other.
    out.read(3, |out| if out == expected { 0.0 } else { f64::INFINITY })
}

fn gathering(context: &Context) -> Result<Rows> {
    const WIDTH: usize = 50;
    const OUTPUTS: [usize; 4] = [1, 2, 5, 8];
    let mut x = buffer(context, &noise(1, 9 * WIDTH), WIDTH, 9)?;
    with_step(context, &[0; 9], None, &OUTPUTS, |step| gather_rows(context, step, &mut x))?;
    Rows::of(&x, OUTPUTS.len())
}

/// Gates of both signs, some of them so large that the result is 0 or the full other half.
fn gating(context: &Context, activation: Activation, width: usize) -> Result<Rows> {
    const NUM_ROWS: usize = 3;
    let mut halves = noise(3, NUM_ROWS * 2 * width);
    halves.iter_mut().step_by(3).for_each(|value| *value *= 30.0);
    let halves = buffer(context, &halves, 2 * width, NUM_ROWS)?;
    let mut out = unwritten(context, width, NUM_ROWS)?;
    gated(context, activation, NUM_ROWS, &halves, &mut out)?;
    Rows::of(&out, NUM_ROWS)
}

/// Rows so small that the epsilon shows.
fn norm_residual_rows(context: &Context, width: usize) -> Result<Rows> {
    const NUM_ROWS: usize = 3;
    let small: Vec<f32> = noise(4, NUM_ROWS * width).iter().map(|value| value * 1e-3).collect();
    let y = buffer(context, &small, width, NUM_ROWS)?;
    let mut x = buffer(context, &noise(5, NUM_ROWS * width), width, NUM_ROWS)?;
    norm_residual(context, NUM_ROWS, &y, &rms_norm(context, 6, width, 1e-6)?, &mut x)?;
    Rows::of(&x, NUM_ROWS)
}

/// Values so small that the epsilon shows, among others that are unchanged.
fn norm_part_of_rows(context: &Context, len: usize, first: usize) -> Result<Rows> {
    const NUM_ROWS: usize = 3;
    let width = first + len + 7;
    let small: Vec<f32> = noise(4, NUM_ROWS * width).iter().map(|value| value * 1e-3).collect();
    let mut x = buffer(context, &small, width, NUM_ROWS)?;
    norm_part(context, NUM_ROWS, &mut x, first, &rms_norm(context, 6, len, 1e-6)?)?;
    // Its neighbours are small in comparison.
    let mut rows = Rows::of(&x, NUM_ROWS)?;
    for row in rows.values.chunks_mut(width) {
        row[..first].iter_mut().for_each(|value| *value *= 1e3);
        row[first + len..].iter_mut().for_each(|value| *value *= 1e3);
    }
    Ok(rows)
}
