//! How much memory the cache of decoded chunks may take, and when it gives some back.
//!
//! The limit is that of the machine or, where one is set, of the control group (version 2)
//! that the process runs in. The cache may take an eighth of it. While little is available
//! the cache shrinks, and it grows back when there is enough again: a guest that starts
//! beside the server needs the memory more.

use std::path::{Path, PathBuf};

/// The cache takes at most one part in this many of the memory limit.
const SHARE: u64 = 8;
/// Below one part in this many of the limit available, the cache shrinks.
const SCARCE: u64 = 16;
/// Above one part in this many available, the cache grows again.
const PLENTY: u64 = 8;
/// The cache never shrinks below this, in bytes.
const LEAST_BYTES: u64 = 16 << 20;
/// Where the kernel's file of memory cannot be read.
const UNKNOWN_LIMIT_BYTES: u64 = 512 << 20;

/// The default size of the cache of decoded chunks, in bytes: an eighth of the memory that
/// this process may use.
pub fn default_cache_bytes() -> u64 {
    share_of(Memory::of_this_process().limit_bytes())
}

fn share_of(limit_bytes: u64) -> u64 {
    (limit_bytes / SHARE).max(LEAST_BYTES)
}

/// Where the kernel tells what memory there is.
pub(crate) struct Memory {
    meminfo: PathBuf,
    /// The process's control group and those above it, as far as they have a limit.
    groups: Vec<PathBuf>,
}

impl Memory {
    pub(crate) fn of_this_process() -> Memory {
        Memory::at(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
    }

    fn at(proc: &Path, control_groups: &Path) -> Memory {
        let own = std::fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let groups = control_groups.join(own);
        let groups = groups.ancestors().take_while(|group| group.starts_with(control_groups));
        let limited = groups.filter(|group| group_limit(group).is_some());
        Memory { meminfo: proc.join("meminfo"), groups: limited.map(Path::to_owned).collect() }
    }

    fn limit_bytes(&self) -> u64 {
        let machine = self.meminfo_bytes("MemTotal:").unwrap_or(UNKNOWN_LIMIT_BYTES);
        self.groups.iter().filter_map(|group| group_limit(group)).fold(machine, u64::min)
    }

    /// What can be allocated without swapping; `None` where the kernel does not tell.
    fn available_bytes(&self) -> Option<u64> {
        let machine = self.meminfo_bytes("MemAvailable:")?;
        Some(self.groups.iter().filter_map(|group| group_available(group)).fold(machine, u64::min))
    }

    fn meminfo_bytes(&self, field: &str) -> Option<u64> {
        let text = std::fs::read_to_string(&self.meminfo).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(field))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib << 10)
    }
}

/// `None` for a group without a limit.
fn group_limit(group: &Path) -> Option<u64> {
    std::fs::read_to_string(group.join("memory.max")).ok()?.trim().parse().ok()
}

fn group_available(group: &Path) -> Option<u64> {
    let used: u64 =
        std::fs::read_to_string(group.join("memory.current")).ok()?.trim().parse().ok()?;
    let statistics = std::fs::read_to_string(group.join("memory.stat")).ok()?;
    let statistic = |name: &str| {
        let value = statistics.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().parse::<u64>().ok()
    };
    // Pages of files can be dropped, but not those of shared memory.
    let files = statistic("file ")?.saturating_sub(statistic("shmem ")?);
    Some(group_limit(group)?.saturating_sub(used.saturating_sub(files)))
}

/// Decides how large a cache may be, from one look at the memory to the next.
pub(crate) struct CacheSizer {
    memory: Memory,
    limit_bytes: u64,
    /// The size that was asked for, in bytes.
    wanted_bytes: u64,
    allowed_bytes: u64,
}

impl CacheSizer {
    /// For a cache that holds up to `wanted_bytes` now.
    pub(crate) fn new(memory: Memory, wanted_bytes: u64) -> CacheSizer {
        let limit_bytes = memory.limit_bytes();
        CacheSizer { memory, limit_bytes, wanted_bytes, allowed_bytes: wanted_bytes }
    }

    /// The size that the cache of now `used_bytes` shall have, where that has changed.
    pub(crate) fn look(&mut self, used_bytes: u64) -> Option<u64> {
        let available = self.memory.available_bytes()?;
        let allowed = if available < self.limit_bytes / SCARCE {
            // What is missing, and half of the rest, since more will be asked for.
            let missing = self.limit_bytes / SCARCE - available;
            (used_bytes.min(self.allowed_bytes).saturating_sub(missing) / 2)
                .max(LEAST_BYTES.min(self.wanted_bytes))
        } else if available > self.limit_bytes / PLENTY {
            let spare = available - self.limit_bytes / PLENTY;
            (used_bytes + spare / 2).max(self.allowed_bytes).min(self.wanted_bytes)
        } else {
            self.allowed_bytes
        };
        let is_new = allowed != self.allowed_bytes;
        self.allowed_bytes = allowed;
        is_new.then_some(allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    struct Kernel(tempfile::TempDir);

    impl Kernel {
        fn new(total_mib: u64) -> Kernel {
            let kernel = Kernel(tempfile::tempdir().unwrap());
            std::fs::create_dir_all(kernel.0.path().join("self")).unwrap();
            std::fs::create_dir_all(kernel.0.path().join("groups/site/server")).unwrap();
            kernel.write("self/cgroup", "0::/site/server\n");
            kernel.available(total_mib, total_mib);
            kernel
        }

        fn write(&self, name: &str, text: &str) {
            std::fs::write(self.0.path().join(name), text).unwrap();
        }

        fn available(&self, total_mib: u64, available_mib: u64) {
            let (total, available) = (total_mib << 10, available_mib << 10);
            let text =
                format!("MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n");
            self.write("meminfo", &text);
        }

        fn memory(&self) -> Memory {
            Memory::at(self.0.path(), &self.0.path().join("groups"))
        }
    }

    #[test]
    fn an_eighth_of_the_machine_or_of_the_tightest_control_group() {
        let kernel = Kernel::new(24 << 10);
        assert_eq!(share_of(kernel.memory().limit_bytes()), 3072 * MIB);
        kernel.write("groups/site/server/memory.max", "max\n");
        kernel.write("groups/site/memory.max", "2147483648\n");
        assert_eq!(share_of(kernel.memory().limit_bytes()), 256 * MIB);
        assert_eq!(share_of(Kernel::new(64).memory().limit_bytes()), LEAST_BYTES);
    }

    #[test]
    fn pages_of_files_of_a_control_group_are_available_and_shared_memory_is_not() {
        let kernel = Kernel::new(24 << 10);
        kernel.write("groups/site/memory.max", &(1000 * MIB).to_string());
        kernel.write("groups/site/memory.current", &(900 * MIB).to_string());
        let statistics = format!("anon 1\nfile {}\nshmem {}\n", 500 * MIB, 200 * MIB);
        kernel.write("groups/site/memory.stat", &statistics);
        assert_eq!(kernel.memory().available_bytes(), Some(400 * MIB));
    }

    #[test]
    fn a_cache_shrinks_while_memory_is_scarce_and_grows_back() {
        let kernel = Kernel::new(16 << 10);
        let mut sizer = CacheSizer::new(kernel.memory(), 2048 * MIB);
        assert_eq!(sizer.look(2048 * MIB), None);
        // Between scarce and plenty nothing changes.
        kernel.available(16 << 10, 1500);
        assert_eq!(sizer.look(2048 * MIB), None);
        kernel.available(16 << 10, 1000);
        assert_eq!(sizer.look(2048 * MIB), Some((2048 - 24) / 2 * MIB));
        kernel.available(16 << 10, 0);
        assert_eq!(sizer.look(1012 * MIB), Some(LEAST_BYTES));
        kernel.available(16 << 10, 3048);
        assert_eq!(sizer.look(LEAST_BYTES), Some(LEAST_BYTES + 500 * MIB));
        kernel.available(16 << 10, 15 << 10);
        assert_eq!(sizer.look(LEAST_BYTES), Some(2048 * MIB));
    }

    #[test]
    fn a_small_cache_that_was_asked_for_does_not_grow() {
        let kernel = Kernel::new(1024);
        let mut sizer = CacheSizer::new(kernel.memory(), MIB);
        kernel.available(1024, 0);
        assert_eq!(sizer.look(MIB), None);
    }
}
