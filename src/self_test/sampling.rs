//! The device's sampler compared with the host's.

use super::oracle::{buffer, noise};
use super::{Check, Report};
use crate::Result;
use crate::ops::{Context, DeviceSampler, SampleParams};
use crate::sampling::{Sampler, SamplerInput, SamplingParams};

/// A row of a batch: its sampling parameters and its history.
#[derive(Debug, Clone)]
struct Row {
    params: SamplingParams,
    seed: u64,
    stream: u32,
    prompt: Vec<u32>,
    output: Vec<u32>,
    /// Tokens that end the sequence.
    ends: Vec<u32>,
    /// The logits of each step; later steps reuse the last ones.
    logits: Vec<Vec<f32>>,
    /// The expected last token, where the case knows it. It verifies that the case tests its intention.
    last: Option<u32>,
}

impl Row {
    fn new(params: SamplingParams, logits: Vec<f32>) -> Self {
        Self {
            params,
            seed: 0,
            stream: 0,
            prompt: Vec::new(),
            output: Vec::new(),
            ends: Vec::new(),
            logits: vec![logits],
            last: None,
        }
    }

    fn logits(&self, step: usize) -> &[f32] {
        &self.logits[step.min(self.logits.len() - 1)]
    }

    fn on_device(&self) -> SampleParams<'_> {
        let params = &self.params;
        SampleParams {
            inverse_temperature: if params.is_greedy() { 0.0 } else { 1.0 / params.temperature },
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            logit_bias: &params.logit_bias,
            banned: &self.ends,
            min_tokens: params.min_tokens,
            seed: self.seed,
            stream: self.stream,
            prompt_token_ids: &self.prompt,
            output_token_ids: &self.output,
        }
    }
}

/// Rows that are sampled together, some steps without the host.
struct Case {
    name: &'static str,
    num_steps: usize,
    rows: Vec<Row>,
}

/// All cases on one sampler, so that each starts with the state of the previous one.
pub(super) fn run(context: &Context, report: &mut dyn Report) {
    let mut device = match DeviceSampler::new(context) {
        Ok(Some(device)) => device,
        Ok(None) => return,
        Err(error) => return report.hear(Check::failed("sampling".to_owned(), &error)),
    };
    let cases: [fn() -> Case; 10] = [
        no_numbers,
        ties,
        penalties,
        many_steps,
        bans_and_biases,
        random_numbers,
        filters,
        thresholds,
        long_lists,
        mixture,
    ];
    for case in cases {
        let case = case();
        let name = format!("sampling: {}", case.name);
        if !report.wants(&name) {
            continue;
        }
        report.hear(match case.first_difference(context, &mut device) {
            Ok(None) => {
                let num_tokens = case.rows.len() * case.num_steps;
                Check { name, passed: true, detail: format!("{num_tokens} tokens as on the host") }
            }
            Ok(Some(difference)) => Check { name, passed: false, detail: difference },
            Err(error) => Check::failed(name, &error),
        });
    }
}

impl Case {
    /// Samples all rows on the device, then the same one by one on the host.
    fn first_difference(&self, context: &Context, device: &mut DeviceSampler) -> Result<Option<String>> {
        let Self { num_steps, ref rows, .. } = *self;
        let vocab_size = rows[0].logits(0).len();
        device.begin(context, rows.iter().map(Row::on_device), num_steps)?;
        // Writing them waits for the device, which should have all steps before it. They live until it is done.
        let of_step = |step: usize| {
            let values: Vec<f32> = rows.iter().flat_map(|row| row.logits(step)).copied().collect();
            buffer(context, &values, vocab_size, rows.len())
        };
        let logits = (0..num_steps).map(of_step).collect::<Result<Vec<_>>>()?;
        logits.iter().try_for_each(|logits| device.launch(context, logits))?;
        let mut host = Sampler::default();
        let mut outputs: Vec<Vec<u32>> = rows.iter().map(|row| row.output.clone()).collect();
        let mut failed = vec![false; rows.len()];
        let mut actual = Vec::new();
        for step in 0..num_steps {
            device.tokens(context, step, &mut actual)?;
            for (index, row) in rows.iter().enumerate() {
                // Tokens after a failed row are not checked, but must do no harm.
                if failed[index] {
                    continue;
                }
                let input = SamplerInput {
                    params: &row.params,
                    seed: row.seed,
                    stream: row.stream,
                    prompt_token_ids: &row.prompt,
                    output_token_ids: &outputs[index],
                    end_token_ids: &row.ends,
                    allowed: None,
                };
                let expected = host.sample(row.logits(step), &input).map_or(u32::MAX, |token| token.token_id);
                let wanted = row.last.filter(|_| step + 1 == num_steps).unwrap_or(expected);
                if actual[index] != expected || wanted != expected {
                    return Ok(Some(format!(
                        "row {index}, step {step}: the device has {}, the host {expected}, of {wanted}; {:?}, \
                         seed {}, stream {}, {} tokens of output",
                        actual[index],
                        row.params,
                        row.seed,
                        row.stream,
                        outputs[index].len()
                    )));
                }
                failed[index] = expected == u32::MAX;
                outputs[index].push(expected);
            }
        }
        Ok(None)
    }
}

fn sampled() -> SamplingParams {
    SamplingParams::default()
}

/// Logits of the vocabulary: all alike but for some.
fn logits(vocab_size: usize, all: f32, some: &[(u32, f32)]) -> Vec<f32> {
    let mut logits = vec![all; vocab_size];
    some.iter().for_each(|&(token_id, logit)| logits[token_id as usize] = logit);
    logits
}

/// Logits with ties: multiples of 1/8 up to `bound`.
fn rounded_noise(seed: u64, vocab_size: usize, bound: f32) -> Vec<f32> {
    noise(seed, vocab_size).into_iter().map(|value| (value * bound * 8.0).round() / 8.0).collect()
}

/// Rows that cannot be sampled, between others that can.
fn no_numbers() -> Case {
    const VOCAB_SIZE: usize = 70;
    let greedy = SamplingParams::greedy;
    let (infinity, nan) = (f32::INFINITY, f32::NAN);
    let with = |all: f32, some: &[(u32, f32)]| logits(VOCAB_SIZE, all, some);
    let row = |params: SamplingParams, logits: Vec<f32>| Row::new(params, logits);
    let mut rows = Vec::new();
    for params in [greedy(), sampled()] {
        rows.extend([
            row(params.clone(), with(0.0, &[(40, nan)])),
            row(params.clone(), with(-1.0, &[(69, -nan)])),
            row(params.clone(), with(nan, &[])),
            row(params.clone(), with(0.0, &[(3, infinity)])),
            row(params.clone(), with(-infinity, &[(66, infinity)])),
            row(params.clone(), with(-infinity, &[])),
            row(params.clone(), with(-infinity, &[(69, -80.0)])),
            row(params.clone(), with(-infinity, &[(0, 80.0)])),
            // The logit that makes the row invalid could be banned, or changed by a bias.
            Row {
                ends: vec![3, 69],
                ..row(SamplingParams { min_tokens: 9, ..params.clone() }, with(0.0, &[(3, nan)]))
            },
            Row {
                ends: vec![3, 69],
                ..row(SamplingParams { min_tokens: 9, ..params.clone() }, with(0.0, &[(69, infinity)]))
            },
            row(
                SamplingParams { logit_bias: [(5, -100.0)].into(), ..params.clone() },
                with(0.0, &[(5, infinity)]),
            ),
            // Everything is banned.
            Row {
                ends: (0..VOCAB_SIZE as u32).collect(),
                ..row(SamplingParams { min_tokens: 9, ..params.clone() }, with(0.0, &[]))
            },
            // It fails in the first step, and penalties go over its tokens in the next.
            Row {
                logits: vec![with(nan, &[]), with(0.0, &[])],
                ..row(SamplingParams { presence_penalty: 1.0, ..params }, Vec::new())
            },
        ]);
    }
    Case { name: "rows that are no numbers", num_steps: 2, rows }
}

/// The first of equals, wherever they are.
fn ties() -> Case {
    // A lane has two tokens, the last one of the last simdgroup has one.
    const VOCAB_SIZE: usize = 2040;
    let mut rows = Vec::new();
    for equals in [[7, 39], [7, 8], [31, 32], [100, 2039], [64, 1995], [2038, 2039], [0, 2039]] {
        for (all, best) in [(-3.0, -2.5), (-3.0, 0.0), (1.0, 1.5)] {
            let some = equals.map(|token_id| (token_id, best));
            rows.push(Row {
                last: Some(equals[0]),
                ..Row::new(SamplingParams::greedy(), logits(VOCAB_SIZE, all, &some))
            });
        }
    }
    for token_id in [0, 31, 32, 500, 1983, 1984, 2039] {
        let row = Row::new(SamplingParams::greedy(), logits(VOCAB_SIZE, -1.0, &[(token_id, -0.5)]));
        rows.push(Row { last: Some(token_id), ..row });
    }
    Case { name: "the first of equals", num_steps: 1, rows }
}

/// Each penalty between two bounds: a token that was there has the largest logit or just not.
fn penalties() -> Case {
    const VOCAB_SIZE: usize = 64;
    let base = SamplingParams::greedy();
    let varieties = [
        SamplingParams {
            repetition_penalty: 1.3,
            presence_penalty: 0.3,
            frequency_penalty: 0.4,
            ..base.clone()
        },
        SamplingParams { repetition_penalty: 1.3, ..base.clone() },
        SamplingParams { repetition_penalty: 0.7, frequency_penalty: -0.4, ..base.clone() },
        SamplingParams { presence_penalty: 0.5, ..base.clone() },
        SamplingParams { presence_penalty: -0.3, frequency_penalty: 0.7, ..base.clone() },
        SamplingParams { frequency_penalty: 0.6, ..base },
    ];
    // How often the token is in the prompt and in the output before the first step.
    let histories = [(0, 0), (2, 0), (0, 1), (1, 2), (0, 3)];
    // Whether the token is the one that is sampled, in each step before the last.
    let steps = [[false; 3], [true, false, false], [false, false, true], [true, false, true], [true; 3]];
    let mut rows = Vec::new();
    for (index, (prompt, output)) in histories.into_iter().enumerate() {
        for (way, steps) in steps.into_iter().enumerate() {
            for (variety, params) in varieties.iter().enumerate() {
                for logit in [6.0, -3.0] {
                    let number = rows.len() as u32;
                    // Tokens differ from row to row, so that none is taken for another's.
                    let token_id = (index * 29 + way * 11 + variety * 5) as u32 % VOCAB_SIZE as u32;
                    let others: [u32; 3] =
                        [1, 2, 3].map(|by| (token_id + by * 7 + number % 5) % VOCAB_SIZE as u32);
                    let count = output + steps.iter().filter(|is_own| **is_own).count();
                    let mut penalized = logit;
                    if prompt + count > 0 {
                        let penalty = params.repetition_penalty;
                        penalized = if logit > 0.0 { logit / penalty } else { logit * penalty };
                    }
                    if count > 0 {
                        penalized -= params.frequency_penalty * count as f32 + params.presence_penalty;
                    }
                    let times = |times: usize, other: u32| {
                        std::iter::repeat_n(token_id, times).chain([other]).collect::<Vec<u32>>()
                    };
                    let mut with_steps: Vec<Vec<f32>> = steps
                        .map(|is_own| if is_own { token_id } else { others[0] })
                        .map(|sampled| logits(VOCAB_SIZE, -50.0, &[(sampled, 50.0)]))
                        .to_vec();
                    for (bound, last) in [(0.02, others[2]), (-0.02, token_id)] {
                        with_steps.truncate(3);
                        let rival = (others[2], penalized + bound);
                        with_steps.push(logits(VOCAB_SIZE, -50.0, &[(token_id, logit), rival]));
                        rows.push(Row {
                            prompt: times(prompt, others[1]),
                            output: times(output, others[1]),
                            logits: with_steps.clone(),
                            last: Some(last),
                            ..Row::new(params.clone(), Vec::new())
                        });
                    }
                }
            }
        }
    }
    // There was no history before the first step.
    for params in varieties {
        let with_steps =
            vec![logits(VOCAB_SIZE, 1.0, &[(9, 1.1)]), logits(VOCAB_SIZE, 1.0, &[(9, 1.1), (3, 1.05)])];
        rows.push(Row { logits: with_steps, ..Row::new(params, Vec::new()) });
    }
    Case { name: "penalties", num_steps: 4, rows }
}

/// More steps than there are threads: a token that is sampled late has its penalty in the next step.
fn many_steps() -> Case {
    const VOCAB_SIZE: usize = 32;
    let sampled =
        [vec![5; 36], vec![9]].concat().into_iter().map(|id| logits(VOCAB_SIZE, -50.0, &[(id, 50.0)]));
    let last = logits(VOCAB_SIZE, -50.0, &[(9, 1.0), (11, 0.8)]);
    let penalized = SamplingParams { presence_penalty: 0.3, ..SamplingParams::greedy() };
    let row =
        Row { logits: sampled.chain([last]).collect(), last: Some(11), ..Row::new(penalized, Vec::new()) };
    Case { name: "many steps", num_steps: 38, rows: vec![row] }
}

/// Banned end tokens and biases, each row with its own lists.
fn bans_and_biases() -> Case {
    const VOCAB_SIZE: usize = 100;
    let greedy = SamplingParams::greedy();
    let mut rows = Vec::new();
    // End tokens are the most likely ones, and a ban ends before, in and after the steps of the case.
    for min_tokens in 0..8 {
        for ends in [vec![99], vec![0, 64], vec![40, 41, 42, 99]] {
            let some: Vec<(u32, f32)> = ends.iter().map(|end| (*end, -0.5)).collect();
            let some = [&some[..], &[(17 + min_tokens as u32, -0.75)]].concat();
            let row =
                Row::new(SamplingParams { min_tokens, ..greedy.clone() }, logits(VOCAB_SIZE, -2.0, &some));
            rows.push(Row { ends, output: vec![1, 2], ..row });
        }
    }
    // Biases that just make a token the most likely one, or just not.
    for token_ids in [vec![99], vec![0], vec![5, 63, 64, 98]] {
        for (logit, bias) in [(-4.0, 2.99), (-4.0, 3.01), (1.0, -2.01), (1.0, -1.99)] {
            let some: Vec<(u32, f32)> = token_ids.iter().map(|id| (*id, logit)).collect();
            let own = token_ids.last().map(|id| (*id, bias));
            let rest = token_ids.iter().rev().skip(1).map(|id| (*id, -100.0));
            let logit_bias = own.into_iter().chain(rest).collect();
            rows.push(Row::new(
                SamplingParams { logit_bias, ..greedy.clone() },
                logits(VOCAB_SIZE, -1.0, &some),
            ));
        }
    }
    // Tokens that do not exist, after the last of this row and at the first of the next.
    let logit_bias = [(100, 50.0), (101, 50.0), (163, 50.0)].into();
    rows.push(Row {
        ends: vec![100, 101, 164],
        ..Row::new(
            SamplingParams { logit_bias, min_tokens: 9, ..greedy.clone() },
            logits(VOCAB_SIZE, 0.0, &[(50, 1.0)]),
        )
    });
    rows.push(Row::new(greedy.clone(), logits(VOCAB_SIZE, 0.0, &[(0, 1.0), (63, 2.0), (64, 3.0)])));
    // A bias and a ban on one token, and penalties of banned ones.
    let logit_bias = [(30, 80.0), (31, 2.0)].into();
    rows.push(Row {
        ends: vec![30],
        output: vec![30, 31],
        ..Row::new(
            SamplingParams { logit_bias, min_tokens: 5, presence_penalty: 1.0, ..greedy },
            rounded_noise(3, VOCAB_SIZE, 0.5),
        )
    });
    Case { name: "bans and biases", num_steps: 4, rows }
}

/// Draws from equal weights, which show each bit of the random number that counts: from more rows and steps than the
/// sampler has space for at first.
fn random_numbers() -> Case {
    const VOCAB_SIZE: usize = 96;
    let flat = || Row::new(sampled(), vec![1.0; VOCAB_SIZE]);
    let mut rows = Vec::new();
    for index in 0..110 {
        rows.push(Row { seed: index, ..flat() });
        rows.push(Row { seed: index << 32 | 5, ..flat() });
        rows.push(Row { seed: 6, stream: index as u32, ..flat() });
    }
    rows.push(Row { seed: u64::MAX, stream: u32::MAX, ..flat() });
    for len in [1, 100, 65_535, 65_536, 70_000] {
        rows.push(Row { output: vec![7; len], ..flat() });
    }
    // Seeds whose first numbers begin with 24 bits of 0 and of 1: the first token, and the last remaining one.
    for (seed, params) in [12_121_362, 16_390_493, 19_781_057, 28_454_778].into_iter().zip([
        sampled(),
        sampled(),
        SamplingParams { top_k: 50, ..sampled() },
        SamplingParams { top_p: 0.9999, ..sampled() },
    ]) {
        rows.push(Row { seed, ..Row::new(params.clone(), vec![-1.0; VOCAB_SIZE]) });
        // The first and the last ones have no weight.
        let ends: Vec<(u32, f32)> = [0, 1, 2, 40, 93, 94, 95].map(|id| (id, -f32::INFINITY)).to_vec();
        rows.push(Row { seed, ..Row::new(params, logits(VOCAB_SIZE, -1.0, &ends)) });
    }
    Case { name: "random numbers", num_steps: 4, rows }
}

/// Thresholds that a small fraction of the weights decides: whether the second token is kept with the first.
fn thresholds() -> Case {
    const VOCAB_SIZE: usize = 2150;
    const NUM_SEEDS: u64 = 16;
    let (none, first, second) = (-f32::INFINITY, (9, 0.0), 70);
    let tiny = -24.0 * std::f32::consts::LN_2;
    let both = |top_k, top_p| SamplingParams { top_k, top_p, ..sampled() };
    let equals: Vec<(u32, f32)> = (0..8).map(|index| (5 + 32 * index, 1.0)).collect();
    let rows = [
        // Weights 1 and 0.5, and thousands of 2^-24, whose sum is close to 0: the first one is enough.
        (both(VOCAB_SIZE - 1, 0.6664), logits(VOCAB_SIZE, tiny, &[first, (second, 0.5f32.ln())])),
        // Just not, by one percent.
        (both(2, 0.6665), logits(VOCAB_SIZE, none, &[first, (second, 0.5019f32.ln())])),
        // Just not, by the lowest bits of the second one's weight.
        (both(2, 0.666_654), logits(VOCAB_SIZE, none, &[first, (second, -0.693_032_8)])),
        // A cut among equals, and another that keeps all of them or cuts again.
        (both(5, 0.99), logits(VOCAB_SIZE, none, &equals)),
        (both(5, 0.5), logits(VOCAB_SIZE, none, &equals)),
    ];
    let with_seeds = rows.into_iter().flat_map(|(params, logits)| {
        (0..NUM_SEEDS).map(move |seed| Row { seed, ..Row::new(params.clone(), logits.clone()) })
    });
    Case { name: "thresholds", num_steps: 2, rows: with_seeds.collect() }
}

/// Filters, alone and together, among many equals and among none.
fn filters() -> Case {
    // As many threads as tokens, and a few more.
    const VOCAB_SIZE: usize = 150;
    let filtered = [
        SamplingParams { min_p: 0.7, temperature: 2.0, ..sampled() },
        SamplingParams { min_p: 0.7, temperature: 0.5, ..sampled() },
        // The most likely ones only, and those among them with an id up to some.
        SamplingParams { min_p: 1.0, ..sampled() },
        SamplingParams { top_k: 1, ..sampled() },
        SamplingParams { top_k: 2, ..sampled() },
        SamplingParams { top_k: 33, ..sampled() },
        SamplingParams { top_k: 149, ..sampled() },
        SamplingParams { top_p: 0.01, ..sampled() },
        SamplingParams { top_p: 0.5, ..sampled() },
        SamplingParams { top_p: 0.9999, ..sampled() },
        SamplingParams { top_k: 20, top_p: 0.62, ..sampled() },
        SamplingParams { top_k: 20, min_p: 0.6, ..sampled() },
        SamplingParams { top_p: 0.715, min_p: 0.5, ..sampled() },
        SamplingParams { top_k: 30, top_p: 0.81, min_p: 0.2, temperature: 1.7, ..sampled() },
    ];
    let slope: Vec<f32> = (0..VOCAB_SIZE as u32).map(|id| -0.05 * (id * 37 % 150) as f32).collect();
    let mut rows = Vec::new();
    for (index, params) in filtered.into_iter().enumerate() {
        for (kind, logits) in
            [vec![0.5; VOCAB_SIZE], rounded_noise(70, VOCAB_SIZE, 1.0), slope.clone()].into_iter().enumerate()
        {
            let seed = kind as u64 + 10 * index as u64;
            rows.push(Row { seed, ..Row::new(params.clone(), logits) });
        }
    }
    // Token 0 is the first that is not kept.
    let ranked: Vec<(u32, f32)> = (0..20).map(|rank| ((rank + 12) % 20, -0.05 * rank as f32)).collect();
    let weights = ranked.iter().map(|(_, logit)| logit.exp());
    let top_p = (weights.clone().take(8).sum::<f32>() - 0.02) / weights.sum::<f32>();
    for seed in 0..8 {
        for params in [SamplingParams { top_k: 8, ..sampled() }, SamplingParams { top_p, ..sampled() }] {
            rows.push(Row { seed, ..Row::new(params, logits(VOCAB_SIZE, -f32::INFINITY, &ranked)) });
        }
    }
    Case { name: "filters", num_steps: 2, rows }
}

/// A vocabulary of more tokens than 16 bits count, and lists of more than there are threads.
fn long_lists() -> Case {
    const VOCAB_SIZE: usize = 70_000;
    let greedy = SamplingParams::greedy();
    let some = [(66_000, 3.0), (69_999, 2.0), (464, 1.0), (4_463, 1.0)];
    let peaked = || logits(VOCAB_SIZE, 0.0, &some);
    let many: Vec<u32> = (0..1_500).map(|index| 66_000 + 2 * index).chain([69_999]).collect();
    let bias = many.iter().take(1_024).map(|id| (*id, -5.0)).collect();
    let rows = vec![
        Row { seed: 1, ..Row::new(sampled(), vec![0.0; VOCAB_SIZE]) },
        Row { seed: 2, ..Row::new(SamplingParams { top_p: 0.77001, ..sampled() }, vec![0.0; VOCAB_SIZE]) },
        Row::new(SamplingParams { logit_bias: [(65_999, 4.0)].into(), ..greedy.clone() }, peaked()),
        Row::new(
            SamplingParams { logit_bias: bias, ..greedy.clone() },
            logits(VOCAB_SIZE, 0.0, &[(68_046, 4.0), (68_044, 3.0), (9, 2.0)]),
        ),
        Row { ends: many.clone(), ..Row::new(SamplingParams { min_tokens: 3, ..greedy.clone() }, peaked()) },
        Row {
            output: many,
            ..Row::new(SamplingParams { presence_penalty: 2.0, ..greedy.clone() }, peaked())
        },
        Row::new(SamplingParams { repetition_penalty: 5.0, ..greedy }, peaked()),
    ];
    Case { name: "long lists", num_steps: 2, rows }
}

/// Parameters that reach every branch of the sampler, alone and together, for logits like those of a model.
fn mixture() -> Case {
    const VOCAB_SIZE: usize = 1500;
    let base = SamplingParams { temperature: 0.8, ..sampled() };
    let greedy = SamplingParams::greedy();
    let penalized = SamplingParams {
        repetition_penalty: 1.3,
        frequency_penalty: 0.4,
        presence_penalty: 0.3,
        ..base.clone()
    };
    let bias = [(3, 4.0), (700, 6.0), (1499, -100.0)].into();
    let varieties = [
        SamplingParams { temperature: 0.0, ..penalized.clone() },
        // Token 3 has a bias and is banned.
        SamplingParams { logit_bias: bias, min_tokens: 5, ..greedy },
        base.clone(),
        SamplingParams { top_k: 40, top_p: 0.9, min_p: 0.01, ..penalized },
        SamplingParams { temperature: 2.0, presence_penalty: -1.0, min_tokens: 50, ..base },
    ];
    let rows = varieties.into_iter().enumerate().map(|(index, params)| Row {
        seed: 77 + index as u64,
        stream: index as u32,
        prompt: vec![5, 9, 9, 1200],
        output: vec![700, 3, 700],
        ends: (0..VOCAB_SIZE as u32).step_by(3).collect(),
        logits: (0..2).map(|step| rounded_noise(40 + 10 * step + index as u64, VOCAB_SIZE, 8.0)).collect(),
        ..Row::new(params, Vec::new())
    });
    Case { name: "a mixture", num_steps: 2, rows: rows.collect() }
}
