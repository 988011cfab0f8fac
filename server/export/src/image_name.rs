//! Maps file names to disks and images: `vda`, `vda.vhdx`, `vda-flat.vmdk`.
//!
//! A disk's name may hold dots, so a file name can have several meanings. A disk of exactly
//! that name comes first; then an image of the disk with the longest matching name. An
//! image is refused if the name of its data file already means something else: clients
//! would see the disk over a foreign file.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_formats::{Access, DiskShape, Format, Names};
use coldrise_store::{DiskName, MAX_NAME_BYTES};

/// The meaning of a file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Named<'a> {
    /// The disk.
    pub(crate) disk: &'a DiskName,
    /// The image of the disk; `None` for the disk itself.
    pub(crate) image: Option<ImagePart>,
}

/// One file of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImagePart {
    /// The image's format.
    pub(crate) format: Format,
    /// 0 for the file that clients open, 1 for the data file next to it.
    pub(crate) index: usize,
}

impl ImagePart {
    /// Whether this file, and not the one next to it, holds the disk's bytes.
    pub(crate) fn shows_disk(&self, disk: &DiskName) -> bool {
        self.index > 0
            || names(self.format, disk).is_ok_and(|names| names.companion() == names.image())
    }
}

/// Refuses a name that can mean no disk and no image in any folder.
pub(crate) fn check(file: &str) -> Result<()> {
    let checked = DiskName::parse(file);
    if checked.is_err() && Format::of_file_name(file).is_some() {
        // Only the part with the disk's name must keep to the length of a disk's name.
        if let Some(head) = file.get(..MAX_NAME_BYTES.min(file.len())) {
            return DiskName::parse(head).map(drop);
        }
    }
    checked.map(drop)
}

/// The meaning of `file` among the disks of one point or session.
pub(crate) fn find<'a>(file: &str, disks: &[&'a DiskName]) -> Result<Named<'a>> {
    let Some(named) = lookup(file, disks) else { return Err(no_such(file, disks)) };
    let Some(ImagePart { format, index: 0 }) = named.image else { return Ok(named) };
    let companion = names(format, named.disk)?.companion().to_owned();
    match lookup(&companion, disks) {
        Some(Named { disk, image: Some(_) }) if disk == named.disk => Ok(named),
        _ => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "its data would be in {companion}, but here that is the name of another disk or \
                 its image; use {}{}",
                named.disk,
                Format::Vhdx.suffix()
            ),
        )),
    }
}

/// The owner of the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageOwner {
    /// A restore point. It has every format that is not streamed.
    Point,
    /// A session. Clients change which blocks of its disks are stored, so a compact image
    /// would soon be wrong.
    Session,
}

impl ImageOwner {
    /// Whether images of that format exist.
    pub(crate) fn has(self, format: Format) -> bool {
        match format.access() {
            Access::Writable => true,
            Access::ReadOnly => self == ImageOwner::Point,
            Access::Streamed => false,
        }
    }
}

/// The names of all image files of a disk that clients can open next to `disks`.
pub(crate) fn images(
    shown: ImageOwner,
    disk: &DiskName,
    shape: &DiskShape,
    disks: &[&DiskName],
) -> Vec<String> {
    let mut files = Vec::new();
    for format in Format::ALL {
        if !shown.has(format) || format.check(shape).is_err() {
            continue;
        }
        let Ok(names) = names(format, disk) else { continue };
        for file in [names.image(), names.companion()] {
            if find(file, disks).is_ok_and(|named| named.disk == disk && named.image.is_some()) {
                files.push(file.to_owned());
            }
        }
    }
    files.sort_unstable();
    files.dedup();
    files
}

/// The names of the files of an image.
pub(crate) fn names(format: Format, disk: &DiskName) -> Result<Names> {
    Names::in_tree(format, disk.as_str())
        .map_err(|error| Error::new(ErrorKind::InvalidInput, error.to_string()))
}

fn lookup<'a>(file: &str, disks: &[&'a DiskName]) -> Option<Named<'a>> {
    if let Some(disk) = disks.iter().find(|disk| disk.as_str() == file) {
        return Some(Named { disk, image: None });
    }
    let images = disks.iter().filter_map(|disk| {
        let image = part_of(file, disk)?;
        Some(Named { disk, image: Some(image) })
    });
    images.max_by_key(|named| named.disk.as_str().len())
}

/// The part of an image of `disk` that has the name `file`.
fn part_of(file: &str, disk: &DiskName) -> Option<ImagePart> {
    let rest = file.strip_prefix(disk.as_str())?;
    if let Some(format) = Format::ALL.into_iter().find(|format| format.suffix() == rest) {
        return Some(ImagePart { format, index: 0 });
    }
    let is_companion =
        |format: &Format| names(*format, disk).is_ok_and(|names| names.companion() == file);
    // Formats that share a data file name the same file. It exists while one of the formats
    // can hold the disk.
    let format = Format::ALL
        .into_iter()
        .filter(is_companion)
        .max_by_key(|format| format.largest_disk_bytes())?;
    Some(ImagePart { format, index: 1 })
}

fn no_such(file: &str, disks: &[&DiskName]) -> Error {
    let there = disks.iter().map(|disk| disk.as_str()).collect::<Vec<_>>().join(", ");
    let of_disk = |disk: &&&DiskName| {
        file.strip_prefix(disk.as_str()).is_some_and(|rest| rest.starts_with(['.', '-']))
    };
    let message = match disks.iter().find(of_disk) {
        Some(disk) => {
            let served = Format::ALL.into_iter().filter(|f| f.access() != Access::Streamed);
            let images: Vec<_> = served.map(|f| format!("{disk}{}", f.suffix())).collect();
            format!(
                "there is neither a disk nor an image {file}; the disks are {there}, the images \
                 of {disk} are {}",
                images.join(", ")
            )
        }
        None => format!("there is no disk {file}, only {there}"),
    };
    Error::new(ErrorKind::NotFound, message)
}

#[cfg(test)]
#[path = "image_name_tests.rs"]
mod tests;
