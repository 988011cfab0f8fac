//! Which further files a VMDK could make QEMU open.
//!
//! A VMDK may be a text that names its extents, and the names may lead anywhere:
//! to another folder, a device, a server. QEMU follows them the moment it opens the
//! text, so they are looked at before. This is no parser of the format; it is
//! deliberately stricter than every reading of it: any quoted word of the text may
//! be a name, and a word that could lead out of the image's folder is refused.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};

/// QEMU reads no more of a text than this.
const MAX_TEXT_BYTES: u64 = 1 << 20;
/// Words of one text at most; a 64 TiB disk in 2 GB extents has 32768.
const MAX_WORDS: usize = 1 << 17;
/// First bytes of a sparse extent (version 4 and later).
const SPARSE_MAGIC: &[u8] = b"KDMV";
/// First bytes of an ESX or version 3 sparse extent; it names nothing.
const COW_MAGIC: &[u8] = b"COWD";
/// Where a sparse extent keeps its capacity: u64, little endian, in sectors.
const CAPACITY: std::ops::Range<usize> = 12..20;

fn refused(path: &Path, why: String) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "{}: {why}: extents have to be plain files in the folder of the image",
            path.display()
        ),
    )
}

/// Passes an image that can lead QEMU to nothing but files of its own folder.
pub(super) fn check_vmdk_files(path: &Path) -> Result<()> {
    let what = || format!("reading {}", path.display());
    let mut start = Vec::new();
    File::open(path).context(what)?.take(MAX_TEXT_BYTES).read_to_end(&mut start).context(what)?;
    if start.starts_with(SPARSE_MAGIC) || start.starts_with(COW_MAGIC) {
        return check_sparse(path, &start);
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    for word in quoted_words(&start).take(MAX_WORDS) {
        let Ok(word) = std::str::from_utf8(word) else {
            return Err(refused(
                path,
                "it is no VMDK, or names an extent in another encoding than UTF-8".to_string(),
            ));
        };
        if word.contains(['/', ':', '\0']) {
            return Err(refused(path, format!("it names '{word}'")));
        }
        check_extent(path, &folder.join(word), word)?;
    }
    if quoted_words(&start).nth(MAX_WORDS).is_some() {
        return Err(refused(path, "it names too many extents".to_string()));
    }
    Ok(())
}

/// What follows each quotation mark, up to the next one or the end of the line.
fn quoted_words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&byte| byte == b'\n' || byte == b'\r')
        .flat_map(|line| line.split(|&byte| byte == b'"').skip(1))
        .filter(|word| !word.is_empty())
}

/// Passes a word that names no file, or a regular file that names no others.
fn check_extent(image: &Path, extent: &Path, word: &str) -> Result<()> {
    let metadata = match std::fs::symlink_metadata(extent) {
        Ok(metadata) => metadata,
        // Most words are no names. QEMU will say so where one should have been.
        Err(_) => return Ok(()),
    };
    if word == "." || word == ".." {
        return Err(refused(image, format!("it names '{word}'")));
    }
    if !metadata.is_file() {
        return Err(refused(image, format!("it names '{word}', which is no regular file")));
    }
    let what = || format!("reading {}", extent.display());
    let mut start = Vec::new();
    let mut file = File::open(extent).context(what)?.take(CAPACITY.end as u64);
    file.read_to_end(&mut start).context(what)?;
    check_sparse(image, &start)
}

/// Refuses a sparse extent without a capacity: QEMU takes it for another text.
fn check_sparse(image: &Path, start: &[u8]) -> Result<()> {
    if !start.starts_with(SPARSE_MAGIC) {
        return Ok(());
    }
    match start.get(CAPACITY) {
        Some(capacity) if capacity.iter().any(|&byte| byte != 0) => Ok(()),
        _ => Err(refused(image, "a sparse extent leads to a second description".to_string())),
    }
}
