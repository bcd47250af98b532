//! Which pages of a mapped file are in memory, what is read before it is needed, and the room of a disk: what the
//! operating system knows.

use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;

/// Pages that are looked at in one call, and read together.
const WINDOW_PAGES: usize = 1_024;

/// Bytes of the map that are in memory; none if the system does not tell.
pub(super) fn resident_bytes(map: &Mmap) -> Option<u64> {
    let page = page_size()?;
    let windows = map.chunks(WINDOW_PAGES * page);
    let pages = windows.map(|window| resident_pages(window, page)).sum::<Option<usize>>()?;
    // The last page may be longer than the file.
    Some(((pages * page) as u64).min(map.len() as u64))
}

/// Has the system read what is not in memory of these bytes, without waiting for it.
///
/// Where all is in memory it only looks: to ask for pages that are there takes longer than to see that they are.
pub(super) fn fetch(map: &Mmap, bytes: Range<usize>) {
    #[cfg(unix)]
    {
        let page = page_size().unwrap_or(4096);
        for start in bytes.clone().step_by(WINDOW_PAGES * page) {
            let window = start..bytes.end.min(start + WINDOW_PAGES * page);
            let num_pages = window.len().div_ceil(page);
            if resident_pages(&map[window.clone()], page) != Some(num_pages) {
                // Advice that is not taken costs time, nothing else.
                let _ = map.advise_range(memmap2::Advice::WillNeed, window.start, window.len());
            }
        }
    }
    #[cfg(not(unix))]
    let _ = (map, bytes);
}

/// Bytes that may be written to the disk of a folder.
pub(super) fn free_disk_bytes(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        // The types differ between systems.
        fn product(blocks: impl Into<u64>, bytes: impl Into<u64>) -> Option<u64> {
            blocks.into().checked_mul(bytes.into())
        }
        let disk = nix::sys::statvfs::statvfs(folder).ok()?;
        product(disk.blocks_available(), disk.fragment_size())
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}

/// Of `bytes`, which begin at a page and are at most [`WINDOW_PAGES`] long.
#[cfg(unix)]
fn resident_pages(bytes: &[u8], page: usize) -> Option<usize> {
    let mut flags = [0_u8; WINDOW_PAGES];
    let num_pages = bytes.len().div_ceil(page);
    let flags = flags.get_mut(..num_pages)?;
    // SAFETY: the bytes are mapped, and there is a flag for each of their pages.
    let result = unsafe {
        nix::libc::mincore(bytes.as_ptr().cast_mut().cast(), bytes.len(), flags.as_mut_ptr().cast())
    };
    (result == 0).then(|| flags.iter().filter(|flag| **flag & 1 == 1).count())
}

#[cfg(not(unix))]
fn resident_pages(_bytes: &[u8], _page: usize) -> Option<usize> {
    None
}

#[cfg(unix)]
fn page_size() -> Option<usize> {
    // SAFETY: the call takes no memory and has no conditions.
    usize::try_from(unsafe { nix::libc::sysconf(nix::libc::_SC_PAGESIZE) }).ok()
}

#[cfg(not(unix))]
fn page_size() -> Option<usize> {
    None
}
