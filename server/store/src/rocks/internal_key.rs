//! Keys as they are stored in files of the database: the user's key, then 8 bytes, `sequence << 8 |
//! kind`, little endian (RocksDB's `dbformat.h`).

/// Bytes after the user's key.
pub(super) const END_BYTES: usize = 8;
/// An upper bound for keys; even the longest, a document's, is far shorter. It bounds the memory
/// for a damaged key that claims to share a long prefix with its predecessor.
pub(super) const MAX_BYTES: usize = 1 << 10;
pub(super) const KIND_DELETION: u8 = 0;
pub(super) const KIND_VALUE: u8 = 1;

/// The user's key, the sequence number and the kind.
pub(super) fn split(key: &[u8]) -> Option<(&[u8], u64, u8)> {
    let (user_key, end) = key.split_last_chunk::<END_BYTES>()?;
    let end = u64::from_le_bytes(*end);
    Some((user_key, end >> 8, end as u8))
}

/// The user's key, or all of a key that is too short to have an end.
pub(super) fn user_key(key: &[u8]) -> &[u8] {
    split(key).map_or(key, |(user_key, ..)| user_key)
}
