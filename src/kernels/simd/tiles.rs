//! Matmuls of whole tiles of bytes: sixteen input rows by sixteen weight rows over 32 columns at once.
//!
//! The sums are exact in i32, so they are those that [`super::Int8Dot`] has for the same codes.

/// The sums of sixteen input rows, each with sixteen weight rows.
#[repr(C, align(64))]
pub(crate) struct TileSums(pub(crate) [[i32; 16]; 16]);

/// A matrix unit that multiplies tiles of bytes.
///
/// A value of it is the unit of the thread that made it, ready for use until the value is dropped. Sums are kept in
/// slots 0..4 until they are stored, so that the unit computes while other results are used.
///
/// # Safety
/// Pointers are valid for the elements that a method names, without alignment.
pub(crate) unsafe trait ByteTiles {
    /// Slot `slot` = the dot products of sixteen rows of 32 activations, one row after another, with eight words of codes;
    /// each word has four codes of each of the sixteen weight rows.
    unsafe fn multiply(&mut self, slot: usize, activations: *const i8, codes: *const i8);
    /// The same for slot 1 or 3, with the activations that were last multiplied into the slot before it.
    unsafe fn multiply_again(&mut self, slot: usize, codes: *const i8);
    /// Writes slot `slot`.
    unsafe fn store(&mut self, slot: usize, sums: *mut TileSums);
}

/// The unit of machines that have none.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) enum MatrixUnit {}

/// The same for bf16.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) enum Bf16Unit {}

#[cfg(not(target_arch = "x86_64"))]
impl Bf16Unit {
    pub(crate) const MAX_PANELS: usize = 4;

    pub(crate) unsafe fn add<const PANELS: usize>(&mut self, _: *const u8, _: usize, _: *const u8) {
        match *self {}
    }

    pub(crate) unsafe fn store(&mut self, _: usize, _: *mut f32) {
        match *self {}
    }
}

// SAFETY: there is no value.
#[cfg(not(target_arch = "x86_64"))]
unsafe impl ByteTiles for MatrixUnit {
    unsafe fn multiply(&mut self, _: usize, _: *const i8, _: *const i8) {
        match *self {}
    }

    unsafe fn multiply_again(&mut self, _: usize, _: *const i8) {
        match *self {}
    }

    unsafe fn store(&mut self, _: usize, _: *mut TileSums) {
        match *self {}
    }
}

/// Emulates the matrix unit in plain Rust: for tests on machines without one.
#[cfg(test)]
pub(crate) struct SoftwareTiles {
    slots: [[[i32; 16]; 16]; 4],
    activations: [[[[i8; 4]; 8]; 16]; 4],
}

#[cfg(test)]
impl SoftwareTiles {
    pub(crate) fn new() -> Self {
        Self { slots: [[[0x5555; 16]; 16]; 4], activations: [[[[0x55; 4]; 8]; 16]; 4] }
    }

    fn multiply_loaded(&mut self, slot: usize, activations: [[[i8; 4]; 8]; 16], codes: [[[i8; 4]; 16]; 8]) {
        self.slots[slot] = [[0; 16]; 16];
        for (sums, activations) in self.slots[slot].iter_mut().zip(activations) {
            for (activations, codes) in activations.iter().zip(codes) {
                for (sum, codes) in sums.iter_mut().zip(codes) {
                    for (&activation, code) in activations.iter().zip(codes) {
                        // The unit's accumulator wraps; 32 byte dot products never reach its limit.
                        *sum = sum.wrapping_add(i32::from(activation) * i32::from(code));
                    }
                }
            }
        }
    }
}

// SAFETY: reads and writes the ranges that the trait documents.
#[cfg(test)]
unsafe impl ByteTiles for SoftwareTiles {
    unsafe fn multiply(&mut self, slot: usize, activations: *const i8, codes: *const i8) {
        // SAFETY: the caller guarantees 16 × 32 activations and 8 × 16 × 4 codes.
        let codes = unsafe {
            self.activations[slot] = activations.cast::<[[[i8; 4]; 8]; 16]>().read_unaligned();
            codes.cast::<[[[i8; 4]; 16]; 8]>().read_unaligned()
        };
        self.multiply_loaded(slot, self.activations[slot], codes);
    }

    unsafe fn multiply_again(&mut self, slot: usize, codes: *const i8) {
        assert!(slot == 1 || slot == 3, "slot {slot} has no other one before it");
        // SAFETY: the caller guarantees 8 × 16 × 4 codes.
        let codes = unsafe { codes.cast::<[[[i8; 4]; 16]; 8]>().read_unaligned() };
        self.multiply_loaded(slot, self.activations[slot - 1], codes);
    }

    unsafe fn store(&mut self, slot: usize, sums: *mut TileSums) {
        // SAFETY: the caller guarantees that it is writable.
        unsafe { sums.cast::<[[i32; 16]; 16]>().write_unaligned(self.slots[slot]) }
    }
}
