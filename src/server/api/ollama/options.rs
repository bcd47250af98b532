//! The object `options`: sampling parameters, and ollama's settings for loading a model.

use super::super::super::error::ApiError;
use super::super::super::json::{Fields, NO_LIMIT, parse_object};
use super::super::super::state::Model;
use super::super::sampling;
use tinyvllm::sampling::SamplingParams;

/// Settings for loading a model, and others that change no answer.
const HARMLESS: &[&str] = &[
    "f16_kv",
    "logits_all",
    "low_vram",
    "main_gpu",
    "num_batch",
    "num_gpu",
    "num_keep",
    "num_thread",
    "numa",
    "use_mlock",
    "use_mmap",
    "vocab_only",
];

/// Ways of sampling that are not supported, each with the value that turns it off.
const OFF: [(&str, f64); 3] = [("mirostat", 0.0), ("tfs_z", 1.0), ("typical_p", 1.0)];

/// Parses the sampling parameters. The model's files give the defaults.
pub(super) fn parse(fields: &mut Fields, model: &Model) -> Result<SamplingParams, ApiError> {
    let mut options = match fields.object("options")? {
        Some(options) => options,
        None => parse_object(*b"{}")?,
    };
    options.pass(HARMLESS);
    for (name, off) in OFF {
        if options.take(name)?.is_some_and(|value| value.as_f64() != Some(off)) {
            let path = options.path(name);
            let message = format!("{path} is not supported here; omit it, or send {off}");
            return Err(ApiError::unsupported(path, message));
        }
    }
    let mut params = sampling::parse(&mut options, model.llm.sampling_defaults())?;
    if params.n != 1 {
        let message = format!("options.n is {}; there is one answer", params.n);
        return Err(ApiError::unsupported("options.n", message));
    }
    if let Some(penalty) = options.number("repeat_penalty")? {
        params.repetition_penalty = penalty;
    }
    params.max_tokens = num_predict(&mut options)?;
    // The server sets the context length. A client requests a smaller one only to save memory.
    let window = model.llm.engine().config().max_model_len;
    if options.unsigned("num_ctx")?.is_some_and(|wanted| wanted > window) {
        options.report("num_ctx");
    }
    Ok(params)
}

/// −1 is no limit, and −2 is the end of the context, which means the same here.
fn num_predict(options: &mut Fields) -> Result<Option<usize>, ApiError> {
    let path = options.path("num_predict");
    let limit = |limit: i128| match limit {
        -2 | -1 => Some(NO_LIMIT),
        limit => usize::try_from(limit).ok(),
    };
    options
        .integer("num_predict")?
        .map(|given| {
            let expected = "an integer of at least 1, or -1 for the rest of the context";
            limit(given).ok_or_else(|| {
                ApiError::invalid(path.clone(), format!("{path} is {given}, expected {expected}"))
            })
        })
        .transpose()
}

/// Renames the parameter of an error to its name in this interface.
pub(super) fn renamed(error: ApiError) -> ApiError {
    error.renamed("max_tokens", "num_predict").renamed("repetition_penalty", "repeat_penalty")
}
