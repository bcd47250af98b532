//! Memory of the GPU, and memory of the host that it copies from and to by itself.

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

/// Memory of the host whose pages stay where they are.
#[derive(Debug)]
pub(super) struct HostMemory {
    device: Arc<Device>,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: it may be accessed and freed on any thread; whoever does has to see to the order of accesses.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the system gives none.
    pub(super) fn allocate(device: &Arc<Device>, len: usize) -> Result<Self> {
        device.enter()?;
        // SAFETY: it is filled before it is read.
        let at = unsafe { result::malloc_host(len, 0) }
            .doing(&format!("allocating {len} bytes of the host for {}", device.name))?;
        let at =
            NonNull::new(at.cast::<u8>()).ok_or_else(|| Error::internal("host memory without an address"))?;
        // SAFETY: the memory is as long and nobody else's.
        unsafe { at.write_bytes(0, len) };
        Ok(Self { device: Arc::clone(device), at, len })
    }

    /// The address of the `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if they are not in the memory.
    pub(super) fn range(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::internal(format!("{len} bytes from {offset} of host memory of {}", self.len)));
        }
        // SAFETY: it is inside the memory.
        Ok(unsafe { self.at.add(offset) })
    }
}

impl GpuMemory for HostMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.at)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Either end of a copy.
pub(super) enum End {
    Device(CUdeviceptr),
    Host(NonNull<u8>),
}

impl End {
    /// The `len` bytes of a buffer from `offset` on.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if they are not in the buffer or it is another device's.
    pub(super) fn of((buffer, offset): (&GpuBuffer, usize), len: usize) -> Result<Self> {
        match buffer.0.as_any().downcast_ref::<HostMemory>() {
            Some(memory) => memory.range(offset, len).map(Self::Host),
            None => DeviceMemory::of(buffer)?.range(offset, len).map(Self::Device),
        }
    }
}

impl Drop for HostMemory {
    /// After everything that is queued, which may copy from it or to it.
    fn drop(&mut self) {
        if self.device.enter_behind_launches().and_then(|()| self.device.finish()).is_ok() {
            // SAFETY: allocated once and freed once; nobody else has the address any more, and no work.
            _ = unsafe { result::free_host(self.at.as_ptr().cast()) };
        }
    }
}
