//! The suffix automaton of a growing list of tokens: it always has the longest suffix that occurred before.
//!
//! A state is the set of suffixes that end at the same positions. A token adds at most two states, and takes a constant
//! number of steps on average (Blumer et al., 1985). It takes 70 to 100 bytes for each.

use std::collections::HashMap;

/// No state, no edge.
const NONE: u32 = u32::MAX;
const ROOT: u32 = 0;

/// States above the last one that are updated with a new occurrence. Those farther up keep an older one, which is as valid.
const MAX_REPORTED: usize = 32;

#[derive(Debug, Clone, Copy)]
struct State {
    /// Tokens of its longest suffix.
    len: u32,
    /// The state of the longest suffix that ends at more positions.
    link: u32,
    /// One of the positions after its suffixes, the last one as a rule.
    end: u32,
    /// Its first edge in the list.
    first_edge: u32,
}

#[derive(Debug, Clone, Copy)]
struct Edge {
    token_id: u32,
    /// The next one of the same state.
    next: u32,
}

/// A suffix that was there before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Match {
    /// Its tokens.
    pub(super) len: usize,
    /// The position after it where it was before.
    pub(super) end: usize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct SuffixAutomaton {
    token_ids: Vec<u32>,
    states: Vec<State>,
    /// Where each edge leads, by its state and token.
    targets: HashMap<(u32, u32), u32>,
    edges: Vec<Edge>,
    last: u32,
    longest: Option<Match>,
}

impl Default for SuffixAutomaton {
    fn default() -> Self {
        Self {
            token_ids: Vec::new(),
            states: vec![State { len: 0, link: NONE, end: 0, first_edge: NONE }],
            targets: HashMap::new(),
            edges: Vec::new(),
            last: ROOT,
            longest: None,
        }
    }
}

impl SuffixAutomaton {
    /// The tokens so far.
    pub(super) fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// The longest suffix of them that was there before.
    pub(super) fn longest_match(&self) -> Option<Match> {
        self.longest
    }

    /// Adds a token.
    pub(super) fn push(&mut self, token_id: u32) {
        self.token_ids.push(token_id);
        let len = self.states[self.last as usize].len + 1;
        let new = self.add_state(State { len, link: ROOT, end: len, first_edge: NONE });
        let mut state = self.last;
        while state != NONE && !self.targets.contains_key(&(state, token_id)) {
            self.add_edge(state, token_id, new);
            state = self.states[state as usize].link;
        }
        if state != NONE {
            self.states[new as usize].link = self.end_of(state, token_id);
        }
        self.last = new;
        self.note_match(new);
    }

    /// The state of the longest suffix of `state` and the token that was there before; made, if it shared one with longer ones.
    fn end_of(&mut self, mut state: u32, token_id: u32) -> u32 {
        let target = self.targets[&(state, token_id)];
        let (len, old) = (self.states[state as usize].len + 1, self.states[target as usize]);
        if old.len == len {
            return target;
        }
        let copy = self.add_state(State { len, first_edge: NONE, ..old });
        let mut edge = old.first_edge;
        while edge != NONE {
            let Edge { token_id, next } = self.edges[edge as usize];
            let target_of_edge = self.targets[&(target, token_id)];
            self.add_edge(copy, token_id, target_of_edge);
            edge = next;
        }
        self.states[target as usize].link = copy;
        while state != NONE && self.targets.get(&(state, token_id)) == Some(&target) {
            self.targets.insert((state, token_id), copy);
            state = self.states[state as usize].link;
        }
        copy
    }

    fn note_match(&mut self, new: u32) {
        let (end, mut state) = (self.states[new as usize].end, self.states[new as usize].link);
        let State { len, end: end_before, .. } = self.states[state as usize];
        self.longest = (len > 0).then_some(Match { len: len as usize, end: end_before as usize });
        for _ in 0..MAX_REPORTED {
            if state == ROOT {
                break;
            }
            self.states[state as usize].end = end;
            state = self.states[state as usize].link;
        }
    }

    fn add_state(&mut self, state: State) -> u32 {
        self.states.push(state);
        self.states.len() as u32 - 1
    }

    fn add_edge(&mut self, state: u32, token_id: u32, target: u32) {
        self.targets.insert((state, token_id), target);
        let next = std::mem::replace(&mut self.states[state as usize].first_edge, self.edges.len() as u32);
        self.edges.push(Edge { token_id, next });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against the definition, for few and for many different tokens.
        #[test]
        fn the_longest_suffix_that_was_there_before_is_found(
            token_ids in (1_u32..30).prop_flat_map(|num| prop::collection::vec(0..num, 1..120)),
        ) {
            let mut automaton = SuffixAutomaton::default();
            for (index, &token_id) in token_ids.iter().enumerate() {
                automaton.push(token_id);
                let all = &token_ids[..=index];
                let was_there = |len: &usize| all[..index].windows(*len).any(|part| part == &all[all.len() - len..]);
                let longest = (1..=index).rev().find(was_there);
                let found = automaton.longest_match();
                prop_assert_eq!(found.map(|found| found.len), longest);
                if let Some(Match { len, end }) = found {
                    prop_assert!(end < all.len());
                    prop_assert_eq!(&all[end - len..end], &all[all.len() - len..]);
                }
            }
            prop_assert!(automaton.states.len() <= 2 * token_ids.len() + 1);
            prop_assert!(automaton.edges.len() <= 3 * token_ids.len() + 1);
        }
    }

    /// A token that has another successor at each occurrence has an edge for each of them.
    #[test]
    fn time_grows_with_the_number_of_tokens_whatever_they_are() {
        let shapes: [fn(u32) -> u32; 4] =
            [|_| 7, |index| index, |index| if index % 2 == 0 { 0 } else { index }, |index| index % 100];
        for shape in shapes {
            let mut automaton = SuffixAutomaton::default();
            (0..200_000).for_each(|index| automaton.push(shape(index)));
            assert!(automaton.states.len() <= 400_001 && automaton.edges.len() <= 600_001);
        }
    }
}
