//! The store of files as a tier.

use std::time::Duration;

use super::tier::{BlockKey, Contents, Deliver, Delivery, Place, Tier};
use crate::Result;
use crate::engine::EngineStats;
use crate::kv_cache::BlockId;
use crate::ops::KvCache;
use crate::prefix_store::{Fetched, NewBlock, PrefixStore, Wanted};

impl Tier for PrefixStore {
    fn is_ready(&self) -> bool {
        self.namer().is_some()
    }

    fn is_pending(&self) -> bool {
        Self::is_pending(self)
    }

    fn time_left(&self) -> Option<Duration> {
        self.hashing_time_left()
    }

    fn num_readable(&self, blocks: &[BlockKey], start: usize) -> usize {
        let Some(namer) = self.namer() else { return 0 };
        // Each has its name from the one before.
        let names: Vec<_> =
            blocks.iter().map_while(|block| block.names(namer)).map(|names| names.0).collect();
        Self::num_readable(self, names.get(start..).unwrap_or_default())
    }

    fn fetch(&mut self, blocks: Vec<BlockKey>, mut deliver: Deliver) -> bool {
        let Some(namer) = self.namer() else { return false };
        let wanted = |block: BlockKey| {
            let (name, parent) = block.names(namer)?;
            let is_salted = block.line().is_salted();
            let BlockKey { token_ids, place: Place { num_grouped, .. }, .. } = block;
            Some(Wanted { name, parent, num_grouped, is_salted, token_ids })
        };
        let wanted = blocks.into_iter().map_while(wanted).collect();
        Self::fetch(self, wanted, move |fetched| {
            deliver(match fetched {
                Fetched::Block(bytes, time) => Delivery::Block(Contents::Bytes(bytes), time),
                Fetched::End => Delivery::End,
            })
        })
    }

    fn has(&self, block: &BlockKey) -> Option<bool> {
        let (name, _) = block.names(self.namer()?)?;
        Some(Self::has(self, name))
    }

    fn num_free(&self) -> usize {
        Self::num_free(self)
    }

    fn put(&mut self, blocks: Vec<(BlockId, BlockKey)>, cache: &mut KvCache) -> Result<()> {
        let Some(namer) = self.namer() else { return Ok(()) };
        let ids: Vec<u32> = blocks.iter().map(|(block, _)| block.0).collect();
        let mut contents = vec![vec![0; cache.block_bytes()]; ids.len()];
        cache.read_blocks(&ids, &mut contents)?;
        for ((_, block), bytes) in blocks.into_iter().zip(contents) {
            let Some((name, parent)) = block.names(namer) else { continue };
            let is_salted = block.line().is_salted();
            let BlockKey { token_ids, place: Place { num_grouped, .. }, .. } = block;
            Self::put(self, NewBlock { name, parent, num_grouped, is_salted, token_ids, bytes });
        }
        Ok(())
    }

    fn count_dropped(&self, num_blocks: usize) {
        Self::count_dropped(self, num_blocks);
    }

    fn notice(&self, line: &str) {
        Self::notice(self, line);
    }

    fn report(&self, stats: &mut EngineStats) {
        stats.prefix_store = Some(self.stats());
    }
}
