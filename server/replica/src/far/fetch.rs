//! Copies that the receiving side asks for: it dials, and the roles are swapped.
//!
//! ```text
//! dials, receives                                  has the points
//!   fetch: machines, rate …          ─▶
//!          the messages of a copy, from the other side: ◀─ hello, claim, …
//!                                                       ◀─ told: what was reached
//!   RATE, when it changes            ─▶
//!                                                       ◀─ ended: all machines were told, or why not
//! ```
//!
//! # Invariants
//!
//! 1. The side that has the points reads those that the link may fetch, and says of no other whether it is there.
//! 2. It adds nothing there but what was asked for: names of machines are checked by the receiver.
//! 3. What it tells is only shown. What was added counts by the receiver's own catalog.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Phase, Progress, ProgressState, Result};
use coldrise_ingest::RateLimit;
use coldrise_inventory::MachinePattern;
use coldrise_line::{Class, Frame, Line, Received};
use coldrise_session::SharedWriter;
use coldrise_store::{MachineName, RepositoryId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::heard::Heard;
use super::line_far::LineFar;
use super::messages::{broken, send, Answer, Ask, Failure, Parts, MESSAGE, PART, RATE, VERSION};
use super::receiver::{receive, Terms};
use super::{FarSide, Traffic};
use crate::copy::{
    copy, CopiedPoint, CopyProgress, CopyRequest, CopyStep, CopySummary, MachineCopy,
};
use crate::source::CopySource;

/// Interval of looking whether the server ends.
const INTERVAL: Duration = Duration::from_millis(200);
/// Interval of telling the progress within a disk.
const TELL_INTERVAL: Duration = Duration::from_millis(500);

/// What the side that dials wants to have.
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

/// What the side that serves the points tells.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Told {
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
        far: &SharedWriter<'_>,
        prefix: &str,
        cancel: &AtomicBool,
    ) -> Result<()> {
        let first = Ask::Hello { version: self.version, repository: self.repository };
        receive(line, far, Terms { prefix, only: &[] }, Some(first), None, cancel)
    }
}

impl Opening {
    /// Waits for the first message; `None` if the line was closed instead.
    ///
    /// # Errors
    /// Errors of the line; `Unsupported` for another version, which the other side is told; `Interrupted` once `cancel`
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
            Ask::Fetch { version, request } => {
                let opening = Opening::Fetch(request);
                match version {
                    VERSION => Ok(Some(opening)),
                    _ => {
                        let error = other_version();
                        opening.refuse(line, &error)?;
                        Err(error)
                    }
                }
            }
            // The receiver looks at its version.
            Ask::Hello { version, repository } => {
                Ok(Some(Opening::Copies(Greeting { version, repository })))
            }
            _ => Err(broken("no greeting")),
        }
    }

    /// Says no, and why.
    ///
    /// # Errors
    /// Errors of the line.
    pub fn refuse(&self, line: &dyn Line, error: &Error) -> Result<()> {
        match self {
            Opening::Copies(_) => send(line, &Answer::Failed(Failure::of(error)), &[]),
            Opening::Fetch(_) => send(line, &Ask::Ended { result: Err(Failure::of(error)) }, &[]),
        }
    }
}

/// Another version of the messages.
pub(super) fn other_version() -> Error {
    let text = "the two sites run versions of Coldrise that do not understand each other";
    Error::new(ErrorKind::Unsupported, text).advise("install the same version at both")
}

/// Copies what a fetch asks for, and `allowed` lets it have, to the side that asked. `limit`: on the bytes read.
///
/// # Errors
/// Errors of the line, and what ended the copy, which the other side is told; `Interrupted` once `cancel` is set.
pub fn serve_fetch(
    line: Arc<dyn Line>,
    source: &dyn CopySource,
    request: &FetchRequest,
    allowed: &[MachinePattern],
    limit: Option<Arc<RateLimit>>,
    cancel: &Arc<AtomicBool>,
) -> Result<()> {
    line.set_rate(request.rate_bytes_per_second);
    let far = LineFar::for_fetch(line, &source.id(), Arc::clone(cancel))?;
    let copied = wanted(source, request, allowed).and_then(|machines| {
        if machines.is_empty() {
            return Ok(CopySummary::default());
        }
        let request = CopyRequest {
            machines,
            rename: request.rename.clone(),
            is_all: request.is_all,
            last: request.last,
            limit,
            ..CopyRequest::default()
        };
        let teller = Teller { far: &far, last: Mutex::default() };
        copy(source, &far, &request, &teller, cancel)
    });
    let (result, copied) = match copied {
        Ok(_) => (Ok(far.traffic()), Ok(())),
        Err(error) => (Err(Failure::of(&error)), Err(error)),
    };
    // Over a line that was lost, nobody hears it.
    let told = far.tell(&Ask::Ended { result }, &[]);
    copied.and(told)
}

/// The machines that are copied. Whether a machine exists that it may not have is not revealed.
fn wanted(
    source: &dyn CopySource,
    request: &FetchRequest,
    allowed: &[MachinePattern],
) -> Result<Vec<MachineName>> {
    let may =
        |machine: &MachineName| allowed.iter().any(|pattern| pattern.matches(machine.as_str()));
    let there: Vec<MachineName> = source.machines()?.into_iter().filter(may).collect();
    if request.machines.is_empty() {
        return Ok(there);
    }
    match request.machines.iter().find(|machine| !there.contains(machine)) {
        None if request.rename.is_some() && request.machines.len() != 1 => {
            Err(Error::new(ErrorKind::InvalidInput, "another name is for one machine"))
        }
        None => Ok(request.machines.clone()),
        Some(machine) => {
            let text = format!("there is no machine {machine} that may be fetched from there");
            Err(Error::new(ErrorKind::Forbidden, text)
                .advise("which machines may be fetched is said there: coldrise link list"))
        }
    }
}

/// Tells the other side how far the copy is.
struct Teller<'a> {
    far: &'a LineFar,
    /// When the progress was told last.
    last: Mutex<Option<Instant>>,
}

impl Teller<'_> {
    fn tell(&self, told: Told) {
        if let Err(error) = self.far.tell(&Ask::Told { told }, &[]) {
            // The copy finds out, too.
            tracing::debug!("not sent: {}", error.full_message());
        }
    }
}

impl Progress for Teller<'_> {
    fn update(&self, state: &ProgressState<'_>) {
        let Some(mut last) = self.last.try_lock() else { return };
        let is_due = last.is_none_or(|last| last.elapsed() >= TELL_INTERVAL);
        if !is_due && state.done_bytes < state.total_bytes {
            return;
        }
        *last = Some(Instant::now());
        self.tell(Told::Progress {
            disk: state.disk.to_owned(),
            is_finishing: state.phase == Phase::Finishing,
            done_bytes: state.done_bytes,
            total_bytes: state.total_bytes,
            read_bytes: state.read_bytes,
            stored_bytes: state.stored_bytes,
            traffic: self.far.traffic(),
        });
    }
}

impl CopyProgress for Teller<'_> {
    fn reached(&self, step: &CopyStep<'_>) {
        self.tell(match *step {
            CopyStep::Machines(machines) => Told::Machines(machines.to_vec()),
            CopyStep::Point { machine, point } => Told::Point {
                machine: machine.clone(),
                point: point.clone(),
                traffic: self.far.traffic(),
            },
            CopyStep::Machine(machine) => Told::Machine(Box::new(machine.again())),
        });
    }
}

/// The result of a fetch.
pub struct Fetched {
    /// As of a copy. If the line was lost, as far as it was told.
    pub copied: Result<CopySummary>,
    /// Why the line was lost, if it was: another one may do.
    pub loss: Option<Error>,
    /// What was sent, as far as it was told.
    pub traffic: Traffic,
}

/// Fetches copies from the side that was dialled, and closes the line. `prefix` begins the names that the machines get; the other
/// side sees no others.
pub fn fetch(
    line: &dyn Line,
    far: &SharedWriter<'_>,
    request: &FetchRequest,
    prefix: &str,
    progress: &dyn CopyProgress,
    cancel: &AtomicBool,
) -> Fetched {
    let mut heard = Heard::new(progress, prefix);
    let only = match &request.rename {
        Some(name) => std::slice::from_ref(name),
        None => &request.machines[..],
    };
    let ask = Ask::Fetch { version: VERSION, request: request.clone() };
    let received = send(line, &ask, &[])
        .and_then(|()| receive(line, far, Terms { prefix, only }, None, Some(&mut heard), cancel));
    line.close();
    heard.result(received)
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
