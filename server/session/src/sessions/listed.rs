//! Sessions as lists show them.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use coldrise_block::{Context, ErrorKind, Result, path_exists};
use coldrise_store::{Repository, SessionName};

use crate::layer::{SUPERBLOCK_AREA_BYTES, layer_damage};
use crate::locks::file_lock::FileLock;
use crate::locks::owner_lock::is_abandoned;
use crate::paths::{SessionPaths, layer_path};
use crate::session_folder::document::SessionDocument;

/// A session as shown in a list.
#[derive(Clone, Debug)]
pub struct SessionState {
    /// Its document.
    pub document: SessionDocument,
    /// True while a process has it open for writing.
    pub is_served: bool,
    /// True if it ends with the process that published it, such as a boot check.
    pub is_owned: bool,
    /// True if it should have ended with the process that published it, which was killed.
    pub is_abandoned: bool,
    /// Space that its top layers take on the repository's disk, in bytes.
    pub captured_bytes: u64,
}

/// All sessions, by name.
///
/// # Errors
/// `Corrupt` if a document does not authenticate.
pub fn sessions(repository: &Arc<Repository>) -> Result<Vec<SessionState>> {
    let mut states = Vec::new();
    for (place, document) in SessionDocument::readable(repository)? {
        if !document.is_ended {
            states.extend(state(repository, &place, document)?);
        }
    }
    states.sort_by(|a, b| a.document.name.cmp(&b.document.name));
    Ok(states)
}

/// One session.
///
/// # Errors
/// `NotFound`, naming the existing sessions.
pub fn session(repository: &Arc<Repository>, name: &SessionName) -> Result<SessionState> {
    let document = SessionDocument::of(repository, name)?;
    match state(repository, &SessionPaths::of(repository, name), document)? {
        Some(state) => Ok(state),
        // The session ended just now: this error names the other ones.
        None => SessionDocument::of(repository, name).and_then(|_| session(repository, name)),
    }
}

/// Returns `None` if the session ended meanwhile.
fn state(
    repository: &Repository,
    place: &SessionPaths,
    mut document: SessionDocument,
) -> Result<Option<SessionState>> {
    loop {
        match captured_bytes(repository, &document) {
            Ok(captured_bytes) => {
                let is_served = FileLock::is_held(&place.lock())?;
                let is_owned = path_exists(&place.owner())?;
                let is_abandoned = is_owned && is_abandoned(place)?;
                return Ok(Some(SessionState {
                    is_served,
                    is_owned,
                    is_abandoned,
                    document,
                    captured_bytes,
                }));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let now = SessionDocument::read(repository, place)?.filter(|now| !now.is_ended);
                match now {
                    None => return Ok(None),
                    // A seal removed an empty layer.
                    Some(now) if now != document => document = now,
                    Some(_) => return Err(layer_damage(error)),
                }
            }
            Err(error) => return Err(error),
        }
    }
}

fn captured_bytes(repository: &Repository, document: &SessionDocument) -> Result<u64> {
    let mut bytes = 0;
    for disk in &document.disks {
        let path = layer_path(repository, &disk.top);
        let metadata = std::fs::metadata(&path)
            .context(|| format!("session {}: the layer {}", document.name, path.display()))?;
        // A layer without a segment holds no captured block.
        if metadata.len() > SUPERBLOCK_AREA_BYTES {
            bytes += metadata.blocks() * 512;
        }
    }
    Ok(bytes)
}
