//! Downloads one file of a commit to the cache.
//!
//! A [`Partial`] file collects the data. It gets its final name when all of it is on disk and has the Hub's checksum.
//! So a killed process, a full disk or a corrupted transfer leaves nothing that looks like a model, and the next
//! attempt resumes.

use std::io::{self, Read};

use super::client::{Client, FileMetadata, Whole};
use super::partial::{self, Partial};
use super::transfer::{Outcome, Transfer, wrong_size};
use crate::hub::cache::RepoCache;
use crate::hub::config::HubConfig;
use crate::hub::progress::Progress;
use crate::{Error, ErrorKind, Result};

/// How often a file is fetched as a whole that arrives with a wrong checksum or changes on the way.
const MAX_COPIES: u32 = 3;

/// The inputs of a download.
pub(super) struct Downloader<'a> {
    pub(super) client: &'a Client<'a>,
    pub(super) cache: &'a RepoCache,
    pub(super) config: &'a HubConfig,
    pub(super) progress: &'a dyn Progress,
    pub(super) commit: &'a str,
}

/// The result for a blob.
enum Copy {
    Complete,
    /// Its bytes are not those of the name.
    Corrupt(&'static str),
    /// The server gives the content another name than before.
    Changed,
}

impl Downloader<'_> {
    /// Makes sure that `file` is in the snapshot of the commit.
    ///
    /// # Errors
    /// Refusals of the Hub, errors in transit, and errors of the disk. Received data stays for the next attempt, unless
    /// its checksum is wrong.
    pub(super) fn fetch(&self, file: &str) -> Result<()> {
        if self.cache.snapshot_file(self.commit, file).exists() {
            return Ok(());
        }
        let mut last = Copy::Complete;
        for _ in 0..MAX_COPIES {
            let metadata = self.client.with_retries(|| self.client.metadata(self.commit, file))?;
            let etag = &metadata.etag;
            let waiting = || self.progress.wait_for_other_process(file);
            let size = || partial::total_size(self.cache, etag);
            let lock = self.cache.lock(etag, self.config.lock_timeout, size, waiting)?;
            if !self.cache.blob(etag).exists() {
                last = self.fetch_blob(file, &metadata, lock.is_some())?;
            }
            if self.cache.blob(etag).exists() {
                return self.cache.link(self.commit, file, etag);
            }
        }
        Err(match last {
            Copy::Corrupt(checksum) => Error::new(
                ErrorKind::Unavailable,
                format!(
                    "`{file}` arrived {MAX_COPIES} times, the last time not with the {checksum} of the Hub"
                ),
            )
            .with_hint(
                "it is deleted; the cause is a proxy or mirror that changes data, a faulty disk or faulty memory: \
                 try another network, another HF_ENDPOINT, or another disk with HF_HUB_CACHE",
            ),
            Copy::Changed | Copy::Complete => Error::new(
                ErrorKind::Unavailable,
                format!("`{file}` changed {MAX_COPIES} times while it was downloaded"),
            )
            .with_hint("try again later; a file of a commit never changes on the Hub, so check HF_ENDPOINT"),
        })
    }

    fn fetch_blob(&self, file: &str, metadata: &FileMetadata, is_locked: bool) -> Result<Copy> {
        partial::remove_forgotten(self.cache);
        let mut partial = Partial::open(self.cache, file, metadata, is_locked, self.config.lock_timeout)?;
        self.progress.start(file, metadata.size, partial.written);
        if !self.fill(&mut partial)? {
            // Its old and new bytes cannot be distinguished.
            partial.discard();
            return Ok(Copy::Changed);
        }
        if let Some(checksum) = partial.checksum_name()
            && !partial.is_as_named()
        {
            partial.discard();
            return Ok(Copy::Corrupt(checksum));
        }
        partial.complete(self.cache)?;
        self.progress.finish();
        Ok(Copy::Complete)
    }

    /// Fetches the missing bytes; false if the content changed during the download.
    fn fill(&self, partial: &mut Partial<'_>) -> Result<bool> {
        // Without a size there is no telling which ranges there are.
        let Some(size) = partial.size else {
            return self.fill_whole(partial).map(|()| true);
        };
        let (client, config, commit) = (self.client, self.config, self.commit);
        // A checksum decides better whether the bytes are right: hosts may call one content by several names.
        let watches_etag = partial.checksum_name().is_none();
        let transfer = Transfer { client, config, commit, file: partial.name, size, watches_etag };
        match transfer.run(partial, self.progress)? {
            Outcome::Complete => Ok(true),
            Outcome::Changed => Ok(false),
            Outcome::WithoutRanges => self.fill_whole(partial).map(|()| true),
        }
    }

    /// Fetches everything in one answer, again from the first byte if it breaks off.
    fn fill_whole(&self, partial: &mut Partial<'_>) -> Result<()> {
        let mut num_failures = 0;
        loop {
            if partial.written > 0 {
                partial.restart()?;
                self.progress.start(partial.name, partial.size, 0);
            }
            let outcome =
                self.client.whole(self.commit, partial.name).and_then(|whole| self.write(partial, whole));
            num_failures += 1;
            match outcome {
                Err(error)
                    if error.kind() == ErrorKind::Unavailable && num_failures <= self.config.num_retries =>
                {
                    self.client.wait(num_failures);
                }
                outcome => return outcome,
            }
        }
    }

    /// Writes all bytes of one response.
    fn write(&self, partial: &mut Partial<'_>, mut whole: Whole) -> Result<()> {
        if let (Some(size), Some(total)) = (partial.size, whole.total)
            && size != total
        {
            return Err(wrong_size(partial.name, size, total));
        }
        let total = partial.size.or(whole.total);
        let mut buffer = vec![0; 128 << 10];
        loop {
            let remaining = total.map_or(u64::MAX, |total| total.saturating_sub(partial.written));
            let wanted =
                usize::try_from(remaining).map_or(buffer.len(), |remaining| remaining.min(buffer.len()));
            if wanted == 0 {
                return Ok(());
            }
            match whole.reader.read(&mut buffer[..wanted]) {
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
