//! What is in the database's logs, read past RocksDB. A record is a batch (RocksDB's
//! `write_batch.cc`; numbers are little endian):
//!
//! ```text
//! batch:      sequence number of the first change (8), how many there are (4), changes
//! change:     kind (1), the family as a varint for the kinds 4 and 5, key; value, if any
//! kind:       0 and 4 a deletion, 1 and 5 a value, 3 a note that counts for nothing
//! key, value: varint length, bytes
//! ```

use std::io::ErrorKind::NotFound;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::super::mend::files_ending;
use super::super::record_log::records;
use super::super::table::varint;
use super::super::FAMILIES;

const DELETION: u8 = 0;
const VALUE: u8 = 1;
const NOTE: u8 = 3;
const FAMILY_DELETION: u8 = 4;
const FAMILY_VALUE: u8 = 5;

/// There are no higher sequence numbers.
const MAX_SEQUENCE: u64 = (1 << 56) - 1;

/// One change.
pub(in crate::rocks) struct Change<'a> {
    /// In the order of [`FAMILIES`].
    pub(in crate::rocks) family: usize,
    pub(in crate::rocks) key: &'a [u8],
    pub(in crate::rocks) sequence: u64,
    /// None for a deletion.
    pub(super) value: Option<&'a [u8]>,
}

/// Calls `change` with all that the logs hold, the oldest first, up to what was never
/// finished, or is damaged: as far as RocksDB reads them. It goes on with the next log where
/// that begins with the change that would have come.
///
/// # Errors
/// `Corrupt` for a batch that is none of ours; what the operating system says.
pub(in crate::rocks) fn read(
    database: &Path,
    mut change: impl FnMut(Change<'_>) -> Result<()>,
) -> Result<()> {
    let number = |path: &Path| path.file_stem().and_then(|stem| stem.to_str()?.parse::<u64>().ok());
    let mut logs = files_ending(database, "log")?;
    logs.sort_by_key(|path| number(path));
    // The change that comes next, behind a log that has no end.
    let mut expected = None;
    for path in logs {
        let bytes = match std::fs::read(&path) {
            // Whoever writes the database needs it no more.
            Err(error) if error.kind() == NotFound => continue,
            bytes => bytes.context(|| format!("reading {}", path.display()))?,
        };
        let (batches, is_whole) = records(&bytes);
        if let (Some(expected), Some(first)) =
            (expected, batches.first().and_then(|batch| first_sequence(batch)))
        {
            if first != expected {
                break;
            }
        }
        let mut next = expected.unwrap_or(0);
        for batch in &batches {
            let mut hear = |heard: Change<'_>| {
                next = heard.sequence + 1;
                change(heard)
            };
            read_batch(batch, &mut hear).ok_or_else(|| {
                let message = format!("{} holds a change of an unknown kind", path.display());
                Error::new(ErrorKind::Corrupt, message)
            })??;
        }
        if !is_whole {
            tracing::warn!(path = %path.display(), "a log ends before its end");
            expected = Some(next);
        } else if !batches.is_empty() {
            expected = None;
        }
    }
    Ok(())
}

fn first_sequence(batch: &[u8]) -> Option<u64> {
    batch.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes))
}

pub(super) fn read_batch(
    batch: &[u8],
    change: &mut impl FnMut(Change<'_>) -> Result<()>,
) -> Option<Result<()>> {
    let (sequence, rest) = batch.split_first_chunk::<8>()?;
    let (_, mut rest) = rest.split_first_chunk::<4>()?;
    let mut sequence = u64::from_le_bytes(*sequence);
    while let Some((kind, after)) = rest.split_first() {
        rest = after;
        let family = match *kind {
            FAMILY_DELETION | FAMILY_VALUE => usize::try_from(varint(&mut rest)?).ok()?,
            DELETION | VALUE | NOTE => 0,
            _ => return None,
        };
        let key = text(&mut rest)?;
        if *kind == NOTE {
            continue;
        }
        let value = match *kind {
            VALUE | FAMILY_VALUE => Some(text(&mut rest)?),
            _ => None,
        };
        if family >= FAMILIES.len() || sequence > MAX_SEQUENCE {
            return None;
        }
        if let Err(error) = change(Change { family, key, sequence, value }) {
            return Some(Err(error));
        }
        sequence += 1;
    }
    Some(Ok(()))
}

/// Takes bytes with their length in front.
fn text<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(varint(bytes)?).ok()?;
    let (text, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(text)
}
