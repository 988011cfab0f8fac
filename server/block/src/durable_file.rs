//! Small files that a crash leaves whole.
//!
//! Replacing a file takes four steps: write the new content under a temporary name, sync it,
//! rename it, sync the folder. After a crash the old or the new content is there, never a
//! part of it. The temporary name is the file's with `.new` appended; a leftover is
//! overwritten by the next replacement. New files can be read by their owner only.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::{Context, Error, Result};

/// Why a file was not replaced.
#[derive(Debug)]
pub enum ReplaceError {
    /// The old content is still there. The caller can try again.
    Unchanged(Error),
    /// After a crash the old or the new content is there. The caller must rely on neither.
    Unknown(Error),
}

impl ReplaceError {
    /// The error itself.
    pub fn into_error(self) -> Error {
        match self {
            ReplaceError::Unchanged(error) | ReplaceError::Unknown(error) => error,
        }
    }
}

/// The damage of a file in whose place a folder is.
pub const IS_FOLDER: &str = "a folder is in place of this file: move it away";

/// The name of a file while it is written.
pub fn temporary_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".new");
    name.into()
}

/// Opens a file for writing from its beginning. Creates it, or empties it.
///
/// # Errors
/// Errors of the operating system.
pub fn create_private(path: &Path) -> std::io::Result<File> {
    let create =
        || OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    instead_of_folder(path, create)
}

/// Renames a file, over the file at `to` if there is one. The caller syncs the folder.
///
/// # Errors
/// Errors of the operating system.
pub fn rename_over(from: &Path, to: &Path) -> std::io::Result<()> {
    instead_of_folder(to, || std::fs::rename(from, to))
}

/// Repeats `work` once without the empty folder that damage has left in place of the file `path`.
fn instead_of_folder<T>(path: &Path, work: impl Fn() -> std::io::Result<T>) -> std::io::Result<T> {
    match work() {
        Err(error) if error.kind() == std::io::ErrorKind::IsADirectory => {
            std::fs::remove_dir(path).map_err(|_| std::io::Error::other(IS_FOLDER))?;
            work()
        }
        done => done,
    }
}

/// Writes a whole file and makes its content durable, but not its name.
///
/// # Errors
/// Errors of the operating system. A part of the file may be left.
pub fn write_synced(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut file = create_private(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Makes the names in a folder durable.
///
/// # Errors
/// Errors of the operating system.
pub fn sync_directory(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|folder| folder.sync_all())
        .context(|| format!("syncing {}", path.display()))
}

/// Replaces a file with `content`. It is durable when this returns.
///
/// # Errors
/// Errors of the operating system.
pub fn replace_file(path: &Path, content: &[u8]) -> Result<()> {
    replace_file_with(path, |file| file.write_all(content)).map_err(ReplaceError::into_error)
}

/// Like [`replace_file`]; `write` fills the file and can set its attributes.
///
/// # Errors
/// [`ReplaceError::Unknown`] if the folder could not be synced.
pub fn replace_file_with(
    path: &Path,
    write: impl FnOnce(&mut File) -> std::io::Result<()>,
) -> std::result::Result<(), ReplaceError> {
    let temporary = temporary_path(path);
    let renamed = create_private(&temporary)
        .and_then(|mut file| {
            write(&mut file)?;
            file.sync_all()
        })
        .and_then(|()| rename_over(&temporary, path))
        .context(|| format!("writing {}", path.display()));
    if let Err(error) = renamed {
        // On a full drive the file's space is needed.
        let _ = std::fs::remove_file(&temporary);
        return Err(ReplaceError::Unchanged(error));
    }
    path.parent().map_or(Ok(()), sync_directory).map_err(ReplaceError::Unknown)
}

/// Removes a file. Returns whether it was there.
///
/// # Errors
/// Errors of the operating system.
pub fn remove_if_present(path: &Path) -> Result<bool> {
    match std::fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).context(|| format!("removing {}", path.display())),
    }
}

/// Whether a path exists. A drive that cannot tell is an error: reporting "absent" could
/// lead the caller to ignore or replace what lies there.
///
/// # Errors
/// Errors of the operating system.
pub fn path_exists(path: &Path) -> Result<bool> {
    path.try_exists().context(|| format!("looking for {}", path.display()))
}

#[cfg(test)]
#[path = "durable_file_tests.rs"]
mod tests;
