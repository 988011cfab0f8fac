//! Folders that only this service may change.

use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use coldrise_block::{Context, Result};

use crate::invalid::invalid;

/// Permission to write for anyone but the owner.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// In a folder with it, users rename and remove their own files only.
const STICKY: u32 = 0o1000;

/// Creates the folder of the service's state with mode 0700, if it is missing.
///
/// # Errors
/// Errors of the operating system, with the path; `InvalidInput` if another user owns the folder or can
/// write it: the database, its users and keys would be that user's.
pub(crate) fn make_state_folder(path: &Path) -> Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(path);
    made.context(|| format!("creating the service's folder {}", path.display()))?;
    let found = std::fs::metadata(path).context(|| format!("reading {}", path.display()))?;
    let (own, owner) = (rustix::process::geteuid(), found.uid());
    // Root may look after the folder of the service's user.
    if owner != own.as_raw() && !own.is_root() {
        let text = format!("--state {}: user {owner} owns this folder", path.display());
        return Err(
            invalid(text).advise("start the service as this user, or give --state another folder")
        );
    }
    refuse_writable("--state", path, found.mode(), "check that its content is unchanged")
}

/// Checks the folder of runs, if it exists and is not part of the state.
///
/// # Errors
/// `InvalidInput` if other users can write it: they could put runs there that never were.
pub(crate) fn check_runs_folder(path: &Path) -> Result<()> {
    let Ok(found) = std::fs::metadata(path) else { return Ok(()) };
    refuse_writable("--runs", path, found.mode(), "check that all runs in it are real")
}

/// Refuses a folder that other users can write.
fn refuse_writable(option: &str, path: &Path, mode: u32, advice: &str) -> Result<()> {
    if mode & WRITABLE_BY_OTHERS == 0 {
        return Ok(());
    }
    let (mode, path) = (mode & 0o7777, path.display());
    let text = format!("{option} {path}: other users can write this folder (mode {mode:04o})");
    Err(invalid(text).advise(format!("{advice}, then: chmod 700 {path}")))
}

/// Creates the folder of the Unix socket, if it is missing.
///
/// # Errors
/// Errors of the operating system, with the path; `InvalidInput` if other users could put another socket in
/// the place of this one, and so answer its clients.
pub(crate) fn make_socket_folder(path: &Path) -> Result<()> {
    // The folder of a bare file name.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let what = || format!("the folder of the socket, {}", path.display());
    std::fs::create_dir_all(path).context(what)?;
    let found = std::fs::metadata(path).context(what)?;
    let own = rustix::process::geteuid().as_raw();
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    let is_ours = owner == own || owner == 0;
    let is_shared = mode & WRITABLE_BY_OTHERS != 0 && mode & STICKY == 0;
    if is_ours && !is_shared {
        return Ok(());
    }
    let text = format!(
        "--socket: other users can replace files in {} (owner {owner}, mode {mode:04o})",
        path.display()
    );
    Err(invalid(text)
        .advise("name a path in a folder of the service's own user, with mode 0755 or less"))
}
