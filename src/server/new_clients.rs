//! New clients. A sender that names clients, or connects from many addresses, can be a new client with each
//! request. If each were a client of its own, the sender would get as many shares as it has names.
//!
//! So only a few new clients a second become clients of their own, and they stay so while they keep coming.
//! All others are one client with one share, until the rate allows them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use tinyvllm::engine::ClientId;

/// Burst size; [`PER_SECOND`] is the rate.
const BURST: f64 = 32.0;
const PER_SECOND: f64 = 4.0;

/// Most clients that are kept. The least recently seen one is evicted.
const MAX_KNOWN: usize = 4_096;

/// Which clients are clients of their own.
#[derive(Debug)]
pub(super) struct NewClients(Mutex<State>);

#[derive(Debug)]
struct State {
    /// How many more may become clients of their own, at the time `at`.
    budget: f64,
    at: Instant,
    /// When each was last seen.
    known: HashMap<ClientId, Instant>,
}

impl NewClients {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { budget: BURST, at: Instant::now(), known: HashMap::new() }))
    }

    /// The client of a request: `id` itself, or `others`, which all new ones share.
    pub(super) fn resolve(&self, id: ClientId, others: ClientId) -> ClientId {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_own(id, Instant::now()) { id } else { others }
    }
}

impl State {
    fn is_own(&mut self, id: ClientId, now: Instant) -> bool {
        if let Some(last) = self.known.get_mut(&id) {
            *last = now;
            return true;
        }
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        (self.budget, self.at) = ((self.budget + passed * PER_SECOND).min(BURST), now);
        if self.budget < 1.0 {
            return false;
        }
        self.budget -= 1.0;
        if self.known.len() >= MAX_KNOWN {
            let oldest = self.known.iter().min_by_key(|(_, last)| **last).map(|(id, _)| *id);
            oldest.map(|oldest| self.known.remove(&oldest));
        }
        self.known.insert(id, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn state(at: Instant) -> State {
        State { budget: BURST, at, known: HashMap::new() }
    }

    #[test]
    fn a_name_for_each_request_is_few_clients() {
        let start = Instant::now();
        let mut state = state(start);
        assert!(state.is_own(ClientId(0), start));
        let mut num_own = 0;
        for number in 1..10_000 {
            // A thousand new clients a second.
            let now = start + Duration::from_millis(number);
            num_own += u32::from(state.is_own(ClientId(number), now));
            assert!(state.is_own(ClientId(0), now), "one that stays is pushed out");
        }
        assert!((60..=75).contains(&num_own), "{num_own} in ten seconds");
    }

    #[test]
    fn the_one_that_was_away_longest_is_forgotten() {
        let start = Instant::now();
        let mut state = state(start);
        let at = |number: u64| start + Duration::from_secs(number);
        for number in 0..2 * MAX_KNOWN as u64 {
            assert!(state.is_own(ClientId(number), at(number)), "{number}");
            assert!(state.is_own(ClientId(0), at(number)));
            assert!(state.known.len() <= MAX_KNOWN);
        }
        let is_known = |number: u64| state.known.contains_key(&ClientId(number));
        assert!(is_known(0) && is_known(2 * MAX_KNOWN as u64 - 1) && !is_known(1));
    }
}
