//! Files and block devices of a host that are about to take a disk.

use std::fs::{File, Metadata, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result, sync_directory};
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Most file systems and volumes have a mark in this range at the start or the end of their device.
const MARKED_BYTES: u64 = 1 << 20;

/// What is known of an open file or block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFacts {
    /// Device and inode, if the file is new.
    pub made: Option<(u64, u64)>,
    /// The size of a block device, which may be larger than the disk, in bytes; `None` for a file.
    pub device_bytes: Option<u64>,
    /// QEMU can pass by the page cache of the host. A copy is faster then, and the memory is left to others.
    pub is_direct: bool,
}

/// Opens a file or block device for a disk of `size_bytes`, and creates the file with `length_bytes`. Its name is durable when this
/// returns. A block device cannot be mounted as long as it is open.
///
/// # Errors
/// Without `force`, `AlreadyExists` for an existing file or a block device with content; `Busy` for a block device
/// in use; `NoSpace` for one that is too small; errors of the operating system.
pub fn open_disk_file(
    path: &Path,
    size_bytes: u64,
    length_bytes: u64,
    force: bool,
) -> Result<(File, DiskFacts)> {
    let opening = || format!("opening {}", path.display());
    let found = std::fs::metadata(path).ok();
    if found.as_ref().is_some_and(is_device) {
        return open_device(path, size_bytes, force);
    }
    if found.is_none() {
        check_folder(path)?;
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    let file = match found.is_some() && force {
        true => options.truncate(true).open(path),
        false => options.create_new(true).open(path),
    };
    let file = match file {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            return Err(exists_already(path));
        }
        file => file.context(opening)?,
    };
    let metadata = file.metadata().context(opening)?;
    let made = found.is_none().then(|| (metadata.dev(), metadata.ino()));
    let sized = file.set_len(length_bytes).context(opening);
    if let Err(error) = sized.and_then(|()| path.parent().map_or(Ok(()), sync_directory)) {
        made.into_iter().for_each(|made| discard_disk_file(path, made));
        return Err(error);
    }
    Ok((file, DiskFacts { made, device_bytes: None, is_direct: takes_direct_io(path) }))
}

/// Opens a block device for this process alone.
fn open_device(path: &Path, size_bytes: u64, force: bool) -> Result<(File, DiskFacts)> {
    let opening = || format!("opening {}", path.display());
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(OFlags::EXCL.bits() as i32);
    let file = options.open(path).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::BUSY) => {
            let text = format!(
                "{} is in use: mounted, part of another device, or the target of another move",
                path.display()
            );
            Error::new(ErrorKind::Busy, text).advise("unmount it, or choose another device")
        }
        _ => Error::io(opening(), error),
    })?;
    let device_bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0));
    let device_bytes = device_bytes.map_err(std::io::Error::from).context(opening)?;
    if device_bytes < size_bytes {
        let text =
            format!("{} has {device_bytes} bytes, the disk has {size_bytes}", path.display());
        return Err(Error::new(ErrorKind::NoSpace, text).advise("choose a larger device"));
    }
    if !force && has_content(&file, device_bytes).context(opening)? {
        let text = format!("{} is not empty", path.display());
        return Err(Error::new(ErrorKind::AlreadyExists, text).advise(
            "look at it (wipefs DEVICE); choose another device, or overwrite it with --force",
        ));
    }
    Ok((file, DiskFacts { made: None, device_bytes: Some(device_bytes), is_direct: true }))
}

/// Opens a block device for this process alone, as long as it is open; `None` for a file that no loop device shows.
///
/// # Errors
/// `Busy` if it is in use; errors of the operating system.
pub(crate) fn hold_disk_file(path: &Path) -> Result<Option<File>> {
    let what = || format!("opening {}", path.display());
    let in_use = |how: &str| {
        Error::new(ErrorKind::Busy, format!("{} is in use ({how})", path.display()))
            .advise("stop the machine, or detach or unmount the disk first")
    };
    if !is_device(&std::fs::metadata(path).context(what)?) {
        return match loop_device(path) {
            Some(device) => Err(in_use(&format!("attached as {device}"))),
            None => Ok(None),
        };
    }
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(OFlags::EXCL.bits() as i32).open(path);
    file.map(Some).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::BUSY) => in_use("mounted, or part of another device"),
        _ => Error::io(what(), error),
    })
}

/// The loop device that shows the file, if there is one.
pub fn loop_device(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    std::fs::read_dir("/sys/block").ok()?.flatten().find_map(|device| {
        let backing = std::fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        let is_same = Path::new(backing.trim_end_matches('\n')) == path;
        is_same.then(|| format!("/dev/{}", device.file_name().to_string_lossy()))
    })
}

/// Checks whether the file or block device could be opened, as far as that is known before.
///
/// # Errors
/// As for [`open_disk_file`]; `NotFound` if its folder is missing.
pub(crate) fn check_disk_file(path: &Path, size_bytes: u64, force: bool) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(found) if is_device(&found) => open_device(path, size_bytes, force).map(drop),
        Ok(_) if force => Ok(()),
        Ok(_) => Err(exists_already(path)),
        Err(_) => check_folder(path),
    }
}

/// Checks that a new file can be made at this path. Below /dev it would lie in memory: the name of a device has a typing error.
fn check_folder(path: &Path) -> Result<()> {
    if path.starts_with("/dev") {
        let text = format!("there is no device {}", path.display());
        return Err(Error::new(ErrorKind::NotFound, text).advise("lsblk shows the devices"));
    }
    if path.parent().is_some_and(Path::is_dir) {
        return Ok(());
    }
    let text = format!("the folder of {} does not exist", path.display());
    Err(Error::new(ErrorKind::NotFound, text).advise("create it, or choose another"))
}

/// Removes the file if it is still the one that was made.
pub fn discard_disk_file(path: &Path, made: (u64, u64)) {
    let found = std::fs::symlink_metadata(path);
    if found.is_ok_and(|found| (found.dev(), found.ino()) == made) {
        if let Err(error) = std::fs::remove_file(path) {
            tracing::warn!("the unfinished {} stays: {error}", path.display());
        }
    }
}

pub(crate) fn is_device(found: &Metadata) -> bool {
    found.file_type().is_block_device()
}

/// Whether a device has anything but zeroes where file systems, partition tables, LVM and RAID have their marks.
fn has_content(file: &File, size_bytes: u64) -> std::io::Result<bool> {
    let mut bytes = vec![0; usize::try_from(MARKED_BYTES.min(size_bytes)).unwrap_or(0)];
    for offset_bytes in [0, size_bytes.saturating_sub(MARKED_BYTES)] {
        file.read_exact_at(&mut bytes, offset_bytes)?;
        if bytes.iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the file's file system has direct I/O.
fn takes_direct_io(path: &Path) -> bool {
    OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path).is_ok()
}

fn exists_already(path: &Path) -> Error {
    let text = format!("{} exists already", path.display());
    Error::new(ErrorKind::AlreadyExists, text)
        .advise("choose another name, or overwrite it with --force")
}
