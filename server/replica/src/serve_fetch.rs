//! The side of a fetch that has the points; see `remote::fetch`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_block::{Phase, Progress, ProgressState};
use coldrise_ingest::RateLimit;
use coldrise_inventory::MachinePattern;
use coldrise_line::Line;
use coldrise_store::MachineName;
use parking_lot::Mutex;

use crate::copy::{CopyRequest, copy};
use crate::remote::messages::{Ask, Failure};
use crate::remote::{
    CopyProgress, CopyStep, CopySummary, FetchReport, FetchRequest, LineRemote, Remote,
};
use crate::source::CopySource;

/// Interval of telling the progress within a disk.
const TELL_INTERVAL: Duration = Duration::from_millis(500);

/// Copies what a fetch asks for, and `allowed` lets it have, to the side that asked. `limit`: on the bytes read.
///
/// # Errors
/// Errors of the line, and the error that ended the copy, which is sent to the other side; `Interrupted` once `cancel` is set.
pub fn serve_fetch(
    line: Arc<dyn Line>,
    source: &dyn CopySource,
    request: &FetchRequest,
    allowed: &[MachinePattern],
    limit: Option<Arc<RateLimit>>,
    cancel: &Arc<AtomicBool>,
) -> Result<()> {
    line.set_rate(request.rate_bytes_per_second);
    let remote = LineRemote::for_fetch(line, &source.id(), Arc::clone(cancel))?;
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
        let teller = Teller { remote: &remote, last: Mutex::default() };
        copy(source, &remote, &request, &teller, cancel)
    });
    let (result, copied) = match copied {
        Ok(_) => (Ok(remote.traffic()), Ok(())),
        Err(error) => (Err(Failure::of(&error)), Err(error)),
    };
    // Over a lost line it does not arrive.
    let sent = remote.tell(&Ask::Ended { result }, &[]);
    copied.and(sent)
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
            Err(Error::new(ErrorKind::InvalidInput, "another name requires exactly one machine"))
        }
        None => Ok(request.machines.clone()),
        Some(machine) => {
            let text = format!("there is no machine {machine} that may be fetched from there");
            Err(Error::new(ErrorKind::Forbidden, text)
                .advise("coldrise link list at that site shows which machines may be fetched"))
        }
    }
}

/// Tells the other side how far the copy is.
struct Teller<'a> {
    remote: &'a LineRemote,
    /// When the progress was sent last.
    last: Mutex<Option<Instant>>,
}

impl Teller<'_> {
    fn tell(&self, report: FetchReport) {
        if let Err(error) = self.remote.tell(&Ask::FetchProgress { report }, &[]) {
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
        self.tell(FetchReport::Progress {
            disk: state.disk.to_owned(),
            is_finishing: state.phase == Phase::Finishing,
            done_bytes: state.done_bytes,
            total_bytes: state.total_bytes,
            read_bytes: state.read_bytes,
            stored_bytes: state.stored_bytes,
            traffic: self.remote.traffic(),
        });
    }
}

impl CopyProgress for Teller<'_> {
    fn reached(&self, step: &CopyStep<'_>) {
        self.tell(match *step {
            CopyStep::Machines(machines) => FetchReport::Machines(machines.to_vec()),
            CopyStep::Point { machine, point } => FetchReport::Point {
                machine: machine.clone(),
                point: point.clone(),
                traffic: self.remote.traffic(),
            },
            CopyStep::Machine(machine) => FetchReport::Machine(Box::new(machine.again())),
        });
    }
}
