//! The restore point of an address with a time mark, while a command uses it.
//!
//! A mark is read as a restore point. A command that only reads, or that fails, leaves none behind:
//! the point is removed again unless it is kept. A killed command leaves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{Address, PointDocument, PointSelector, Repository, SessionName, SessionTime};

use crate::client_files::sealed;
use crate::locks::file_lock::FileLock;
use crate::locks::lease::read_leases;
use crate::paths::SessionPaths;
use crate::points::forget::Published;
use crate::session_folder::addresses::point_name;
use crate::session_folder::document::SessionDocument;
use crate::sessions::marks::{choose, session_marks};
use crate::sessions::seal::{SealedMark, seal_once};

/// How long an address with a mark waits for the process that serves the session.
const PATIENCE: Duration = Duration::from_secs(60);

/// The address that a command reads instead of one with a time mark. On drop, a point that was made
/// for it is removed, unless [`PointOfMark::keep`] was called or something uses it: a session that
/// was published from it, or another process that reads it.
pub struct PointOfMark {
    /// The point's address with its exact name; any address without a mark as it was.
    pub address: Address,
    /// For people: the session and the exact time of the mark; any other address as it was.
    pub shown: Address,
    made: Option<Made>,
    is_kept: AtomicBool,
}

/// A point that did not exist before.
struct Made {
    repository: Arc<Repository>,
    session: SessionName,
    point: PointDocument,
}

impl PointOfMark {
    /// The point of an address with a mark: an existing one that shows it, or a new one.
    ///
    /// # Errors
    /// `NotFound` if there is no such mark, naming the nearest ones; `InvalidInput` for one of several disks at an age, which
    /// would be another time for the next disk; those of [`seal`](crate::seal).
    pub fn of(repository: &Arc<Repository>, address: &Address) -> Result<PointOfMark> {
        let is_kept = AtomicBool::new(false);
        let Address::Marked { session, time, disk } = address else {
            let (address, shown) = (address.clone(), address.clone());
            return Ok(PointOfMark { address, shown, made: None, is_kept });
        };
        let marks = session_marks(repository, session)?;
        let mark = choose(&marks.marks, time, session)?;
        let shown = Address::Marked {
            session: session.clone(),
            time: SessionTime::At(mark.name()?),
            disk: disk.clone(),
        };
        if disk.is_some() && matches!(time, SessionTime::Ago(_)) && mark.places.len() > 1 {
            let text = format!("{address} would be another time for each disk of the machine");
            let advice = format!("name the time: it is {shown} now");
            return Err(Error::new(ErrorKind::InvalidInput, text).advise(advice));
        }
        let SealedMark { report, is_new } = seal_once(repository, session, mark, PATIENCE)?;
        let point = report.point;
        let address = Address::Point {
            machine: point.machine.clone(),
            selector: PointSelector::Exact(point.point.clone()),
            disk: disk.clone(),
        };
        let made = is_new.then(|| Made {
            repository: Arc::clone(repository),
            session: session.clone(),
            point,
        });
        Ok(PointOfMark { address, shown, made, is_kept })
    }

    /// Keeps the point.
    pub fn keep(&self) {
        self.is_kept.store(true, Ordering::Relaxed);
    }

    /// The point's address. The point is kept.
    pub fn kept(self) -> Address {
        self.keep();
        self.address.clone()
    }
}

impl Drop for PointOfMark {
    fn drop(&mut self) {
        let Some(made) = self.made.take().filter(|_| !self.is_kept.load(Ordering::Relaxed)) else {
            return;
        };
        if let Err(error) = made.remove() {
            let point = point_name(&made.point);
            tracing::warn!(
                error = %error.full_message(),
                "the point {point} of a time mark stays: remove it with coldrise forget"
            );
        }
    }
}

impl Made {
    /// Removes the point, if it waits in the session's document and nothing uses it. The marker goes
    /// first: without the point it would mean a lost one. After a crash in between, the next writer
    /// enters the point and makes the marker again.
    fn remove(&self) -> Result<()> {
        let (repository, point) = (&*self.repository, &self.point);
        let place = SessionPaths::of(repository, &self.session);
        let _documents = FileLock::documents(repository)?;
        let Some(mut document) = SessionDocument::read(repository, &place)? else { return Ok(()) };
        let is_it = |waiting: &PointDocument| {
            waiting.point == point.point && waiting.created_at_ms == point.created_at_ms
        };
        let Some(at) = document.sealed.iter().position(is_it) else {
            let name = point_name(point);
            tracing::info!("{name}, the point of a time mark, is in the catalog and stays");
            return Ok(());
        };
        let is_published = Published::read(repository)?.check_free(point).is_err();
        if is_published || self.is_read_elsewhere()? {
            return Ok(());
        }
        let names = [point_name(point)];
        repository.suspend_markers(&names)?;
        document.sealed.remove(at);
        document.mark_points.retain(|(_, name)| *name != point.point);
        // The point had the files and parts of clients, too.
        document.has_unsealed_writes = true;
        document.write(repository, &place)?;
        repository.forget_markers(&names);
        sealed::remove_others(repository, &place, &document.sealed)
    }

    fn is_read_elsewhere(&self) -> Result<bool> {
        let folder = format!("{}/", point_name(&self.point));
        let leases = read_leases(&self.repository)?.into_iter();
        let mut others = leases.filter(|lease| lease.process_id != std::process::id());
        Ok(others.any(|lease| lease.served.iter().any(|served| served.name.starts_with(&folder))))
    }
}
