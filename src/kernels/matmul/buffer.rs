//! Large zeroed memory for weights and activations.

use memmap2::MmapMut;

/// Zeroed bytes that start at a page, on huge pages where the operating system gives them: at the speed of
/// memory, a page table walk every 4 KB costs a third of the bandwidth.
#[derive(Debug, Default)]
pub(super) struct AlignedBuffer(Option<MmapMut>);

impl AlignedBuffer {
    /// `len` zero bytes, or `None` if there is no memory for them.
    ///
    /// Pages are mapped when they are first written, so that the threads that fill the buffer also share
    /// the work of mapping it.
    pub(super) fn zeroed(len: usize) -> Option<Self> {
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
    pub(super) const fn empty() -> Self {
        Self(None)
    }

    pub(super) fn len(&self) -> usize {
        self.as_slice().len()
    }

    pub(super) fn as_ptr(&self) -> *const u8 {
        self.as_slice().as_ptr()
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.as_mut_slice().as_mut_ptr()
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or_default()
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
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
