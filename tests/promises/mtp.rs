//! Models that draft with an MTP block: the same tokens and log-probabilities, for any quality of the block.

use tinyvllm::sampling::{ConstraintState, TokenMask};

use super::mtp_model::{Layers, folder};
use super::*;

const VOCAB_SIZE: u32 = 128;

fn options(num_tokens: usize, change: impl FnOnce(&mut EngineLimits)) -> LlmOptions {
    with_limits(|limits| {
        limits.max_model_len = Some(200);
        limits.speculative = SpeculativeConfig {
            method: SpeculativeMethod::Mtp,
            num_speculative_tokens: num_tokens,
            is_adaptive: false,
        };
        change(limits);
    })
}

fn load_folder(folder: &Path, options: &LlmOptions) -> Llm {
    load_files("mtp", ModelFiles::Folder(folder.to_owned()), options)
}

/// Every other token is even, every third one is one of two.
#[derive(Debug, Clone, Copy)]
struct Pattern;

struct PatternState(u32);

impl Constraint for Pattern {
    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(PatternState(0))
    }
}

impl ConstraintState for PatternState {
    fn allowed(&mut self, allowed: &mut TokenMask) -> tinyvllm::Result<bool> {
        allowed.clear();
        let is_in = |token: &u32| self.0 % 2 == 1 || token.is_multiple_of(2);
        let few = if self.0 % 3 == 2 { 40..42 } else { 3..VOCAB_SIZE };
        few.filter(is_in).for_each(|token| allowed.insert(token));
        Ok(false)
    }

    fn accept(&mut self, _token_id: u32) -> tinyvllm::Result<()> {
        self.0 += 1;
        Ok(())
    }

    fn roll_back(&mut self, num_tokens: usize) -> tinyvllm::Result<()> {
        self.0 -= num_tokens as u32;
        Ok(())
    }
}

/// Of every kind, two with a common beginning.
fn requests() -> Vec<Request> {
    let prompt = |len: u32| (0..len).map(|at| (at * at * 7 + at * 13 + 5) % 120 + 3).collect::<Vec<_>>();
    let [greedy, seeded, penalised, several] = ways_to_sample(24);
    let ending = SamplingParams { ignore_eos: false, stop_token_ids: (60..70).collect(), ..greedy.clone() };
    let constraint: Option<Arc<dyn Constraint>> = Some(Arc::new(Pattern));
    vec![
        Request::new(prompt(33), greedy.clone()),
        Request::new(prompt(90), seeded.clone()),
        Request::new(prompt(31), penalised),
        Request::new(prompt(5), several),
        Request::new(prompt(1), ending),
        Request { constraint, ..Request::new(prompt(40), seeded) },
        Request { prompt_logprobs: Some(1), ..Request::new(prompt(50), greedy) },
    ]
}

/// Of each choice of a request the tokens with the bits of their log-probabilities.
type Choices = Vec<Vec<(u32, u32)>>;

/// Tokens and log-probabilities of all requests at once, and how many were preempted.
fn ranked_together(llm: &Llm) -> (Vec<Choices>, usize) {
    let submit = |request: Request| (request.params.n, llm.engine().submit(request).unwrap());
    let streams: Vec<_> = requests().into_iter().map(submit).collect();
    let mut num_preemptions = 0;
    let collect = |(n, stream): (usize, _)| {
        let mut choices = vec![Vec::new(); n];
        for event in stream {
            match event {
                Event::Token { index, token_id, logprobs, .. } => {
                    choices[index].push((token_id, logprobs.unwrap().logprob.to_bits()));
                }
                Event::Finished { error, stats, .. } => {
                    assert_eq!(error, None);
                    num_preemptions += stats.num_preemptions;
                }
                Event::Hidden { .. }
                | Event::PromptLogits { .. }
                | Event::PromptLogprobs { .. }
                | Event::PromptProgress { .. } => {}
            }
        }
        choices
    };
    (streams.into_iter().map(collect).collect(), num_preemptions)
}

/// With the log-probability of the token alone.
fn plain(folder: &Path) -> Vec<Choices> {
    let llm = load_folder(folder, &options(0, |limits| limits.enable_prefix_caching = false));
    let own = |request| {
        let choices = ranked(&llm, request).into_iter();
        choices.map(|choice| choice.into_iter().map(|(token, bits)| (token, bits[0])).collect()).collect()
    };
    let expected: Vec<Choices> = requests().into_iter().map(own).collect();
    assert_eq!(llm.engine().stats().unwrap().speculation.num_drafts, 0);
    expected
}

#[test]
fn what_a_model_drafts_for_itself_changes_no_token_and_no_log_probability() {
    for layers in [Layers::Full, Layers::Little, Layers::Nothing] {
        let folder = folder(layers, false);
        let expected = plain(folder.path());
        let mut num_accepted = 0;
        let mut check = |what: &str, options: &LlmOptions| {
            let llm = load_folder(folder.path(), options);
            assert!(llm.summary().contains("drafts with its MTP block"), "{}", llm.summary());
            let mut num_preemptions = 0;
            for time in ["at first", "from the cache"] {
                let (found, preemptions) = ranked_together(&llm);
                assert_eq!(found, expected, "{layers:?}, {what}, {time}");
                num_preemptions += preemptions;
            }
            let stats = llm.engine().stats().unwrap();
            assert!(stats.speculation.num_drafts > 0, "{what}");
            num_accepted += stats.speculation.num_accepted_tokens;
            num_preemptions
        };
        for num_tokens in [1, 3, 8] {
            check(&format!("{num_tokens} tokens"), &options(num_tokens, |_| ()));
        }
        let budget = |max: usize| {
            move |limits: &mut EngineLimits| {
                (limits.max_num_seqs, limits.max_num_batched_tokens) = (max, Some(max));
            }
        };
        check("chunks of 8", &options(3, budget(8)));
        check("chunks of 33", &options(3, budget(33)));
        check("small blocks", &options(8, |limits| limits.block_size = 3));
        check("one by one", &options(3, |limits| limits.max_num_seqs = 3));
        // A cache that holds the longest sequence and little more.
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        config.load_mtp_block(&checkpoint).unwrap();
        let token_bytes = KvCache::bytes_per_token(&config.with_cached_layers(), 4, KvCacheDType::F16) as u64;
        let mut is_preempted = || {
            let small = options(3, |limits| {
                limits.block_size = 4;
                limits.kv_cache_memory_bytes = Some(216 * token_bytes);
            });
            check("preemption", &small) > 0
        };
        assert!((0..20).any(|_| is_preempted()), "no preemption");
        assert!(num_accepted > 0 || layers == Layers::Full, "{layers:?}");
    }
}

/// candle's tensors draft nothing, as their matmuls round differently with the size of a batch, and the block is
/// computed with them.
#[test]
fn the_definitions_compute_the_block_and_the_same_tokens() {
    let folder = folder(Layers::Little, false);
    let tokens = |num_tokens: usize| {
        let reference = LlmOptions {
            kernels: KernelChoice::Reference,
            device: DeviceChoice::Cpu,
            ..options(num_tokens, |_| ())
        };
        let choices = ranked_together(&load_folder(folder.path(), &reference)).0.into_iter().flatten();
        choices.map(|choice| choice.into_iter().map(|(token, _)| token).collect()).collect::<Vec<Vec<u32>>>()
    };
    assert_eq!(tokens(3), tokens(0));
}

/// A model whose next token is a function of the last one, which its block has learned: each step accepts a whole draft
/// and one more token.
#[test]
fn a_block_that_is_always_right_saves_all_the_steps_that_it_can() {
    let folder = folder(Layers::Nothing, false);
    let params = SamplingParams { max_tokens: Some(41), ignore_eos: true, ..SamplingParams::greedy() };
    let seeded = SamplingParams { temperature: 0.7, seed: Some(5), ..params.clone() };
    // Without measurements of the block, at most four tokens in a row are drafted.
    for (params, num_tokens, num_steps) in
        [(&params, 1, 1 + 20), (&params, 3, 1 + 10), (&params, 7, 1 + 1 + 5), (&seeded, 3, 1 + 10)]
    {
        let run = |num_tokens: usize| {
            let llm = load_folder(folder.path(), &options(num_tokens, |_| ()));
            let request = Request::new(vec![7, 8, 9, 10, 11], params.clone());
            let tokens = generated(llm.engine().submit(request).unwrap());
            (tokens, llm.engine().stats().unwrap())
        };
        let (tokens, stats) = run(num_tokens);
        let (expected, plain) = run(0);
        assert_eq!(tokens, expected);
        assert_eq!((tokens.len(), plain.num_steps), (41, 41));
        let speculation = stats.speculation;
        assert_eq!(speculation.num_accepted_tokens, speculation.num_draft_tokens, "{speculation:?}");
        // The prompt's step gives a token.
        assert_eq!(stats.num_steps, num_steps, "{num_tokens} tokens");
    }
}

/// A mistake in the block's inputs, or in their order, would only show in the rate of accepted tokens.
#[test]
fn wrong_states_make_worse_drafts_of_the_same_tokens() {
    let share = |has_wrong_states: bool| {
        let folder = folder(Layers::Little, has_wrong_states);
        let expected = plain(folder.path());
        let llm = load_folder(folder.path(), &options(3, |_| ()));
        assert_eq!(ranked_together(&llm).0, expected);
        let speculation = llm.engine().stats().unwrap().speculation;
        speculation.num_accepted_tokens as f64 / speculation.num_draft_tokens as f64
    };
    let (right, wrong) = (share(false), share(true));
    assert!(right > 1.5 * wrong, "{right} and {wrong} of the drafted tokens accepted");
}

#[test]
fn what_cannot_draft_for_itself_is_refused() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny");
    let load = |files: ModelFiles, change: &dyn Fn(&mut EngineLimits)| {
        let model = ResolvedModel { display_name: "m".to_owned(), files, revision: None, notice: None };
        Llm::load(&model, &options(3, change), &NoProgress)
    };
    let error = load(ModelFiles::Demo, &|_| ()).unwrap_err();
    assert!(error.message().contains("the method mtp"), "{error}");
    let error = load(ModelFiles::Folder(fixtures.join("mtp")), &|limits| limits.num_scheduler_steps = 2);
    let error = error.unwrap_err();
    assert!(error.message().contains("--num-scheduler-steps is 2"), "{error}");
    // Without drafts, no memory is needed.
    load(ModelFiles::Demo, &|limits| limits.speculative.num_speculative_tokens = 0).unwrap();
    // Without the method, the block stays where it is.
    let own =
        |limits: &mut EngineLimits| limits.speculative = SpeculativeConfig::of(SpeculativeMethod::Suffix);
    let llm = load(ModelFiles::Folder(fixtures.join("mtp")), &own).unwrap();
    assert!(llm.summary().contains("without its MTP block"), "{}", llm.summary());
}
