//! Generation with drafts of a known accuracy: the same output is predicted, with a given fraction of wrong
//! tokens.

use tinyvllm::Result;
use tinyvllm::engine::{Event, Request, SequenceStats};
use tinyvllm::llm::Llm;
use tinyvllm::sampling::SamplingParams;

use super::measure::{RandomPrompts, failed};
use super::report::{PredictionResult, Spread};

/// Measures generation without and with a prediction of this accuracy, alternately.
pub(super) fn generation(
    llm: &Llm,
    prompts: &mut RandomPrompts,
    (context_len, output_len, repeats): (usize, usize, usize),
    accuracy: f64,
) -> Result<PredictionResult> {
    let (mut plain, mut predicted) = (Vec::new(), Vec::new());
    let (mut num_draft_tokens, mut num_accepted_tokens) = (0, 0);
    for repeat in 0..=repeats {
        // Sampled, so that no model falls into a loop that other drafts would predict.
        let params = SamplingParams {
            max_tokens: Some(output_len + 1),
            ignore_eos: true,
            seed: Some(repeat as u64),
            ..SamplingParams::default()
        };
        // On a GPU, a prompt that is partly cached is computed in other chunks, which changes the last bits.
        let mut salts = 0..;
        let mut salt = || salts.next().map(|salt| format!("{repeat} {salt}"));
        let request = Request { cache_salt: salt(), ..Request::new(prompts.next(context_len), params) };
        let (tokens, alone) = run(llm, request.clone())?;
        let wrong = |token: u32| if token == 0 { 1 } else { token - 1 };
        // Spread evenly: a token is right whenever the fraction has added up to one more.
        let is_right = |at: usize| ((at + 1) as f64 * accuracy).floor() > (at as f64 * accuracy).floor();
        let prediction = tokens.iter().enumerate();
        let prediction = prediction.map(|(at, token)| if is_right(at) { *token } else { wrong(*token) });
        let request = Request { prediction: prediction.collect(), cache_salt: salt(), ..request };
        let (again, drafted) = run(llm, request)?;
        if again != tokens {
            return Err(failed(Some("a prediction changed tokens".to_owned())));
        }
        // The first run is a warm-up.
        if repeat > 0 {
            plain.push(rate(&alone));
            predicted.push(rate(&drafted));
            num_accepted_tokens += drafted.num_accepted_draft_tokens;
            num_draft_tokens += drafted.num_accepted_draft_tokens + drafted.num_rejected_draft_tokens;
        }
    }
    Ok(PredictionResult {
        context_len,
        output_len,
        accuracy,
        plain_tokens_per_second: Spread::of(plain),
        tokens_per_second: Spread::of(predicted),
        num_draft_tokens,
        num_accepted_tokens,
    })
}

fn rate(stats: &SequenceStats) -> f64 {
    (stats.num_output_tokens - 1) as f64 / stats.decode_time.as_secs_f64()
}

fn run(llm: &Llm, request: Request) -> Result<(Vec<u32>, SequenceStats)> {
    let mut tokens = Vec::new();
    for event in llm.engine().submit(request)? {
        match event {
            Event::Token { token_id, .. } => tokens.push(token_id),
            Event::Finished { error: None, stats, .. } => return Ok((tokens, stats)),
            Event::Finished { error, .. } => return Err(failed(error)),
            Event::Hidden { .. }
            | Event::PromptLogits { .. }
            | Event::PromptLogprobs { .. }
            | Event::PromptProgress { .. } => {}
        }
    }
    Err(failed(None))
}
