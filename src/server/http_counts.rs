//! Answers by path and status. Labels never contain what a client sent: all unknown paths have one label.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The paths with their own counters. A name in braces stands for any segment.
pub(super) const PATHS: [&str; 33] = [
    "/",
    "/api/chat",
    "/api/generate",
    "/api/ps",
    "/api/show",
    "/api/tags",
    "/api/version",
    "/detokenize",
    "/get_model_info",
    "/get_server_info",
    "/health",
    "/kv_event_sources",
    "/metrics",
    "/model_info",
    "/openapi.json",
    "/server_info",
    "/tokenize",
    "/tokenizer_info",
    "/v1",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/requests/{id}",
    "/v1/responses",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/v1/responses/{id}/input_items",
    "/version",
];
const OTHER: &str = "other";

/// The number of answers.
#[derive(Debug, Default)]
pub(super) struct HttpCounts(Mutex<BTreeMap<(&'static str, u16), u64>>);

impl HttpCounts {
    /// Counts an answer that is complete or aborted.
    pub(super) fn count(&self, path: &str, status: u16) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((label(path), status)).or_default() += 1;
    }

    /// The counts, in a fixed order.
    pub(super) fn read(&self) -> Vec<(&'static str, u16, u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|((path, status), count)| (*path, *status, *count)).collect()
    }
}

fn label(path: &str) -> &'static str {
    let is_same = |known: &str| match known.split_once('{') {
        Some((before, rest)) => {
            let after = rest.split_once('}').map_or("", |(_, after)| after);
            path.len() > before.len() + after.len() && path.starts_with(before) && path.ends_with(after)
        }
        None => path == known,
    };
    // Exact paths come before those with braces; among these, the longer ones come first.
    let known = PATHS.into_iter().filter(|known| is_same(known));
    known.max_by_key(|known| (!known.contains('{'), known.len())).unwrap_or(OTHER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_few() {
        let check = |path: &str, expected: &str| assert_eq!(label(path), expected, "{path}");
        check("/", "/");
        check("/v1/models", "/v1/models");
        check("/v1/models/", OTHER);
        check("/v1/models/a/b", "/v1/models/{name}");
        check("/v1/messages/count_tokens", "/v1/messages/count_tokens");
        check("/v1/requests/1", "/v1/requests/{id}");
        check("/v1/responses/1", "/v1/responses/{id}");
        check("/v1/responses/1/input_items", "/v1/responses/{id}/input_items");
        check("/.env", OTHER);
        let counts = HttpCounts::default();
        for index in 0..100 {
            counts.count(&format!("/{index}"), 404);
        }
        counts.count("/health", 200);
        assert_eq!(counts.read(), [("/health", 200, 1), (OTHER, 404, 100)]);
    }
}
