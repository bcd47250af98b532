//! Drawn tokens against the probabilities that they are drawn with, over a real vocabulary.

use tinyvllm::engine::{Event, Request};
use tinyvllm::llm::Llm;
use tinyvllm::sampling::SamplingParams;

use super::{gguf, load, with_limits};

/// Draws of each combination of parameters, in requests of this many.
const NUM_DRAWS: usize = 1_024;
const N: usize = 128;

/// The logits after the last token of a prompt.
fn logits(llm: &Llm, prompt: &[u32]) -> Vec<f32> {
    let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() };
    let request = Request { prompt_logits: true, ..Request::new(prompt.to_vec(), params) };
    let mut rows = Vec::new();
    for event in llm.engine().submit(request).unwrap() {
        if let Event::PromptLogits { logits } = event {
            rows.extend(logits);
        }
    }
    rows.split_off(rows.len() / prompt.len() * (prompt.len() - 1))
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::MIN, f64::max);
    let exponentials = logits.iter().map(|logit| (logit - max).exp());
    let sum: f64 = exponentials.clone().sum();
    exponentials.map(|value| value / sum).collect()
}

/// The probabilities by the definitions of the parameters, in the order in which vLLM applies them.
fn probabilities(logits: &[f32], prompt: &[u32], params: &SamplingParams) -> Vec<f64> {
    let mut logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
    let mut seen = prompt.to_vec();
    seen.sort_unstable();
    seen.dedup();
    for id in seen {
        let (logit, penalty) = (&mut logits[id as usize], f64::from(params.repetition_penalty));
        *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
    }
    logits.iter_mut().for_each(|logit| *logit /= f64::from(params.temperature));
    let before = softmax(&logits);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let lowest = f64::from(params.min_p) * before[order[0]];
    let is_left_out =
        |rank: usize, id: usize| params.top_k > 0 && rank >= params.top_k || before[id] < lowest;
    for (rank, &id) in order.iter().enumerate() {
        if is_left_out(rank, id) {
            logits[id] = f64::NEG_INFINITY;
        }
    }
    let mut kept = softmax(&logits);
    let mut sum = 0.0;
    for &id in &order {
        // Those whose predecessors have not yet reached top-p.
        let is_inside = sum < f64::from(params.top_p);
        sum += kept[id];
        if !is_inside {
            kept[id] = 0.0;
        }
    }
    let sum: f64 = kept.iter().sum();
    kept.iter().map(|value| value / sum).collect()
}

fn draw(llm: &Llm, prompt: &[u32], params: &SamplingParams) -> Vec<u32> {
    let streams = (0..NUM_DRAWS / N).map(|seed| {
        let params = SamplingParams {
            max_tokens: Some(1),
            ignore_eos: true,
            n: N,
            seed: Some(seed as u64),
            ..params.clone()
        };
        llm.engine().submit(Request::new(prompt.to_vec(), params)).unwrap()
    });
    let streams: Vec<_> = streams.collect();
    let token = |event| match event {
        Event::Token { token_id, .. } => Some(token_id),
        _ => None,
    };
    streams.into_iter().flatten().filter_map(token).collect()
}

/// The squared differences from what is expected, as the number of standard deviations of a normal distribution.
/// Tokens that are expected less than five times are one class together.
fn deviation(probabilities: &[f64], counts: &[f64]) -> (f64, usize) {
    let num: f64 = counts.iter().sum();
    let mut classes = Vec::new();
    let (mut rest, mut rest_count) = (0.0, 0.0);
    for (probability, count) in probabilities.iter().zip(counts) {
        match probability * num {
            expected if expected >= 5.0 => classes.push((expected, *count)),
            expected => (rest, rest_count) = (rest + expected, rest_count + count),
        }
    }
    if rest >= 1.0 {
        classes.push((rest, rest_count));
    }
    let statistic: f64 = classes.iter().map(|(expected, count)| (count - expected).powi(2) / expected).sum();
    // Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal.
    let freedom = (classes.len() - 1) as f64;
    let variance = 2.0 / (9.0 * freedom);
    (((statistic / freedom).cbrt() - (1.0 - variance)) / variance.sqrt(), classes.len())
}

#[test]
fn tokens_are_drawn_with_their_probabilities() {
    let Some(gguf) = gguf() else { return };
    let llm = load(&gguf, with_limits(|limits| limits.max_num_seqs = N));
    let prompt = llm.encode_raw("Once upon a time, there was a").unwrap();
    let logits = logits(&llm, &prompt);
    let plain = SamplingParams::default();
    let entropy: f64 =
        probabilities(&logits, &prompt, &plain).iter().filter(|p| **p > 0.0).map(|p| -p * p.ln()).sum();
    assert!((3.0..6.0).contains(&entropy), "entropy {entropy}");
    let cool = SamplingParams { temperature: 0.8, ..plain.clone() };
    for params in [
        plain.clone(),
        SamplingParams { temperature: 1.5, ..plain },
        SamplingParams { top_p: 0.9, ..cool.clone() },
        SamplingParams { top_k: 40, ..cool.clone() },
        SamplingParams { min_p: 0.02, ..cool.clone() },
        SamplingParams { repetition_penalty: 1.3, ..cool.clone() },
        SamplingParams { min_p: 0.01, top_k: 60, top_p: 0.95, repetition_penalty: 1.3, ..cool },
    ] {
        let probabilities = probabilities(&logits, &prompt, &params);
        let mut counts = vec![0.0; probabilities.len()];
        let draws = draw(&llm, &prompt, &params);
        assert_eq!(draws.len(), NUM_DRAWS);
        for id in draws {
            assert!(probabilities[id as usize] > 0.0, "{params:?}: {id} is never drawn");
            counts[id as usize] += 1.0;
        }
        let (deviation, num_classes) = deviation(&probabilities, &counts);
        println!("{num_classes} classes, {deviation:.2} standard deviations");
        assert!(num_classes > 5 && deviation.abs() < 4.0, "{params:?}: {deviation} of {num_classes} classes");
        // Those of half of the temperature are noticed.
        let sum: f64 = probabilities.iter().map(|p| p.powi(2)).sum();
        let others: Vec<f64> = probabilities.iter().map(|p| p.powi(2) / sum).collect();
        assert!(
            self::deviation(&others, &counts).0 > 4.0,
            "{params:?}: as probable at half of the temperature"
        );
    }
}
