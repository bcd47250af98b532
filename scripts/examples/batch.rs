//! Many prompts at once, each with an answer in a given format: `cargo run --release --example batch -- MODEL`.

#![expect(clippy::print_stdout, reason = "it is what an example does")]

use serde_json::json;
use tinyvllm::engine::Event;
use tinyvllm::engine::Request;
use tinyvllm::grammar::GrammarSpec;
use tinyvllm::llm::Llm;
use tinyvllm::sampling::SamplingParams;

fn main() -> tinyvllm::Result<()> {
    let llm = Llm::open(&std::env::args().nth(1).unwrap_or_else(|| "demo".to_owned()))?;
    let schema = json!({
        "type": "object",
        "properties": {"animal": {"enum": ["cat", "dog", "bird"]}, "legs": {"type": "integer"}},
        "required": ["animal", "legs"],
        "additionalProperties": false,
    });
    let grammar = llm.compile_grammar(&GrammarSpec::JsonSchema(schema))?;
    let params = SamplingParams { max_tokens: Some(60), ..SamplingParams::greedy() };

    let mut answers = Vec::new();
    for place in ["a farm", "a forest", "a city", "the sea"] {
        let prompt = llm.encode_raw(&format!("An animal of {place}, as JSON: "))?;
        let request = Request { constraint: Some(grammar.clone()), ..Request::new(prompt, params.clone()) };
        // Nothing waits here: all of them are computed in the same steps.
        answers.push((place, llm.engine().submit(request)?));
    }
    for (place, events) in answers {
        let tokens = events.filter_map(|event| match event {
            Event::Token { token_id, is_end: false, .. } => Some(token_id),
            _ => None,
        });
        let answer = llm.require_tokenizer()?.decode(&tokens.collect::<Vec<_>>(), true);
        println!("{place}: {}", answer.split_whitespace().collect::<Vec<_>>().join(" "));
    }
    Ok(())
}
