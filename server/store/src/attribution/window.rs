//! The number of chunk numbers in one pass.
//!
//! Maps of points that changed a little every time refer to chunks of all ages, so every
//! window reads nearly every page again: one large window is several times as fast as
//! ten small ones. It takes no more memory than there are chunks, and at most an eighth
//! of the free memory.

use super::owner::Owner;

/// The smallest window: 256 MiB, which covers 1 TiB of chunks of 16 KiB.
const MIN_CHUNKS: u64 = 64 << 20;
/// The window takes at most one SHAREth of the free memory.
const SHARE: u64 = 8;

/// The window size for this machine's current free memory.
pub(super) fn chunks() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    of_available_bytes(available_bytes(&meminfo).unwrap_or(0))
}

fn of_available_bytes(available: u64) -> u64 {
    (available / SHARE / std::mem::size_of::<Owner>() as u64).max(MIN_CHUNKS)
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_is_a_share_of_free_memory_with_a_minimum() {
        let meminfo = "MemTotal:       24683524 kB\nMemAvailable:   16777216 kB\n";
        assert_eq!(available_bytes(meminfo), Some(16 << 30));
        assert_eq!(of_available_bytes(16 << 30), 512 << 20);
        assert_eq!(of_available_bytes(0), 64 << 20);
        assert_eq!(available_bytes("MemTotal: 1 kB\n"), None);
        assert_eq!(available_bytes("MemAvailable: many kB\n"), None);
    }
}
