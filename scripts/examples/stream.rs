//! Two answers in two tasks of an async program: `cargo run --release --example stream -- MODEL`.

#![expect(clippy::print_stdout, reason = "it is what an example does")]

use std::sync::Arc;

use futures_util::StreamExt;
use tinyvllm::chat::{AnswerEvent, Message};
use tinyvllm::llm::Llm;
use tinyvllm::sampling::SamplingParams;

async fn answer(llm: Arc<Llm>, question: &str) -> tinyvllm::Result<String> {
    let params = SamplingParams { max_tokens: Some(60), ..llm.sampling_params() };
    let mut events = llm.chat(&[Message::new("user", question)], params)?.into_stream();
    let mut text = String::new();
    while let Some(event) = events.next().await {
        if let AnswerEvent::Content(piece) = event? {
            text += &piece;
        }
    }
    Ok(text)
}

#[tokio::main]
async fn main() -> tinyvllm::Result<()> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "demo".to_owned());
    // Loading takes a thread for a while.
    let llm = tokio::task::spawn_blocking(move || Llm::open(&model)).await.expect("loading panics")?;
    let llm = Arc::new(llm);
    let (village, forest) = tokio::join!(
        answer(Arc::clone(&llm), "Tell me of a village."),
        answer(Arc::clone(&llm), "Tell me of a forest."),
    );
    println!("{}\n\n{}", village?, forest?);
    Ok(())
}
