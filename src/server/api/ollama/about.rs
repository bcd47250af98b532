//! What ollama's clients query about the model: its name and what it can do.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;
use serde_json::{Value, json};

use super::super::super::error::{ApiError, ok};
use super::super::super::json::Fields;
use super::super::super::state::{App, Model};
use super::super::{check_name, prepare};
use super::style::written;
use tinyvllm::chat::Chat;

/// The version of ollama that this interface implements. Clients check it for features.
const INTERFACE_VERSION: &str = "0.9.0";
/// The model stays loaded as long as the server runs.
const FOREVER: &str = "9999-12-31T23:59:59Z";

/// The available models, of which there is one.
pub(in super::super::super) async fn tags(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let model = app.ready()?;
    let models: Vec<Value> = model.names.iter().map(|name| card(&model, name)).collect();
    Ok(ok(&json!({"models": models})))
}

/// The loaded models, which are the same.
pub(in super::super::super) async fn running(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let model = app.ready()?;
    let mut card = card(&model, &model.names[0]);
    card["expires_at"] = FOREVER.into();
    card["size_vram"] = match model.llm.context().is_gpu() {
        true => card["size"].clone(),
        false => 0.into(),
    };
    card["context_length"] = model.llm.engine().config().max_model_len.into();
    Ok(ok(&json!({"models": [card]})))
}

/// The description of the model.
pub(in super::super::super) async fn show(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    let model = app.ready()?;
    let read = |model: &Model, mut fields: Fields| {
        // The older name of the field.
        let name = fields.string("name")?;
        fields.pass(&["verbose"]);
        check_name(model, name.as_deref())?;
        Ok(description(model))
    };
    let (description, _permits) = prepare(&app, &model, request, read).await?;
    Ok(ok(&description))
}

/// The versions of the interface and of this program.
pub(in super::super::super) async fn version() -> Response {
    ok(&json!({"version": INTERFACE_VERSION, "tinyvllm": env!("CARGO_PKG_VERSION")}))
}

fn card(model: &Model, name: &str) -> Value {
    json!({
        "name": name,
        "model": name,
        "modified_at": written(UNIX_EPOCH + Duration::from_secs(model.created)),
        "size": num_bytes(model),
        "digest": digest(model.llm.name()),
        "details": details(model),
    })
}

fn details(model: &Model) -> Value {
    let family = family(model);
    let num_parameters = model.llm.weight_traffic().num_parameters as f64;
    let parameter_size = match num_parameters {
        number if number >= 1e9 => format!("{:.1}B", number / 1e9),
        number => format!("{:.1}M", number / 1e6),
    };
    json!({
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": parameter_size,
        "quantization_level": "",
    })
}

fn description(model: &Model) -> Value {
    let (llm, family) = (&model.llm, family(model));
    let config = llm.model_config();
    let chat = llm.chat_format();
    let shape = chat.map(Chat::answer_format);
    let mut capabilities = vec!["completion"];
    if chat.is_some_and(Chat::uses_tools) && shape.is_some_and(|shape| shape.tool_calls.is_some()) {
        capabilities.push("tools");
    }
    if shape.is_some_and(|shape| shape.reasoning.is_some()) {
        capabilities.push("thinking");
    }
    let parameters = llm.sampling_defaults().describe().unwrap_or_default().replace(", ", "\n");
    let mut info = json!({
        "general.architecture": family,
        "general.basename": llm.name(),
        "general.parameter_count": llm.weight_traffic().num_parameters,
    });
    for (name, value) in [
        ("attention.head_count", config.num_heads),
        ("attention.head_count_kv", config.num_kv_heads),
        ("block_count", config.num_layers),
        ("context_length", llm.engine().config().max_model_len),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("vocab_size", config.vocab_size),
    ] {
        info[format!("{family}.{name}")] = value.into();
    }
    json!({
        "modelfile": "",
        "parameters": parameters,
        "template": chat.map(Chat::template_source),
        "modified_at": written(UNIX_EPOCH + Duration::from_secs(model.created)),
        "details": details(model),
        "model_info": info,
        "capabilities": capabilities,
    })
}

/// The name of the architecture in GGUF files.
fn family(model: &Model) -> &'static str {
    let architecture = model.llm.model_config().architecture;
    architecture.gguf_names.first().copied().unwrap_or(architecture.hf_name)
}

/// Bytes of the weights that are read for each token.
fn num_bytes(model: &Model) -> u64 {
    let traffic = model.llm.weight_traffic();
    let experts = traffic.experts.map_or(0, |experts| experts.num_bytes);
    traffic.attention_bytes + traffic.feed_forward_bytes + traffic.head_bytes + experts
}

/// 64 hexadecimal digits by which clients distinguish models. They are a hash of the name; no file is read
/// for them.
fn digest(name: &str) -> String {
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    (0..4).map(|part| format!("{:016x}", hasher.hash_one((name, part)))).collect()
}
