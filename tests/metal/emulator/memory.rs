//! Buffers of the emulator: allocations of exactly the requested size, and pages of mapped files.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use tinyvllm::ops::gpu::{GpuMemory, Placement};
use tinyvllm::weights::SharedBytes;
use tinyvllm::{Error, ErrorKind, Result};

const ALIGNMENT: usize = 256;

/// The host's handle of a buffer. Queued work holds the memory as well.
#[derive(Debug)]
pub(crate) struct Handle(pub(crate) Arc<Memory>);

impl GpuMemory for Handle {
    fn len(&self) -> usize {
        self.0.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        match self.0.owner {
            Owner::Allocation(Placement::Shared) => Some(self.0.at),
            Owner::Allocation(Placement::Private) | Owner::File(_) => None,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(crate) struct Memory {
    at: NonNull<u8>,
    len: usize,
    owner: Owner,
    /// The state of the checks for each byte.
    shadow: OnceLock<Shadow>,
}

enum Owner {
    Allocation(Placement),
    /// Keeps the file mapped.
    File(#[expect(dead_code, reason = "it is held, not used")] SharedBytes),
}

struct Shadow {
    at: NonNull<u8>,
    layout: Layout,
}

/// Shadows for reuse. Entries of earlier launches are ignored, so they need not be zeroed; fresh pages took nearly half
/// the time of a checked run on tensor cores.
#[derive(Default)]
struct Pool {
    shadows: Vec<Shadow>,
    num_bytes: usize,
}

static POOL: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);

/// The most that is kept.
const MAX_POOL_BYTES: usize = 1 << 30;

impl Pool {
    fn lock() -> MutexGuard<'static, Self> {
        POOL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&mut self, layout: Layout) -> Option<Shadow> {
        let index = self.shadows.iter().position(|shadow| shadow.layout == layout)?;
        self.num_bytes -= layout.size();
        Some(self.shadows.swap_remove(index))
    }

    /// Gives it back if there are too many.
    fn put(&mut self, shadow: Shadow) -> Option<Shadow> {
        if self.num_bytes + shadow.layout.size() > MAX_POOL_BYTES {
            return Some(shadow);
        }
        self.num_bytes += shadow.layout.size();
        self.shadows.push(shadow);
        None
    }
}

// SAFETY: all access goes through the emulator, which does one thing at a time, or through the address that
// `GpuMemory::host` gives, whose users wait for the device as they do for any.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}
// SAFETY: as above; one in the pool is unused.
unsafe impl Send for Shadow {}

impl Memory {
    pub(crate) fn allocate(len: usize, placement: Placement) -> Result<Self> {
        let layout = Layout::from_size_align(len, ALIGNMENT).ok().filter(|_| len >= 16);
        let layout = layout.ok_or_else(|| {
            Error::new(ErrorKind::Capacity, format!("a buffer of {len} bytes; the least are 16"))
        })?;
        Ok(Self { at: zeroed(layout)?, len, owner: Owner::Allocation(placement), shadow: OnceLock::new() })
    }

    /// The bytes from the begin of the page on which they start, and where they start there.
    pub(crate) fn of_file(bytes: &SharedBytes) -> (Self, usize) {
        const PAGE: usize = 4096;
        let start = bytes.as_ptr().addr() % PAGE;
        let first = bytes.as_ptr().cast_mut().wrapping_sub(start);
        let at = NonNull::new(first).unwrap_or(NonNull::dangling());
        let owner = Owner::File(bytes.clone());
        (Self { at, len: start + bytes.len(), owner, shadow: OnceLock::new() }, start)
    }

    pub(crate) fn at(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.owner, Owner::File(_))
    }

    /// `size` bytes for each byte of the buffer, zero at first or of launches that are over; null if `size` is 0.
    pub(crate) fn shadow(&self, size: usize) -> Result<*mut u8> {
        if size == 0 {
            return Ok(null_mut());
        }
        if self.shadow.get().is_none() {
            // So that more of them are of one size.
            let layout = Layout::from_size_align(self.len.next_power_of_two() * size, 16);
            let layout = layout.map_err(|error| Error::internal(error.to_string()))?;
            let pooled = Pool::lock().take(layout);
            let shadow = match pooled {
                Some(shadow) => shadow,
                None => Shadow { at: zeroed(layout)?, layout },
            };
            // Of two threads the first wins; the other's memory is freed.
            drop(self.shadow.set(shadow));
        }
        Ok(self.shadow.get().map_or(null_mut(), |shadow| shadow.at.as_ptr()))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Memory from the pool is freed when it is unlocked.
        let shadow = self.shadow.take();
        let rest = shadow.and_then(|shadow| Pool::lock().put(shadow));
        drop(rest);
        if let Owner::Allocation(_) = self.owner
            && let Ok(layout) = Layout::from_size_align(self.len, ALIGNMENT)
        {
            // SAFETY: allocated with this layout, and no other code has the address any more.
            unsafe { dealloc(self.at.as_ptr(), layout) };
        }
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { dealloc(self.at.as_ptr(), self.layout) };
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.len)
    }
}

fn zeroed(layout: Layout) -> Result<NonNull<u8>> {
    // SAFETY: no layout here has size 0.
    let at = NonNull::new(unsafe { alloc_zeroed(layout) });
    at.ok_or_else(|| Error::new(ErrorKind::Capacity, format!("no memory for {} bytes", layout.size())))
}
