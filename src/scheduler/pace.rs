//! What a step takes, learned from steps: a time of its own, one for each row that generates, and one for each token of
//! a prompt.
//!
//! From it follows who may be left out of a step (`turns.rs`), and a budget of prefill tokens: while some generate, prompts
//! of others are computed in chunks so small that a step takes no more than a few times what theirs alone would take.

use super::fair_queue::{OUTPUT_TOKEN, PROMPT_TOKEN};
use super::{ClientId, ScheduledRow, SchedulerOutput};

/// Of what is known from earlier steps, what counts after one more.
const MEMORY: f64 = 0.97;

/// How much what was expected weighs beside what was seen, where steps were much alike.
const DOUBT: f64 = 1e-3;

/// The fewest tokens of a chunk: a prompt gets on in any case.
const SMALLEST_PIECE: usize = 16;

/// A step is so long that a client with its share of the machine keeps a quarter of the speed that its share would give.
const SLOWDOWN: f64 = 4.0;

/// Beside rows of which there are many, prompts may take this part of the time that these take.
const PROMPTS_BESIDE_ROWS: f64 = 0.5;

/// While several clients come and go, prompts of a step take no longer than this, in seconds, or than so many times the step's
/// own time: whoever comes next waits for the step that is under way.
const CHUNK_SECONDS: f64 = 0.004;
const CHUNK_STEPS: f64 = 16.0;

/// Clients come and go if the requests of so many seconds of steps were not all of one.
const CHANGE_SECONDS: f64 = 10.0;

/// What a step takes, in seconds or any other unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StepTime {
    /// Whatever is in it.
    pub(super) own: f64,
    /// For each row that generates.
    pub(super) row: f64,
    /// For each token of a prompt.
    pub(super) prompt_token: f64,
}

impl StepTime {
    /// What is expected before steps were seen: the step's own time in rows.
    pub(super) fn expected(step_cost: usize) -> Self {
        Self { own: step_cost as f64, row: 1.0, prompt_token: PROMPT_TOKEN as f64 / OUTPUT_TOKEN as f64 }
    }

    /// The time of these beside the step's own.
    pub(super) fn of(self, load: Load) -> f64 {
        self.row * load.num_rows as f64 + self.prompt_token * load.num_prompt_tokens as f64
    }

    /// The most tokens of prompts in a step with `all` these rows that generate, for a client with this part of all weights
    /// that has `own` of them.
    fn max_prompt_tokens(self, part: f64, own: usize, all: usize) -> usize {
        let time = |num_rows| self.own + self.row * num_rows as f64;
        let spare = SLOWDOWN / part.clamp(1e-6, 1.0) * time(own) - time(all);
        let most = spare.max(PROMPTS_BESIDE_ROWS * time(all)) / self.prompt_token.max(f64::MIN_POSITIVE);
        (most as usize).max(SMALLEST_PIECE)
    }
}

/// What there is in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) num_rows: usize,
    pub(super) num_prompt_tokens: usize,
}

impl Load {
    /// As much of it as there is room for.
    pub(super) fn within(self, num_tokens: usize) -> Self {
        let num_rows = self.num_rows.min(num_tokens);
        Self { num_rows, num_prompt_tokens: self.num_prompt_tokens.min(num_tokens - num_rows) }
    }

    /// Of a planned row. A drafted token takes what a row takes.
    pub(super) fn of_row(row: &ScheduledRow) -> Self {
        match row.num_draft_tokens {
            0 => Self::of(row.len),
            _ => Self { num_rows: row.len, num_prompt_tokens: 0 },
        }
    }

    /// Of a row with so many tokens, none of them drafted.
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

/// What there is in some steps together.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Queued {
    pub(super) load: Load,
    pub(super) num_steps: usize,
}

impl Queued {
    /// And in another one.
    pub(super) fn add(&mut self, plan: &SchedulerOutput) {
        let num_steps = plan.num_steps.max(1);
        let load: Load = plan.rows.iter().map(Load::of_row).sum();
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
    products: [[f64; 3]; 3],
    seconds: [f64; 3],
    /// Who came last, and the seconds of steps since that was somebody else.
    last_client: Option<ClientId>,
    since_change: f64,
}

impl Pace {
    /// Knows nothing but what a step is expected to take of its own, in rows.
    pub(super) fn new(step_cost: usize) -> Self {
        Self {
            expected: StepTime::expected(step_cost),
            products: [[0.0; 3]; 3],
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
        (most as usize).max(SMALLEST_PIECE)
    }

    /// Some steps of this load together took this long.
    pub(super) fn learn(&mut self, load: Load, num_steps: usize, seconds: f64) {
        // In parts of its time: long steps are not to drown what short ones say.
        let seconds = seconds.max(1e-9);
        self.since_change += seconds;
        let steps = [num_steps, load.num_rows, load.num_prompt_tokens];
        let step = steps.map(|part| part as f64 / seconds);
        for (i, row) in self.products.iter_mut().enumerate() {
            for (j, product) in row.iter_mut().enumerate() {
                *product = *product * MEMORY + step[i] * step[j];
            }
            self.seconds[i] = self.seconds[i] * MEMORY + step[i];
        }
    }

    /// What a step takes: what was expected, in the unit that fits what was seen, and what steps were different from that.
    /// Where steps are too much alike to tell its parts, these are as expected.
    pub(super) fn step_time(&self) -> StepTime {
        let expected = [self.expected.own, self.expected.row, self.expected.prompt_token];
        let times = |vector: [f64; 3]| self.products.map(|row| dot(row, vector));
        let squared = dot(expected, times(expected));
        if squared <= 0.0 {
            return self.expected;
        }
        let scale = dot(expected, self.seconds) / squared;
        let expected = expected.map(|part| scale * part);
        let seen = times(expected);
        let rest: [f64; 3] = std::array::from_fn(|i| self.seconds[i] - seen[i]);
        let mut products = self.products;
        // Nothing was seen of what has no square, and nothing is different then.
        (0..3).for_each(|i| products[i][i] += DOUBT * products[i][i] + f64::MIN_POSITIVE);
        let different = solve(products, rest).unwrap_or_default();
        // Noise that makes a part vanish is no time.
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

/// The most tokens of prompts in a step: the smallest bound for the sake of anybody who generates in it, and the smallest
/// one for the sake of others than that client. For their own sake nobody's prompts are bounded.
#[derive(Debug, Default)]
pub(super) struct PromptBounds {
    first: Option<(ClientId, usize)>,
    others: Option<usize>,
}

impl PromptBounds {
    /// Of a step in which each of these clients, with its part of all weights, has so many rows that generate.
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
        // Rows that take as long leave a part for prompts.
        assert_eq!(time.max_prompt_tokens(0.5, 1, 97), 100);
        assert_eq!(StepTime { prompt_token: 5.0, ..time }.max_prompt_tokens(0.5, 1, 10), SMALLEST_PIECE);
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
        assert_eq!(pace.max_chunk(), usize::MAX, "for its own sake nobody's prompts are divided");
        pace.welcome(ClientId(2));
        // Sixteen times a step's own time.
        assert!((14..=18).contains(&pace.max_chunk()), "{}", pace.max_chunk());
        // Where a step takes next to nothing of its own, a few milliseconds.
        let mut quick = Pace::new(4);
        for num_prompt_tokens in [1, 50, 100, 200].repeat(100) {
            quick.learn(Load { num_rows: 0, num_prompt_tokens }, 1, 1e-6 + 1e-4 * num_prompt_tokens as f64);
        }
        quick.welcome(ClientId(1));
        quick.welcome(ClientId(2));
        assert!((35..=45).contains(&quick.max_chunk()), "{}", quick.max_chunk());
        // Steps of which each takes long of its own are not made of small chunks, which would cost too much.
        (0..4).for_each(|_| step(&mut pace, 1e-2));
        assert!(pace.max_chunk() >= SMALLEST_PIECE);
        pace.welcome(ClientId(2));
        (0..10).for_each(|_| step(&mut pace, 1e-2));
        assert_eq!(pace.max_chunk(), usize::MAX, "the other one is gone");
    }

    #[test]
    fn the_time_of_steps_is_learned_and_followed() {
        let mut pace = Pace::new(4);
        assert_eq!(pace.step_time(), StepTime { own: 4.0, row: 1.0, prompt_token: 0.5 });
        // Steps that are alike say how long they take, and nothing of their parts.
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
