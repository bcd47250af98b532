//! Who is served next: the waiting sequences of each client, and what each client has had.
//!
//! A client has a *counter* of what it was served, divided by its weight ("virtual token counter"). Whoever has
//! the smallest one comes first. A client that wants nothing which it does not get has no claim to what others
//! are served meanwhile: its counter is lifted to those of the clients that wait, so nobody saves up for later,
//! and a client that was away begins where the others are.
//!
//! Where that is moves on with all that is served, divided by the weights of all who are there: it is what each of them
//! would have had by now. So those that come anew for each request do not pass one that stays: it waits for no more
//! than each of those that are there to have as much as it had.
//!
//! Beside it is a short memory, the *round*: what a client was served since the last step in which nobody was
//! left out. It decides whose rows may be left out of the next step (`step.rs`) and never reaches back further,
//! so nobody is left out for longer than others need to be served as much as one step gave it.

use std::collections::{BTreeMap, BTreeSet};

use super::SeqId;

/// What one token costs: prompt tokens that were in the cache, those that were computed, and generated ones.
pub(super) const CACHED_TOKEN: u64 = 250_000;
pub(super) const PROMPT_TOKEN: u64 = 4 * CACHED_TOKEN;
pub(super) const OUTPUT_TOKEN: u64 = 2 * PROMPT_TOKEN;

/// The number of a client: whoever is to get a fair share beside others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

/// How many shares a client has: beside others that want more than there is, one of weight 2 gets twice as much
/// as one of weight 1.
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
    num_waiting: usize,
    /// Where a client begins that comes now.
    start: u64,
    /// What was served since the last step, or what is left of it in whole shares.
    served: u64,
    /// The same for its round.
    round_start: u64,
}

#[derive(Debug, Default)]
struct Client {
    weight: Weight,
    /// By priority, then in the order of arrival. One that was preempted arrived before those that never ran.
    waiting: BTreeSet<(i32, SeqId)>,
    /// Sequences that run, and the forks that will start beside them.
    num_seats: usize,
    counter: u64,
    /// What the counter was lifted by since the client was last given seats.
    lifted: u64,
    round: u64,
}

impl Client {
    fn is_active(&self) -> bool {
        self.num_seats > 0 || !self.waiting.is_empty()
    }
}

impl FairQueue {
    /// A new sequence of this client will be queued.
    pub(super) fn welcome(&mut self, id: ClientId, weight: Weight) {
        if !self.clients.values().any(Client::is_active) {
            // Nobody is owed anything by an idle machine.
            *self = Self::default();
        }
        let client = self.clients.entry(id).or_default();
        client.weight = weight;
        if !client.is_active() {
            client.counter = client.counter.max(self.start);
            client.round = client.round.max(self.round_start);
        }
    }

    /// Queues a sequence, new or preempted.
    pub(super) fn push(&mut self, id: ClientId, priority: i32, sequence: SeqId) {
        let is_new = self.clients.entry(id).or_default().waiting.insert((priority, sequence));
        self.num_waiting += usize::from(is_new);
    }

    /// Takes a sequence out of the queue.
    pub(super) fn remove(&mut self, id: ClientId, priority: i32, sequence: SeqId) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        self.num_waiting -= usize::from(client.waiting.remove(&(priority, sequence)));
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

    /// Every sequence in the queue, with its client.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (ClientId, SeqId)> {
        self.clients
            .iter()
            .flat_map(|(id, client)| client.waiting.iter().map(|(_, sequence)| (*id, *sequence)))
    }

    /// Clients with a sequence, those that are to be served first in front: the smallest counter, then the fewest
    /// seats for their weight, then whose sequence has waited longest.
    pub(super) fn in_order(&self) -> Vec<ClientId> {
        let mut active: Vec<(&ClientId, &Client)> =
            self.clients.iter().filter(|(_, client)| client.is_active()).collect();
        active.sort_by_key(|(id, client)| {
            let seats = client.num_seats as u64 * u64::from(Weight::MAX) / u64::from(client.weight.0);
            (client.counter, seats, client.waiting.first().map(|(_, sequence)| *sequence), **id)
        });
        active.into_iter().map(|(id, _)| *id).collect()
    }

    pub(super) fn weight(&self, id: ClientId) -> u64 {
        u64::from(self.clients.get(&id).map_or(Weight::default(), |client| client.weight).0)
    }

    /// The weights of all clients that have a sequence.
    pub(super) fn active_weight(&self) -> u64 {
        let active = self.clients.values().filter(|client| client.is_active());
        active.map(|client| u64::from(client.weight.0)).sum()
    }

    pub(super) fn counter(&self, id: ClientId) -> u64 {
        self.clients.get(&id).map_or(0, |client| client.counter)
    }

    pub(super) fn round(&self, id: ClientId) -> u64 {
        self.clients.get(&id).map_or(0, |client| client.round)
    }

    pub(super) fn take_seats(&mut self, id: ClientId, num_seats: usize) {
        let client = self.clients.entry(id).or_default();
        client.num_seats += num_seats;
        client.lifted = 0;
    }

    pub(super) fn leave_seats(&mut self, id: ClientId, num_seats: usize) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.num_seats -= num_seats;
        }
    }

    /// The client is served tokens of this cost.
    pub(super) fn charge(&mut self, id: ClientId, cost: u64) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.counter += cost / u64::from(client.weight.0);
            client.round += cost / u64::from(client.weight.0);
            self.served += cost;
        }
    }

    /// The client waits again for what it had: it has the claim that it had before, up to `most`. Without it, a client
    /// whose sequence is preempted again and again would wait as long as if it had just come each time.
    pub(super) fn restore_claim(&mut self, id: ClientId, most: u64) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.counter -= std::mem::take(&mut client.lifted).min(most);
        }
    }

    /// The client has had a step of its own, or a part of one.
    pub(super) fn charge_round(&mut self, id: ClientId, cost: u64) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.round += cost / u64::from(client.weight.0);
        }
    }

    /// A step begins in which nobody is left out.
    pub(super) fn begin_round(&mut self) {
        self.clients.values_mut().for_each(|client| client.round = 0);
        self.round_start = 0;
    }

    /// A step begins in which others are left out for clients that had this at least.
    pub(super) fn go_on_with_round(&mut self, smallest: u64) {
        self.round_start = smallest;
    }

    /// The step is planned, and these clients wanted more of it than they got. Those that did not are lifted to
    /// them. If nobody did, nobody owes anybody anything.
    pub(super) fn settle(&mut self, is_short: impl Fn(ClientId) -> bool) {
        let weight = self.active_weight().max(1);
        self.start += self.served / weight;
        self.served %= weight;
        let active = || self.clients.iter().filter(|(_, client)| client.is_active());
        let wants = |(id, client): &(&ClientId, &Client)| !client.waiting.is_empty() || is_short(**id);
        let behind = active().filter(wants).map(|(_, client)| client.counter).min();
        let start = behind.or_else(|| active().map(|(_, client)| client.counter).max());
        self.start = start.unwrap_or(self.start).max(self.start);
        for (id, client) in &mut self.clients {
            if client.waiting.is_empty() && !is_short(*id) && client.is_active() {
                client.lifted += self.start.saturating_sub(client.counter);
                client.counter = client.counter.max(self.start);
            }
        }
        let (start, round_start) = (self.start, self.round_start);
        self.clients
            .retain(|_, client| client.is_active() || client.counter > start || client.round > round_start);
    }

    /// Checks the counts against the sequences.
    pub(super) fn check(&self, num_seats: impl Fn(ClientId) -> usize) -> Result<(), String> {
        for (id, client) in &self.clients {
            if client.num_seats != num_seats(*id) {
                return Err(format!("{id:?} has {} seats, not {}", num_seats(*id), client.num_seats));
            }
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
        queue.welcome(A, Weight::default());
        queue.push(A, 0, SeqId(1));
        queue.welcome(B, Weight::new(weight).unwrap());
        queue.push(B, 0, SeqId(2));
        queue
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

    #[test]
    fn who_was_away_has_no_credit_and_keeps_what_is_owed() {
        let mut queue = queue(1);
        queue.remove(B, 0, SeqId(2));
        queue.charge(A, 100 * OUTPUT_TOKEN);
        queue.settle(|_| false);
        queue.welcome(B, Weight::default());
        assert_eq!(queue.counter(B), queue.counter(A), "B was away while A was served");
        queue.push(B, 0, SeqId(3));
        queue.charge(B, 7 * OUTPUT_TOKEN);
        // Leaving does not clear what B has had beyond A.
        queue.remove(B, 0, SeqId(3));
        queue.settle(|_| false);
        queue.welcome(B, Weight::default());
        assert_eq!(queue.counter(B), queue.counter(A) + 7 * OUTPUT_TOKEN);
    }

    #[test]
    fn who_gets_all_it_wants_saves_nothing() {
        let mut queue = queue(1);
        // B runs a sequence and wants no more; A waits and is served much.
        queue.remove(B, 0, SeqId(2));
        queue.take_seats(B, 1);
        queue.charge(A, 1_000 * OUTPUT_TOKEN);
        queue.settle(|_| false);
        assert_eq!(queue.counter(B), queue.counter(A));
        // Left out of a step, it keeps its claim.
        queue.charge(A, OUTPUT_TOKEN);
        queue.settle(|id| id == B);
        assert_eq!(queue.counter(B) + OUTPUT_TOKEN, queue.counter(A));
    }

    #[test]
    fn who_loses_its_seat_has_its_claim_back() {
        let mut queue = queue(1);
        queue.charge(A, 10 * OUTPUT_TOKEN);
        queue.remove(B, 0, SeqId(2));
        queue.take_seats(B, 1);
        queue.settle(|_| false);
        queue.charge(B, OUTPUT_TOKEN);
        queue.charge(A, 10 * OUTPUT_TOKEN);
        queue.settle(|_| false);
        assert_eq!(queue.counter(B), queue.counter(A));
        queue.push(B, 0, SeqId(2));
        queue.restore_claim(B, u64::MAX);
        assert_eq!(queue.counter(B), OUTPUT_TOKEN, "what B was served stays counted");
        queue.restore_claim(B, u64::MAX);
        assert_eq!(queue.counter(B), OUTPUT_TOKEN, "once");
        // No more than it takes, however long B had its seat.
        queue.remove(B, 0, SeqId(2));
        queue.take_seats(B, 1);
        queue.settle(|_| false);
        queue.restore_claim(B, 3 * OUTPUT_TOKEN);
        assert_eq!(queue.counter(B) + 3 * OUTPUT_TOKEN, queue.counter(A));
    }

    /// Of eight that wait, each is a new client: a crowd of addresses or names, one for each request.
    #[test]
    fn newcomers_do_not_pass_one_that_stays() {
        const NUM_WAITING: u64 = 8;
        let mut queue = FairQueue::default();
        let (light, mut next) = (ClientId(0), 1);
        let come = |queue: &mut FairQueue, id: u64| {
            queue.welcome(ClientId(id), Weight::default());
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
            // What is served of a request begins before it ends.
            queue.remove(client, 0, sequence);
            queue.take_seats(client, 1);
            queue.charge(client, 60 * OUTPUT_TOKEN);
            queue.begin_round();
            queue.settle(|_| false);
            queue.leave_seats(client, 1);
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
        queue.charge(A, OUTPUT_TOKEN);
        queue.remove(A, 0, SeqId(1));
        queue.settle(|_| false);
        assert!(queue.clients.contains_key(&A), "what A has had counts while B is there");
        queue.charge(B, 2 * OUTPUT_TOKEN);
        queue.settle(|_| false);
        queue.begin_round();
        queue.settle(|_| false);
        assert!(!queue.clients.contains_key(&A), "B has had as much");
        queue.remove(B, 0, SeqId(2));
        queue.welcome(A, Weight::default());
        assert_eq!((queue.counter(A), queue.clients.len()), (0, 1));
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
