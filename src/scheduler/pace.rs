//! The time of a step, learned from steps: a fixed time, one for each decoding row, and one for each prompt token.
//!
//! It decides which clients may be skipped in a step (`turns.rs`), and a budget of prefill tokens: while some sequences
//! decode, prompts of others are computed in chunks so small that a step takes at most a few times the time of the
//! decoding ones alone.

use super::fair_queue::{OUTPUT_TOKEN, PROMPT_TOKEN};
use super::{ClientId, PlannedSequence, SchedulerOutput};

/// The decay of earlier steps' weight with each further step.
const MEMORY: f64 = 0.97;

/// The weight of the expectation against measurements, where steps were much alike.
const DOUBT: f64 = 1e-3;

/// The fewest tokens of a chunk: every prompt makes progress.
const MIN_CHUNK: usize = 16;

/// A step is so long that a client with its share of the machine keeps a quarter of the speed that its share would give.
const SLOWDOWN: f64 = 4.0;

/// With many decoding sequences, prompts may take this fraction of their time.
const PREFILL_TIME_RATIO: f64 = 0.5;

/// While several clients come and go, the prompts of a step take at most this time, in seconds, or this multiple of the
/// step's fixed time: a new request waits for the current step.
const CHUNK_SECONDS: f64 = 0.004;
const CHUNK_STEPS: f64 = 16.0;

/// Clients come and go if the requests of this many seconds of steps were not all of one.
const CHANGE_SECONDS: f64 = 10.0;

/// The terms of a step's time, in seconds or any other unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StepTime {
    /// The fixed time.
    pub(super) own: f64,
    /// For each row that generates.
    pub(super) row: f64,
    /// For each token of a prompt.
    pub(super) prompt_token: f64,
}

impl StepTime {
    /// The expectation before any step: the step's fixed time in rows.
    pub(super) fn expected(step_cost: usize) -> Self {
        Self { own: step_cost as f64, row: 1.0, prompt_token: PROMPT_TOKEN as f64 / OUTPUT_TOKEN as f64 }
    }

    /// Their time, without the step's own.
    pub(super) fn of(self, load: Load) -> f64 {
        self.row * load.num_rows as f64 + self.prompt_token * load.num_prompt_tokens as f64
    }

    /// The maximum prompt tokens of a step with `all` these decoding rows, for a client with this fraction of all
    /// weights that has `own` of them.
    fn max_prompt_tokens(self, part: f64, own: usize, all: usize) -> usize {
        let time = |num_rows| self.own + self.row * num_rows as f64;
        let spare = SLOWDOWN / part.clamp(1e-6, 1.0) * time(own) - time(all);
        let most = spare.max(PREFILL_TIME_RATIO * time(all)) / self.prompt_token.max(f64::MIN_POSITIVE);
        (most as usize).max(MIN_CHUNK)
    }
}

/// The contents of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) num_rows: usize,
    pub(super) num_prompt_tokens: usize,
}

impl Load {
    /// As much of it as fits.
    pub(super) fn within(self, num_tokens: usize) -> Self {
        let num_rows = self.num_rows.min(num_tokens);
        Self { num_rows, num_prompt_tokens: self.num_prompt_tokens.min(num_tokens - num_rows) }
    }

    /// The contents of a planned sequence. A drafted token takes the time of a row.
    pub(super) fn of_sequence(planned: &PlannedSequence) -> Self {
        match planned.num_draft_tokens {
            0 => Self::of(planned.len),
            _ => Self { num_rows: planned.len, num_prompt_tokens: 0 },
        }
    }

    /// Of a sequence with this many tokens, none of them drafted.
    pub(super) fn of(len: usize) -> Self {
        match len {
            0 => Self::default(),
            1 => Self { num_rows: 1, num_prompt_tokens: 0 },
            _ => Self { num_rows: 0, num_prompt_tokens: len },
        }
    }
}

impl std::ops::AddAssign for Load {
    fn add_assign(&mut self, other: Self) {
        self.num_rows += other.num_rows;
        self.num_prompt_tokens += other.num_prompt_tokens;
    }
}

impl std::iter::Sum for Load {
    fn sum<I: Iterator<Item = Self>>(loads: I) -> Self {
        let mut sum = Self::default();
        loads.for_each(|load| sum += load);
        sum
    }
}

/// The sums over some steps.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct UntimedSteps {
    pub(super) load: Load,
    pub(super) num_steps: usize,
}

impl UntimedSteps {
    /// And in another one.
    pub(super) fn add(&mut self, plan: &SchedulerOutput) {
        let num_steps = plan.num_steps.max(1);
        let load: Load = plan.sequences.iter().map(Load::of_sequence).sum();
        self.num_steps += num_steps;
        self.load.num_rows += load.num_rows * num_steps;
        self.load.num_prompt_tokens += load.num_prompt_tokens * num_steps;
    }

    pub(super) fn with(mut self, plan: &SchedulerOutput) -> Self {
        self.add(plan);
        self
    }
}

/// Least squares over steps, the older the less, of which each is (1, rows, prompt tokens) over
/// the seconds that it took.
#[derive(Debug)]
pub(super) struct Pace {
    expected: StepTime,
    gram: [[f64; 3]; 3],
    seconds: [f64; 3],
    /// The last client, and the seconds of steps since that was another one.
    last_client: Option<ClientId>,
    since_change: f64,
}

impl Pace {
    /// Starts from the expected fixed time of a step alone, in rows.
    pub(super) fn new(step_cost: usize) -> Self {
        Self {
            expected: StepTime::expected(step_cost),
            gram: [[0.0; 3]; 3],
            seconds: [0.0; 3],
            last_client: None,
            since_change: f64::INFINITY,
        }
    }

    /// A request of this client has come.
    pub(super) fn welcome(&mut self, client: ClientId) {
        let last = self.last_client.replace(client);
        if last.is_some_and(|last| last != client) {
            self.since_change = 0.0;
        }
    }

    /// Whether times are in seconds: before steps were seen they are in rows.
    pub(super) fn knows_seconds(&self) -> bool {
        self.seconds[0] > 0.0
    }

    /// Whether several clients come and go.
    pub(super) fn has_visitors(&self) -> bool {
        self.since_change <= CHANGE_SECONDS
    }

    /// The most tokens of prompts in any step, while several clients come and go.
    pub(super) fn max_chunk(&self) -> usize {
        if !self.has_visitors() || !self.knows_seconds() {
            return usize::MAX;
        }
        let time = self.step_time();
        let most = (CHUNK_STEPS * time.own).max(CHUNK_SECONDS) / time.prompt_token.max(f64::MIN_POSITIVE);
        (most as usize).max(MIN_CHUNK)
    }

    /// Some steps of this load together took this long.
    pub(super) fn learn(&mut self, load: Load, num_steps: usize, seconds: f64) {
        // Relative to its time: long steps must not outweigh short ones.
        let seconds = seconds.max(1e-9);
        self.since_change += seconds;
        let steps = [num_steps, load.num_rows, load.num_prompt_tokens];
        let step = steps.map(|part| part as f64 / seconds);
        for (i, row) in self.gram.iter_mut().enumerate() {
            for (j, entry) in row.iter_mut().enumerate() {
                *entry = *entry * MEMORY + step[i] * step[j];
            }
            self.seconds[i] = self.seconds[i] * MEMORY + step[i];
        }
    }

    /// The terms of a step's time: the expected ones, in the unit that fits the measurements, plus their deviations.
    /// Where steps are too similar to separate the terms, they stay as expected.
    pub(super) fn step_time(&self) -> StepTime {
        let expected = [self.expected.own, self.expected.row, self.expected.prompt_token];
        let times = |vector: [f64; 3]| self.gram.map(|row| dot(row, vector));
        let squared = dot(expected, times(expected));
        if squared <= 0.0 {
            return self.expected;
        }
        let scale = dot(expected, self.seconds) / squared;
        let expected = expected.map(|part| scale * part);
        let seen = times(expected);
        let rest: [f64; 3] = std::array::from_fn(|i| self.seconds[i] - seen[i]);
        let mut gram = self.gram;
        // A term without measurements has no deviation.
        (0..3).for_each(|i| gram[i][i] += DOUBT * gram[i][i] + f64::MIN_POSITIVE);
        let different = solve(gram, rest).unwrap_or_default();
        // Noise that makes a term negative counts as zero.
        let part = |i: usize| (expected[i] + different[i]).max(1e-3 * expected[i]);
        StepTime { own: part(0), row: part(1), prompt_token: part(2) }
    }
}

fn dot(a: [f64; 3], b: [f64; 3]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Gaussian elimination without pivots, of a matrix that is positive definite.
fn solve(mut matrix: [[f64; 3]; 3], mut right: [f64; 3]) -> Option<[f64; 3]> {
    for i in 0..3 {
        let (row, pivot) = (matrix[i], matrix[i][i]);
        if pivot <= 0.0 || !pivot.is_finite() {
            return None;
        }
        for j in i + 1..3 {
            let factor = matrix[j][i] / pivot;
            matrix[j].iter_mut().zip(row).for_each(|(value, above)| *value -= factor * above);
            right[j] -= factor * right[i];
        }
    }
    let mut solution = [0.0; 3];
    for i in (0..3).rev() {
        let known: f64 = (i + 1..3).map(|j| matrix[i][j] * solution[j]).sum();
        solution[i] = (right[i] - known) / matrix[i][i];
    }
    solution.iter().all(|part| part.is_finite()).then_some(solution)
}

/// The most tokens of prompts in a step: the smallest bound of a client that generates in it, and the smallest one of
/// another client than that. A client's own bound does not limit its prompts.
#[derive(Debug, Default)]
pub(super) struct PromptBounds {
    first: Option<(ClientId, usize)>,
    others: Option<usize>,
}

impl PromptBounds {
    /// A step in which each of these clients, with its fraction of all weights, has this many decoding sequences.
    pub(super) fn new(time: StepTime, clients: impl Iterator<Item = (ClientId, f64, usize)> + Clone) -> Self {
        let all = clients.clone().map(|(_, _, num_rows)| num_rows).sum();
        let mut bounds = Self::default();
        clients.for_each(|(client, part, own)| bounds.add(client, time.max_prompt_tokens(part, own, all)));
        bounds
    }

    /// For the sake of this client, which comes once.
    fn add(&mut self, client: ClientId, bound: usize) {
        match self.first {
            Some((_, smallest)) if bound < smallest => {
                (self.first, self.others) = (Some((client, bound)), Some(smallest));
            }
            Some(_) => self.others = Some(self.others.map_or(bound, |others| others.min(bound))),
            None => self.first = Some((client, bound)),
        }
    }

    /// That of this client's prompts.
    pub(super) fn of(&self, client: ClientId) -> usize {
        let bound = match self.first {
            Some((first, bound)) if first != client => Some(bound),
            _ => self.others,
        };
        bound.unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_bounded_for_the_sake_of_others_only() {
        let numbers = [(1, 10), (2, 5), (3, 7), (4, 5), (5, 30)];
        for len in 0..=numbers.len() {
            let mut bounds = PromptBounds::default();
            numbers[..len].iter().for_each(|(client, bound)| bounds.add(ClientId(*client), *bound));
            for client in 1..7 {
                let others = numbers[..len].iter().filter(|(other, _)| *other != client);
                let wanted = others.map(|(_, bound)| *bound).min().unwrap_or(usize::MAX);
                assert_eq!(bounds.of(ClientId(client)), wanted, "{client} of {len}");
            }
        }
    }

    #[test]
    fn a_step_is_a_few_times_what_the_client_s_own_takes() {
        let time = StepTime { own: 3.0, row: 1.0, prompt_token: 0.5 };
        // Half of the weights: eight times four, less the step with its ten rows.
        assert_eq!(time.max_prompt_tokens(0.5, 1, 10), 2 * (32 - 13));
        assert_eq!(time.max_prompt_tokens(1.0, 1, 1), 2 * (16 - 4));
        // Rows that take as long leave a fraction for prompts.
        assert_eq!(time.max_prompt_tokens(0.5, 1, 97), 100);
        assert_eq!(StepTime { prompt_token: 5.0, ..time }.max_prompt_tokens(0.5, 1, 10), MIN_CHUNK);
    }

    #[test]
    fn chunks_are_short_while_several_clients_come_and_go() {
        let mut pace = Pace::new(4);
        let step = |pace: &mut Pace, seconds: f64| {
            for num_prompt_tokens in [0, 100, 200] {
                let load = Load { num_rows: 0, num_prompt_tokens };
                pace.learn(load, 1, seconds * (1.0 + num_prompt_tokens as f64));
            }
        };
        pace.welcome(ClientId(1));
        (0..100).for_each(|_| step(&mut pace, 1e-3));
        pace.welcome(ClientId(1));
        assert_eq!(pace.max_chunk(), usize::MAX, "a client's own bound does not divide its prompts");
        pace.welcome(ClientId(2));
        // Sixteen times a step's own time.
        assert!((14..=18).contains(&pace.max_chunk()), "{}", pace.max_chunk());
        // With a small fixed time, a few milliseconds.
        let mut quick = Pace::new(4);
        for num_prompt_tokens in [1, 50, 100, 200].repeat(100) {
            quick.learn(Load { num_rows: 0, num_prompt_tokens }, 1, 1e-6 + 1e-4 * num_prompt_tokens as f64);
        }
        quick.welcome(ClientId(1));
        quick.welcome(ClientId(2));
        assert!((35..=45).contains(&quick.max_chunk()), "{}", quick.max_chunk());
        // Steps with a large fixed time are not made of small chunks, which would cost too much.
        (0..4).for_each(|_| step(&mut pace, 1e-2));
        assert!(pace.max_chunk() >= MIN_CHUNK);
        pace.welcome(ClientId(2));
        (0..10).for_each(|_| step(&mut pace, 1e-2));
        assert_eq!(pace.max_chunk(), usize::MAX, "the other one is gone");
    }

    #[test]
    fn the_time_of_steps_is_learned_and_followed() {
        let mut pace = Pace::new(4);
        assert_eq!(pace.step_time(), StepTime { own: 4.0, row: 1.0, prompt_token: 0.5 });
        // Similar steps give their total time, but not its terms.
        for _ in 0..100 {
            pace.learn(Load { num_rows: 2, num_prompt_tokens: 8 }, 1, 1.0);
        }
        let time = pace.step_time();
        assert!((time.own - 0.4).abs() < 1e-3 && (time.row - 0.1).abs() < 1e-3, "{time:?}");
        for (own, row, prompt_token) in
            [(20e-3, 2e-3, 1e-3), (5e-3, 10e-6, 20e-6), (1e-3, 1e-3, 1e-3), (0.25e-3, 50e-6, 30e-6)]
        {
            for step in 0..400 {
                let load =
                    Load { num_rows: [1, 7, 200][step % 3], num_prompt_tokens: [0, 28, 13, 100][step % 4] };
                let seconds = own + row * load.num_rows as f64 + prompt_token * load.num_prompt_tokens as f64;
                pace.learn(load, 1, seconds * [0.95, 1.05, 1.0, 1.03, 0.97][step * 7 % 5]);
            }
            let time = pace.step_time();
            for (learned, real) in [(time.own, own), (time.row, row), (time.prompt_token, prompt_token)] {
                assert!(
                    learned >= 0.0 && (learned - real).abs() < 0.2 * (real + 0.1 * own),
                    "{time:?}, {real}"
                );
            }
        }
        // Noise that makes a line fall is no line.
        let mut pace = Pace::new(1);
        for step in 0..10 {
            let load = Load { num_rows: 1, num_prompt_tokens: [0, 100][step % 2] };
            pace.learn(load, 1, [1.0, 0.5][step % 2]);
        }
        let time = pace.step_time();
        assert!(time.prompt_token > 0.0 && time.own > 0.0, "{time:?}");
    }
}
