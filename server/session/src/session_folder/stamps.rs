//! Signs of change in the sessions, for a program that keeps its own index.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use coldrise_block::{Context, Result};
use coldrise_store::{PointDocument, Repository};

use crate::locks::file_lock::FileLock;
use crate::paths::SessionPaths;
use crate::session_folder::document::SessionDocument;

/// The state of one session. A later state differs if its document changed, or if a front end
/// opened or closed it; not if only captured bytes changed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SessionStamp {
    directory: PathBuf,
    /// A document is replaced by another file.
    document: (u64, i64, i64),
    is_served: bool,
}

/// The states of all sessions, sorted.
///
/// # Errors
/// Errors of the operating system.
pub fn session_stamps(repository: &Repository) -> Result<Vec<SessionStamp>> {
    let mut stamps = Vec::new();
    for place in SessionPaths::all(repository)? {
        let path = place.document();
        let document = match std::fs::metadata(&path) {
            Ok(found) => (found.ino(), found.ctime(), found.ctime_nsec()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).context(|| format!("reading {}", path.display())),
        };
        let is_served = FileLock::is_held(&place.lock())?;
        let directory = place.directory().to_owned();
        stamps.push(SessionStamp { directory, document, is_served });
    }
    stamps.sort_unstable();
    Ok(stamps)
}

/// The points in the sessions' documents: a writer has not entered them into the catalog yet, or
/// has just done so. Read them before the repository's catalog.
///
/// # Errors
/// The operating system's error. A damaged document is left out and logged.
pub fn waiting_points(repository: &Repository) -> Result<Vec<PointDocument>> {
    let documents = SessionDocument::readable(repository)?.into_iter();
    Ok(documents.flat_map(|(_, document)| document.sealed).collect())
}
