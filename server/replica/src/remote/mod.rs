//! The repository to which points are copied: on this host, or behind a line.

mod content;
mod copied;
mod fetch;
mod fetch_progress;
mod line_disk;
mod line_remote;
pub(crate) mod live;
pub(crate) mod messages;
mod pack;
mod reads;
mod receiver;
mod traffic;
mod unpack;

use std::any::Any;
use std::sync::Arc;

use coldrise_block::{Disk, Result};
use coldrise_session::{ByteRanges, CarriedFiles, Catalog, SharedWriter};
use coldrise_store::{BackupTarget, MachineName, MapRoot, PointDocument, RepositoryId};
use serde::{Deserialize, Serialize};

pub use copied::{CopiedPoint, CopyProgress, CopyStep, CopySummary, MachineCopy};
pub(crate) use fetch::FetchReport;
pub use fetch::{FetchRequest, Fetched, Greeting, Opening, fetch, limit_fetch};
pub use line_remote::LineRemote;
pub use live::{LiveOpening, LiveReceivers, LiveTerms};
pub use traffic::Traffic;

/// A disk that has arrived in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartialMap {
    /// The map with what has arrived: the base of the rest.
    pub root: MapRoot,
    /// The rest begins here, in bytes.
    pub end_bytes: u64,
}

/// A point that is about to be copied.
pub struct Announcement<'a> {
    /// As it will be there; the disks name no content.
    pub document: &'a PointDocument,
    /// The machine here.
    pub machine: &'a MachineName,
    /// Its disks, in order.
    pub disks: Vec<AnnouncedDisk>,
    /// What it carries.
    pub files: &'a CarriedFiles,
    /// The boot trace of the machine.
    pub trace: Option<Vec<u8>>,
}

/// A disk of an announced point.
pub struct AnnouncedDisk {
    /// The map there from which its changes count.
    pub base: Option<MapRoot>,
    /// The ranges that may differ from that, or from zeroes.
    pub differences: ByteRanges,
    /// Its content.
    pub content: Arc<dyn Disk>,
}

/// The answer to an announcement.
pub struct Announced {
    /// Of each disk: what has arrived before.
    pub begun: Vec<Option<PartialMap>>,
    _reads: Box<dyn Any>,
}

impl Announced {
    /// Nothing of this many disks has arrived before.
    pub(crate) fn nothing(disks: usize) -> Announced {
        Announced { begun: vec![None; disks], _reads: Box::new(()) }
    }
}

/// The repository to which points are copied.
pub trait Remote: Sync {
    /// Where the disks are stored.
    fn target(&self) -> &dyn BackupTarget;

    /// Whether this side has closed the line for some time: errors then are not failures.
    fn is_paused(&self) -> bool {
        false
    }

    /// The repository.
    ///
    /// # Errors
    /// Errors of reaching it.
    fn id(&self) -> Result<RepositoryId>;

    /// Claims a machine there until the result is dropped: no other process adds points to it.
    ///
    /// # Errors
    /// `Busy` if another backup or copy has it.
    fn claim(&self, machine: &MachineName) -> Result<Box<dyn Any>>;

    /// The points of a machine there. Without their configuration and files.
    ///
    /// # Errors
    /// Errors of reading its catalog.
    fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>>;

    /// Protects the data of a point there, which is a base, until the next call. Returns false if it is not there any
    /// more.
    ///
    /// # Errors
    /// Errors of reading its catalog.
    fn keep_base(&self, base: &PointDocument) -> Result<bool>;

    /// Names the point whose disks are stored next, in its order. The other site may read its disks until the answer is
    /// dropped.
    ///
    /// # Errors
    /// Errors of reaching it.
    fn announce(&self, announcement: &Announcement<'_>) -> Result<Announced> {
        Ok(Announced::nothing(announcement.disks.len()))
    }

    /// What the other side has at the base of the disk that is started next: read here. Content can be sent as what differs
    /// from it.
    fn compare_with(&self, _base: Option<Arc<dyn Disk>>) {}

    /// Adds a point whose disks are stored.
    ///
    /// # Errors
    /// As for [`BackupTarget::put_point`].
    fn add_point(&self, document: PointDocument, files: &CarriedFiles) -> Result<PointDocument>;

    /// The traffic so far.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    /// Content that was written, and is not stored there yet, in bytes.
    fn pending_bytes(&self) -> u64 {
        0
    }

    /// Whether the machine has to be planned again, because the process that wrote has ended; then joins the next one.
    ///
    /// # Errors
    /// Errors of joining.
    fn begin_again(&self) -> Result<bool>;
}

impl Remote for SharedWriter<'_> {
    fn target(&self) -> &dyn BackupTarget {
        self
    }

    fn id(&self) -> Result<RepositoryId> {
        Ok(*self.repository()?.id())
    }

    fn claim(&self, machine: &MachineName) -> Result<Box<dyn Any>> {
        Ok(Box::new(self.repository()?.claim_machine(machine)?))
    }

    fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        Catalog::new(&self.repository()?).points(machine)
    }

    fn keep_base(&self, base: &PointDocument) -> Result<bool> {
        self.keep(base)
    }

    fn add_point(
        &self,
        mut document: PointDocument,
        files: &CarriedFiles,
    ) -> Result<PointDocument> {
        let files = files.for_point(&*self.repository()?)?;
        let (facts, files) = files.unzip();
        document.files = facts;
        self.put_point(&document, files.as_deref())?;
        Ok(document)
    }

    fn begin_again(&self) -> Result<bool> {
        if !self.is_lost() {
            return Ok(false);
        }
        tracing::warn!(
            "the process that wrote the other repository has ended unexpectedly: starting again"
        );
        self.join_again().map(|()| true)
    }
}
