//! Admission: how many sequences may be unfinished, in all and for each client. Each of the `n` outputs of
//! each prompt is one.
//!
//! One client may have all permits. Half as many more exist for clients below their fair share. So no client
//! has to wait for another one's sequences to be admitted. An admitted sequence is never rejected.

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
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    num_permits: usize,
    group: ClientId,
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
        let limit = running.saturating_add(self.waiting);
        if count > limit {
            let message = format!(
                "the prompts have {count} answers together; at most {limit} are accepted at once: {running} running \
                 (--max-num-seqs) and {} waiting (--max-waiting); send several requests",
                self.waiting
            );
            return Err(ApiError::invalid("prompt", message));
        }
        let mut issued = lock(&self.issued);
        let total = issued.total.saturating_add(count);
        let own = issued.clients.get(&client.id).map_or(0, |holder| holder.num_permits);
        let share = issued.share(client, limit);
        let is_modest = own.saturating_add(count) as u64 <= share.max(1);
        if total > limit && !(is_modest && total <= limit.saturating_add(limit.div_ceil(2))) {
            return Err(ApiError::busy(format!(
                "{} answers are unfinished, {own} of them this client's, and {count} more are requested; the limit \
                 is {limit}: {running} running (--max-num-seqs) and {} waiting (--max-waiting)",
                issued.total, self.waiting
            )));
        }
        issued.total = total;
        let holder = Holder { num_permits: own + count, group: client.group, weight: client.weight };
        issued.clients.insert(client.id, holder);
        Ok((0..count).map(|_| Permit { issued: Arc::clone(&self.issued), client: client.id }).collect())
    }
}

impl IssuedPermits {
    /// A client's fair share of `limit` permits: a fraction of its group's share.
    fn share(&self, client: &Client, limit: usize) -> u64 {
        let others = self.clients.iter().filter(|(id, _)| **id != client.id);
        let mut groups: HashMap<ClientId, u64> = HashMap::new();
        let mut num_sharing = 1;
        for (_, holder) in others {
            if holder.group == client.group {
                num_sharing += 1;
            } else {
                groups.insert(holder.group, u64::from(holder.weight.get()));
            }
        }
        let weight = u64::from(client.weight.get());
        limit as u64 * weight / (weight + groups.values().sum::<u64>()) / num_sharing
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut issued = lock(&self.issued);
        issued.total -= 1;
        if let Some(holder) = issued.clients.get_mut(&self.client) {
            holder.num_permits -= 1;
            if holder.num_permits == 0 {
                issued.clients.remove(&self.client);
            }
        }
    }
}

fn lock(issued: &Mutex<IssuedPermits>) -> MutexGuard<'_, IssuedPermits> {
    issued.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderMap;

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
        // Half of eight is B's fair share, and four permits exist beyond the eight.
        assert!(take(&b, 5).is_err());
        let second = take(&b, 3).unwrap();
        // C has twice the weight of A and of B: four of eight. One permit is free.
        assert!(take(&c, 2).is_err());
        let third = take(&c, 1).unwrap();
        assert!(take(&b, 1).is_err() && take(&c, 1).is_err());
        // While others are above their share, A gets only the rest.
        first.truncate(5);
        assert!(take(&a, 1).is_err());
        assert!(take(&c, 3).is_ok());
        first.truncate(3);
        assert!(take(&a, 1).is_ok());
        drop((first, second, third));
        let issued = lock(&admission.issued);
        assert_eq!((issued.total, issued.clients.len()), (0, 0));
        // One sequence always gets a permit, even where none may wait.
        let narrow = AdmissionControl::new(0);
        let one = narrow.take(1, &a, 1).unwrap();
        assert!(narrow.take(1, &a, 1).is_err());
        assert!(narrow.take(1, &b, 1).is_ok());
        drop(one);
    }
}
