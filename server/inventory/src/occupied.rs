//! The space that the repository's directory takes on its disk.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use coldrise_block::{Context, Result};
use coldrise_store::Repository;

/// Space on the disk, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Occupied {
    pub(crate) database_bytes: u64,
    pub(crate) captured_bytes: u64,
    pub(crate) other_bytes: u64,
}

impl Occupied {
    pub(crate) fn measure(repository: &Repository) -> Result<Occupied> {
        let root = repository.path();
        let database = root.join("db");
        let layers = repository.layers_dir();
        let (database_bytes, captured_bytes) = (tree_bytes(&database)?, tree_bytes(&layers)?);
        let all = tree_bytes(root)?;
        let other_bytes = all.saturating_sub(database_bytes).saturating_sub(captured_bytes);
        Ok(Occupied { database_bytes, captured_bytes, other_bytes })
    }

    pub(crate) fn sum(&self) -> u64 {
        self.database_bytes.saturating_add(self.captured_bytes).saturating_add(self.other_bytes)
    }
}

/// Bytes of a folder and its contents, a few levels deep.
fn tree_bytes(folder: &Path) -> Result<u64> {
    let what = || format!("reading {}", folder.display());
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        // Removed since the listing.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error).context(what),
    };
    let mut bytes = 0u64;
    for entry in entries {
        let entry = entry.context(what)?;
        let metadata = match entry.metadata() {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).context(what),
        };
        bytes = bytes.saturating_add(metadata.blocks().saturating_mul(512));
        if metadata.is_dir() {
            bytes = bytes.saturating_add(tree_bytes(&entry.path())?);
        }
    }
    Ok(bytes)
}
