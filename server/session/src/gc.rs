//! One gc: by whoever writes the repository.
//!
//! Who finds a backup writing asks that process to do it, beside the backup, through
//! `REPO/writer.control`: only it knows what it refers to (the store settles that, see
//! `RepositoryWriter::reclaim`). Where the backup ends before the gc does, the gc is
//! interrupted after the step under way, and who asked does the rest itself.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{MaxUnused, ReclaimOptions, ReclaimProgress, Reclaimed, RepositoryWriter};
use serde::{Deserialize, Serialize};

use crate::catalog::enter_sealed_points;
use crate::local_socket::{ask, send};
use crate::reclaim::{reclaim_layers, InUse};
use crate::shared_writer::{Request, SOCKET};

/// How often who has asked looks whether it was cancelled.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What a gc did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    /// Of the database.
    pub reclaimed: Reclaimed,
    /// Layers that were removed.
    pub layers: u64,
}

/// Deletes what no point, no session and no running program needs, and gives its space
/// back to the file system. A disk may be written meanwhile, from another thread.
///
/// # Errors
/// `Corrupt` where not all that is in use can be told: then nothing was deleted.
/// Otherwise as of [`RepositoryWriter::reclaim`].
pub fn collect_garbage(
    writer: &RepositoryWriter,
    options: &ReclaimOptions<'_>,
) -> Result<Collected> {
    // First: entering sealed points removes them, too, and does not tell how many.
    let layers = reclaim_layers(writer)?;
    enter_sealed_points(writer)?;
    let in_use = InUse::collect(writer.repository())?;
    let reachable = writer
        .repository()
        .reachable(in_use.roots, options.cancel)
        .context(|| "not all that is in use can be told, so nothing was deleted")?;
    Ok(Collected { reclaimed: writer.reclaim(reachable, options)?, layers })
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Progress {
        done_bytes: u64,
        total_bytes: u64,
    },
    Done(Box<Collected>),
    Failed {
        is_damage: bool,
        message: String,
    },
    /// The writer is about to end.
    Closing,
}

/// Does a gc for another process; `cancel` ends it after the step under way.
///
/// # Errors
/// `Io` where who asked has gone away.
pub(crate) fn answer_gc(
    writer: &RepositoryWriter,
    max_unused: MaxUnused,
    cancel: &AtomicBool,
    stream: &UnixStream,
) -> Result<()> {
    let progress = |now: ReclaimProgress| {
        let ReclaimProgress { done_bytes, total_bytes } = now;
        if send(stream, &Answer::Progress { done_bytes, total_bytes }).is_err() {
            // Who asked has gone away.
            cancel.store(true, Ordering::SeqCst);
        }
    };
    let options = ReclaimOptions { max_unused, cancel, progress: &progress };
    match collect_garbage(writer, &options) {
        Ok(collected) => send(stream, &Answer::Done(Box::new(collected))),
        Err(error) if error.kind() == ErrorKind::Interrupted => send(stream, &Answer::Closing),
        Err(error) => send(
            stream,
            &Answer::Failed {
                is_damage: error.kind() == ErrorKind::Corrupt,
                message: error.full_message(),
            },
        ),
    }
}

/// What came of asking the process that writes a repository for a gc.
#[derive(Debug)]
pub enum Asked {
    /// It was done.
    Done(Collected),
    /// The writer does no gcs for others, or there is none.
    Nobody,
    /// The writer is about to end: the rest is to be done by who asked.
    Ending,
}

/// Asks the process that writes the repository at `path` for a gc.
///
/// # Errors
/// `Interrupted` once `options.cancel` is set; the writer notices it when it has
/// progress to tell. What the writer says: `Corrupt` or `Io`.
pub fn ask_for_gc(path: &Path, options: &ReclaimOptions<'_>) -> Result<Asked> {
    let request = Request::Gc { max_unused: options.max_unused };
    let Some(mut asked) = ask(path, SOCKET, &request, LOOK_INTERVAL)? else {
        return Ok(Asked::Nobody);
    };
    loop {
        match asked.next() {
            Ok(None) => {}
            Ok(Some(Answer::Progress { done_bytes, total_bytes })) => {
                (options.progress)(ReclaimProgress { done_bytes, total_bytes });
            }
            Ok(Some(Answer::Done(collected))) => return Ok(Asked::Done(*collected)),
            Ok(Some(Answer::Closing)) => return Ok(Asked::Ending),
            Ok(Some(Answer::Failed { is_damage, message })) => {
                let kind = if is_damage { ErrorKind::Corrupt } else { ErrorKind::Io };
                return Err(Error::new(kind, message));
            }
            // It was killed: the lock is free, and the rest is to be done.
            Err(_) => return Ok(Asked::Ending),
        }
        if options.cancel.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
    }
}
