//! Commands that a running backup does for another process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{ErrorKind, Result};
use coldrise_session::{change_through_backup, PointChange};
use coldrise_store::{Repository, RepositoryWriter};

use crate::invocation::Invocation;
use coldrise_hosting::signals::cancel_flag;

/// A backup that has begun listens after this long, and the next one of several opens the
/// repository after this long.
const PATIENCE: Duration = Duration::from_secs(2);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Does something with the writer: in this process, or, if a backup holds it, through that one.
/// `through` returns `None` if no backup took the request.
///
/// # Errors
/// `Busy` if another command than a backup holds the writer; the errors of both closures.
pub(crate) fn beside_backups<T>(
    invocation: &Invocation,
    alone: impl FnOnce(RepositoryWriter) -> Result<T>,
    through: impl Fn(&Arc<Repository>) -> Result<Option<T>>,
) -> Result<T> {
    let started = Instant::now();
    loop {
        let busy = match invocation.open_for_writing() {
            Err(error) if error.kind() == ErrorKind::Busy => error,
            opened => return alone(opened?),
        };
        if let Some(done) = through(&invocation.open()?)? {
            return Ok(done);
        }
        if started.elapsed() >= PATIENCE {
            return Err(busy);
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// Makes the change that `choose` decides on, and returns what else it returns.
///
/// # Errors
/// As for [`beside_backups`].
pub(crate) fn change_points<T>(
    invocation: &Invocation,
    choose: impl Fn(&Arc<Repository>) -> Result<(T, PointChange)>,
) -> Result<T> {
    let cancel = cancel_flag()?;
    beside_backups(
        invocation,
        |writer| {
            let (chosen, change) = choose(writer.repository())?;
            coldrise_session::change_points(&writer, &change).map(|()| chosen)
        },
        |repository| {
            let (chosen, change) = choose(repository)?;
            Ok(change_through_backup(repository, &change, &cancel)?.then_some(chosen))
        },
    )
}
