//! The flag of a repair that has not ended.
//!
//! While a database is made anew from what is left of another one, chunks may be missing that its
//! index knows: a backup would refer to them. So [`FLAG_NAME`] is made, durably, before the first
//! change; as long as it is there only a repair opens the repository for writing, and each
//! repair does all of it again. It goes when the missing chunks are listed.

use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};

use crate::description::sync_directory;

/// In the repository's directory while chunks may be missing that are in no list.
const FLAG_NAME: &str = "repair-unfinished";

/// Refuses a repository whose repair was interrupted.
///
/// # Errors
/// `Corrupt`.
pub(crate) fn refuse_unfinished(repository: &Path) -> Result<()> {
    match is_flagged(repository)? {
        false => Ok(()),
        true => Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "a repair of {} was interrupted: run coldrise repair again",
                repository.display()
            ),
        )),
    }
}

fn flag(repository: &Path) -> PathBuf {
    repository.join(FLAG_NAME)
}

pub(super) fn is_flagged(repository: &Path) -> Result<bool> {
    let path = flag(repository);
    path.try_exists().context(|| format!("looking for {}", path.display()))
}

/// Makes the flag, durably.
pub(super) fn raise_flag(repository: &Path) -> Result<()> {
    let path = flag(repository);
    let what = || format!("making {}", path.display());
    std::fs::File::create(&path).and_then(|file| file.sync_all()).context(what)?;
    sync_directory(repository)
}

/// Removes the flag: what is missing is listed.
pub(super) fn lower_flag(repository: &Path) -> Result<()> {
    let path = flag(repository);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).context(|| format!("removing {}", path.display())),
        Ok(()) => sync_directory(repository),
    }
}
