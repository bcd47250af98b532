//! Which records are kept. Their number is limited, and no client loses a record to a client with more.
//!
//! When the ring is full, the oldest record of the largest owner is evicted. Keys are compared first, then
//! the clients of one key. So a client that sends few requests finds its records again, however many others
//! send.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;
use std::sync::Arc;

use super::Record;
use crate::auth::Caller;
use tinyvllm::engine::ClientId;

/// With more sequences for each request on average, fewer requests are kept.
const MEAN_NUM_SEQUENCES: usize = 8;

/// The records in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Ring {
    records: BTreeMap<u64, Arc<Record>>,
    next: u64,
    num_sequences: usize,
    clients_of: HashMap<Caller, HashMap<ClientId, ClientRecords>>,
}

/// The records of one client.
#[derive(Debug, Default)]
struct ClientRecords {
    /// Oldest first.
    numbers: VecDeque<u64>,
    num_sequences: usize,
}

impl Ring {
    /// Adds a record of this client. Evicts others until at most `capacity` are left.
    pub(super) fn push(&mut self, record: Arc<Record>, client: ClientId, capacity: usize) {
        let num_sequences = record.num_sequences();
        let records = self.clients_of.entry(record.identity.caller).or_default().entry(client).or_default();
        records.numbers.push_back(self.next);
        records.num_sequences += num_sequences;
        self.num_sequences += num_sequences;
        self.records.insert(self.next, record);
        self.next += 1;
        let max_num_sequences = capacity.saturating_mul(MEAN_NUM_SEQUENCES);
        // The size of one request has its own limit, and without this record its client would find nothing.
        while self.records.len() > capacity
            || self.num_sequences > max_num_sequences && self.records.len() > 1
        {
            self.forget_one();
        }
    }

    /// The records, latest first.
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

/// The order of owners by use; among equals, the one with the oldest record is evicted.
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
