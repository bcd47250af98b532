//! Layers whose tokens attend to a window only: sequences keep their last blocks there.

use tinyvllm::config::WindowLimits;
use tinyvllm::kv_cache::BlockMiss;

use super::*;

/// Sequences of up to 240 tokens in blocks of 4, with few blocks for windows of 10 tokens.
fn config(num_blocks: usize) -> EngineConfig {
    EngineConfig {
        max_model_len: 240,
        max_num_seqs: 2,
        num_blocks: 120,
        windows: Some(WindowLimits { window: 10, tile: 4, num_blocks }),
        ..small_config()
    }
}

fn greedy(prompt: &[u32], max_tokens: usize) -> Request {
    let params = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    Request::new(prompt.to_vec(), params)
}

/// Runs it alone and checks its tokens. Returns its cached tokens.
fn num_cached(core: &mut EngineCore, prompt: &[u32], max_tokens: usize) -> usize {
    run(core, prompt, max_tokens).num_cached_tokens
}

fn run(core: &mut EngineCore, prompt: &[u32], max_tokens: usize) -> Collected {
    let request = greedy(prompt, max_tokens);
    let expected = reference(prompt, &request.params, 0, 0, 240);
    let id = core.submit(request).unwrap();
    let collected = run_to_end(core).remove(&id).unwrap();
    assert_eq!(collected.tokens[&0], expected);
    assert_eq!(collected.num_preemptions, 0);
    collected
}

fn prompt(first: u32, len: u32) -> Vec<u32> {
    (0..len).map(|index| 1 + (first + index * index) % 20).collect()
}

#[test]
fn a_long_sequence_needs_few_blocks_for_its_windows() {
    let fewest = config(0).min_window_blocks(&config(0).windows.unwrap());
    assert_eq!(fewest, 9, "30 tokens of 240 and their blocks' ends");
    let mut core = super::core(&config(fewest));
    assert_eq!(num_cached(&mut core, &prompt(1, 200), 40), 0);
}

#[test]
fn fewer_blocks_than_a_step_needs_are_refused() {
    let config = config(8);
    let error = EngineCore::new(Box::new(FakeRunner::new(&config)), limits(), config).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Capacity);
    assert!(error.message().contains("32 tokens") && error.message().contains("needs 36"), "{error}");
}

#[test]
fn a_prefix_is_found_as_long_as_its_window_is_there() {
    let mut core = super::core(&config(20));
    let first = prompt(1, 100);
    assert_eq!(num_cached(&mut core, &first, 4), 0);
    // All that its last token reads is there: the whole prompt but for the last block.
    assert_eq!(num_cached(&mut core, &first, 4), 96);
    // Of a shorter one, the window may be gone; then nothing of it can be used, since every token reads it.
    let found = num_cached(&mut core, &first[..50], 1);
    assert!(found == 48 || found == 0, "{found}");
    // Another sequence takes the slots of all windows, while its blocks leave those of the first one in the other layers.
    num_cached(&mut core, &prompt(7, 120), 4);
    let gone = run(&mut core, &first, 4);
    let reason = PrefixMiss::Block { start: 0, reason: BlockMiss::Evicted };
    assert_eq!((gone.num_cached_tokens, gone.prefix_miss), (0, Some(reason)));
    // Now the blocks with windows have the names.
    assert_eq!(num_cached(&mut core, &first, 4), 96);
}

/// Two clients, whose sequences have to share the windows.
#[test]
fn windows_are_preempted_like_blocks() {
    let mut core = super::core(&config(9));
    let requests = [greedy(&prompt(1, 60), 30), greedy(&prompt(5, 90), 30)];
    let expected =
        requests.clone().map(|request| reference(&request.prompt_token_ids, &request.params, 0, 0, 240));
    let ids = requests.map(|request| core.submit(request).unwrap());
    let collected = run_to_end(&mut core);
    for (id, expected) in ids.iter().zip(expected) {
        assert_eq!(collected[id].tokens[&0], expected);
    }
}
