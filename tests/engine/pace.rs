//! The speed that a decoding client keeps under others' long prompts and many sequences, on machines of which steps
//! take any time.

use proptest::prelude::*;
use tinyvllm::config::EngineConfig;
use tinyvllm::engine::{ClientId, Weight};
use tinyvllm::scheduler::{Scheduler, SeqId, SequenceSpec};

const LIGHT: ClientId = ClientId(1);
const HOG: ClientId = ClientId(2);

/// Tokens of the light client until the time of steps is known, and those that are timed.
const NUM_BEFORE: usize = 60;
const NUM_TIMED: usize = 100;

/// Seconds of a step: fixed, for each decoding row, and for each prompt token.
#[derive(Debug, Clone, Copy)]
struct Machine {
    own: f64,
    row: f64,
    each: f64,
}

/// A client that always has this many prompts of this length, and this many sequences that only decode.
#[derive(Debug, Clone, Copy)]
struct Hog {
    num_prompts: usize,
    len: usize,
    num_rows: usize,
}

fn spec(client: ClientId, weight: u32, num_prompt_tokens: usize, num_output_tokens: usize) -> SequenceSpec {
    SequenceSpec {
        prompt_token_ids: vec![1; num_prompt_tokens],
        max_len: num_prompt_tokens + num_output_tokens,
        cache_salt: None,
        num_sequences: 1,
        prompt_logits: false,
        single_step: false,
        client,
        group: client,
        weight: Weight::new(weight).unwrap(),
        priority: 0,
    }
}

/// One step; returns the seconds that it takes.
fn step(scheduler: &mut Scheduler, machine: Machine) -> f64 {
    let plan = scheduler.schedule();
    let num_rows = plan.sequences.iter().filter(|planned| planned.len == 1).count();
    let num_prompt_tokens = plan.num_scheduled_tokens() - num_rows;
    let seconds = machine.own + machine.row * num_rows as f64 + machine.each * num_prompt_tokens as f64;
    scheduler.learn(&plan, seconds);
    for planned in &plan.sequences {
        scheduler.advance(planned, if planned.samples.is_empty() { &[] } else { &[2] });
        let is_done = scheduler
            .sequence(planned.seq)
            .is_some_and(|sequence| sequence.token_ids().len() >= sequence.max_len());
        if is_done {
            scheduler.remove(planned.seq);
        }
    }
    scheduler.check_integrity().unwrap();
    seconds
}

/// Seconds that the light client waits for a token under a hog's load: in the middle, and for a step at most.
fn seconds_a_token(machine: Machine, weight: u32, hog: Hog, keeps_pace: bool) -> (f64, f64) {
    let config = EngineConfig {
        enable_prefix_caching: false,
        num_blocks: 65_536,
        max_num_seqs: 112,
        step_cost: 1,
        ..EngineConfig::default()
    };
    let mut scheduler = Scheduler::new(config, 0);
    if keeps_pace {
        scheduler.keep_pace();
    }
    let light = scheduler.add(&spec(LIGHT, weight, 8, NUM_BEFORE + NUM_TIMED + 1))[0];
    for _ in 0..hog.num_rows {
        scheduler.add(&spec(HOG, 1, 2, 1_900));
    }
    let mut prompts: Vec<SeqId> = Vec::new();
    let (mut begin, mut seconds, mut longest) = (None, 0.0, 0.0_f64);
    while let Some(sequence) = scheduler.sequence(light) {
        if sequence.output_token_ids().len() == NUM_BEFORE {
            begin.get_or_insert(seconds);
        }
        prompts.retain(|id| scheduler.sequence(*id).is_some());
        for _ in prompts.len()..hog.num_prompts {
            prompts.extend(scheduler.add(&spec(HOG, 1, hog.len, 4)));
        }
        let took = step(&mut scheduler, machine);
        seconds += took;
        if begin.is_some() {
            longest = longest.max(took);
        }
    }
    ((seconds - begin.unwrap()) / NUM_TIMED as f64, longest)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn a_quarter_of_its_share_is_left_at_all_ages(
        own in 0.5e-3..30e-3_f64,
        row in 1e-5..4e-3_f64,
        each in 1e-5..2e-3_f64,
        weight in 1_u32..4,
        num_prompts in 0_usize..24,
        len in 40_usize..1_500,
        num_rows in 0_usize..80,
    ) {
        let machine = Machine { own, row, each };
        let (took, _) = seconds_a_token(machine, weight, Hog { num_prompts, len, num_rows }, true);
        let share = f64::from(weight) / f64::from(weight + 1);
        // Alongside the smallest chunk that a prompt is computed in.
        let most = (own + row) / share * 4.0 + each * 16.0;
        prop_assert!(took <= 1.15 * most, "{took} of {most} s, alone {}", own + row);
    }
}

/// The bound is one: without it, a step with all clients is a whole step of prompts.
#[test]
fn without_the_pace_a_token_waits_for_whole_prompts() {
    let machine = Machine { own: 1e-3, row: 1e-3, each: 1e-3 };
    let hog = Hog { num_prompts: 8, len: 900, num_rows: 0 };
    let [bounded, unbounded] = [true, false].map(|keeps| seconds_a_token(machine, 1, hog, keeps));
    assert!(bounded.1 < 0.03 && unbounded.1 > 0.3, "{bounded:?} {unbounded:?}");
}

/// Following a hog's constraint takes fifty times as long as a step, and all wait for it: it is the hog's time.
#[test]
fn the_time_of_a_constraint_is_its_client_s() {
    const STEP: f64 = 1e-3;
    const CONSTRAINT: f64 = 50e-3;
    let steps_with_hog = |reports_constraint_time: bool| {
        let config = EngineConfig { num_blocks: 4_096, step_cost: 1, ..EngineConfig::default() };
        let mut scheduler = Scheduler::new(config, 0);
        scheduler.keep_pace();
        let hog = scheduler.add(&spec(HOG, 1, 8, 1_000))[0];
        let light = scheduler.add(&spec(LIGHT, 1, 8, 100))[0];
        let mut num_steps = 0;
        while scheduler.sequence(light).is_some() {
            let plan = scheduler.schedule();
            scheduler.learn(&plan, STEP);
            for planned in &plan.sequences {
                scheduler.advance(planned, if planned.samples.is_empty() { &[] } else { &[2] });
                if planned.seq == hog {
                    num_steps += 1;
                    if reports_constraint_time {
                        scheduler.learn_constraint(hog, CONSTRAINT);
                    }
                }
            }
            if scheduler.sequence(light).is_some_and(|light| light.token_ids().len() >= light.max_len()) {
                scheduler.remove(light);
            }
            scheduler.check_integrity().unwrap();
        }
        num_steps
    };
    assert!(steps_with_hog(false) >= 99);
    // While the light one's answer begins, half of the hog's time is its own each time, later a third.
    let with_hog = steps_with_hog(true);
    assert!((2..=12).contains(&with_hog), "{with_hog} of 100 steps");
}
