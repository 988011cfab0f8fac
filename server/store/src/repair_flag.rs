//! The flag of an unfinished repair.
//!
//! While a fresh database is made from the readable parts of the old one, chunks may be missing
//! that its index still names, and a backup would refer to them. So [`FLAG_NAME`] is made, durably,
//! before the first change. As long as it exists, only a repair opens the repository for writing,
//! and each repair repeats all of its work. It is removed when the missing chunks are listed.

use std::path::{Path, PathBuf};

use coldrise_block::{
    Context, Error, ErrorKind, Result, path_exists, remove_if_present, sync_directory,
};

/// In the repository's directory: the fresh database that is being made.
pub(crate) const FRESH_NAME: &str = "db.new";
/// In the repository's directory, while missing chunks may not be listed.
const FLAG_NAME: &str = "repair-unfinished";

/// Refuses a repository whose repair was interrupted.
///
/// # Errors
/// `Corrupt`.
pub(crate) fn refuse_unfinished(repository: &Path) -> Result<()> {
    if is_flagged(repository)? {
        Err(Error::new(
            ErrorKind::Corrupt,
            format!("a repair of {} was interrupted", repository.display()),
        )
        .advise("run coldrise repair again"))
    } else {
        Ok(())
    }
}

fn flag(repository: &Path) -> PathBuf {
    repository.join(FLAG_NAME)
}

pub(crate) fn is_flagged(repository: &Path) -> Result<bool> {
    path_exists(&flag(repository))
}

/// Makes the flag, durably.
pub(crate) fn raise_flag(repository: &Path) -> Result<()> {
    let path = flag(repository);
    let what = || format!("making {}", path.display());
    std::fs::File::create(&path).and_then(|file| file.sync_all()).context(what)?;
    sync_directory(repository)
}

/// Removes the flag, once the missing chunks are listed.
pub(crate) fn lower_flag(repository: &Path) -> Result<()> {
    let path = flag(repository);
    if remove_if_present(&path)? {
        sync_directory(repository)?;
    }
    Ok(())
}
