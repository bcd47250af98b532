//! `/tokenize` and `/detokenize`, as in vLLM: text to token ids and back.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;
use serde_json::{Value, json};

use super::super::error::{ApiError, ok};
use super::super::json::Fields;
use super::super::state::{App, Model};
use super::{chat, completions, conversation, prepare};
use tinyvllm::chat::Chat;

/// The token ids of a prompt or of a conversation.
pub(in super::super) async fn tokenize(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    let model = app.ready()?;
    let (answer, _permits) = prepare(&app, &model, request, token_ids).await?;
    Ok(ok(&answer))
}

fn token_ids(model: &Model, mut fields: Fields) -> Result<Value, ApiError> {
    let add_special_tokens = fields.bool("add_special_tokens")?;
    let with_texts = fields.bool("return_token_strs")?.unwrap_or(false);
    let ids = match fields.string("prompt")? {
        Some(text) => {
            refuse_conversation(&mut fields)?;
            conversation::check_text_len(model, "prompt", text.len())?;
            completions::encode(model, &text, add_special_tokens.unwrap_or(true))?
        }
        None if add_special_tokens == Some(true) => {
            let message = "add_special_tokens is for prompts: a chat template adds its own";
            return Err(ApiError::unsupported("add_special_tokens", message));
        }
        None => chat::encode(model, &mut fields)?,
    };
    let texts = match with_texts {
        true => {
            let tokenizer = completions::tokenizer(model)?;
            Some(ids.iter().map(|id| tokenizer.token_text(*id)).collect::<Vec<_>>())
        }
        false => None,
    };
    Ok(json!({
        "count": ids.len(),
        "max_model_len": model.llm.engine().config().max_model_len,
        "tokens": ids,
        "token_strs": texts,
    }))
}

/// Refuses fields of a conversation next to a prompt.
fn refuse_conversation(fields: &mut Fields) -> Result<(), ApiError> {
    for name in [
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "reasoning_effort",
        "chat_template_kwargs",
    ] {
        if fields.take_unread(name).is_some() {
            let message =
                format!("{name} belongs to a conversation, but prompt is set too; omit one of them");
            return Err(ApiError::invalid(name, message));
        }
    }
    Ok(())
}

/// The fields of a `tokenizer_config.json` that a program needs to make the same prompts.
pub(in super::super) async fn show(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let model = app.ready()?;
    let tokenizer = completions::tokenizer(&model)?;
    let token = |id: Option<u32>| id.map(|id| tokenizer.token_text(id));
    let (bos, eos) = (tokenizer.bos_token_id(), tokenizer.eos_token_id());
    // There is no padding here. Without a padding token, programs use the end token.
    Ok(ok(&json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token(bos),
        "bos_token_id": bos,
        "eos_token": token(eos),
        "eos_token_id": eos,
        "pad_token": token(eos),
        "pad_token_id": eos,
        "chat_template": model.llm.chat_format().map(Chat::template_source),
        "vocab_size": tokenizer.vocab_size(),
        "model_max_length": model.llm.engine().config().max_model_len,
    })))
}

/// The text of token ids.
pub(in super::super) async fn detokenize(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    let model = app.ready()?;
    let (answer, _permits) = prepare(&app, &model, request, text).await?;
    Ok(ok(&answer))
}

fn text(model: &Model, mut fields: Fields) -> Result<Value, ApiError> {
    let ids = fields.token_ids("tokens")?.ok_or_else(|| ApiError::invalid("tokens", "tokens is missing"))?;
    let vocab_size = model.llm.engine().model_limits().vocab_size;
    if let Some(id) = ids.iter().find(|id| **id as usize >= vocab_size) {
        let message = format!("tokens has the id {id}, but the vocabulary has {vocab_size} tokens");
        return Err(ApiError::invalid("tokens", message));
    }
    Ok(json!({"prompt": completions::tokenizer(model)?.decode(&ids, false)}))
}
