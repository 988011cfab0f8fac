//! The parts of a session's machine beside its disks, as the machine left them.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{MachinePart, Repository, SessionName};

use crate::locks::file_lock::FileLock;
use crate::paths::SessionPaths;
use crate::session_folder::document::SessionDocument;

/// Replaces those of the session's parts that are of these kinds, durably. The next seal takes them over; an end of the session makes a
/// restore point if they have changed since the last one.
///
/// # Errors
/// `NotFound` without such a session; errors of the operating system.
pub fn update_parts(
    repository: &Repository,
    name: &SessionName,
    parts: Vec<MachinePart>,
) -> Result<()> {
    let place = SessionPaths::of(repository, name);
    let _documents = FileLock::documents(repository)?;
    let document = SessionDocument::read(repository, &place)?.filter(|found| !found.is_ended);
    let Some(mut document) = document else {
        return Err(Error::new(ErrorKind::NotFound, format!("there is no session {name}")));
    };
    let mut has_new = false;
    for part in parts {
        if document.part(&part.kind) != Some(&part) {
            document.parts.retain(|known| known.kind != part.kind);
            document.parts.push(part);
            has_new = true;
        }
    }
    if has_new {
        document.has_new_parts = true;
        document.write(repository, &place)?;
    }
    Ok(())
}
