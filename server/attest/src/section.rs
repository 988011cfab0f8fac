//! Hashes of sections: one level of the tree, computed by several threads.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use coldrise_block::{Context, Error, ErrorKind, Phase, Progress, ProgressState, Result};

use super::content::{Content, ContentReader};
use super::tree::{Hash, LEAF_BYTES, ZeroTrees, height_over, leaf};

/// One level of a disk's tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sections {
    /// Bytes of one section; a power of two.
    pub(super) section_bytes: u64,
    /// The hashes of all sections, in order.
    pub(super) hashes: Vec<Hash>,
}

/// Bytes of one read: a subtree of 16 leaves.
const PIECE_BYTES: u64 = 1 << 20;
/// A proof has at most this many sections per disk.
pub(super) const MAX_SECTIONS: u64 = 4096;
/// Bytes of the smallest section, and so of the smallest tree.
pub(super) const MIN_SECTION_BYTES: u64 = PIECE_BYTES;

/// The bytes of one section in a proof of a disk: the smallest power of two that keeps their number.
pub(super) fn section_bytes(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(MAX_SECTIONS).next_power_of_two().max(MIN_SECTION_BYTES)
}

/// The hash over the sections: the root of the disk's tree.
pub(super) fn root(hashes: Vec<Hash>, section_bytes: u64, size_bytes: u64) -> Hash {
    let height = height_over(section_bytes);
    ZeroTrees::new().fold(hashes, height, height_over(size_bytes).max(height))
}

/// Reads a whole disk and returns its sections. `name` is shown with the progress.
///
/// # Errors
/// Errors of the disk; `Interrupted` once cancelled.
pub fn hash_disk(
    content: &Content<'_>,
    name: &str,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<Sections> {
    let size_bytes = content.size_bytes();
    let section_bytes = section_bytes(size_bytes);
    let all: Vec<u64> = (0..size_bytes.div_ceil(section_bytes)).collect();
    let hashing = Hashing { content, name, size_bytes, section_bytes, progress, cancel };
    let hashes = hashing.hash(&all)?;
    Ok(Sections { section_bytes, hashes })
}

/// One pass over sections of a disk.
pub(super) struct Hashing<'a> {
    pub(super) content: &'a Content<'a>,
    pub(super) name: &'a str,
    /// Size of the disk: a copy may be padded behind it.
    pub(super) size_bytes: u64,
    pub(super) section_bytes: u64,
    pub(super) progress: &'a dyn Progress,
    pub(super) cancel: &'a AtomicBool,
}

impl Hashing<'_> {
    /// The hashes of the sections with these numbers, in their order.
    pub(super) fn hash(&self, numbers: &[u64]) -> Result<Vec<Hash>> {
        let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
        let is_over = AtomicBool::new(false);
        let found = Mutex::new(vec![[0; 32]; numbers.len()]);
        let trees = ZeroTrees::new();
        let work = || -> Result<()> {
            let mut reader = self.content.reader()?;
            let mut buffer = vec![0; PIECE_BYTES as usize];
            while !is_over.load(Ordering::Relaxed) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(number) = numbers.get(index) else { break };
                let hash = self.section(&trees, &mut reader, &mut buffer, *number)?;
                found.lock().unwrap_or_else(PoisonError::into_inner)[index] = hash;
                let sections = done.fetch_add(1, Ordering::Relaxed) + 1;
                self.show(sections, numbers.len() as u64);
            }
            Ok(())
        };
        let work = || {
            let result = work();
            is_over.fetch_or(result.is_err(), Ordering::Relaxed);
            result
        };
        std::thread::scope(|scope| {
            let others = self.content.useful_threads().saturating_sub(1);
            let workers: Vec<_> = (0..others).map(|_| scope.spawn(work)).collect();
            let mut outcomes = vec![work()];
            outcomes.extend(workers.into_iter().map(|worker| {
                worker.join().unwrap_or_else(|_| {
                    Err(Error::new(ErrorKind::Internal, "a thread of the proof panicked"))
                })
            }));
            outcomes.into_iter().collect::<Result<()>>()
        })?;
        Ok(found.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn show(&self, sections: u64, total: u64) {
        self.progress.update(&ProgressState {
            phase: Phase::Verifying,
            disk: self.name,
            done_bytes: sections.saturating_mul(self.section_bytes),
            total_bytes: total.saturating_mul(self.section_bytes),
            read_bytes: sections.saturating_mul(self.section_bytes),
            stored_bytes: 0,
        });
    }

    /// The hash of one section.
    fn section(
        &self,
        trees: &ZeroTrees,
        reader: &mut ContentReader<'_>,
        buffer: &mut [u8],
        number: u64,
    ) -> Result<Hash> {
        let start = number * self.section_bytes;
        let end = self.size_bytes.min(start + self.section_bytes);
        let piece_height = height_over(PIECE_BYTES);
        let mut pieces = Vec::with_capacity((end - start).div_ceil(PIECE_BYTES) as usize);
        let mut zero_until = start;
        let mut at = start;
        while at < end {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            }
            let stop = end.min(at + PIECE_BYTES);
            if zero_until < stop {
                zero_until = self.zeroes_from(at, end)?;
            }
            if zero_until >= stop {
                pieces.push(trees.at(piece_height));
            } else {
                let bytes = &mut buffer[..(stop - at) as usize];
                reader.read_at(bytes, at)?;
                let leaves = bytes.chunks(LEAF_BYTES as usize).map(padded_leaf).collect();
                pieces.push(trees.fold(leaves, 0, piece_height));
            }
            at = stop;
        }
        Ok(trees.fold(pieces, piece_height, height_over(self.section_bytes)))
    }

    /// The end of the zeroes at `at`, as far as they are known without reading; `at` if there are none.
    fn zeroes_from(&self, at: u64, end: u64) -> Result<u64> {
        let extents = self.content.extents(at, end - at).context(|| "asking for holes")?;
        let stored = extents.iter().find(|extent| !extent.kind.reads_zero());
        let last = extents.last().map_or(at, |last| last.offset_bytes + last.length_bytes);
        Ok(stored.map_or(last, |extent| extent.offset_bytes))
    }
}

/// The hash of a leaf whose end may be missing at the end of the disk.
fn padded_leaf(bytes: &[u8]) -> Hash {
    if bytes.len() == LEAF_BYTES as usize {
        return leaf(bytes);
    }
    let mut padded = bytes.to_vec();
    padded.resize(LEAF_BYTES as usize, 0);
    leaf(&padded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_sections_is_bounded() {
        assert_eq!(section_bytes(1), MIN_SECTION_BYTES);
        for size in [1 << 30, (4 << 30) + 1, 10 << 40, 64 << 40] {
            let bytes = section_bytes(size);
            assert!(bytes.is_power_of_two() && size.div_ceil(bytes) <= MAX_SECTIONS, "{size}");
        }
    }
}
