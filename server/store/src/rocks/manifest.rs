//! RocksDB's manifest, the list of the database's files: read, and never written.
//!
//! RocksDB reports which files it lists. This module checks how far it can be read, because RocksDB
//! takes a manifest that was cut short, or ends in zeroes, for one that ends there. A manifest is
//! written record by record, like the log (RocksDB's wiki: *Write Ahead Log File Format*; numbers
//! are little endian):
//!
//! ```text
//! file:      blocks of 32 KiB; pieces do not begin in the last 6 bytes of one
//! piece:     CRC-32C of what follows the length, masked (4), length (2), kind (1: 1 for a
//!            whole record, 2 for its beginning, 3 for its middle, 4 for its end), bytes
//! CURRENT:   the manifest's name, a line break
//! ```

use std::fs::File;
use std::io::ErrorKind::NotFound;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::{Database, FAMILIES, Family};
use crate::advice::REPAIR;

const CURRENT: &str = "CURRENT";
const MANIFEST_PREFIX: &str = "MANIFEST-";
pub(super) const BLOCK_BYTES: usize = 32 << 10;
pub(super) const HEADER_BYTES: usize = 7;
const KINDS: std::ops::RangeInclusive<u8> = 1..=4;
const MASK_DELTA: u32 = 0xa282_ead8;
/// Attempts while a writer replaces the manifest between reading its name and opening it.
const MAX_TRIES: u32 = 5;

/// A file as the manifest lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) family: Family,
    pub(crate) path: PathBuf,
    /// Its first key.
    pub(crate) first: Vec<u8>,
}

impl Listed {
    /// Whether it is a file of chunks that no commit names. If the drive fails while the database
    /// ingests a file, RocksDB leaves it listed and deletes it.
    pub(crate) fn is_uncommitted(&self, next_chunk: u64) -> bool {
        self.family == Family::Chunks && self.first[..] >= next_chunk.to_be_bytes()[..]
    }
}

/// How far a manifest goes. A later one is greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ManifestEnd {
    /// The number in its name.
    pub(crate) number: u64,
    pub(crate) bytes: u64,
}

/// The files of all families of an open database.
pub(crate) fn listed_in(database: &Database) -> Result<Vec<Listed>> {
    let mut found = Vec::new();
    for (family, _) in FAMILIES {
        for file in database.listed_files(family)? {
            found.push(Listed { family, path: database.path_of(&file), first: file.smallest });
        }
    }
    Ok(found)
}

/// Opens the database only for reading, beside a writer, with everything that its manifest lists
/// and its log holds. Missing files are accepted, unless they are read.
///
/// # Errors
/// `Corrupt` if the manifest itself cannot be read.
pub(crate) fn open_as_listed(path: &Path, log_directory: &Path) -> Result<Database> {
    open_beside(path, || Database::open_listing(path, log_directory))
}

/// Checks that every listed file exists and is the one that the manifest means, by its length and
/// the unique id in its properties.
///
/// # Errors
/// `Corrupt`, naming the first file that differs; errors of the operating system.
pub(crate) fn check_listed(path: &Path, log_directory: &Path) -> Result<()> {
    open_as_checked(path, log_directory).map(drop)
}

/// [`open_as_listed`] with the check of [`check_listed`].
///
/// # Errors
/// As [`check_listed`].
pub(crate) fn open_as_checked(path: &Path, log_directory: &Path) -> Result<Database> {
    open_beside(path, || Database::open_checked(path, log_directory))
}

fn open_beside(path: &Path, open: impl Fn() -> Result<Database>) -> Result<Database> {
    // RocksDB reports a missing manifest as a failing drive.
    manifest(path)?;
    // Meanwhile a writer may replace its log, its manifest and its files.
    let mut tries = 0;
    loop {
        match open() {
            Err(_) if tries < MAX_TRIES => tries += 1,
            opened => return opened,
        }
    }
}

/// The manifest that `CURRENT` names, and its number.
///
/// # Errors
/// `Corrupt` if it names no existing file; errors of the operating system.
pub(super) fn manifest(database: &Path) -> Result<(PathBuf, u64)> {
    let path = database.join(CURRENT);
    let mut tries = 0;
    loop {
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == NotFound => Vec::new(),
            text => text.context(|| format!("reading {}", path.display()))?,
        };
        let name = text.strip_suffix(b"\n").and_then(|name| std::str::from_utf8(name).ok());
        let number = name.and_then(|name| name.strip_prefix(MANIFEST_PREFIX)?.parse().ok());
        let why = match name.zip(number) {
            Some((name, number)) => {
                let named = database.join(name);
                if named.try_exists().context(|| format!("looking for {}", named.display()))? {
                    return Ok((named, number));
                }
                format!("names {name}, which is missing")
            }
            None if text.is_empty() => "is missing or empty".to_owned(),
            None => "is damaged".to_owned(),
        };
        tries += 1;
        if tries == MAX_TRIES {
            let text = format!("{} {why}", path.display());
            return Err(Error::new(ErrorKind::Corrupt, text).advise(REPAIR));
        }
    }
}

/// The number of the manifest, and the end of its undamaged beginning.
///
/// # Errors
/// As [`manifest`].
pub(crate) fn sound_manifest(database: &Path) -> Result<ManifestEnd> {
    let (path, number) = manifest(database)?;
    let bytes = std::fs::read(&path).context(|| format!("reading {}", path.display()))?;
    Ok(ManifestEnd { number, bytes: sound_end(&bytes) as u64 })
}

/// The end of the manifest, after making all of it durable. `synced` is the part
/// already known to be durable.
///
/// # Errors
/// As [`manifest`].
pub(crate) fn synced_manifest(database: &Path, synced: ManifestEnd) -> Result<ManifestEnd> {
    let (path, number) = manifest(database)?;
    let what = || format!("syncing {}", path.display());
    let file = File::open(&path).context(what)?;
    let found = ManifestEnd { number, bytes: file.metadata().context(what)?.len() };
    if found != synced {
        file.sync_data().context(what)?;
    }
    Ok(found)
}

/// The end of the last whole piece before the first piece that is damaged or unfinished.
fn sound_end(bytes: &[u8]) -> usize {
    let mut at = 0;
    loop {
        let left = BLOCK_BYTES - at % BLOCK_BYTES;
        if left < HEADER_BYTES {
            at += left;
            continue;
        }
        let piece = bytes.get(at..).and_then(|rest| piece(&rest[..rest.len().min(left)]));
        let Some((_, content)) = piece else { return at.min(bytes.len()) };
        at += HEADER_BYTES + content.len();
    }
}

/// Kind and content of the piece at the beginning, if it is whole.
pub(super) fn piece(block: &[u8]) -> Option<(u8, &[u8])> {
    let (header, rest) = block.split_first_chunk::<HEADER_BYTES>()?;
    let [c0, c1, c2, c3, l0, l1, kind] = *header;
    let content = rest.get(..usize::from(u16::from_le_bytes([l0, l1])))?;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&[kind]), content);
    let masked = crc.rotate_right(15).wrapping_add(MASK_DELTA);
    let is_sound = KINDS.contains(&kind) && masked == u32::from_le_bytes([c0, c1, c2, c3]);
    is_sound.then_some((kind, content))
}
