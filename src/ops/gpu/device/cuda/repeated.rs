//! Queues launches that repeat in the same order with one call.
//!
//! Queueing a kernel takes the host some microseconds. A step of a small model has more than a hundred kernels, which
//! take the GPU hardly longer. The launches between two commits are a *sequence*. After a few repeats, a sequence
//! becomes a graph of the driver's. From then on its launches are held back while they match the graph; at the commit,
//! the graph gets the arguments that differ and is queued as a whole. If a launch differs, or if other work needs the
//! queue, the launches that were held back are queued one by one: none is lost or reordered.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use crate::Result;

/// Repeats of a sequence before it becomes a graph, which costs as much as some steps.
const MIN_REPEATS: usize = 3;

/// Minimum launches of a graph.
const MIN_LAUNCHES: usize = 16;

/// Maximum launches of a sequence; longer ones, or those without a commit, are not remembered.
const MAX_LAUNCHES: usize = 1 << 13;

/// Sequences whose repeats are counted.
const MAX_COUNTED: usize = 16;

/// Maximum graphs; the least recently used one is dropped.
const MAX_GRAPHS: usize = 48;

/// Maximum launches whose arguments are replaced. Beyond it, another graph of the same kernels is better, as for
/// metadata that alternates between steps. The second is the maximum number of such graphs.
const MAX_REPLACED: usize = 8;
const MAX_TWINS: usize = 4;

/// A launch without its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Call<F> {
    pub(super) function: F,
    pub(super) grid: [u32; 3],
    pub(super) num_threads: u32,
    /// Bytes of shared memory.
    pub(super) memory: u32,
}

/// Launches in their order.
#[derive(Debug, Clone)]
pub(super) struct LaunchSequence<F> {
    calls: Vec<Call<F>>,
    /// The arguments of all calls, one after the other.
    words: Vec<u64>,
    /// The end of each call's arguments.
    ends: Vec<usize>,
}

impl<F: Copy + Eq + Hash> LaunchSequence<F> {
    fn new() -> Self {
        Self { calls: Vec::new(), words: Vec::new(), ends: Vec::new() }
    }

    fn push(&mut self, call: Call<F>, arguments: &[u64]) {
        self.calls.push(call);
        self.words.extend_from_slice(arguments);
        self.ends.push(self.words.len());
    }

    fn clear(&mut self) {
        self.calls.clear();
        self.words.clear();
        self.ends.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    fn words_of(&self, index: usize) -> Range<usize> {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        start..self.ends[index]
    }

    pub(super) fn get(&self, index: usize) -> (Call<F>, &[u64]) {
        (self.calls[index], &self.words[self.words_of(index)])
    }

    /// The launches whose arguments differ, for sequences with the same calls.
    fn differing(&self, other: &Self) -> Vec<usize> {
        (0..self.len()).filter(|index| self.get(*index).1 != other.get(*index).1).collect()
    }

    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.calls.hash(&mut hasher);
        hasher.finish()
    }
}

/// Launches kernels and makes graphs of them.
pub(super) trait Launcher {
    /// A compiled kernel.
    type Function: Copy + Eq + Hash;
    /// A graph that can be queued.
    type Graph;

    /// Whether it supports graphs.
    fn has_graphs(&self) -> bool;

    /// Queues a launch.
    fn launch(&self, call: &Call<Self::Function>, arguments: &[u64]) -> Result<()>;

    /// A graph of these launches. Nothing is queued.
    fn build(&self, sequence: &LaunchSequence<Self::Function>) -> Result<Self::Graph>;

    /// Replaces the arguments of launch `index` of a graph, for later uses.
    fn replace(
        &self,
        graph: &mut Self::Graph,
        index: usize,
        call: &Call<Self::Function>,
        arguments: &[u64],
    ) -> Result<()>;

    /// Queues a graph.
    fn replay(&self, graph: &Self::Graph) -> Result<()>;

    /// Destroys a graph, which may still be queued.
    fn destroy(&self, graph: Self::Graph) -> Result<()>;
}

struct Kept<L: Launcher> {
    graph: L::Graph,
    /// The launches with their latest arguments.
    sequence: LaunchSequence<L::Function>,
    last_use: u64,
}

/// The state of the launches since the last commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// They are held back: so far they match the graph with this number.
    Held(usize),
    /// They were queued one by one, and may become a graph.
    Queued,
    /// They are an incomplete sequence.
    Broken,
}

/// The launches since the last commit, and the graphs.
pub(super) struct Repeated<L: Launcher> {
    state: State,
    current: LaunchSequence<L::Function>,
    graphs: Vec<Kept<L>>,
    /// Hashes of sequences with their counts, in the order of last use.
    counted: VecDeque<(u64, usize)>,
    num_uses: u64,
}

impl<L: Launcher> std::fmt::Debug for Repeated<L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Repeated").field("state", &self.state).finish_non_exhaustive()
    }
}

impl<L: Launcher> Default for Repeated<L> {
    fn default() -> Self {
        Self {
            state: State::Held(0),
            current: LaunchSequence::new(),
            graphs: Vec::new(),
            counted: VecDeque::new(),
            num_uses: 0,
        }
    }
}

impl<L: Launcher> Repeated<L> {
    /// A launch.
    ///
    /// # Errors
    /// Those of this launch or of one that was held back.
    pub(super) fn push(&mut self, launcher: &L, call: Call<L::Function>, arguments: &[u64]) -> Result<()> {
        if self.current.len() >= MAX_LAUNCHES {
            self.give_up(launcher)?;
        }
        match self.state {
            State::Held(graph) => {
                self.current.push(call, arguments);
                match self.like_current(graph) {
                    Some(graph) => self.state = State::Held(graph),
                    None => {
                        self.state = State::Queued;
                        return self.launch_current(launcher);
                    }
                }
                Ok(())
            }
            State::Queued => {
                self.current.push(call, arguments);
                launcher.launch(&call, arguments)
            }
            State::Broken => launcher.launch(&call, arguments),
        }
    }

    /// Queues the launches that were held back, because other work comes before the commit.
    ///
    /// # Errors
    /// Those of a launch.
    pub(super) fn give_up(&mut self, launcher: &L) -> Result<()> {
        if self.current.len() == 0 {
            return Ok(());
        }
        let state = std::mem::replace(&mut self.state, State::Broken);
        let result = match state {
            State::Held(_) => self.launch_current(launcher),
            State::Queued | State::Broken => Ok(()),
        };
        self.current.clear();
        result
    }

    /// Ends a sequence: all of it is queued when this returns.
    ///
    /// # Errors
    /// Those of a launch or a graph.
    pub(super) fn commit(&mut self, launcher: &L) -> Result<()> {
        let result = match self.state {
            State::Held(_) if self.current.len() > 0 => self.end_held(launcher),
            State::Queued => self.remember(launcher),
            State::Held(_) | State::Broken => Ok(()),
        };
        self.current.clear();
        self.state = State::Held(0);
        result
    }

    /// A graph that begins with the current launches; `first` did before the last launch.
    fn like_current(&self, first: usize) -> Option<usize> {
        let len = self.current.len();
        let last = self.current.calls.last();
        if len > 1 && self.graphs.get(first)?.sequence.calls.get(len - 1) == last {
            return Some(first);
        }
        self.graphs.iter().position(|kept| kept.sequence.calls.starts_with(&self.current.calls))
    }

    fn launch_current(&self, launcher: &L) -> Result<()> {
        (0..self.current.len()).try_for_each(|index| {
            let (call, arguments) = self.current.get(index);
            launcher.launch(&call, arguments)
        })
    }

    fn end_held(&mut self, launcher: &L) -> Result<()> {
        let twins = self.graphs.iter().enumerate();
        let twins = twins.filter(|(_, kept)| kept.sequence.calls == self.current.calls);
        let twins: Vec<_> =
            twins.map(|(index, kept)| (index, kept.sequence.differing(&self.current))).collect();
        let num_twins = twins.len();
        let Some((index, differing)) = twins.into_iter().min_by_key(|(_, differing)| differing.len()) else {
            // They are only a prefix of the graph.
            self.launch_current(launcher)?;
            return self.remember(launcher);
        };
        let index = if differing.len() > MAX_REPLACED && num_twins < MAX_TWINS {
            self.keep(launcher)?
        } else {
            let kept = &mut self.graphs[index];
            for at in differing {
                let (call, arguments) = self.current.get(at);
                launcher.replace(&mut kept.graph, at, &call, arguments)?;
                let own = kept.sequence.words_of(at);
                kept.sequence.words[own].copy_from_slice(arguments);
            }
            index
        };
        self.num_uses += 1;
        self.graphs[index].last_use = self.num_uses;
        launcher.replay(&self.graphs[index].graph)
    }

    /// Counts the current sequence, which was queued one by one, and makes a graph of it after enough repeats.
    fn remember(&mut self, launcher: &L) -> Result<()> {
        if self.current.len() < MIN_LAUNCHES || !launcher.has_graphs() {
            return Ok(());
        }
        let hash = self.current.hash();
        let index = self.counted.iter().position(|(counted, _)| *counted == hash);
        let count = 1 + index.and_then(|index| self.counted.remove(index)).map_or(0, |(_, count)| count);
        if count >= MIN_REPEATS {
            self.keep(launcher)?;
            return Ok(());
        }
        self.counted.push_back((hash, count));
        if self.counted.len() > MAX_COUNTED {
            self.counted.pop_front();
        }
        Ok(())
    }

    /// Makes a graph of the current sequence and returns its number.
    fn keep(&mut self, launcher: &L) -> Result<usize> {
        if self.graphs.len() >= MAX_GRAPHS {
            let oldest = (0..self.graphs.len()).min_by_key(|index| self.graphs[*index].last_use).unwrap_or(0);
            launcher.destroy(self.graphs.swap_remove(oldest).graph)?;
        }
        let graph = launcher.build(&self.current)?;
        self.num_uses += 1;
        self.graphs.push(Kept { graph, sequence: self.current.clone(), last_use: self.num_uses });
        Ok(self.graphs.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;

    use super::*;

    /// Records queued work.
    #[derive(Default)]
    struct Notes {
        launched: RefCell<Vec<(Call<u8>, Vec<u64>)>>,
        num_replays: RefCell<usize>,
        num_graphs: RefCell<usize>,
    }

    impl Launcher for Notes {
        type Function = u8;
        type Graph = Vec<(Call<u8>, Vec<u64>)>;

        fn has_graphs(&self) -> bool {
            true
        }

        fn launch(&self, call: &Call<u8>, arguments: &[u64]) -> Result<()> {
            self.launched.borrow_mut().push((*call, arguments.to_vec()));
            Ok(())
        }

        fn build(&self, sequence: &LaunchSequence<u8>) -> Result<Self::Graph> {
            *self.num_graphs.borrow_mut() += 1;
            let all = (0..sequence.len()).map(|index| sequence.get(index));
            Ok(all.map(|(call, arguments)| (call, arguments.to_vec())).collect())
        }

        fn replace(
            &self,
            graph: &mut Self::Graph,
            index: usize,
            call: &Call<u8>,
            arguments: &[u64],
        ) -> Result<()> {
            assert_eq!(graph[index].0, *call);
            graph[index].1 = arguments.to_vec();
            Ok(())
        }

        fn replay(&self, graph: &Self::Graph) -> Result<()> {
            *self.num_replays.borrow_mut() += 1;
            self.launched.borrow_mut().extend(graph.iter().cloned());
            Ok(())
        }

        fn destroy(&self, _graph: Self::Graph) -> Result<()> {
            *self.num_graphs.borrow_mut() -= 1;
            Ok(())
        }
    }

    fn call(function: u8) -> Call<u8> {
        Call { function, grid: [1, 2, 3], num_threads: 32, memory: 0 }
    }

    /// A step of `len` kernels whose arguments are those of a slot, except one that always differs.
    fn step(repeated: &mut Repeated<Notes>, notes: &Notes, len: usize, slot: u64, time: u64) {
        for index in 0..len {
            let own = if index == 0 { time } else { slot };
            repeated.push(notes, call(index as u8), &[index as u64, own]).unwrap();
        }
        repeated.commit(notes).unwrap();
    }

    #[test]
    fn what_repeats_becomes_a_graph_for_each_slot() {
        let (mut repeated, notes) = (Repeated::default(), Notes::default());
        for time in 0..40 {
            step(&mut repeated, &notes, 20, time % 2, time);
        }
        assert_eq!(*notes.num_graphs.borrow(), 2);
        assert_eq!(*notes.num_replays.borrow(), 40 - MIN_REPEATS);
        let launched = notes.launched.borrow();
        assert_eq!(launched.len(), 40 * 20);
        for (at, (own, arguments)) in launched.iter().enumerate() {
            let (time, index) = (at as u64 / 20, at as u64 % 20);
            let slot = if index == 0 { time } else { time % 2 };
            assert_eq!((own, &arguments[..]), (&call(index as u8), &[index, slot][..]));
        }
    }

    #[test]
    fn few_launches_and_endless_ones_are_not_kept() {
        let (mut repeated, notes) = (Repeated::default(), Notes::default());
        for time in 0..10 {
            step(&mut repeated, &notes, MIN_LAUNCHES - 1, 0, time);
        }
        for index in 0..3 * MAX_LAUNCHES {
            repeated.push(&notes, call(index as u8), &[]).unwrap();
        }
        repeated.commit(&notes).unwrap();
        assert_eq!(*notes.num_graphs.borrow(), 0);
        assert!(repeated.current.len() == 0 && repeated.current.words.is_empty());
    }

    #[test]
    fn the_graphs_that_are_kept_are_the_latest_ones() {
        let (mut repeated, notes) = (Repeated::default(), Notes::default());
        for len in MIN_LAUNCHES..MIN_LAUNCHES + 2 * MAX_GRAPHS {
            (0..4).for_each(|time| step(&mut repeated, &notes, len, 0, time));
        }
        assert_eq!(*notes.num_graphs.borrow(), MAX_GRAPHS);
        let before = *notes.num_replays.borrow();
        step(&mut repeated, &notes, MIN_LAUNCHES + 2 * MAX_GRAPHS - 1, 0, 0);
        assert_eq!(*notes.num_replays.borrow(), before + 1);
    }

    proptest! {
        /// Every launch is queued once, in order and on time.
        #[test]
        fn nothing_is_lost_or_moved(
            steps in prop::collection::vec((0..4_usize, 0..3_u64, prop::option::of(0..25_usize)), 1..60),
        ) {
            let (mut repeated, notes) = (Repeated::default(), Notes::default());
            let mut expected = Vec::new();
            for (time, (kind, slot, interrupted)) in steps.into_iter().enumerate() {
                // Some have a common prefix, and one is a prefix of another.
                let len = [20, 24, 18, 24][kind];
                for index in 0..len {
                    let function = if kind == 3 && index > 10 { 100 + index } else { index };
                    let arguments = [time as u64 * u64::from(index == 3), slot, index as u64];
                    repeated.push(&notes, call(function as u8), &arguments).unwrap();
                    expected.push((call(function as u8), arguments.to_vec()));
                    if interrupted == Some(index) {
                        repeated.give_up(&notes).unwrap();
                        prop_assert_eq!(&*notes.launched.borrow(), &expected);
                    }
                }
                repeated.commit(&notes).unwrap();
                prop_assert_eq!(&*notes.launched.borrow(), &expected);
            }
        }
    }
}
