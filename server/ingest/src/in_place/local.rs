//! Raw image files and block devices that are read and written in place.

use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_host::loop_device;
use rustix::fs::{Advice, FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;

use super::{Port, Target};
use crate::source::{ImageFormat, RawSource, Source};
use crate::zeroing::{write_zero_bytes, zero_in_place};

/// A file or device, held against mounts and QEMU.
pub(super) struct LocalTarget {
    source: RawSource,
    file: File,
    path: PathBuf,
    is_device: bool,
}

impl LocalTarget {
    /// Opens the disk for writing, and holds it: a device exclusively, so that nothing mounts it; both
    /// with a lock that QEMU respects, as long as this process closes no other descriptor of the file.
    pub(super) fn open(path: &Path) -> Result<LocalTarget> {
        match ImageFormat::from_extension(path) {
            None | Some(ImageFormat::Raw) => {}
            Some(format) => {
                let text = format!("{} is a {format} image by its name", path.display());
                return Err(Error::new(ErrorKind::InvalidInput, text)
                    .advise("serve it with qemu-nbd and name the NBD URI"));
            }
        }
        // First, because the lock ends when any other descriptor of the file is closed.
        let source = RawSource::open_disk(path)?;
        let what = || format!("opening {} for writing", path.display());
        let is_device = std::fs::metadata(path).context(what)?.file_type().is_block_device();
        let exclusive = if is_device { OFlags::EXCL } else { OFlags::empty() };
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(exclusive.bits() as i32)
            .open(path)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::EBUSY) => in_use(path, "mounted, or part of another device"),
                _ => Error::io(what(), error),
            })?;
        match rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::ACCESS) => return Err(in_use(path, "open in QEMU")),
            Err(error) => return Err(Error::io(what(), error.into())),
        }
        if let Some(device) = loop_device(path) {
            return Err(in_use(path, &format!("attached as {device}")));
        }
        Ok(LocalTarget { source, file, path: path.to_path_buf(), is_device })
    }
}

fn in_use(path: &Path, how: &str) -> Error {
    Error::new(ErrorKind::Busy, format!("{} is in use ({how})", path.display()))
        .advise("stop the machine, or detach or unmount the disk first")
}

impl Target for LocalTarget {
    fn source(&self) -> &dyn Source {
        &self.source
    }

    fn port(&self) -> Result<Box<dyn Port + '_>> {
        Ok(Box::new(LocalPort { target: self }))
    }

    fn finish(&self) -> Result<()> {
        self.file.sync_all().context(|| format!("making {} durable", self.path.display()))?;
        // It is only advice: an error changes nothing.
        let _ = rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed);
        Ok(())
    }
}

struct LocalPort<'t> {
    target: &'t LocalTarget,
}

impl Port for LocalPort<'_> {
    fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        let what = || format!("reading {} at offset {offset_bytes}", self.target.path.display());
        self.target.file.read_exact_at(buffer, offset_bytes).context(what)
    }

    fn write_at(&mut self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let what = || format!("writing {} at offset {offset_bytes}", self.target.path.display());
        self.target.file.write_all_at(bytes, offset_bytes).context(what)
    }

    fn write_zeroes(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        // A hole in a file takes no space. A device may be preallocated, and stays so.
        let kind = match self.target.is_device {
            true => FallocateFlags::ZERO_RANGE,
            false => FallocateFlags::PUNCH_HOLE,
        };
        let file = (&self.target.file, self.target.path.as_path());
        if zero_in_place(file, kind, offset_bytes, length_bytes)? {
            return Ok(());
        }
        write_zero_bytes(offset_bytes, length_bytes, |bytes, at| self.write_at(bytes, at))
    }
}
