//! The content that a proof is made of or checked on: a disk of a repository, or a source outside of it.

use std::sync::Arc;

use coldrise_block::{Disk, Extent, Result};
use coldrise_ingest::source::{Reader, Source};

/// Extents per request.
const EXTENT_LIMIT: usize = 256;

/// The content of a disk.
pub enum Content<'c> {
    /// A disk of a point or session.
    Stored(Arc<dyn Disk>),
    /// An image, a device or an NBD export.
    Copy(Box<dyn Source + 'c>),
}

/// One thread's reader.
pub(super) enum ContentReader<'r> {
    Stored(&'r dyn Disk),
    Copy(Box<dyn Reader + 'r>),
}

impl Content<'_> {
    /// Size in bytes.
    pub fn size_bytes(&self) -> u64 {
        match self {
            Content::Stored(disk) => disk.size_bytes(),
            Content::Copy(source) => source.size_bytes(),
        }
    }

    /// The size of the disk of `size_bytes` on a medium of this block size.
    pub(super) fn rounded(&self, size_bytes: u64) -> u64 {
        match self {
            Content::Stored(_) => size_bytes,
            Content::Copy(source) => size_bytes.next_multiple_of(source.alignment_bytes()),
        }
    }

    pub(super) fn useful_threads(&self) -> usize {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        match self {
            Content::Stored(_) => processors.min(16),
            Content::Copy(source) => source.useful_readers().min(processors),
        }
    }

    pub(super) fn extents(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<Extent>> {
        match self {
            Content::Stored(disk) => disk.extents(offset_bytes, length_bytes, EXTENT_LIMIT),
            Content::Copy(source) => source.extents(offset_bytes, length_bytes),
        }
    }

    pub(super) fn reader(&self) -> Result<ContentReader<'_>> {
        Ok(match self {
            Content::Stored(disk) => ContentReader::Stored(disk.as_ref()),
            Content::Copy(source) => ContentReader::Copy(source.reader()?),
        })
    }
}

impl ContentReader<'_> {
    pub(super) fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        match self {
            ContentReader::Stored(disk) => disk.read_at(buffer, offset_bytes),
            ContentReader::Copy(reader) => reader.read_at(buffer, offset_bytes),
        }
    }
}
