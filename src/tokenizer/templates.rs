//! The chat templates in a model's files, by name. They are texts here, which nothing of this module reads.
//!
//! Invariant: an entry that is no text is remembered with the reason. Text is encoded without templates, so it keeps
//! nobody from using the tokenizer.

use std::collections::BTreeMap;

/// The name of the template for chats.
pub(super) const DEFAULT: &str = "default";
/// The name of the one for requests with tools.
const TOOL_USE: &str = "tool_use";

/// Sources by name, and why others are none.
#[derive(Debug, Default)]
pub(super) struct ChatTemplates {
    sources: BTreeMap<String, String>,
    unusable: BTreeMap<String, String>,
}

impl ChatTemplates {
    /// A template, in place of an earlier one of the same name.
    pub(super) fn insert(&mut self, name: impl Into<String>, source: impl Into<String>) {
        let name = name.into();
        self.unusable.remove(&name);
        self.sources.insert(name, source.into());
    }

    /// An entry that is no template, in place of an earlier one of the same name.
    pub(super) fn refuse(&mut self, name: impl Into<String>, why: impl Into<String>) {
        let name = name.into();
        self.sources.remove(&name);
        self.unusable.insert(name, why.into());
    }

    /// The same, unless there is one for chats.
    pub(super) fn refuse_default(&mut self, why: impl Into<String>) {
        if !self.sources.contains_key(DEFAULT) {
            self.refuse(DEFAULT, why);
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.sources.get(name).map(String::as_str)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.keys().map(String::as_str)
    }

    /// Why there is no template of this name although the files have an entry.
    pub(super) fn problem(&self, name: &str) -> Option<String> {
        let names: Vec<_> = self.names().collect();
        match self.unusable.get(name) {
            Some(why) => Some(why.clone()),
            None if name == DEFAULT && !names.is_empty() && self.get(DEFAULT).is_none() => Some(format!(
                "no chat template of the model is named {DEFAULT:?}; its names are {}",
                crate::shortened(&names.join(", "))
            )),
            None => None,
        }
    }

    /// Notices about entries that no chat needs, a line each.
    pub(super) fn notices(&self) -> impl Iterator<Item = String> {
        let further = self.unusable.iter().filter(|(name, _)| ![DEFAULT, TOOL_USE].contains(&name.as_str()));
        further.map(|(_, why)| format!("{why}; it is left out"))
    }
}
