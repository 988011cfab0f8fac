//! The caller's side of writing one disk.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::channel;

use coldrise_block::{Error, ErrorKind, MAX_DISK_SIZE_BYTES, Result};

use crate::map::MapRoot;

use super::Shared;
use super::disk_run::{DiskRun, WriteCounts};
use super::pipeline::{JOB_BYTES, Pipeline, Step};

const MAX_THREADS: usize = 256;

/// Options for writing a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOptions {
    /// Threads that hash, compress and encrypt: 1 to 256. One more thread, mostly idle, writes the
    /// store. Disks written at the same time share the threads; the largest request decides their
    /// number.
    pub threads: usize,
}

impl Default for WriteOptions {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(2, |n| n.get());
        WriteOptions { threads: threads.min(MAX_THREADS) }
    }
}

/// Writes one disk of one backup, in parallel and in bounded memory.
///
/// Dropping it without [`DiskWriter::finish`] cancels the disk: nothing becomes visible, and the
/// next backup finds the chunks that were already committed.
pub struct DiskWriter {
    pipeline: Arc<Pipeline>,
    disk: Arc<DiskRun>,
    /// Everything before this offset is written.
    next_offset: u64,
    is_over: bool,
}

impl DiskWriter {
    pub(super) fn start(
        shared: Arc<Shared>,
        base: MapRoot,
        size_bytes: u64,
        options: WriteOptions,
    ) -> Result<DiskWriter> {
        check_size(size_bytes)?;
        if options.threads == 0 || options.threads > MAX_THREADS {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{} threads are not possible: 1 to {MAX_THREADS}", options.threads),
            ));
        }
        let pipeline = shared.enter_pipeline(options.threads)?;
        let disk = Arc::new(DiskRun::new(base, size_bytes));
        Ok(DiskWriter { pipeline, disk, next_offset: 0, is_over: false })
    }

    /// Writes `bytes` at `offset_bytes`, a multiple of the chunk size and not before the end of the
    /// last write. The length is a multiple of the chunk size, unless it reaches the end of the
    /// disk. Chunks of zeroes become holes. Blocks while too many bytes are in flight.
    ///
    /// # Errors
    /// `InvalidInput` for an impossible range; the failure of an earlier write, because writes
    /// happen in the background.
    pub fn write(&mut self, offset_bytes: u64, bytes: Vec<u8>) -> Result<()> {
        self.advance(offset_bytes, bytes.len() as u64)?;
        let chunk_size = self.pipeline.chunk_size;
        let step = JOB_BYTES.max(chunk_size);
        let length = bytes.len();
        let bytes = Arc::new(bytes);
        for start in (0..length).step_by(step) {
            let end = (start + step).min(length);
            let first_chunk = (offset_bytes + start as u64) / chunk_size as u64;
            self.pipeline.push_job(&self.disk, first_chunk, bytes.clone(), start..end);
        }
        Ok(())
    }

    /// Makes a range read as zeroes. The bounds are those of [`DiskWriter::write`].
    ///
    /// # Errors
    /// As [`DiskWriter::write`].
    pub fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.advance(offset_bytes, length_bytes)?;
        let chunk_size = self.pipeline.chunk_size as u64;
        self.pipeline.push_step(Step::Holes {
            disk: Arc::clone(&self.disk),
            first_chunk: offset_bytes / chunk_size,
            count: length_bytes.div_ceil(chunk_size),
        });
        Ok(())
    }

    /// An empty buffer, reused if possible, to be filled and passed to [`DiskWriter::write`].
    pub fn buffer(&mut self) -> Vec<u8> {
        self.pipeline.take_buffer()
    }

    /// The counters so far.
    pub fn counts(&self) -> WriteCounts {
        self.disk.counts()
    }

    /// Ends the disk. On return its chunks, their index and its map are durable.
    ///
    /// # Errors
    /// The first failure of any earlier step.
    pub fn finish(mut self) -> Result<(MapRoot, WriteCounts)> {
        self.trim_tail()?;
        let (answer, answered) = channel();
        self.pipeline.push_step(Step::Finish { disk: Arc::clone(&self.disk), answer });
        let root = answered.recv();
        self.check()?;
        let root = root.map_err(|_| Error::new(ErrorKind::Internal, "the committer ended"))?;
        self.is_over = true;
        Ok((root, self.disk.counts()))
    }

    fn check(&self) -> Result<()> {
        self.disk.check()?;
        self.pipeline.check()
    }

    /// Zeroes the last chunk beyond the end of the disk. A larger base may hold bytes there, which
    /// must not return when the disk grows again.
    fn trim_tail(&mut self) -> Result<()> {
        let chunk_size = self.pipeline.chunk_size as u64;
        let used = (self.disk.size_bytes % chunk_size) as usize;
        let start = self.disk.size_bytes - used as u64;
        if used == 0 || self.next_offset > start || self.disk.base.page() == 0 {
            return Ok(());
        }
        let mut chunk = vec![0; self.pipeline.chunk_size];
        let base = self.pipeline.shared.repository.disk(self.disk.base, start + chunk_size);
        base.read_at(&mut chunk, start)?;
        if chunk[used..].iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        chunk.truncate(used);
        self.write(start, chunk)
    }

    fn advance(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.check()?;
        let (chunk_size, size_bytes) = (self.pipeline.chunk_size as u64, self.disk.size_bytes);
        self.next_offset =
            end_of_write(chunk_size, self.next_offset..size_bytes, offset_bytes, length_bytes)?;
        Ok(())
    }
}

/// Checks the size of a disk.
///
/// # Errors
/// `InvalidInput`.
pub fn check_size(size_bytes: u64) -> Result<()> {
    if (1..=MAX_DISK_SIZE_BYTES).contains(&size_bytes) {
        return Ok(());
    }
    let text = format!("a disk of {size_bytes} bytes is not possible: 1 to {MAX_DISK_SIZE_BYTES}");
    Err(Error::new(ErrorKind::InvalidInput, text))
}

/// Checks that a write consists of whole chunks and lies in `left`, what is left of the disk. Returns its end.
///
/// # Errors
/// `InvalidInput`.
pub fn end_of_write(
    chunk_size: u64,
    left: Range<u64>,
    offset_bytes: u64,
    length_bytes: u64,
) -> Result<u64> {
    let end = offset_bytes.checked_add(length_bytes).filter(|end| {
        *end <= left.end
            && offset_bytes >= left.start
            && offset_bytes % chunk_size == 0
            && (end % chunk_size == 0 || *end == left.end)
    });
    end.ok_or_else(|| {
        let text = format!(
            "a write of {length_bytes} bytes at {offset_bytes} is not in chunks of {chunk_size}, ascending, within {} bytes",
            left.end
        );
        Error::new(ErrorKind::InvalidInput, text)
    })
}

impl Drop for DiskWriter {
    fn drop(&mut self) {
        if !self.is_over {
            self.disk.stop();
            let (_done, is_done) = channel();
            self.pipeline.push_step(Step::Abandon { disk: Arc::clone(&self.disk), _done });
            let _ = is_done.recv();
        }
        self.pipeline.shared.leave_pipeline();
    }
}
