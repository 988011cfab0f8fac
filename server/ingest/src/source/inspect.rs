//! Inspects a foreign image before it is served: which files it opens, and whether it is
//! complete.
//!
//! This module reads only the few fixed header fields that decide this. `qemu-img`, in its
//! own process and with the format named, answers everything else.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_host::{FileFacts, ScratchSpace};
use serde_json::Value;

use super::qcow2::check_qcow2;
use super::raw::file_length;
use super::raw_signs::refuse_fixed_vhd;
use super::vhd::check_vhd;
use super::vhdx::VhdxMap;
use super::vmdk::{SPARSE_HEADER_BYTES, check_member, vmdk_extents};
use super::{ImageFormat, open_named};
use crate::qemu::{FileRange, QemuImage, check_image, image_facts};

/// How an image is inspected.
pub(super) struct Inspection<'a> {
    /// A folder for QEMU's tools, on the host of the image.
    pub(super) space: &'a ScratchSpace,
    /// Whether its backing files belong to it and may be opened.
    pub(super) follows_backing: bool,
    /// Whether QEMU checks the tables of all its files.
    pub(super) is_checked: bool,
    /// Whether it is the image of a machine. Then its files are opened without a lock that could keep the machine from
    /// starting, and as the machine's own QEMU opens them.
    pub(super) is_of_machine: bool,
    pub(super) cancel: &'a AtomicBool,
}

impl<'a> Inspection<'a> {
    /// For an image of this host that the user names.
    pub(super) fn of_import(
        space: &'a ScratchSpace,
        follows_backing: bool,
        cancel: &'a AtomicBool,
    ) -> Inspection<'a> {
        Inspection { space, follows_backing, is_checked: true, is_of_machine: false, cancel }
    }

    fn locked(&self, image: QemuImage) -> QemuImage {
        match self.is_of_machine {
            true => image.shared(),
            false => image,
        }
    }
}

/// Maximum number of images in one backing chain.
const MAX_CHAIN: usize = 64;
/// VMDK: the parent's content id in an image without a parent.
const NO_PARENT: u64 = 0xffff_ffff;

/// The result of an inspection.
pub(super) struct Inspected {
    /// The options to open it; they name the backing files if those are followed.
    pub(super) image: QemuImage,
    /// Whether part of its content may be compressed.
    pub(super) may_be_compressed: bool,
    /// QEMU's facts about the image itself; of a raw one there are none.
    pub(super) facts: Value,
}

/// One image of a chain.
struct Link {
    path: PathBuf,
    format: ImageFormat,
    extents: Vec<PathBuf>,
    may_be_compressed: bool,
    facts: Value,
}

/// Inspects an image. Refuses damaged images and those that refer to files the user did
/// not name.
pub(super) fn inspect(path: &Path, format: ImageFormat, way: &Inspection<'_>) -> Result<Inspected> {
    let mut chain: Vec<Link> = Vec::new();
    let mut next = Some((path.to_path_buf(), format));
    while let Some((path, format)) = next {
        if chain.len() == MAX_CHAIN {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("more than {MAX_CHAIN} backing files, or a circle of them"),
            ));
        }
        let (link, backing) = inspect_one(path, format, way)?;
        chain.push(link);
        next = backing;
    }
    let may_be_compressed = chain.iter().any(|link| link.may_be_compressed);
    let facts = chain.first_mut().map(|link| link.facts.take()).unwrap_or_default();
    let mut image = None;
    for link in chain.iter().rev() {
        let driver = link.format.qemu_driver();
        image = Some(QemuImage::new(way.space, driver, &link.path, &link.extents, image.take())?);
    }
    match image {
        Some(image) => Ok(Inspected { image: way.locked(image), may_be_compressed, facts }),
        None => Err(Error::new(ErrorKind::Internal, "the image has no file")),
    }
}

/// Inspects a VMDK that is a part of the file `path`; `name` is for messages. It opens no other file.
///
/// # Errors
/// As of [`inspect`].
pub(super) fn inspect_member(
    space: &ScratchSpace,
    path: &Path,
    name: &Path,
    range: FileRange,
    cancel: &AtomicBool,
) -> Result<Inspected> {
    let what = || format!("reading {}", name.display());
    let file = open_named(path)?;
    let mut start = vec![0; range.length_bytes.min(SPARSE_HEADER_BYTES as u64) as usize];
    file.read_exact_at(&mut start, range.offset_bytes).context(what)?;
    check_member(name, &start, range.length_bytes)?;
    let image = QemuImage::new_part(space, ImageFormat::Vmdk.qemu_driver(), path, range)?;
    let what = format!("opening {} as vmdk", name.display());
    let facts = image_facts(space, &image, &what, cancel)?;
    let data = &facts["format-specific"]["data"];
    if data["parent-cid"].as_u64().is_some_and(|parent| parent != NO_PARENT) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} is a snapshot: consolidate the snapshots, and export again",
                name.display()
            ),
        ));
    }
    check_image(space, ImageFormat::Vmdk.qemu_driver(), &image, name, cancel)?;
    let may_be_compressed = data["extents"]
        .as_array()
        .is_some_and(|extents| extents.iter().any(|extent| extent["compressed"] == true));
    Ok(Inspected { image, may_be_compressed, facts })
}

/// Inspects one image. Returns its backing file, if it has one that may be followed.
fn inspect_one(
    path: PathBuf,
    format: ImageFormat,
    way: &Inspection<'_>,
) -> Result<(Link, Option<(PathBuf, ImageFormat)>)> {
    let file = way.space.host().look_at_file(&path);
    let file = file.map_err(|error| error.context("opening the image"))?;
    let is_here = way.space.host().name().is_none();
    if !is_here && !matches!(format, ImageFormat::Raw | ImageFormat::Qcow2) {
        let text = format!(
            "{} has the format {format}; on another host only qcow2 and raw can be read",
            path.display()
        );
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let extents = match format {
        ImageFormat::Raw if way.is_of_machine => Vec::new(),
        _ => check_header(&path, format, &file)?,
    };
    if format == ImageFormat::Raw {
        let facts = Value::Null;
        return Ok((Link { path, format, extents, may_be_compressed: false, facts }, None));
    }
    let image = QemuImage::new(way.space, format.qemu_driver(), &path, &extents, None)?;
    let image = way.locked(image);
    let what = format!("opening {} as {format}", path.display());
    let facts = image_facts(way.space, &image, &what, way.cancel)?;
    let may_be_compressed = format == ImageFormat::Qcow2 || check_vmdk(&path, &facts)?;
    let backing = backing_file(&path, format, &facts)?;
    if let Some((backing, _)) = &backing {
        if !way.follows_backing {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} is an overlay over {}: if that file belongs to the disk, give \
                     --follow-backing",
                    path.display(),
                    backing.display()
                ),
            ));
        }
    }
    if way.is_checked {
        check_image(way.space, format.qemu_driver(), &image, &path, way.cancel)?;
    }
    Ok((Link { path, format, extents, may_be_compressed, facts }, backing))
}

/// Refuses images that make QEMU open another file or read wrong content. Returns the
/// image's additional files.
fn check_header(path: &Path, format: ImageFormat, facts: &FileFacts) -> Result<Vec<PathBuf>> {
    match format {
        ImageFormat::Raw => {
            let file = File::open(path).context(|| format!("reading {}", path.display()))?;
            let length = file_length(&file).context(|| format!("reading {}", path.display()))?;
            refuse_fixed_vhd(&file, path, length)?;
        }
        ImageFormat::Vmdk => return vmdk_extents(path),
        ImageFormat::Qcow2 => check_qcow2(path, facts)?,
        ImageFormat::Vhd => check_vhd(path)?,
        ImageFormat::Vhdx => drop(VhdxMap::open(path)?),
    }
    Ok(Vec::new())
}

/// Checks QEMU's facts about a VMDK: its extents must lie in the image's own folder, and
/// its parent must not be missing, because QEMU would read it as zeroes. Returns whether
/// part of it is compressed.
fn check_vmdk(path: &Path, facts: &Value) -> Result<bool> {
    let data = &facts["format-specific"]["data"];
    let Some(extents) = data["extents"].as_array() else { return Ok(false) };
    let absolute = std::path::absolute(path).context(|| format!("reading {}", path.display()))?;
    for extent in extents {
        let name = extent["filename"].as_str().unwrap_or_default();
        if Path::new(name).parent() != absolute.parent() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} has an extent outside of its own folder: {}",
                    path.display(),
                    name.escape_debug()
                ),
            ));
        }
    }
    let has_parent = data["parent-cid"].as_u64().is_some_and(|parent| parent != NO_PARENT);
    if has_parent && facts["backing-filename"].is_null() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} is a snapshot over a parent that it does not name: consolidate the \
                 snapshots, and back up the result",
                path.display()
            ),
        ));
    }
    Ok(extents.iter().any(|extent| extent["compressed"] == true))
}

/// The backing file that the image names, and its stated format.
fn backing_file(
    path: &Path,
    format: ImageFormat,
    facts: &Value,
) -> Result<Option<(PathBuf, ImageFormat)>> {
    let Some(named) = facts["backing-filename"].as_str() else { return Ok(None) };
    let refused = |why: String| {
        Error::new(
            ErrorKind::Unsupported,
            format!("the backing file '{}' of {} {why}", named.escape_debug(), path.display()),
        )
    };
    let full = facts["full-backing-filename"].as_str().unwrap_or(named);
    if !full.starts_with('/') {
        return Err(refused("is not a local file".to_string()));
    }
    let backing_format = match facts["backing-filename-format"].as_str() {
        Some("vpc") => ImageFormat::Vhd,
        Some(word) => ImageFormat::from_word(word).ok_or_else(|| {
            refused(format!("has the format {}, which cannot be read", word.escape_debug()))
        })?,
        None if format == ImageFormat::Vmdk => ImageFormat::Vmdk,
        None => {
            return Err(refused(
                "has no stated format, and formats are never guessed: state it with \
                 qemu-img rebase -u -F FORMAT -b FILE IMAGE"
                    .to_string(),
            ));
        }
    };
    Ok(Some((PathBuf::from(full), backing_format)))
}
