//! The frames of changes: disk (2), kind (1), number of ranges (4), ranges, content. Little endian.
//!
//! A range is an offset (8) and a length (8), in bytes. Kind 0: they read as zeroes. Kind 1: their content follows, one after the other.
//! Kind 2: the same, compressed with zstd.

use coldrise_block::{Error, ErrorKind, Result};

use crate::remote::messages::{Reader, broken};

/// The kind of these frames.
pub(crate) const CHANGES: u8 = 11;

const ZEROES: u8 = 0;
const PLAIN: u8 = 1;
const COMPRESSED: u8 = 2;

/// Maximum content of a frame, in bytes.
const MAX_CONTENT_BYTES: usize = 256 << 10;
/// Maximum number of ranges of zeroes in a frame.
const MAX_RANGES: usize = 4096;
/// A low level: the line is to be full, and the processor is the machine's.
const LEVEL: i32 = 3;

/// A range of a disk, in bytes: where it begins and its length.
type Piece = (u64, u64);

/// Changes of one disk.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changed {
    /// Its number in the opening.
    pub(crate) disk: u16,
    pub(crate) ranges: Vec<Piece>,
    /// What the ranges contain, one after the other; `None`: zeroes.
    pub(crate) content: Option<Vec<u8>>,
}

impl Changed {
    /// No changes yet, with content or of zeroes.
    pub(crate) fn of(disk: u16, has_content: bool) -> Changed {
        Changed { disk, ranges: Vec::new(), content: has_content.then(Vec::new) }
    }

    /// Adds a range.
    pub(crate) fn push(&mut self, offset_bytes: u64, length_bytes: u64, content: &[u8]) {
        match self.ranges.last_mut() {
            Some((offset, length)) if *offset + *length == offset_bytes => *length += length_bytes,
            _ => self.ranges.push((offset_bytes, length_bytes)),
        }
        self.content.iter_mut().for_each(|bytes| bytes.extend_from_slice(content));
    }

    /// Whether nothing more should be added.
    pub(crate) fn is_full(&self, more_bytes: usize) -> bool {
        let bytes = self.content.as_ref().map_or(0, Vec::len);
        bytes + more_bytes > MAX_CONTENT_BYTES || self.ranges.len() >= MAX_RANGES
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let compressed = self.content.as_ref().map(|bytes| zstd::bulk::compress(bytes, LEVEL));
        let compressed = compressed.transpose();
        let compressed = compressed
            .map_err(|error| Error::with_source(ErrorKind::Internal, "compressing", error))?;
        let (kind, content) = match (&self.content, &compressed) {
            (Some(plain), Some(compressed)) if compressed.len() < plain.len() => {
                (COMPRESSED, &**compressed)
            }
            (Some(plain), _) => (PLAIN, &**plain),
            (None, _) => (ZEROES, &[][..]),
        };
        let mut body = self.disk.to_le_bytes().to_vec();
        body.push(kind);
        body.extend_from_slice(&(self.ranges.len() as u32).to_le_bytes());
        for (offset_bytes, length_bytes) in &self.ranges {
            body.extend_from_slice(&offset_bytes.to_le_bytes());
            body.extend_from_slice(&length_bytes.to_le_bytes());
        }
        body.extend_from_slice(content);
        Ok(body)
    }

    /// `sizes`: of the disks, in bytes. All ranges lie within their disk.
    ///
    /// # Errors
    /// `Corrupt` for anything else than [`Changed::encode`] makes.
    pub(crate) fn decode(body: &[u8], sizes: &[u64]) -> Result<Changed> {
        let mut reader = Reader(body);
        let disk = u16::from_le_bytes(*reader.take(2)?.first_chunk().unwrap_or(&[0; 2]));
        let size_bytes = *sizes.get(usize::from(disk)).ok_or_else(|| broken("an unknown disk"))?;
        let kind = reader.take(1)?[0];
        let count = reader.u32()? as usize;
        if count > MAX_RANGES {
            return Err(broken("too many ranges"));
        }
        let (mut ranges, mut total_bytes) = (Vec::with_capacity(count), 0usize);
        for _ in 0..count {
            let (offset_bytes, length_bytes) = (reader.u64()?, reader.u64()?);
            let end_bytes = offset_bytes.checked_add(length_bytes);
            if length_bytes == 0 || end_bytes.is_none_or(|end_bytes| end_bytes > size_bytes) {
                return Err(broken("a range outside of its disk"));
            }
            total_bytes = total_bytes.saturating_add(length_bytes as usize);
            ranges.push((offset_bytes, length_bytes));
        }
        let content = match kind {
            ZEROES if reader.0.is_empty() => None,
            PLAIN => Some(reader.0.to_vec()),
            COMPRESSED => Some(
                zstd::bulk::decompress(reader.0, MAX_CONTENT_BYTES)
                    .map_err(|_| broken("content that cannot be decompressed"))?,
            ),
            _ => return Err(broken("an unknown kind of changes")),
        };
        let is_whole = content
            .as_ref()
            .is_none_or(|bytes| bytes.len() <= MAX_CONTENT_BYTES && bytes.len() == total_bytes);
        match is_whole {
            true => Ok(Changed { disk, ranges, content }),
            false => Err(broken("content of another length than its ranges")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_come_back_and_broken_ones_are_refused() {
        let sizes = [1 << 20, 1 << 30];
        let mut compressible = Changed::of(1, true);
        compressible.push(4096, 4096, &[7; 4096]);
        compressible.push(8192, 4096, &[8; 4096]);
        compressible.push(1 << 29, 4096, &[9; 4096]);
        assert_eq!(compressible.ranges, [(4096, 8192), (1 << 29, 4096)]);
        let mut other = Changed::of(0, true);
        let bytes: Vec<u8> =
            (0..4096u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        other.push(0, 4096, &bytes);
        let mut zeroes = Changed::of(0, false);
        zeroes.push(4096, 1 << 19, &[]);
        for changed in [compressible, other, zeroes] {
            let body = changed.encode().unwrap();
            assert_eq!(Changed::decode(&body, &sizes).unwrap(), changed);
            // No panic and no surplus, whatever byte is different.
            for at in 0..body.len().min(64) {
                let mut bad = body.clone();
                bad[at] ^= 0xff;
                if let Ok(found) = Changed::decode(&bad, &sizes) {
                    let end = |(offset, length): &Piece| *offset + *length;
                    assert!(
                        found.ranges.iter().map(end).max() <= Some(sizes[usize::from(found.disk)])
                    );
                }
                assert!(Changed::decode(&body[..at], &sizes).is_err(), "{at}");
            }
        }
        let mut far = Changed::of(0, false);
        far.push(1 << 20, 4096, &[]);
        assert!(Changed::decode(&far.encode().unwrap(), &sizes).is_err());
        let mut large = Changed::of(1, true);
        large.push(0, 2 << 20, &vec![0; 2 << 20]);
        assert!(Changed::decode(&large.encode().unwrap(), &sizes).is_err());
    }
}
