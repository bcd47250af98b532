//! A subscriber of the prefix cache's events can predict its hits.

use std::collections::HashMap;
use std::sync::mpsc;

use proptest::prelude::*;
use tinyvllm::config::EngineConfig;
use tinyvllm::engine::{CacheEvent, Engine, Event, EventSink, Medium, Request};
use tinyvllm::sampling::SamplingParams;

use super::{core, run_to_end, small_config};

/// The cache as a router sees it that has only heard of it.
#[derive(Debug, Default)]
struct Mirror {
    blocks: HashMap<u64, (Option<u64>, Vec<u32>)>,
}

impl Mirror {
    fn apply(&mut self, events: Vec<CacheEvent>) {
        for event in events {
            match event {
                CacheEvent::Stored { hash, parent, token_ids, medium } => {
                    assert_eq!(medium, Medium::Cache);
                    assert_eq!(token_ids.len(), small_config().block_size);
                    let before = self.blocks.insert(hash, (parent, token_ids));
                    assert_eq!(before, None, "a block is stored that is there");
                }
                CacheEvent::Removed { hash, medium } => {
                    assert_eq!(medium, Medium::Cache);
                    assert!(self.blocks.remove(&hash).is_some(), "a block is removed that is not there");
                }
            }
        }
    }

    /// Tokens of a prompt that are found. One is always computed.
    fn num_found(&self, prompt: &[u32]) -> usize {
        let block_size = small_config().block_size;
        let (mut parent, mut num_found) = (None, 0);
        for tokens in prompt[..prompt.len() - 1].chunks_exact(block_size) {
            let wanted = (parent, tokens.to_vec());
            let Some((hash, _)) = self.blocks.iter().find(|(_, block)| **block == wanted) else { break };
            parent = Some(*hash);
            num_found += block_size;
        }
        num_found
    }
}

/// A prompt of one of three families, with or without a salt, and how many tokens follow it.
fn request() -> impl Strategy<Value = Request> {
    (0_u32..3, 1_usize..40, 1_usize..20, prop::option::weighted(0.3, 0_u8..2), 1_usize..3).prop_map(
        |(family, len, max_tokens, salt, n)| {
            let prompt = (0..len as u32).map(|i| (i * 7 + i / 9 * family) % 20 + 1).collect();
            let params = SamplingParams {
                temperature: 0.0,
                max_tokens: Some(max_tokens),
                ignore_eos: true,
                n,
                ..SamplingParams::default()
            };
            Request { cache_salt: salt.map(|salt| format!("salt {salt}")), ..Request::new(prompt, params) }
        },
    )
}

proptest! {
    /// With a cache that is too small for them all: each hit is predicted to the token, and requests with a salt leave
    /// no trace.
    #[test]
    fn the_record_foretells_each_hit(requests in proptest::collection::vec(request(), 1..40)) {
        let config = EngineConfig { num_blocks: 24, ..small_config() };
        let mut core = core(&config);
        core.record_cache_events();
        let mut mirror = Mirror::default();
        for request in requests {
            let predicted = mirror.num_found(&request.prompt_token_ids);
            let (is_private, n) = (request.cache_salt.is_some(), request.params.n);
            let id = core.submit(request).unwrap();
            let found = run_to_end(&mut core)[&id].num_cached_tokens;
            let num_before = mirror.blocks.len();
            mirror.apply(core.take_cache_events());
            if is_private {
                prop_assert!(mirror.blocks.len() <= num_before, "a private block was reported");
            } else {
                // Each of its sequences reports it.
                prop_assert_eq!(found, n * predicted);
            }
        }
    }
}

#[test]
fn nothing_is_recorded_without_a_subscriber() {
    let mut core = core(&small_config());
    core.submit(Request::new((1..20).collect(), SamplingParams::default())).unwrap();
    run_to_end(&mut core);
    assert_eq!(core.take_cache_events(), []);
}

#[test]
fn an_engine_on_its_thread_reports_after_each_step() {
    let engine = Engine::start(core(&small_config())).unwrap();
    let (sender, events) = mpsc::channel();
    engine.watch_cache(Box::new(move |batch| sender.send(batch).unwrap())).unwrap();
    let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::default() };
    let stream = engine.submit(Request::new((1..=13).collect(), params)).unwrap();
    drop(stream.collect::<Vec<_>>());
    drop(engine);
    let mut mirror = Mirror::default();
    events.into_iter().for_each(|batch| {
        assert!(!batch.is_empty());
        mirror.apply(batch);
    });
    let prompt: Vec<u32> = (1..=13).collect();
    assert_eq!((mirror.blocks.len(), mirror.num_found(&prompt)), (3, 12));
}

/// Records the arrival of an answer.
struct Answers(mpsc::Sender<&'static str>);

impl EventSink for Answers {
    fn send(&mut self, _: Event) -> bool {
        self.0.send("answer").is_ok()
    }

    fn is_closed(&self) -> bool {
        false
    }
}

/// So a client that has an answer finds it in the cache.
#[test]
fn cache_events_of_a_step_come_before_its_answers() {
    let engine = Engine::start(core(&small_config())).unwrap();
    let (sender, heard) = mpsc::channel();
    let batches = sender.clone();
    engine.watch_cache(Box::new(move |_| batches.send("batch").unwrap())).unwrap();
    let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::default() };
    let request = Request::new((1..=5).collect(), params);
    let on_accepted = Box::new(|id: tinyvllm::Result<_>| assert!(id.is_ok()));
    engine.submit_to(request, Box::new(Answers(sender)), on_accepted).unwrap();
    assert_eq!(heard.iter().take(3).collect::<Vec<_>>(), ["batch", "answer", "answer"]);
}
