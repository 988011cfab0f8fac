//! What a backup has stored and no restore point names yet, while it moves from one holder of
//! the writer to the next: a lease names it, so no gc in between deletes it.
//!
//! The holder knows what its guests refer to. Once it has ended nobody does, until the next one
//! has opened the repository; and that one counts only what was stored since.

use std::sync::Arc;

use coldrise_block::Result;
use coldrise_store::{DiskDocument, DiskName, KeepUp, MapRoot, Repository};
use parking_lot::Mutex;

use crate::lease::{Lease, LeaseHold, Served};

/// The maps that a backup builds upon or has built.
pub(super) struct Kept {
    reader: Arc<Repository>,
    _keep_up: KeepUp,
    roots: Mutex<Vec<MapRoot>>,
    hold: Mutex<Option<LeaseHold>>,
}

impl Kept {
    pub(super) fn new(reader: Arc<Repository>) -> Kept {
        let _keep_up = reader.keep_up();
        Kept { reader, _keep_up, roots: Mutex::default(), hold: Mutex::default() }
    }

    pub(super) fn reader(&self) -> &Arc<Repository> {
        &self.reader
    }

    pub(super) fn add(&self, root: MapRoot) {
        self.roots.lock().push(root);
    }

    /// Leases all of them.
    ///
    /// # Errors
    /// As of [`Lease::take`].
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
        // The new one is there before the old one goes.
        let hold = lease.hold_all(served)?;
        *self.hold.lock() = Some(hold);
        Ok(())
    }
}
