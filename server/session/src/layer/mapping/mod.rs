//! Memory shared with other processes: atomic words over a mapped file.
//!
//! This is the only `unsafe` of the crate. A mapping lets a writer publish an index record with a
//! 64-byte store instead of a system call, keeps written records if the process is killed, and lets
//! other processes read them.
//!
//! The price is that an access can fail: see [`faults`] for files. A mapping of shared memory is
//! not guarded: its pages are reserved before the first access.

pub(crate) mod faults;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use coldrise_block::{Context, Result};
use memmap2::{Advice, MmapOptions, MmapRaw};

use faults::{Faults, Guard};

/// A mapped range, read and written as little-endian words.
pub(crate) struct SharedWords {
    /// Dropped before the mapping.
    guard: Option<Guard>,
    map: MmapRaw,
}

impl SharedWords {
    /// Maps `length_bytes` of `file` from `offset_bytes` (a multiple of the page size) for reading
    /// and writing. The range may extend beyond the end of the file, but only the part before the
    /// end may be accessed.
    pub(crate) fn of_file(file: &File, offset_bytes: u64, length_bytes: usize) -> Result<Self> {
        let map = MmapOptions::new()
            .offset(offset_bytes)
            .len(length_bytes)
            .map_raw(file)
            .context(|| format!("mapping {}", name_of(file)))?;
        Self::without_read_ahead(map, file)
    }

    /// Turns read-ahead off. The bytes after a page of records are payload, which is never read
    /// through the mapping: read-ahead on a fault made a first sequential write a fifth slower.
    fn without_read_ahead(map: MmapRaw, file: &File) -> Result<Self> {
        map.advise(Advice::Random).context(|| format!("mapping {}", name_of(file)))?;
        Ok(SharedWords { guard: None, map })
    }

    /// Like [`SharedWords::of_file`], but for reading only. A store would end the process.
    pub(crate) fn of_file_read_only(
        file: &File,
        offset_bytes: u64,
        length_bytes: usize,
    ) -> Result<Self> {
        let map = MmapOptions::new()
            .offset(offset_bytes)
            .len(length_bytes)
            .map_raw_read_only(file)
            .context(|| format!("mapping {}", name_of(file)))?;
        Self::without_read_ahead(map, file)
    }

    /// Notes failed accesses in `faults` instead of ending the process.
    pub(crate) fn guarded(mut self, faults: &Faults) -> Self {
        self.guard = Some(Guard::new(self.map.as_ptr(), self.map.len(), faults));
        self
    }

    /// Zeroed private memory. The kernel allocates each page on its first access.
    pub(crate) fn private(length_bytes: usize) -> Result<Self> {
        let map = MmapOptions::new()
            .len(length_bytes)
            .no_reserve_swap()
            .map_anon()
            .context(|| "reserving memory for a block map")?;
        Ok(SharedWords { guard: None, map: map.into() })
    }

    fn word32(&self, index: usize) -> &AtomicU32 {
        assert!((index + 1) * 4 <= self.map.len(), "word beyond the mapping");
        // SAFETY: the index was checked against the mapping's length, a mapping is
        // page aligned, it lives as long as `self`, and every access to it, here
        // and in other processes, is atomic.
        unsafe { &*(self.map.as_ptr().add(index * 4) as *const AtomicU32) }
    }

    fn word64(&self, index: usize) -> &AtomicU64 {
        assert!((index + 1) * 8 <= self.map.len(), "word beyond the mapping");
        // SAFETY: as in `word32`.
        unsafe { &*(self.map.as_ptr().add(index * 8) as *const AtomicU64) }
    }

    /// The 32-bit word at `index`.
    #[inline]
    pub(crate) fn load32(&self, index: usize) -> u32 {
        u32::from_le(self.word32(index).load(Ordering::Acquire))
    }

    /// Stores the 32-bit word at `index` after everything stored before it.
    #[inline]
    pub(crate) fn store32(&self, index: usize, value: u32) {
        self.word32(index).store(value.to_le(), Ordering::Release);
    }

    /// The 64-bit word at `index`.
    #[inline]
    pub(crate) fn load64(&self, index: usize) -> u64 {
        u64::from_le(self.word64(index).load(Ordering::Acquire))
    }

    /// Stores the 64-bit word at `index` after everything stored before it.
    #[inline]
    pub(crate) fn store64(&self, index: usize, value: u64) {
        self.word64(index).store(value.to_le(), Ordering::Release);
    }

    /// Copies `N` bytes (a multiple of 8) out, from an offset that is a multiple of 8. A concurrent
    /// store may be visible in part: the caller authenticates the bytes.
    #[inline]
    pub(crate) fn load_bytes<const N: usize>(&self, offset_bytes: usize) -> [u8; N] {
        let mut bytes = [0; N];
        for (i, piece) in bytes.chunks_exact_mut(8).enumerate() {
            let word = self.word64(offset_bytes / 8 + i).load(Ordering::Relaxed);
            piece.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Copies `N` bytes (a multiple of 8) in, at an offset that is a multiple of 8, in the order of
    /// [`publishing`].
    #[inline]
    pub(crate) fn publish_bytes<const N: usize>(
        &self,
        offset_bytes: usize,
        bytes: &[u8; N],
        unfinished: u64,
    ) {
        for (i, word) in publishing(bytes, unfinished) {
            self.word64(offset_bytes / 8 + i).store(word, Ordering::Release);
        }
    }
}

/// The stores, as index and word, that write `bytes`.
///
/// The first word is `unfinished` from the first store to the last. So a process killed between two
/// of them leaves a record that differs from damage.
pub(crate) fn publishing<const N: usize>(
    bytes: &[u8; N],
    unfinished: u64,
) -> impl Iterator<Item = (usize, u64)> + '_ {
    let word = |i: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[i * 8..i * 8 + 8]);
        u64::from_ne_bytes(word)
    };
    let rest = (1..N / 8).map(move |i| (i, word(i)));
    std::iter::once((0, unfinished)).chain(rest).chain(std::iter::once_with(move || (0, word(0))))
}

/// The name of an open file, for messages.
pub(crate) fn name_of(file: &File) -> String {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    link.map_or_else(|_| "a file of a layer".to_owned(), |path| path.display().to_string())
}
