//! How much memory this process may still take.

use std::fs;
use std::path::{Path, PathBuf};

use tinyvllm_kernels::keep_one_heap;

use crate::{Error, ErrorKind, Result};

/// The minimum of address space with which a process starts to load a model: the memory plan's reserve for threads and
/// for unplanned memory, and a margin.
const LEAST_ADDRESSES: u64 = 288 << 20;

/// Bytes of memory that this process may still allocate: the system's available memory, the remaining limit of its
/// control groups, or that of its address space (`ulimit -v`), the least of them. Pages of files count as available in
/// the first two, because the system can evict them. 8 GiB if the system does not report any.
#[must_use]
pub fn available_memory_bytes() -> u64 {
    let root = Path::new("/");
    let left = Addresses::of_this_process(root).map(|addresses| addresses.left);
    [system_bytes(root), control_group_bytes(root), left].into_iter().flatten().min().unwrap_or(8 << 30)
}

/// Reports if this process has so little address space that it would die during its start: failed unplanned allocations
/// have no error. With limited address space, threads share allocator heaps. Must be called before other threads exist.
///
/// # Errors
/// With the limit and the rest of it.
pub fn check_addresses() -> Result<()> {
    match Addresses::of_this_process(Path::new("/")) {
        Some(addresses) => {
            keep_one_heap();
            addresses.check()
        }
        None => Ok(()),
    }
}

/// The limit of a process's address space in bytes, and the rest of it.
#[derive(Debug, PartialEq, Eq)]
struct Addresses {
    limit: u64,
    left: u64,
}

impl Addresses {
    /// None if there is no limit, or if it is unknown.
    fn of_this_process(root: &Path) -> Option<Self> {
        let limits = fs::read_to_string(root.join("proc/self/limits")).ok()?;
        let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
        let limit = line.split_whitespace().next()?.parse::<u64>().ok()?;
        let status = fs::read_to_string(root.join("proc/self/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
        let taken = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1_024)?;
        Some(Self { limit, left: limit.saturating_sub(taken) })
    }

    fn check(&self) -> Result<()> {
        let [limit, left, least] = [self.limit, self.left, LEAST_ADDRESSES].map(|bytes| bytes >> 20);
        if left >= least {
            return Ok(());
        }
        let message = format!(
            "this process may take {limit} MiB of address space (ulimit -v), of which {left} MiB are free; it needs \
             at least {least} MiB more, and space for the model"
        );
        Err(Error::new(ErrorKind::Capacity, message).with_hint("raise the limit, or start it without one"))
    }
}

fn system_bytes(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1_024)
}

/// The least remaining memory of this process's group and its parents, in either version of control groups.
fn control_group_bytes(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let lines = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        Some((fields.next()?, fields.next()?))
    });
    let version_2 = root.join("sys/fs/cgroup");
    let left_in = lines.filter_map(|(controllers, group)| {
        let files = match controllers {
            "" => Files { base: version_2.clone(), limit: "memory.max", usage: "memory.current", prefix: "" },
            _ if controllers.split(',').any(|controller| controller == "memory") => Files {
                base: version_2.join("memory"),
                limit: "memory.limit_in_bytes",
                usage: "memory.usage_in_bytes",
                prefix: "total_",
            },
            _ => return None,
        };
        // In a container the path may be that of the host, which is not there; the container's own group is the base.
        Path::new(group).ancestors().filter_map(|group| files.left(group)).min()
    });
    left_in.min()
}

/// The files of a version of control groups.
struct Files {
    base: PathBuf,
    limit: &'static str,
    usage: &'static str,
    /// Of the lines in `memory.stat` that count the groups inside too.
    prefix: &'static str,
}

impl Files {
    /// None if there is no limit.
    fn left(&self, group: &Path) -> Option<u64> {
        let folder = self.base.join(group.strip_prefix("/").unwrap_or(group));
        let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        let (limit, usage) = (number(self.limit)?, number(self.usage)?);
        let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let of_files = stat.lines().filter_map(|line| {
            let (name, value) = line.strip_prefix(self.prefix)?.split_once(' ')?;
            ["inactive_file", "active_file"].contains(&name).then(|| value.trim().parse::<u64>().ok())?
        });
        Some(limit.saturating_sub(usage.saturating_sub(of_files.sum())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn the_tightest_group_counts_without_its_pages_of_files() {
        let root = machine(&[
            ("proc/self/cgroup", "0::/system.slice/job\n"),
            ("sys/fs/cgroup/system.slice/memory.max", "900\n"),
            ("sys/fs/cgroup/system.slice/memory.current", "400\n"),
            ("sys/fs/cgroup/system.slice/job/memory.max", "1000\n"),
            ("sys/fs/cgroup/system.slice/job/memory.current", "700\n"),
            (
                "sys/fs/cgroup/system.slice/job/memory.stat",
                "anon 350\ninactive_file 250\nactive_file 100\ninactive_anon 7\n",
            ),
        ]);
        assert_eq!(control_group_bytes(root.path()), Some(500));
        fs::write(root.path().join("sys/fs/cgroup/system.slice/memory.max"), "max\n").unwrap();
        assert_eq!(control_group_bytes(root.path()), Some(650));
    }

    #[test]
    fn version_1_and_containers() {
        let groups = "5:cpu,cpuacct:/a\n4:memory:/host/b\n0::/\n";
        let root = machine(&[
            ("proc/self/cgroup", groups),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "600"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 50\n"),
        ]);
        assert_eq!(control_group_bytes(root.path()), Some(450));
        assert_eq!(control_group_bytes(machine(&[("proc/self/cgroup", groups)]).path()), None);
        assert_eq!(control_group_bytes(machine(&[]).path()), None);
        // A group that is over its limit already.
        fs::write(root.path().join("sys/fs/cgroup/memory/memory.limit_in_bytes"), "500").unwrap();
        assert_eq!(control_group_bytes(root.path()), Some(0));
    }

    #[test]
    fn a_limit_of_addresses_counts_and_too_few_are_an_error() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max address space         500000000            unlimited            bytes     \n";
        let root = machine(&[
            ("proc/self/limits", limits),
            ("proc/self/status", "VmPeak: 9 kB\nVmSize:\t  100000 kB\n"),
        ]);
        let addresses = Addresses::of_this_process(root.path()).unwrap();
        assert_eq!(addresses, Addresses { limit: 500_000_000, left: 500_000_000 - 102_400_000 });
        addresses.check().unwrap();
        let error = Addresses { limit: 200 << 20, left: 90 << 20 }.check().unwrap_err();
        assert!(error.message().contains("200 MiB") && error.message().contains("90 MiB"), "{error}");
        let root = machine(&[("proc/self/limits", "Max address space  unlimited unlimited bytes\n")]);
        assert_eq!(Addresses::of_this_process(root.path()), None);
    }

    #[test]
    fn the_machine_has_some_memory() {
        assert!(available_memory_bytes() > 16 << 20);
        let root = machine(&[("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   4 kB\n")]);
        assert_eq!(system_bytes(root.path()), Some(4_096));
    }
}
