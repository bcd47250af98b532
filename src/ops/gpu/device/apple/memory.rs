//! Memory of the GPU: of exactly the size asked for, outside candle's pool, in the residency set.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use block2::RcBlock;
use candle_metal_kernels::metal::{Buffer, Device};
use objc2_metal::{MTLDevice, MTLResourceOptions};

use super::nothing_left;
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

/// A buffer of the GPU. Work that is queued keeps the memory itself alive until it is done, however early
/// this is dropped.
pub(super) struct AppleMemory {
    buffer: Buffer,
    len: usize,
    place: Place,
    queue: Arc<Queue>,
}

/// Where the memory is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    Private,
    Shared(NonNull<u8>),
    /// Pages of a mapped file, which nobody may write.
    Mapped,
}

// SAFETY: the pointer of `Place::Shared` is to memory of `buffer`, which is freed with it and which any thread
// may access; `Buffer` and `Queue` are `Send` and `Sync` themselves.
unsafe impl Send for AppleMemory {}
// SAFETY: as above; whoever writes through the pointer has to see to the order of accesses.
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
        // Whole units of what the device fills and copies.
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
                        "the device has no {len} bytes of {word} memory in one piece: {used} MiB are in use, \
                         and one piece has at most {} MiB",
                        max >> 20
                    ),
                )
                .with_hint("give the KV cache less memory, or use a smaller model")
            })?;
        let padded = buffer.length();
        let place = match placement {
            Placement::Private => {
                queue.blit(|blit| blit.fill_buffer(&buffer, (0, padded), 0))?;
                Place::Private
            }
            Placement::Shared => {
                let address = NonNull::new(buffer.contents())
                    .ok_or_else(|| Error::internal("shared memory of the device has no address"))?;
                // SAFETY: the memory is `padded` bytes long and as new unknown to anybody else.
                unsafe { ptr::write_bytes(address.as_ptr(), 0, padded) };
                Place::Shared(address)
            }
        };
        queue.make_resident(&buffer);
        Ok(Self { buffer, len, place, queue: Arc::clone(queue) })
    }

    /// The pages that hold `bytes`, and where in them the bytes begin.
    pub(super) fn wrap(
        device: &Device,
        queue: &Arc<Queue>,
        bytes: &SharedBytes,
    ) -> Result<Option<(Self, usize)>> {
        let Some(pages) = bytes.pages(PAGE_SIZE) else { return Ok(None) };
        if pages.len > device.as_ref().maxBufferLength() {
            return Ok(None);
        }
        // The file stays mapped until Metal itself has let go of the buffer, which is after the last work
        // that reads it.
        let owner = bytes.clone();
        let release = RcBlock::new(move |_: NonNull<c_void>, _: usize| {
            let _owner = &owner;
        });
        // SAFETY: the pages are mapped and readable as long as a clone of `bytes` lives, and `release` holds
        // one for as long as the buffer is; it may run and be dropped on any thread, as `SharedBytes` may.
        // The buffer is bound as an input only (`Place::Mapped`), so that nothing writes to the pages.
        let buffer = unsafe {
            device.as_ref().newBufferWithBytesNoCopy_length_options_deallocator(
                pages.address.cast(),
                pages.len,
                SHARED,
                Some(&release),
            )
        };
        // Without a buffer the device does not take such pages; its caller copies them, and if it is memory
        // that is missing, hears of it then.
        let Some(buffer) = buffer.map(Buffer::new) else { return Ok(None) };
        queue.make_resident(&buffer);
        let memory = Self { buffer, len: pages.len, place: Place::Mapped, queue: Arc::clone(queue) };
        Ok(Some((memory, pages.offset)))
    }

    /// The memory behind a buffer, which has to be of this device.
    pub(super) fn of(buffer: &GpuBuffer) -> Result<&Self> {
        let memory = buffer.0.as_any().downcast_ref::<Self>();
        memory.ok_or_else(|| Error::internal("a buffer of another device was given to this one"))
    }

    pub(super) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    pub(super) fn place(&self) -> Place {
        self.place
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

    /// Copies bytes that the host sees and the device does not write at this time, as after a wait.
    pub(super) fn copy_to(&self, offset: usize, bytes: &mut [u8]) {
        debug_assert!(
            !matches!(self.place, Place::Private) && self.ensure_holds(offset, bytes.len()).is_ok()
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
        match self.place {
            Place::Shared(address) => Some(address),
            // A mapped file may not be written, and who may only read has its bytes.
            Place::Private | Place::Mapped => None,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for AppleMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppleMemory({} bytes, {:?})", self.len, self.place)
    }
}

impl Drop for AppleMemory {
    fn drop(&mut self) {
        self.queue.retire(self.buffer.clone());
    }
}

/// Memory that a result is copied to for the host. Not in the residency set: one copy binds it.
pub(super) fn staging(device: &Device, len: usize) -> Result<Buffer> {
    let buffer = device.as_ref().newBufferWithLength_options(len, SHARED);
    buffer.map(Buffer::new).ok_or_else(|| nothing_left("a copy for the host"))
}

/// A copy of `bytes`, which may not be empty, for the device to fetch.
pub(super) fn staging_with(device: &Device, bytes: &[u8]) -> Result<Buffer> {
    let copy = device.new_buffer_with_data(bytes.as_ptr().cast(), bytes.len(), SHARED);
    copy.map_err(|_| nothing_left("a copy from the host"))
}
