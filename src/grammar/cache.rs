//! The grammars compiled last: clients send the same one again and again.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Grammar, GrammarSpec};

/// Grammars that are kept.
const CAPACITY: usize = 16;

/// The most recently used first.
#[derive(Debug, Default)]
pub(super) struct GrammarCache(Mutex<VecDeque<(GrammarSpec, Arc<Grammar>)>>);

impl GrammarCache {
    pub(super) fn get(&self, spec: &GrammarSpec) -> Option<Arc<Grammar>> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let index = entries.iter().position(|(other, _)| other == spec)?;
        let entry = entries.remove(index)?;
        let grammar = Arc::clone(&entry.1);
        entries.push_front(entry);
        Some(grammar)
    }

    pub(super) fn put(&self, spec: &GrammarSpec, grammar: &Arc<Grammar>) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.push_front((spec.clone(), Arc::clone(grammar)));
        let last = if entries.len() > CAPACITY { entries.pop_back() } else { None };
        drop(entries);
        // It can be large, and no request waits for that.
        drop(last);
    }
}
