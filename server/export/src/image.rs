//! A restore point's disk as an image file.

use crate::image_file::ImageFile;
use crate::image_name::{names, ImagePart};
use coldrise_block::{Disk, Error, ErrorKind, Result, StoredRanges};
use coldrise_formats::{DiskShape, Format, Identity, Presentation};
use coldrise_store::{DiskDocument, DiskName, PointDocument, Repository};
use std::sync::Arc;

/// Purpose of the key that an image's ids are derived from; it never changes.
const IDENTITY: &str = "image identity";

/// The disk of a point, as far as layouts depend on it.
///
/// The ids in an image are bound to the repository, the machine, the point and
/// the disk: the same at every opening, and to whoever lacks the key as good as
/// random.
pub(crate) fn shape(
    repository: &Repository,
    point: &PointDocument,
    disk: &DiskDocument,
) -> DiskShape {
    // No name holds a slash.
    let material = format!("{}/{}/{}", point.machine, point.point, disk.name);
    let seed = *repository.derive_key(IDENTITY, material.as_bytes());
    let created_unix_seconds = point.created_at_ms / 1000;
    DiskShape::new(disk.size_bytes, Identity { seed, created_unix_seconds })
}

/// Lays a disk out. For a compact format its extents are walked, no data is
/// read; for the others this costs next to nothing.
pub(crate) fn open(
    repository: &Repository,
    point: &PointDocument,
    document: &DiskDocument,
    part: ImagePart,
    disk: Arc<dyn Disk>,
) -> Result<ImageFile> {
    let names = names(part.format, &document.name)?;
    let shape = shape(repository, point, document);
    let presented = if part.format.is_compact() {
        let mut stored = StoredRanges::of(&*disk);
        let presented = Presentation::new(&names, &shape, &mut stored);
        stored.end()?;
        presented
    } else {
        Presentation::new(&names, &shape, [])
    };
    let mut files = presented.map_err(|error| refused(error, &document.name))?.into_files();
    if part.index >= files.len() {
        return Err(Error::new(ErrorKind::Internal, "an image without the file that it names"));
    }
    Ok(ImageFile::new(files.swap_remove(part.index).layout, disk))
}

/// What a layout refuses says already why.
fn refused(error: coldrise_formats::Error, disk: &DiskName) -> Error {
    use coldrise_formats::Error as Layout;
    match error {
        Layout::DiskTooLarge { .. } | Layout::ImageTooLarge { .. } => {
            let vhdx = Format::Vhdx.suffix();
            Error::new(ErrorKind::Unsupported, format!("{error}; {disk}{vhdx} holds it"))
        }
        Layout::RangeOutside { .. } => Error::new(ErrorKind::Internal, error.to_string()),
        _ => Error::new(ErrorKind::Unsupported, error.to_string()),
    }
}
