//! Sessions that end with the process that published them, such as those of boot checks.
//!
//! The process holds the lock of `live/HASH/owner` while it lives. The lock is taken before the
//! session's document exists. So a session that has this file and a free lock was left by a killed
//! process. An unpublish of a session whose owner lives is refused: it checks the owner under the
//! session's own lock, after it has read the document.

use std::sync::Arc;

use coldrise_block::{Context, ErrorKind, Result};
use coldrise_store::{PointDocument, Repository, SessionName};

use crate::locks::file_lock::{FileLock, PASSING_PATIENCE};
use crate::locks::owner_lock::{busy, is_abandoned};
use crate::paths::SessionPaths;
use crate::session_folder::document::SessionDocument;
use crate::sessions::publish::publish_bounded;
use crate::sessions::unpublish::unpublish;

/// How much an untrusted machine may write: it must not fill the repository's drive.
#[derive(Clone, Copy, Debug)]
pub struct CaptureLimit {
    /// The most, in bytes.
    pub most_bytes: u64,
    /// At most this part of the drive's free space: 10 for a tenth.
    pub free_space_divisor: u64,
}

impl CaptureLimit {
    /// The limit of one of `disks` disks, at the present free space.
    fn bytes_per_disk(self, repository: &Repository, disks: usize) -> Result<u64> {
        let folder = repository.live_dir();
        let reading = || format!("reading the free space of {}", folder.display());
        let drive = rustix::fs::statvfs(&folder).map_err(std::io::Error::from).context(reading)?;
        let free = drive.f_bavail.saturating_mul(drive.f_frsize);
        let bytes = self.most_bytes.min(free / self.free_space_divisor.max(1));
        Ok(bytes / (disks as u64).max(1))
    }
}

/// A session whose captured writes are never kept. Dropping it discards it.
pub struct OwnedSession {
    repository: Arc<Repository>,
    document: SessionDocument,
    /// `None` once the session has ended.
    owner: Option<FileLock>,
}

impl OwnedSession {
    /// Publishes a point under a name. All its disks together capture as much as `limit` says; then
    /// writes fail for lack of space.
    ///
    /// # Errors
    /// As for [`crate::publish`].
    pub fn publish(
        repository: &Arc<Repository>,
        point: &PointDocument,
        name: SessionName,
        limit: CaptureLimit,
    ) -> Result<OwnedSession> {
        let limit = limit.bytes_per_disk(repository, point.disks.len())?;
        let path = SessionPaths::of(repository, &name).owner();
        let mut owner = None;
        let document =
            publish_bounded(repository, point, Some(name), Some(limit), |document, files| {
                // Others only look at it, briefly.
                owner = FileLock::take_within(&path, || PASSING_PATIENCE)?;
                match owner {
                    Some(_) => Ok(files),
                    None => Err(busy(&document.name)),
                }
            })?;
        Ok(OwnedSession { repository: Arc::clone(repository), document, owner })
    }

    /// Its document when it was published.
    pub fn document(&self) -> &SessionDocument {
        &self.document
    }

    /// Discards it.
    ///
    /// # Errors
    /// As for [`unpublish`].
    pub fn end(mut self) -> Result<()> {
        self.discard()
    }

    fn discard(&mut self) -> Result<()> {
        if self.owner.take().is_none() {
            return Ok(());
        }
        match unpublish(&self.repository, &self.document.name, true) {
            // Another process saw it without an owner, and was faster.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            ended => ended.map(|_| ()),
        }
    }
}

impl Drop for OwnedSession {
    fn drop(&mut self) {
        let _ = self.discard();
    }
}

/// Discards the sessions of killed processes. Sessions that a server is still closing stay for the next
/// call. Returns the names of the others.
///
/// # Errors
/// Errors of reading the sessions' folder, and the first error of ending one; the others are ended.
pub fn discard_abandoned_sessions(repository: &Arc<Repository>) -> Result<Vec<SessionName>> {
    let (mut ended, mut first) = (Vec::new(), None);
    for (place, document) in SessionDocument::readable(repository)? {
        if document.is_ended || !is_abandoned(&place)? || FileLock::is_held(&place.lock())? {
            continue;
        }
        match unpublish(repository, &document.name, true) {
            Ok(_) => ended.push(document.name),
            // Another process was faster, or has opened it just now.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Busy) => {}
            Err(error) => first = first.or(Some(error)),
        }
    }
    match first {
        Some(error) => Err(error),
        None => Ok(ended),
    }
}
