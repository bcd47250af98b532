//! The order in which masks are computed.
//!
//! Few threads compute masks, so that steps keep their processors, and a mask can take as long as many steps. Three
//! rules keep a client's expensive masks from delaying others' cheap ones:
//!
//! - A mask that takes long passes its *permit* to the next one: only masks that have just begun count against the permits.
//! - Among waiting groups of clients, the one with the fewest running jobs is next, then the one with the least time used,
//!   both by weight; within a group the same holds for clients. A client's own jobs run in the order of arrival.
//! - A client may have as many long jobs as there are permits, and the last thread is for groups without one.
//!
//! Pure: times are numbers, in seconds.

use std::collections::{BTreeMap, VecDeque};

use crate::scheduler::{ClientId, Weight};

/// A mask that takes longer is one that takes long.
pub(super) const LONG: f64 = 2e-3;

/// On whose account a mask is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) struct Owner {
    pub(in crate::engine) client: ClientId,
    pub(in crate::engine) group: ClientId,
    pub(in crate::engine) weight: Weight,
}

/// How much there is at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Masks that have just begun.
    pub(super) num_permits: usize,
    /// All.
    pub(super) num_threads: usize,
}

impl Limits {
    /// The limits on a machine with this many processors: a quarter of them, and two threads for long jobs.
    pub(super) fn of(num_processors: usize) -> Self {
        let num_permits = (num_processors / 4).clamp(1, 4);
        Self { num_permits, num_threads: num_permits + 2 }
    }
}

/// The waiting jobs, and the owners of running ones.
#[derive(Debug)]
pub(super) struct Queue<J> {
    limits: Limits,
    groups: BTreeMap<ClientId, Group<J>>,
    running: Vec<RunningJob>,
    num_waiting: usize,
    next_id: u64,
    /// The time that a group has had which comes now.
    clock: f64,
}

#[derive(Debug)]
struct Group<J> {
    weight: f64,
    /// Seconds, divided by the weight.
    time: f64,
    clients: BTreeMap<ClientId, Line<J>>,
    /// Of its clients.
    clock: f64,
}

#[derive(Debug)]
struct Line<J> {
    waiting: VecDeque<J>,
    time: f64,
}

#[derive(Debug, Clone, Copy)]
struct RunningJob {
    id: u64,
    client: ClientId,
    group: ClientId,
    start: f64,
}

impl RunningJob {
    fn is_long(&self, now: f64) -> bool {
        now - self.start >= LONG
    }
}

/// A job that was begun.
#[derive(Debug)]
pub(super) struct Begun<J> {
    job: J,
    id: u64,
}

impl<J> Begun<J> {
    /// The job, and the input of [`Queue::end`].
    pub(super) fn split(self) -> (J, u64) {
        (self.job, self.id)
    }
}

impl<J> Queue<J> {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, groups: BTreeMap::new(), running: Vec::new(), num_waiting: 0, next_id: 0, clock: 0.0 }
    }

    pub(super) fn push(&mut self, owner: Owner, job: J) {
        let clock = self.clock;
        let group = self.groups.entry(owner.group).or_insert_with(|| Group {
            weight: 1.0,
            time: clock,
            clients: BTreeMap::new(),
            clock: 0.0,
        });
        group.weight = f64::from(owner.weight.get());
        let clock = group.clock;
        let line = group
            .clients
            .entry(owner.client)
            .or_insert_with(|| Line { waiting: VecDeque::new(), time: clock });
        line.waiting.push_back(job);
        self.num_waiting += 1;
    }

    /// Whether any job waits.
    pub(super) fn has_waiting(&self) -> bool {
        self.num_waiting > 0
    }

    /// Whether a job that waits may begin.
    pub(super) fn may_begin(&self, now: f64) -> bool {
        self.next(now).is_some()
    }

    /// Begins the next job, if there is one that may begin.
    pub(super) fn begin(&mut self, now: f64) -> Option<Begun<J>> {
        let (group_id, client) = self.next(now)?;
        let group = self.groups.get_mut(&group_id)?;
        let line = group.clients.get_mut(&client)?;
        let job = line.waiting.pop_front()?;
        group.clock = group.clock.max(line.time);
        self.clock = self.clock.max(group.time);
        self.num_waiting -= 1;
        let id = self.next_id;
        self.next_id += 1;
        self.running.push(RunningJob { id, client, group: group_id, start: now });
        Some(Begun { job, id })
    }

    /// The group and the client whose turn it is.
    fn next(&self, now: f64) -> Option<(ClientId, ClientId)> {
        let num_free = self.limits.num_threads.saturating_sub(self.running.len());
        if self.num_waiting == 0 || num_free == 0 || self.num_short(now) >= self.limits.num_permits {
            return None;
        }
        let count =
            |wanted: &dyn Fn(&RunningJob) -> bool| self.running.iter().filter(|job| wanted(job)).count();
        let may_begin = |id: ClientId| num_free > 1 || count(&|job| job.group == id && job.is_long(now)) == 0;
        let client_may_begin =
            |id: ClientId| count(&|job| job.client == id && job.is_long(now)) < self.limits.num_permits;
        let waiting = |group: &Group<J>| {
            let lines = group.clients.iter();
            let open = lines.filter(|(id, line)| !line.waiting.is_empty() && client_may_begin(**id));
            let key = |id: ClientId, line: &Line<J>| (count(&|job| job.client == id) as f64, line.time);
            let keyed = open.map(|(id, line)| (key(*id, line), *id));
            keyed.min_by(|(a, _), (b, _)| compare(*a, *b)).map(|(_, id)| id)
        };
        let groups = self.groups.iter().filter(|(id, _)| may_begin(**id));
        let open = groups.filter_map(|(id, group)| {
            let client = waiting(group)?;
            let num_running = count(&|job| job.group == *id) as f64;
            Some(((num_running / group.weight, group.time), (*id, client)))
        });
        open.min_by(|(a, _), (b, _)| compare(*a, *b)).map(|(_, next)| next)
    }

    fn num_short(&self, now: f64) -> usize {
        self.running.iter().filter(|job| !job.is_long(now)).count()
    }

    /// Seconds until a running job counts as long, if a job waits for that.
    pub(super) fn next_look(&self, now: f64) -> Option<f64> {
        let left = self.running.iter().map(|job| job.start + LONG - now).filter(|left| *left > 0.0);
        left.min_by(f64::total_cmp).filter(|_| self.has_waiting())
    }

    /// The job with this number has ended.
    pub(super) fn end(&mut self, id: u64, now: f64) {
        let Some(index) = self.running.iter().position(|job| job.id == id) else { return };
        let job = self.running.swap_remove(index);
        let seconds = (now - job.start).max(0.0);
        if let Some(group) = self.groups.get_mut(&job.group) {
            group.time += seconds / group.weight;
            if let Some(line) = group.clients.get_mut(&job.client) {
                line.time += seconds;
            }
        }
        self.forget();
    }

    /// Removes clients without jobs and without a lead in time.
    fn forget(&mut self) {
        let running = &self.running;
        for group in self.groups.values_mut() {
            let clock = group.clock;
            let is_busy = |id: ClientId| running.iter().any(|job| job.client == id);
            group.clients.retain(|id, line| !line.waiting.is_empty() || line.time > clock || is_busy(*id));
        }
        let clock = self.clock;
        self.groups.retain(|_, group| {
            group.time > clock
                || group
                    .clients
                    .iter()
                    .any(|(id, line)| !line.waiting.is_empty() || running.iter().any(|job| job.client == *id))
        });
        if self.num_waiting == 0 && self.running.is_empty() {
            // Idle threads leave no debt.
            self.groups.clear();
            self.clock = 0.0;
        }
    }
}

fn compare(a: (f64, f64), b: (f64, f64)) -> std::cmp::Ordering {
    a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { num_permits: 1, num_threads: 3 };

    fn owner(client: u64, group: u64) -> Owner {
        Owner { client: ClientId(client), group: ClientId(group), weight: Weight::default() }
    }

    #[test]
    fn a_mask_that_takes_long_gives_its_permit_to_others() {
        let mut queue = Queue::new(LIMITS);
        (0..2).for_each(|job| queue.push(owner(1, 9), job));
        let first = queue.begin(0.0).unwrap().split();
        assert_eq!(first.0, 0);
        queue.push(owner(2, 9), 2);
        queue.push(owner(3, 3), 3);
        assert!(queue.begin(LONG / 2.0).is_none());
        assert!((queue.next_look(LONG / 2.0).unwrap() - LONG / 2.0).abs() < 1e-9);
        // Another group comes first, and then no more jobs of the same client.
        let second = queue.begin(LONG).unwrap().split();
        assert_eq!(second.0, 3);
        queue.end(second.1, 1.5 * LONG);
        let third = queue.begin(2.0 * LONG).unwrap().split();
        assert_eq!(third.0, 2);
        // The last thread is not for a group that has one already.
        queue.push(owner(4, 9), 4);
        assert!(queue.begin(5.0 * LONG).is_none() && queue.next_look(5.0 * LONG).is_none());
        queue.push(owner(3, 3), 5);
        let fourth = queue.begin(5.0 * LONG).unwrap().split();
        assert_eq!(fourth.0, 5);
        queue.end(first.1, 6.0 * LONG);
        queue.end(third.1, 8.0 * LONG);
        queue.end(fourth.1, 8.0 * LONG);
        // The one that has had less.
        assert_eq!(queue.begin(8.0 * LONG).unwrap().split().0, 4);
        assert_eq!(queue.begin(10.0 * LONG).unwrap().split().0, 1);
        assert!(!queue.has_waiting() && queue.begin(20.0 * LONG).is_none());
    }

    #[test]
    fn time_follows_the_weights_without_a_memory() {
        let mut queue = Queue::new(LIMITS);
        let heavy = Owner { weight: Weight::new(3).unwrap(), ..owner(2, 2) };
        let mut num_done = [0; 2];
        for step in 0..400_u32 {
            for (index, owner) in [owner(1, 1), heavy].into_iter().enumerate() {
                queue.push(owner, index);
            }
            let now = f64::from(step) * 1e-3;
            let (index, id) = queue.begin(now).unwrap().split();
            queue.end(id, now + 1e-3);
            num_done[index] += 1;
        }
        assert_eq!(num_done, [100, 300]);
        while let Some(begun) = queue.begin(1.0) {
            queue.end(begun.split().1, 1.0);
        }
        assert!(queue.groups.is_empty());
    }

    /// Seconds that a light client's masks wait at most, under the load of a key with these names of which each always
    /// has masks that wait and take so long.
    fn longest_wait(names: &[f64]) -> f64 {
        let mut queue = Queue::new(LIMITS);
        let name = |index: usize| owner(index as u64 + 1, 1_000);
        let light = owner(0, 0);
        names
            .iter()
            .enumerate()
            .for_each(|(index, _)| (0..3).for_each(|_| queue.push(name(index), Some(index))));
        let (mut now, mut longest, mut wanted_at) = (0.0, 0.0_f64, None);
        let mut running: Vec<(f64, u64, Option<usize>)> = Vec::new();
        let mut next_light = 5e-3;
        while now < 3.0 {
            while let Some(begun) = queue.begin(now) {
                let (job, id) = begun.split();
                let seconds = job.map_or(0.2e-3, |index| names[index]);
                if job.is_none() {
                    longest = longest.max(now - wanted_at.take().unwrap());
                }
                running.push((now + seconds, id, job));
            }
            let looks = queue.next_look(now).map(|seconds| now + seconds + 1e-9);
            let ends = running.iter().map(|(end, ..)| *end);
            let light_comes = (next_light > now).then_some(next_light);
            now = ends.chain(looks).chain(light_comes).min_by(f64::total_cmp).unwrap();
            if let Some(index) = running.iter().position(|(end, ..)| *end <= now) {
                let (_, id, job) = running.swap_remove(index);
                queue.end(id, now);
                match job {
                    Some(index) => queue.push(name(index), job),
                    None => next_light = now + 1e-3,
                }
            }
            if next_light <= now && wanted_at.is_none() && running.iter().all(|(.., job)| job.is_some()) {
                wanted_at = Some(now);
                queue.push(light, None);
                next_light = 0.0;
            }
        }
        longest
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn cheap_masks_do_not_wait_for_dear_ones(names in prop::collection::vec(0.1e-3..0.25_f64, 1..40)) {
            let wait = longest_wait(&names);
            prop_assert!(wait <= LONG + 1e-6, "{wait}");
        }
    }
}
