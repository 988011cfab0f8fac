//! The target of a backup: the writer of this process or of another process.

use coldrise_block::Result;

use super::{DiskWriter, RepositoryWriter, WriteCounts, WriteOptions};
use crate::{MachinePart, MapRoot, PointDocument};

/// Takes the disks and the restore point of one backup.
pub trait BackupTarget: Sync {
    /// The size of every chunk, in bytes.
    fn chunk_size_bytes(&self) -> u32;

    /// Starts one disk: see [`RepositoryWriter::disk_writer`].
    ///
    /// # Errors
    /// As [`RepositoryWriter::disk_writer`].
    fn start_disk(
        &self,
        base: Option<MapRoot>,
        size_bytes: u64,
        options: WriteOptions,
    ) -> Result<Box<dyn DiskTarget + '_>>;

    /// Adds the point with its files: see [`RepositoryWriter::put_point_with_files`].
    ///
    /// # Errors
    /// As [`RepositoryWriter::put_point_with_files`]; `NoSpace` if only the reserve of the drive is
    /// left.
    fn put_point(&self, document: &PointDocument, files: Option<&[u8]>) -> Result<()>;
}

/// Takes one disk. Dropping it before its end cancels the disk.
pub trait DiskTarget {
    /// An empty buffer, reused if possible.
    fn buffer(&mut self) -> Vec<u8>;

    /// See [`DiskWriter::write`].
    ///
    /// # Errors
    /// As [`DiskWriter::write`].
    fn write(&mut self, offset_bytes: u64, bytes: Vec<u8>) -> Result<()>;

    /// See [`DiskWriter::write_hole`].
    ///
    /// # Errors
    /// As [`DiskWriter::write_hole`].
    fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()>;

    /// The counters so far.
    fn counts(&self) -> WriteCounts;

    /// See [`DiskWriter::finish`].
    ///
    /// # Errors
    /// As [`DiskWriter::finish`].
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

    fn put_point(&self, document: &PointDocument, files: Option<&[u8]>) -> Result<()> {
        // The document contains the machine's configuration and parts, and is stored twice: in the
        // catalog and in a marker. So are the files.
        let configuration = document.configuration.as_ref().map_or(0, |found| found.text.len());
        let parts: usize = document.parts.iter().map(MachinePart::stored_bytes).sum();
        let bytes = (configuration + parts + files.map_or(0, <[u8]>::len)) as u64;
        self.repository().keep_reserve(2 * bytes, 2 * bytes)?;
        self.put_point_with_files(document, files)
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
