//! Merges small files of the database.
//!
//! Each restore point flushes two families, so that the chunks and pages that it names do not
//! depend on the log (see `Repository::flush_redundant`). Ids ascend, so the new files overlap no
//! other: RocksDB moves them down and never merges them. This module does. Files of at least
//! [`MAX_BYTES`] are never rewritten, and only a few smaller ones stay at the end of a family.
//!
//! Files on level 0 are moved below it, even a single one. As long as a family has nothing below
//! level 0 and at most three files, RocksDB 7.8 does not compare keys with the ranges of its files
//! and searches every file for each key. Damage to one file would then fail reads of entries in
//! others.

use coldrise_block::Result;

use super::{RepositoryWriter, Shared};
use crate::rocks::{Family, LiveFile, is_sound};

/// Larger files stay as they are.
const MAX_BYTES: u64 = 8 << 20;
/// This many files at the end of a family are merged into one.
const MIN_FILES: usize = 8;
/// Maximum number of files merged at once, because all of them are open meanwhile.
const MAX_FILES: usize = 16;
/// A file is merged if it has at most this size, or is at most twice as large as all newer ones
/// together. So each entry is copied only a few times.
const MIN_BYTES: u64 = 256 << 10;

impl RepositoryWriter {
    /// Merges the small files at the end of each family that grows by ids. Failures are only
    /// logged: nothing depends on the merge.
    pub(super) fn merge_small_files(&self) {
        let Some(_merging) = self.shared.merging.try_lock() else { return };
        for family in [Family::Chunks, Family::Maps, Family::MapsCopy] {
            // A gc judges files by the list that it has read.
            if self.shared.gc_running.is_locked() {
                return;
            }
            if let Err(error) = merge(&self.shared, family) {
                tracing::warn!(error = %error.full_message(), "small files were not merged");
            }
        }
    }
}

fn merge(shared: &Shared, family: Family) -> Result<()> {
    let database = shared.repository.database();
    let mut files = database.listed_files(family)?;
    files.sort_by(|a, b| a.smallest.cmp(&b.smallest));
    let is_all_on_top = files.iter().all(|file| file.level == 0);
    let tail = tail(&files);
    if tail.len() < MIN_FILES && !is_all_on_top {
        return Ok(());
    }
    // A compaction that meets damage fails, and every later write fails with it.
    let mut sound = 0;
    for file in tail.iter().rev() {
        if !is_sound(&database.path_of(file))? {
            break;
        }
        sound += 1;
    }
    let tail = &tail[tail.len() - sound..];
    for piece in tail.chunks(MAX_FILES) {
        let (Some(first), Some(last)) = (piece.first(), piece.last()) else { break };
        let bytes: u64 = piece.iter().map(|file| file.bytes).sum();
        // Each is written twice: to a lower level, and merged with the others.
        if shared.repository.keep_reserve(2 * bytes, 0).is_err() {
            break;
        }
        database.compact(family, Some((&first.smallest, &last.largest)))?;
    }
    Ok(())
}

/// The files at the end that are to be merged; `files` is sorted.
fn tail(files: &[LiveFile]) -> &[LiveFile] {
    let (mut start, mut newer_bytes) = (files.len(), 0);
    for (number, file) in files.iter().enumerate().rev() {
        if file.bytes >= MAX_BYTES || file.bytes > MIN_BYTES.max(2 * newer_bytes) {
            break;
        }
        start = number;
        newer_bytes += file.bytes;
    }
    &files[start..]
}
