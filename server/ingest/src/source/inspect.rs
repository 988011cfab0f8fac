//! A foreign image is looked over before it is served: which files would be opened
//! for it, and whether it is whole.
//!
//! Only what decides that is read here, a few fixed fields of a header; everything
//! else is asked of `qemu-img`, in its own process and with the format named.

use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use coldrise_block::{Context, Error, ErrorKind, Result};
use serde_json::Value;

use super::vmdk_files::check_vmdk_files;
use super::ImageFormat;
use crate::qemu::{check_image, image_facts, image_options};

/// Images in one backing chain at most.
const MAX_CHAIN: usize = 64;

/// qcow2: the bit of the incompatible features (u64, big endian, at 72) that moves
/// the content into another file.
const QCOW2_DATA_FILE_BIT: u64 = 1 << 2;
/// VHD: length of the footer that ends the file.
const VHD_FOOTER_BYTES: u64 = 512;
/// VHD: how a footer begins.
const VHD_COOKIE: &[u8] = b"conectix";
/// VHD: disk type (u32, big endian, at 60 of the footer) of a differencing disk.
const VHD_DIFFERENCING: u32 = 4;

/// The open-options for an image, its backing files spelled out where they are
/// followed. Refuses images that lead to files nobody named, and damaged ones.
pub(super) fn inspect(
    path: &Path,
    format: ImageFormat,
    follow_backing: bool,
    cancel: &AtomicBool,
) -> Result<Value> {
    let mut chain: Vec<(PathBuf, ImageFormat)> = Vec::new();
    let mut next = Some((path.to_path_buf(), format));
    while let Some((path, format)) = next {
        if chain.len() == MAX_CHAIN {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("more than {MAX_CHAIN} backing files, or a circle of them"),
            ));
        }
        next = inspect_one(&path, format, follow_backing, cancel)?;
        chain.push((path, format));
    }
    let mut options = None;
    for (path, format) in chain.iter().rev() {
        options = Some(image_options(format.qemu_driver(), path, options.take())?);
    }
    options.ok_or_else(|| Error::new(ErrorKind::Internal, "an image without a file"))
}

/// Looks at one image; its backing file, if it has one and that may be followed.
fn inspect_one(
    path: &Path,
    format: ImageFormat,
    follow_backing: bool,
    cancel: &AtomicBool,
) -> Result<Option<(PathBuf, ImageFormat)>> {
    // A backing file may be anything that a name can lead to; a pipe would be waited for.
    let metadata =
        std::fs::metadata(path).context(|| format!("opening the image {}", path.display()))?;
    if !metadata.is_file() && !metadata.file_type().is_block_device() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("{} is neither a file nor a block device", path.display()),
        ));
    }
    check_header(path, format)?;
    if format == ImageFormat::Raw {
        return Ok(None);
    }
    let options = image_options(format.qemu_driver(), path, None)?;
    let what = format!("opening {} as {format}", path.display());
    let facts = image_facts(&options, &what, cancel)?;
    check_extent_files(path, &facts)?;
    let backing = backing_file(path, format, &facts)?;
    if let Some((backing, _)) = &backing {
        if !follow_backing {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} is an overlay over {}: if that file belongs to the disk, say \
                     --follow-backing",
                    path.display(),
                    backing.display()
                ),
            ));
        }
    }
    check_image(format.qemu_driver(), &options, path, cancel)?;
    Ok(backing)
}

/// Refuses what QEMU would follow to another file, or would read wrongly.
fn check_header(path: &Path, format: ImageFormat) -> Result<()> {
    let what = || format!("reading {}", path.display());
    match format {
        ImageFormat::Raw | ImageFormat::Vhdx => Ok(()),
        ImageFormat::Vmdk => check_vmdk_files(path),
        ImageFormat::Qcow2 => {
            let file = File::open(path).context(what)?;
            let mut header = [0u8; 80];
            let read = read_up_to(&file, &mut header, 0).context(what)?;
            let features = header[72..80].try_into().map_or(0, u64::from_be_bytes);
            // Version 2 has no feature bits: other fields begin there.
            let version = header[4..8].try_into().map_or(0, u32::from_be_bytes);
            if read == header.len() && version >= 3 && features & QCOW2_DATA_FILE_BIT != 0 {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "{} keeps its content in another file (a qcow2 data file): back it up \
                         through an NBD export, or convert it with qemu-img first",
                        path.display()
                    ),
                ));
            }
            Ok(())
        }
        ImageFormat::Vhd => check_vhd(path),
    }
}

fn check_vhd(path: &Path) -> Result<()> {
    let what = || format!("reading {}", path.display());
    let file = File::open(path).context(what)?;
    let length = file.metadata().context(what)?.len();
    let mut footer = [0u8; VHD_FOOTER_BYTES as usize];
    let read = match length.checked_sub(VHD_FOOTER_BYTES) {
        Some(offset) => read_up_to(&file, &mut footer, offset).context(what)?,
        None => 0,
    };
    if read < footer.len() || !footer.starts_with(VHD_COOKIE) {
        return Err(Error::new(
            ErrorKind::Io,
            format!(
                "{} does not end as a VHD does: it is truncated, or no VHD at all",
                path.display()
            ),
        ));
    }
    let kind = footer[60..64].try_into().map_or(0, u32::from_be_bytes);
    if kind == VHD_DIFFERENCING {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} is a differencing VHD: its parent cannot be followed; merge the two first",
                path.display()
            ),
        ));
    }
    Ok(())
}

/// Fills `buffer` as far as the file goes.
fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Checks what QEMU says it opened as extents: that they lie in the image's own
/// folder, and that flat ones are long enough (QEMU would read zeroes past their end).
fn check_extent_files(path: &Path, facts: &Value) -> Result<()> {
    let Some(extents) = facts["format-specific"]["data"]["extents"].as_array() else {
        return Ok(());
    };
    let absolute = std::path::absolute(path).context(|| format!("reading {}", path.display()))?;
    for extent in extents {
        let name = extent["filename"].as_str().unwrap_or_default();
        if Path::new(name).parent() != absolute.parent() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{} has an extent outside of its own folder: {name}", path.display()),
            ));
        }
        let wanted = extent["virtual-size"].as_u64().unwrap_or(0);
        let length = std::fs::metadata(name).context(|| format!("looking at {name}"))?.len();
        if extent["format"] == "FLAT" && length < wanted {
            return Err(Error::new(
                ErrorKind::Io,
                format!("{name} is truncated: it has {length} of {wanted} bytes"),
            ));
        }
    }
    Ok(())
}

/// The backing file that the image names, with the format that it states.
fn backing_file(
    path: &Path,
    format: ImageFormat,
    facts: &Value,
) -> Result<Option<(PathBuf, ImageFormat)>> {
    let Some(named) = facts["backing-filename"].as_str() else { return Ok(None) };
    let refused = |why: String| {
        Error::new(
            ErrorKind::Unsupported,
            format!("the backing file '{named}' of {} {why}", path.display()),
        )
    };
    let full = facts["full-backing-filename"].as_str().unwrap_or(named);
    if !full.starts_with('/') {
        return Err(refused("is no local file".to_string()));
    }
    let backing_format = match facts["backing-filename-format"].as_str() {
        Some("vpc") => ImageFormat::Vhd,
        Some(word) => ImageFormat::from_word(word)
            .ok_or_else(|| refused(format!("has the format {word}, which cannot be read")))?,
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
