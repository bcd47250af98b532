//! `prediction`: a text that the answer will resemble, such as a file to be edited. It is used for drafts and
//! changes only the speed.

use serde_json::Value;

use super::super::account::on_text;
use super::super::error::ApiError;
use super::super::json::Fields;
use super::super::state::Model;
use tinyvllm::engine::Request;
use tinyvllm::tokenizer::SpecialTokens;

/// Takes the predicted text from the body.
pub(super) fn parse(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let Some(mut prediction) = fields.object("prediction")? else { return Ok(None) };
    let kind = prediction.string("type")?;
    if kind.as_deref().is_some_and(|kind| kind != "content") {
        let message = format!("prediction.type is {:?}; it must be \"content\"", kind.unwrap_or_default());
        return Err(ApiError::invalid("prediction.type", message));
    }
    let text = match prediction.take("content")? {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => parts.iter().map(text_of).collect::<Option<String>>(),
        _ => None,
    };
    text.map(Some).ok_or_else(|| {
        let message = "prediction.content must be a text, or a list of parts of type \"text\"";
        ApiError::invalid("prediction.content", message)
    })
}

fn text_of(part: &Value) -> Option<&str> {
    let is_text = part.get("type").is_none_or(|kind| kind == "text");
    part.get("text").and_then(Value::as_str).filter(|_| is_text)
}

/// Tokenizes the prediction and adds it to the requests.
pub(super) fn apply(text: Option<&str>, model: &Model, requests: &mut [Request]) -> Result<(), ApiError> {
    let (Some(text), Some(tokenizer)) = (text, model.llm.tokenizer()) else { return Ok(()) };
    // No answer is longer than this.
    let text = &text[..text.floor_char_boundary(model.max_text_bytes)];
    let token_ids = on_text(text.len(), || Ok(tokenizer.encode(text, SpecialTokens::AsText)?))?;
    requests.iter_mut().for_each(|request| request.prediction.clone_from(&token_ids));
    Ok(())
}
