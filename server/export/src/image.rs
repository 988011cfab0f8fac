//! A disk as an image file: its layout and its ids.

use crate::image_name::{ImagePart, names};
use coldrise_block::{Disk, Error, ErrorKind, Result, StoredRanges};
use coldrise_formats::{DiskShape, Format, Identity, Layout, Names, Presentation};
use coldrise_session::{SessionDisk, SessionDocument};
use coldrise_store::{DiskDocument, DiskName, PointDocument, Repository};
use std::path::Path;

/// Purpose of the key that an image's ids are derived from; it never changes.
const IDENTITY: &str = "image identity";

/// The properties of a point's disk that layouts depend on.
///
/// The ids in an image are bound to the repository, the machine, the point and the disk:
/// they are the same at every opening. Without the key they look random.
pub(crate) fn point_shape(
    repository: &Repository,
    point: &PointDocument,
    disk: &DiskDocument,
) -> DiskShape {
    // No name holds a slash.
    let material = format!("{}/{}/{}", point.machine, point.point, disk.name);
    shape(repository, &material, disk.size_bytes, point.created_at_ms)
}

/// A session's disk. It has ids of its own until it ends, so that no program takes it for
/// the point's or another session's disk.
pub(crate) fn session_shape(
    repository: &Repository,
    session: &SessionDocument,
    disk: &SessionDisk,
) -> DiskShape {
    // A point's has two slashes.
    let material = format!("live/{}/{}/{}", session.name, session.created_at_ms, disk.name);
    shape(repository, &material, disk.size_bytes, session.created_at_ms)
}

fn shape(
    repository: &Repository,
    material: &str,
    size_bytes: u64,
    created_at_ms: u64,
) -> DiskShape {
    let seed = *repository.derive_key(IDENTITY, material.as_bytes());
    DiskShape::new(size_bytes, Identity { seed, created_unix_seconds: created_at_ms / 1000 })
}

/// Lays a disk out. A compact format walks the extents and reads no data; the others cost
/// next to nothing. `folder` is the path under which clients see the image's files, if they
/// do.
pub(crate) fn lay_out(
    part: ImagePart,
    name: &DiskName,
    shape: &DiskShape,
    disk: &dyn Disk,
    folder: Option<&Path>,
) -> Result<Layout> {
    let mut names = names(part.format, name)?;
    if let (Some(folder), Format::Qcow2External) = (folder, part.format) {
        names = with_path(names, folder)?;
    }
    let presented = if part.format.is_compact() {
        let mut stored = StoredRanges::of(disk);
        let presented = Presentation::new(&names, shape, &mut stored);
        stored.end()?;
        presented
    } else {
        Presentation::new(&names, shape, [])
    };
    let mut files = presented.map_err(|error| refused(error, name))?.into_files();
    if part.index >= files.len() {
        return Err(Error::new(ErrorKind::Internal, "an image without the file that it names"));
    }
    Ok(files.swap_remove(part.index).layout)
}

/// Refuses an image that readers would take for another format because of the disk's first
/// bytes.
pub(crate) fn check_start(part: ImagePart, name: &DiskName, disk: &dyn Disk) -> Result<()> {
    let mut start = [0; Format::START_BYTES];
    if !part.format.depends_on_start() || disk.size_bytes() < start.len() as u64 {
        return Ok(());
    }
    disk.read_at(&mut start, 0)?;
    part.format.check_start(&start).map_err(|error| refused(error, name))
}

/// QEMU looks for a data file without a folder in its own working folder.
fn with_path(names: Names, folder: &Path) -> Result<Names> {
    let path = folder.join(names.companion());
    let text = path.to_str().ok_or_else(|| {
        Error::new(
            ErrorKind::Unsupported,
            format!("it must name {}, whose path is not UTF-8", path.display()),
        )
    })?;
    names
        .with_reference(text)
        .map_err(|error| Error::new(ErrorKind::Unsupported, error.to_string()))
}

/// The layout's error already says why.
fn refused(error: coldrise_formats::Error, disk: &DiskName) -> Error {
    use coldrise_formats::Error as Layout;
    match error {
        Layout::DiskTooLarge { .. } | Layout::ImageTooLarge { .. } => {
            let vhdx = Format::Vhdx.suffix();
            Error::new(ErrorKind::Unsupported, format!("{error}; {disk}{vhdx} can hold it"))
        }
        Layout::RangeOutside { .. } => Error::new(ErrorKind::Internal, error.to_string()),
        _ => Error::new(ErrorKind::Unsupported, error.to_string()),
    }
}
