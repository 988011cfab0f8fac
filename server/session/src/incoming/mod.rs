//! Points that are still on their way to this repository, and sessions over them.
//!
//! ```text
//!   the process that receives the copy                   a front end
//!     begun/HASH        what has arrived (a map)  ◀─ reads ─ IncomingDisk, below the session's layers
//!     begun/HASH.point  what differs from the base ◀─ reads ──   │
//!     begun/HASH.socket ◀──────────── asks for the rest ─────────┘
//!        └─▶ the other site, over the line; keeps what comes
//! ```
//!
//! Arrived ranges, and ranges equal to the base, are read from the noted map. Everything else comes from the
//! other site through the socket. The socket's process keeps the pieces and notes them, too: a second read is local.
//!
//! # Invariants
//!
//! 1. A byte is read from the noted map only before `end_bytes`, or where the announcement says that it does not differ
//!    from the very base (its root) that the note names.
//! 2. A front end leases the maps of a note, then looks whether the note still names them. A gc reads the notes before the
//!    leases: one of the two names the maps.
//! 3. A session's document names no map until its point is complete. So nothing that reads sessions takes the part for
//!    the whole, and such a session is neither sealed nor ended with a seal.
//! 4. An incoming point is not in the catalog.
//!
//! # Crashes
//!
//! | what ends | what follows |
//! |---|---|
//! | the receiving process, or the line | parts that are not here give I/O errors, after 10 s for a front end that was connected. Noted parts stay readable. The next copy of the point opens the socket again, and front ends find it |
//! | the source | the same |
//! | the front end | the session is opened again, with all that was captured |
//! | a gc in between | the notes, the leases and the age of the notes: a note stays as long as its session |
//! | the receiver between the catalog's commit and the end of the note | the catalog counts: the point is complete. The next copy of the machine removes the note |
//! | the front end between the two writes of a settling session | there is one write: the document with the point's maps |
//!
//! A point whose copy does not continue, because it was forgotten at its source, is removed by the next copy of the machine, by a gc
//! after a month, or by hand ([`crate::IncomingRemoval`]).
//!
//! When another point of the machine begins, the note stays for the session. Missing parts of the first point then stay
//! missing, until a copy of it continues.

mod arrival;
mod client;
mod disk;
mod partial;
mod ranges;
mod socket;

use std::sync::Arc;
use std::time::SystemTime;

use coldrise_block::{Disk, Error, ErrorKind, Result};
use coldrise_store::{MachineName, MapRoot, PointDocument, PointSelector, Repository, SessionName};
use serde::{Deserialize, Serialize};

use crate::disks::point_disk::base_disk;
use crate::hexadecimal;
use crate::session_folder::document::{SessionDisk, SessionDocument};

pub(crate) use arrival::{check_arrived, finish_arrival};
pub use partial::{PartialCopy, PartialDisk};
pub use ranges::ByteRanges;
pub use socket::{FetchSocket, PieceSource};

/// A point as its source announces it, before it is copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingContent {
    /// As it will be in the catalog; its disks name no content yet.
    pub document: PointDocument,
    /// Of each disk, in the document's order.
    pub differences: Vec<Differences>,
    /// The files that the point carries, encoded.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "hexadecimal")]
    pub files: Vec<u8>,
}

/// The differences of a disk from its base.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Differences {
    /// The map of the base here; `None`: from zeroes.
    pub base: Option<MapRoot>,
    /// The ranges that may differ.
    pub ranges: ByteRanges,
}

/// A point that is on its way here.
#[derive(Clone, Debug)]
pub struct IncomingPoint {
    /// The arrived part.
    pub partial: PartialCopy,
    /// The announced content.
    pub point: IncomingContent,
}

impl IncomingPoint {
    /// All points that are on their way.
    ///
    /// # Errors
    /// Errors of the drive, and of reading the catalog.
    pub fn all(repository: &Repository) -> Result<Vec<IncomingPoint>> {
        let mut all = Vec::new();
        for partial in PartialCopy::all(repository)? {
            if arrival::cataloged(repository, &partial)?.is_some() {
                continue;
            }
            let announced = partial.announced(repository)?;
            all.extend(announced.map(|point| IncomingPoint { partial, point }));
        }
        Ok(all)
    }

    /// A sign of changes: it differs when a note or a socket was made, replaced or removed since. `None` without notes.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn stamp(repository: &Repository) -> Result<Option<SystemTime>> {
        PartialCopy::stamp(repository)
    }

    /// One of them: the newest of the machine for `latest`.
    ///
    /// # Errors
    /// As for [`IncomingPoint::all`].
    pub fn find(
        repository: &Repository,
        machine: &MachineName,
        selector: &PointSelector,
    ) -> Result<Option<IncomingPoint>> {
        let mut all = IncomingPoint::all(repository)?;
        all.retain(|incoming| incoming.partial.machine == *machine);
        Ok(match selector {
            PointSelector::Exact(point) => all.into_iter().find(|c| c.partial.point == *point),
            PointSelector::Latest(0) => all.pop(),
            PointSelector::Latest(_) => None,
        })
    }

    /// The point on its way over which a session is.
    ///
    /// # Errors
    /// As for [`IncomingPoint::all`].
    pub(crate) fn of_session(
        repository: &Repository,
        session: &SessionDocument,
    ) -> Result<Option<IncomingPoint>> {
        let Some(partial) = PartialCopy::of_session(repository, session)? else { return Ok(None) };
        if arrival::cataloged(repository, &partial)?.is_some() {
            return Ok(None);
        }
        Ok(partial.announced(repository)?.map(|point| IncomingPoint { partial, point }))
    }

    /// The sum of the sizes of the disks.
    pub fn size_bytes(&self) -> u64 {
        self.partial.disks.iter().map(|disk| disk.size_bytes).sum()
    }

    /// The sum of what has not arrived yet. Pieces that were fetched out of turn count as missing.
    pub fn missing_bytes(&self) -> u64 {
        self.differing_bytes(|disk| disk.end_bytes)
    }

    /// How much of what has to come is here, in percent; 100 only for all of it. Neither holes have to come nor what does not
    /// differ from the base.
    pub fn percent_here(&self) -> u64 {
        let (all, missing) = (self.differing_bytes(|_| 0).max(1), self.missing_bytes());
        (u128::from(all - missing.min(all)) * 100 / u128::from(all)) as u64
    }

    /// The differences from the bases behind an offset of each disk.
    fn differing_bytes(&self, behind: impl Fn(&PartialDisk) -> u64) -> u64 {
        let differing = |disk: &PartialDisk| match self.point.differences_of(&self.partial, disk) {
            Some(ranges) => ranges.bytes_behind(behind(disk)),
            None => disk.size_bytes.saturating_sub(behind(disk)),
        };
        self.partial.disks.iter().map(differing).sum()
    }

    /// Whether the other site is connected now, so that what is missing can be fetched.
    pub fn is_reachable(&self, repository: &Repository) -> bool {
        client::is_reachable(repository, &self.partial)
    }

    /// The error of everything that needs a restore point: `NotFound`.
    pub(crate) fn not_complete(&self) -> Error {
        let text = format!(
            "{}/{} is incomplete: {} % of the differing data has arrived",
            self.partial.machine,
            self.partial.point,
            self.percent_here()
        );
        Error::new(ErrorKind::NotFound, text).advise(format!(
            "wait for the end of the copy; coldrise list shows how much has arrived. \
             publish, boot and recover do not wait for it. If the copy will not continue: coldrise forget {}/{}",
            self.partial.machine, self.partial.point
        ))
    }

    /// Looks again whether it is on its way. The caller holds the documents' lock: a process that removes the note of
    /// such a point reads the sessions first.
    pub(crate) fn confirm(&self, repository: &Repository) -> Result<()> {
        match PartialCopy::known(repository, &self.partial)? {
            Some(_) => Ok(()),
            None => {
                let text = format!(
                    "{}/{} is no longer being copied: see coldrise list",
                    self.partial.machine, self.partial.point
                );
                Err(Error::new(ErrorKind::NotFound, text))
            }
        }
    }
}

impl IncomingContent {
    /// The ranges of a noted disk that may differ from its base; `None` if that is unknown, because the note is of another base.
    pub(crate) fn differences_of(
        &self,
        partial: &PartialCopy,
        disk: &PartialDisk,
    ) -> Option<&ByteRanges> {
        let place = partial.disks.iter().position(|other| other.name == disk.name)?;
        let announced = self.document.disks.get(place)?;
        let differences = self.differences.get(place)?;
        let is_same = (&announced.name, announced.size_bytes, differences.base)
            == (&disk.name, disk.size_bytes, disk.base);
        is_same.then_some(&differences.ranges)
    }
}

/// The disk below the layers of a session's disk.
pub(crate) fn session_base(
    repository: &Arc<Repository>,
    session: &SessionDocument,
    described: &SessionDisk,
) -> Result<Arc<dyn Disk>> {
    if session.incoming_created_at_ms.is_none() {
        return Ok(base_disk(repository, described.root, described.size_bytes));
    }
    Ok(Arc::new(disk::IncomingDisk::open(repository, session, described)?))
}

/// The missing part of a session's point, for people; `None` if its point is complete.
///
/// # Errors
/// As for [`IncomingPoint::all`].
pub fn incoming_sentence(
    repository: &Arc<Repository>,
    session: &SessionDocument,
) -> Result<Option<String>> {
    let name: &SessionName = &session.name;
    let address = format!("{}/{}", session.machine, session.point);
    if session.incoming_created_at_ms.is_none() || arrival::arrived(repository, session)?.is_some()
    {
        return Ok(None);
    }
    Ok(Some(match IncomingPoint::of_session(repository, session)? {
        Some(incoming) => format!("session {name}: {}", incoming.sentence(repository)),
        None => format!(
            "session {name}: the note about the copy of {address} is gone or damaged: data that was not fetched yet is missing"
        ),
    }))
}

impl IncomingPoint {
    /// How much is here and what follows, for people.
    pub fn sentence(&self, repository: &Repository) -> String {
        let missing_mib = self.missing_bytes().div_ceil(1 << 20);
        let here = format!(
            "{}/{} is still being copied here: {} % of the differing data has arrived, {missing_mib} MiB are missing",
            self.partial.machine,
            self.partial.point,
            self.percent_here()
        );
        match self.is_reachable(repository) {
            true => format!("{here} and are fetched from the other site when they are read"),
            false => format!(
                "{here}, and the other site is not connected: reading them gives I/O errors until its copy continues"
            ),
        }
    }
}
