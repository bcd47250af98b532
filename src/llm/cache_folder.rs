//! Where things are kept that can be made again.

use std::env;
use std::path::PathBuf;

/// The folder `name` in `$XDG_CACHE_HOME/tinyvllm`, by default in `~/.cache/tinyvllm`; none without a home.
#[must_use]
pub fn cache_folder(name: &str) -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = cache.or_else(|| env::home_dir().map(|home| home.join(".cache")))?;
    Some(cache.join("tinyvllm").join(name))
}
