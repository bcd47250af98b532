//! Responses that are kept for later requests (`--responses-memory`). For each API key their number and bytes
//! are limited, and for all keys their bytes. The oldest are evicted first. Only the key that made a response
//! finds it.
//!
//! A response is kept with the whole conversation before it, so that no eviction can break it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use super::access::new_id;
use super::account::charge;
use super::auth::Caller;
use super::error::ApiError;
use super::values;
use tinyvllm::quoted;

/// Most bytes of one key's responses, with their conversations, as JSON.
const MAX_BYTES: usize = 64 << 20;
/// Most bytes of the conversation before a response, as JSON. Every request holds it while its response is
/// made.
const MAX_INPUT_BYTES: usize = 4 << 20;

/// The responses of all keys.
#[derive(Debug)]
pub(super) struct Memory {
    capacity: usize,
    /// Limits for one key, and for all.
    max_bytes: usize,
    max_bytes_together: usize,
    shelves: Mutex<HashMap<usize, Shelf>>,
}

/// The responses of one key, oldest first.
#[derive(Debug, Default)]
struct Shelf {
    responses: VecDeque<Arc<StoredResponse>>,
    num_bytes: usize,
}

/// A response and the items of the conversation before it, as JSON.
#[derive(Debug, Default)]
pub(super) struct StoredResponse {
    id: String,
    response: String,
    input: String,
    /// The ids of the items in both.
    item_ids: Vec<String>,
}

impl StoredResponse {
    /// Stores the conversation before there is a response. Items without ids get them.
    ///
    /// # Errors
    /// 400 if it is too large.
    pub(super) fn begin(mut input: Vec<Value>) -> Result<Self, ApiError> {
        for item in &mut input {
            if let Some(fields) = item.as_object_mut()
                && !fields.get("id").is_some_and(Value::is_string)
            {
                fields.insert("id".to_owned(), format!("item_{}", new_id()).into());
                fields.entry("type").or_insert_with(|| "message".into());
            }
        }
        let item_ids = input.iter().filter_map(id_of).collect();
        let kept = Self { item_ids, input: Value::from(input).to_string(), ..Self::default() };
        if kept.num_bytes() > MAX_INPUT_BYTES {
            let message = format!(
                "store is true, but the conversation has {} bytes; at most {MAX_INPUT_BYTES} are kept; send store \
                 false",
                kept.num_bytes()
            );
            return Err(ApiError::invalid("store", message));
        }
        charge(kept.num_bytes())?;
        Ok(kept)
    }

    fn num_bytes(&self) -> usize {
        let ids: usize = self.item_ids.iter().map(String::len).sum();
        self.id.len() + self.response.len() + self.input.len() + ids
    }

    fn response(&self) -> Result<Value, ApiError> {
        Ok(values::read(self.response.as_bytes())?)
    }

    fn input(&self) -> Result<Vec<Value>, ApiError> {
        match values::read(self.input.as_bytes())? {
            Value::Array(items) => Ok(items),
            // `begin` wrote it, or nothing did.
            _ => Ok(Vec::new()),
        }
    }

    /// The conversation, including the answer.
    fn conversation(&self) -> Result<Vec<Value>, ApiError> {
        let mut items = self.input()?;
        if let Value::Array(output) = self.response()?["output"].take() {
            items.extend(output);
        }
        Ok(items)
    }
}

impl Shelf {
    /// Returns whether there was one.
    fn forget_oldest(&mut self) -> bool {
        let oldest = self.responses.pop_front();
        self.num_bytes -= oldest.as_ref().map_or(0, |oldest| oldest.num_bytes());
        oldest.is_some()
    }
}

impl Memory {
    /// Keeps at most this many responses of each key, and this many bytes of all keys.
    pub(super) fn new(capacity: usize, max_bytes_together: usize) -> Self {
        let max_bytes = MAX_BYTES.min(max_bytes_together);
        Self { capacity, max_bytes, max_bytes_together, shelves: Mutex::default() }
    }

    /// Whether responses are kept.
    pub(super) fn is_on(&self) -> bool {
        self.capacity > 0
    }

    /// Stores a response of this key.
    pub(super) fn keep(&self, caller: Caller, id: &str, response: &Value, question: StoredResponse) {
        let mut kept = StoredResponse { id: id.to_owned(), response: response.to_string(), ..question };
        let output = response["output"].as_array().into_iter().flatten();
        kept.item_ids.extend(output.filter_map(id_of));
        let mut shelves = self.shelves();
        let shelf = shelves.entry(caller.0).or_default();
        shelf.num_bytes += kept.num_bytes();
        shelf.responses.push_back(Arc::new(kept));
        while shelf.responses.len() > self.capacity || shelf.num_bytes > self.max_bytes {
            if !shelf.forget_oldest() {
                break;
            }
        }
        // The largest owner loses first, so that many keys cannot evict responses of others.
        let mut together: usize = shelves.values().map(|shelf| shelf.num_bytes).sum();
        while together > self.max_bytes_together {
            let Some(largest) = shelves.values_mut().max_by_key(|shelf| shelf.num_bytes) else { break };
            let before = largest.num_bytes;
            if !largest.forget_oldest() {
                break;
            }
            together -= before - largest.num_bytes;
        }
    }

    /// Finds a response of this key.
    ///
    /// # Errors
    /// 404 if it does not exist.
    pub(super) fn response(&self, caller: Caller, id: &str) -> Result<Value, ApiError> {
        let kept = self.find(caller, id);
        kept.ok_or_else(|| ApiError::no_such_response(id))?.response()
    }

    /// Checks that a response of this key exists.
    ///
    /// # Errors
    /// 404 if it does not.
    pub(super) fn require(&self, caller: Caller, id: &str) -> Result<(), ApiError> {
        self.find(caller, id).map(|_| ()).ok_or_else(|| ApiError::no_such_response(id))
    }

    /// The items before a response of this key.
    ///
    /// # Errors
    /// 404 if it does not exist.
    pub(super) fn input(&self, caller: Caller, id: &str) -> Result<Vec<Value>, ApiError> {
        let kept = self.find(caller, id);
        kept.ok_or_else(|| ApiError::no_such_response(id))?.input()
    }

    /// Deletes a response of this key.
    ///
    /// # Errors
    /// 404 if it does not exist.
    pub(super) fn forget(&self, caller: Caller, id: &str) -> Result<(), ApiError> {
        let mut shelves = self.shelves();
        let found = shelves.get_mut(&caller.0).and_then(|shelf| {
            let position = shelf.responses.iter().position(|kept| kept.id == id)?;
            let kept = shelf.responses.remove(position)?;
            shelf.num_bytes -= kept.num_bytes();
            Some(())
        });
        found.ok_or_else(|| ApiError::no_such_response(id))
    }

    /// The items of the conversation up to and including a response of this key.
    ///
    /// # Errors
    /// 400 if no responses are kept, or this one does not exist.
    pub(super) fn conversation(&self, caller: Caller, id: &str) -> Result<Vec<Value>, ApiError> {
        let param = "previous_response_id";
        self.require_on(param, "send the whole conversation in input")?;
        let kept = self.find(caller, id);
        kept.ok_or_else(|| ApiError::no_previous_response(id))?.conversation()
    }

    /// Replaces references to stored items of this key by the items.
    ///
    /// # Errors
    /// 400 if no responses are kept, an item does not exist, or two references have the same item. So the
    /// result is never larger than what is stored.
    pub(super) fn resolve(&self, caller: Caller, items: Vec<Value>) -> Result<Vec<Value>, ApiError> {
        let reference = |item: &Value| is_reference(item).then(|| id_of(item).unwrap_or_default());
        let mut wanted: HashSet<String> = items.iter().filter_map(reference).collect();
        if wanted.is_empty() {
            return Ok(items);
        }
        self.require_on("input", "send the items themselves, as clients do with store: false")?;
        let mut found = HashMap::new();
        for kept in self.all(caller) {
            if kept.item_ids.iter().any(|id| wanted.contains(id)) {
                let items = kept.conversation()?.into_iter();
                found.extend(items.filter_map(|item| Some((wanted.take(&id_of(&item)?)?, item))));
            }
        }
        let items = items.into_iter().enumerate().map(|(index, item)| {
            let Some(id) = reference(&item) else { return Ok(item) };
            found.remove(&id).ok_or_else(|| {
                let path = format!("input[{index}]");
                let message = format!(
                    "{path} refers to the item {}, which is not stored or is referred to twice; send the item \
                     itself",
                    quoted(&id)
                );
                ApiError::invalid(path, message)
            })
        });
        items.collect()
    }

    fn require_on(&self, param: &'static str, way_out: &str) -> Result<(), ApiError> {
        if self.is_on() {
            return Ok(());
        }
        let message = format!(
            "{param} needs stored responses, and this server stores none; start it with \
             --responses-memory, or {way_out}"
        );
        Err(ApiError::unsupported(param, message))
    }

    fn find(&self, caller: Caller, id: &str) -> Option<Arc<StoredResponse>> {
        self.shelves().get(&caller.0)?.responses.iter().find(|kept| kept.id == id).cloned()
    }

    /// The responses of this key, newest first.
    fn all(&self, caller: Caller) -> Vec<Arc<StoredResponse>> {
        let shelves = self.shelves();
        shelves.get(&caller.0).map_or_else(Vec::new, |shelf| shelf.responses.iter().rev().cloned().collect())
    }

    fn shelves(&self) -> MutexGuard<'_, HashMap<usize, Shelf>> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the item refers to a stored one. An id without a type does so too.
fn is_reference(item: &Value) -> bool {
    let has_id_only = |fields: &serde_json::Map<String, Value>| {
        fields.get("id").is_some_and(Value::is_string)
            && fields.iter().all(|(name, value)| name == "id" || name == "type" && value.is_null())
    };
    item["type"] == "item_reference" || item.as_object().is_some_and(has_id_only)
}

fn id_of(item: &Value) -> Option<String> {
    item["id"].as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NO_BOUND: usize = usize::MAX;

    fn keep(memory: &Memory, caller: usize, id: &str, text: &str) {
        let output =
            json!({"id": format!("msg_{id}"), "type": "message", "role": "assistant", "content": text});
        let input = json!({"role": "user", "content": text});
        let response = json!({"id": id, "output": [output]});
        memory.keep(Caller(caller), id, &response, StoredResponse::begin(vec![input]).unwrap());
    }

    #[test]
    fn the_oldest_are_forgotten_and_only_their_owner_finds_them() {
        let memory = Memory::new(2, NO_BOUND);
        for id in ["a", "b", "c"] {
            keep(&memory, 1, id, "x");
        }
        keep(&memory, 2, "d", "x");
        let find = |caller: usize, id: &str| memory.response(Caller(caller), id).is_ok();
        assert_eq!(["a", "b", "c", "d"].map(|id| find(1, id)), [false, true, true, false]);
        assert_eq!((find(2, "d"), find(2, "c")), (true, false));
        assert!(memory.forget(Caller(2), "c").is_err() && memory.input(Caller(2), "c").is_err());
        memory.forget(Caller(1), "b").unwrap();
        assert!(!find(1, "b") && memory.forget(Caller(1), "b").is_err());
        memory.forget(Caller(1), "c").unwrap();
        assert_eq!(memory.shelves()[&1].num_bytes, 0);
    }

    #[test]
    fn bytes_are_bounded_for_each_key() {
        let memory = Memory { max_bytes: 2_000, ..Memory::new(100, NO_BOUND) };
        keep(&memory, 2, "other", "x");
        for round in 0..50 {
            keep(&memory, 1, &format!("r{round}"), &"x".repeat(round * 10));
            let shelves = memory.shelves();
            let shelf = &shelves[&1];
            assert!(shelf.num_bytes <= 2_000);
            assert_eq!(shelf.num_bytes, shelf.responses.iter().map(|kept| kept.num_bytes()).sum::<usize>());
        }
        assert!(memory.response(Caller(1), "r49").is_ok() && memory.response(Caller(1), "r40").is_err());
        keep(&memory, 1, "large", &"x".repeat(5_000));
        assert!(memory.response(Caller(1), "large").is_err());
        assert!(memory.response(Caller(2), "other").is_ok());
    }

    #[test]
    fn bytes_are_bounded_for_all_keys_together() {
        let memory = Memory::new(100, 20_000);
        keep(&memory, 0, "first", &"x".repeat(500));
        for caller in 1..20 {
            for id in ["a", "b"] {
                keep(&memory, caller, id, &"x".repeat(caller * 10));
            }
            let shelves = memory.shelves();
            assert!(shelves.values().map(|shelf| shelf.num_bytes).sum::<usize>() <= 20_000);
        }
        // Owners of much lose before owners of little.
        keep(&memory, 0, "large", &"x".repeat(8_000));
        assert!(memory.response(Caller(1), "a").is_ok() && memory.response(Caller(0), "large").is_err());
    }

    #[test]
    fn conversations_and_items_are_found_by_their_owner() {
        let memory = Memory::new(2, NO_BOUND);
        keep(&memory, 1, "a", "hello");
        let items = memory.conversation(Caller(1), "a").unwrap();
        assert_eq!(
            (items.len(), &items[0]["role"], &items[1]["role"]),
            (2, &json!("user"), &json!("assistant"))
        );
        assert!(items[0]["id"].as_str().unwrap().starts_with("item_"));
        let plain = json!({"role": "user", "content": "x"});
        let reference = json!({"type": "item_reference", "id": "msg_a"});
        let given = vec![plain.clone(), reference.clone()];
        assert_eq!(memory.resolve(Caller(1), given.clone()).unwrap(), [plain.clone(), items[1].clone()]);
        let short = vec![plain.clone(), json!({"id": "msg_a"})];
        assert_eq!(memory.resolve(Caller(1), short).unwrap(), [plain.clone(), items[1].clone()]);
        let param = |error: ApiError| error.body()["error"]["param"].as_str().unwrap().to_owned();
        assert_eq!(param(memory.resolve(Caller(2), given.clone()).unwrap_err()), "input[1]");
        // A reference must not multiply a large item.
        let twice = vec![reference.clone(), reference];
        assert_eq!(param(memory.resolve(Caller(1), twice).unwrap_err()), "input[1]");
        assert_eq!(param(memory.conversation(Caller(2), "a").unwrap_err()), "previous_response_id");
        let large = json!({"role": "user", "content": "x", "unknown": "x".repeat(MAX_INPUT_BYTES)});
        assert_eq!(param(StoredResponse::begin(vec![large]).unwrap_err()), "store");
        let off = Memory::new(0, NO_BOUND);
        assert_eq!(off.resolve(Caller(1), vec![plain.clone()]).unwrap(), [plain]);
        for error in
            [off.conversation(Caller(1), "a").unwrap_err(), off.resolve(Caller(1), given).unwrap_err()]
        {
            assert!(error.body()["error"]["message"].as_str().unwrap().contains("--responses-memory"));
        }
        keep(&off, 1, "a", "x");
        assert!(off.response(Caller(1), "a").is_err());
    }
}
