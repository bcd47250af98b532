//! What a client that generates keeps of its speed beside others' long prompts, on machines of which steps take any time.

use proptest::prelude::*;
use tinyvllm::config::EngineConfig;
use tinyvllm::engine::{ClientId, Weight};
use tinyvllm::scheduler::{Scheduler, SeqId, SequenceSpec};

const LIGHT: ClientId = ClientId(1);
const HOG: ClientId = ClientId(2);

/// Tokens of the light client until steps are known, and those that are timed.
const NUM_BEFORE: usize = 60;
const NUM_TIMED: usize = 100;

/// Seconds that a step takes of its own, and for each token.
#[derive(Debug, Clone, Copy)]
struct Machine {
    own: f64,
    each: f64,
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
        weight: Weight::new(weight).unwrap(),
        priority: 0,
    }
}

/// One step; returns the seconds that it takes.
fn step(scheduler: &mut Scheduler, machine: Machine) -> f64 {
    let plan = scheduler.schedule();
    let seconds = machine.own + machine.each * plan.num_scheduled_tokens() as f64;
    scheduler.learn(&plan, seconds);
    for row in &plan.rows {
        scheduler.advance(row, if row.samples.is_empty() { &[] } else { &[2] });
        let is_done = scheduler
            .sequence(row.seq)
            .is_some_and(|sequence| sequence.token_ids().len() >= sequence.max_len());
        if is_done {
            scheduler.remove(row.seq);
        }
    }
    scheduler.check_integrity().unwrap();
    seconds
}

/// Seconds that the light client waits for each token beside a hog that always has this many prompts of this length.
fn seconds_a_token(machine: Machine, weight: u32, num_prompts: usize, len: usize, keeps_pace: bool) -> f64 {
    let config = EngineConfig {
        enable_prefix_caching: false,
        num_blocks: 4_096,
        max_num_seqs: 32,
        step_cost: 1,
        ..EngineConfig::default()
    };
    let mut scheduler = Scheduler::new(config, 0);
    if keeps_pace {
        scheduler.keep_pace();
    }
    let light = scheduler.add(&spec(LIGHT, weight, 8, NUM_BEFORE + NUM_TIMED + 1))[0];
    let mut hog: Vec<SeqId> = Vec::new();
    let (mut begin, mut seconds) = (None, 0.0);
    while let Some(sequence) = scheduler.sequence(light) {
        if sequence.output_token_ids().len() == NUM_BEFORE {
            begin.get_or_insert(seconds);
        }
        hog.retain(|id| scheduler.sequence(*id).is_some());
        for _ in hog.len()..num_prompts {
            hog.extend(scheduler.add(&spec(HOG, 1, len, 4)));
        }
        seconds += step(&mut scheduler, machine);
    }
    (seconds - begin.unwrap()) / NUM_TIMED as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_quarter_of_its_share_is_left_beside_long_prompts(
        own in 0.5e-3..30e-3_f64,
        each in 1e-5..2e-3_f64,
        weight in 1_u32..4,
        num_prompts in 1_usize..24,
        len in 40_usize..1_500,
    ) {
        let machine = Machine { own, each };
        let took = seconds_a_token(machine, weight, num_prompts, len, true);
        let share = f64::from(weight) / f64::from(weight + 1);
        // Beside the smallest piece that a prompt is computed in, and rows of the hog that generate.
        let most = (own + each) / share * 4.0 + each * (16 + num_prompts) as f64;
        prop_assert!(took <= 1.15 * most, "{took} of {most} s, alone {}", own + each);
    }
}

/// The bound is one: without it, a token waits for a whole step of prompts.
#[test]
fn without_the_pace_a_token_waits_for_whole_prompts() {
    let machine = Machine { own: 1e-3, each: 1e-3 };
    let [bounded, unbounded] = [true, false].map(|keeps| seconds_a_token(machine, 1, 8, 900, keeps));
    assert!(bounded < 0.03 && unbounded > 0.3, "{bounded} {unbounded}");
}
