//! The device's sampler beside the host's.

use super::Check;
use super::oracle::{buffer, noise};
use crate::Result;
use crate::ops::{Context, DeviceSampler, SampleParams};
use crate::sampling::{Sampler, SamplerInput, SamplingParams};

const VOCAB_SIZE: usize = 1500;
const NUM_STEPS: usize = 4;

pub(super) fn run(context: &Context, report: &mut dyn FnMut(Check)) {
    let name = "sampling: the tokens of the host".to_owned();
    match compare(context) {
        Ok(None) => {}
        Ok(Some(Differences { num_tokens, first })) => report(Check {
            name,
            passed: first.is_none(),
            detail: first.unwrap_or_else(|| format!("{num_tokens} tokens")),
        }),
        Err(error) => report(Check::failed(name, &error)),
    }
}

/// Parameters that reach every part of the sampler, alone and together.
fn variety() -> Vec<SamplingParams> {
    let base = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let greedy = SamplingParams::greedy();
    let bias = [(3, 4.0), (700, 6.0), (1499, -100.0)].into();
    vec![
        greedy.clone(),
        SamplingParams {
            repetition_penalty: 1.3,
            frequency_penalty: 0.4,
            presence_penalty: 0.3,
            ..greedy.clone()
        },
        // Token 3 has a bias and is banned.
        SamplingParams { logit_bias: bias, min_tokens: 5, ..greedy },
        base.clone(),
        SamplingParams { top_k: 1, ..base.clone() },
        SamplingParams { top_k: 20, ..base.clone() },
        SamplingParams { top_p: 0.6, ..base.clone() },
        SamplingParams { min_p: 0.05, ..base.clone() },
        SamplingParams { top_k: 40, top_p: 0.9, min_p: 0.01, ..base.clone() },
        SamplingParams { top_p: 0.95, repetition_penalty: 1.2, frequency_penalty: 0.5, ..base.clone() },
        SamplingParams { temperature: 2.0, presence_penalty: -1.0, min_tokens: 50, ..base },
    ]
}

struct Differences {
    num_tokens: usize,
    first: Option<String>,
}

/// Samples rows with all parameters at once, some steps without the host, then the same one by one on the host.
fn compare(context: &Context) -> Result<Option<Differences>> {
    let Some(mut device) = DeviceSampler::new(context)? else { return Ok(None) };
    let variety = variety();
    let prompt = [5, 9, 9, 1200];
    let output = [700, 3, 700];
    let ends: Vec<u32> = (0..VOCAB_SIZE as u32).step_by(3).collect();
    // Rounded, so that there are ties, and one row that cannot be sampled.
    let logits = |step: usize| -> Vec<f32> {
        let mut values = noise(40 + step as u64, variety.len() * VOCAB_SIZE);
        values.iter_mut().for_each(|value| *value = (*value * 64.0).round() / 8.0);
        values.extend(vec![f32::NAN; VOCAB_SIZE]);
        values
    };
    let mut inputs: Vec<&SamplingParams> = variety.iter().collect();
    inputs.push(&variety[0]);
    let params = |(index, params): (usize, &&SamplingParams)| SampleParams {
        inverse_temperature: if params.is_greedy() { 0.0 } else { 1.0 / params.temperature },
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        repetition_penalty: params.repetition_penalty,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        logit_bias: &variety[index.min(variety.len() - 1)].logit_bias,
        banned: &ends,
        min_tokens: params.min_tokens,
        seed: 77 + index as u64,
        stream: index as u32,
        prompt_token_ids: &prompt,
        output_token_ids: &output,
    };
    device.begin(context, inputs.iter().enumerate().map(params), NUM_STEPS)?;
    for step in 0..NUM_STEPS {
        let logits = buffer(context, &logits(step), VOCAB_SIZE, inputs.len())?;
        device.launch(context, &logits)?;
        // The logits live until the device is done with them.
        device.tokens(context, step, &mut Vec::new())?;
    }

    let mut host = Sampler::default();
    let mut outputs = vec![output.to_vec(); inputs.len()];
    let mut actual = Vec::new();
    for step in 0..NUM_STEPS {
        device.tokens(context, step, &mut actual)?;
        let logits = logits(step);
        for (index, params) in inputs.iter().enumerate() {
            let input = SamplerInput {
                params,
                seed: 77 + index as u64,
                stream: index as u32,
                prompt_token_ids: &prompt,
                output_token_ids: &outputs[index],
                end_token_ids: &ends,
                allowed: None,
            };
            let row = &logits[index * VOCAB_SIZE..][..VOCAB_SIZE];
            let expected = host.sample(row, &input).map_or(u32::MAX, |token| token.token_id);
            if actual[index] != expected {
                let first = format!("step {step}, {params:?}: {} instead of {expected}", actual[index]);
                return Ok(Some(Differences { num_tokens: 0, first: Some(first) }));
            }
            outputs[index].push(expected);
        }
    }
    Ok(Some(Differences { num_tokens: NUM_STEPS * inputs.len(), first: None }))
}
