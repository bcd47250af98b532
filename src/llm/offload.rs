//! Memory of the host for blocks that a GPU's cache gives away.

use std::fmt;

use super::{LlmOptions, OpenedDevice};
use crate::prefix_store::OnNotice;
use crate::runner::available_memory_bytes;
use crate::{Error, ErrorKind, Result};

/// How much of the host's memory is for blocks that the cache gives away.
#[derive(Clone)]
pub struct OffloadOptions {
    /// `--kv-offload-gb`, in bytes.
    pub max_bytes: u64,
    /// Receives notices, each once.
    pub on_notice: OnNotice,
}

impl fmt::Debug for OffloadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OffloadOptions").field("max_bytes", &self.max_bytes).finish_non_exhaustive()
    }
}

/// Bytes of memory that the device and the host share which this takes; none if the device has its own.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the cache is in memory of the host itself, [`ErrorKind::Capacity`] if there is less memory,
/// [`ErrorKind::InvalidRequest`] without the prefix cache.
pub(super) fn shared_bytes(options: &LlmOptions, device: &OpenedDevice) -> Result<u64> {
    let Some(OffloadOptions { max_bytes, .. }) = options.kv_offload else { return Ok(0) };
    let OpenedDevice::Gpu(_) = device else {
        let message = "--kv-offload-gb is for GPUs: this device's cache is in host memory already";
        return Err(Error::unsupported(message)
            .with_hint("omit it, and give the cache more memory with --kv-cache-memory-bytes"));
    };
    if !options.limits.enable_prefix_caching {
        return Err(Error::invalid_request("--kv-offload-gb has no effect without the prefix cache")
            .with_hint("omit --no-enable-prefix-caching"));
    }
    let available = available_memory_bytes();
    if max_bytes > available {
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        let message = format!(
            "--kv-offload-gb is {:.1} GB of the host's memory, but only {:.1} GB are available",
            gigabytes(max_bytes),
            gigabytes(available)
        );
        return Err(Error::new(ErrorKind::Capacity, message).with_hint("lower it, or omit it"));
    }
    Ok(if device.has_own_memory() { 0 } else { max_bytes })
}
