//! The lock of the process with which a session ends; see `sessions::owned`.

use coldrise_block::{Error, ErrorKind, Result, path_exists};
use coldrise_store::SessionName;

use crate::locks::file_lock::FileLock;
use crate::paths::SessionPaths;

/// Whether a killed process has left the session.
pub(crate) fn is_abandoned(place: &SessionPaths) -> Result<bool> {
    Ok(path_exists(&place.owner())? && !FileLock::is_held(&place.owner())?)
}

/// The caller has read the document of the session.
///
/// # Errors
/// `Busy` if the process that published it as its own lives.
pub(crate) fn check_not_owned(place: &SessionPaths, name: &SessionName) -> Result<()> {
    match FileLock::is_held(&place.owner())? {
        true => Err(busy(name)),
        false => Ok(()),
    }
}

/// The error for all but the owner.
pub(crate) fn busy(name: &SessionName) -> Error {
    let text = format!("session {name} belongs to a running boot check, which ends it");
    Error::new(ErrorKind::Busy, text)
        .advise("wait for the check, or cancel it; coldrise runs shows it")
}
