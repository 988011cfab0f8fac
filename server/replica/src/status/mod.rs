//! The copies of this repository elsewhere, and how far behind they are.
//!
//! ```text
//!   copy() ─▶ Recorder ─▶ REPOSITORY/copies/TARGET ─▶ StatusReader ─▶ copies, doctor, link list, service
//!             one record of each machine                  beside the catalog of now
//! ```
//!
//! A record says what the other repository had when it was asked last. Readers compare it with the catalog as it is
//! now, so that a copy that does not run falls behind by itself. What no record proves is never shown as success.
//!
//! # Order of writes
//!
//! 1. A point is in the other repository before a record here names it. A crash in between leaves a record that is
//!    too old: it shows a copy that is there as missing, until the next copy asks.
//! 2. A document is replaced as a whole, under a lock of the folder: copies to one target that run at once change
//!    the records of their own machines only.
//! 3. A record is written when a point has been copied, when a machine has been dealt with, and every
//!    [`WRITE_INTERVAL`] in between. A copy whose record is older than [`ALIVE_FOR`] was killed.
//!
//! Nothing depends on these documents but what people see: a damaged one counts as unknown, and the next copy replaces
//! it.

mod document;
mod recorder;
mod report;
mod sizes;
mod watching;

use std::time::Duration;

pub use document::{CopyCounts, CopyRecords, CopyTarget, Cut, FailedCopy};
pub(crate) use recorder::{Recorder, Seen};
pub use report::{CopiesStamp, CopyState, MachineCopies, RunningCopy, StatusReader, TargetCopies};
pub(crate) use watching::Watching;

/// Interval of writing the record of a copy that runs.
pub(crate) const WRITE_INTERVAL: Duration = Duration::from_secs(10);
/// A record of a copy that has not ended and is older than this was left by one that was killed.
pub(crate) const ALIVE_FOR: Duration = Duration::from_secs(35);
