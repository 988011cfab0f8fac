//! Forget: points leave the catalog.
//!
//! Only the catalog's documents go, in one synced batch. Chunks, pages and layers
//! stay until they are reclaimed: whoever serves a forgotten point goes on.
//!
//! What decides that a point may go is looked at under `live/lock`, which is held
//! until it is gone. A publish settles its session under the same lock and looks for
//! its point before: so no session is ever published from a point that is not there.

use std::collections::HashMap;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    MachineName, PointDocument, PointName, Repository, RepositoryWriter, SessionName,
};

use crate::catalog::enter_sealed_points;
use crate::document::SessionDocument;
use crate::lock::FileLock;

/// Which points sessions are published from.
#[derive(Debug, Default)]
pub struct Published {
    sessions: HashMap<(MachineName, PointName), Vec<SessionName>>,
}

impl Published {
    /// Reads the documents of all sessions.
    ///
    /// # Errors
    /// `Corrupt` where one does not authenticate.
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
    pub fn from(&self, machine: &MachineName, point: &PointName) -> &[SessionName] {
        let key = (machine.clone(), point.clone());
        self.sessions.get(&key).map(Vec::as_slice).unwrap_or_default()
    }

    /// Says whether a point may be forgotten.
    ///
    /// # Errors
    /// `Busy` where a session is published from it, or it is protected, with what to
    /// do about that.
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

/// Points on their way out of the catalog. While it lives nothing is published,
/// sealed or unpublished.
pub struct PointRemoval<'a> {
    writer: &'a RepositoryWriter,
    published: Published,
    _documents: FileLock,
}

impl<'a> PointRemoval<'a> {
    /// Enters what waits in sessions' documents into the catalog, and has publishers
    /// wait from here on.
    ///
    /// # Errors
    /// As of [`enter_sealed_points`].
    pub fn begin(writer: &'a RepositoryWriter) -> Result<Self> {
        enter_sealed_points(writer)?;
        let documents = FileLock::documents(writer.repository())?;
        let published = Published::read(writer.repository())?;
        Ok(PointRemoval { writer, published, _documents: documents })
    }

    /// Which points sessions are published from.
    pub fn published(&self) -> &Published {
        &self.published
    }

    /// Removes the points, all or none. Durable on return.
    ///
    /// # Errors
    /// `Busy` as of [`Published::check_free`]; `NotFound` for a point that is not in
    /// the catalog.
    pub fn commit(self, points: &[(MachineName, PointName)]) -> Result<()> {
        for (machine, point) in points {
            self.published.check_free(&self.writer.repository().point(machine, point)?)?;
        }
        match points.is_empty() {
            true => Ok(()),
            false => self.writer.remove_points(points),
        }
    }
}
