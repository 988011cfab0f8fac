//! What is in use, wherever it is named: in the catalog, in sessions, in leases.
//!
//! Whoever starts to use a point first writes down that it does (a session's
//! document, a lease), then catches up, looks whether the point is still there, and
//! takes its mark back where it is not. Whoever deletes first makes durable that the
//! point is gone, then reads sessions and leases, then deletes only what neither
//! they nor the catalog name. So one of both always sees the other.

use std::collections::HashSet;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{DiskDocument, LayerId, MachineName, MapRoot, PointName, Repository};

use crate::document::SessionDocument;
use crate::lease::read_leases;
use crate::lock::FileLock;

/// The chunk maps and layers that somebody needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    /// Roots of chunk maps.
    pub roots: HashSet<MapRoot>,
    /// Layers, those that take a session's writes included.
    pub layers: HashSet<LayerId>,
}

impl InUse {
    /// Everything that a restore point, a session or a running program needs.
    ///
    /// # Errors
    /// As of [`InUse::without`].
    pub fn collect(repository: &Repository) -> Result<InUse> {
        InUse::without(repository, |_, _| false)
    }

    /// The same, as if the points for which `is_gone` says so were not there. What a
    /// session or a running program needs of them stays.
    ///
    /// # Errors
    /// `Corrupt` where a document of the catalog, of a session or of a lease does not
    /// open: what it names is then not known, and nothing may be deleted.
    pub fn without(
        repository: &Repository,
        is_gone: impl Fn(&MachineName, &PointName) -> bool,
    ) -> Result<InUse> {
        let mut found = InUse::default();
        let unknown = || {
            "not all that is in use can be told, so nothing may be deleted (coldrise verify names \
             what is damaged)"
        };
        let documents = FileLock::documents(repository)?;
        let sessions = SessionDocument::all(repository).context(unknown)?;
        drop(documents);
        for (_, session) in sessions {
            for disk in &session.disks {
                found.add(&disk.sealed());
                found.layers.insert(disk.top);
            }
            for point in session.sealed.iter().filter(|p| !is_gone(&p.machine, &p.point)) {
                point.disks.iter().for_each(|disk| found.add(disk));
            }
        }
        // Entry by entry: a point counts even where its machine's entry is lost.
        let (points, damaged) = repository.verify_catalog()?;
        if let Some(damaged) = damaged.first() {
            let message = format!("{}: {}", damaged.what, damaged.reason);
            return Err(Error::new(ErrorKind::Corrupt, message)).context(unknown);
        }
        for point in points.iter().filter(|point| !is_gone(&point.machine, &point.point)) {
            point.disks.iter().for_each(|disk| found.add(disk));
        }
        for lease in read_leases(repository).context(unknown)? {
            lease.served.iter().filter_map(|s| s.disk.as_ref()).for_each(|disk| found.add(disk));
        }
        Ok(found)
    }

    fn add(&mut self, disk: &DiskDocument) {
        self.roots.insert(disk.root);
        self.layers.extend(disk.layers.iter().map(|layer| layer.id));
    }
}
