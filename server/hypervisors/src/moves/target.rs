//! The files and block devices to which disks are moved.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{sync_directory, Context, Error, ErrorKind, Result};
use coldrise_session::SessionDocument;
use coldrise_store::DiskName;
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Most file systems and volumes have a mark in this range at the start or the end of their device.
const MARKED_BYTES: u64 = 1 << 20;

/// The format of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// QEMU's own: takes only the space that is used.
    Qcow2,
    /// The bytes of the disk; a sparse file, or a block device.
    Raw,
}

impl ImageFormat {
    /// QEMU's name of its driver.
    pub fn word(self) -> &'static str {
        match self {
            ImageFormat::Qcow2 => "qcow2",
            ImageFormat::Raw => "raw",
        }
    }
}

/// Where a disk is moved to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The disk.
    pub(super) disk: DiskName,
    /// An absolute path.
    pub(super) path: PathBuf,
    /// The format.
    pub(super) format: ImageFormat,
    /// The path is a folder, for a file per disk.
    is_folder: bool,
}

/// Parses `DISK=PATH`, `DISK=qcow2:PATH`, `DISK=raw:PATH`, or the path of a folder. Whether the folder exists is
/// seen when the disks get their targets: the command may run on another host.
///
/// # Errors
/// `InvalidInput`; the message says what is allowed.
pub fn parse_target(text: &str) -> Result<Target> {
    let refused = |why: &str| {
        let text =
            format!("{text:?} {why}: give DISK=PATH, DISK=qcow2:PATH, DISK=raw:PATH or a folder");
        Error::new(ErrorKind::InvalidInput, text)
    };
    let absolute = |path: &str| std::path::absolute(path).map_err(|_| refused("names no file"));
    let Some((disk, path)) = text.split_once('=') else {
        let (path, disk) = (absolute(text)?, DiskName::parse("all")?);
        return Ok(Target { disk, path, format: ImageFormat::Qcow2, is_folder: true });
    };
    let disk = DiskName::parse(disk)?;
    let (format, path) = match path.split_once(':') {
        Some(("qcow2", path)) => (Some(ImageFormat::Qcow2), path),
        Some(("raw", path)) => (Some(ImageFormat::Raw), path),
        _ => (None, path),
    };
    let path = absolute(path)?;
    if path.is_dir() {
        return Err(refused("names a folder"));
    }
    let is_device = std::fs::metadata(&path).is_ok_and(|found| is_device(&found));
    if is_device && format == Some(ImageFormat::Qcow2) {
        return Err(refused("is a block device, which takes raw"));
    }
    let is_raw = path.extension().is_some_and(|extension| extension == "raw" || extension == "img");
    let by_name = if is_device || is_raw { ImageFormat::Raw } else { ImageFormat::Qcow2 };
    Ok(Target { disk, path, format: format.unwrap_or(by_name), is_folder: false })
}

/// One target for each disk of the session, in its order.
///
/// # Errors
/// `InvalidInput` if a disk has none or several, or if two share a file.
pub(super) fn of_disks(session: &SessionDocument, targets: &[Target]) -> Result<Vec<Target>> {
    let refused = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
    for target in targets.iter().filter(|target| !target.is_folder) {
        session.disk(&target.disk)?;
    }
    let mut found: Vec<Target> = Vec::new();
    for disk in &session.disks {
        let mut own = targets.iter().filter(|target| target.is_folder || target.disk == disk.name);
        let (Some(target), None) = (own.next(), own.next()) else {
            let text =
                format!("disk {} needs exactly one target: the disks switch together", disk.name);
            return refused(text);
        };
        let mut target = Target { disk: disk.name.clone(), ..target.clone() };
        if target.is_folder && !target.path.is_dir() {
            let text =
                format!("{:?} is not an existing folder: give a folder, or DISK=PATH", target.path);
            return refused(text);
        }
        if target.is_folder {
            target.path.push(format!("{}-{}.qcow2", session.machine, disk.name));
        }
        if found.iter().any(|other| other.path == target.path) {
            return refused(format!("two disks have the target {}", target.path.display()));
        }
        found.push(target);
    }
    Ok(found)
}

/// An open target.
pub(super) struct OpenTarget {
    pub(super) path: PathBuf,
    pub(super) format: ImageFormat,
    /// Readable and writable.
    pub(super) file: File,
    /// The size of the disk.
    pub(super) size_bytes: u64,
    /// The size of a block device, which may be larger than the disk; `None` for a file.
    pub(super) device_bytes: Option<u64>,
    /// QEMU can pass by the page cache of this host. A copy is faster then, and the memory is left to others.
    pub(super) is_direct: bool,
    /// Device and inode, if the file is new.
    pub(super) made: Option<(u64, u64)>,
}

impl Target {
    /// Opens the target, and creates the file. Its name is durable when this returns.
    ///
    /// # Errors
    /// Without `force`, `AlreadyExists` for an existing file or a block device with content; `Busy` for a block device
    /// in use; `NoSpace` for one that is too small; errors of the operating system.
    pub(super) fn open(&self, size_bytes: u64, force: bool) -> Result<OpenTarget> {
        let path = &self.path;
        let opening = || format!("opening {}", path.display());
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        let found = std::fs::metadata(path).ok();
        if found.as_ref().is_some_and(is_device) {
            return self.open_device(size_bytes, force);
        }
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
        let facts = file.metadata().context(opening)?;
        let made = found.is_none().then(|| (facts.dev(), facts.ino()));
        let target = OpenTarget {
            path: path.clone(),
            format: self.format,
            file,
            size_bytes,
            device_bytes: None,
            is_direct: takes_direct_io(path),
            made,
        };
        let sized = match self.format {
            ImageFormat::Raw => target.file.set_len(size_bytes).context(opening),
            ImageFormat::Qcow2 => Ok(()),
        };
        let synced = sized.and_then(|()| path.parent().map_or(Ok(()), sync_directory));
        if let Err(error) = synced {
            target.discard();
            return Err(error);
        }
        Ok(target)
    }
}

fn is_device(found: &std::fs::Metadata) -> bool {
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

impl Target {
    /// Its file or block device; for a folder, the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks whether the target could be opened, as far as that is known before.
    ///
    /// # Errors
    /// As for [`Target::open`]; `NotFound` if its folder is missing.
    pub(super) fn check(&self, size_bytes: u64, force: bool) -> Result<()> {
        let path = &self.path;
        match std::fs::metadata(path) {
            Ok(found) if is_device(&found) => self.open_device(size_bytes, force).map(drop),
            Ok(_) if force => Ok(()),
            Ok(_) => Err(exists_already(path)),
            Err(_) if path.parent().is_some_and(Path::is_dir) => Ok(()),
            Err(_) => {
                let text = format!("the folder of {} does not exist here", path.display());
                Err(Error::new(ErrorKind::NotFound, text).advise("create it, or choose another"))
            }
        }
    }

    /// Opens a block device for this process alone: as long as it is open, it cannot be mounted.
    fn open_device(&self, size_bytes: u64, force: bool) -> Result<OpenTarget> {
        let path = &self.path;
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
        let (path, format) = (path.clone(), self.format);
        let device_bytes = Some(device_bytes);
        Ok(OpenTarget { path, format, file, size_bytes, device_bytes, is_direct: true, made: None })
    }

    /// Makes an empty file, or opens the block device.
    ///
    /// # Errors
    /// As for [`Target::open`].
    pub(super) fn open_empty(&self, size_bytes: u64, force: bool) -> Result<OpenTarget> {
        let target = self.open(size_bytes, force)?;
        if target.device_bytes.is_none() {
            target.file.set_len(0).context(|| format!("emptying {}", self.path.display()))?;
        }
        Ok(target)
    }
}

impl OpenTarget {
    /// Removes a file that the move has made.
    pub(super) fn discard(&self) {
        if let Some(made) = self.made {
            discard(&self.path, made);
        }
    }
}

/// Removes the file if it is still the one that the move has made.
pub(super) fn discard(path: &Path, made: (u64, u64)) {
    let found = std::fs::symlink_metadata(path);
    if found.is_ok_and(|found| (found.dev(), found.ino()) == made) {
        if let Err(error) = std::fs::remove_file(path) {
            tracing::warn!("the unfinished {} stays: {error}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_with_their_format() {
        for (text, format) in [
            ("vda=/x/web01.qcow2", ImageFormat::Qcow2),
            ("vda=/x/web01", ImageFormat::Qcow2),
            ("vda=/x/web01.img", ImageFormat::Raw),
            ("vda=qcow2:/x/web01.raw", ImageFormat::Qcow2),
            ("vda=raw:/x/a=b:c", ImageFormat::Raw),
        ] {
            assert_eq!(parse_target(text).unwrap().format, format, "{text}");
        }
        assert_eq!(parse_target("vda=raw:/x/a=b:c").unwrap().path, Path::new("/x/a=b:c"));
        for text in ["", "=/x", "vda=", "vda=/tmp"] {
            assert_eq!(parse_target(text).unwrap_err().kind(), ErrorKind::InvalidInput, "{text}");
        }
        assert!(parse_target("/tmp").unwrap().is_folder);
    }
}
