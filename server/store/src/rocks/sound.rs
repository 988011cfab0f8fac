//! Checks a whole file of the database against its checksums, without opening the database.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, ErrorKind, Result};

use super::sst_reader::{
    CHECKSUM_XXH3, MAX_BLOCK_BYTES, TRAILER_BYTES, VERSION, checked, raw_entries,
};
use super::table::{Footer, Handle, IndexKind, PROPERTIES, TableProperties, entries, next_handle};

/// The files of a database, sorted by name, including unreferenced ones.
///
/// # Errors
/// Errors of the operating system.
pub(crate) fn table_files(database: &Path) -> Result<Vec<PathBuf>> {
    files_ending(database, "sst")
}

pub(super) fn files_ending(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let what = || format!("reading {}", folder.display());
    let mut found = Vec::new();
    let entries = match std::fs::read_dir(folder) {
        // The database is still being made.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        entries => entries.context(what)?,
    };
    for entry in entries {
        let path = entry.context(what)?.path();
        if path.extension().is_some_and(|extension| extension == ending) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Whether all of a file can be read and matches its checksums. Also false if only RocksDB can
/// tell.
///
/// # Errors
/// `NotFound` if it was deleted meanwhile; errors of the operating system.
pub(crate) fn is_sound(path: &Path) -> Result<bool> {
    let what = || format!("reading {}", path.display());
    let file = File::open(path).context(what)?;
    let footer = match Footer::read(&file, path) {
        Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(false),
        read => read?.0,
    };
    let length = file.metadata().context(what)?.len();
    Table { file, path, length, failed: None }.compare(&footer)
}

/// Precedes 8 bytes in the properties. The beginning of the name is omitted if it is shared with
/// the previous name.
const SEQUENCE: &[u8] = b"global_seqno";

struct Table<'a> {
    file: File,
    path: &'a Path,
    length: u64,
    failed: Option<coldrise_block::Error>,
}

impl Table<'_> {
    fn compare(mut self, footer: &Footer) -> Result<bool> {
        let is_sound = (footer.checksum, footer.version) == (CHECKSUM_XXH3, VERSION)
            && self.check(footer).is_some();
        self.failed.map_or(Ok(is_sound), Err)
    }

    fn check(&mut self, footer: &Footer) -> Option<()> {
        let metaindex = self.block(footer.metaindex)?;
        let mut properties = None;
        for (name, value) in entries(&metaindex)? {
            let handle = next_handle(&mut &value[..])?;
            if name == PROPERTIES {
                let stored = self.stored(handle)?;
                let block = checked(&stored).map(<[u8]>::to_vec).or_else(|| as_made(stored))?;
                properties = Some(TableProperties::parse(&block)?);
            } else {
                self.block(handle)?;
            }
        }
        let top = self.block(footer.index)?;
        for (_, handle) in raw_entries(&top)? {
            let block = self.block(handle)?;
            if properties?.index == IndexKind::TwoLevel {
                for (_, handle) in raw_entries(&block)? {
                    self.block(handle)?;
                }
            }
        }
        properties.map(|_| ())
    }

    /// A block without its trailer, if it is undamaged.
    fn block(&mut self, handle: Handle) -> Option<Vec<u8>> {
        checked(&self.stored(handle)?).map(<[u8]>::to_vec)
    }

    /// A block with its trailer.
    fn stored(&mut self, Handle { offset, bytes }: Handle) -> Option<Vec<u8>> {
        let end = offset.checked_add(bytes)?.checked_add(TRAILER_BYTES as u64)?;
        if bytes > MAX_BLOCK_BYTES || end > self.length {
            return None;
        }
        let mut block = vec![0; bytes as usize + TRAILER_BYTES];
        if let Err(error) = self.file.read_exact_at(&mut block, offset) {
            let error = Err::<(), _>(error).context(|| format!("reading {}", self.path.display()));
            self.failed = error.err();
            return None;
        }
        Some(block)
    }
}

/// The properties of an ingested file as they were before RocksDB wrote the common number of all
/// its entries into them: the checksum is still that of zeroes.
fn as_made(mut stored: Vec<u8>) -> Option<Vec<u8>> {
    let at = stored.windows(SEQUENCE.len()).position(|name| name == SEQUENCE)? + SEQUENCE.len();
    stored.get_mut(at..at + 8)?.fill(0);
    checked(&stored).map(<[u8]>::to_vec)
}
