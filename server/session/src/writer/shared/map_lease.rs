//! A lease for chunk maps that a backup has stored and that no restore point names yet. It protects
//! them from gcs while the backup moves from one holder of the writer to the next.
//!
//! The holder knows the maps and chunks to which its guests refer. After its end no process knows
//! them until the next holder has opened the repository; and that one counts only data stored since
//! then.

use std::sync::Arc;

use coldrise_block::Result;
use coldrise_store::{CatchUpThread, DiskDocument, DiskName, MapRoot, Repository};
use parking_lot::Mutex;

use crate::locks::lease::{Lease, LeaseHold, Served};

/// The maps that a backup has built or is based on.
pub(super) struct MapLease {
    reader: Arc<Repository>,
    _catch_up: CatchUpThread,
    roots: Mutex<Vec<MapRoot>>,
    hold: Mutex<Option<LeaseHold>>,
}

impl MapLease {
    pub(super) fn new(reader: Arc<Repository>) -> MapLease {
        let _catch_up = reader.catch_up_in_background();
        MapLease { reader, _catch_up, roots: Mutex::default(), hold: Mutex::default() }
    }

    pub(super) fn reader(&self) -> &Arc<Repository> {
        &self.reader
    }

    pub(super) fn add(&self, root: MapRoot) {
        self.roots.lock().push(root);
    }

    /// Leases all these maps.
    ///
    /// # Errors
    /// As for [`Lease::take`].
    pub(super) fn lease(&self) -> Result<()> {
        let lease = Lease::take(&self.reader, "backup")?;
        let disk = |root: &MapRoot| -> Result<Served> {
            let name = DiskName::parse("disk")?;
            let layers = Vec::new();
            let disk = DiskDocument { name, size_bytes: 1, root: *root, layers };
            Ok(Served { name: "backup".to_owned(), disk: Some(disk) })
        };
        let roots = self.roots.lock();
        let served = roots.iter().map(disk).collect::<Result<Vec<_>>>()?;
        // Take the new lease before the old one is dropped.
        let hold = lease.hold_all(served)?;
        *self.hold.lock() = Some(hold);
        Ok(())
    }
}
