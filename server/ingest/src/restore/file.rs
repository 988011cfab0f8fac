//! Raw files and block devices as targets.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::{Advice, FallocateFlags, OFlags, SeekFrom};

use super::{Sink, SinkWriter};
use crate::zeroing::{write_zero_bytes, zero_in_place};

/// Threads that write to one file or device.
const WRITERS: usize = 4;

/// A new raw file, sparse, or an existing block device.
pub(super) struct LocalSink {
    file: File,
    path: PathBuf,
    /// A device holds other content where nothing is written.
    needs_zeroes: bool,
}

impl LocalSink {
    /// Creates the file with its full size and no content.
    pub(super) fn create(path: &Path, size_bytes: u64) -> Result<LocalSink> {
        let what = || format!("making {}", path.display());
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .context(what)?;
        file.set_len(size_bytes).context(what)?;
        Ok(LocalSink { file, path: path.to_path_buf(), needs_zeroes: false })
    }

    /// Opens an existing block device exclusively, to write it in place: a mounted one is refused.
    pub(super) fn open_device(path: &Path, size_bytes: u64) -> Result<LocalSink> {
        let what = || format!("opening {}", path.display());
        let file = std::fs::OpenOptions::new()
            .write(true)
            .custom_flags(OFlags::EXCL.bits() as i32)
            .open(path)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::EBUSY) => Error::new(
                    ErrorKind::Busy,
                    format!("{} is in use: unmount it first", path.display()),
                ),
                _ => Error::io(what(), error),
            })?;
        let device_bytes = rustix::fs::seek(&file, SeekFrom::End(0))
            .map_err(std::io::Error::from)
            .context(what)?;
        if device_bytes < size_bytes {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{} has {device_bytes} bytes, the disk {size_bytes}", path.display()),
            ));
        }
        Ok(LocalSink { file, path: path.to_path_buf(), needs_zeroes: true })
    }
}

impl Sink for LocalSink {
    fn needs_zeroes(&self) -> bool {
        self.needs_zeroes
    }

    fn alignment_bytes(&self) -> u64 {
        1
    }

    fn useful_writers(&self) -> usize {
        WRITERS
    }

    fn writer(&self) -> Result<Box<dyn SinkWriter + '_>> {
        Ok(Box::new(FileWriter { file: &self.file, path: &self.path }))
    }

    fn finish(&self) -> Result<()> {
        self.file.sync_all().context(|| format!("making {} durable", self.path.display()))
    }
}

struct FileWriter<'s> {
    file: &'s File,
    path: &'s Path,
}

impl SinkWriter for FileWriter<'_> {
    fn write_at(&mut self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.file
            .write_all_at(bytes, offset_bytes)
            .context(|| format!("writing {} at offset {offset_bytes}", self.path.display()))?;
        // Starts writeback without waiting, so that the final sync has little left to
        // write. It is only advice: an error changes nothing.
        let length = std::num::NonZeroU64::new(bytes.len() as u64);
        let _ = rustix::fs::fadvise(self.file, offset_bytes, length, Advice::DontNeed);
        Ok(())
    }

    fn write_zeroes(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        let file = (self.file, self.path);
        if zero_in_place(file, FallocateFlags::ZERO_RANGE, offset_bytes, length_bytes)? {
            return Ok(());
        }
        write_zero_bytes(offset_bytes, length_bytes, |bytes, at| self.write_at(bytes, at))
    }
}
