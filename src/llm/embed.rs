//! Embeddings: texts as vectors.

use super::Llm;
use crate::engine::{Event, Request, RequestStream};
use crate::{Error, ErrorKind, Result};

impl Llm {
    /// The embedding of each text, in their order: the hidden state of its last token after the model's last norm,
    /// `hidden_size` values that are scaled to length 1, so that the product of two embeddings is their cosine.
    ///
    /// Use a model that was trained for embeddings with last-token pooling. Its card says whether a text needs an instruction
    /// before it or an end token after it. Other models give vectors too, which compare texts less well.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model has no tokenizer; [`ErrorKind::InvalidRequest`] or
    /// [`ErrorKind::ContextLength`] if a text has no tokens or too many; otherwise as the engine fails.
    pub fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>> {
        let prompts = texts.iter().map(|text| self.encode_raw(text)).collect::<Result<Vec<_>>>()?;
        let mut embeddings = Vec::with_capacity(prompts.len());
        // More would wait in the engine.
        for prompts in prompts.chunks(self.engine().config().max_num_seqs.max(1)) {
            let submit = |prompt: &Vec<u32>| self.engine().submit(Request::hidden_state(prompt.clone()));
            let streams = prompts.iter().map(submit).collect::<Result<Vec<_>>>()?;
            for stream in streams {
                embeddings.push(normalized(hidden_state(stream)?));
            }
        }
        Ok(embeddings)
    }
}

/// The state that ends a request for it.
fn hidden_state(stream: RequestStream) -> Result<Vec<f32>> {
    let mut state = None;
    for event in stream {
        match event {
            Event::Hidden { values } => state = Some(values),
            Event::Finished { error: Some(error), error_kind, .. } => {
                return Err(Error::new(error_kind.unwrap_or(ErrorKind::Internal), error));
            }
            _ => {}
        }
    }
    state.ok_or_else(|| Error::internal("a request for a hidden state has ended without it"))
}

/// The same direction with length 1; zeros remain zeros.
fn normalized(mut values: Vec<f32>) -> Vec<f32> {
    let length = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        values.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    values
}
