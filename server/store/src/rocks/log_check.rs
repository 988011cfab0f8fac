//! The files of RocksDB's log, read before RocksDB replays them.
//!
//! RocksDB replays the files in the order of their names and skips damaged pieces. But it ends the
//! process, or refuses the database for good, if a file lies in the place of another one or if
//! blocks of a file were moved: then records are sound by their checksums, but older than the
//! change before, or joined from pieces of two records. So this module checks what RocksDB expects:
//!
//! - The numbers of changes only grow, within a file and from file to file.
//! - A record is a batch: its first change (8 bytes), the number of changes (4), the changes.
//!   A change is a kind (1), the family's number for some kinds, and one or two strings with
//!   their lengths. Numbers of families and lengths are varints; all others are little endian.
//!
//! The pieces are those of the manifest.

use std::fs::File;
use std::io::{ErrorKind::NotFound, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::manifest::{BLOCK_BYTES, HEADER_BYTES, piece};
use super::sound::files_ending;
use super::table::varint;
use crate::advice::REPAIR;

const WHOLE: u8 = 1;
const BEGINNING: u8 = 2;
const END: u8 = 4;
/// Number of the first change, and number of changes.
const BATCH_HEADER_BYTES: usize = 12;
/// Maximum size of a record in bytes. The largest batches hold documents of 16 MiB.
const MAX_RECORD_BYTES: usize = 1 << 30;

/// The logs that a repair replays.
pub(crate) struct UsableLogs {
    /// In the order of their changes. No two overlap.
    pub(crate) paths: Vec<PathBuf>,
    /// The number of files that lie in the place of others, are copies, or hold no batches.
    pub(crate) dropped: u64,
}

/// Refuses a log that RocksDB could not replay. The log may grow meanwhile.
///
/// # Errors
/// `Corrupt`, naming the first such file; errors of the operating system.
pub(super) fn check_logs(database: &Path) -> Result<()> {
    let mut end = 0;
    for path in logs(database)? {
        let why = match changes(&path)? {
            Log::Empty => continue,
            Log::Changes(changes) if changes.start >= end => {
                end = changes.end;
                continue;
            }
            Log::Changes(_) => "is another file than it was",
            Log::Mixed => "has lost the order of its records",
        };
        let message = format!("{} {why}", path.display());
        return Err(Error::new(ErrorKind::Corrupt, message).advise(REPAIR));
    }
    Ok(())
}

/// The logs that can be replayed together.
///
/// # Errors
/// Errors of the operating system.
pub(crate) fn usable_logs(database: &Path) -> Result<UsableLogs> {
    let (mut found, mut dropped) = (Vec::new(), 0);
    for path in logs(database)? {
        match changes(&path)? {
            Log::Empty => {}
            Log::Changes(changes) => found.push((changes, path)),
            Log::Mixed => dropped += 1,
        }
    }
    // Of copies from two times the longer one comes first.
    found.sort_by_key(|(changes, _)| (changes.start, u64::MAX - changes.end));
    let mut paths = Vec::new();
    let mut end = 0;
    for (changes, path) in found {
        if changes.start < end {
            dropped += 1;
        } else {
            end = changes.end;
            paths.push(path);
        }
    }
    Ok(UsableLogs { paths, dropped })
}

fn logs(database: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = files_ending(database, "log")?;
    paths.sort();
    Ok(paths)
}

/// The content of one file.
enum Log {
    /// No change can be read.
    Empty,
    Changes(Range<u64>),
    /// Its records are not as they were written.
    Mixed,
}

fn changes(path: &Path) -> Result<Log> {
    let what = || format!("reading {}", path.display());
    let mut file = match File::open(path) {
        Err(error) if error.kind() == NotFound => return Ok(Log::Empty),
        opened => opened.context(what)?,
    };
    let mut block = Vec::with_capacity(BLOCK_BYTES);
    let mut changes: Option<Range<u64>> = None;
    // One buffer for all records of several pieces: the large ones are most of a log.
    let (mut record, mut is_begun) = (Vec::new(), false);
    loop {
        block.clear();
        file.by_ref().take(BLOCK_BYTES as u64).read_to_end(&mut block).context(what)?;
        if block.is_empty() {
            return Ok(changes.map_or(Log::Empty, Log::Changes));
        }
        let mut rest = &block[..];
        while let Some((kind, content)) = piece(rest) {
            rest = &rest[HEADER_BYTES + content.len()..];
            let whole = match kind {
                WHOLE => content,
                BEGINNING => {
                    record.clear();
                    record.extend_from_slice(content);
                    is_begun = true;
                    continue;
                }
                // Its beginning is damaged: RocksDB skips it.
                _ if !is_begun => continue,
                kind => {
                    record.extend_from_slice(content);
                    if kind != END {
                        is_begun = record.len() <= MAX_RECORD_BYTES;
                        continue;
                    }
                    &record[..]
                }
            };
            is_begun = false;
            let Some(of_record) = batch(whole) else { return Ok(Log::Mixed) };
            match &mut changes {
                None => changes = Some(of_record),
                Some(changes) if changes.end <= of_record.start => changes.end = of_record.end,
                Some(_) => return Ok(Log::Mixed),
            }
        }
        // After damage RocksDB continues with the next block, without the record before.
        if rest.len() >= HEADER_BYTES {
            is_begun = false;
        }
    }
}

/// The numbers of the changes in a batch, if it is one.
fn batch(record: &[u8]) -> Option<Range<u64>> {
    let (header, mut rest) = record.split_first_chunk::<BATCH_HEADER_BYTES>()?;
    let (first, count) = header.split_first_chunk::<8>()?;
    let first = u64::from_le_bytes(*first);
    let count = u32::from_le_bytes(count.try_into().ok()?);
    let mut found = 0_u32;
    while let Some((kind, after)) = rest.split_first() {
        // Of RocksDB's ValueType: deletion, value, single deletion, range deletion; the second
        // of each pair names its family.
        let (has_family, strings) = match kind {
            0x0 | 0x7 => (false, 1),
            0x4 | 0x8 => (true, 1),
            0x1 | 0xf => (false, 2),
            0x5 | 0xe => (true, 2),
            _ => return None,
        };
        rest = after;
        if has_family {
            varint(&mut rest)?;
        }
        for _ in 0..strings {
            let length = usize::try_from(varint(&mut rest)?).ok()?;
            rest = rest.get(length..)?;
        }
        found = found.checked_add(1)?;
    }
    (found == count).then(|| first..first.saturating_add(u64::from(count)))
}
