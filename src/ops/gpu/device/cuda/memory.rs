//! Memory of the GPU.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;

use super::driver::{Device, Doing};
use crate::ops::gpu::device::{GpuBuffer, GpuMemory};
use crate::{Error, Result};

/// Memory that the host does not see.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    device: Arc<Device>,
    at: CUdeviceptr,
    len: usize,
}

impl DeviceMemory {
    /// Zeroed memory.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if there is none.
    pub(super) fn allocate(device: &Arc<Device>, len: usize) -> Result<Self> {
        device.enter()?;
        let doing = || format!("allocating {len} bytes on {}", device.name);
        // SAFETY: what is written before it is read: it is filled below, in the queue in which it is used.
        let at = unsafe { result::malloc_sync(len) }.doing(&doing())?;
        let memory = Self { device: Arc::clone(device), at, len };
        // SAFETY: all of it was just allocated.
        unsafe { result::memset_d8_async(at, 0, len, device.queue) }.doing(&doing())?;
        Ok(memory)
    }

    /// That of a buffer.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if it is another device's.
    pub(super) fn of(buffer: &GpuBuffer) -> Result<&Self> {
        buffer.0.as_any().downcast_ref().ok_or_else(|| Error::internal("a buffer of another device"))
    }

    /// The address of the `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if they are not in the memory.
    pub(super) fn range(&self, offset: usize, len: usize) -> Result<CUdeviceptr> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::internal(format!("{len} bytes from {offset} of a buffer of {}", self.len)));
        }
        Ok(self.at + offset as u64)
    }
}

impl GpuMemory for DeviceMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for DeviceMemory {
    /// After everything that is queued: the driver waits before it frees.
    fn drop(&mut self) {
        if self.device.enter_behind_launches().is_ok() {
            // It fails if earlier work did, which whoever waited for that work was told.
            // SAFETY: allocated once and freed once; nobody else has the address any more.
            _ = unsafe { result::free_sync(self.at) };
        }
    }
}
