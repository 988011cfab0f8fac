//! One gc, done by the process that writes the repository.
//!
//! A gc that finds a backup writing asks that process, through `REPO/writer.control`, to do the gc
//! beside the backup: only that process knows which chunks it refers to (the store decides that,
//! see `RepositoryWriter::collect_garbage`). If the backup ends before the gc does, the gc is
//! interrupted after the current step, and the asking process does the rest itself.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{GcOptions, GcProgress, GcReport, MaxUnused, RepositoryWriter};
use serde::{Deserialize, Serialize};

use crate::boot_trace::remove_other_traces;
use crate::incoming::PartialCopy;
use crate::points::catalog::enter_sealed_points;
use crate::points::in_use::{InUse, remove_unused_layers};
use crate::sockets::local_socket::{ask, send};
use crate::sockets::writer_messages::{Request, SOCKET};

/// Interval between two checks of the asking process for a cancellation.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The result of a gc.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    /// The result for the database.
    pub reclaimed: GcReport,
    /// Number of removed layers.
    pub layers: u64,
}

/// Deletes everything that no point, session or running program needs, and returns the space to the
/// file system. Another thread may write a disk meanwhile.
///
/// # Errors
/// `Corrupt` if the parts in use cannot all be determined: then nothing was deleted. Otherwise as
/// for [`RepositoryWriter::collect_garbage`].
pub fn collect_garbage(writer: &RepositoryWriter, options: &GcOptions<'_>) -> Result<Collected> {
    // Remove layers first: entering sealed points also removes them, and does not return their
    // number.
    let layers = remove_unused_layers(writer)?;
    enter_sealed_points(writer)?;
    // After a crash a marker may name a chunk map that its point no longer has.
    writer.repository().mark_points(usize::MAX)?;
    PartialCopy::forget_old(writer.repository())?;
    let in_use = InUse::collect(writer.repository())?;
    let reachable = writer
        .repository()
        .reachable(in_use.roots, options.cancel)
        .context(|| "cannot determine everything that is in use, so nothing was deleted")?;
    let mut machines = writer.repository().machines()?;
    machines
        .extend(PartialCopy::all(writer.repository())?.into_iter().map(|partial| partial.machine));
    remove_other_traces(writer.repository(), &machines)?;
    Ok(Collected { reclaimed: writer.collect_garbage(reachable, options)?, layers })
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

/// Does a gc for another process. `cancel` ends it after the current step.
///
/// # Errors
/// `Io` if the asking process has disconnected.
pub(crate) fn answer_gc(
    writer: &RepositoryWriter,
    max_unused: MaxUnused,
    cancel: &AtomicBool,
    stream: &UnixStream,
) -> Result<()> {
    let progress = |now: GcProgress| {
        let GcProgress { done_bytes, total_bytes } = now;
        if send(stream, &Answer::Progress { done_bytes, total_bytes }).is_err() {
            // The asking process has disconnected.
            cancel.store(true, Ordering::SeqCst);
        }
    };
    let options = GcOptions { max_unused, cancel, progress: &progress };
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

/// The answer of the process that writes a repository to a request for a gc.
#[derive(Debug)]
pub enum GcAnswer {
    /// The gc was done.
    Done(Collected),
    /// There is no writer, or it does no gcs for others.
    Nobody,
    /// The writer is about to end: the asking process must do the rest.
    Ending,
}

/// Asks the process that writes the repository at `path` for a gc.
///
/// # Errors
/// `Interrupted` once `options.cancel` is set; the writer notices it when it next reports progress.
/// The writer's own errors: `Corrupt` or `Io`.
pub fn ask_for_gc(path: &Path, options: &GcOptions<'_>) -> Result<GcAnswer> {
    let request = Request::Gc { max_unused: options.max_unused };
    let Some(mut asked) = ask(path, SOCKET, &request, LOOK_INTERVAL)? else {
        return Ok(GcAnswer::Nobody);
    };
    loop {
        match asked.next() {
            Ok(None) => {}
            Ok(Some(Answer::Progress { done_bytes, total_bytes })) => {
                (options.progress)(GcProgress { done_bytes, total_bytes });
            }
            Ok(Some(Answer::Done(collected))) => return Ok(GcAnswer::Done(*collected)),
            Ok(Some(Answer::Closing)) => return Ok(GcAnswer::Ending),
            Ok(Some(Answer::Failed { is_damage, message })) => {
                let kind = if is_damage { ErrorKind::Corrupt } else { ErrorKind::Io };
                return Err(Error::new(kind, message));
            }
            // The writer was killed: the lock is free, and the rest remains to be done.
            Err(_) => return Ok(GcAnswer::Ending),
        }
        if options.cancel.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
    }
}
