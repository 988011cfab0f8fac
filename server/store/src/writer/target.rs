//! Where a backup goes: to the writer of this process, or to the one of another process.

use coldrise_block::Result;

use super::{DiskWriter, RepositoryWriter, WriteCounts, WriteOptions};
use crate::{MapRoot, PointDocument};

/// Takes the disks and the restore point of one backup.
pub trait BackupTarget: Sync {
    /// The size of every chunk, in bytes.
    fn chunk_size_bytes(&self) -> u32;

    /// Starts one disk: see [`RepositoryWriter::disk_writer`].
    ///
    /// # Errors
    /// As there.
    fn start_disk(
        &self,
        base: Option<MapRoot>,
        size_bytes: u64,
        options: WriteOptions,
    ) -> Result<Box<dyn DiskTarget + '_>>;

    /// Adds the point: see [`RepositoryWriter::put_point`].
    ///
    /// # Errors
    /// As there.
    fn put_point(&self, document: &PointDocument) -> Result<()>;
}

/// Takes one disk. Dropped before its end it is cancelled.
pub trait DiskTarget {
    /// An empty buffer, used before where there is one.
    fn buffer(&mut self) -> Vec<u8>;

    /// See [`DiskWriter::write`].
    ///
    /// # Errors
    /// As there.
    fn write(&mut self, offset_bytes: u64, bytes: Vec<u8>) -> Result<()>;

    /// See [`DiskWriter::write_hole`].
    ///
    /// # Errors
    /// As there.
    fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()>;

    /// What has been done so far.
    fn counts(&self) -> WriteCounts;

    /// See [`DiskWriter::finish`].
    ///
    /// # Errors
    /// As there.
    fn finish(self: Box<Self>) -> Result<(MapRoot, WriteCounts)>;
}

impl BackupTarget for RepositoryWriter {
    fn chunk_size_bytes(&self) -> u32 {
        self.repository().chunk_size_bytes()
    }

    fn start_disk(
        &self,
        base: Option<MapRoot>,
        size_bytes: u64,
        options: WriteOptions,
    ) -> Result<Box<dyn DiskTarget + '_>> {
        Ok(Box::new(self.disk_writer(base, size_bytes, options)?))
    }

    fn put_point(&self, document: &PointDocument) -> Result<()> {
        RepositoryWriter::put_point(self, document)
    }
}

impl DiskTarget for DiskWriter {
    fn buffer(&mut self) -> Vec<u8> {
        DiskWriter::buffer(self)
    }

    fn write(&mut self, offset_bytes: u64, bytes: Vec<u8>) -> Result<()> {
        DiskWriter::write(self, offset_bytes, bytes)
    }

    fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        DiskWriter::write_hole(self, offset_bytes, length_bytes)
    }

    fn counts(&self) -> WriteCounts {
        DiskWriter::counts(self)
    }

    fn finish(self: Box<Self>) -> Result<(MapRoot, WriteCounts)> {
        DiskWriter::finish(*self)
    }
}
