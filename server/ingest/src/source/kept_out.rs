//! Opening local files for a backup, except files of the service itself: its passphrase, its keys.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::OFlags;

/// Files and folders that are never a source, resolved.
static KEPT_OUT: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// From now on, refuses local sources and configurations that are one of these files or lie in one of these
/// folders. The opened file counts, not the name: a symbolic link may have changed since the name was checked.
/// The first call counts.
pub fn keep_out<'a>(paths: impl IntoIterator<Item = &'a Path>) {
    let _ = KEPT_OUT.set(paths.into_iter().filter_map(|path| path.canonicalize().ok()).collect());
}

/// Opens a file or device that the user names, for reading. Does not wait for a pipe.
///
/// # Errors
/// `InvalidInput` for a file that is kept out; errors of the system.
pub(crate) fn open_named(path: &Path) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open(path)
        .context(|| format!("opening {}", path.display()))?;
    let Some(kept_out) = KEPT_OUT.get().filter(|kept_out| !kept_out.is_empty()) else {
        return Ok(file);
    };
    let real = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .context(|| format!("finding the real path of {}", path.display()))?;
    if kept_out.iter().any(|kept| real.starts_with(kept)) {
        let text = format!("{}: this is a file of the service itself", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(file)
}
