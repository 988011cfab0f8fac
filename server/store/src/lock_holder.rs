//! Finds the holder of a lock, for messages.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The id of the process that holds an exclusive flock(2) on a file. `None` if the kernel does not
/// report it, as for a process in another container.
pub fn lock_holder(path: &Path) -> Option<u32> {
    let inode = std::fs::metadata(path).ok()?.ino().to_string();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    // `1: FLOCK  ADVISORY  WRITE 4242 fd:00:131 0 EOF`
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let is_held = words.next()? == "FLOCK" && words.nth(1)? == "WRITE";
        let process = words.next()?.parse().ok().filter(|process| *process > 0);
        let is_this = words.next()?.rsplit(':').next() == Some(inode.as_str());
        process.filter(|_| is_held && is_this)
    })
}
