//! The files that a VMDK makes QEMU open, and faults that QEMU silently ignores.
//!
//! A VMDK may be a text that names its extents, and the names may refer to anything:
//! another folder, a device, a server. QEMU opens them together with the text, so this
//! module checks them first. It does not parse the format and is deliberately stricter than
//! any parser: every quoted word of the text may be a name, and a word that could leave the
//! image's folder is refused. QEMU's process can open only the remaining files.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::raw::file_length;

/// QEMU reads no more of a text than this.
const MAX_TEXT_BYTES: u64 = 1 << 20;
/// Maximum number of words in a text; a 64 TiB disk in 2 GB extents has 32768.
const MAX_WORDS: usize = 1 << 17;
/// First bytes of a sparse extent (version 4 and later).
const SPARSE_MAGIC: &[u8] = b"KDMV";
/// First bytes of an ESX or version 3 sparse extent; it names nothing.
const COW_MAGIC: &[u8] = b"COWD";
/// Bytes of a sparse extent that are checked.
pub(super) const SPARSE_HEADER_BYTES: usize = 79;
/// The offsets of a sparse extent's capacity (u64, little endian, in sectors), its flags
/// (u32), the place of its grain directory (u64, in sectors) and its compression (u16).
const CAPACITY: std::ops::Range<usize> = 12..20;
const FLAGS: std::ops::Range<usize> = 8..12;
const DIRECTORY: std::ops::Range<usize> = 56..64;
const COMPRESSION: std::ops::Range<usize> = 77..79;
/// The footer holds the place of the grain directory.
const IN_FOOTER: u64 = u64::MAX;
/// Flag: the grains are compressed.
const IS_COMPRESSED: u32 = 1 << 16;
const DEFLATE: u16 = 1;
const SECTOR_BYTES: u64 = 512;

fn refused(path: &Path, why: String) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "{}: {why}: extents must be plain files in the folder of the image",
            path.display()
        ),
    )
}

/// The extent files of an image that makes QEMU open only files of its own folder; refuses
/// any other image.
pub(super) fn vmdk_extents(path: &Path) -> Result<Vec<PathBuf>> {
    let what = || format!("reading {}", path.display());
    let mut start = Vec::new();
    let file = File::open(path).context(what)?;
    let length = file_length(&file).context(what)?;
    file.take(MAX_TEXT_BYTES).read_to_end(&mut start).context(what)?;
    if start.starts_with(SPARSE_MAGIC) || start.starts_with(COW_MAGIC) {
        check_sparse(path, &start, length)?;
        return Ok(Vec::new());
    }
    let absolute = std::path::absolute(path).context(what)?;
    let folder = absolute.parent().unwrap_or(Path::new("/"));
    let mut extents = Vec::new();
    for word in quoted_words(&start).take(MAX_WORDS) {
        let Ok(word) = std::str::from_utf8(word) else {
            return Err(refused(
                path,
                "it is not a VMDK, or names an extent in another encoding than UTF-8".to_string(),
            ));
        };
        if word.contains(['/', ':', '\0']) {
            return Err(refused(path, format!("it names '{}'", word.escape_debug())));
        }
        let extent = folder.join(word);
        if is_extent(path, &extent, word)? {
            extents.push(extent);
        }
    }
    if quoted_words(&start).nth(MAX_WORDS).is_some() {
        return Err(refused(path, "it names too many extents".to_string()));
    }
    check_extent_lines(path, folder, &String::from_utf8_lossy(&start))?;
    extents.sort();
    extents.dedup();
    Ok(extents)
}

/// Checks the start of a VMDK in a file of `length` bytes that can name no other file: a sparse one.
///
/// # Errors
/// `Unsupported` for every other one; as of [`vmdk_extents`] for a damaged one.
pub(super) fn check_member(member: &Path, start: &[u8], length: u64) -> Result<()> {
    if !start.starts_with(SPARSE_MAGIC) {
        let text = format!("{}: it is not a sparse VMDK, as an OVA has them", member.display());
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    check_sparse(member, start, length)
}

/// The words after each quotation mark, up to the next one or the end of the line.
fn quoted_words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&byte| byte == b'\n' || byte == b'\r')
        .flat_map(|line| line.split(|&byte| byte == b'"').skip(1))
        .filter(|word| !word.is_empty())
}

/// False for a word that names no file, true for a regular file that names no others; an
/// error for anything else.
fn is_extent(image: &Path, extent: &Path, word: &str) -> Result<bool> {
    if word == "." || word == ".." {
        return Err(refused(image, format!("it names '{word}'")));
    }
    let metadata = match std::fs::symlink_metadata(extent) {
        Ok(metadata) => metadata,
        // Most words are not names. QEMU reports a missing extent.
        Err(_) => return Ok(false),
    };
    if !metadata.is_file() {
        return Err(refused(image, format!("it names '{word}', which is not a regular file")));
    }
    let what = || format!("reading {}", extent.display());
    let mut start = Vec::new();
    let mut file = File::open(extent).context(what)?.take(SPARSE_HEADER_BYTES as u64);
    file.read_to_end(&mut start).context(what)?;
    check_sparse(image, &start, metadata.len())?;
    Ok(true)
}

/// Refuses a sparse extent that QEMU takes for another text (no capacity), one with unknown
/// compression (QEMU would read the compressed bytes as the disk's), and one that ends
/// before its directory (QEMU would read zeroes). `start` is the start of a file of
/// `length` bytes.
fn check_sparse(image: &Path, start: &[u8], length: u64) -> Result<()> {
    if !start.starts_with(SPARSE_MAGIC) {
        return Ok(());
    }
    match start.get(CAPACITY) {
        Some(capacity) if capacity.iter().any(|&byte| byte != 0) => {}
        _ => {
            let why = "a sparse extent leads to a second description".to_string();
            return Err(refused(image, why));
        }
    }
    let directory = start.get(DIRECTORY).map_or(0, |bytes| {
        bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
    });
    if directory != IN_FOOTER && directory.saturating_mul(SECTOR_BYTES) >= length {
        return Err(Error::new(
            ErrorKind::Io,
            format!("{} is truncated or damaged: its grain directory is missing", image.display()),
        ));
    }
    let number = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let is_compressed = start.get(FLAGS).is_some_and(|flags| number(flags) & IS_COMPRESSED != 0);
    // A shorter header has none: QEMU refuses it.
    let compression =
        start.get(COMPRESSION).map_or(0, |word| u16::from_le_bytes([word[0], word[1]]));
    if compression > DEFLATE || (is_compressed && compression != DEFLATE) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{}: its grains are compressed in a way that QEMU does not support (method \
                 {compression}): convert it with the program that wrote it",
                image.display()
            ),
        ));
    }
    Ok(())
}

/// Refuses lines that QEMU silently skips, because all later extents would move, and
/// truncated flat extents, because QEMU would read the missing end as zeroes.
fn check_extent_lines(image: &Path, folder: &Path, text: &str) -> Result<()> {
    for line in text.lines() {
        let (head, rest) = line.split_once('"').unwrap_or((line, ""));
        let mut words = head.split_whitespace();
        let (Some(access), Some(sectors), Some(kind)) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        let Ok(sectors) = sectors.parse::<u64>() else { continue };
        if !matches!(access, "RW" | "RDONLY" | "NOACCESS") {
            continue;
        }
        if access != "RW" || kind == "ZERO" {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{}: it has an extent '{access} {sectors} {}', which QEMU leaves out: convert \
                     it with the program that wrote it",
                    image.display(),
                    kind.escape_debug(),
                ),
            ));
        }
        if !matches!(kind, "FLAT" | "VMFS") {
            continue;
        }
        let (name, offset) = rest.split_once('"').unwrap_or((rest, ""));
        let first = offset.trim().parse::<u64>().unwrap_or(0);
        let wanted = sectors.saturating_add(first).saturating_mul(SECTOR_BYTES);
        let extent = folder.join(name);
        // QEMU reports the missing file.
        let Ok(metadata) = std::fs::metadata(&extent) else { continue };
        if metadata.len() < wanted {
            return Err(Error::new(
                ErrorKind::Io,
                format!(
                    "{} is truncated: it has {} of {wanted} bytes",
                    extent.display(),
                    metadata.len()
                ),
            ));
        }
    }
    Ok(())
}
