//! Memory of the GPU, and memory of the host that it accesses by itself.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr};
use memmap2::MmapMut;

use super::driver::{Device, Doing};
use crate::ops::gpu::device::{GpuBuffer, GpuMemory};
use crate::{Error, ErrorKind, Result};

/// The alignment of a buffer's address.
const ALIGNMENT: usize = 256;

/// Memory that the host cannot access.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    /// Frees the memory when its last buffer is dropped.
    _allocation: Arc<Allocation>,
    at: CUdeviceptr,
    len: usize,
}

/// An allocation of the driver's.
#[derive(Debug)]
struct Allocation {
    device: Arc<Device>,
    at: CUdeviceptr,
}

impl DeviceMemory {
    /// Zeroed memory for each of `count` buffers of `len` bytes. They are at an even pitch, for one copy of
    /// [all](super::CudaGpu::copy_strided).
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if memory is exhausted.
    pub(super) fn allocate(device: &Arc<Device>, len: usize, count: usize) -> Result<Vec<Self>> {
        let pitch = len.checked_next_multiple_of(ALIGNMENT);
        let num_bytes = pitch.and_then(|pitch| pitch.checked_mul(count));
        let (Some(pitch), Some(num_bytes)) = (pitch, num_bytes) else {
            return Err(Error::new(
                ErrorKind::Capacity,
                format!("the size of {count} times {len} bytes overflows"),
            ));
        };
        device.enter()?;
        let doing = || format!("allocating {num_bytes} bytes on {}", device.name);
        // SAFETY: memory is written before it is read: it is filled below, in the queue in which it is used.
        let at = unsafe { result::malloc_sync(num_bytes) }.doing(&doing())?;
        let allocation = Arc::new(Allocation { device: Arc::clone(device), at });
        // SAFETY: all of it was just allocated.
        unsafe { result::memset_d8_async(at, 0, num_bytes, device.queue) }.doing(&doing())?;
        let buffer = |index: usize| Self {
            _allocation: Arc::clone(&allocation),
            at: at + (index * pitch) as u64,
            len,
        };
        Ok((0..count).map(buffer).collect())
    }

    /// The memory of a buffer.
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

impl Drop for Allocation {
    /// Waits for all queued work: the driver does so before it frees.
    fn drop(&mut self) {
        if self.device.enter_after_launches().is_ok() {
            // An error comes from earlier work, and callers that waited for that work received it.
            // SAFETY: allocated once and freed once; no other code has the address any more.
            _ = unsafe { result::free_sync(self.at) };
        }
    }
}

/// Pinned memory of the host. Only resident pages are registered with the driver: it would take a second per two
/// gigabytes to fault them in, and block all of its other calls, on every thread.
#[derive(Debug)]
pub(super) struct HostMemory {
    device: Arc<Device>,
    at: NonNull<u8>,
    len: usize,
    /// Unmapped after the driver has unregistered it.
    _pages: MmapMut,
}

// SAFETY: it may be accessed and freed on any thread; code that accesses it has to order its accesses.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the system provides none.
    pub(super) fn allocate(device: &Arc<Device>, len: usize) -> Result<Self> {
        let doing = || format!("allocating {len} bytes of the host for {}", device.name);
        let mut pages = MmapMut::map_anon(len)
            .map_err(|error| Error::new(ErrorKind::Capacity, doing()).with_source(error))?;
        pages.fill(0);
        let at = NonNull::from(&mut *pages).cast::<u8>();
        device.enter()?;
        // SAFETY: the pages exist until `drop` has unregistered them.
        unsafe { sys::cuMemHostRegister_v2(at.as_ptr().cast(), len, 0) }.result().doing(&doing())?;
        Ok(Self { device: Arc::clone(device), at, len, _pages: pages })
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

/// The source or the target of a copy.
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

/// The same range of several buffers of a device, `pitch` bytes apart.
pub(super) struct Strided {
    pub(super) at: CUdeviceptr,
    pub(super) pitch: usize,
}

impl Strided {
    /// The driver's maximum pitch.
    const MAX_PITCH: u64 = i32::MAX as u64;

    /// The `len` bytes from `offset` on of each of two or more buffers; None if the buffers are not at an even pitch.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if they are not in a buffer or it is another device's.
    pub(super) fn of(buffers: &[&GpuBuffer], offset: usize, len: usize) -> Result<Option<Self>> {
        let start = |buffer: &&GpuBuffer| DeviceMemory::of(buffer)?.range(offset, len);
        let starts = buffers.iter().map(start).collect::<Result<Vec<_>>>()?;
        Ok(pitch_of(&starts, len).map(|pitch| Self { at: starts[0], pitch }))
    }
}

/// The distance of two or more addresses, if it is the same for all and allows a strided copy of `len` bytes.
fn pitch_of(starts: &[CUdeviceptr], len: usize) -> Option<usize> {
    let mut pitches = starts.windows(2).map(|pair| pair[1].checked_sub(pair[0]));
    let first = pitches.next()??;
    let is_even = pitches.all(|pitch| pitch == Some(first));
    (is_even && (len as u64..=Strided::MAX_PITCH).contains(&first)).then_some(first as usize)
}

impl Drop for HostMemory {
    /// Waits for all queued work, which may copy from it or to it.
    fn drop(&mut self) {
        if self.device.enter_after_launches().and_then(|()| self.device.finish()).is_ok() {
            // SAFETY: registered once and unregistered once; no other code and no work has the address any more.
            _ = unsafe { sys::cuMemHostUnregister(self.at.as_ptr().cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_pitches_are_found_and_others_are_not() {
        let far = Strided::MAX_PITCH;
        for (starts, len, expected) in [
            (&[512, 768, 1024][..], 256, Some(256)),
            (&[512, 1024], 256, Some(512)),
            (&[512, 512 + far], 256, Some(far as usize)),
            (&[512, 513 + far], 256, None),
            (&[512, 768, 1280], 256, None),
            // They would overlap, or be in descending order.
            (&[512, 768], 257, None),
            (&[768, 512], 256, None),
            (&[512], 256, None),
            (&[], 256, None),
        ] {
            assert_eq!(pitch_of(starts, len), expected, "{starts:?} of {len}");
        }
    }
}
