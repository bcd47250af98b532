//! Queries to the operating system: which pages of a mapped file are in memory, read-ahead, and the space on a disk.

use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;

/// Pages that are looked at in one call.
const WINDOW_PAGES: usize = 1_024;

/// Bytes that are asked for in one call. Of longer ranges Linux reads no more than the readahead of the disk, which is
/// this much unless it was changed.
#[cfg(unix)]
const REQUEST_BYTES: usize = 128 << 10;

/// Bytes of the map that are in memory; none if the system does not report it.
pub(super) fn resident_bytes(map: &Mmap) -> Option<u64> {
    let page = page_size()?;
    let mut flags = [0; WINDOW_PAGES];
    let mut num_pages = 0;
    for window in map.chunks(WINDOW_PAGES * page) {
        num_pages += residency(window, page, &mut flags)?.iter().filter(|flag| is_resident(**flag)).count();
    }
    // The last page may be longer than the file.
    Some(((num_pages * page) as u64).min(map.len() as u64))
}

/// Starts to read the bytes of this range that are not in memory, without waiting.
///
/// Where all is in memory it only looks: to ask for pages that are there takes longer than to see that they are.
pub(super) fn fetch(map: &Mmap, bytes: Range<usize>) {
    #[cfg(unix)]
    {
        let page = page_size().unwrap_or(4096);
        let mut flags = [0; WINDOW_PAGES];
        for start in bytes.clone().step_by(WINDOW_PAGES * page) {
            let window = start..bytes.end.min(start + WINDOW_PAGES * page);
            let flags = residency(&map[window.clone()], page, &mut flags);
            for start in window.clone().step_by(REQUEST_BYTES) {
                let request = start..window.end.min(start + REQUEST_BYTES);
                let first_page = (start - window.start) / page;
                let flags = flags.map(|flags| &flags[first_page..][..request.len().div_ceil(page)]);
                if !flags.is_some_and(|flags| flags.iter().all(|flag| is_resident(*flag))) {
                    // If the system ignores the advice, only time is lost.
                    let _ = map.advise_range(memmap2::Advice::WillNeed, request.start, request.len());
                }
            }
        }
    }
    #[cfg(not(unix))]
    let _ = (map, bytes);
}

fn is_resident(flag: u8) -> bool {
    flag & 1 == 1
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

/// A flag for each page of `bytes`, which begin at a page and are at most [`WINDOW_PAGES`] long.
#[cfg(unix)]
fn residency<'f>(bytes: &[u8], page: usize, flags: &'f mut [u8; WINDOW_PAGES]) -> Option<&'f [u8]> {
    let flags = flags.get_mut(..bytes.len().div_ceil(page))?;
    // SAFETY: the bytes are mapped, and there is a flag for each of their pages.
    let result = unsafe {
        nix::libc::mincore(bytes.as_ptr().cast_mut().cast(), bytes.len(), flags.as_mut_ptr().cast())
    };
    (result == 0).then_some(&*flags)
}

#[cfg(not(unix))]
fn residency<'f>(_bytes: &[u8], _page: usize, _flags: &'f mut [u8; WINDOW_PAGES]) -> Option<&'f [u8]> {
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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs::File;
    use std::time::{Duration, Instant};

    use memmap2::MmapOptions;
    use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

    use super::*;

    /// More than a disk reads ahead by itself, without an access to any page.
    #[test]
    fn fetched_pages_are_in_memory() {
        const LEN: usize = 6 << 20;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![1; LEN]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        file.sync_all().unwrap();
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
        // SAFETY: no other code uses the file.
        let map = unsafe { MmapOptions::new().map(&file) }.unwrap();
        let before = resident_bytes(&map).unwrap();
        let range = (1 << 20)..(4 << 20) + 1;
        fetch(&map, range.clone());
        let start = Instant::now();
        // Of a file system in memory, all is there from the beginning.
        while resident_bytes(&map).unwrap() < before.max(range.len() as u64) {
            assert!(start.elapsed() < Duration::from_secs(20), "{:?} of {range:?}", resident_bytes(&map));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(map[4 << 20], 1);
    }
}
