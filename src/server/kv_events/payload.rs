//! A batch in vLLM's format: a list of the time, the events as maps, and the rank.

use serde::Serialize;

use super::Change;
use tinyvllm::engine::{CacheEvent, Medium};
use tinyvllm::{Error, Result};

/// There is only one copy of the model.
const DATA_PARALLEL_RANK: u32 = 0;

#[derive(Serialize)]
#[serde(tag = "type")]
enum Event {
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: usize,
        lora_id: Option<u32>,
        medium: &'static str,
        lora_name: Option<&'static str>,
    },
    BlockRemoved {
        block_hashes: Vec<u64>,
        medium: &'static str,
    },
    AllBlocksCleared,
}

/// A batch in MessagePack. `time` is in seconds since 1970.
///
/// # Errors
/// If it cannot be encoded, which is a bug.
pub(super) fn encode(time: f64, change: Change) -> Result<Vec<u8>> {
    let batch = (time, events(change), DATA_PARALLEL_RANK);
    rmp_serde::to_vec_named(&batch)
        .map_err(|error| Error::internal(format!("a batch of KV events cannot be written: {error}")))
}

/// vLLM's name for a medium. vLLM says `GPU` for the cache on every device. Subscribers use `CPU` for blocks
/// that have to be copied first.
fn name_of(medium: Medium) -> &'static str {
    match medium {
        Medium::Cache => "GPU",
        Medium::Host => "CPU",
        Medium::Disk => "DISK",
    }
}

/// Merges consecutive blocks of one medium into one event, and also blocks that are removed together.
fn events(change: Change) -> Vec<Event> {
    let Change::Blocks(changes) = change else { return vec![Event::AllBlocksCleared] };
    let mut events: Vec<Event> = Vec::new();
    for change in changes {
        match (events.last_mut(), change) {
            (
                Some(Event::BlockStored { block_hashes, token_ids, medium, .. }),
                CacheEvent::Stored { hash, parent: Some(parent), token_ids: more, medium: own },
            ) if block_hashes.last() == Some(&parent) && *medium == name_of(own) => {
                block_hashes.push(hash);
                token_ids.extend(more);
            }
            (_, CacheEvent::Stored { hash, parent, token_ids, medium }) => events.push(Event::BlockStored {
                block_hashes: vec![hash],
                parent_block_hash: parent,
                block_size: token_ids.len(),
                token_ids,
                lora_id: None,
                medium: name_of(medium),
                lora_name: None,
            }),
            (
                Some(Event::BlockRemoved { block_hashes, medium }),
                CacheEvent::Removed { hash, medium: own },
            ) if *medium == name_of(own) => block_hashes.push(hash),
            (_, CacheEvent::Removed { hash, medium }) => {
                events.push(Event::BlockRemoved { block_hashes: vec![hash], medium: name_of(medium) });
            }
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(change: Change) -> Value {
        rmp_serde::from_slice(&encode(1.5, change).unwrap()).unwrap()
    }

    fn stored(hash: u64, parent: Option<u64>, token_ids: [u32; 2]) -> CacheEvent {
        CacheEvent::Stored { hash, parent, token_ids: token_ids.to_vec(), medium: Medium::Cache }
    }

    #[test]
    fn events_are_maps_in_a_list() {
        let changes = vec![
            CacheEvent::Removed { hash: 8, medium: Medium::Cache },
            CacheEvent::Removed { hash: u64::MAX, medium: Medium::Cache },
            stored(1, None, [5, 6]),
            stored(2, Some(1), [7, 8]),
            stored(4, Some(1), [7, 9]),
            stored(5, None, [1, 1]),
        ];
        let block = |hashes: Value, parent: Value, tokens: Value| {
            json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
                   "block_size": 2, "lora_id": null, "medium": "GPU", "lora_name": null})
        };
        let wanted = json!([1.5, [
            {"type": "BlockRemoved", "block_hashes": [8, u64::MAX], "medium": "GPU"},
            block(json!([1, 2]), Value::Null, json!([5, 6, 7, 8])),
            block(json!([4]), json!(1), json!([7, 9])),
            block(json!([5]), Value::Null, json!([1, 1])),
        ], 0]);
        assert_eq!(read(Change::Blocks(changes)), wanted);
        assert_eq!(read(Change::Cleared), json!([1.5, [{"type": "AllBlocksCleared"}], 0]));
    }

    #[test]
    fn media_are_distinguished() {
        let medium =
            |hash, parent, medium| CacheEvent::Stored { hash, parent, token_ids: vec![1, 2], medium };
        let changes = vec![
            medium(1, None, Medium::Cache),
            medium(2, Some(1), Medium::Disk),
            medium(3, Some(2), Medium::Disk),
            CacheEvent::Removed { hash: 1, medium: Medium::Cache },
            CacheEvent::Removed { hash: 1, medium: Medium::Host },
        ];
        let batch = read(Change::Blocks(changes));
        let events_in =
            |index: usize| (batch[1][index]["medium"].clone(), batch[1][index]["block_hashes"].clone());
        let wanted = [("GPU", json!([1])), ("DISK", json!([2, 3])), ("GPU", json!([1])), ("CPU", json!([1]))];
        for (index, (medium, hashes)) in wanted.into_iter().enumerate() {
            assert_eq!(events_in(index), (json!(medium), hashes));
        }
    }
}
