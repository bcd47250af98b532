//! Reads text files: prompts, and files for a chat.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::Context as _;
use tinyvllm::{Error, files};

/// Size limit of a text in bytes. No context holds more.
const MAX_BYTES: u64 = 16 << 20;

/// Reads a text file.
///
/// # Errors
/// If it cannot be read, is too long, or is not text.
pub(crate) fn read(path: &Path) -> anyhow::Result<String> {
    let name = path.display();
    read_from(File::open(path), &format_args!("`{name}`"))
}

/// Reads all of standard input.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_stdin() -> anyhow::Result<String> {
    read_from(Ok(std::io::stdin().lock()), &"standard input")
}

fn read_from(reader: io::Result<impl Read>, name: &dyn std::fmt::Display) -> anyhow::Result<String> {
    let bytes = reader.and_then(|reader| files::read_up_to(reader, MAX_BYTES));
    let text = match bytes {
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            let message =
                format!("{name} has more than {} MB, which exceeds every context window", MAX_BYTES >> 20);
            return Err(Error::invalid_request(message).into());
        }
        bytes => files::text(bytes.with_context(|| format!("cannot read {name}"))?),
    };
    text.map_err(|error| Error::invalid_request(format!("cannot read {name}: {error}")).into())
}
