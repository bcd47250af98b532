//! Which blocks there are, and in which pack.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::name::{BlockName, Namer};
use super::pack::{BlockRecord, PackIndex};
use super::reader::Wanted;

/// A pack that others can read.
#[derive(Debug)]
pub(super) struct Pack {
    pub(super) path: PathBuf,
    pub(super) index: PackIndex,
}

/// Where a block is.
#[derive(Debug, Clone)]
pub(super) struct BlockLocation {
    pub(super) pack: Arc<Pack>,
    pub(super) index: usize,
}

impl BlockLocation {
    /// The request for the block.
    pub(super) fn wanted(&self) -> Wanted {
        let BlockRecord { name, parent, num_grouped, is_salted, token_ids } =
            self.pack.index.records[self.index].clone();
        Wanted { name, parent, num_grouped: num_grouped as usize, is_salted, token_ids }
    }
}

/// A block of this model can be read, or no longer.
#[derive(Debug, Clone)]
pub(super) enum Change {
    Added(BlockLocation),
    Removed(BlockName),
}

/// The index from names to locations.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    /// An inner none if it will never be known.
    namer: OnceLock<Option<Namer>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    locations: HashMap<BlockName, BlockLocation>,
    /// Blocks that are queued for a pack.
    expected: HashSet<BlockName>,
    /// Files that were scanned: packs of this model, and unusable ones.
    packs: HashMap<PathBuf, Option<Arc<Pack>>>,
    /// Changes since the last call, if there is a subscriber.
    changes: Option<Vec<Change>>,
}

impl State {
    fn note(&mut self, change: impl FnOnce() -> Change) {
        if let Some(changes) = &mut self.changes {
            changes.push(change());
        }
    }
}

impl Shelf {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn open(&self, namer: Option<Namer>) {
        // It is reported once.
        let _ = self.namer.set(namer);
    }

    pub(super) fn namer(&self) -> Option<&Namer> {
        self.namer.get()?.as_ref()
    }

    /// Whether the fingerprint is not known yet.
    pub(super) fn is_pending(&self) -> bool {
        self.namer.get().is_none()
    }

    pub(super) fn has(&self, name: BlockName) -> bool {
        let state = self.state();
        state.locations.contains_key(&name) || state.expected.contains(&name)
    }

    pub(super) fn num_readable(&self, names: &[BlockName]) -> usize {
        let state = self.state();
        names.iter().take_while(|name| state.locations.contains_key(name)).count()
    }

    pub(super) fn location(&self, name: BlockName) -> Option<BlockLocation> {
        self.state().locations.get(&name).cloned()
    }

    /// Records a queued block; false if it is stored or queued already.
    pub(super) fn expect(&self, name: BlockName) -> bool {
        let mut state = self.state();
        !state.locations.contains_key(&name) && state.expected.insert(name)
    }

    pub(super) fn forget_expected(&self, names: &[BlockName]) {
        let mut state = self.state();
        for name in names {
            state.expected.remove(name);
        }
    }

    pub(super) fn num_packs(&self) -> usize {
        self.state().packs.values().flatten().count()
    }

    pub(super) fn knows(&self, path: &Path) -> bool {
        self.state().packs.contains_key(path)
    }

    /// Takes up a pack, or notes that a file is of no use.
    pub(super) fn add(&self, path: &Path, index: Option<PackIndex>) {
        let mut state = self.state();
        let pack = index.map(|index| Arc::new(Pack { path: path.to_owned(), index }));
        if let Some(pack) = &pack {
            for (index, record) in pack.index.records.iter().enumerate() {
                state.expected.remove(&record.name);
                let location = BlockLocation { pack: Arc::clone(pack), index };
                if state.locations.insert(record.name, location.clone()).is_none() {
                    state.note(|| Change::Added(location));
                }
            }
        }
        state.packs.insert(path.to_owned(), pack);
    }

    /// Starts to record changes, beginning with all existing blocks.
    pub(super) fn record_changes(&self) {
        let mut state = self.state();
        let all = state.locations.values().cloned().map(Change::Added).collect();
        state.changes = Some(all);
    }

    /// Takes the changes since the last call.
    pub(super) fn take_changes(&self) -> Vec<Change> {
        self.state().changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Whether a record has anything in it.
    pub(super) fn has_changes(&self) -> bool {
        self.state().changes.as_ref().is_some_and(|changes| !changes.is_empty())
    }

    /// Forgets the blocks of a pack that was removed or cannot be used.
    pub(super) fn drop_blocks(&self, path: &Path) {
        let mut state = self.state();
        if let Some(pack) = state.packs.get_mut(path).and_then(Option::take) {
            let is_of = |location: &BlockLocation| Arc::ptr_eq(&location.pack, &pack);
            for record in &pack.index.records {
                if state.locations.get(&record.name).is_some_and(is_of) {
                    state.locations.remove(&record.name);
                    state.note(|| Change::Removed(record.name));
                }
            }
        }
    }

    /// Forgets packs that are not among these files any more.
    pub(super) fn retain(&self, exists: impl Fn(&Path) -> bool) {
        let gone: Vec<PathBuf> = self.state().packs.keys().filter(|path| !exists(path)).cloned().collect();
        for path in gone {
            self.drop_blocks(&path);
            self.state().packs.remove(&path);
        }
    }
}
