//! Memory of the GPU: of exactly the requested size, outside candle's pool, in the residency set.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use block2::RcBlock;
use candle_metal_kernels::metal::{Buffer, Device};
use objc2_metal::{MTLDevice, MTLResourceOptions};

use super::exhausted;
use super::queue::Queue;
use crate::ops::gpu::device::{GpuBuffer, GpuMemory, Placement};
use crate::weights::SharedBytes;
use crate::{Error, ErrorKind, Result};

/// The size of pages on Apple silicon.
const PAGE_SIZE: usize = 16 << 10;

const SHARED: MTLResourceOptions = MTLResourceOptions(
    MTLResourceOptions::StorageModeShared.0 | MTLResourceOptions::HazardTrackingModeUntracked.0,
);
const PRIVATE: MTLResourceOptions = MTLResourceOptions(
    MTLResourceOptions::StorageModePrivate.0 | MTLResourceOptions::HazardTrackingModeUntracked.0,
);

/// A buffer of the GPU. Queued work keeps the memory alive until it is done, even if this is dropped earlier.
pub(super) struct AppleMemory {
    buffer: Buffer,
    len: usize,
    region: Region,
    queue: Arc<Queue>,
}

/// The location of the memory.
#[derive(Debug, Clone, Copy)]
pub(super) enum Region {
    Private,
    Shared(NonNull<u8>),
    /// Pages of a mapped file, which must not be written.
    Mapped,
}

// SAFETY: the pointer of `Region::Shared` is to memory of `buffer`, which is freed with it and which any thread may
// access; `Buffer` and `Queue` are `Send` and `Sync` themselves.
unsafe impl Send for AppleMemory {}
// SAFETY: as above; code that writes through the pointer has to order its accesses.
unsafe impl Sync for AppleMemory {}

impl AppleMemory {
    pub(super) fn allocate(
        device: &Device,
        queue: &Arc<Queue>,
        len: usize,
        placement: Placement,
    ) -> Result<Self> {
        let (options, word) = match placement {
            Placement::Private => (PRIVATE, "private"),
            Placement::Shared => (SHARED, "shared"),
        };
        // Whole units of the device's fills and copies.
        let padded = len.max(1).checked_next_multiple_of(16);
        let max = device.as_ref().maxBufferLength();
        let buffer = padded
            .filter(|&padded| padded <= max)
            .and_then(|padded| device.as_ref().newBufferWithLength_options(padded, options))
            .map(Buffer::new)
            .ok_or_else(|| {
                let used = device.current_allocated_size() >> 20;
                Error::new(
                    ErrorKind::Capacity,
                    format!(
                        "the device cannot allocate {len} bytes of {word} memory at once: {used} MiB are in use, \
                         and one buffer holds at most {} MiB",
                        max >> 20
                    ),
                )
                .with_hint("give the KV cache less memory, or use a smaller model")
            })?;
        let padded = buffer.length();
        let region = match placement {
            Placement::Private => {
                queue.blit(|blit| blit.fill_buffer(&buffer, (0, padded), 0))?;
                Region::Private
            }
            Placement::Shared => {
                let address = NonNull::new(buffer.contents())
                    .ok_or_else(|| Error::internal("shared memory of the device has no address"))?;
                // SAFETY: the memory is `padded` bytes long, and no other code has it yet.
                unsafe { ptr::write_bytes(address.as_ptr(), 0, padded) };
                Region::Shared(address)
            }
        };
        queue.make_resident(&buffer);
        Ok(Self { buffer, len, region, queue: Arc::clone(queue) })
    }

    /// The pages that hold `bytes`, and the offset of `bytes` in them.
    pub(super) fn wrap(
        device: &Device,
        queue: &Arc<Queue>,
        bytes: &SharedBytes,
    ) -> Result<Option<(Self, usize)>> {
        let Some(pages) = bytes.pages(PAGE_SIZE) else { return Ok(None) };
        if pages.len > device.as_ref().maxBufferLength() {
            return Ok(None);
        }
        // The file stays mapped until Metal releases the buffer, after the last work that reads it.
        let owner = bytes.clone();
        let release = RcBlock::new(move |_: NonNull<c_void>, _: usize| {
            let _owner = &owner;
        });
        // SAFETY: the pages are mapped and readable as long as a clone of `bytes` lives, and `release` holds one for
        // the lifetime of the buffer; it may run and be dropped on any thread, as `SharedBytes` may. The buffer is
        // bound as an input only (`Region::Mapped`), so no work writes to the pages.
        let buffer = unsafe {
            device.as_ref().newBufferWithBytesNoCopy_length_options_deallocator(
                pages.address.cast(),
                pages.len,
                SHARED,
                Some(&release),
            )
        };
        // Without a buffer the device does not accept such pages. The caller copies them instead; if memory is
        // exhausted, that copy reports it.
        let Some(buffer) = buffer.map(Buffer::new) else { return Ok(None) };
        queue.make_resident(&buffer);
        let memory = Self { buffer, len: pages.len, region: Region::Mapped, queue: Arc::clone(queue) };
        Ok(Some((memory, pages.offset)))
    }

    /// The memory of a buffer, which has to be of this device.
    pub(super) fn of(buffer: &GpuBuffer) -> Result<&Self> {
        let memory = buffer.0.as_any().downcast_ref::<Self>();
        memory.ok_or_else(|| Error::internal("a buffer of another device was given to this one"))
    }

    pub(super) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    pub(super) fn region(&self) -> Region {
        self.region
    }

    /// # Errors
    /// [`ErrorKind::Internal`] if `len` bytes from `offset` on are not all in the buffer.
    pub(super) fn ensure_holds(&self, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(Error::internal(format!(
                "{len} bytes at {offset} are not in a buffer of {} bytes",
                self.len
            ))),
        }
    }

    /// Copies bytes that the host can access and the device does not write at this time, such as after a wait.
    pub(super) fn copy_to(&self, offset: usize, bytes: &mut [u8]) {
        debug_assert!(
            !matches!(self.region, Region::Private) && self.ensure_holds(offset, bytes.len()).is_ok()
        );
        // SAFETY: shared and mapped memory has an address; every caller has checked the range, and has waited
        // for the device.
        unsafe {
            ptr::copy_nonoverlapping(self.buffer.contents().add(offset), bytes.as_mut_ptr(), bytes.len());
        }
    }
}

impl GpuMemory for AppleMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        match self.region {
            Region::Shared(address) => Some(address),
            // A mapped file must not be written, and readers have its bytes.
            Region::Private | Region::Mapped => None,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for AppleMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppleMemory({} bytes, {:?})", self.len, self.region)
    }
}

impl Drop for AppleMemory {
    fn drop(&mut self) {
        self.queue.retire(self.buffer.clone());
    }
}

/// Memory for a result that is copied to the host. Not in the residency set: one copy binds it.
pub(super) fn staging(device: &Device, len: usize) -> Result<Buffer> {
    let buffer = device.as_ref().newBufferWithLength_options(len, SHARED);
    buffer.map(Buffer::new).ok_or_else(|| exhausted("a copy for the host"))
}

/// A copy of `bytes`, which may not be empty, as the source of a device copy.
pub(super) fn staging_with(device: &Device, bytes: &[u8]) -> Result<Buffer> {
    let copy = device.new_buffer_with_data(bytes.as_ptr().cast(), bytes.len(), SHARED);
    copy.map_err(|_| exhausted("a copy from the host"))
}
