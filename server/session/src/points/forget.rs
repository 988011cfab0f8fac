//! Forget: removes points from the catalog.
//!
//! Only the catalog's documents are removed, in one synced batch. Chunks, pages and layers stay
//! until a gc: a process that serves a forgotten point continues.
//!
//! The conditions for the removal are checked under `live/lock`, which is held until the points are
//! removed. A publish commits its session under the same lock, and first checks that its point
//! exists. So no session is ever published from a point that does not exist.

use std::collections::{BTreeSet, HashMap};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    Claim, MachineName, PointDocument, PointName, Repository, RepositoryWriter, SessionName,
};

use crate::incoming::{IncomingPoint, PartialCopy};
use crate::locks::file_lock::FileLock;
use crate::points::catalog::enter_sealed_points;
use crate::session_folder::document::SessionDocument;

/// The points from which sessions are published.
#[derive(Debug, Default)]
pub struct Published {
    sessions: HashMap<(MachineName, PointName), Vec<SessionName>>,
}

impl Published {
    /// Reads the documents of all sessions.
    ///
    /// # Errors
    /// `Corrupt` if one does not authenticate.
    pub fn read(repository: &Repository) -> Result<Published> {
        let mut sessions: HashMap<_, Vec<SessionName>> = HashMap::new();
        for (_, document) in SessionDocument::all(repository)? {
            if !document.is_ended {
                let point = (document.machine, document.point);
                sessions.entry(point).or_default().push(document.name);
            }
        }
        sessions.values_mut().for_each(|names| names.sort_unstable());
        Ok(Published { sessions })
    }

    /// The sessions that are published from a point, sorted.
    pub(crate) fn from(&self, machine: &MachineName, point: &PointName) -> &[SessionName] {
        let key = (machine.clone(), point.clone());
        self.sessions.get(&key).map(Vec::as_slice).unwrap_or_default()
    }

    /// Checks that a point on its way may be removed.
    ///
    /// # Errors
    /// `Busy` if a session is over it.
    pub fn check_unused(&self, incoming: &IncomingPoint) -> Result<()> {
        let PartialCopy { machine, point, .. } = &incoming.partial;
        match self.from(machine, point).first() {
            None => Ok(()),
            Some(session) => {
                let text = format!("session {session} is over {machine}/{point}");
                Err(Error::new(ErrorKind::Busy, text).advise(format!(
                    "end that first, without its writes: coldrise unpublish {session} --discard"
                )))
            }
        }
    }

    /// Checks that a point may be forgotten.
    ///
    /// # Errors
    /// `Busy` if a session is published from it, or if it is protected. The message says how to
    /// change that.
    pub fn check_free(&self, point: &PointDocument) -> Result<()> {
        let address = format!("{}/{}", point.machine, point.point);
        let refuse = |why: String| Err(Error::new(ErrorKind::Busy, format!("{address} {why}")));
        if let Some(session) = self.from(&point.machine, &point.point).first() {
            return refuse(format!(
                "is published as session {session}: end that first, with coldrise unpublish \
                 {session}"
            ));
        }
        if point.is_protected {
            return refuse(format!(
                "is protected: take that back first, with coldrise unprotect {address}"
            ));
        }
        Ok(())
    }
}

/// Points on their way that are removed. Nothing more arrives of them until this is dropped: a receiver needs the claim of
/// the machine, and would continue with maps that a gc frees.
pub struct IncomingRemoval {
    points: Vec<IncomingPoint>,
    _claims: Vec<Claim>,
}

impl IncomingRemoval {
    /// # Errors
    /// `Busy` while one of them is copied or a session is over it; errors of the drive.
    pub fn begin(repository: &Repository, points: Vec<IncomingPoint>) -> Result<IncomingRemoval> {
        let machines: BTreeSet<_> =
            points.iter().map(|incoming| &incoming.partial.machine).collect();
        let claims = machines.into_iter().map(|machine| repository.claim_machine(machine));
        let claims = claims.collect::<Result<_>>()?;
        let published = Published::read(repository)?;
        points.iter().try_for_each(|incoming| published.check_unused(incoming))?;
        Ok(IncomingRemoval { points, _claims: claims })
    }

    /// The points.
    pub fn points(&self) -> &[IncomingPoint] {
        &self.points
    }

    /// Forgets what has arrived. A gc returns the space; a later copy begins from the start.
    ///
    /// # Errors
    /// `Busy` if a session was published meanwhile; errors of the drive.
    pub fn commit(&self, repository: &Repository) -> Result<()> {
        if self.points.is_empty() {
            return Ok(());
        }
        let _documents = FileLock::documents(repository)?;
        let published = Published::read(repository)?;
        self.points.iter().try_for_each(|incoming| published.check_unused(incoming))?;
        self.points.iter().try_for_each(|incoming| incoming.partial.remove(repository))
    }
}

/// Removes points from the catalog. Publish, seal and unpublish wait until this is dropped.
pub struct PointRemoval<'a> {
    writer: &'a RepositoryWriter,
    published: Published,
    _documents: FileLock,
}

impl<'a> PointRemoval<'a> {
    /// Enters the points that wait in sessions' documents into the catalog. From here on publishers
    /// wait.
    ///
    /// # Errors
    /// As for [`enter_sealed_points`].
    pub fn begin(writer: &'a RepositoryWriter) -> Result<Self> {
        enter_sealed_points(writer)?;
        let documents = FileLock::documents(writer.repository())?;
        let published = Published::read(writer.repository())?;
        Ok(PointRemoval { writer, published, _documents: documents })
    }

    /// The points from which sessions are published.
    pub fn published(&self) -> &Published {
        &self.published
    }

    /// Removes all these points or none. Durable on return.
    ///
    /// # Errors
    /// `Busy` as for [`Published::check_free`]; `NotFound` for a point that is not in the catalog.
    pub fn commit(self, points: &[(MachineName, PointName)]) -> Result<()> {
        for (machine, point) in points {
            self.published.check_free(&self.writer.repository().point(machine, point)?)?;
        }
        if points.is_empty() { Ok(()) } else { self.writer.remove_points(points) }
    }
}
