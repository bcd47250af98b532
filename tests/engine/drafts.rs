//! Speculation: for all drafts, good or bad, the tokens and their log-probabilities are those of plain decoding.

use std::hash::{DefaultHasher, Hash, Hasher};

use tinyvllm::config::EngineConfig;
use tinyvllm::config::{SpeculativeConfig, SpeculativeMethod};
use tinyvllm::engine::{EngineCore, Event, Request};
use tinyvllm::runner::{Runner, Wanted};
use tinyvllm::sampling::{Sampler, SamplerInput, SamplingParams, TokenLogprobs, TokenMask};
use tinyvllm::speculation::{Draft, DraftSource, DraftedSequence, Drafter};

use super::fake_runner::{EOS, FakeRunner, VOCAB_SIZE, logits, reference};
use super::{limits, run_to_end, small_config};

/// Drafts the greedy tokens, with wrong ones at this many of a hundred positions. Its confidence is full, so all drafts
/// are verified.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guesses {
    pub(crate) percent_right: u64,
}

impl DraftSource for Guesses {
    fn start(&self, sequence: &DraftedSequence<'_>) -> Box<dyn Drafter> {
        assert_eq!(sequence.num_predicted, 0);
        Box::new(Guess { guesses: *self, tokens: Vec::new(), learned: None })
    }
}

struct Guess {
    guesses: Guesses,
    tokens: Vec<u32>,
    /// Tokens drafted, until their outcome is reported.
    learned: Option<usize>,
}

impl Drafter for Guess {
    fn extend(&mut self, token_ids: &[u32]) {
        self.tokens.extend_from_slice(token_ids);
    }

    fn draft(&mut self, max_tokens: usize, draft: &mut Draft) {
        assert!(draft.is_empty());
        let mut tokens = self.tokens.clone();
        for _ in 0..max_tokens {
            let logits = logits(&tokens);
            let best = (0..VOCAB_SIZE).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap_or(0) as u32;
            let mut hasher = DefaultHasher::new();
            tokens.hash(&mut hasher);
            let is_right = hasher.finish() % 100 < self.guesses.percent_right;
            let token = if is_right { best } else { (best + 1) % VOCAB_SIZE as u32 };
            tokens.push(token);
            draft.push(token, 1.0);
        }
        self.learned = Some(draft.len());
    }

    fn learn(&mut self, num_tried: usize, num_right: usize) {
        let num_drafted = self.learned.expect("nothing was drafted");
        assert!(
            num_right <= num_tried && num_tried <= num_drafted,
            "{num_right} of {num_tried}, {num_drafted}"
        );
    }
}

/// The engine of a configuration, with drafts of this kind: none, looked up, or guessed.
pub(crate) fn core(config: &EngineConfig, percent_right: Option<u64>) -> EngineCore {
    core_with(FakeRunner::new(config), config, percent_right)
}

fn core_with(runner: impl Runner + 'static, config: &EngineConfig, percent_right: Option<u64>) -> EngineCore {
    let mut core = EngineCore::new(Box::new(runner), limits(), config.clone()).unwrap();
    if let Some(percent_right) = percent_right {
        core.set_draft_source(Box::new(Guesses { percent_right }));
    }
    core
}

fn drafting(num_speculative_tokens: usize) -> EngineConfig {
    let speculative =
        SpeculativeConfig { method: SpeculativeMethod::Suffix, num_speculative_tokens, is_adaptive: true };
    EngineConfig {
        speculative,
        step_cost: 64,
        max_num_batched_tokens: 32,
        max_num_seqs: 20,
        ..small_config()
    }
}

/// The sampler's result for each token, without an engine.
pub(crate) fn logprobs(prompt: &[u32], output: &[u32], num_top: usize) -> Vec<TokenLogprobs> {
    let mut sampler = Sampler::default();
    let before = |index: usize| [prompt, &output[..index]].concat();
    let rank =
        |(index, token): (usize, &u32)| sampler.rank(&logits(&before(index)), *token, num_top).logprobs;
    output.iter().enumerate().map(rank).collect()
}

#[test]
fn right_drafts_save_steps_and_wrong_ones_cost_none() {
    let params = SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::greedy() };
    let prompt = vec![1, 2, 3];
    for (percent_right, num_tokens, num_steps) in
        [(100, 3, 11), (100, 1, 21), (0, 3, 40), (100, 0, 40), (100, 8, 6)]
    {
        // The prompt's step gives a token, and each further one all of its draft and one.
        let mut core = core(&drafting(num_tokens), Some(percent_right));
        let id = core.submit(Request::new(prompt.clone(), params.clone())).unwrap();
        let collected = run_to_end(&mut core);
        assert_eq!(collected[&id].tokens[&0], reference(&prompt, &params, 0, 0, 64));
        let stats = core.stats();
        assert_eq!(stats.num_steps, num_steps, "{percent_right} % of {num_tokens}");
        let speculation = stats.speculation;
        assert_eq!(speculation.num_accepted_tokens, 40 - stats.num_steps);
        assert_eq!(speculation.num_accepted_at.iter().sum::<u64>(), speculation.num_accepted_tokens);
        assert!(speculation.num_draft_tokens <= speculation.num_drafts * num_tokens as u64);
        assert_eq!(speculation.num_drafts > 0, num_tokens > 0);
    }
}

#[test]
fn an_answer_that_repeats_its_prompt_is_drafted_from_it() {
    // This model repeats itself in the same context: its output loops, as its context is its input.
    let config = drafting(4);
    let mut core = core(&config, None);
    let params = SamplingParams {
        max_tokens: Some(48),
        ignore_eos: true,
        logit_bias: (1..=3).map(|token| (token, 50.0)).collect(),
        ..SamplingParams::greedy()
    };
    let id = core.submit(Request::new(vec![1, 2, 3, 1, 2, 3], params.clone())).unwrap();
    let collected = run_to_end(&mut core);
    assert_eq!(collected[&id].tokens[&0], reference(&[1, 2, 3, 1, 2, 3], &params, 0, 0, 64));
    assert!(core.stats().speculation.num_drafts > 0);
}

#[test]
fn a_runner_whose_bits_depend_on_the_batch_gets_no_drafts_beyond_it() {
    struct Exact(FakeRunner, usize);
    impl Runner for Exact {
        fn execute(
            &mut self,
            step: &tinyvllm::runner::Step<'_>,
        ) -> tinyvllm::Result<Vec<tinyvllm::runner::SequenceOutput>> {
            let num_tokens: usize = step.sequences.iter().map(|scheduled| scheduled.len).sum();
            let has_drafts = step.sequences.iter().any(|scheduled| scheduled.draft.num_tokens > 0);
            assert!(!has_drafts || num_tokens <= self.1, "{num_tokens} tokens");
            self.0.execute(step)
        }

        fn max_exact_tokens(&self) -> usize {
            self.1
        }
    }
    let config = drafting(8);
    let params = SamplingParams { max_tokens: Some(30), ignore_eos: true, ..SamplingParams::greedy() };
    for max_tokens in [1, 4, 8] {
        let mut core = core_with(Exact(FakeRunner::new(&config), max_tokens), &config, Some(100));
        for token in 1..4 {
            core.submit(Request::new(vec![token; 5], params.clone())).unwrap();
        }
        assert_eq!(run_to_end(&mut core).len(), 3);
        assert_eq!(core.stats().speculation.num_drafts > 0, max_tokens > 1, "{max_tokens}");
    }
}

#[test]
fn log_probabilities_are_those_of_plain_decoding() {
    for (num_tokens, percent_right) in [(0, 0), (3, 60), (8, 100), (8, 0)] {
        let mut core = core(&drafting(num_tokens), Some(percent_right));
        let params = SamplingParams {
            max_tokens: Some(30),
            logprobs: Some(3),
            temperature: 0.3,
            seed: Some(5),
            repetition_penalty: 1.2,
            ..SamplingParams::default()
        };
        core.submit(Request::new(vec![4, 5, 6], params.clone())).unwrap();
        let (mut tokens, mut found) = (Vec::new(), Vec::new());
        while core.has_unfinished() {
            for (_, event) in core.step() {
                if let Event::Token { token_id, logprobs, .. } = event {
                    tokens.push(token_id);
                    found.extend(logprobs);
                }
            }
        }
        assert_eq!(tokens, reference(&[4, 5, 6], &params, 5, 0, 64));
        assert_eq!(found, logprobs(&[4, 5, 6], &tokens, 3), "{num_tokens} tokens, {percent_right} %");
    }
}

/// An end inside a draft ends the sequence there.
#[test]
fn nothing_comes_after_an_end_token_in_a_draft() {
    let greedy = SamplingParams { max_tokens: Some(50), ..SamplingParams::greedy() };
    for first in 1..20 {
        let mut core = core(&drafting(8), Some(100));
        let id = core.submit(Request::new(vec![first], greedy.clone())).unwrap();
        let tokens = &run_to_end(&mut core)[&id].tokens[&0];
        assert_eq!(*tokens, reference(&[first], &greedy, 0, 0, 64));
        assert_eq!(
            tokens.iter().position(|token| *token == EOS).map_or(tokens.len(), |end| end + 1),
            tokens.len()
        );
    }
}

/// A prediction is a draft, independent of other drafters: where it is right, it saves steps, and where it is wrong, it
/// costs nothing.
#[test]
fn a_prediction_is_tried() {
    let params =
        SamplingParams { max_tokens: Some(40), ignore_eos: true, seed: Some(1), ..Default::default() };
    let prompt = vec![1, 2, 3];
    let wanted = reference(&prompt, &params, 1, 0, 64);
    let mut broken = wanted.clone();
    broken[20] = (broken[20] + 1) % VOCAB_SIZE as u32;
    let long = [&wanted[..], &[7; 500]].concat();
    for method in [SpeculativeMethod::Forced, SpeculativeMethod::Suffix] {
        let config = EngineConfig {
            speculative: SpeculativeConfig { method, num_speculative_tokens: 4, is_adaptive: true },
            ..drafting(4)
        };
        for (prediction, most_steps) in [
            (wanted.clone(), 9),
            (broken.clone(), 14),
            (vec![9; 40], 40),
            (Vec::new(), 40),
            (long.clone(), 9),
        ] {
            let mut core = core(&config, None);
            let request = Request { prediction, ..Request::new(prompt.clone(), params.clone()) };
            let id = core.submit(request).unwrap();
            assert_eq!(run_to_end(&mut core)[&id].tokens[&0], wanted);
            assert!(core.stats().num_steps <= most_steps, "{method:?} {:?} {most_steps}", core.stats());
        }
    }
}

/// Alongside rows of other clients a draft makes a step little longer, however sure it is.
#[test]
fn a_draft_delays_no_other_client() {
    let most_tokens = |clients: [u64; 3]| {
        let (steps, seen) = std::sync::mpsc::channel();
        let config = drafting(8);
        let runner = Watched(FakeRunner::new(&config), steps);
        let mut core = core_with(runner, &config, Some(100));
        for client in clients {
            let params =
                SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::greedy() };
            let client = tinyvllm::engine::ClientId(client);
            core.submit(Request { client, ..Request::new(vec![client.0 as u32 + 1; 3], params) }).unwrap();
        }
        run_to_end(&mut core);
        drop(core);
        seen.iter().filter(|rows| *rows == (3, true)).count()
    };
    // The fixed cost of a step is 64 rows here, so a quarter is 16, and 8 tokens of two of the three.
    assert!(most_tokens([0, 0, 0]) > 0);
    assert_eq!(most_tokens([0, 1, 2]), 0);
}

/// Reports the rows of each step, and whether they have more than sixteen drafted tokens.
struct Watched(FakeRunner, std::sync::mpsc::Sender<(usize, bool)>);

impl Runner for Watched {
    fn execute(
        &mut self,
        step: &tinyvllm::runner::Step<'_>,
    ) -> tinyvllm::Result<Vec<tinyvllm::runner::SequenceOutput>> {
        let num_drafted: usize = step.sequences.iter().map(|scheduled| scheduled.draft.num_tokens).sum();
        // The test may have ended.
        let _ = self.1.send((step.sequences.len(), num_drafted > 16));
        self.0.execute(step)
    }
}

/// Draws that are not drafted tokens have inputs of their own.
#[test]
fn the_input_after_a_drafted_token_is_that_of_plain_decoding() {
    let params = SamplingParams::default();
    let token_ids = [7, 8, 9, 10, 11, 12];
    let input = SamplerInput {
        params: &params,
        seed: 3,
        stream: 1,
        prompt_token_ids: &token_ids[..2],
        output_token_ids: &token_ids[2..4],
        end_token_ids: &[],
        allowed: None,
    };
    let scheduled = tinyvllm::runner::ScheduledSequence {
        seq: tinyvllm::scheduler::SeqId(0),
        token_ids: &token_ids,
        start: 3,
        len: 3,
        draft: tinyvllm::runner::StepDraft { num_tokens: 2, allowed: &[] },
        num_grouped_tokens: 0,
        block_table: &[],
        copy: None,
        samples: vec![input],
        wanted: Wanted::Logits,
        all_logits: false,
        prompt_logprobs: None,
    };
    assert_eq!((scheduled.num_draws(), scheduled.num_logits()), (3, 3));
    assert_eq!([0, 1, 2].map(|index| scheduled.drafted(index)), [Some(11), Some(12), None]);
    for (index, output) in [&token_ids[2..4], &token_ids[2..5], &token_ids[2..6]].into_iter().enumerate() {
        assert_eq!(scheduled.input(index).output_token_ids, output);
    }
}

#[test]
fn tokens_that_a_constraint_forces_need_no_logits() {
    let masks: Vec<TokenMask> =
        [vec![11], vec![12], vec![3, 4]].into_iter().map(|ids: Vec<u32>| ids.into_iter().collect()).collect();
    let token_ids = [7, 8, 9, 10, 11, 12];
    let rows = |params: &SamplingParams, first: &TokenMask, all_logits: bool| -> Vec<usize> {
        let input = SamplerInput {
            params,
            seed: 3,
            stream: 1,
            prompt_token_ids: &token_ids[..2],
            output_token_ids: &token_ids[2..4],
            end_token_ids: &[],
            allowed: Some(first),
        };
        let scheduled = tinyvllm::runner::ScheduledSequence {
            seq: tinyvllm::scheduler::SeqId(0),
            token_ids: &token_ids,
            start: 3,
            len: 3,
            draft: tinyvllm::runner::StepDraft { num_tokens: 2, allowed: &masks[1..] },
            num_grouped_tokens: 0,
            block_table: &[],
            copy: None,
            samples: vec![input],
            wanted: Wanted::Logits,
            all_logits,
            prompt_logprobs: None,
        };
        assert_eq!(scheduled.num_draws(), 3);
        assert_eq!(scheduled.num_logits(), scheduled.rows_with_logits().count());
        scheduled.rows_with_logits().collect()
    };
    let plain = SamplingParams::default();
    assert_eq!(rows(&plain, &masks[0], false), [2]);
    assert_eq!(rows(&plain, &masks[2], false), [0, 2]);
    assert_eq!(rows(&plain, &masks[0], true), [0, 1, 2]);
    // A log-probability is one of all tokens.
    let with_logprobs = SamplingParams { logprobs: Some(0), ..plain };
    assert_eq!(rows(&with_logprobs, &masks[0], false), [0, 1, 2]);
}
