//! The files and block devices to which disks are moved.

use std::fs::File;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_host::{DiskFacts, FileKind, Host, open_disk_file};
use coldrise_session::SessionDocument;
use coldrise_store::DiskName;
use serde::{Deserialize, Serialize};

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
    /// Absolute when it is the target of a disk.
    pub(super) path: PathBuf,
    /// The chosen format; `None` for the one that the path suggests.
    format: Option<ImageFormat>,
    /// The path is a folder, for a file per disk.
    is_folder: bool,
}

/// Parses `DISK=PATH`, `DISK=qcow2:PATH`, `DISK=raw:PATH`, or the path of a folder. What is there is seen when the
/// disks get their targets: it may be on another host.
///
/// # Errors
/// `InvalidInput`; the message says what is allowed.
pub fn parse_target(text: &str) -> Result<Target> {
    let refused = |why: &str| {
        let text =
            format!("{text:?} {why}: give DISK=PATH, DISK=qcow2:PATH, DISK=raw:PATH or a folder");
        Error::new(ErrorKind::InvalidInput, text)
    };
    let path = |path: &str| match path {
        "" => Err(refused("names no file")),
        // libvirt drops some of them.
        path if path.chars().any(char::is_control) => Err(refused("has a control character")),
        path => Ok(PathBuf::from(path)),
    };
    let Some((disk, place)) = text.split_once('=') else {
        let (path, disk) = (path(text)?, DiskName::parse("all")?);
        return Ok(Target { disk, path, format: None, is_folder: true });
    };
    let disk = DiskName::parse(disk)?;
    let (format, place) = match place.split_once(':') {
        Some(("qcow2", place)) => (Some(ImageFormat::Qcow2), place),
        Some(("raw", place)) => (Some(ImageFormat::Raw), place),
        _ => (None, place),
    };
    Ok(Target { disk, path: path(place)?, format, is_folder: false })
}

impl Target {
    /// The format: the chosen one, else by the name.
    pub(super) fn format(&self) -> ImageFormat {
        let extension = self.path.extension();
        let is_raw = extension.is_some_and(|extension| extension == "raw" || extension == "img");
        self.format.unwrap_or(if is_raw { ImageFormat::Raw } else { ImageFormat::Qcow2 })
    }

    /// The target of a disk, after a look at what is there.
    fn of(mut self, host: &Host, session: &SessionDocument, disk: &DiskName) -> Result<Target> {
        if host.name().is_none() {
            let path = std::path::absolute(&self.path);
            self.path = path.context(|| format!("finding {}", self.path.display()))?;
        } else if self.path.is_relative() {
            let text = format!("{:?}: give an absolute path of the host", self.path);
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let [found] = host.look([&self.path])?;
        let kind = found.map(|found| found.kind);
        let why = match (self.is_folder, kind) {
            (true, Some(FileKind::Folder)) => {
                self.path.push(format!("{}-{disk}.qcow2", session.machine));
                None
            }
            (true, _) => Some("is not an existing folder: give a folder, or DISK=PATH"),
            (false, Some(FileKind::Folder)) => Some("is a folder: name a file in it"),
            (false, Some(FileKind::BlockDevice)) if self.format == Some(ImageFormat::Qcow2) => {
                Some("is a block device, which takes raw")
            }
            (false, Some(FileKind::BlockDevice)) => {
                self.format = Some(ImageFormat::Raw);
                None
            }
            (false, _) => None,
        };
        match why {
            None => Ok(Target { disk: disk.clone(), ..self }),
            Some(why) => {
                let text = format!("{:?} {why}", self.path);
                Err(Error::new(ErrorKind::InvalidInput, text))
            }
        }
    }
}

/// One target for each disk of the session, in its order.
///
/// # Errors
/// `InvalidInput` if a disk has none or several, if two share a file, or for a folder that is not there.
pub(super) fn of_disks(
    host: &Host,
    session: &SessionDocument,
    targets: &[Target],
) -> Result<Vec<Target>> {
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
        let target = target.clone().of(host, session, &disk.name)?;
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
    /// The size of the disk.
    pub(super) size_bytes: u64,
    pub(super) facts: DiskFacts,
}

impl Target {
    /// Its file or block device; for a folder, the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn opened(&self, size_bytes: u64, facts: DiskFacts) -> OpenTarget {
        OpenTarget { path: self.path.clone(), format: self.format(), size_bytes, facts }
    }

    /// Opens the target here, for a QEMU that gets the open file.
    ///
    /// # Errors
    /// Those of [`open_disk_file`].
    pub(super) fn open(&self, size_bytes: u64, force: bool) -> Result<(OpenTarget, File)> {
        let length_bytes = match self.format() {
            ImageFormat::Raw => size_bytes,
            ImageFormat::Qcow2 => 0,
        };
        let (file, facts) = open_disk_file(&self.path, size_bytes, length_bytes, force)?;
        Ok((self.opened(size_bytes, facts), file))
    }

    /// Makes an empty file on a host, or opens the block device there until the host's connection ends.
    ///
    /// # Errors
    /// Those of [`Host::open_disk`].
    pub(super) fn open_on(&self, host: &Host, size_bytes: u64, force: bool) -> Result<OpenTarget> {
        let facts = host.open_disk(&self.path, size_bytes, force)?;
        Ok(self.opened(size_bytes, facts))
    }
}

impl OpenTarget {
    /// Removes a file that the move has made.
    pub(super) fn discard(&self, host: &Host) {
        discard(host, &self.path, self.facts.made);
    }
}

/// Removes the file if it is still the one that the move has made.
pub(super) fn discard(host: &Host, path: &Path, made: Option<(u64, u64)>) {
    if let Some(Err(error)) = made.map(|made| host.discard_disk(path, made)) {
        tracing::warn!("the unfinished {} stays: {}", path.display(), error.full_message());
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
            assert_eq!(parse_target(text).unwrap().format(), format, "{text}");
        }
        assert_eq!(parse_target("vda=raw:/x/a=b:c").unwrap().path, Path::new("/x/a=b:c"));
        for text in ["", "=/x", "vda=", "vda=/a\nb", "/a\tb"] {
            assert_eq!(parse_target(text).unwrap_err().kind(), ErrorKind::InvalidInput, "{text}");
        }
        assert!(parse_target("/tmp").unwrap().is_folder);
    }
}
