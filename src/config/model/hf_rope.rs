//! Rotary positions of a Hugging Face folder: which of two spellings applies, the defaults of missing keys, and the
//! maximum length of sequences.

use serde_json::Value;

use super::json::{Json, shown};
use super::{QueryGrowth, RopeConfig, RopeScaling, Window};
use crate::config::RopeStyle;
use crate::config::architecture::Architecture;
use crate::{Error, Result};

/// Kinds of layers that have parameters of their own, in files of models with several kinds.
const LAYER_KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// The parameters that count. `rope_scaling` comes first, as in transformers 5: there it is the older spelling, which
/// a user has added to the newer one to change it.
pub(super) fn rope_parameters<'a>(
    file: Json<'a>,
    has_window: bool,
    notices: &mut Vec<String>,
) -> Result<Json<'a>> {
    let (scaling, parameters) = (file.object("rope_scaling")?, file.object("rope_parameters")?);
    let parameters = match (scaling, parameters) {
        (Some(scaling), Some(other)) => {
            if says_else(scaling, other) {
                let has_base = scaling.present("rope_theta").or_else(|| file.present("rope_theta")).is_some();
                let theta = if !has_base && other.present("rope_theta").is_some() {
                    ", and rope_theta is not read from there either; write it into rope_scaling or next to it"
                } else {
                    ""
                };
                notices.push(format!(
                    "config.json has rope_scaling and rope_parameters, which differ; rope_scaling is used, as in \
                     transformers{theta}"
                ));
            }
            Some(scaling)
        }
        (scaling, parameters) => scaling.or(parameters),
    };
    match parameters {
        Some(parameters) => of_layers(parameters, has_window),
        None => Ok(Json { name: "the rope parameters", value: &Value::Null }),
    }
}

/// Whether the second one has a value that the first one has not, or has otherwise.
fn says_else(one: Json<'_>, other: Json<'_>) -> bool {
    let fields = other.value.as_object().into_iter().flatten();
    fields.filter(|(key, value)| *key != "type" && !value.is_null()).any(|(key, value)| {
        let is_default = key == "rope_type" && value == "default";
        one.present(key).map_or(!is_default, |own| own != value)
    })
}

/// The parameters of the layers that there are, where each kind of layer has its own.
fn of_layers(parameters: Json<'_>, has_window: bool) -> Result<Json<'_>> {
    let own = |kind: &'static str| parameters.object(kind);
    let [full, sliding] = LAYER_KINDS.map(own);
    let (full, sliding) = (full?, sliding?);
    let own = match (full, sliding) {
        (None, None) => return Ok(parameters),
        (Some(full), Some(sliding)) if full.value == sliding.value => Some(full),
        _ if has_window => sliding,
        _ => full,
    };
    own.ok_or_else(|| {
        let kind = if has_window { "sliding_attention" } else { "full_attention" };
        Error::invalid_model(format!("{kind} is missing in {}", parameters.name))
            .with_hint("all layers of this model are of that kind")
    })
}

/// The parameters of layers with a window, where only some have one and these have parameters of their own.
pub(super) fn local_parameters<'a>(file: Json<'a>, windows: &[Option<usize>]) -> Result<Option<Json<'a>>> {
    let num_local = windows.iter().flatten().count();
    if num_local == 0 || num_local == windows.len() {
        return Ok(None);
    }
    let Some(parameters) = file.object("rope_parameters")? else { return Ok(None) };
    let [full, sliding] = LAYER_KINDS.map(|kind| parameters.object(kind));
    let (full, sliding) = (full?, sliding?);
    Ok(sliding.filter(|own| full.is_none_or(|full| full.value != own.value)))
}

/// The rotation of layers with a window in folders from before these had parameters of their own, if the architecture has
/// one: of another base, and without scaling.
pub(super) fn plain_local_rope(
    file: Json<'_>,
    architecture: &Architecture,
    usual: &RopeConfig,
) -> Result<Option<RopeConfig>> {
    let Some(base) = architecture.local_base else { return Ok(None) };
    let theta = file.f64("rope_local_base_freq")?.unwrap_or(base.or_usual(usual.theta));
    Ok(Some(RopeConfig { theta, scaling: RopeScaling::None, ..usual.clone() }))
}

/// Rotary positions of heads of `head_dim` values, and how long sequences may be.
pub(super) fn rope(
    file: Json<'_>,
    parameters: Json<'_>,
    architecture: &Architecture,
    head_dim: usize,
    max_position_embeddings: usize,
    notices: &mut Vec<String>,
) -> Result<(RopeConfig, Window)> {
    let either = |key: &str| match parameters.f64(key)? {
        Some(value) => Ok(Some(value)),
        None => file.f64(key),
    };
    let theta = either("rope_theta")?.unwrap_or(architecture.hf_defaults.rope_theta);
    let factor = either("partial_rotary_factor")?.unwrap_or(architecture.hf_defaults.partial_rotary_factor);
    let dim = match factor {
        factor if factor > 0.0 && factor <= 1.0 => (head_dim as f64 * factor) as usize,
        factor => {
            return Err(Error::invalid_model(format!(
                "partial_rotary_factor is {factor}, but must be above 0 and at most 1"
            )));
        }
    };
    let kind = match parameters.str("rope_type")? {
        Some(kind) => kind,
        None => parameters.str("type")?.unwrap_or("default"),
    };
    // Some models have it next to the parameters, where it takes precedence.
    let original_context = match file.usize("original_max_position_embeddings")? {
        Some(context) => Some(context),
        None => parameters.usize("original_max_position_embeddings")?,
    };
    // A file without rotation settings has its class's.
    let own_yarn = architecture.hf_defaults.yarn.filter(|_| parameters.value.is_null());
    let original_context = original_context.or(own_yarn.map(|(_, context)| context));
    let context = original_context.unwrap_or(max_position_embeddings);
    let query_growth = match parameters.f64("llama_4_scaling_beta")? {
        Some(beta) if architecture.queries_grow => QueryGrowth::new(beta, context),
        None if architecture.queries_grow && own_yarn.is_some() => QueryGrowth::new(0.1, context),
        _ => None,
    };
    let scaling = match kind {
        "default" if let Some((factor, original_context)) = own_yarn => RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: if architecture.queries_grow { 1.0 } else { 0.1 * factor.ln() + 1.0 },
            truncate: architecture.truncates_yarn,
        },
        // Text alone has the same position on all axes of mrope, which then is the plain rotation.
        "default" | "mrope" => RopeScaling::None,
        // It has no effect on sequences that fit the window without it.
        "dynamic" => {
            notices.push(format!(
                "rope_type \"dynamic\" changes only positions beyond max_position_embeddings, where the context \
                 ends here: {max_position_embeddings} tokens"
            ));
            let window = Window {
                hint: Some(
                    "\"dynamic\" rope scaling is not supported beyond it; \"yarn\" and \"linear\" are",
                ),
                ..Window::plain(max_position_embeddings)
            };
            return Ok((
                RopeConfig {
                    theta,
                    dim,
                    style: style(file, architecture, notices)?,
                    scaling: RopeScaling::None,
                    query_growth,
                },
                window,
            ));
        }
        "linear" => RopeScaling::Linear { factor: parameters.required_f64("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: parameters.required_f64("factor")?,
            low_freq_factor: parameters.required_f64("low_freq_factor")?,
            high_freq_factor: parameters.required_f64("high_freq_factor")?,
            original_context: context,
        },
        "yarn" => yarn(parameters, original_context, max_position_embeddings)?,
        // The second name is that of the first files.
        "longrope" | "su" => long_rope(parameters, context, max_position_embeddings, dim)?,
        other => {
            return Err(Error::unsupported(format!("rope_type = {other:?} is not supported")).with_hint(
                "supported are default, linear, llama3, yarn, longrope, dynamic (up to max_position_embeddings) and \
                 mrope (for text)",
            ));
        }
    };
    let window = match architecture.counts_scaling_in() {
        true => Window::plain(max_position_embeddings),
        false => Window::of(&scaling, original_context, max_position_embeddings),
    };
    let style = style(file, architecture, notices)?;
    Ok((RopeConfig { theta, dim, style, scaling, query_growth }, window))
}

/// Which values make a pair. Some classes have a switch for it.
fn style(file: Json<'_>, architecture: &Architecture, notices: &mut Vec<String>) -> Result<RopeStyle> {
    let usual = architecture.hf_rope_style;
    let Some(is_interleaved) = file.bool("rope_interleave")? else { return Ok(usual) };
    let style = if is_interleaved { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
    if architecture.hf_defaults.has_interleave_key || style == usual {
        return Ok(style);
    }
    notices.push(format!(
        "rope_interleave = {is_interleaved} in config.json does not apply to {} and is ignored",
        architecture.hf_name
    ));
    Ok(usual)
}

/// `factor`, or the ratio of the model's context to the original one if the file has `null`.
fn factor(parameters: Json<'_>, original: Option<usize>, max_position_embeddings: usize) -> Result<f64> {
    match (parameters.f64("factor")?, original) {
        (Some(factor), _) => Ok(factor),
        (None, Some(original)) if original > 0 => Ok(max_position_embeddings as f64 / original as f64),
        (None, _) => parameters.required_f64("factor"),
    }
}

fn yarn(
    parameters: Json<'_>,
    original_context: Option<usize>,
    max_position_embeddings: usize,
) -> Result<RopeScaling> {
    let factor = factor(parameters, original_context, max_position_embeddings)?;
    let mscale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
    let attention_factor = match parameters.f64("attention_factor")? {
        Some(attention_factor) => attention_factor,
        None => match (parameters.f64("mscale")?, parameters.f64("mscale_all_dim")?) {
            (Some(own), Some(all_dim)) if own != 0.0 && all_dim != 0.0 => mscale(own) / mscale(all_dim),
            _ => mscale(1.0),
        },
    };
    // 0 means the default, as in transformers.
    let beta = |key: &str, default: f64| {
        Ok::<_, Error>(parameters.f64(key)?.filter(|beta| *beta != 0.0).unwrap_or(default))
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_context: original_context.unwrap_or(max_position_embeddings),
        beta_fast: beta("beta_fast", 32.0)?,
        beta_slow: beta("beta_slow", 1.0)?,
        attention_factor,
        truncate: parameters.bool("truncate")?.unwrap_or(true),
    })
}

fn long_rope(
    parameters: Json<'_>,
    original_context: usize,
    max_position_embeddings: usize,
    dim: usize,
) -> Result<RopeScaling> {
    let divisors = |key: &str| {
        let divisors = parameters
            .numbers(key)?
            .ok_or_else(|| Error::invalid_model(format!("{key} is missing in {}", parameters.name)))?;
        if divisors.len() != dim / 2 || divisors.iter().any(|divisor| *divisor <= 0.0) {
            return Err(Error::invalid_model(format!(
                "{key} in {} is {}, but must be {} positive numbers, one for each pair that is rotated",
                parameters.name,
                parameters.present(key).map(shown).unwrap_or_default(),
                dim / 2
            )));
        }
        Ok(divisors)
    };
    let (short, long) = (divisors("short_factor")?, divisors("long_factor")?);
    let factor = factor(parameters, Some(original_context), max_position_embeddings)?;
    let attention_factor = match parameters.f64("attention_factor")? {
        Some(attention_factor) => attention_factor,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / (original_context as f64).ln()).sqrt(),
    };
    Ok(RopeScaling::Long { divisors: Some((short, long)), original_context, attention_factor })
}
