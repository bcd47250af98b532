//! A client's service under the load of others: a bound on its wait, its fair share, and no credit.

use std::collections::HashMap;

use proptest::prelude::*;
use tinyvllm::config::EngineConfig;
use tinyvllm::engine::{ClientId, EngineCore, Event, Request, RequestId, Weight};
use tinyvllm::sampling::SamplingParams;

use super::fake_runner::reference;
use super::{core, run_to_end, small_config};

/// The cost of a generated token, in prompt tokens.
const OUTPUT_COST: usize = 2;

/// A client that sends a request as soon as one ends.
#[derive(Debug, Clone)]
struct Flood {
    weight: u32,
    num_unfinished: usize,
    num_prompt_tokens: usize,
    num_output_tokens: usize,
    n: usize,
    /// Each request has its own name; the names have the account of one client.
    has_names: bool,
}

fn request(client: u64, weight: u32, prompt: Vec<u32>, num_output_tokens: usize, n: usize) -> Request {
    let params = SamplingParams {
        max_tokens: Some(num_output_tokens),
        ignore_eos: true,
        n,
        ..SamplingParams::greedy()
    };
    let weight = Weight::new(weight).unwrap();
    Request { client: ClientId(client), weight, ..Request::new(prompt, params) }
}

/// An engine under floods. Clients are numbered from 0 in their order.
struct Load {
    core: EngineCore,
    floods: Vec<Flood>,
    owners: HashMap<RequestId, (usize, usize)>,
    /// The service of each client, in prompt tokens.
    served: Vec<usize>,
    num_sent: u32,
}

impl Load {
    fn new(config: &EngineConfig, floods: Vec<Flood>) -> Self {
        let served = vec![0; floods.len()];
        Self { core: core(config), floods, owners: HashMap::new(), served, num_sent: 0 }
    }

    /// A prompt that was not sent before.
    fn prompt(&mut self, len: usize) -> Vec<u32> {
        self.num_sent += 1;
        (0..len as u32).map(|i| (self.num_sent >> (i % 16 * 2)) % 4 * 5 + i % 5 + 1).collect()
    }

    fn step(&mut self) -> Vec<(RequestId, Event)> {
        for (client, flood) in self.floods.clone().into_iter().enumerate() {
            let num_there = self.owners.values().filter(|(owner, _)| *owner == client).count();
            for _ in num_there..flood.num_unfinished {
                let prompt = self.prompt(flood.num_prompt_tokens);
                let mut request =
                    request(client as u64, flood.weight, prompt, flood.num_output_tokens, flood.n);
                if flood.has_names {
                    request.group = Some(request.client);
                    request.client = ClientId(1_000 + u64::from(self.num_sent));
                }
                let id = self.core.submit(request).unwrap();
                self.owners.insert(id, (client, flood.n));
            }
        }
        let events = self.core.step();
        assert_eq!(self.core.check_integrity(), Ok(()));
        for (id, event) in &events {
            let Some((client, num_left)) = self.owners.get_mut(id) else { continue };
            match event {
                Event::Token { .. } => self.served[*client] += OUTPUT_COST,
                Event::Finished { index, .. } => {
                    if *index == 0 {
                        self.served[*client] += self.floods[*client].num_prompt_tokens;
                    }
                    *num_left -= 1;
                    if *num_left == 0 {
                        self.owners.remove(id);
                    }
                }
                Event::Hidden { .. }
                | Event::PromptLogits { .. }
                | Event::PromptLogprobs { .. }
                | Event::PromptProgress { .. } => {}
            }
        }
        events
    }

    /// Sends a request and runs until it has ended; returns the others' service meanwhile.
    fn wait_for(&mut self, request: Request) -> usize {
        let before: usize = self.served.iter().sum();
        let id = self.core.submit(request).unwrap();
        // Also where blocks are so few that sequences are preempted again and again.
        for _ in 0..4_000 {
            let events = self.step();
            let is_end =
                |(found, event): &(RequestId, Event)| *found == id && matches!(event, Event::Finished { .. });
            if events.iter().any(is_end) {
                return self.served.iter().sum::<usize>() - before;
            }
        }
        panic!("a request starves");
    }
}

fn flood() -> impl Strategy<Value = Flood> {
    (1_u32..4, 1_usize..12, 1_usize..30, 1_usize..25, 1_usize..4, any::<bool>()).prop_map(
        |(weight, num_unfinished, num_prompt_tokens, num_output_tokens, n, has_names)| Flood {
            weight,
            num_unfinished,
            num_prompt_tokens,
            num_output_tokens,
            n,
            has_names,
        },
    )
}

fn config() -> impl Strategy<Value = EngineConfig> {
    (3_usize..9, 0_usize..20, 0_usize..20, 0_usize..6, 1_usize..4, any::<bool>()).prop_map(
        |(max_num_seqs, tokens, extra_blocks, step_cost, num_scheduler_steps, enable_prefix_caching)| {
            EngineConfig {
                max_num_seqs,
                max_num_batched_tokens: max_num_seqs + tokens,
                num_blocks: 16 + extra_blocks,
                step_cost,
                num_scheduler_steps,
                enable_prefix_caching,
                ..small_config()
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// For any number and shape of other requests, their service while a client waits is bounded: running ones may
    /// finish, and others may be ahead by a window.
    #[test]
    fn no_client_starves(
        config in config(),
        floods in proptest::collection::vec(flood(), 1..5),
        num_steps_before in 0_usize..80,
        num_prompt_tokens in 1_usize..40,
        num_output_tokens in 1_usize..20,
        n in 1_usize..4,
        weight in 1_u32..4,
    ) {
        let num_others = floods.len();
        let mut load = Load::new(&config, floods);
        (0..num_steps_before).for_each(|_| drop(load.step()));
        let prompt = load.prompt(num_prompt_tokens);
        let served = load.wait_for(request(99, weight, prompt, num_output_tokens, n));
        let longest = OUTPUT_COST * config.max_model_len;
        let window = longest + config.max_num_batched_tokens;
        let own = num_prompt_tokens + OUTPUT_COST * n * num_output_tokens;
        // Decoding rows come first: a prompt gets its fair share of the rest of a step, once, and once more if it has
        // to be computed again.
        let left = config.max_num_batched_tokens - config.max_num_seqs + 1;
        let num_steps = 2 * num_prompt_tokens.div_ceil(left.div_ceil(num_others + 1));
        // Weights are up to 3 to 1.
        let bound = longest * config.max_num_seqs
            + 3 * num_others * (window + own)
            + 2 * window
            + num_steps * OUTPUT_COST * config.max_num_batched_tokens;
        prop_assert!(served <= bound, "others were served {}, at most {}", served, bound);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Clients that always need more are served by their weights.
    #[test]
    fn service_follows_weights(
        config in config(),
        shape in flood(),
        others in (8_usize..14, 8_usize..14),
        weight in 1_u32..4,
        has_names: bool,
    ) {
        let floods = [(1, others.0, has_names), (weight, others.1, false)];
        let floods = floods.map(|(weight, num_unfinished, has_names)| Flood {
            weight, num_unfinished, has_names, n: 1, ..shape.clone()
        });
        let mut load = Load::new(&EngineConfig { num_blocks: 200, ..config.clone() }, floods.to_vec());
        let mut worst = 0;
        for _ in 0..600 {
            load.step();
            let gap = (load.served[0] * weight as usize).abs_diff(load.served[1]);
            worst = worst.max(gap);
        }
        // Counted when a prompt is complete, so prompts in progress are missing: twice a sequence per permit.
        let one = shape.num_prompt_tokens + OUTPUT_COST * shape.num_output_tokens;
        let window = OUTPUT_COST * config.max_model_len + config.max_num_batched_tokens;
        let bound = (weight as usize + 1) * (one * config.max_num_seqs + window);
        prop_assert!(worst <= bound, "{:?} by weight, gap {} over {}", load.served, worst, bound);
    }
}

#[test]
fn twice_the_weight_is_twice_the_service() {
    let shape = Flood {
        weight: 1,
        num_unfinished: 12,
        num_prompt_tokens: 7,
        num_output_tokens: 9,
        n: 1,
        has_names: false,
    };
    for max_num_seqs in [3, 4, 8] {
        let config = EngineConfig { max_num_seqs, num_blocks: 200, ..small_config() };
        let mut load = Load::new(&config, vec![shape.clone(), Flood { weight: 2, ..shape.clone() }]);
        (0..3_000).for_each(|_| drop(load.step()));
        let ratio = load.served[1] as f64 / load.served[0] as f64;
        assert!((1.9..2.1).contains(&ratio), "{max_num_seqs} permits: {ratio}, {:?}", load.served);
    }
}

#[test]
fn a_returning_client_has_no_credit() {
    let shape = Flood {
        weight: 1,
        num_unfinished: 12,
        num_prompt_tokens: 5,
        num_output_tokens: 10,
        n: 1,
        has_names: false,
    };
    let mut load = Load::new(&small_config(), vec![shape.clone(), shape.clone()]);
    (0..50).for_each(|_| drop(load.step()));
    // The second one goes away, while the first one is served much, and comes back.
    load.floods[1].num_unfinished = 0;
    (0..2_000).for_each(|_| drop(load.step()));
    load.floods[1].num_unfinished = 12;
    let before = load.served.clone();
    (0..500).for_each(|_| drop(load.step()));
    let [first, second] = [0, 1].map(|client| load.served[client] - before[client]);
    assert!(first.abs_diff(second) < (first + second) / 10, "{first} and {second} after the return");
}

#[test]
fn a_permit_is_taken_from_a_client_above_its_share() {
    let config = EngineConfig { num_blocks: 100, ..small_config() };
    let mut core = core(&config);
    let prompts: Vec<Vec<u32>> = (1..=4).map(|i| vec![i; 6]).collect();
    let flood: Vec<RequestId> =
        prompts.iter().map(|prompt| core.submit(request(1, 1, prompt.clone(), 40, 1)).unwrap()).collect();
    let mut early = Vec::new();
    (0..6).for_each(|_| early.extend(core.step()));
    assert_eq!(core.stats().num_running, 4);
    let late: Vec<RequestId> =
        (5..=7).map(|i| core.submit(request(2, 1, vec![i; 6], 40, 1)).unwrap()).collect();
    (0..3).for_each(|_| early.extend(core.step()));
    // Two of four permits, and no more.
    assert_eq!((core.stats().num_running, core.stats().scheduler.num_preemptions), (4, 2));
    let begun = |id: &RequestId| early.iter().any(|(found, _)| found == id);
    assert_eq!(late.iter().map(begun).collect::<Vec<_>>(), [true, true, false]);
    let params = request(1, 1, vec![1], 40, 1).params;
    let mut collected = run_to_end(&mut core);
    assert_eq!(core.stats().scheduler.num_preemptions, 2, "no client takes back what it gave");
    for (id, prompt) in flood.iter().zip(&prompts) {
        let mut tokens: Vec<u32> = Vec::new();
        for (_, event) in early.iter().filter(|(found, _)| found == id) {
            if let Event::Token { token_id, .. } = event {
                tokens.push(*token_id);
            }
        }
        tokens.extend(collected.remove(id).unwrap().tokens.remove(&0).unwrap());
        assert_eq!(tokens, reference(prompt, &params, 0, 0, 64));
    }
}

/// Found by `no_client_starves`: a sequence that was preempted repeatedly waited for its turn each time as if it were
/// new, and others were served 2,284 meanwhile.
#[test]
fn a_preempted_client_keeps_its_claim() {
    let config = EngineConfig {
        max_num_seqs: 3,
        max_num_batched_tokens: 15,
        num_blocks: 16,
        enable_prefix_caching: false,
        num_scheduler_steps: 1,
        step_cost: 5,
        ..small_config()
    };
    let flood = |weight, num_unfinished, num_prompt_tokens, num_output_tokens, n| Flood {
        weight,
        num_unfinished,
        num_prompt_tokens,
        num_output_tokens,
        n,
        has_names: false,
    };
    let mut load = Load::new(&config, vec![flood(2, 2, 1, 10, 2), flood(3, 1, 23, 18, 1)]);
    (0..22).for_each(|_| drop(load.step()));
    let prompt = load.prompt(33);
    let served = load.wait_for(request(99, 1, prompt, 9, 1));
    assert!(served <= 900, "{served}");
    assert!(load.core.stats().scheduler.num_preemptions > 0, "nothing was preempted");
}

#[test]
fn blocks_are_taken_from_a_client_above_its_share() {
    // 32 blocks: three sequences of the first client fill them, and permits are free.
    let config = EngineConfig { max_num_seqs: 16, max_num_batched_tokens: 64, ..small_config() };
    let mut core = core(&config);
    for i in 1..=3 {
        core.submit(request(1, 1, vec![i; 34], 20, 1)).unwrap();
    }
    (0..8).for_each(|_| drop(core.step()));
    let id = core.submit(request(2, 1, vec![9; 8], 2, 1)).unwrap();
    let mut num_steps = 0;
    while core.is_unfinished(id) {
        core.step();
        assert_eq!(core.check_integrity(), Ok(()));
        num_steps += 1;
    }
    assert!(num_steps <= 4, "{num_steps} steps");
    run_to_end(&mut core);
}

/// One client is ahead of the other all the time, and each has its share of the permits.
#[test]
fn permits_do_not_move_back_and_forth() {
    let config = EngineConfig { num_blocks: 200, max_num_batched_tokens: 64, ..small_config() };
    let flood = |num_prompt_tokens, num_output_tokens| Flood {
        weight: 1,
        num_unfinished: 8,
        num_prompt_tokens,
        num_output_tokens,
        n: 1,
        has_names: false,
    };
    let mut load = Load::new(&config, vec![flood(2, 40), flood(20, 10)]);
    (0..45).for_each(|_| drop(load.step()));
    assert_eq!(load.core.stats().scheduler.num_preemptions, 0);
    assert!(load.served[1] >= 6 * 40, "{:?}", load.served);
}

#[test]
fn a_step_is_divided_between_prompts() {
    let mut core = core(&small_config());
    // Of sixteen tokens each has eight, regardless of the order of arrival.
    let long = core.submit(request(1, 1, vec![3; 40], 2, 1)).unwrap();
    let short = core.submit(request(2, 1, vec![4; 8], 1, 1)).unwrap();
    core.step();
    assert!(core.is_unfinished(long) && !core.is_unfinished(short));
    run_to_end(&mut core);
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let mut core = core(&small_config());
    let long = core.submit(request(1, 1, vec![3; 60], 2, 1)).unwrap();
    core.step();
    let short = core.submit(request(2, 1, vec![4; 5], 1, 1)).unwrap();
    core.step();
    assert!(core.is_unfinished(long) && !core.is_unfinished(short));
}

/// 31 sequences generate; an answer that begins is not held up by them, and they are not held up for long.
#[test]
fn an_answer_that_begins_has_steps_of_its_own() {
    let config = EngineConfig {
        max_num_seqs: 32,
        max_num_batched_tokens: 512,
        num_blocks: 600,
        step_cost: 2,
        ..small_config()
    };
    let floods = |n| Flood {
        weight: 1,
        num_unfinished: 1,
        num_prompt_tokens: 5,
        num_output_tokens: 50,
        n,
        has_names: false,
    };
    let mut load = Load::new(&config, vec![floods(31)]);
    (0..10).for_each(|_| drop(load.step()));
    let served = load.wait_for(request(9, 1, vec![2; 5], 10, 1));
    // Two steps with all clients, instead of eleven.
    assert!(served <= 2 * 31 * OUTPUT_COST, "{served}");
    // A client that keeps starting new requests: the others still keep most of their service.
    let before = load.served[0];
    let num_steps_before = load.core.stats().num_steps;
    for _ in 0..40 {
        load.wait_for(request(9, 1, vec![2; 5], 10, 1));
    }
    let num_steps = (load.core.stats().num_steps - num_steps_before) as usize;
    let rows = (load.served[0] - before) / OUTPUT_COST / 31;
    assert!(rows * 15 > num_steps, "{rows} steps of {num_steps} had all clients");
    // After its start, a long answer has fewer steps of its own.
    let before = load.served[0];
    load.wait_for(request(9, 1, vec![2; 5], 58, 1));
    let rows = (load.served[0] - before) / OUTPUT_COST / 31;
    assert!((6..=14).contains(&rows), "{rows}");
}

#[test]
fn priority_counts_within_a_client() {
    let mut core = core(&EngineConfig { max_num_seqs: 1, ..small_config() });
    let submit = |core: &mut EngineCore, client, priority| {
        let request = Request { priority, ..request(client, 1, vec![1, 2, 3], 4, 1) };
        core.submit(request).unwrap()
    };
    let first = submit(&mut core, 1, 0);
    core.step();
    let ordinary = submit(&mut core, 1, 0);
    let urgent = submit(&mut core, 1, -7);
    let other = submit(&mut core, 2, 1_000);
    let mut order = Vec::new();
    while core.has_unfinished() {
        let ended = core.step().into_iter().filter(|(_, event)| matches!(event, Event::Finished { .. }));
        order.extend(ended.map(|(id, _)| id));
    }
    assert_eq!(order, [first, other, urgent, ordinary]);
}

/// One key sends under a name for each request: together they are one client with much demand.
#[test]
fn names_of_a_key_are_left_out_together() {
    let config = EngineConfig {
        max_num_seqs: 32,
        max_num_batched_tokens: 512,
        num_blocks: 600,
        step_cost: 2,
        ..small_config()
    };
    let num_steps = |shares: bool| {
        let mut core = core(&config);
        for name in 0..30 {
            let group = shares.then_some(ClientId(1_000));
            core.submit(Request { group, ..request(name, 1, vec![1; 5], 50, 1) }).unwrap();
        }
        (0..5).for_each(|_| drop(core.step()));
        let id = core.submit(request(99, 1, vec![2; 5], 20, 1)).unwrap();
        let mut num_tokens = 0;
        while core.is_unfinished(id) {
            let events = core.step();
            assert_eq!(core.check_integrity(), Ok(()));
            let others = events.iter().filter(|(found, _)| *found != id);
            num_tokens += others.filter(|(_, event)| matches!(event, Event::Token { .. })).count();
        }
        num_tokens
    };
    // With one other key it has steps of its own; with thirty of equally low demand it has none.
    assert!(num_steps(true) <= 8 * 30, "{}", num_steps(true));
    assert_eq!(num_steps(false), 20 * 30);
}

/// Each of its names has one permit, and the key has all of them.
#[test]
fn a_permit_is_taken_from_a_key_with_many_names() {
    const KEY: u64 = 1_000;
    let config = EngineConfig { num_blocks: 200, ..small_config() };
    let mut core = core(&config);
    let name = |name: u64| Request {
        group: Some(ClientId(KEY)),
        ..request(name, 1, vec![name as u32 % 5 + 1; 6], 40, 1)
    };
    for number in 0..20 {
        core.submit(name(number)).unwrap();
    }
    // The other names have waited for long.
    (0..30).for_each(|_| drop(core.step()));
    let id = core.submit(request(99, 1, vec![9; 6], 4, 1)).unwrap();
    let mut num_steps = 0;
    while core.is_unfinished(id) {
        core.step();
        assert_eq!(core.check_integrity(), Ok(()));
        num_steps += 1;
    }
    assert!(num_steps <= 8, "{num_steps} steps");
    run_to_end(&mut core);
}

/// Here each of the clients that wait lets another one pass: the request for all permits a preempted fork of the second flood,
/// that one another name of its key, the name the first flood, and that one the request, which lags by a window.
#[test]
fn clients_do_not_wait_for_each_other_in_a_circle() {
    let flood = |num_unfinished, num_output_tokens, n, has_names| Flood {
        weight: 2,
        num_unfinished,
        num_prompt_tokens: 1,
        num_output_tokens,
        n,
        has_names,
    };
    let config =
        EngineConfig { max_num_seqs: 3, max_num_batched_tokens: 3, num_blocks: 30, ..small_config() };
    let mut load = Load::new(&config, vec![flood(1, 1, 1, false), flood(2, 23, 3, true)]);
    load.step();
    let prompt = load.prompt(1);
    let served = load.wait_for(request(99, 1, prompt, 1, 3));
    assert!(served <= 2_000, "{served}");
}
