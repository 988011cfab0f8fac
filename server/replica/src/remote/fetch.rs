//! Copies that the receiving side asks for: it dials, and the roles are swapped.
//!
//! ```text
//! dials, receives                                  has the points
//!   fetch: machines, rate …          ─▶
//!          the messages of a copy, from the other side: ◀─ hello, claim, …
//!                                                       ◀─ "told": the progress
//!   RATE, when it changes            ─▶
//!                                                       ◀─ ended: the result of all machines, or the error
//! ```
//!
//! # Invariants
//!
//! 1. The side that has the points reads those that the link may fetch, and says of no other whether it is there.
//! 2. It adds nothing there but what was asked for: names of machines are checked by the receiver.
//! 3. Its reports are only shown. Added points count by the receiver's own catalog.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_line::{Class, Frame, Line, Received};
use coldrise_session::SharedWriter;
use coldrise_store::{MachineName, RepositoryId};
use serde::{Deserialize, Serialize};

use super::fetch_progress::FetchProgress;
use super::live::{LiveAnswer, LiveOpening};
use super::messages::{Answer, Ask, Failure, MESSAGE, PART, Parts, RATE, VERSION, broken, send};
use super::receiver::{Terms, receive};
use super::{CopiedPoint, CopyProgress, CopySummary, MachineCopy, Traffic};

/// Interval of looking whether the server ends.
const INTERVAL: Duration = Duration::from_millis(200);

/// The request of the side that dials.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FetchRequest {
    /// The machines; empty: all that it may have.
    pub machines: Vec<MachineName>,
    /// The name that the only machine of `machines` gets.
    pub rename: Option<MachineName>,
    /// Also points that are older than the youngest one that it has.
    pub is_all: bool,
    /// Of each machine only the newest points that it does not have.
    pub last: Option<usize>,
    /// The limit on what is sent, in bytes per second.
    pub rate_bytes_per_second: Option<u64>,
}

/// The reports of the side that serves the points.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FetchReport {
    /// Each machine and its name there, before any is copied.
    Machines(Vec<(MachineName, MachineName)>),
    Progress {
        disk: String,
        is_finishing: bool,
        done_bytes: u64,
        total_bytes: u64,
        read_bytes: u64,
        stored_bytes: u64,
        traffic: Traffic,
    },
    Point {
        machine: MachineName,
        point: CopiedPoint,
        traffic: Traffic,
    },
    Machine(Box<MachineCopy>),
}

/// The first message on a line.
pub enum Opening {
    /// The side that dials sends copies.
    Copies(Greeting),
    /// It wants copies.
    Fetch(FetchRequest),
    /// It sends the marks of a session.
    Live(LiveOpening),
}

/// The greeting of a side that sends copies.
#[derive(Clone, Copy)]
pub struct Greeting {
    version: u32,
    repository: RepositoryId,
}

impl Greeting {
    /// Takes its copies over `line` until it ends. `prefix` begins the names of the machines that it may see.
    ///
    /// # Errors
    /// Errors of the line and of the repository; `Interrupted` once `cancel` is set.
    pub fn receive(
        self,
        line: &dyn Line,
        remote: &SharedWriter<'_>,
        prefix: &str,
        cancel: &AtomicBool,
    ) -> Result<()> {
        let first = Ask::Hello { version: self.version, repository: self.repository };
        receive(line, remote, Terms { prefix, only: &[] }, Some(first), None, cancel)
    }
}

impl Opening {
    /// Waits for the first message; `None` if the line was closed instead.
    ///
    /// # Errors
    /// Errors of the line; `Unsupported` for another version, which is sent to the other side; `Interrupted` once `cancel`
    /// is set.
    pub fn of(line: &dyn Line, cancel: &AtomicBool) -> Result<Option<Opening>> {
        let mut parts = Parts::default();
        let ask = loop {
            if cancel.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            }
            let frame = match line.receive(&[Class::Control], INTERVAL)? {
                Received::Frame { frame, .. } => frame,
                Received::Nothing => continue,
                Received::Closed => return Ok(None),
            };
            if ![PART, MESSAGE].contains(&frame.kind) {
                return Err(broken("no greeting"));
            }
            if let Some((ask, _)) = parts.take::<Ask>(frame.kind, &frame.body)? {
                break ask;
            }
        };
        match ask {
            Ask::Fetch { version, request } => Opening::Fetch(request).checked(line, version),
            Ask::Live { version, opening } => Opening::Live(opening).checked(line, version),
            // The receiver looks at its version.
            Ask::Hello { version, repository } => {
                Ok(Some(Opening::Copies(Greeting { version, repository })))
            }
            _ => Err(broken("no greeting")),
        }
    }

    fn checked(self, line: &dyn Line, version: u32) -> Result<Option<Opening>> {
        if version == VERSION {
            return Ok(Some(self));
        }
        let error = other_version();
        self.refuse(line, &error)?;
        Err(error)
    }

    /// Says no, and why.
    ///
    /// # Errors
    /// Errors of the line.
    pub fn refuse(&self, line: &dyn Line, error: &Error) -> Result<()> {
        match self {
            Opening::Copies(_) => send(line, &Answer::Failed(Failure::of(error)), &[]),
            Opening::Fetch(_) => send(line, &Ask::Ended { result: Err(Failure::of(error)) }, &[]),
            Opening::Live(_) => send(line, &LiveAnswer::Failed(Failure::of(error)), &[]),
        }
    }
}

/// Another version of the messages.
pub(super) fn other_version() -> Error {
    let text = "the two sites run versions of Coldrise that do not understand each other";
    Error::new(ErrorKind::Unsupported, text).advise("install the same version at both")
}

/// The result of a fetch.
pub struct Fetched {
    /// As of a copy. If the line was lost, as far as it was reported.
    pub copied: Result<CopySummary>,
    /// Why the line was lost, if it was: another one may do.
    pub loss: Option<Error>,
    /// The traffic, as far as it was reported.
    pub traffic: Traffic,
}

/// Fetches copies from the side that was dialled, and closes the line. `prefix` begins the names that the machines get; the other
/// side sees no others.
pub fn fetch(
    line: &dyn Line,
    remote: &SharedWriter<'_>,
    request: &FetchRequest,
    prefix: &str,
    progress: &dyn CopyProgress,
    cancel: &AtomicBool,
) -> Fetched {
    let mut fetch_progress = FetchProgress::new(progress, prefix);
    let only = match &request.rename {
        Some(name) => std::slice::from_ref(name),
        None => &request.machines[..],
    };
    let ask = Ask::Fetch { version: VERSION, request: request.clone() };
    let received = send(line, &ask, &[]).and_then(|()| {
        receive(line, remote, Terms { prefix, only }, None, Some(&mut fetch_progress), cancel)
    });
    line.close();
    fetch_progress.result(received)
}

/// Limits from now on what the other side of a fetch sends.
///
/// # Errors
/// Errors of the line.
pub fn limit_fetch(line: &dyn Line, bytes_per_second: Option<u64>) -> Result<()> {
    let body = bytes_per_second.unwrap_or(0).to_le_bytes().to_vec();
    line.send(Class::Control, Frame { stream: 0, kind: RATE, body })
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
