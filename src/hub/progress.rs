//! The progress reports of a download. The command line draws them; the library does not.

use std::time::Duration;

/// Receives the steps of a download. Files come one after the other, never interleaved.
pub trait Progress {
    /// `file` begins. `resumed_from` of its `total_bytes` are on disk from an earlier attempt and are
    /// not reported again through [`advance`](Self::advance). A second `start` for the same file
    /// means that it begins again, because the server could not continue it.
    fn start(&self, file: &str, total_bytes: Option<u64>, resumed_from: u64);

    /// `bytes` more have been written to disk.
    fn advance(&self, bytes: u64);

    /// The file is complete. Not called for a file whose download fails.
    fn finish(&self);

    /// The server requests a pause of `duration` before the rest of `file`.
    fn pause(&self, file: &str, duration: Duration) {
        let _ = (file, duration);
    }

    /// Another process is downloading `file`, and this one waits for it.
    fn wait_for_other_process(&self, file: &str) {
        let _ = file;
    }
}

/// Reports nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn start(&self, _file: &str, _total_bytes: Option<u64>, _resumed_from: u64) {}

    fn advance(&self, _bytes: u64) {}

    fn finish(&self) {}
}
