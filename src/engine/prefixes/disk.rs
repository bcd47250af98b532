//! The store of files as a tier.

use std::collections::HashMap;
use std::time::Duration;

use super::tier::{BlockKey, Contents, Deliver, Delivery, Fetch, Tier};
use crate::Result;
use crate::engine::EngineStats;
use crate::kv_cache::{BlockHash, BlockHasher, BlockId, CacheEvent, Medium};
use crate::prefix_store::{BlockName, Fetched, Namer, NewBlock, PrefixStore, StoreChange, Wanted};
use crate::runner::KvCache;

/// Names in the cache of blocks that are in files, for subscribers of both.
#[derive(Default)]
pub(super) struct ReportedNames {
    hashes: HashMap<BlockName, BlockHash>,
    /// Blocks whose parent is unnamed in the cache, by that parent: their names depend on its name.
    waiting: HashMap<BlockName, Vec<Wanted>>,
}

impl ReportedNames {
    /// The events of these changes.
    fn events(&mut self, changes: Vec<StoreChange>, namer: &Namer, hasher: &BlockHasher) -> Vec<CacheEvent> {
        let (store_root, root) = (namer.root(None), hasher.root(None));
        let mut events = Vec::new();
        for change in changes {
            match change {
                StoreChange::Added(block) if block.is_salted => {}
                StoreChange::Added(block) => {
                    // Those that have waited for it follow.
                    let mut added = vec![block];
                    while let Some(block) = added.pop() {
                        let before = match block.parent == store_root {
                            true => Some(root),
                            false => self.hashes.get(&block.parent).copied(),
                        };
                        let Some(before) = before else {
                            self.waiting.entry(block.parent).or_default().push(block);
                            continue;
                        };
                        let hash = hasher.child(before, &block.token_ids, block.num_grouped);
                        let parent = (block.parent != store_root).then_some(before);
                        self.hashes.insert(block.name, hash);
                        added.extend(self.waiting.remove(&block.name).unwrap_or_default());
                        events.push(CacheEvent::stored(hash, parent, block.token_ids, Medium::Disk));
                    }
                }
                StoreChange::Removed(name) => {
                    if let Some(hash) = self.hashes.remove(&name) {
                        events.push(CacheEvent::removed(hash, Medium::Disk));
                    } else {
                        self.waiting
                            .values_mut()
                            .for_each(|blocks| blocks.retain(|block| block.name != name));
                    }
                }
            }
        }
        self.waiting.retain(|_, blocks| !blocks.is_empty());
        events
    }
}

/// The store, and its reported names.
pub(super) struct DiskTier {
    store: PrefixStore,
    reported: ReportedNames,
}

impl DiskTier {
    pub(super) fn new(store: PrefixStore) -> Self {
        Self { store, reported: ReportedNames::default() }
    }
}

impl Tier for DiskTier {
    fn medium(&self) -> Medium {
        Medium::Disk
    }

    fn is_ready(&self) -> bool {
        self.store.namer().is_some()
    }

    fn is_pending(&self) -> bool {
        self.store.is_pending()
    }

    fn time_left(&self) -> Option<Duration> {
        self.store.hashing_time_left()
    }

    fn is_read_always(&self) -> bool {
        self.store.reads_always()
    }

    fn num_readable(&self, blocks: &[BlockKey], start: usize) -> usize {
        let Some(namer) = self.store.namer() else { return 0 };
        // Each has its name from the one before.
        let names: Vec<_> =
            blocks.iter().map_while(|block| block.names(namer)).map(|names| names.0).collect();
        self.store.num_readable(names.get(start..).unwrap_or_default())
    }

    fn fetch(&mut self, blocks: Vec<BlockKey>, mut deliver: Deliver) -> Fetch {
        let Some(namer) = self.store.namer() else { return Fetch::Refused };
        let wanted = |block: BlockKey| {
            let (name, parent) = block.names(namer)?;
            let BlockKey { token_ids, position, .. } = block;
            let (is_salted, num_grouped) =
                position.map(|position| (position.line().is_salted(), position.num_grouped))?;
            Some(Wanted { name, parent, num_grouped, is_salted, token_ids })
        };
        let wanted = blocks.into_iter().map_while(wanted).collect();
        let deliver = move |fetched| {
            deliver(match fetched {
                Fetched::Block(bytes, time) => Delivery::Block(Contents::Bytes(bytes), time),
                Fetched::End => Delivery::End,
            })
        };
        if self.store.fetch(wanted, deliver) { Fetch::Comes } else { Fetch::Refused }
    }

    fn has(&self, block: &BlockKey) -> Option<bool> {
        let (name, _) = block.names(self.store.namer()?)?;
        Some(self.store.has(name))
    }

    fn num_free(&self) -> usize {
        self.store.num_free()
    }

    fn put(&mut self, blocks: Vec<(BlockId, BlockKey)>, cache: &mut KvCache) -> Result<()> {
        let Some(namer) = self.store.namer() else { return Ok(()) };
        let ids: Vec<u32> = blocks.iter().map(|(block, _)| block.0).collect();
        let mut contents = vec![vec![0; cache.block_bytes()]; ids.len()];
        cache.read_blocks(&ids, &mut contents)?;
        for ((_, block), bytes) in blocks.into_iter().zip(contents) {
            let Some((name, parent)) = block.names(namer) else { continue };
            let BlockKey { token_ids, position: Some(position), .. } = block else { continue };
            let (is_salted, num_grouped) = (position.line().is_salted(), position.num_grouped);
            self.store.put(NewBlock { name, parent, num_grouped, is_salted, token_ids, bytes });
        }
        Ok(())
    }

    fn count_dropped(&mut self, num_blocks: usize) {
        self.store.count_dropped(num_blocks);
    }

    fn record_events(&mut self, on_change: Box<dyn Fn() + Send>) {
        self.store.record_changes(on_change);
    }

    fn take_events(&mut self, hasher: &BlockHasher) -> Vec<CacheEvent> {
        match self.store.namer() {
            Some(namer) => self.reported.events(self.store.take_changes(), namer, hasher),
            None => Vec::new(),
        }
    }

    fn notice(&self, line: &str) {
        self.store.notice(line);
    }

    fn report(&self, stats: &mut EngineStats) {
        stats.prefix_store = Some(self.store.stats());
    }
}
