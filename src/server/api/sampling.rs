//! Parses sampling parameters. Types are checked here, ranges where the parameters are defined.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::json::{Fields, describe, wrong_type};
use tinyvllm::quoted;
use tinyvllm::sampling::{SamplingDefaults, SamplingParams};

/// Parses everything but `max_tokens`, `n` and log-probabilities, which differ between interfaces. The
/// model's files give the defaults.
pub(super) fn parse(fields: &mut Fields, model: &SamplingDefaults) -> Result<SamplingParams, ApiError> {
    let defaults = model.apply(SamplingParams::default());
    Ok(SamplingParams {
        temperature: fields.number("temperature")?.unwrap_or(defaults.temperature),
        top_k: top_k(fields)?.unwrap_or(defaults.top_k),
        top_p: fields.number("top_p")?.unwrap_or(defaults.top_p),
        min_p: fields.number("min_p")?.unwrap_or(defaults.min_p),
        repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(defaults.repetition_penalty),
        presence_penalty: fields.number("presence_penalty")?.unwrap_or(defaults.presence_penalty),
        frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(defaults.frequency_penalty),
        // A negative seed has the same bits.
        seed: fields.integer("seed")?.map(|seed| seed as u64),
        stop: strings(fields, "stop")?,
        stop_token_ids: fields.token_ids("stop_token_ids")?.unwrap_or_default(),
        min_tokens: fields.unsigned("min_tokens")?.unwrap_or(0),
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        logit_bias: logit_bias(fields)?,
        n: fields.count("n", 1)?.unwrap_or(1),
        ..defaults
    })
}

/// The parameters as a client would write them, without texts.
pub(in super::super) fn in_effect(params: &SamplingParams) -> Map<String, Value> {
    let fields: [(&str, Value); 14] = [
        ("temperature", short(params.temperature)),
        ("top_k", params.top_k.into()),
        ("top_p", short(params.top_p)),
        ("min_p", short(params.min_p)),
        ("repetition_penalty", short(params.repetition_penalty)),
        ("presence_penalty", short(params.presence_penalty)),
        ("frequency_penalty", short(params.frequency_penalty)),
        // As clients write it: signed.
        ("seed", params.seed.map(u64::cast_signed).into()),
        ("stop_token_ids", params.stop_token_ids.clone().into()),
        ("max_tokens", params.max_tokens.into()),
        ("min_tokens", params.min_tokens.into()),
        ("ignore_eos", params.ignore_eos.into()),
        ("logprobs", params.logprobs.into()),
        ("n", params.n.into()),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The defaults for a request without parameters: those of the model's files, or of this program.
pub(super) fn preferred(model: &SamplingDefaults) -> Value {
    let SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        ..
    } = model.apply(SamplingParams::default());
    json!({
        "temperature": short(temperature),
        "top_k": top_k,
        "top_p": short(top_p),
        "min_p": short(min_p),
        "repetition_penalty": short(repetition_penalty),
        "presence_penalty": short(presence_penalty),
        "frequency_penalty": short(frequency_penalty),
        "max_new_tokens": model.max_tokens,
    })
}

/// A number with only the digits that an f32 has.
pub(super) fn short(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// vLLM's −1 means the same as 0: all tokens.
fn top_k(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let path = fields.path("top_k");
    match fields.integer("top_k")? {
        None => Ok(None),
        Some(-1) => Ok(Some(0)),
        Some(top_k) if top_k < 0 => {
            let message = format!("{path} is {top_k}; it must be at least 0, or -1 for all tokens");
            Err(ApiError::invalid(path, message))
        }
        // A larger number than any vocabulary means all of it.
        Some(top_k) => Ok(Some(usize::try_from(top_k).unwrap_or(usize::MAX))),
    }
}

/// One string or a list of them.
pub(super) fn strings(fields: &mut Fields, name: &str) -> Result<Vec<String>, ApiError> {
    const EXPECTED: &str = "a string or a list of strings";
    match fields.take(name)? {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text]),
        Some(Value::Array(items)) => {
            let text = |(index, item): (usize, Value)| match item {
                Value::String(text) => Ok(text),
                other => Err(wrong_type(format!("{}[{index}]", fields.path(name)), &other, "a string")),
            };
            items.into_iter().enumerate().map(text).collect()
        }
        Some(other) => Err(wrong_type(fields.path(name), &other, EXPECTED)),
    }
}

/// Token ids are keys, so they are strings.
fn logit_bias(fields: &mut Fields) -> Result<BTreeMap<u32, f32>, ApiError> {
    let Some(entries) = fields.object("logit_bias")? else { return Ok(BTreeMap::new()) };
    let mut biases = BTreeMap::new();
    for (name, value) in entries.into_map()? {
        let token_id = name.parse().map_err(|_| {
            let message = format!("logit_bias has the key {}, expected a token id", quoted(&name));
            ApiError::invalid("logit_bias", message)
        })?;
        let bias = value.as_f64().ok_or_else(|| {
            let found = describe(&value);
            let message = format!("logit_bias of token {token_id} is {found}, expected a number");
            ApiError::invalid("logit_bias", message)
        })?;
        if biases.insert(token_id, bias as f32).is_some() {
            let message =
                format!("logit_bias has token {token_id} twice, the second time as {}", quoted(&name));
            return Err(ApiError::invalid("logit_bias", message));
        }
    }
    Ok(biases)
}
