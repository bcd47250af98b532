//! The waiting room: how many sequences may be unfinished, and whose they may be. Each of `n` and of a list of prompts
//! is one.
//!
//! One client may have as many as there are places. If others come then, there are half as many again for those
//! that have less than their share, so nobody has to wait for somebody else's sequences to be accepted, and what was
//! accepted is never turned away.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::clients::Client;
use super::error::ApiError;
use crate::engine::{ClientId, Weight};

/// Bounds the unfinished sequences: what runs, and `waiting` more.
pub(super) struct Room {
    waiting: usize,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    total: usize,
    /// Those with any.
    clients: HashMap<ClientId, Holder>,
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    num_places: usize,
    group: ClientId,
    weight: Weight,
}

/// The place of a sequence. It is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Seat {
    taken: Arc<Mutex<Taken>>,
    client: ClientId,
}

impl Room {
    pub(super) fn new(waiting: usize) -> Self {
        Self { waiting, taken: Arc::default() }
    }

    /// Takes places for `count` sequences beside an engine that runs so many.
    ///
    /// # Errors
    /// 429 if there is no room, 400 if there never is.
    pub(super) fn take(&self, running: usize, client: &Client, count: usize) -> Result<Vec<Seat>, ApiError> {
        let limit = running.saturating_add(self.waiting);
        if count > limit {
            let message = format!(
                "the prompts have {count} answers together; at most {limit} are accepted at once: {running} running \
                 (--max-num-seqs) and {} waiting (--max-waiting); send several requests",
                self.waiting
            );
            return Err(ApiError::invalid("prompt", message));
        }
        let mut taken = lock(&self.taken);
        let total = taken.total.saturating_add(count);
        let own = taken.clients.get(&client.id).map_or(0, |holder| holder.num_places);
        let share = taken.share(client, limit);
        let is_modest = own.saturating_add(count) as u64 <= share.max(1);
        if total > limit && !(is_modest && total <= limit.saturating_add(limit.div_ceil(2))) {
            return Err(ApiError::busy(format!(
                "{} answers are unfinished, {own} of them this client's, and {count} more are wanted; at most {limit} \
                 are accepted: {running} running (--max-num-seqs) and {} waiting (--max-waiting)",
                taken.total, self.waiting
            )));
        }
        taken.total = total;
        let holder = Holder { num_places: own + count, group: client.group, weight: client.weight };
        taken.clients.insert(client.id, holder);
        Ok((0..count).map(|_| Seat { taken: Arc::clone(&self.taken), client: client.id }).collect())
    }
}

impl Taken {
    /// What a client may have of so many places beside others: a part of that of its group.
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

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = lock(&self.taken);
        taken.total -= 1;
        if let Some(holder) = taken.clients.get_mut(&self.client) {
            holder.num_places -= 1;
            if holder.num_places == 0 {
                taken.clients.remove(&self.client);
            }
        }
    }
}

fn lock(taken: &Mutex<Taken>) -> MutexGuard<'_, Taken> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderMap;

    use super::super::clients::Clients;
    use super::super::keys::FoundKey;
    use super::*;

    #[test]
    fn a_crowd_leaves_room_for_others() {
        let room = Room::new(6);
        let clients = Clients::new(false);
        let client = |number, weight| {
            let key = FoundKey { number, weight: Weight::new(weight).unwrap() };
            clients.identify(&HeaderMap::new(), Some(key), [127, 0, 0, 1].into())
        };
        let take = |client: &Client, count| room.take(2, client, count);
        let (a, b, c) = (client(1, 1), client(2, 1), client(3, 2));
        let mut first: Vec<_> = (0..8).map(|_| take(&a, 1).unwrap()).collect();
        let error = take(&a, 1).unwrap_err().body().to_string();
        assert!(error.contains("8 answers are unfinished, 8 of them this client's"), "{error}");
        // What never fits is not to be sent again.
        assert_eq!(take(&a, 9).unwrap_err().status(), 400);
        // Half of eight is the share of B, and four places there are beyond the eight.
        assert!(take(&b, 5).is_err());
        let second = take(&b, 3).unwrap();
        // C has twice the weight of each: four of eight. There is one place left.
        assert!(take(&c, 2).is_err());
        let third = take(&c, 1).unwrap();
        assert!(take(&b, 1).is_err() && take(&c, 1).is_err());
        // While others are beyond their share, A gets no more than there is beside theirs.
        first.truncate(5);
        assert!(take(&a, 1).is_err());
        assert!(take(&c, 3).is_ok());
        first.truncate(3);
        assert!(take(&a, 1).is_ok());
        drop((first, second, third));
        let taken = lock(&room.taken);
        assert_eq!((taken.total, taken.clients.len()), (0, 0));
        // Somebody always has a place, also where nothing may wait.
        let narrow = Room::new(0);
        let one = narrow.take(1, &a, 1).unwrap();
        assert!(narrow.take(1, &a, 1).is_err());
        assert!(narrow.take(1, &b, 1).is_ok());
        drop(one);
    }
}
