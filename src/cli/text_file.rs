//! Texts that are read from files: prompts, and what a chat attaches.

use std::io::Read;
use std::path::Path;

use anyhow::Context as _;
use tinyvllm::Error;

/// The longest text that is read, in bytes. No context window has room for more.
const MAX_BYTES: u64 = 16 << 20;

/// A file's text.
///
/// # Errors
/// If it cannot be read, is too long, or is no text.
pub(crate) fn read(path: &Path) -> anyhow::Result<String> {
    let name = path.display();
    let file = std::fs::File::open(path).with_context(|| format!("cannot read `{name}`"))?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).with_context(|| format!("cannot read `{name}`"))?;
    if bytes.len() as u64 > MAX_BYTES {
        let message =
            format!("`{name}` has more than {} MB, which exceeds every context window", MAX_BYTES >> 20);
        return Err(Error::invalid_request(message).into());
    }
    let text = String::from_utf8(bytes);
    text.map_err(|_| Error::invalid_request(format!("`{name}` is no text in UTF-8")).into())
}
