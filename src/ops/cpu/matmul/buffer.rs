//! Memory aligned to cache lines.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// A cache line, and the widest vector register.
const ALIGNMENT: usize = 64;

/// Zeroed bytes at an address that is a multiple of 64.
pub(super) struct AlignedBuffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its bytes; shared references only read them.
unsafe impl Send for AlignedBuffer {}
// SAFETY: as above.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// `len` zero bytes, or `None` if there is no memory for them.
    ///
    /// The operating system maps large allocations when they are first written, so that the threads
    /// that fill the buffer also share that work.
    pub(super) fn zeroed(len: usize) -> Option<Self> {
        if len == 0 {
            return Some(Self::empty());
        }
        let layout = Layout::from_size_align(len, ALIGNMENT).ok()?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start, len })
    }

    /// No bytes.
    pub(super) fn empty() -> Self {
        Self { start: NonNull::dangling(), len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        // SAFETY: the buffer owns `len` initialised bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated in `zeroed` with the same size and alignment.
            unsafe { dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.len, ALIGNMENT)) }
        }
    }
}

/// A pointer that tasks on several threads may use, because each writes its own elements.
#[derive(Clone, Copy)]
pub(super) struct SharedPointer<T>(*mut T);

// SAFETY: the users of a `SharedPointer` write disjoint elements and nobody reads them meanwhile.
unsafe impl<T> Send for SharedPointer<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SharedPointer<T> {}

impl<T> SharedPointer<T> {
    pub(super) fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    pub(super) fn get(self) -> *mut T {
        self.0
    }
}
