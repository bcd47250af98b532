//! Large zeroed memory for weights and activations.

use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

/// Zeroed bytes that start at a page, on huge pages where the operating system gives them: at the speed of
/// memory, a page table walk every 4 KB costs a third of the bandwidth.
#[derive(Debug, Default)]
pub(crate) struct AlignedBuffer(Option<MmapMut>);

impl AlignedBuffer {
    /// `len` zero bytes, or `None` if there is no memory for them.
    ///
    /// Pages are mapped when they are first written, so that the threads that fill the buffer also share
    /// the work of mapping it.
    pub(crate) fn zeroed(len: usize) -> Option<Self> {
        if len == 0 {
            return Some(Self::empty());
        }
        let map = MmapMut::map_anon(len).ok()?;
        #[cfg(target_os = "linux")]
        {
            // Only a wish; without huge pages everything works the same.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Some(Self(Some(map)))
    }

    /// No bytes.
    pub(crate) const fn empty() -> Self {
        Self(None)
    }

    pub(crate) fn len(&self) -> usize {
        self.as_slice().len()
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.as_slice().as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.as_mut_slice().as_mut_ptr()
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or_default()
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

/// Prefetches data for a write or a read, if the target has an instruction for it.
#[inline(always)]
pub(crate) fn prefetch<const WRITE: bool>(start: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..len).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
        let address = start.wrapping_add(offset).cast();
        // SAFETY: a prefetch of any address is allowed.
        unsafe {
            if WRITE { _mm_prefetch::<_MM_HINT_ET0>(address) } else { _mm_prefetch::<_MM_HINT_T0>(address) }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, len);
}

/// Prefetches data for a later read into the second-level cache, if the target has an instruction for it. The
/// first-level cache would be slower: its queue of misses is short, and the loads need it.
#[inline(always)]
pub(crate) fn prefetch_early(start: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..len).step_by(64) {
        let address = start.wrapping_add(offset);
        // SAFETY: a prefetch of any address is allowed.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, len);
}

/// Makes the allocator return large memory to the system as soon as it is freed, for a process that lives long.
/// Otherwise glibc's allocator would adapt to the first large allocation and keep memory of that size, in a heap for
/// each of many threads.
pub fn keep_little_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// Allocations of this size have pages of their own, and ends of heaps of this size are given back.
        const MAX_KEPT_BYTES: std::ffi::c_int = 1 << 20;
        const M_TRIM_THRESHOLD: std::ffi::c_int = -1;
        const M_MMAP_THRESHOLD: std::ffi::c_int = -3;
        for param in [M_MMAP_THRESHOLD, M_TRIM_THRESHOLD] {
            set_allocator_option(param, MAX_KEPT_BYTES);
        }
    }
}

/// Makes all later threads share the first heap, for a process with limited address space: glibc's allocator reserves
/// 64 MiB of it for each further heap.
pub fn keep_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const M_ARENA_MAX: std::ffi::c_int = -8;
        set_allocator_option(M_ARENA_MAX, 1);
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn set_allocator_option(param: std::ffi::c_int, value: std::ffi::c_int) {
    use std::ffi::c_int;
    unsafe extern "C" {
        fn mallopt(param: c_int, value: c_int) -> c_int;
    }
    // SAFETY: the allocator's own way to set its parameters, at any time.
    unsafe { mallopt(param, value) };
}

/// Gives memory that was freed back to the operating system, also where something after it is in use. Takes some
/// milliseconds.
pub fn return_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: any thread may call it at any time; it changes no memory in use.
        unsafe { malloc_trim(0) };
    }
}

/// Zeroed f32 that start at a page. The system's allocator returns large arrays sixteen bytes after a page's start, so
/// that every vector of sixteen would be in two cache lines.
pub struct AlignedFloats {
    bytes: AlignedBuffer,
    len: usize,
}

impl AlignedFloats {
    /// `len` zeros, or `None` if there is no memory for them. Pages are mapped when they are first used.
    #[must_use]
    pub fn try_zeroed(len: usize) -> Option<Self> {
        let bytes = AlignedBuffer::zeroed(len.checked_mul(size_of::<f32>())?)?;
        Some(Self { bytes, len })
    }

    /// The same.
    ///
    /// # Panics
    /// If there is no memory, as in `Vec`.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        Self::try_zeroed(len).unwrap_or_else(|| panic!("no memory for {len} values"))
    }
}

impl std::fmt::Debug for AlignedFloats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedFloats({})", self.len)
    }
}

impl Deref for AlignedFloats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the bytes of `len` values start at a page, and any bits are an f32.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for AlignedFloats {
    fn deref_mut(&mut self) -> &mut [f32] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as above, and they are borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_mut_ptr().cast(), self.len) }
    }
}

/// A pointer that tasks on several threads may use, because each writes its own elements.
#[derive(Clone, Copy)]
pub(crate) struct SharedPointer<T>(*mut T);

// SAFETY: the users of a `SharedPointer` write disjoint elements and no code reads them at the same time.
unsafe impl<T> Send for SharedPointer<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SharedPointer<T> {}

impl<T> SharedPointer<T> {
    pub(crate) fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_start_at_a_line_and_are_zero() {
        for len in [1, 17, 1 << 20] {
            let mut floats = AlignedFloats::zeroed(len);
            assert_eq!((floats.as_ptr().addr() % 64, floats.len()), (0, len));
            assert!(floats.iter().all(|value| value.to_bits() == 0));
            floats[len - 1] = 1.5;
            assert_eq!(floats.last(), Some(&1.5));
        }
    }

    #[test]
    fn no_floats_and_too_many() {
        assert!(AlignedFloats::zeroed(0).is_empty());
        assert!(AlignedFloats::try_zeroed(usize::MAX).is_none());
        assert!(AlignedFloats::try_zeroed(usize::MAX / 8).is_none());
    }
}
