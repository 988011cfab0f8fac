//! The bytes of a layer file. `docs/on-disk-format.md` holds the same tables.
//!
//! ```text
//! 0        superblock area, 64 KiB
//! 64 KiB   segment 0: 1024 records of 64 bytes, then 1024 slots of 4 KiB
//!          segment 1: ...
//! ```
//!
//! Record `n` describes slot `n`. A record of zeroes means that its slot was never used. All
//! numbers are little endian. `mark` describes the marks in the superblock area.

use coldrise_block::{BLOCK_SIZE_BYTES, Error, ErrorKind, Result};

/// Bytes before the first segment.
pub(crate) const SUPERBLOCK_AREA_BYTES: u64 = 64 << 10;
/// Number of slots, and of records, in one segment.
pub(crate) const SLOTS_PER_SEGMENT: u32 = 1024;
/// Bytes of one record.
pub(crate) const RECORD_BYTES: usize = 64;
/// Bytes of all records of a segment.
pub(crate) const SEGMENT_INDEX_BYTES: u64 = SLOTS_PER_SEGMENT as u64 * RECORD_BYTES as u64;
/// Bytes of one segment.
pub(crate) const SEGMENT_BYTES: u64 =
    SEGMENT_INDEX_BYTES + SLOTS_PER_SEGMENT as u64 * BLOCK_SIZE_BYTES;
/// Maximum number of slots in one layer: 16 TiB of captured blocks.
pub(crate) const MAX_SLOTS: u32 = u32::MAX - 1024;
/// The largest sequence number. It fills the counter part of a nonce.
pub(crate) const MAX_SEQUENCE: u64 = (1 << 40) - 1;
/// Number of cells in the slot of a `Cells` record. Each is as long as a record.
pub(crate) const CELLS_PER_SLOT: usize = BLOCK_SIZE_BYTES as usize / RECORD_BYTES;

const _: () = assert!(SEGMENT_INDEX_BYTES == 65536);
const _: () = assert!(SEGMENT_BYTES % 4096 == 0 && SUPERBLOCK_AREA_BYTES % 4096 == 0);

/// Offset of the record of `slot` in the file.
pub(crate) fn record_offset_bytes(slot: u32) -> u64 {
    segment_offset_bytes(slot / SLOTS_PER_SEGMENT)
        + u64::from(slot % SLOTS_PER_SEGMENT) * RECORD_BYTES as u64
}

/// Offset of the 4 KiB of `slot` in the file.
pub(crate) fn slot_offset_bytes(slot: u32) -> u64 {
    segment_offset_bytes(slot / SLOTS_PER_SEGMENT)
        + SEGMENT_INDEX_BYTES
        + u64::from(slot % SLOTS_PER_SEGMENT) * BLOCK_SIZE_BYTES
}

/// Offset of a segment in the file. This is also the file's length with that many segments.
pub(crate) fn segment_offset_bytes(segment: u32) -> u64 {
    SUPERBLOCK_AREA_BYTES + u64::from(segment) * SEGMENT_BYTES
}

/// Number of whole segments in a file of this length.
pub(crate) fn segments_in(file_bytes: u64) -> u32 {
    let segments = file_bytes.saturating_sub(SUPERBLOCK_AREA_BYTES) / SEGMENT_BYTES;
    segments.min(u64::from(MAX_SLOTS / SLOTS_PER_SEGMENT)) as u32
}

/// The content of a record's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordKind {
    /// The slot holds the captured block. `payload` is the tag of the stored bytes.
    Block,
    /// The slot holds cells. It is never used for anything else again.
    Cells,
    /// In a cell only: `payload` starts with the number of blocks that read as zeroes.
    ZeroRange,
    /// The slot holds nothing: its write failed, or a crash lost it.
    Vacant,
    /// In a cell only, for continuous protection. See [`TimeMark`] and [`RemovedMarks`].
    TimeMark,
}

/// An index record, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Position of the write among all writes of the layer; never 0.
    pub(crate) sequence: u64,
    /// How many sequence numbers up to this one were not yet flushed when the record was made:
    /// `sequence - unflushed` is durable. `u32::MAX` means unknown.
    pub(crate) unflushed: u32,
    /// First block of the disk to which it applies (48 bits).
    pub(crate) block: u64,
    /// The content of the slot.
    pub(crate) kind: RecordKind,
    /// Tag of the slot's bytes, or a count.
    pub(crate) payload: [u8; 16],
}

/// Bytes of a record before encryption.
pub(crate) const RECORD_PLAIN_BYTES: usize = 36;

impl Record {
    /// The last sequence number that this record proves durable.
    pub(crate) fn durable_sequence(&self) -> u64 {
        if self.unflushed == u32::MAX {
            return 0;
        }
        self.sequence.saturating_sub(u64::from(self.unflushed))
    }

    pub(crate) fn encode(&self) -> [u8; RECORD_PLAIN_BYTES] {
        let mut plain = [0; RECORD_PLAIN_BYTES];
        plain[0..8].copy_from_slice(&self.sequence.to_le_bytes());
        plain[8..12].copy_from_slice(&self.unflushed.to_le_bytes());
        plain[12..18].copy_from_slice(&self.block.to_le_bytes()[..6]);
        plain[18] = match self.kind {
            RecordKind::Block => 1,
            RecordKind::Cells => 2,
            RecordKind::ZeroRange => 3,
            RecordKind::Vacant => 4,
            RecordKind::TimeMark => 5,
        };
        plain[20..36].copy_from_slice(&self.payload);
        plain
    }

    /// Decodes authenticated bytes; `None` for a kind of a later version.
    pub(crate) fn decode(plain: &[u8; RECORD_PLAIN_BYTES]) -> Option<Record> {
        let kind = match plain[18] {
            1 => RecordKind::Block,
            2 => RecordKind::Cells,
            3 => RecordKind::ZeroRange,
            4 => RecordKind::Vacant,
            5 => RecordKind::TimeMark,
            _ => return None,
        };
        let mut block = [0; 8];
        block[..6].copy_from_slice(&plain[12..18]);
        Some(Record {
            sequence: u64::from_le_bytes(array(&plain[0..8])),
            unflushed: u32::from_le_bytes(array(&plain[8..12])),
            block: u64::from_le_bytes(block),
            kind,
            payload: array(&plain[20..36]),
        })
    }
}

/// The writes of the layer with lower sequence numbers than its cell are the state of the disk at
/// one time. A cell of kind `TimeMark` whose block is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimeMark {
    /// Sequence number of the cell.
    pub(crate) sequence: u64,
    /// Nanoseconds since 1970-01-01T00:00:00Z. The disks of a session have the same time in their
    /// cells of one mark.
    pub(crate) time_ns: u64,
    /// How the state came here, for the session; 0 if clients wrote it.
    pub(crate) round: u64,
}

/// The marks with sequence numbers from `first` to `last` have ended. A cell of kind `TimeMark`
/// whose block is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemovedMarks {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl TimeMark {
    /// The block number and the payload of its cell: the round (8), the time (8).
    pub(crate) fn cell(round: u64, time_ns: u64) -> (u64, [u8; 16]) {
        (0, pair(round, time_ns))
    }

    pub(crate) fn of_cell(cell: &Record) -> Option<TimeMark> {
        let is_mark = cell.kind == RecordKind::TimeMark && cell.block == 0;
        let (round, time_ns) = numbers(cell);
        is_mark.then_some(TimeMark { sequence: cell.sequence, time_ns, round })
    }
}

impl RemovedMarks {
    /// The block number and the payload of its cell: first (8), last (8).
    pub(crate) fn cell(self) -> (u64, [u8; 16]) {
        (1, pair(self.first, self.last))
    }

    pub(crate) fn of_cell(cell: &Record) -> Option<RemovedMarks> {
        let is_removal = cell.kind == RecordKind::TimeMark && cell.block == 1;
        let (first, last) = numbers(cell);
        is_removal.then_some(RemovedMarks { first, last })
    }
}

/// The payload of a cell that has two numbers.
fn numbers(cell: &Record) -> (u64, u64) {
    let (first, second) = cell.payload.split_at(8);
    (u64::from_le_bytes(array(first)), u64::from_le_bytes(array(second)))
}

fn pair(first: u64, second: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    bytes
}

pub(super) fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(bytes);
    out
}

const MAGIC: &[u8; 8] = b"COLDLAYR";
const VERSION: u32 = 2;

/// Bytes of the fixed part of the superblock, at offset 0.
pub(crate) const SUPERBLOCK_BYTES: usize = 64;
/// Word (64 bits) that changes whenever a writer opens, seals or closes the layer. A reader in
/// another process checks it and reopens the layer after a change.
pub(crate) const GENERATION_WORD: usize = 1024 / 8;
/// Word that is 1 while the writer keeps its block map in private memory, else 0.
pub(crate) const PRIVATE_MAP_WORD: usize = 1032 / 8;

/// The fixed part of a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// The layer's own id: 16 random bytes.
    pub(crate) id: [u8; 16],
    /// Size of the disk, in bytes.
    pub(crate) disk_size_bytes: u64,
}

impl Superblock {
    /// Layout: magic (8), version (4), block size (4), id (16), disk size (8),
    /// zero (8), keyed hash of all before it (16).
    pub(crate) fn encode(&self, key: &[u8; 32]) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        bytes[0..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(BLOCK_SIZE_BYTES as u32).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.id);
        bytes[32..40].copy_from_slice(&self.disk_size_bytes.to_le_bytes());
        let tag = short_hash(key, &bytes[..48]);
        bytes[48..64].copy_from_slice(&tag);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; SUPERBLOCK_BYTES], key: &[u8; 32]) -> Result<Superblock> {
        if &bytes[0..8] != MAGIC {
            return Err(Error::new(ErrorKind::Corrupt, "this is not a layer file (bad magic)"));
        }
        let version = u32::from_le_bytes(array(&bytes[8..12]));
        if version != VERSION {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the layer has format version {version}, this program reads version {VERSION}: \
                     use the version of Coldrise that wrote it"
                ),
            ));
        }
        if short_hash(key, &bytes[..48]) != bytes[48..64] {
            return Err(Error::new(ErrorKind::Corrupt, "the layer's superblock is damaged"));
        }
        Ok(Superblock {
            id: array(&bytes[16..32]),
            disk_size_bytes: u64::from_le_bytes(array(&bytes[32..40])),
        })
    }
}

pub(super) fn short_hash(key: &[u8; 32], bytes: &[u8]) -> [u8; 16] {
    array(&blake3::keyed_hash(key, bytes).as_bytes()[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_encoding() {
        let record = Record {
            sequence: 0x01_0203_0405,
            unflushed: 77,
            block: (1 << 48) - 1,
            kind: RecordKind::ZeroRange,
            payload: [9; 16],
        };
        assert_eq!(Record::decode(&record.encode()), Some(record));
        assert_eq!(record.durable_sequence(), 0x01_0203_0405 - 77);
    }

    #[test]
    fn the_bytes_of_records_are_pinned() {
        let mut payload = [0; 16];
        payload[..8].copy_from_slice(&0x1122_3344_5566_7788u64.to_le_bytes());
        payload[8..].copy_from_slice(&1_780_000_000_123_456_789u64.to_le_bytes());
        let mark = Record {
            sequence: 0x01_0203_0405,
            unflushed: 7,
            block: 0,
            kind: RecordKind::TimeMark,
            payload,
        };
        let bytes = [
            5, 4, 3, 2, 1, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0x88, 0x77, 0x66, 0x55,
            0x44, 0x33, 0x22, 0x11, 0x15, 0xcd, 0x8d, 0xbb, 0x91, 0xd4, 0xb3, 0x18,
        ];
        assert_eq!(mark.encode(), bytes);
        assert_eq!(Record::decode(&bytes), Some(mark));
        for (number, kind) in [
            (1, RecordKind::Block),
            (2, RecordKind::Cells),
            (3, RecordKind::ZeroRange),
            (4, RecordKind::Vacant),
        ] {
            assert_eq!(Record { kind, ..mark }.encode()[18], number);
        }
        let mut later = bytes;
        later[18] = 6;
        assert_eq!(Record::decode(&later), None);
    }

    #[test]
    fn a_layer_of_another_version_is_refused_with_both_numbers() {
        let key = [3; 32];
        let superblock = Superblock { id: [5; 16], disk_size_bytes: 1 << 30 };
        let mut old = superblock.encode(&key);
        old[8] = 1;
        let error = Superblock::decode(&old, &key).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("version 1, this program reads version 2"), "{error}");
    }

    #[test]
    fn a_damaged_superblock_is_refused() {
        let key = [3; 32];
        let superblock = Superblock { id: [5; 16], disk_size_bytes: 1 << 30 };
        let good = superblock.encode(&key);
        assert_eq!(Superblock::decode(&good, &key).unwrap(), superblock);
        for position in 0..SUPERBLOCK_BYTES {
            let mut bad = good;
            bad[position] ^= 1;
            assert!(Superblock::decode(&bad, &key).is_err(), "byte {position}");
        }
    }

    #[test]
    fn slots_and_records_do_not_overlap() {
        assert_eq!(record_offset_bytes(0), SUPERBLOCK_AREA_BYTES);
        let last = SLOTS_PER_SEGMENT - 1;
        assert_eq!(record_offset_bytes(last) + RECORD_BYTES as u64, slot_offset_bytes(0));
        assert_eq!(slot_offset_bytes(last) + BLOCK_SIZE_BYTES, record_offset_bytes(last + 1));
        assert_eq!(segments_in(segment_offset_bytes(7)), 7);
        assert_eq!(segments_in(10), 0);
    }
}
