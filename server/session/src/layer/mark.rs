//! The mark: the writer's last note of the layer's durable content.
//!
//! # Why a crash or a damaged sector does not make it wrong
//!
//! A mark is written after the sync that made its statements true, and they stay true: slots below
//! `slots` keep a record (a freed slot keeps its last one, a slot whose write failed gets a vacant
//! one), cells are never overwritten, and the highest sequence number only grows. So an older mark
//! says less, and nothing wrong. There are two marks, each in its own sector and page. They are
//! written in turn: a torn or damaged mark leaves the previous one. A closed mark says that the
//! layer holds nothing else. It is replaced durably before the first write. Both marks are written
//! then, and at the close.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use coldrise_block::{Error, ErrorKind, Result};

use super::format::{SUPERBLOCK_BYTES, Superblock, array, short_hash};

/// Offsets of the two marks. Number `n` is at index `n % 2`.
pub(crate) const MARK_OFFSETS_BYTES: [u64; 2] = [4096, 8192];
/// Size of a mark in bytes.
pub(crate) const MARK_BYTES: usize = 64;
/// Size in bytes of the superblock and marks of an empty layer. They are written whole, so that no
/// part of them is a hole.
pub(super) const HEAD_BYTES: usize = 12 << 10;

const _: () = assert!(SUPERBLOCK_BYTES <= 512 && MARK_BYTES <= 512);

/// The extent of a layer at a moment when no write is unfinished. A restore point stores these
/// facts about each layer that was sealed into it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SealFacts {
    /// The highest sequence number of a record or cell; 0 if nothing was captured.
    pub(crate) sequence: u64,
    /// Every slot below this one holds a record, and no other slot does.
    pub(crate) slots: u32,
    /// Number of cells.
    pub(crate) cells: u32,
}

/// The durable content, and whether there is more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    /// Counts the marks of the layer. Of two readable marks the higher one is valid.
    pub(crate) number: u64,
    pub(crate) facts: SealFacts,
    /// The writer closed the layer: it holds exactly this.
    pub(crate) is_closed: bool,
    /// Time marks from this sequence number on have the slots that they need. 0: the writer was of
    /// a version that keeps none.
    pub(crate) history_from: u64,
}

impl Mark {
    /// Layout: number (8), sequence (8), slots (4), cells (4), 1 if closed (1), zero (7), sequence
    /// number from which time marks count (8), zero (8), keyed hash of all before it (16).
    pub(crate) fn encode(&self, key: &[u8; 32]) -> [u8; MARK_BYTES] {
        let mut bytes = [0; MARK_BYTES];
        bytes[0..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.facts.sequence.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.facts.slots.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.facts.cells.to_le_bytes());
        bytes[24] = u8::from(self.is_closed);
        bytes[32..40].copy_from_slice(&self.history_from.to_le_bytes());
        let tag = Mark::tag(key, &bytes[..48]);
        bytes[48..].copy_from_slice(&tag);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; MARK_BYTES], key: &[u8; 32]) -> Option<Mark> {
        if Mark::tag(key, &bytes[..48]) != bytes[48..] {
            return None;
        }
        Some(Mark {
            number: u64::from_le_bytes(array(&bytes[0..8])),
            facts: SealFacts {
                sequence: u64::from_le_bytes(array(&bytes[8..16])),
                slots: u32::from_le_bytes(array(&bytes[16..20])),
                cells: u32::from_le_bytes(array(&bytes[20..24])),
            },
            is_closed: bytes[24] == 1,
            history_from: u64::from_le_bytes(array(&bytes[32..40])),
        })
    }

    /// The prefix makes this tag differ from that of a superblock of the same bytes.
    fn tag(key: &[u8; 32], bytes: &[u8]) -> [u8; 16] {
        short_hash(key, &[b"mark", bytes].concat())
    }

    /// Writes the next mark, over the one before the last.
    pub(crate) fn write_next(
        &mut self,
        file: &File,
        key: &[u8; 32],
        facts: SealFacts,
        is_closed: bool,
    ) -> std::io::Result<()> {
        *self = Mark { number: self.number + 1, facts, is_closed, ..*self };
        file.write_all_at(&self.encode(key), MARK_OFFSETS_BYTES[(self.number % 2) as usize])
    }

    /// The offset in bytes of an unreadable mark, if the other one is readable. While a writer
    /// runs, a mark may be read half written.
    pub(crate) fn damaged(file: &File, key: &[u8; 32]) -> std::io::Result<Option<u64>> {
        let mut damaged = Vec::new();
        for offset_bytes in MARK_OFFSETS_BYTES {
            let mut bytes = [0; MARK_BYTES];
            file.read_exact_at(&mut bytes, offset_bytes)?;
            if Mark::decode(&bytes, key).is_none() {
                damaged.push(offset_bytes);
            }
        }
        Ok(damaged.pop().filter(|_| damaged.is_empty()))
    }

    /// The newest readable mark.
    ///
    /// Errors: `Corrupt` if neither is readable.
    pub(crate) fn read(file: &File, path: &Path, key: &[u8; 32]) -> Result<Mark> {
        let mut newest: Option<Mark> = None;
        for offset_bytes in MARK_OFFSETS_BYTES {
            let mut bytes = [0; MARK_BYTES];
            file.read_exact_at(&mut bytes, offset_bytes)
                .map_err(|error| super::open::truncated(path, error))?;
            newest = newest.into_iter().chain(Mark::decode(&bytes, key)).max_by_key(|m| m.number);
        }
        newest.ok_or_else(|| {
            let message = format!("both marks of the layer {} are damaged", path.display());
            Error::new(ErrorKind::Corrupt, message)
        })
    }
}

/// The first bytes of an empty layer.
pub(super) fn empty_head(superblock: &Superblock, key: &[u8; 32]) -> Vec<u8> {
    let mut head = vec![0; HEAD_BYTES];
    head[..SUPERBLOCK_BYTES].copy_from_slice(&superblock.encode(key));
    for number in [1, 2] {
        let at = MARK_OFFSETS_BYTES[number % 2] as usize;
        let number = number as u64;
        let mark = Mark { number, is_closed: true, history_from: 1, ..Mark::default() };
        head[at..at + MARK_BYTES].copy_from_slice(&mark.encode(key));
    }
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_mark_are_pinned_and_authenticated() {
        let key = [3; 32];
        let facts = SealFacts { sequence: 0x0102_0304_0506, slots: 0x0a0b_0c0d, cells: 77 };
        let mark = Mark { number: 9, facts, is_closed: true, history_from: 0x0b0c };
        let bytes = mark.encode(&key);
        let fields = [
            9, 0, 0, 0, 0, 0, 0, 0, 6, 5, 4, 3, 2, 1, 0, 0, 0x0d, 0x0c, 0x0b, 0x0a, 77, 0, 0, 0, 1,
            0, 0, 0, 0, 0, 0, 0, 0x0c, 0x0b,
        ];
        assert_eq!(bytes[..34], fields);
        assert_eq!(bytes[34..48], [0; 14]);
        assert_eq!(Mark::decode(&bytes, &key), Some(mark));
        for position in 0..MARK_BYTES {
            let mut bad = bytes;
            bad[position] ^= 1;
            assert_eq!(Mark::decode(&bad, &key), None, "byte {position}");
        }
    }

    #[test]
    fn the_newest_readable_mark_counts_and_none_is_damage() {
        let key = [3; 32];
        let file = tempfile::tempfile().unwrap();
        let superblock = Superblock { id: [5; 16], disk_size_bytes: 1 << 30 };
        file.write_all_at(&empty_head(&superblock, &key), 0).unwrap();
        let read = || Mark::read(&file, Path::new("layer"), &key);
        let mut mark = read().unwrap();
        let (number, history_from) = (2, 1);
        let empty = SealFacts::default();
        assert_eq!(mark, Mark { number, facts: empty, is_closed: true, history_from });
        let facts = SealFacts { sequence: 8, slots: 5, cells: 2 };
        mark.write_next(&file, &key, facts, false).unwrap();
        assert_eq!(read().unwrap(), Mark { number: 3, facts, is_closed: false, history_from });
        file.write_all_at(&[1], MARK_OFFSETS_BYTES[1] + 60).unwrap();
        assert_eq!(read().unwrap().number, 2);
        file.write_all_at(&[0; 512], MARK_OFFSETS_BYTES[0]).unwrap();
        assert_eq!(read().unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
