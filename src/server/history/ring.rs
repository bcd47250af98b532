//! Which records are kept: a fixed number in all, and no client loses one to a client with more.
//!
//! When it is full, the oldest record of the largest owner is evicted; keys are compared before the clients of one key
//! are. So a client that sends little finds its records again, however much others send.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;
use std::sync::Arc;

use super::Record;
use crate::auth::Caller;
use tinyvllm::engine::ClientId;

/// Sequences that a request may have on average before fewer requests are remembered.
const MEAN_NUM_SEQUENCES: usize = 8;

/// The records, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Ring {
    records: BTreeMap<u64, Arc<Record>>,
    next: u64,
    num_sequences: usize,
    clients_of: HashMap<Caller, HashMap<ClientId, ClientRecords>>,
}

/// What one client has.
#[derive(Debug, Default)]
struct ClientRecords {
    /// The oldest first.
    numbers: VecDeque<u64>,
    num_sequences: usize,
}

impl Ring {
    /// Takes a record of this client in, and lets others go until there are no more than `capacity`.
    pub(super) fn push(&mut self, record: Arc<Record>, client: ClientId, capacity: usize) {
        let num_sequences = record.num_sequences();
        let records = self.clients_of.entry(record.identity.caller).or_default().entry(client).or_default();
        records.numbers.push_back(self.next);
        records.num_sequences += num_sequences;
        self.num_sequences += num_sequences;
        self.records.insert(self.next, record);
        self.next += 1;
        let max_num_sequences = capacity.saturating_mul(MEAN_NUM_SEQUENCES);
        // One request is bounded elsewhere, and its sender would find nothing else.
        while self.records.len() > capacity
            || self.num_sequences > max_num_sequences && self.records.len() > 1
        {
            self.forget_one();
        }
    }

    /// The records, the latest first.
    pub(super) fn latest(&self) -> impl Iterator<Item = &Arc<Record>> {
        self.records.values().rev()
    }

    fn forget_one(&mut self) {
        let all = self.clients_of.iter().map(|(caller, clients)| (*caller, Size::of(clients.values())));
        let Some(caller) = largest(all) else { return };
        let Some(clients) = self.clients_of.get_mut(&caller) else { return };
        let each = clients.iter().map(|(client, records)| (*client, Size::of([records])));
        let Some(client) = largest(each) else { return };
        let Some(records) = clients.get_mut(&client) else { return };
        if let Some(record) = records.numbers.pop_front().and_then(|number| self.records.remove(&number)) {
            let num_sequences = record.num_sequences();
            records.num_sequences -= num_sequences;
            self.num_sequences -= num_sequences;
        }
        if records.numbers.is_empty() {
            clients.remove(&client);
        }
        if clients.is_empty() {
            self.clients_of.remove(&caller);
        }
    }
}

/// How much is used; of equal owners, the one with the oldest record.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Size(usize, Reverse<u64>);

impl Size {
    fn of<'a>(clients: impl IntoIterator<Item = &'a ClientRecords>) -> Self {
        let (mut num_records, mut num_sequences, mut oldest) = (0, 0, u64::MAX);
        for records in clients {
            num_records += records.numbers.len();
            num_sequences += records.num_sequences;
            oldest = oldest.min(records.numbers.front().copied().unwrap_or(u64::MAX));
        }
        Self(num_sequences.max(num_records * MEAN_NUM_SEQUENCES), Reverse(oldest))
    }
}

fn largest<K: Copy + Eq + Hash>(sizes: impl Iterator<Item = (K, Size)>) -> Option<K> {
    sizes.max_by(|(_, one), (_, other)| one.cmp(other)).map(|(name, _)| name)
}
