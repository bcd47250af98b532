//! A question and its answer, as it comes: `cargo run --release --example chat -- tinyllama "Why is the sky blue?"`.

#![expect(clippy::print_stdout, reason = "it is what an example does")]

use std::io::Write;

use tinyvllm::chat::{AnswerEvent, Message};
use tinyvllm::llm::Llm;
use tinyvllm::sampling::SamplingParams;

fn main() -> tinyvllm::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let llm = Llm::open(&arguments.next().unwrap_or_else(|| "demo".to_owned()))?;
    let question = arguments.next().unwrap_or_else(|| "Tell me a story.".to_owned());

    let params = SamplingParams { max_tokens: Some(200), ..llm.sampling_params() };
    for event in llm.chat(&[Message::new("user", question)], params)? {
        if let AnswerEvent::Content(text) = event? {
            print!("{text}");
            let _ = std::io::stdout().flush();
        }
    }
    println!();
    Ok(())
}
