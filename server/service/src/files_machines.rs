//! Machines that read file systems for the API. Each is a run (`files serve`), so a restart of the service
//! disturbs none, and the runs' folder says which there are.
//!
//! ```text
//!   request ──lock RUNS/ID/use, RUNS/ID/machine/port──▶ QEMU ◀── run ID: session, nbdkit
//! ```
//!
//! A conversation has a machine for itself. If the machine of a point is in use for longer than a moment, a second
//! one is started, so that a long download does not keep others from browsing. If as many machines run as
//! there may be, the one that is unused longest is ended first. The service holds its lock until it is gone, so no
//! conversation loses its machine.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use coldrise_block::{Error, ErrorKind, HeldLock, Result};
use coldrise_files::{Client, Limits};
use coldrise_requests::CommandLine;
use coldrise_runs::{FilesPoint, FilesRecord, MachineSocket, RunId, State};
use parking_lot::Mutex;

use crate::jobs::NewRun;
use crate::service::Service;

/// The command of the runs.
const KIND: &str = "files";
/// Maximum number of machines. Each needs 512 MiB of memory. One less than the host's bound for each
/// user, so that `coldrise files` always finds a place.
const MAX_MACHINES: usize = 3;
/// Maximum number of machines of the same points.
const MAX_SAME: usize = 2;
/// A machine that others use is waited for, before a second one is started.
const SHORT_WAIT: Duration = Duration::from_secs(2);
/// A free machine is waited for, at most.
const PATIENCE: Duration = Duration::from_secs(30);
/// A run has its machine within this time; so has the machine its answer to the greeting.
const START_PATIENCE: Duration = Duration::from_secs(120);
/// The longest conversation.
const TIME_LIMIT: Duration = Duration::from_secs(24 * 3600);
const INTERVAL: Duration = Duration::from_millis(20);
/// Interval of looking at the run of a machine that is waited for.
const RUN_INTERVAL: Duration = Duration::from_secs(1);

/// Held while a machine is started: they start one after the other.
static STARTING: Mutex<()> = Mutex::new(());

/// Fails if the caller has gone.
pub(crate) type LookAfter<'a> = &'a dyn Fn() -> Result<()>;

/// A machine that one request talks to.
pub(crate) struct Conversation<'a> {
    service: &'a Service,
    run: RunId,
    /// The points in the machine.
    pub(crate) points: Vec<FilesPoint>,
    stream: UnixStream,
    /// Held while the request talks.
    in_use: HeldLock,
}

impl<'a> Conversation<'a> {
    /// Takes the machine of points of one machine, or starts one. Call this on a thread for blocking work.
    ///
    /// # Errors
    /// `Busy` if all machines are in use; those of the run that starts it, and of `look_after`.
    pub(crate) fn begin(
        service: &'a Service,
        machine: &str,
        addresses: &[String],
        caller: &str,
        look_after: LookAfter<'_>,
    ) -> Result<Conversation<'a>> {
        // Since when all that there are have been in use: not since the start of one.
        let (began, mut busy_since) = (Instant::now(), Instant::now());
        loop {
            look_after()?;
            let fitting = fitting(service, addresses)?;
            for (run, record) in &fitting {
                if let Some(conversation) = take(service, run, record)? {
                    return Ok(conversation);
                }
            }
            let is_due = fitting.is_empty() || busy_since.elapsed() >= SHORT_WAIT;
            if is_due && fitting.len() < MAX_SAME {
                if let Some(_starting) = STARTING.try_lock() {
                    // Another request may just have started it.
                    if self::fitting(service, addresses)?.len() == fitting.len()
                        && make_room(service)?
                    {
                        start(service, machine, addresses, caller, look_after)?;
                        busy_since = Instant::now();
                        continue;
                    }
                }
            }
            if began.elapsed() > PATIENCE {
                let text = "all machines that read file systems are in use, such as by downloads";
                return Err(Error::new(ErrorKind::Busy, text).advise("try again later"));
            }
            std::thread::sleep(INTERVAL);
        }
    }

    /// Talks with the machine, then leaves it to others. At most `content_bytes` of content are taken.
    ///
    /// # Errors
    /// Those of `talk`. After a `ToolFailed` the machine is ended: it has crashed, or answered nonsense.
    pub(crate) fn talk<T>(
        self,
        content_bytes: u64,
        look_after: LookAfter<'_>,
        talk: impl FnOnce(&mut Client<'_>, &[FilesPoint]) -> Result<T>,
    ) -> Result<T> {
        let limits = Limits { content_bytes, time: TIME_LIMIT };
        let mut looked = Instant::now();
        let look_after = || {
            look_after()?;
            if looked.elapsed() < RUN_INTERVAL {
                return Ok(());
            }
            looked = Instant::now();
            failure(self.service, &self.run).map_or(Ok(()), Err)
        };
        let done = Client::greet(self.stream, START_PATIENCE, limits, look_after)
            .and_then(|mut client| talk(&mut client, &self.points));
        let _ = self.in_use.file().set_modified(SystemTime::now());
        if done.as_ref().is_err_and(|error| error.kind() == ErrorKind::ToolFailed) {
            end(self.service, &self.run);
        }
        done
    }
}

/// The machines that have exactly these points.
fn fitting(service: &Service, addresses: &[String]) -> Result<Vec<(RunId, FilesRecord)>> {
    let own = service.options.repo.as_ref().and_then(|path| path.canonicalize().ok());
    let own = own.unwrap_or_default();
    let mut machines = service.runs.files_machines()?;
    machines.retain(|(_, record)| {
        own.as_os_str() == record.repository.as_str()
            && record.points.iter().map(|point| &point.address).eq(addresses)
    });
    Ok(machines)
}

fn take<'a>(
    service: &'a Service,
    run: &RunId,
    record: &FilesRecord,
) -> Result<Option<Conversation<'a>>> {
    let Some(in_use) = service.runs.try_use_files(run)? else { return Ok(None) };
    let _ = in_use.file().set_modified(SystemTime::now());
    // QEMU makes its socket soon after its start.
    let until = Instant::now() + PATIENCE;
    loop {
        match service.runs.connect_machine(run, MachineSocket::Port, INTERVAL) {
            Ok(stream) => {
                let points = record.points.clone();
                return Ok(Some(Conversation {
                    service,
                    run: run.clone(),
                    points,
                    stream,
                    in_use,
                }));
            }
            Err(_) if service.runs.files_machine(run).is_none() => return Ok(None),
            Err(error) if Instant::now() > until => {
                end(service, run);
                return Err(error);
            }
            Err(_) => std::thread::sleep(INTERVAL),
        }
    }
}

/// Ends the machine that is unused longest, if there are as many as there may be. Returns whether another one
/// may start.
fn make_room(service: &Service) -> Result<bool> {
    let mut machines = service.runs.files_machines()?;
    if machines.len() < MAX_MACHINES {
        return Ok(true);
    }
    machines.sort_by_key(|(run, _)| service.runs.files_used(run).unwrap_or(UNIX_EPOCH));
    for (run, _) in &machines {
        if let Some(_in_use) = service.runs.try_use_files(run)? {
            end(service, run);
            return Ok(true);
        }
    }
    Ok(false)
}

/// Ends the run of a machine that this process holds.
fn end(service: &Service, run: &RunId) {
    let until = Instant::now() + PATIENCE;
    let cancelled = service.runs.cancel(run);
    while cancelled.is_ok() && service.runs.files_machine(run).is_some() && Instant::now() < until {
        std::thread::sleep(INTERVAL);
    }
}

/// Starts a run, and returns when its machine can be taken.
fn start(
    service: &Service,
    machine: &str,
    addresses: &[String],
    caller: &str,
    look_after: LookAfter<'_>,
) -> Result<()> {
    let run = service.queue.enqueue(NewRun {
        kind: KIND.to_owned(),
        machine: Some(machine.to_owned()),
        arguments: addresses
            .iter()
            .fold(CommandLine::new("files serve"), CommandLine::argument)
            .words(),
        requested_by: Some(caller.to_owned()),
        job: None,
    })?;
    let until = Instant::now() + START_PATIENCE;
    while service.runs.files_machine(&run).is_none() {
        look_after()?;
        if let Some(error) = failure(service, &run) {
            return Err(error);
        }
        if Instant::now() > until {
            let _ = service.queue.cancel(&run);
            let text =
                "the machine that reads the file systems did not start: the host may be busy";
            return Err(Error::new(ErrorKind::Busy, text).advise("try again later"));
        }
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

/// Why the run of a machine has ended, if it has.
fn failure(service: &Service, run: &RunId) -> Option<Error> {
    // A run that waits is not there yet.
    let record = service.runs.read(run).ok().filter(|record| record.state != State::Running)?;
    let failure = record.result.and_then(|result| result.error);
    let kind = failure.as_ref().and_then(|error| ErrorKind::from_word(&error.kind));
    let text = failure.map_or_else(
        || format!("run {run}, which reads the file systems, has ended"),
        |failure| failure.message,
    );
    Some(Error::new(kind.unwrap_or(ErrorKind::Busy), text))
}
