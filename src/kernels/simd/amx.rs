//! Intel's matrix unit, AMX.
//!
//! Rust has no stable intrinsics for it, so its instructions are assembly. The compiler never uses tile registers by
//! itself: their contents persist until another block below changes them.

use std::arch::asm;
use std::marker::PhantomData;
use std::sync::LazyLock;

use super::tiles::{ByteTiles, TileSums};

/// Whether this process may use AMX. The first call asks the kernel, for all threads and for good.
pub(super) fn is_available() -> bool {
    static IS_AVAILABLE: LazyLock<bool> = LazyLock::new(|| has_instructions() && is_permitted());
    *IS_AVAILABLE
}

/// Whether the processor has tiles and byte dot products and of bf16.
fn has_instructions() -> bool {
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    const BF16: u32 = 1 << 22;
    const ALL: u32 = TILE | INT8 | BF16;
    let highest_leaf = std::arch::x86_64::__cpuid(0).eax;
    highest_leaf >= 7 && std::arch::x86_64::__cpuid_count(7, 0).edx & ALL == ALL
}

/// Whether the system lets this process use tile registers: it saves their 8 KB for each thread that does, so a process
/// has to request them. Systems without support refuse.
fn is_permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: nix::libc::c_ulong = 0x1023;
        const XFEATURE_XTILEDATA: nix::libc::c_ulong = 18;
        let call = nix::libc::SYS_arch_prctl;
        // SAFETY: this call takes two numbers and touches no memory.
        unsafe { nix::libc::syscall(call, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// The shapes of the eight tile registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

const _: () = assert!(size_of::<TileConfig>() == 64);

/// Sums in registers 0 to 3, activations in 4 and 5, codes in 6 and 7.
static CONFIG: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes_per_row: [64, 64, 64, 64, 32, 32, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Configures the tile registers of this thread.
///
/// # Safety
/// [`is_available`].
unsafe fn configure(config: &TileConfig) {
    let config: *const TileConfig = config;
    // SAFETY: the machine has the instruction, and the kernel lets this process use it. The whole configuration is
    // readable.
    unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, preserves_flags, readonly)) };
}

/// Empties the tile registers of this thread.
///
/// # Safety
/// [`is_available`].
unsafe fn release() {
    // SAFETY: the machine has the instruction.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
}

/// `sums = activations · codes`, in the registers of these numbers; without `$from` the activations are there already.
macro_rules! multiply {
    ($sums:literal, $activations:literal, $codes:literal, $from:ident, $by:ident) => {{
        asm!(
            concat!("tileloadd tmm", $activations, ", [{from} + {row}*1]"),
            from = in(reg) $from,
            row = in(reg) 32_usize,
            options(nostack, preserves_flags, readonly),
        );
        multiply!($sums, $activations, $codes, $by);
    }};
    ($sums:literal, $activations:literal, $codes:literal, $by:ident) => {
        asm!(
            concat!("tileloadd tmm", $codes, ", [{by} + {word}*1]"),
            concat!("tilezero tmm", $sums),
            concat!("tdpbssd tmm", $sums, ", tmm", $activations, ", tmm", $codes),
            by = in(reg) $by,
            word = in(reg) 64_usize,
            options(nostack, preserves_flags, readonly),
        )
    };
}

/// Writes the sums in register `register`, 0 to 3: rows of 64 bytes.
///
/// # Safety
/// The registers are configured, and there is space for the rows.
#[inline(always)]
unsafe fn store(register: usize, sums: *mut u8) {
    macro_rules! store {
        ($register:literal) => {
            asm!(
                concat!("tilestored [{sums} + {row}*1], tmm", $register),
                sums = in(reg) sums,
                row = in(reg) 64_usize,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: the caller's guarantee.
    unsafe {
        match register {
            0 => store!("0"),
            1 => store!("1"),
            2 => store!("2"),
            _ => store!("3"),
        }
    }
}

/// The matrix unit, configured for this thread. Dropping it empties the registers, so that the system has nothing to
/// save.
pub(crate) struct MatrixUnit(PhantomData<*const ()>);

impl MatrixUnit {
    /// # Safety
    /// [`is_available`], and this thread has no other one.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: the caller's guarantee.
        unsafe { configure(&CONFIG) };
        Self(PhantomData)
    }
}

impl Drop for MatrixUnit {
    fn drop(&mut self) {
        // SAFETY: a value exists only where the unit is available.
        unsafe { release() };
    }
}

/// The matrix unit for bf16 dot products, configured for this thread: sums of up to four panels of up to sixteen input
/// rows, each with sixteen weight rows. They are added in one order, and each row separately.
pub(crate) struct Bf16Unit(PhantomData<*const ()>);

/// `sums += activations · weights`, in the registers of these numbers.
macro_rules! add_bf16 {
    ($sums:literal, $activations:literal, $weights:literal) => {
        asm!(
            concat!("tdpbf16ps tmm", $sums, ", tmm", $activations, ", tmm", $weights),
            options(nostack, preserves_flags, nomem),
        )
    };
}

/// Reads rows of 64 bytes.
macro_rules! load_bf16 {
    ($register:literal, $from:expr) => {
        asm!(
            concat!("tileloadd tmm", $register, ", [{from} + {row}*1]"),
            from = in(reg) $from,
            row = in(reg) 64_usize,
            options(nostack, preserves_flags, readonly),
        )
    };
}

impl Bf16Unit {
    /// Panels whose sums it has space for.
    pub(crate) const MAX_PANELS: usize = 4;

    /// All sums are zero.
    ///
    /// # Safety
    /// [`is_available`], and this thread has no other unit.
    pub(crate) unsafe fn new(num_rows: usize) -> Self {
        assert!((1..=16).contains(&num_rows), "{num_rows} rows in a tile");
        let mut config =
            TileConfig { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
        // Sums in registers 0 to 3, activations in 4 and 5, weights in 6.
        config.bytes_per_row[..7].fill(64);
        config.rows[..6].fill(num_rows as u8);
        config.rows[6] = 16;
        // SAFETY: the caller's guarantee.
        unsafe {
            configure(&config);
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, preserves_flags, nomem)
            );
        }
        Self(PhantomData)
    }

    /// Adds the dot products of 32 columns of `PANELS` panels, one or all, which are `stride` bytes apart: rows of 32 bf16 with
    /// sixteen words of pairs, each of sixteen weight rows.
    ///
    /// # Safety
    /// The panels exist.
    #[inline(always)]
    pub(crate) unsafe fn add<const PANELS: usize>(
        &mut self,
        activations: *const u8,
        stride: usize,
        weights: *const u8,
    ) {
        // SAFETY: the registers are configured as long as there is a value; the caller guarantees the bytes.
        unsafe {
            load_bf16!("6", weights);
            load_bf16!("4", activations);
            add_bf16!("0", "4", "6");
            if PANELS == Self::MAX_PANELS {
                load_bf16!("5", activations.add(stride));
                add_bf16!("1", "5", "6");
                load_bf16!("4", activations.add(2 * stride));
                add_bf16!("2", "4", "6");
                load_bf16!("5", activations.add(3 * stride));
                add_bf16!("3", "5", "6");
            }
        }
    }

    /// Writes the sums of panel `panel`, sixteen f32 for each row.
    ///
    /// # Safety
    /// There is space for them.
    #[inline(always)]
    pub(crate) unsafe fn store(&mut self, panel: usize, sums: *mut f32) {
        // SAFETY: as above.
        unsafe { store(panel, sums.cast()) };
    }
}

impl Drop for Bf16Unit {
    fn drop(&mut self) {
        // SAFETY: a value exists only where the unit is available.
        unsafe { release() };
    }
}

// SAFETY: tile loads and stores access the ranges in `CONFIG`, which are those that the trait documents.
unsafe impl ByteTiles for MatrixUnit {
    #[inline(always)]
    unsafe fn multiply(&mut self, slot: usize, activations: *const i8, codes: *const i8) {
        // SAFETY: the registers are configured as long as there is a value; the caller guarantees the bytes.
        unsafe {
            match slot {
                0 => multiply!("0", "4", "6", activations, codes),
                1 => multiply!("1", "5", "7", activations, codes),
                2 => multiply!("2", "5", "6", activations, codes),
                _ => multiply!("3", "4", "7", activations, codes),
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply_again(&mut self, slot: usize, codes: *const i8) {
        // SAFETY: as above.
        unsafe {
            match slot {
                1 => multiply!("1", "4", "7", codes),
                _ => multiply!("3", "5", "7", codes),
            }
        }
    }

    #[inline(always)]
    unsafe fn store(&mut self, slot: usize, sums: *mut TileSums) {
        // SAFETY: as above.
        unsafe { store(slot, sums.cast()) };
    }
}
