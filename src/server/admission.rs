//! Admission: how many sequences may be unfinished, in all and for each client. Each of the `n` outputs of
//! each prompt is one.
//!
//! Every client may use the limit while permits are free. A client below its fair share is always admitted,
//! also beyond the limit. So no client has to wait for another one's sequences to be admitted, however many
//! came before. An admitted sequence is never rejected.
//!
//! The sum stays bounded, because the share of a client shrinks with each one that came before. Of `k`
//! clients with the same weight, each with a key of its own, the second one has half of the limit beyond it
//! at most, the third one a third: together `1 + 1/2 + … + 1/k` times the limit. Each has one permit at
//! least.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::clients::Client;
use super::error::ApiError;
use tinyvllm::engine::{ClientId, Weight};

/// Limits the unfinished sequences: the running ones, and `waiting` more.
pub(super) struct AdmissionControl {
    waiting: usize,
    issued: Arc<Mutex<IssuedPermits>>,
}

#[derive(Debug, Default)]
struct IssuedPermits {
    total: usize,
    /// Clients with permits.
    clients: HashMap<ClientId, Holder>,
    /// Their groups.
    groups: HashMap<ClientId, Group>,
    /// The sum of the groups' weights.
    weight: u64,
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    num_permits: usize,
    group: ClientId,
}

/// Clients with permits that have one key.
#[derive(Debug, Clone, Copy)]
struct Group {
    num_clients: u64,
    weight: Weight,
}

/// A sequence's permit, released on drop.
#[derive(Debug)]
pub(super) struct Permit {
    issued: Arc<Mutex<IssuedPermits>>,
    client: ClientId,
}

impl AdmissionControl {
    pub(super) fn new(waiting: usize) -> Self {
        Self { waiting, issued: Arc::default() }
    }

    /// Takes permits for `count` sequences of an engine with `running` running ones.
    ///
    /// # Errors
    /// 429 if too few permits are free, 400 if there are too few in all.
    pub(super) fn take(
        &self,
        running: usize,
        client: &Client,
        count: usize,
    ) -> Result<Vec<Permit>, ApiError> {
        let mut issued = lock(&self.issued);
        self.check_issued(&issued, running, client, count)?;
        issued.add(client, count);
        Ok((0..count).map(|_| Permit { issued: Arc::clone(&self.issued), client: client.id }).collect())
    }

    /// Checks whether [`Self::take`] would succeed now.
    ///
    /// # Errors
    /// Those of [`Self::take`].
    pub(super) fn check(&self, running: usize, client: &Client, count: usize) -> Result<(), ApiError> {
        self.check_issued(&lock(&self.issued), running, client, count)
    }

    fn check_issued(
        &self,
        issued: &IssuedPermits,
        running: usize,
        client: &Client,
        count: usize,
    ) -> Result<(), ApiError> {
        let limit = running.saturating_add(self.waiting);
        if count > limit {
            let message = format!(
                "the prompts have {count} answers together; at most {limit} are accepted at once: {running} running \
                 (--max-num-seqs) and {} waiting (--max-waiting); send several requests",
                self.waiting
            );
            return Err(ApiError::invalid("prompt", message));
        }
        let own = issued.clients.get(&client.id).map_or(0, |holder| holder.num_permits);
        let share = issued.share(client, limit).max(1);
        if issued.total.saturating_add(count) <= limit || own.saturating_add(count) as u64 <= share {
            return Ok(());
        }
        Err(ApiError::busy(format!(
            "{} answers are unfinished, {own} of them this client's, and {count} more are requested; the limit is \
             {limit}: {running} running (--max-num-seqs) and {} waiting (--max-waiting); this client's share is \
             {share}",
            issued.total, self.waiting
        )))
    }
}

impl IssuedPermits {
    /// A client's fair share of `limit` permits: a fraction of its group's share.
    fn share(&self, client: &Client, limit: usize) -> u64 {
        let weight = u64::from(client.weight.get());
        let group = self.groups.get(&client.group);
        let others = self.weight - group.map_or(0, |group| u64::from(group.weight.get()));
        let is_new = !self.clients.contains_key(&client.id);
        let num_sharing = group.map_or(0, |group| group.num_clients) + u64::from(is_new);
        (limit as u64).saturating_mul(weight) / (weight + others) / num_sharing
    }

    fn add(&mut self, client: &Client, count: usize) {
        self.total += count;
        let holder = self.clients.entry(client.id).or_insert(Holder { num_permits: 0, group: client.group });
        let is_new = holder.num_permits == 0;
        holder.num_permits += count;
        let group =
            self.groups.entry(client.group).or_insert(Group { num_clients: 0, weight: client.weight });
        if group.num_clients > 0 {
            self.weight -= u64::from(group.weight.get());
        }
        group.num_clients += u64::from(is_new);
        // The key file may have given it another weight since.
        group.weight = client.weight;
        self.weight += u64::from(client.weight.get());
    }

    /// Takes back a permit of this client.
    fn remove(&mut self, client: ClientId) {
        let Some(holder) = self.clients.get_mut(&client) else { return };
        self.total -= 1;
        holder.num_permits -= 1;
        if holder.num_permits > 0 {
            return;
        }
        let id = holder.group;
        self.clients.remove(&client);
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.num_clients -= 1;
        if group.num_clients == 0 {
            self.weight -= u64::from(group.weight.get());
            self.groups.remove(&id);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.issued).remove(self.client);
    }
}

fn lock(issued: &Mutex<IssuedPermits>) -> MutexGuard<'_, IssuedPermits> {
    issued.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use axum::http::HeaderMap;
    use proptest::prelude::*;

    use super::super::clients::Clients;
    use super::super::keys::FoundKey;
    use super::*;

    #[test]
    fn many_requests_of_one_client_leave_permits_for_others() {
        let admission = AdmissionControl::new(6);
        let clients = Clients::new(false);
        let client = |number, weight| {
            let key = FoundKey { number, weight: Weight::new(weight).unwrap() };
            clients.identify(&HeaderMap::new(), Some(key), [127, 0, 0, 1].into())
        };
        let take = |client: &Client, count| admission.take(2, client, count);
        let (a, b, c) = (client(1, 1), client(2, 1), client(3, 2));
        let mut first: Vec<_> = (0..8).map(|_| take(&a, 1).unwrap()).collect();
        let error = take(&a, 1).unwrap_err().body().to_string();
        assert!(error.contains("8 answers are unfinished, 8 of them this client's"), "{error}");
        // A request that can never fit must not be repeated.
        assert_eq!(take(&a, 9).unwrap_err().status(), 400);
        // Half of eight is B's fair share, beyond the eight that A has.
        assert!(take(&b, 5).is_err());
        let second = take(&b, 4).unwrap();
        // C has twice the weight of A and of B: four of eight.
        assert!(take(&c, 5).is_err());
        let third = take(&c, 4).unwrap();
        assert!(take(&b, 1).is_err() && take(&c, 1).is_err());
        // A is above its share, which is two of eight now, until so few are left that any client is admitted.
        first.truncate(3);
        assert!(take(&a, 1).is_err());
        first.truncate(1);
        first.push(take(&a, 1).unwrap());
        assert!(take(&a, 1).is_err());
        drop((second, third));
        assert!(take(&a, 6).is_ok());
        drop(first);
        let issued = lock(&admission.issued);
        assert_eq!((issued.total, issued.clients.len(), issued.groups.len(), issued.weight), (0, 0, 0, 0));
        // One sequence always gets a permit, even where none may wait.
        let narrow = AdmissionControl::new(0);
        let one = narrow.take(1, &a, 1).unwrap();
        assert!(narrow.take(1, &a, 1).is_err());
        assert!(narrow.take(1, &b, 1).is_ok());
        drop(one);
    }

    /// An arrival of this many sequences of a client, or else the end of all of one of its requests.
    #[derive(Debug, Clone)]
    struct Step {
        client: usize,
        arrives: Option<usize>,
        choice: prop::sample::Index,
    }

    fn step() -> impl Strategy<Value = Step> {
        let count = prop_oneof![3 => (1..4_usize).prop_map(Some), 1 => Just(Some(30)), 2 => Just(None)];
        (0..12_usize, count, any::<prop::sample::Index>()).prop_map(|(client, arrives, choice)| Step {
            client,
            arrives,
            choice,
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// A client is refused only above its share while the limit is reached, and the sum stays bounded.
        #[test]
        fn no_client_below_its_share_is_refused(
            steps in prop::collection::vec(step(), 1..200),
            has_names in any::<bool>(),
        ) {
            const LIMIT: usize = 30;
            let known = Clients::new(true);
            let clients: Vec<Client> = (0..12)
                .map(|number| {
                    // Three names for each key, or a key for each client.
                    let (key, weight) = if has_names { (number / 3, number / 3 % 2 + 1) } else { (number, 1) };
                    let mut headers = HeaderMap::new();
                    if has_names {
                        headers.insert("x-client-id", format!("name {number}").parse().unwrap());
                    }
                    let key = FoundKey { number: key, weight: Weight::new(weight as u32).unwrap() };
                    known.identify(&headers, Some(key), [127, 0, 0, 1].into())
                })
                .collect();
            let admission = AdmissionControl::new(LIMIT - 10);
            let mut held: Vec<(usize, Vec<Permit>)> = Vec::new();
            for Step { client, arrives, choice } in steps {
                let Some(count) = arrives else {
                    if !held.is_empty() {
                        held.swap_remove(choice.index(held.len()));
                    }
                    continue;
                };
                let of = |client: usize| {
                    held.iter().filter(|(owner, _)| *owner == client).map(|(_, permits)| permits.len()).sum::<usize>()
                };
                let active = |other: &usize| *other == client || of(*other) > 0;
                let total: usize = (0..12).map(of).sum();
                let group = |client: usize| clients[client].group;
                let weight = |client: usize| clients[client].weight.get() as usize;
                let weights: HashMap<ClientId, usize> =
                    (0..12).filter(active).map(|other| (group(other), weight(other))).collect();
                let num_sharing = (0..12).filter(active).filter(|other| group(*other) == group(client)).count();
                let share = LIMIT * weight(client) / weights.values().sum::<usize>() / num_sharing;
                let is_admitted = total + count <= LIMIT || of(client) + count <= share.max(1);
                let checked = admission.check(10, &clients[client], count).is_ok();
                let taken = admission.take(10, &clients[client], count);
                prop_assert_eq!((checked, taken.is_ok()), (is_admitted, is_admitted));
                held.extend(taken.map(|permits| (client, permits)));
                if !has_names {
                    let num_active = held.iter().map(|(client, _)| client).collect::<HashSet<_>>().len();
                    let most: f64 = (1..=num_active).map(|place| LIMIT as f64 / place as f64).sum();
                    prop_assert!(lock(&admission.issued).total as f64 <= most);
                }
            }
            drop(held);
            let issued = lock(&admission.issued);
            prop_assert_eq!((issued.total, issued.clients.len(), issued.groups.len(), issued.weight), (0, 0, 0, 0));
        }
    }
}
