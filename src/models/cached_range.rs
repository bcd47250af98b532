//! How large cached keys and values can be, from the weights: half precision does not hold them all.
//!
//! The input of a projection is normalised, so its length is known, and with it the largest output of a row of weights.
//! That bounds every input; for published models it is far below the limit of half precision.

use std::thread;

use crate::Result;
use crate::config::{ModelConfig, QkNorm, RopeScaling};
use crate::ops::cpu::range::OutputRange;
use crate::weights::Checkpoint;

/// The factor by which weights that are converted at load may exceed those of the file.
const CONVERSION: f32 = 1.05;

/// The range of cached values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CachedRange {
    /// The layer with the largest bound.
    pub layer: usize,
    /// No cached value is larger than this.
    pub at_most: f32,
    /// Some cached value is always at least this large; 0 if none is.
    pub at_least: f32,
}

/// Reads the weights of keys and values with this many threads, and those of queries where these are rounded to the type
/// of keys. None if they cannot be read, which loading reports, or if some are not numbers.
#[must_use]
pub fn cached_range(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    has_queries: bool,
    num_threads: usize,
) -> Option<CachedRange> {
    let num_threads = num_threads.clamp(1, config.num_layers.max(1));
    let of_thread = |first: usize| {
        let layers = (first..config.num_layers).step_by(num_threads);
        layers
            .map(|layer| Some((layer, of_layer(checkpoint, config, layer, has_queries).ok()?)))
            .collect::<Option<Vec<_>>>()
    };
    let ranges = thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads).map(|first| scope.spawn(move || of_thread(first))).collect();
        threads.into_iter().map(|thread| thread.join().ok().flatten()).collect::<Option<Vec<_>>>()
    })?;
    let mut largest: Option<CachedRange> = None;
    for (layer, OutputRange { at_most, at_least }) in ranges.into_iter().flatten() {
        if !at_most.is_finite() {
            return None;
        }
        let range = CachedRange { layer, at_most: at_most * CONVERSION, at_least: at_least / CONVERSION };
        largest = Some(match largest {
            Some(other) if other.at_most >= range.at_most => {
                CachedRange { at_least: other.at_least.max(range.at_least), ..other }
            }
            Some(other) => CachedRange { at_least: other.at_least.max(range.at_least), ..range },
            None => range,
        });
    }
    largest
}

fn of_layer(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    layer: usize,
    has_queries: bool,
) -> Result<OutputRange> {
    let read = |name: &str| checkpoint.tensor(&format!("blk.{layer}.{name}"))?.to_f32();
    let read_norm = |name: &str| {
        let mut weight = read(name)?;
        weight.iter_mut().for_each(|weight| *weight += config.norm_offset);
        Ok::<_, crate::Error>(weight)
    };
    let norm = read_norm("attn_norm.weight")?;
    let length = (config.hidden_size as f32).sqrt();
    // A normalised vector with a scale of its own.
    let normalised = |scale: &[f32]| {
        let largest = scale.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        let at_most = largest * (scale.len() as f32).sqrt();
        OutputRange { at_most, at_least: 0.0 }
    };
    // A rotation turns two values into one with the length of both, and some scalings make it longer.
    let factor = match *config.rope.scaling.without_divisors() {
        RopeScaling::Yarn { attention_factor, .. } | RopeScaling::Long { attention_factor, .. } => {
            attention_factor as f32
        }
        _ => 1.0,
    };
    let rotated = |range: OutputRange| OutputRange {
        at_most: range.at_most * factor * std::f32::consts::SQRT_2,
        // The first token is not rotated.
        at_least: range.at_least * factor,
    };
    if let Some(latent) = &config.latent_attention {
        let rows = read("attn_kv_a_mqa.weight")?;
        let first = latent.kv_lora_rank.saturating_mul(config.hidden_size).min(rows.len());
        let keys = OutputRange::of(&rows[first..], &norm, None, length);
        return Ok(normalised(&read("attn_kv_a_norm.weight")?).and(rotated(keys)));
    }
    let projected = |name: &str| {
        let bias = config.qkv_bias.then(|| read(&format!("{name}.bias"))).transpose()?;
        let rows = read(&format!("{name}.weight"))?;
        Ok::<_, crate::Error>(OutputRange::of(&rows, &norm, bias.as_deref(), length))
    };
    let heads = |name: &str| match config.architecture.qk_norm {
        QkNorm::Heads | QkNorm::All => Ok(normalised(&read_norm(&format!("{name}_norm.weight"))?)),
        QkNorm::None => projected(name),
    };
    let mut range = rotated(heads("attn_k")?).and(projected("attn_v")?);
    if has_queries {
        range = range.and(rotated(heads("attn_q")?));
    }
    Ok(range)
}
