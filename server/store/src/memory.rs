//! Memory limit of the cache of decoded chunks.
//!
//! The limit is that of the machine or, if one is set, of the control group (version 1 or 2) of
//! the process. The cache may take an eighth of it. While little memory is available the cache shrinks,
//! and it grows back when there is enough again: a guest that starts beside the server needs the
//! memory more.

use std::path::{Path, PathBuf};

/// The cache takes at most one part in this many of the memory limit.
const SHARE: u64 = 8;
/// Below one part in this many of the limit available, the cache shrinks.
const SCARCE: u64 = 16;
/// Above one part in this many available, the cache grows again.
const PLENTY: u64 = 8;
/// The cache never shrinks below this, in bytes.
const LEAST_BYTES: u64 = 16 << 20;
/// The limit if the kernel's memory file cannot be read.
const UNKNOWN_LIMIT_BYTES: u64 = 512 << 20;

/// The default size of the cache of decoded chunks, in bytes: an eighth of the memory that
/// this process may use.
pub fn default_cache_bytes() -> u64 {
    share_of(Memory::of_this_process().limit_bytes())
}

/// The memory of the machine, or of this process's control group if that is less, in bytes.
pub fn memory_limit_bytes() -> u64 {
    Memory::of_this_process().limit_bytes()
}

/// Memory that this process may still allocate without swapping, in bytes; `None` if the kernel
/// does not report it.
pub fn available_memory_bytes() -> Option<u64> {
    Memory::of_this_process().available_bytes()
}

fn share_of(limit_bytes: u64) -> u64 {
    (limit_bytes / SHARE).max(LEAST_BYTES)
}

/// A version of the kernel's control groups.
struct GroupVersion {
    /// The type of its file system.
    mount_type: &'static str,
    /// The field of `/proc/self/cgroup` that names the controllers; empty in version 2.
    controller: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat`.
    files: &'static str,
    shared: &'static str,
}

/// A machine can have both versions mounted; only one of them controls its memory.
const VERSIONS: [GroupVersion; 2] = [
    GroupVersion {
        mount_type: "cgroup2",
        controller: "",
        limit: "memory.max",
        used: "memory.current",
        files: "file ",
        shared: "shmem ",
    },
    GroupVersion {
        mount_type: "cgroup",
        controller: "memory",
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        files: "total_cache ",
        shared: "total_shmem ",
    },
];

/// Version 1 reports a limit close to 2^63 bytes for a group without a limit.
const UNLIMITED_BYTES: u64 = 1 << 62;

/// A control group with a memory limit.
struct Group {
    folder: PathBuf,
    version: &'static GroupVersion,
}

/// The kernel's files about memory.
pub(crate) struct Memory {
    meminfo: PathBuf,
    /// The process's control group and its parents, if they have a limit.
    groups: Vec<Group>,
}

impl Memory {
    pub(crate) fn of_this_process() -> Memory {
        Memory::at(Path::new("/proc"))
    }

    fn at(proc: &Path) -> Memory {
        let read = |name: &str| std::fs::read_to_string(proc.join(name)).unwrap_or_default();
        let (own, mounts) = (read("self/cgroup"), read("self/mountinfo"));
        let of_version = |version| limited_groups(version, &own, &mounts);
        let groups = VERSIONS.iter().filter_map(of_version).flatten().collect();
        Memory { meminfo: proc.join("meminfo"), groups }
    }

    fn limit_bytes(&self) -> u64 {
        let machine = self.meminfo_bytes("MemTotal:").unwrap_or(UNKNOWN_LIMIT_BYTES);
        self.groups.iter().filter_map(Group::limit_bytes).fold(machine, u64::min)
    }

    /// Memory that can be allocated without swapping; `None` if the kernel does not report it.
    fn available_bytes(&self) -> Option<u64> {
        let machine = self.meminfo_bytes("MemAvailable:")?;
        Some(self.groups.iter().filter_map(Group::available_bytes).fold(machine, u64::min))
    }

    fn meminfo_bytes(&self, field: &str) -> Option<u64> {
        let text = std::fs::read_to_string(&self.meminfo).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(field))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib << 10)
    }
}

/// The process's control group and its parents, if they have a limit. `own` is the text of
/// `/proc/self/cgroup`, `mounts` that of `/proc/self/mountinfo`. `None` if this version is not
/// mounted with the memory controller.
fn limited_groups(version: &'static GroupVersion, own: &str, mounts: &str) -> Option<Vec<Group>> {
    let path = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let is_memory = fields.next()?.split(',').any(|name| name == version.controller);
        fields.next().filter(|_| is_memory)
    })?;
    let (root, mount) = mounts.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let is_version = kind.next()? == version.mount_type;
        let mut options = kind.next_back()?.split(',');
        let has_memory = version.controller.is_empty() || options.any(|o| o == version.controller);
        let mut place = place.split(' ').skip(3);
        Some((place.next()?, Path::new(place.next()?))).filter(|_| is_version && has_memory)
    })?;
    // A container may see only its own part of the tree of groups.
    let visible = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
    let folder = mount.join(visible);
    let folders = folder.ancestors().take_while(|folder| folder.starts_with(mount));
    let groups = folders.map(|folder| Group { folder: folder.to_owned(), version });
    Some(groups.filter(|group| group.limit_bytes().is_some()).collect())
}

impl Group {
    /// `None` for a group without a limit.
    fn limit_bytes(&self) -> Option<u64> {
        self.number(self.version.limit).filter(|bytes| *bytes < UNLIMITED_BYTES)
    }

    fn available_bytes(&self) -> Option<u64> {
        let used = self.number(self.version.used)?;
        let statistics = std::fs::read_to_string(self.folder.join("memory.stat")).ok()?;
        let statistic = |name: &str| {
            let value = statistics.lines().find_map(|line| line.strip_prefix(name))?;
            value.trim().parse::<u64>().ok()
        };
        // Pages of files can be dropped, but pages of shared memory cannot.
        let files = statistic(self.version.files)?.saturating_sub(statistic(self.version.shared)?);
        Some(self.limit_bytes()?.saturating_sub(used.saturating_sub(files)))
    }

    fn number(&self, file: &str) -> Option<u64> {
        std::fs::read_to_string(self.folder.join(file)).ok()?.trim().parse().ok()
    }
}

/// Decides the size of a cache from one memory reading to the next.
pub(crate) struct CacheSizer {
    memory: Memory,
    limit_bytes: u64,
    /// The configured size, in bytes.
    wanted_bytes: u64,
    allowed_bytes: u64,
}

impl CacheSizer {
    /// For a cache with a present capacity of `wanted_bytes`.
    pub(crate) fn new(memory: Memory, wanted_bytes: u64) -> CacheSizer {
        let limit_bytes = memory.limit_bytes();
        CacheSizer { memory, limit_bytes, wanted_bytes, allowed_bytes: wanted_bytes }
    }

    /// The new size of a cache that now uses `used_bytes`; `None` if it stays the same.
    pub(crate) fn look(&mut self, used_bytes: u64) -> Option<u64> {
        let available = self.memory.available_bytes()?;
        let allowed = if available < self.limit_bytes / SCARCE {
            // The missing amount, and half of the rest, because guests will need more.
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
            kernel.write("self/cgroup", "4:memory:/\n0::/site/server\n");
            kernel.mounts("groups", "/", "cgroup2 cgroup2 rw");
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

        /// The line of `mountinfo` for the folder `name`, which shows the groups below `root`.
        fn mounts(&self, name: &str, root: &str, kind: &str) {
            let folder = self.0.path().join(name);
            let line = format!("30 20 0:1 {root} {} rw shared:9 - {kind}\n", folder.display());
            self.write("self/mountinfo", &format!("22 1 8:1 / / rw - ext4 /dev/vda rw\n{line}"));
        }

        fn memory(&self) -> Memory {
            Memory::at(self.0.path())
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
    fn control_groups_of_version_1_count() {
        let kernel = Kernel::new(24 << 10);
        let unlimited = "9223372036854771712\n";
        for (own, root, group) in [
            ("/site/server", "/", "groups/site/server"),
            ("/site/server", "/site", "groups/server"),
            ("/site/server", "/site/server", "groups"),
        ] {
            kernel.write("self/cgroup", &format!("7:cpu,cpuacct:/\n4:memory:{own}\n0::/\n"));
            kernel.mounts("groups", root, "cgroup cgroup rw,memory");
            std::fs::create_dir_all(kernel.0.path().join(group)).unwrap();
            let limit = format!("{group}/memory.limit_in_bytes");
            kernel.write(&limit, unlimited);
            assert_eq!(kernel.memory().limit_bytes(), (24 << 10) * MIB);
            kernel.write(&limit, &(1000 * MIB).to_string());
            assert_eq!(kernel.memory().limit_bytes(), 1000 * MIB);
            kernel.write(&format!("{group}/memory.usage_in_bytes"), &(900 * MIB).to_string());
            let (cache, shmem) = (500 * MIB, 200 * MIB);
            let own_part = "cache 1\nshmem 1\n";
            let statistics = format!("{own_part}total_cache {cache}\ntotal_shmem {shmem}\n");
            kernel.write(&format!("{group}/memory.stat"), &statistics);
            assert_eq!(kernel.memory().available_bytes(), Some(400 * MIB));
        }
    }

    #[test]
    fn a_cache_shrinks_while_memory_is_scarce_and_grows_back() {
        let kernel = Kernel::new(16 << 10);
        let mut sizer = CacheSizer::new(kernel.memory(), 2048 * MIB);
        assert_eq!(sizer.look(2048 * MIB), None);
        // Between scarce and plenty, nothing changes.
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
