//! Brings one file of a commit into the cache.
//!
//! The data gathers under `<etag>.incomplete` and takes its final name when all of it is on disk, so a
//! process that is killed or a disk that is full leaves nothing that looks like a model, and the next
//! attempt continues where this one ended. One process at a time writes a blob.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::cache::{RepoCache, create_parent};
use super::client::{Client, Data, FileMetadata};
use super::config::HubConfig;
use super::progress::Progress;
use crate::{Error, ErrorKind, Result};

/// What a download works with.
pub(super) struct Downloader<'a> {
    pub(super) client: &'a Client<'a>,
    pub(super) cache: &'a RepoCache,
    pub(super) config: &'a HubConfig,
    pub(super) progress: &'a dyn Progress,
    pub(super) commit: &'a str,
}

impl Downloader<'_> {
    /// Makes sure that `file` is in the snapshot of the commit.
    ///
    /// # Errors
    /// What the Hub refused, what broke on the way, or what the disk could not hold. Data that has
    /// arrived stays for the next attempt.
    pub(super) fn fetch(&self, file: &str) -> Result<()> {
        if self.cache.snapshot_file(self.commit, file).exists() {
            return Ok(());
        }
        let metadata = self.client.with_retries(|| self.client.metadata(self.commit, file))?;
        let etag = &metadata.etag;
        let _lock =
            self.cache.lock(etag, self.config.lock_timeout, || self.progress.wait_for_other_process(file))?;
        if !self.cache.blob(etag).exists() {
            self.fetch_blob(file, &metadata)?;
        }
        self.cache.link(self.commit, file, etag)
    }

    fn fetch_blob(&self, file: &str, metadata: &FileMetadata) -> Result<()> {
        let path = self.cache.incomplete(&metadata.etag);
        create_parent(&path)?;
        let mut partial = Partial::open(path, file, metadata.size)?;
        if metadata.size.is_some_and(|size| partial.written > size) {
            partial.restart()?;
        }
        self.progress.start(file, metadata.size, partial.written);
        self.fill(&mut partial)?;
        partial.complete(&self.cache.blob(&metadata.etag))?;
        self.progress.finish();
        Ok(())
    }

    /// Requests the missing bytes until none is missing.
    fn fill(&self, partial: &mut Partial<'_>) -> Result<()> {
        let mut num_failures = 0;
        let mut most_written = partial.written;
        while partial.size.is_none_or(|size| partial.written < size) {
            let outcome = self
                .client
                .data(self.commit, partial.name, partial.written)
                .and_then(|data| self.append(partial, data));
            let error = match outcome {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            // The way works as long as there are more bytes than ever before. A server that begins
            // anew each time does not pass for that, or this loop might never end.
            num_failures = if partial.written > most_written { 1 } else { num_failures + 1 };
            most_written = most_written.max(partial.written);
            if error.kind() != ErrorKind::Unavailable || num_failures > self.config.num_retries {
                return Err(error);
            }
            self.client.wait(num_failures);
        }
        Ok(())
    }

    /// Writes what one answer brings.
    fn append(&self, partial: &mut Partial<'_>, mut data: Data) -> Result<()> {
        let total = match (partial.size, data.total) {
            (Some(size), Some(total)) if size != total => {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    format!("`{}` should have {size} bytes, but the server offers {total}", partial.name),
                )
                .with_hint("try again later, or check HF_ENDPOINT"));
            }
            (size, total) => size.or(total),
        };
        if data.start != partial.written {
            partial.restart()?;
            self.progress.start(partial.name, total, 0);
        }
        let mut buffer = vec![0; 128 << 10];
        loop {
            let room = total.map_or(u64::MAX, |total| total.saturating_sub(partial.written));
            let wanted = usize::try_from(room).map_or(buffer.len(), |room| room.min(buffer.len()));
            if wanted == 0 {
                return Ok(());
            }
            match data.reader.read(&mut buffer[..wanted]) {
                Ok(0) if total.is_none() => return Ok(()),
                Ok(0) => return Err(partial.broken_off("the connection was closed")),
                Ok(num_bytes) => {
                    partial.write(&buffer[..num_bytes])?;
                    self.progress.advance(num_bytes as u64);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(match ureq::Error::from(error) {
                        ureq::Error::Timeout(_) => {
                            partial.broken_off(format_args!("no data for {:?}", self.config.read_timeout))
                        }
                        error => partial.broken_off(&error).with_source(error),
                    });
                }
            }
        }
    }
}

/// A file while it arrives.
struct Partial<'a> {
    /// What it is called in the repository.
    name: &'a str,
    path: PathBuf,
    file: File,
    /// Bytes on disk, all of them in their place.
    written: u64,
    size: Option<u64>,
}

impl<'a> Partial<'a> {
    /// Opens what an earlier attempt left, or an empty file.
    fn open(path: PathBuf, name: &'a str, size: Option<u64>) -> Result<Self> {
        // Not opened for appending, because a restart goes back to the first byte.
        let mut options = File::options();
        let opened = options.create(true).write(true).truncate(false).open(&path).and_then(|mut file| {
            let written = file.seek(SeekFrom::End(0))?;
            Ok((file, written))
        });
        match opened {
            Ok((file, written)) => Ok(Self { name, path, file, written, size }),
            Err(source) => Err(disk_error(source, name, size, 0, &path)),
        }
    }

    /// Forgets what was written.
    fn restart(&mut self) -> Result<()> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        self.written = 0;
        emptied.map_err(|source| self.disk_error(source))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        // Not `write_all`: after an error it would be unknown how many bytes are on disk.
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(self.disk_error(io::ErrorKind::StorageFull.into())),
                Ok(num_bytes) => {
                    self.written += num_bytes as u64;
                    rest = &rest[num_bytes..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.disk_error(error)),
            }
        }
        Ok(())
    }

    /// Gives the file its final name once its bytes are on disk.
    fn complete(self, blob: &Path) -> Result<()> {
        self.file
            .sync_all()
            .and_then(|()| fs::rename(&self.path, blob))
            .map_err(|source| self.disk_error(source))
    }

    fn disk_error(&self, source: io::Error) -> Error {
        disk_error(source, self.name, self.size, self.written, &self.path)
    }

    fn broken_off(&self, why: impl fmt::Display) -> Error {
        let size = self.size.map_or_else(|| "an unknown number of".to_owned(), |size| size.to_string());
        Error::new(
            ErrorKind::Unavailable,
            format!(
                "the download of `{}` broke off after {} of {size} bytes: {why}",
                self.name, self.written
            ),
        )
        .with_hint("run the command again: it continues where this one stopped")
    }
}

fn disk_error(source: io::Error, name: &str, size: Option<u64>, written: u64, path: &Path) -> Error {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    if !matches!(source.kind(), StorageFull | QuotaExceeded | FileTooLarge) {
        return Error::io(format_args!("cannot write `{name}` to `{}`", path.display()), source);
    }
    let folder = path.parent().unwrap_or(path).display();
    let message = match size {
        Some(size) => format!(
            "no space left in `{folder}` for `{name}`: it needs {}, and {} of that are written",
            ByteSize(size),
            ByteSize(written)
        ),
        None => format!("no space left in `{folder}` for `{name}` after {}", ByteSize(written)),
    };
    let hint = match size {
        Some(size) => format!(
            "free {}, or set HF_HUB_CACHE to a folder on another disk; what is written is kept, and the next run \
             continues",
            ByteSize(size.saturating_sub(written))
        ),
        None => "free some space, or set HF_HUB_CACHE to a folder on another disk".to_owned(),
    };
    Error::new(ErrorKind::Io, message).with_hint(hint).with_source(source)
}

/// A number of bytes as a person reads it.
struct ByteSize(u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.iter().find(|(unit, _)| self.0 >= *unit) {
            Some((unit, name)) => write!(f, "{:.1} {name}", self.0 as f64 / *unit as f64),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_readable() {
        for (bytes, expected) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1536, "1.5 KiB"),
            (5 << 20, "5.0 MiB"),
            (15 << 30, "15.0 GiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), expected);
        }
    }

    #[test]
    fn only_a_full_disk_is_reported_as_one() {
        let check = |kind: io::ErrorKind, expected: ErrorKind, word: &str| {
            let error =
                disk_error(kind.into(), "m.gguf", Some(3 << 20), 1 << 20, Path::new("/c/blobs/e.incomplete"));
            assert_eq!(error.kind(), expected);
            assert!(format!("{error:?}").contains(word), "{error:?}");
        };
        check(io::ErrorKind::StorageFull, ErrorKind::Io, "needs 3.0 MiB, and 1.0 MiB of that are written");
        check(io::ErrorKind::QuotaExceeded, ErrorKind::Io, "free 2.0 MiB");
        check(io::ErrorKind::PermissionDenied, ErrorKind::Io, "cannot write `m.gguf`");
    }
}
