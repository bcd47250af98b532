//! What a step takes, learned from steps: a time of its own, and one for each token of a prompt.
//!
//! It is a budget of prefill tokens: while some generate, prompts of others are computed in pieces so small that a step
//! takes no more than a few times what it takes without any. How many tokens those are depends on the model and the machine.

use super::ClientId;
use super::fair_queue::{OUTPUT_TOKEN, PROMPT_TOKEN};

/// Of what is known from earlier steps, what counts after one more.
const MEMORY: f64 = 0.97;

/// The fewest tokens of a piece: a prompt gets on in any case.
const SMALLEST_PIECE: usize = 16;

/// A step is so long that a client with its share of the machine keeps a quarter of the speed that its share would give.
const SLOWDOWN: f64 = 4.0;

/// Sums over steps, the older the less: of 1, prompt tokens, seconds, and products of the latter two.
#[derive(Debug, Default)]
pub(super) struct Pace {
    count: f64,
    tokens: f64,
    seconds: f64,
    tokens_squared: f64,
    tokens_seconds: f64,
}

impl Pace {
    /// A step with so many tokens of prompts took this long.
    pub(super) fn learn(&mut self, num_prompt_tokens: usize, seconds: f64) {
        let tokens = num_prompt_tokens as f64;
        let sums = [
            (&mut self.count, 1.0),
            (&mut self.tokens, tokens),
            (&mut self.seconds, seconds),
            (&mut self.tokens_squared, tokens * tokens),
            (&mut self.tokens_seconds, tokens * seconds),
        ];
        for (sum, value) in sums {
            *sum = *sum * MEMORY + value;
        }
    }

    /// How many tokens of prompts take as long as a step without any: the line through what was seen. None if steps were
    /// too much alike, or too different, for a line.
    fn learned(&self) -> Option<f64> {
        let spread = self.count * self.tokens_squared - self.tokens * self.tokens;
        if spread <= 1e-3 * self.tokens * self.tokens + 1e-9 {
            return None;
        }
        let each = (self.count * self.tokens_seconds - self.tokens * self.seconds) / spread;
        let own = (self.seconds - each * self.tokens) / self.count;
        (each > 0.0 && own > 0.0).then(|| own / each)
    }

    /// The most tokens of prompts in a step with so many rows that generate, for a client with this part of all weights
    /// that is among these. Until steps were seen, they cost what they are taken to cost elsewhere.
    pub(super) fn max_prompt_tokens(&self, part: f64, num_rows: usize, step_cost: usize) -> usize {
        let expected = (step_cost + num_rows) as f64 * (OUTPUT_TOKEN / PROMPT_TOKEN) as f64;
        let own = self.learned().unwrap_or(expected);
        let most = (SLOWDOWN / part.clamp(1e-6, 1.0) - 1.0) * own;
        (most as usize).max(SMALLEST_PIECE)
    }
}

/// The most tokens of prompts in a step: the smallest bound for the sake of anybody who generates in it, and the smallest
/// one for the sake of others than that client. For their own sake nobody's prompts are bounded.
#[derive(Debug, Default)]
pub(super) struct PromptBounds {
    first: Option<(ClientId, usize)>,
    others: Option<usize>,
}

impl PromptBounds {
    /// For the sake of this client.
    pub(super) fn add(&mut self, client: ClientId, bound: usize) {
        match self.first {
            Some((first, smallest)) if first != client && bound < smallest => {
                (self.first, self.others) = (Some((client, bound)), Some(smallest));
            }
            Some((first, _)) if first != client => {
                self.others = Some(self.others.map_or(bound, |others| others.min(bound)));
            }
            _ => self.first = Some((client, bound)),
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
        let numbers = [(1, 10), (1, 10), (2, 5), (3, 7), (1, 10), (2, 5), (4, 5), (5, 30)];
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
    fn the_time_of_steps_is_learned_and_followed() {
        let mut pace = Pace::default();
        // Half of the weights; one row: 2 * (1 + 1) * (8 - 1).
        assert_eq!(pace.max_prompt_tokens(0.5, 1, 1), 28);
        pace.learn(28, 0.5);
        pace.learn(28, 0.5);
        assert_eq!(pace.max_prompt_tokens(0.5, 1, 1), 28, "steps that are alike say nothing");
        for (own, each) in [(20e-3, 1e-3), (5e-3, 20e-6), (1e-3, 1e-3)] {
            for step in 0..400 {
                let num_tokens = [0, 28, 13, 100][step % 4];
                pace.learn(num_tokens, own + each * num_tokens as f64);
            }
            let most = pace.max_prompt_tokens(0.5, 1, 1) as f64;
            let wanted = (7.0 * own / each).max(16.0);
            assert!((most / wanted - 1.0).abs() < 0.1, "{most}, {wanted}");
        }
        // Noise that makes a line fall is no line.
        let mut pace = Pace::default();
        for step in 0..10 {
            pace.learn([0, 100][step % 2], [1.0, 0.5][step % 2]);
        }
        assert_eq!(pace.max_prompt_tokens(0.5, 1, 1), 28);
    }
}
