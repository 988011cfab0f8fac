//! Serves the disks of a recovered machine, and lets it run on after the server was away.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result, now_ms};
use coldrise_hypervisors::libvirt::{Domain, DomainState, RecoveryNote};
use coldrise_hypervisors::moves::{MovePhase, move_state};
use coldrise_runs::process_run;
use coldrise_session::SessionDocument;
use coldrise_store::{Repository, SessionName, default_cache_bytes};
use serde_json::json;

use crate::RecoveryEnd;
use crate::domain::{BESIDE, Prepared, own_socket_name, owner_here};
use coldrise_host::{Host, SocketAccess, socket_path};
use coldrise_hosting::Caller;
use coldrise_hosting::nbdkit::{Endpoint, Nbdkit, ServeOptions};
use coldrise_hosting::signals::ChildSignals;
use coldrise_hosting::uefi;
use coldrise_hosts::host_of;

/// Interval of looking after the server.
const INTERVAL: Duration = Duration::from_millis(100);
/// Longest wait for an answer of each disk of a resumed machine, which may leave one alone. One that still stands then is
/// resumed later.
const FIRST_REQUESTS: Duration = Duration::from_secs(5);
/// Interval of asking libvirt for the domain.
const DOMAIN_INTERVAL: Duration = Duration::from_secs(1);
/// For a domain that is paused by disk errors again and again, such as on a full repository.
const RESUME_INTERVAL: Duration = Duration::from_secs(5);
/// A state that has not changed is recorded again after this time: readers look at the end of the run's log only.
const RECORD_INTERVAL: Duration = Duration::from_secs(60);

/// Pauses between attempts to reach a host that is away.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A machine that is off for this long has ended.
const OFF_PATIENCE: Duration = Duration::from_secs(5);

/// The domain's state as the record of this run shows it.
struct RecordedState {
    /// `None` before libvirt was asked: a machine that was resumed may pause again.
    state: Option<&'static str>,
    at: Option<Instant>,
    /// Since when the domain is served.
    since_ms: u64,
    /// Since when it has this state.
    state_since_ms: u64,
}

impl RecordedState {
    /// The state of a domain that is served since now.
    fn new() -> RecordedState {
        let since_ms = now_ms();
        RecordedState { state: None, at: None, since_ms, state_since_ms: since_ms }
    }

    /// Records the state if it is another one, or was recorded long ago.
    fn record(&mut self, session: &SessionDocument, note: &RecoveryNote) {
        let is_known = self.at.is_some_and(|at| at.elapsed() < RECORD_INTERVAL);
        if is_known || !process_run::is_progress_due() {
            return;
        }
        let Some(state) = self.state else { return };
        self.at = Some(Instant::now());
        process_run::progress(
            json!({ "phase": "serving", "session": session.name.as_str(), "domain": note.name,
                                     "connect": note.connect, "host": note.host, "state": state,
                                     "since_ms": self.since_ms, "state_since_ms": self.state_since_ms }),
        );
    }

    fn change(&mut self, state: &DomainState) {
        self.change_word(match state {
            DomainState::Running => "running",
            DomainState::DiskError => "io-error",
            DomainState::Paused(_) => "paused",
            DomainState::Off => "off",
        });
    }

    fn change_word(&mut self, state: &'static str) {
        if self.state != Some(state) {
            self.state = Some(state);
            self.state_since_ms = now_ms();
            self.at = None;
        }
    }
}

/// The advice for a session that could not be withdrawn.
fn kept(session: &SessionName) -> String {
    format!("session {session} is kept: end it with coldrise recover live/{session} --undo")
}

/// Where nbdkit listens here for a machine on another host.
pub(crate) fn socket_on_way(repository: &Repository, session: &SessionName) -> Result<PathBuf> {
    // Another name than there: SSH may lead back to this host.
    socket_path(Path::new(&format!("way-{}", own_socket_name(repository, session))))
}

/// Where nbdkit listens here, and for whom: QEMU's user on this host; else SSH, which is this user's.
fn local_socket(
    repository: &Repository,
    session: &SessionDocument,
    note: &RecoveryNote,
    host: &Host,
    owner: Option<&str>,
) -> Result<(PathBuf, SocketAccess)> {
    if host.name().is_some() {
        return Ok((socket_on_way(repository, &session.name)?, SocketAccess::default()));
    }
    let owner = owner_here(owner, &note.connect)?;
    Ok((note.socket.clone(), SocketAccess { owner, mode: None }))
}

/// A running server and its domain.
pub struct RecoveryServer {
    repository: Arc<Repository>,
    /// The session.
    pub session: SessionDocument,
    /// Its note.
    pub note: RecoveryNote,
    nbdkit: Nbdkit,
    /// nbdkit's socket here.
    socket: PathBuf,
    owner: Option<String>,
    host: Host,
    domain: Domain,
    /// `None` while the host can be reached.
    outage: Option<Outage>,
}

/// The time in which a host cannot be reached.
struct Outage {
    since: Instant,
    /// The last reason, which was logged.
    reason: String,
    tried: Instant,
    pause: Duration,
}

impl RecoveryServer {
    /// Starts the server, and the domain: it is created, or resumed.
    ///
    /// # Errors
    /// As [`Nbdkit::start`] and [`Domain::create`]. The session is kept.
    pub fn start(
        caller: &Caller,
        repository: &Arc<Repository>,
        prepared: Prepared,
        signals: &mut ChildSignals,
    ) -> Result<RecoveryServer> {
        let Prepared { session, note, host, owner, is_new } = prepared;
        let (socket, access) = local_socket(repository, &session, &note, &host, owner.as_deref())?;
        let disks = session.disks.iter();
        let options = ServeOptions {
            endpoint: Endpoint::Socket(socket.clone(), access),
            tls: None,
            cache_bytes: default_cache_bytes(),
            is_read_only: false,
            lists_formats: false,
            disconnects_at_end: true,
            only: disks.map(|disk| format!("live/{}/{}", session.name, disk.name)).collect(),
        };
        let started = Nbdkit::start(caller, &options, signals);
        let nbdkit = started.map_err(|error| {
            let withdrawn =
                is_new.then(|| coldrise_session::unpublish(repository, &session.name, true));
            match withdrawn {
                Some(Err(_)) => error.advise(kept(&session.name)),
                None if error.kind() == ErrorKind::Busy => Error::new(
                    ErrorKind::Busy,
                    format!("session {} is served already: {}", session.name, error.message()),
                )
                .advise("coldrise runs shows the command that serves it"),
                Some(Ok(_)) | None => error,
            }
        })?;
        let domain = note.domain(&host);
        let repository = Arc::clone(repository);
        let server = RecoveryServer {
            repository,
            session,
            note,
            nbdkit,
            socket,
            owner,
            host,
            domain,
            outage: None,
        };
        let offered = server.offer(&server.host);
        match offered.and_then(|()| server.start_domain(caller, is_new)) {
            Ok(()) => Ok(server),
            Err(error) if is_new => Err(server.withdraw(error)),
            Err(error) if error.kind() == ErrorKind::Busy => {
                let name = &server.session.name;
                Err(error.advise(format!(
                    "end it first; or end this session: coldrise recover live/{name} --undo"
                )))
            }
            Err(error) => Err(error),
        }
    }

    /// Ends the session of a machine that never ran.
    fn withdraw(mut self, error: Error) -> Error {
        let state = self.state();
        let is_off = matches!(state, Ok(None | Some(DomainState::Off)));
        let name = &self.session.name;
        let ended = is_off
            && self.nbdkit.stop(None).is_ok()
            && coldrise_session::unpublish(&self.repository, name, true).is_ok();
        if ended {
            // There are none unless libvirt failed late.
            let _ = self.note.remove_parts(&self.host);
        }
        match ended {
            true if error.kind() == ErrorKind::Busy => error.advise(BESIDE),
            true => error,
            false => error.advise(kept(name)),
        }
    }

    /// Lets QEMU reach the disks.
    fn offer(&self, host: &Host) -> Result<()> {
        host.offer(&self.socket, &self.note.socket, &self.note.connect, self.owner.as_deref())
    }

    /// Connects to the host again. The machine has paused meanwhile, and is resumed when it is looked at.
    fn reconnect(&mut self, caller: &Caller) {
        let Some(name) = &self.note.host else { return };
        let outage = self.outage.get_or_insert_with(|| {
            caller.remark(&format!(
                "host {name} is away; the machine pauses when it needs its disks, and sees no error"
            ));
            let now = Instant::now();
            Outage { since: now, reason: String::new(), tried: now, pause: Duration::ZERO }
        });
        if outage.tried.elapsed() < outage.pause {
            return;
        }
        outage.pause = (outage.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        let connected = host_of(&self.repository, Some(name));
        match connected.and_then(|host| self.offer(&host).map(|()| host)) {
            Ok(host) => {
                self.domain = self.note.domain(&host);
                self.host = host;
                let away = self.outage.take().map_or(0, |outage| outage.since.elapsed().as_secs());
                caller.remark(&format!("host {name} is back after {away} s"));
            }
            Err(error) => {
                let reason = error.full_message();
                if let Some(outage) = &mut self.outage {
                    outage.tried = Instant::now();
                    if outage.reason != reason {
                        tracing::warn!("{reason}");
                        outage.reason = reason;
                    }
                }
            }
        }
    }

    /// The state of the machine; see [`RecoveryNote::state`].
    fn state(&self) -> Result<Option<DomainState>> {
        self.note.state(&self.host, &self.session.name)
    }

    fn start_domain(&self, caller: &Caller, is_new: bool) -> Result<()> {
        match self.state()?.ok_or_else(|| self.note.name_is_taken())? {
            DomainState::Off => self.create(caller, is_new).or_else(|error| {
                match self.state() {
                    // Another process has just started it.
                    Ok(None) => Err(self.note.name_is_taken()),
                    // By a recovery that was killed: libvirt ended what it had asked for.
                    Ok(Some(DomainState::Running)) => Ok(()),
                    _ => Err(error),
                }
            }),
            DomainState::Running => Ok(()),
            DomainState::DiskError | DomainState::Paused(_) => {
                self.resume_until_it_runs(&mut || false)
            }
        }
    }

    fn create(&self, caller: &Caller, is_new: bool) -> Result<()> {
        let found = self.note.write_variables(&self.host, &self.repository, &self.session)?;
        // One that ran before has its variables.
        if let Some(found) = found.filter(|_| is_new) {
            uefi::tell_start(caller, &found);
        }
        self.note.place_tpm(&self.host, &self.session)?;
        let created = self.domain.create(&self.note.xml);
        self.note.remove_template(&self.host);
        created
    }

    /// Resumes a machine whose disks were away. The first requests of each disk fail once more, because libvirt's QEMU
    /// connects again only then, beside them: the machine pauses for each. It runs when each disk has answered one. It is not
    /// resumed once this program `is_ending`: the same signal may have ended the server.
    fn resume_until_it_runs(&self, is_ending: &mut dyn FnMut() -> bool) -> Result<()> {
        let started = Instant::now();
        let before = self.domain.answered()?;
        while started.elapsed() < FIRST_REQUESTS && !is_ending() {
            self.domain.resume()?;
            while self.domain.state()? != DomainState::DiskError {
                let now = self.domain.answered()?;
                let answers = |name: &str| match (before.get(name), now.get(name)) {
                    (Some(before), Some(now)) => now > before,
                    _ => true,
                };
                let all_answer = self.session.disks.iter().all(|disk| answers(disk.name.as_str()));
                if all_answer || started.elapsed() >= FIRST_REQUESTS {
                    return Ok(());
                }
                std::thread::sleep(INTERVAL);
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }

    /// Whether the session has ended.
    fn has_ended(&self) -> Result<bool> {
        match coldrise_session::session(&self.repository, &self.session.name) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
            session => session.map(|_| false),
        }
    }

    /// Pauses the machine, unless it is off.
    fn pause(&self) -> Result<RecoveryEnd> {
        match self.state()? {
            None | Some(DomainState::Off) => Ok(RecoveryEnd::Off),
            Some(_) => self.domain.suspend().map(|()| RecoveryEnd::Paused),
        }
    }

    /// Serves until the machine is off ([`RecoveryEnd::Off`]), its disks were moved ([`RecoveryEnd::Moved`]), or a signal ends this program, which
    /// first pauses the machine ([`RecoveryEnd::Paused`]).
    ///
    /// # Errors
    /// `ToolFailed` if the server cannot be started again.
    pub fn serve(&mut self, caller: &Caller, signals: &mut ChildSignals) -> Result<RecoveryEnd> {
        let (mut asked, mut resumed) = (None::<Instant>, None::<Instant>);
        let mut off_since = None::<Instant>;
        let mut recorded = RecordedState::new();
        let mut is_ending = false;
        loop {
            recorded.record(&self.session, &self.note);
            if is_ending || signals.was_asked_to_end() {
                // Its last writes are answered before the server ends.
                let paused = self.pause();
                self.nbdkit.stop(None)?;
                return paused;
            }
            match self.nbdkit.keep_up(caller, signals) {
                Ok(None) => {}
                // Ctrl-C reaches it, too.
                Ok(Some(_)) if signals.was_asked_to_end() => {
                    is_ending = true;
                    continue;
                }
                Ok(Some(status)) => {
                    let text = format!("nbdkit ended ({status}) while the machine was running");
                    return Err(Error::new(ErrorKind::ToolFailed, text));
                }
                // The next turn pauses the machine.
                Err(error) if error.kind() == ErrorKind::Interrupted => return self.pause(),
                Err(error) => return Err(error),
            }
            if asked.is_none_or(|at| at.elapsed() >= DOMAIN_INTERVAL) {
                asked = Some(Instant::now());
                let mut ends = || {
                    is_ending |= signals.was_asked_to_end();
                    is_ending
                };
                let looked = self.look_at_domain(caller, &mut resumed, &mut recorded, &mut ends);
                off_since = match looked {
                    Ok(Some(RecoveryEnd::Off)) => off_since.or(asked),
                    _ => None,
                };
                match looked {
                    Ok(None) => {}
                    // A libvirtd that starts does not know its domains yet.
                    Ok(Some(_)) if off_since.is_some_and(|at| at.elapsed() < OFF_PATIENCE) => {}
                    Ok(Some(end)) => {
                        self.nbdkit.stop(None)?;
                        return Ok(end);
                    }
                    // It was undone, and only then libvirtd ended.
                    Err(_) if matches!(self.has_ended(), Ok(true)) => {
                        self.nbdkit.stop(None)?;
                        return Ok(RecoveryEnd::Off);
                    }
                    // libvirtd may restart; its domains run on.
                    Err(_) if self.host.is_lost() => {
                        // What the machine does is not known; it pauses at its next request.
                        recorded.change_word("unreachable");
                        recorded.record(&self.session, &self.note);
                        self.reconnect(caller);
                    }
                    Err(error) => tracing::warn!("{}", error.full_message()),
                }
            }
            std::thread::sleep(INTERVAL);
        }
    }

    /// Resumes the machine if its disks were away. Returns how it ended, if it has.
    fn look_at_domain(
        &self,
        caller: &Caller,
        resumed: &mut Option<Instant>,
        recorded: &mut RecordedState,
        is_ending: &mut dyn FnMut() -> bool,
    ) -> Result<Option<RecoveryEnd>> {
        let session = &self.session.name;
        let state = self.state()?;
        recorded.change(state.as_ref().unwrap_or(&DomainState::Off));
        match state {
            Some(DomainState::Off) => Ok(Some(RecoveryEnd::Off)),
            Some(DomainState::DiskError) => {
                if resumed.is_none_or(|at| at.elapsed() >= RESUME_INTERVAL) && !is_ending() {
                    caller.remark("the machine was paused by an error of its disks: resuming it");
                    self.resume_until_it_runs(is_ending)?;
                    *resumed = Some(Instant::now());
                }
                Ok(None)
            }
            Some(DomainState::Running | DomainState::Paused(_)) | None => {
                let Some(moved) = move_state(&self.repository, session)? else {
                    return Ok(match state {
                        Some(_) => None,
                        // Only the session of a machine that does not use it ends: it was moved.
                        None if self.has_ended()? => Some(RecoveryEnd::Moved),
                        // Another machine has the name of this one.
                        None => Some(RecoveryEnd::Off),
                    });
                };
                let is_moved = moved.note.phase == MovePhase::Settled
                    && !moved.is_running
                    && moved.note.disks.iter().all(|disk| disk.is_moved);
                Ok(is_moved.then_some(RecoveryEnd::Moved))
            }
        }
    }
}
