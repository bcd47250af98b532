//! The order of service: the waiting sequences of each client, and each client's service so far.
//!
//! Clients with a common account are a *group*: an API key with all the names that use it. Most groups are one client.
//! A group has a *counter* of its clients' service, divided by its weight ("virtual token counter"), and each client in
//! it has its own. Groups are compared first, and within a group its clients: the number of a key's names, and the time
//! that each of them has waited, has no effect on other clients. The smallest counter comes first.
//!
//! A satisfied client has no claim to service that others get meanwhile: its counter is lifted to those that wait, so
//! no client saves up for later, and a returning one starts at the others' level.
//!
//! That level rises with all service, divided by the weights of all active clients: it is the service that each of them
//! would have had by now. So clients that are new for each request do not overtake one that stays: it only waits until
//! each present client has had as much service.
//!
//! Each group also has a short memory, the *round*: the time of steps that it has had since the last one without a
//! skipped client. It decides whose sequences may be skipped in the next step (`turns.rs`) and never reaches back
//! further, so no client is skipped for longer than others need to have as much time as one step gave it.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use super::SeqId;

/// The cost of a token: a prompt token in the cache, a computed one, and a generated one.
pub(super) const CACHED_TOKEN: u64 = 250_000;
pub(super) const PROMPT_TOKEN: u64 = 4 * CACHED_TOKEN;
pub(super) const OUTPUT_TOKEN: u64 = 2 * PROMPT_TOKEN;

/// The unit of weights: clients within a group have a fraction of its weight.
pub(super) const WEIGHT_UNIT: u64 = 1 << 16;

/// The number of a client: the unit that gets a fair share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

/// The weight of a client: under contention, one of weight 2 gets twice as much as one of weight 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight(u32);

impl Weight {
    /// The largest.
    pub const MAX: u32 = 1_000;

    /// None if it is 0 or more than [`Self::MAX`].
    #[must_use]
    pub fn new(weight: u32) -> Option<Self> {
        (1..=Self::MAX).contains(&weight).then_some(Self(weight))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self(1)
    }
}

/// The clients and their waiting sequences.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    clients: BTreeMap<ClientId, Client>,
    groups: BTreeMap<ClientId, Group>,
    /// Of the groups.
    clock: Clock,
    num_waiting: usize,
    num_held: usize,
    /// The round of a group that comes now.
    round_start: u64,
}

#[derive(Debug, Default)]
struct Client {
    group: ClientId,
    /// By priority, then in the order of arrival. One that was preempted arrived before those that never ran.
    waiting: BTreeSet<(i32, SeqId)>,
    /// Sequences that will wait.
    num_held: usize,
    /// Sequences that run, and the forks that will start with them.
    num_permits: usize,
    account: Account,
}

/// Clients with a common account.
#[derive(Debug, Default)]
struct Group {
    /// Those of them that have a sequence.
    num_active: usize,
    num_permits: usize,
    weight: Weight,
    account: Account,
    round: u64,
    /// Of its clients.
    clock: Clock,
}

impl Group {
    /// Counts a client that has sequences, or no longer has any.
    fn count(&mut self, client: &Client, is_here: bool) {
        let change =
            |count: usize, part: usize| if is_here { count + part } else { count.saturating_sub(part) };
        self.num_active = change(self.num_active, usize::from(client.is_active()));
        self.num_permits = change(self.num_permits, client.num_permits);
    }
}

/// The service of a client.
#[derive(Debug, Clone, Copy, Default)]
struct Account {
    counter: u64,
    /// The lift of the counter since the last permits were given.
    lifted: u64,
}

impl Account {
    fn lift(&mut self, counter: u64) {
        self.lifted += counter.saturating_sub(self.counter);
        self.counter = self.counter.max(counter);
    }

    fn restore(&mut self, most: u64) {
        self.counter -= std::mem::take(&mut self.lifted).min(most);
    }
}

/// Where new clients begin.
#[derive(Debug, Clone, Copy, Default)]
struct Clock {
    start: u64,
    /// The service since the last step, or its remainder in whole units.
    served: u64,
}

impl Clock {
    /// Advances by the service, over the weights of all active clients. Each of them has a counter and may need more
    /// service; if none does, all counters start equal.
    fn advance(&mut self, weight: u64, active: impl Iterator<Item = (u64, bool)>) {
        let weight = weight.max(1);
        self.start += self.served / weight;
        self.served %= weight;
        let (mut lagging, mut leading) = (None, None);
        for (counter, is_short) in active {
            leading = leading.max(Some(counter));
            if is_short {
                lagging = Some(lagging.map_or(counter, |lagging: u64| lagging.min(counter)));
            }
        }
        self.start = self.start.max(lagging.or(leading).unwrap_or(0));
    }
}

/// A client's service, for comparisons.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Served {
    pub(super) group: ClientId,
    /// All of its group, for the group's weight.
    pub(super) in_all: u64,
    /// The client alone.
    pub(super) alone: u64,
}

impl Served {
    /// The two counters that count between these.
    fn against(self, other: Self) -> (u64, u64) {
        if self.group == other.group { (self.alone, other.alone) } else { (self.in_all, other.in_all) }
    }

    /// Whether the other one has had more, and by more than this.
    pub(super) fn is_less_served(self, other: Self, by: u64) -> bool {
        let (own, others) = self.against(other);
        own.saturating_add(by) < others
    }

    /// The client with less service.
    pub(super) fn compare(self, other: Self) -> Ordering {
        let (own, others) = self.against(other);
        own.cmp(&others)
    }
}

impl Client {
    fn is_active(&self) -> bool {
        self.num_permits > 0 || !self.waiting.is_empty() || self.num_held > 0
    }
}

impl FairQueue {
    /// A new sequence of this client will be queued.
    pub(super) fn welcome(&mut self, id: ClientId, group_id: ClientId, weight: Weight) {
        if self.groups.values().all(|group| group.num_active == 0) {
            // An idle machine leaves no debt.
            *self = Self::default();
        }
        let client = self.clients.entry(id).or_default();
        if client.is_active() && client.group != group_id {
            self.groups.entry(client.group).or_default().count(client, false);
            self.groups.entry(group_id).or_default().count(client, true);
        }
        client.group = group_id;
        let group = self.groups.entry(group_id).or_default();
        group.weight = weight;
        if group.num_active == 0 {
            group.round = group.round.max(self.round_start);
            group.account.counter = group.account.counter.max(self.clock.start);
        }
        if !client.is_active() {
            client.account.counter = client.account.counter.max(group.clock.start);
        }
    }

    /// Queues a sequence, new or preempted.
    pub(super) fn push(&mut self, id: ClientId, priority: i32, sequence: SeqId) {
        self.clients.entry(id).or_default();
        let is_new = self.change(id, |client| client.waiting.insert((priority, sequence)));
        self.num_waiting += usize::from(is_new.unwrap_or(false));
    }

    /// Takes a sequence out of the queue.
    pub(super) fn remove(&mut self, id: ClientId, priority: i32, sequence: SeqId) {
        let was_there = self.change(id, |client| client.waiting.remove(&(priority, sequence)));
        self.num_waiting -= usize::from(was_there.unwrap_or(false));
    }

    /// Takes a sequence out of the queue for a while; its client is still here.
    pub(super) fn hold(&mut self, id: ClientId, priority: i32, sequence: SeqId) {
        self.add_held(id);
        self.remove(id, priority, sequence);
    }

    /// Puts one that was held into the queue.
    pub(super) fn release(&mut self, id: ClientId, priority: i32, sequence: SeqId) {
        self.push(id, priority, sequence);
        self.remove_held(id);
    }

    /// The client has one more that is held.
    pub(super) fn add_held(&mut self, id: ClientId) {
        self.clients.entry(id).or_default();
        self.change(id, |client| client.num_held += 1);
        self.num_held += 1;
    }

    /// The client has one less that is held.
    pub(super) fn remove_held(&mut self, id: ClientId) {
        self.change(id, |client| client.num_held -= 1);
        self.num_held -= 1;
    }

    /// Changes a client's sequences, and counts it in its group if it has any then.
    fn change<T>(&mut self, id: ClientId, change: impl FnOnce(&mut Client) -> T) -> Option<T> {
        let client = self.clients.get_mut(&id)?;
        let group = self.groups.entry(client.group).or_default();
        group.count(client, false);
        let result = change(client);
        group.count(client, true);
        Some(result)
    }

    /// The client's sequence that is next.
    pub(super) fn first(&self, id: ClientId) -> Option<SeqId> {
        Some(self.clients.get(&id)?.waiting.first()?.1)
    }

    /// The same of every client that has one.
    pub(super) fn first_of_each(&self) -> impl Iterator<Item = (ClientId, SeqId)> {
        self.clients.iter().filter_map(|(id, client)| Some((*id, client.waiting.first()?.1)))
    }

    /// Sequences in the queue.
    pub(super) fn num_waiting(&self) -> usize {
        self.num_waiting
    }

    /// Sequences that are held and would be in it.
    pub(super) fn num_held(&self) -> usize {
        self.num_held
    }

    /// Every sequence in the queue, with its client.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (ClientId, SeqId)> {
        self.clients
            .iter()
            .flat_map(|(id, client)| client.waiting.iter().map(|(_, sequence)| (*id, *sequence)))
    }

    /// Clients with a sequence, those that are to be served first in front: the group with the smallest counter, then the one
    /// with the fewest permits for its weight, then the one whose sequence has waited longest; within a group likewise.
    pub(super) fn in_order(&self) -> Vec<ClientId> {
        let first = |client: &Client| client.waiting.first().map(|(_, sequence)| *sequence);
        let mut of_groups: BTreeMap<ClientId, (usize, Option<SeqId>)> = BTreeMap::new();
        let mut active: Vec<(&ClientId, &Client)> =
            self.clients.iter().filter(|(_, client)| client.is_active()).collect();
        for (_, client) in &active {
            let (num_permits, longest) = of_groups.entry(client.group).or_default();
            *num_permits += client.num_permits;
            *longest = longest.iter().copied().chain(first(client)).min();
        }
        active.sort_by_cached_key(|(id, client)| {
            let (num_permits, longest) = of_groups.get(&client.group).copied().unwrap_or_default();
            let permits = num_permits as u64 * u64::from(Weight::MAX) / self.weight_of_group(client.group);
            let of_group = (self.counter_of_group(client.group), permits, longest, client.group);
            (of_group, client.account.counter, client.num_permits, first(client), **id)
        });
        active.into_iter().map(|(id, _)| *id).collect()
    }

    /// The client's weight in [`WEIGHT_UNIT`]: its fraction of its group's.
    pub(super) fn weight(&self, id: ClientId) -> u64 {
        self.clients.get(&id).map_or(WEIGHT_UNIT, |client| self.weight_of(client))
    }

    fn weight_of(&self, client: &Client) -> u64 {
        let num_sharing = self.groups.get(&client.group).map_or(1, |group| group.num_active.max(1) as u64);
        (self.weight_of_group(client.group) * WEIGHT_UNIT / num_sharing).max(1)
    }

    pub(super) fn weight_of_group(&self, group: ClientId) -> u64 {
        self.groups.get(&group).map_or(1, |group| u64::from(group.weight.0))
    }

    /// The weights of all clients that have a sequence.
    pub(super) fn active_weight(&self) -> u64 {
        let active = self.clients.values().filter(|client| client.is_active());
        active.map(|client| self.weight_of(client)).sum()
    }

    pub(super) fn served(&self, id: ClientId) -> Served {
        let Some(client) = self.clients.get(&id) else { return Served { group: id, ..Served::default() } };
        let group = client.group;
        Served { group, in_all: self.counter_of_group(group), alone: client.account.counter }
    }

    pub(super) fn counter_of_group(&self, group: ClientId) -> u64 {
        self.groups.get(&group).map_or(0, |group| group.account.counter)
    }

    pub(super) fn group(&self, id: ClientId) -> ClientId {
        self.clients.get(&id).map_or(id, |client| client.group)
    }

    pub(super) fn round(&self, group: ClientId) -> u64 {
        self.groups.get(&group).map_or(0, |group| group.round)
    }

    /// Permits of all clients in the group of this one.
    pub(super) fn num_permits_of_group(&self, id: ClientId) -> usize {
        self.groups.get(&self.group(id)).map_or(0, |group| group.num_permits)
    }

    pub(super) fn take_permits(&mut self, id: ClientId, num_permits: usize) {
        self.clients.entry(id).or_default();
        self.change(id, |client| client.num_permits += num_permits);
        self.accounts(id, |account| account.lifted = 0);
    }

    pub(super) fn release_permits(&mut self, id: ClientId, num_permits: usize) {
        self.change(id, |client| client.num_permits -= num_permits);
    }

    /// Changes the accounts of the client and of its group.
    fn accounts(&mut self, id: ClientId, change: impl Fn(&mut Account)) {
        if let Some(client) = self.clients.get_mut(&id) {
            change(&mut client.account);
            self.groups.get_mut(&client.group).into_iter().for_each(|group| change(&mut group.account));
        }
    }

    /// The client is served tokens of this cost.
    pub(super) fn charge(&mut self, id: ClientId, cost: u64) {
        if let Some(client) = self.clients.get_mut(&id)
            && let Some(group) = self.groups.get_mut(&client.group)
        {
            client.account.counter += cost;
            group.clock.served += cost;
            group.account.counter += cost / u64::from(group.weight.0);
            self.clock.served += cost;
        }
    }

    /// The client waits again for its former service: it regains its earlier claim, up to `most`. Otherwise a client
    /// whose sequence is preempted repeatedly would wait each time as if it were new.
    pub(super) fn restore_claim(&mut self, id: ClientId, most: u64) {
        self.accounts(id, |account| account.restore(most));
    }

    /// The group has used this much time of a step.
    pub(super) fn charge_round(&mut self, group: ClientId, cost: u64) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.round = group.round.saturating_add(cost / u64::from(group.weight.0));
        }
    }

    /// A step begins without a skipped client.
    pub(super) fn begin_round(&mut self) {
        self.groups.values_mut().for_each(|group| group.round = 0);
        self.round_start = 0;
    }

    /// A step begins in which others are skipped for clients that had at least this.
    pub(super) fn go_on_with_round(&mut self, smallest: u64) {
        self.round_start = smallest;
    }

    /// The step is planned, and these clients needed more of it than they got. Those that did not are lifted to
    /// them.
    pub(super) fn settle(&mut self, is_short: impl Fn(ClientId) -> bool) {
        let mut members: BTreeMap<ClientId, Vec<(u64, bool)>> = BTreeMap::new();
        for (id, client) in self.clients.iter().filter(|(_, client)| client.is_active()) {
            let wants = !client.waiting.is_empty() || is_short(*id);
            members.entry(client.group).or_default().push((client.account.counter, wants));
        }
        let wants =
            |id: &ClientId| members.get(id).is_some_and(|members| members.iter().any(|(_, wants)| *wants));
        let active = || self.groups.iter().filter(|(_, group)| group.num_active > 0);
        let weight = active().map(|(_, group)| u64::from(group.weight.0)).sum();
        self.clock.advance(weight, active().map(|(id, group)| (group.account.counter, wants(id))));
        for (id, group) in self.groups.iter_mut().filter(|(_, group)| group.num_active > 0) {
            if !wants(id) {
                group.account.lift(self.clock.start);
            }
            let members = members.get(id).into_iter().flatten().copied();
            group.clock.advance(group.num_active as u64, members);
        }
        for (id, client) in &mut self.clients {
            if client.is_active() && client.waiting.is_empty() && !is_short(*id) {
                let group = self.groups.get(&client.group);
                client.account.lift(group.map_or(0, |group| group.clock.start));
            }
        }
        let (start, round_start) = (self.clock.start, self.round_start);
        self.groups.retain(|_, group| {
            group.num_active > 0 || group.account.counter > start || group.round > round_start
        });
        self.clients.retain(|_, client| {
            let group = self.groups.get(&client.group);
            client.is_active() || group.is_some_and(|group| client.account.counter > group.clock.start)
        });
    }

    /// Checks the counts against the sequences.
    pub(super) fn check(&self, num_permits: impl Fn(ClientId) -> usize) -> Result<(), String> {
        for (id, client) in &self.clients {
            if client.num_permits != num_permits(*id) {
                return Err(format!("{id:?} has {} permits, not {}", num_permits(*id), client.num_permits));
            }
        }
        let active = self.clients.values().filter(|client| client.is_active());
        let mut groups: BTreeMap<ClientId, (usize, usize)> = BTreeMap::new();
        for client in active {
            let (num_active, num_permits) = groups.entry(client.group).or_default();
            (*num_active, *num_permits) = (*num_active + 1, *num_permits + client.num_permits);
        }
        for (id, group) in &self.groups {
            let counted = groups.remove(id).unwrap_or_default();
            if counted != (group.num_active, group.num_permits) {
                return Err(format!(
                    "{id:?} has {counted:?} clients with sequences and permits, not {group:?}"
                ));
            }
        }
        if let Some(group) = groups.first_key_value() {
            return Err(format!("{group:?} is not known"));
        }
        match self.clients.values().map(|client| client.waiting.len()).sum::<usize>() {
            num_waiting if num_waiting == self.num_waiting => Ok(()),
            num_waiting => Err(format!("{num_waiting} sequences wait, not {}", self.num_waiting)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientId = ClientId(1);
    const B: ClientId = ClientId(2);

    /// A and B wait, B with this weight.
    fn queue(weight: u32) -> FairQueue {
        let mut queue = FairQueue::default();
        queue.welcome(A, A, Weight::default());
        queue.push(A, 0, SeqId(1));
        queue.welcome(B, B, Weight::new(weight).unwrap());
        queue.push(B, 0, SeqId(2));
        queue
    }

    fn counter(queue: &FairQueue, id: ClientId) -> u64 {
        queue.served(id).in_all
    }

    #[test]
    fn service_follows_the_weights() {
        let mut queue = queue(3);
        let mut served = BTreeMap::from([(A, 0), (B, 0)]);
        for _ in 0..400 {
            let next = queue.in_order()[0];
            queue.charge(next, PROMPT_TOKEN);
            queue.settle(|_| false);
            *served.get_mut(&next).unwrap() += 1;
        }
        assert_eq!((served[&A], served[&B]), (100, 300));
    }

    /// Three names within a key, alongside another key.
    #[test]
    fn names_divide_the_share_of_their_key() {
        const KEY: ClientId = ClientId(9);
        let mut queue = FairQueue::default();
        for id in 1..=4 {
            let group = if id < 4 { KEY } else { ClientId(4) };
            queue.welcome(ClientId(id), group, Weight::default());
            queue.push(ClientId(id), 0, SeqId(id));
        }
        let mut served = BTreeMap::new();
        for _ in 0..600 {
            let next = queue.in_order()[0];
            queue.charge(next, PROMPT_TOKEN);
            queue.settle(|_| false);
            *served.entry(next.0).or_insert(0) += 1;
        }
        assert_eq!(served, BTreeMap::from([(1, 100), (2, 100), (3, 100), (4, 300)]));
        // Of the key's two remaining clients, each has half of its weight.
        queue.remove(ClientId(3), 0, SeqId(3));
        assert_eq!(queue.weight(ClientId(1)), WEIGHT_UNIT / 2);
        assert_eq!(queue.active_weight(), 2 * WEIGHT_UNIT);
        assert!(queue.check(|_| 0).is_ok());
    }

    /// A key whose 80 names all wait, each for long, alongside another key that comes now and then.
    #[test]
    fn names_that_wait_do_not_pass_another_key() {
        const KEY: ClientId = ClientId(1_000);
        let mut queue = FairQueue::default();
        let come = |queue: &mut FairQueue, id: u64| {
            let group = if id == 0 { ClientId(0) } else { KEY };
            queue.welcome(ClientId(id), group, Weight::default());
            queue.push(ClientId(id), 0, SeqId(id));
        };
        (1..=80).for_each(|id| come(&mut queue, id));
        let mut since = 0;
        for next in 81..2_000 {
            if next % 5 == 0 {
                // The key has been served since, and many of its names never.
                come(&mut queue, 0);
                since = 0;
            }
            let client = queue.in_order()[0];
            since += 1;
            assert!(since < 3 || client != ClientId(0), "{since} were served before it");
            queue.remove(client, 0, queue.first(client).unwrap());
            queue.take_permits(client, 1);
            queue.charge(client, 60 * OUTPUT_TOKEN);
            queue.settle(|_| false);
            queue.release_permits(client, 1);
            if client != ClientId(0) {
                come(&mut queue, next);
            }
        }
    }

    #[test]
    fn an_idle_client_has_no_credit_and_keeps_its_debt() {
        let mut queue = queue(1);
        queue.remove(B, 0, SeqId(2));
        queue.charge(A, 100 * OUTPUT_TOKEN);
        queue.settle(|_| false);
        queue.welcome(B, B, Weight::default());
        assert_eq!(counter(&queue, B), counter(&queue, A), "B was away while A was served");
        queue.push(B, 0, SeqId(3));
        queue.charge(B, 7 * OUTPUT_TOKEN);
        // Leaving does not clear B's lead in service over A.
        queue.remove(B, 0, SeqId(3));
        queue.settle(|_| false);
        queue.welcome(B, B, Weight::default());
        assert_eq!(counter(&queue, B), counter(&queue, A) + 7 * OUTPUT_TOKEN);
    }

    #[test]
    fn a_satisfied_client_saves_nothing() {
        let mut queue = queue(1);
        // B runs a sequence and needs no more; A waits and is served much.
        queue.remove(B, 0, SeqId(2));
        queue.take_permits(B, 1);
        queue.charge(A, 1_000 * OUTPUT_TOKEN);
        queue.settle(|_| false);
        assert_eq!(counter(&queue, B), counter(&queue, A));
        // Left out of a step, it keeps its claim.
        queue.charge(A, OUTPUT_TOKEN);
        queue.settle(|id| id == B);
        assert_eq!(counter(&queue, B) + OUTPUT_TOKEN, counter(&queue, A));
    }

    #[test]
    fn a_client_that_loses_its_permit_has_its_claim_back() {
        let mut queue = queue(1);
        queue.charge(A, 10 * OUTPUT_TOKEN);
        queue.remove(B, 0, SeqId(2));
        queue.take_permits(B, 1);
        queue.settle(|_| false);
        queue.charge(B, OUTPUT_TOKEN);
        queue.charge(A, 10 * OUTPUT_TOKEN);
        queue.settle(|_| false);
        assert_eq!(counter(&queue, B), counter(&queue, A));
        queue.push(B, 0, SeqId(2));
        queue.restore_claim(B, u64::MAX);
        assert_eq!(counter(&queue, B), OUTPUT_TOKEN, "what B was served stays counted");
        queue.restore_claim(B, u64::MAX);
        assert_eq!(counter(&queue, B), OUTPUT_TOKEN, "once");
        // No more than it takes, however long B had its permit.
        queue.remove(B, 0, SeqId(2));
        queue.take_permits(B, 1);
        queue.settle(|_| false);
        queue.restore_claim(B, 3 * OUTPUT_TOKEN);
        assert_eq!(counter(&queue, B) + 3 * OUTPUT_TOKEN, counter(&queue, A));
    }

    /// Of eight that wait, each is a new client: a crowd of addresses or names, one for each request.
    #[test]
    fn new_clients_do_not_overtake_one_that_stays() {
        const NUM_WAITING: u64 = 8;
        let mut queue = FairQueue::default();
        let (light, mut next) = (ClientId(0), 1);
        let come = |queue: &mut FairQueue, id: u64| {
            queue.welcome(ClientId(id), ClientId(id), Weight::default());
            queue.push(ClientId(id), 0, SeqId(id));
        };
        come(&mut queue, light.0);
        for id in 1..=NUM_WAITING {
            come(&mut queue, id);
            next += 1;
        }
        let (mut waited, mut longest) = (0, 0);
        for _ in 0..10_000 {
            let client = queue.in_order().into_iter().find(|id| queue.first(*id).is_some()).unwrap();
            let sequence = queue.first(client).unwrap();
            // A request is served before it ends.
            queue.remove(client, 0, sequence);
            queue.take_permits(client, 1);
            queue.charge(client, 60 * OUTPUT_TOKEN);
            queue.begin_round();
            queue.settle(|_| false);
            queue.release_permits(client, 1);
            waited += 1;
            if client == light {
                (waited, longest) = (0, longest.max(waited));
                come(&mut queue, light.0);
            } else {
                come(&mut queue, next);
                next += 1;
            }
        }
        longest = longest.max(waited);
        assert!(longest <= 2 * (NUM_WAITING + 1), "{longest} were served before it");
        assert!(queue.clients.len() < 64, "{} are remembered", queue.clients.len());
    }

    #[test]
    fn an_idle_queue_forgets() {
        let mut queue = queue(1);
        queue.charge(A, 4 * OUTPUT_TOKEN);
        queue.settle(|_| false);
        queue.remove(A, 0, SeqId(1));
        queue.settle(|_| false);
        assert!(queue.groups.contains_key(&A), "what A has had counts while B is there");
        queue.charge(B, 2 * OUTPUT_TOKEN);
        queue.settle(|_| false);
        queue.begin_round();
        queue.settle(|_| false);
        assert!(!queue.groups.contains_key(&A), "B has had as much");
        queue.remove(B, 0, SeqId(2));
        queue.welcome(A, A, Weight::default());
        assert_eq!((counter(&queue, A), queue.groups.len()), (0, 1));
    }

    #[test]
    fn priority_then_arrival() {
        let mut queue = queue(1);
        for (priority, sequence) in [(0, 9), (5, 4), (-1, 8), (0, 5)] {
            queue.push(A, priority, SeqId(sequence));
        }
        let mut order = Vec::new();
        while let Some(SeqId(sequence)) = queue.first(A) {
            order.push(sequence);
            let priority =
                [(9, 0), (4, 5), (8, -1), (5, 0), (1, 0)].into_iter().find(|(id, _)| *id == sequence);
            queue.remove(A, priority.unwrap().1, SeqId(sequence));
        }
        assert_eq!(order, [8, 1, 5, 9, 4]);
        assert_eq!(queue.num_waiting(), 1);
    }
}
