//! The marks of a session on their way to another site.
//!
//! ```text
//! source                                             remote side
//!   live: machine, session                     ─▶    ◀─ state: the times of the marks that it has
//!   (a copy of a point, over a line of its own, if both have no mark in common)
//!   begin: the point, and the mark it shows    ─▶    ◀─ ready: a new session, with that mark
//!   or back: a mark that both have             ─▶    ◀─ ready: the disks are as they were then
//!   CHANGES of all disks (bulk, in any order)  ─▶
//!   mark: the number of CHANGES, the time      ─▶    ◀─ done: the mark is durable
//!   current: nothing has changed since         ─▶
//! ```
//!
//! The machine does not wait for it: if the line is slower than the machine writes, a later mark follows, with the newest
//! content only.
//!
//! # Invariants
//!
//! 1. A mark is made when all its changes have been written, and `done` is sent when it is durable.
//! 2. The changes of a mark count from the last one that was done on this line, or from which it began: no others.
//! 3. Changes are written only to a session that was published for this link, whose machine begins with its prefix.

mod frames;
mod receiver;

use coldrise_session::Round;
use coldrise_store::{DiskName, MachineName, PointName, RepositoryId, SessionName};
use serde::{Deserialize, Serialize};

use super::messages::Failure;

pub(crate) use frames::{CHANGES, Changed};
pub use receiver::{LiveReceivers, LiveTerms};

/// The session whose marks are sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveOpening {
    /// The machine, by its name at the source.
    pub machine: MachineName,
    /// The repository of the source.
    pub repository: RepositoryId,
    /// The session.
    pub session: SessionName,
    /// When it was published there, in milliseconds since 1970.
    pub created_at_ms: u64,
    /// Its disks, and their sizes in bytes.
    pub disks: Vec<(DiskName, u64)>,
}

/// A mark, as it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LiveMark {
    pub(crate) time_ns: u64,
    pub(crate) round: Option<Round>,
}

/// The requests of the source, after the opening.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LiveAsk {
    Begin {
        point: PointName,
        mark: LiveMark,
    },
    Back {
        time_ns: u64,
    },
    /// `changes`: the number of frames that belong to it.
    Mark {
        mark: LiveMark,
        changes: u64,
        current_ms: u64,
    },
    Current {
        current_ms: u64,
    },
}

/// The answers of the remote side.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LiveAnswer {
    State { session: Option<SessionName>, times_ns: Vec<u64> },
    Ready { session: SessionName },
    Done { time_ns: u64 },
    Failed(Failure),
}
