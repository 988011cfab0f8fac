//! Reads the readable entries of a database file that is damaged or cut short.
//!
//! The structures that lead to the data follow it, most of them in the last few KiB. One bad sector
//! there, or a file that is cut short, would lose chunks of 256 MiB. But blocks of data follow each
//! other from the beginning, and each shows where it ends: entries start with their lengths, the
//! number of restart points follows from the number of entries, and the checksum confirms both.
//! After a damaged block the next one is searched for byte by byte.

use std::path::Path;

use coldrise_block::{Context, Result};

use super::internal_key::{END_BYTES, KIND_DELETION, KIND_VALUE, MAX_BYTES, split, user_key};
use super::sst_reader::{TRAILER_BYTES, checked};
use super::table::{Handle, varint, without_restarts};

/// Entries between two restart points: in files of chunks, and in all others.
const RESTART_INTERVALS: [usize; 2] = [1, 16];

/// An entry of a file.
pub(crate) struct Entry<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) sequence: u64,
    /// `None` for a deletion.
    pub(crate) value: Option<&'a [u8]>,
}

/// Calls `each` with every readable entry of a file, in key order. Returns the number of unreadable
/// stretches between the blocks.
///
/// # Errors
/// Errors of the operating system and of `each`.
pub(crate) fn read_what_is_left(
    path: &Path,
    mut each: impl FnMut(Entry<'_>) -> Result<()>,
) -> Result<u64> {
    let content = std::fs::read(path).context(|| format!("reading {}", path.display()))?;
    let (mut at, mut lost, mut before) = (0, 0, Vec::new());
    while at < content.len() {
        let found = (at..content.len()).find_map(|from| {
            let blocks = RESTART_INTERVALS.iter().filter_map(|i| block_at(&content, from, *i));
            let block = blocks.into_iter().find(|block| block.first > before)?;
            Some((from, block))
        });
        let Some((from, block)) = found else { break };
        lost += u64::from(from > at);
        let Handle { offset, bytes } = block.place;
        at = (offset + bytes) as usize + TRAILER_BYTES;
        let data = &content[offset as usize..(offset + bytes) as usize];
        for (key, Handle { offset: value_at, bytes: value_bytes }) in rows(data).unwrap_or_default()
        {
            let Some((user_key, sequence, kind)) = split(&key) else { continue };
            let value = &data[value_at as usize..(value_at + value_bytes) as usize];
            let value = (kind == KIND_VALUE).then_some(value);
            each(Entry { key: user_key, sequence, value })?;
        }
        before = block.last;
    }
    // A file without any readable block shows no lost one, so count one.
    Ok(lost.max(u64::from(at == 0)))
}

/// A block of data in a file.
struct Block {
    place: Handle,
    first: Vec<u8>,
    last: Vec<u8>,
}

/// The keys of a block of data, and the positions of their values in it.
fn rows(block: &[u8]) -> Option<Vec<(Vec<u8>, Handle)>> {
    let whole = without_restarts(block)?;
    let (mut rest, mut key, mut rows) = (whole, Vec::new(), Vec::new());
    while !rest.is_empty() {
        let mut length = || usize::try_from(varint(&mut rest)?).ok();
        let (shared, unshared, value_bytes) = (length()?, length()?, length()?);
        if shared > key.len() || shared.saturating_add(unshared) > MAX_BYTES {
            return None;
        }
        let (own, after) = rest.split_at_checked(unshared)?;
        key.truncate(shared);
        key.extend_from_slice(own);
        let start = whole.len() - after.len();
        rest = after.get(value_bytes..)?;
        rows.push((key.clone(), Handle { offset: start as u64, bytes: value_bytes as u64 }));
    }
    Some(rows)
}

/// The block that starts here, if it is sound.
fn block_at(content: &[u8], from: usize, interval: usize) -> Option<Block> {
    let all = content.get(from..)?;
    let (mut rest, mut key, mut count) = (all, Vec::new(), 0_usize);
    let mut first = Vec::new();
    loop {
        let is_restart = count % interval == 0;
        let mut length = || usize::try_from(varint(&mut rest)?).ok();
        let (shared, unshared, value_bytes) = (length()?, length()?, length()?);
        let is_key = shared <= key.len() && unshared <= MAX_BYTES;
        if !is_key || is_restart && shared != 0 || shared + unshared <= END_BYTES {
            return None;
        }
        let (own, after) = rest.split_at_checked(unshared)?;
        rest = after.get(value_bytes..)?;
        let before = user_key(&key).to_vec();
        key.truncate(shared);
        key.extend_from_slice(own);
        if !matches!(split(&key)?, (_, _, KIND_VALUE | KIND_DELETION)) {
            return None;
        }
        match count {
            0 => first = user_key(&key).to_vec(),
            _ if user_key(&key) <= before.as_slice() => return None,
            _ => {}
        }
        count += 1;
        let restarts = count.div_ceil(interval);
        let end = restarts * 4;
        let stored = rest.get(end..end + 4);
        if stored == Some(&(restarts as u32).to_le_bytes()[..]) && rest[..4] == [0; 4] {
            let bytes = all.len() - rest.len() + end + 4;
            if all.get(..bytes + TRAILER_BYTES).and_then(checked).is_some() {
                let place = Handle { offset: from as u64, bytes: bytes as u64 };
                return Some(Block { place, first, last: user_key(&key).to_vec() });
            }
        }
    }
}
