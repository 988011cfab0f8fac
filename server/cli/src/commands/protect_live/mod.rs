//! `coldrise protect-live`: captures the writes of a machine that runs elsewhere, and sends time marks to another site.

mod to_site;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use coldrise_block::units::parse_duration;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_live_backup::{LiveOptions, Mode, RoundReport, Rounds, RoundsEnd};
use coldrise_requests::{ProtectLive, Protected, parse_every};
use coldrise_runs::process_run;
use coldrise_session::{Follower, SessionDocument, unpublish};
use coldrise_store::{
    DisplayName, MachineName, MarkRules, PointDocument, PointOrigin, Repository, SessionName,
};
use serde_json::json;

use self::to_site::ToSite;
use super::attach::named_host;
use super::backup::store_live;
use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use crate::units::{show_duration, show_size};
use coldrise_hosting::signals::cancel_flag;

/// Capture the writes of a running machine continuously, until Ctrl-C: back to any time of the last day.
///
/// The machine continues to run where it is. Every 5 seconds its changes since the last time are read, all disks as of
/// one instant, into a session here, and the session gets a time mark: see coldrise marks. live/SESSION@TIME is the machine
/// at that time, for publish, boot, recover, restore, rollback and the others.
///
/// Begins with the machine's latest backup, and reads only what differs; without a backup, one is made first. The guest
/// does not wait for Coldrise: if a time is missed, the next one has its changes. Under QEMU without libvirt the machine
/// stands still for some milliseconds each time. After a kill or a restart, the same command continues. See
/// docs/continuous.md.
///
/// With --to LINK another site gets the marks as they are made, with its own retention, and can boot or recover any of them.
/// For a machine that runs from Coldrise: coldrise protect-live live/SESSION --to LINK; of the other options it takes --rate only. The
/// machine does not wait for it: if the line is slower than the machine writes, marks there are further apart.
#[derive(Debug, Args)]
pub(crate) struct ProtectLiveArguments {
    #[command(flatten)]
    request: ProtectLive,

    /// The folder of the scratch files, as of coldrise backup.
    #[arg(long, value_name = "DIR", display_order = 100)]
    scratch: Option<PathBuf>,
}

/// The machine, and how it is read.
struct Source {
    machine: MachineName,
    /// The name from which that of the machine was derived.
    derived_from: Option<DisplayName>,
    options: LiveOptions,
    disks: Vec<String>,
    session: Option<SessionName>,
    rules: MarkRules,
    /// The source, as the session's document shows it.
    source: String,
}

pub(crate) fn run(invocation: &Invocation, arguments: ProtectLiveArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let ProtectLiveArguments { request, scratch } = arguments;
    let every = parse_every(request.every.as_deref().unwrap_or("5s"))?;
    let consistent_every = request.consistent_every.as_deref().map(parse_duration).transpose()?;
    let subject = request.protected()?;
    let repository = invocation.open()?;
    let to = ToSite::of(&repository, &request)?;
    let (machine, derived_from) = match subject {
        Protected::Machine(machine, derived_from) => (machine, derived_from),
        Protected::Session(session) => {
            // What is read here is sent: the cache is for the copy of the first point.
            let repository = invocation.open_for_disks()?;
            return match to {
                Some(to) => to_site::run(invocation, &repository, &session, &to, &cancel),
                None => Err(Error::new(ErrorKind::InvalidInput, "name the site: --to LINK")),
            };
        }
    };
    let from = request.from.unwrap_or_default();
    let host = match &request.on {
        Some(_) => named_host(&repository, request.on.as_deref())?,
        None => Host::here(),
    };
    let domain = derived_from.as_ref().map_or(machine.as_str(), DisplayName::as_str).to_owned();
    let source = match (&*from, &request.on) {
        ("libvirt", None) => format!("libvirt:{domain}"),
        ("libvirt", Some(on)) => format!("libvirt:{domain} on {on}"),
        (from, None) => from.to_owned(),
        (from, Some(on)) => format!("{from} on {on}"),
    };
    let is_qmp = from.starts_with("qmp:");
    if is_qmp && consistent_every.is_some() && request.agent.is_none() {
        let text = "--consistent-every needs the socket of the guest agent: add --agent SOCKET";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let rules = request.marks.as_deref().map(MarkRules::parse).transpose()?.unwrap_or_default();
    if rules.is_off() {
        let text = "--marks off: the times of a machine that runs elsewhere are its marks";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let protected = Source {
        machine,
        derived_from,
        options: LiveOptions {
            from,
            host,
            connect: request.connect,
            scratch,
            mode: if request.push { Mode::Push } else { Mode::Pull },
            is_quiesced: false,
            agent: request.agent.map(PathBuf::from),
        },
        disks: request.disks,
        session: request.session.as_deref().map(SessionName::parse).transpose()?,
        rules,
        source,
    };
    let mut totals = Totals::default();
    let mut session = protected.session(invocation, &repository, &cancel)?;
    loop {
        let follower = Follower::open(&repository, &session, &protected.source)?;
        let document = follower.document();
        begin(invocation, &document, every);
        let mut rounds = Rounds::new(
            &repository,
            protected.options.clone(),
            &domain,
            &protected.disks,
            consistent_every,
            follower,
        );
        let mut shown = Shown::default();
        let end = beside(invocation, &repository, to.as_ref(), &document.name, &cancel, || {
            rounds.run(
                every,
                &mut |done| {
                    totals.count(done);
                    shown.show(invocation, &document.name, done);
                },
                &cancel,
            )
        })?;
        let has_state = rounds.follower().last_round().is_some();
        drop(rounds);
        match end {
            RoundsEnd::Cancelled(warnings) => {
                warnings.iter().for_each(|warning| invocation.remark(warning));
                return Ok(totals.report(invocation, &document.name));
            }
            RoundsEnd::OtherDisks(how) => {
                invocation.remark(&format!("{how}: a backup is made, and a new session begins"));
                if has_state {
                    invocation.remark(&format!("session {session} keeps what it has"));
                } else {
                    unpublish(&repository, &session, true)?;
                }
                let point = protected.back_up(invocation, &repository, &cancel)?;
                session = protected.publish(&repository, &point, None)?;
            }
        }
    }
}

/// Does `work`, and sends the marks of the session to a site meanwhile. What prevents that does not end the work.
fn beside<T>(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    to: Option<&ToSite>,
    session: &SessionName,
    cancel: &Arc<AtomicBool>,
    work: impl FnOnce() -> T,
) -> T {
    let Some(to) = to else { return work() };
    let is_over = Arc::new(AtomicBool::new(cancel.load(Ordering::Relaxed)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (sent, _) = to.send(invocation, repository, session, &is_over);
            if let Err(error) = sent {
                if error.kind() != ErrorKind::Interrupted {
                    invocation.remark(&format!("nothing more is sent: {}", error.full_message()));
                }
            }
        });
        let done = work();
        is_over.store(true, Ordering::Relaxed);
        done
    })
}

impl Source {
    /// The session that follows the machine, or a new one.
    fn session(
        &self,
        invocation: &Invocation,
        repository: &Arc<Repository>,
        cancel: &Arc<AtomicBool>,
    ) -> Result<SessionName> {
        let name = self.session.as_ref();
        if let Some(found) = Follower::find(repository, &self.machine, name)? {
            return Ok(found.name);
        }
        let is_backup = |point: &PointDocument| {
            matches!(point.origin, PointOrigin::Backup { .. }) && point.quarantine.is_none()
        };
        let point = match repository.newest_point_that(&self.machine, is_backup)? {
            Some(point) => point,
            None => self.back_up(invocation, repository, cancel)?,
        };
        self.publish(repository, &point, name.cloned())
    }

    fn publish(
        &self,
        repository: &Arc<Repository>,
        point: &PointDocument,
        name: Option<SessionName>,
    ) -> Result<SessionName> {
        let rules = self.rules.clone();
        Follower::publish(repository, point, name, &self.source, rules).map(|made| made.name)
    }

    fn back_up(
        &self,
        invocation: &Invocation,
        repository: &Arc<Repository>,
        cancel: &Arc<AtomicBool>,
    ) -> Result<PointDocument> {
        let (machine, derived) = (&self.machine, self.derived_from.clone());
        let name =
            store_live(invocation, machine, derived, self.options.clone(), &self.disks, cancel)?;
        repository.catch_up()?;
        let found = repository.newest_point_that(machine, |point| point.point == name)?;
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, "the backup was forgotten meanwhile"))
    }
}

/// Says that rounds begin.
fn begin(invocation: &Invocation, document: &SessionDocument, every: Duration) {
    let (session, source) = (&document.name, document.follows.as_deref().unwrap_or_default());
    process_run::progress(json!({ "phase": "following", "session": session, "source": source }));
    if invocation.is_json() {
        let line = json!({ "event": "following", "session": session, "machine": document.machine,
                           "source": source, "every_s": every.as_secs() });
        print_line(&line.to_string());
    } else {
        print_line(&format!(
            "following {} at {source}, every {} s, as live/{session} (Ctrl-C ends it; coldrise marks {session} lists the \
             times)",
            document.machine,
            every.as_secs()
        ));
    }
}

/// What was printed last: a long command prints what changes, not each round.
#[derive(Default)]
struct Shown {
    has_first: bool,
    problem: Option<String>,
    is_off: bool,
}

impl Shown {
    fn show(&mut self, invocation: &Invocation, session: &SessionName, done: &Result<RoundReport>) {
        let problem = done.as_ref().err().map(Error::full_message);
        if invocation.is_json() {
            let line = match done {
                Ok(report) => json!({ "event": "round", "session": session,
                    "current_ms": report.current_ms, "read_bytes": report.changes.read_bytes,
                    "written_bytes": report.changes.written_bytes, "is_marked": report.is_marked,
                    "is_consistent": report.is_consistent, "is_off": report.is_off,
                    "standstill_us": report.standstill.map(|time| time.as_micros() as u64),
                    "took_ms": report.took.as_millis() as u64, "remarks": report.remarks }),
                Err(_) => json!({ "event": "failed", "session": session, "problem": problem }),
            };
            print_line(&line.to_string());
            return;
        }
        let Ok(report) = done else {
            if problem != self.problem {
                let why = problem.as_deref().unwrap_or_default();
                invocation
                    .remark(&format!("{why}; trying again, the machine's changes still count"));
            }
            self.problem = problem;
            return;
        };
        report.remarks.iter().for_each(|remark| invocation.remark(remark));
        let is_news = !self.has_first || self.problem.is_some() || self.is_off != report.is_off;
        if is_news {
            let off = if report.is_off { "; the machine is off" } else { "" };
            print_line(&format!(
                "live/{session} is up to date{off}: {} read in {}, {} had changed",
                show_size(report.changes.read_bytes),
                show_duration(report.took),
                show_size(report.changes.written_bytes),
            ));
        }
        (self.has_first, self.problem, self.is_off) = (true, None, report.is_off);
    }
}

/// The sum of all rounds.
#[derive(Default)]
struct Totals {
    rounds: u64,
    failed: u64,
    marks: u64,
    read_bytes: u64,
    written_bytes: u64,
}

impl Totals {
    fn count(&mut self, done: &Result<RoundReport>) {
        self.rounds += 1;
        match done {
            Ok(report) => {
                self.marks += u64::from(report.is_marked);
                self.read_bytes += report.changes.read_bytes;
                self.written_bytes += report.changes.written_bytes;
            }
            Err(_) => self.failed += 1,
        }
    }

    fn report(&self, invocation: &Invocation, session: &SessionName) -> Report {
        let object = json!({ "session": session, "rounds": self.rounds, "failed": self.failed,
            "marks": self.marks, "read_bytes": self.read_bytes, "written_bytes": self.written_bytes,
            "elapsed_ms": invocation.elapsed_ms() });
        let text = format!(
            "stopped following; live/{session} keeps its times (the same command continues; coldrise unpublish {session} ends it)"
        );
        Report::done(&object, text)
    }
}
