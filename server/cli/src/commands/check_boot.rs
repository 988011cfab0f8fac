//! `coldrise check-boot`: boots a point in isolation, and proves that it comes up.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_session::{check_offered, Catalog, SessionDocument};
use coldrise_store::{
    available_memory_bytes, Address, BootCheckDocument, BootRung, BootVerdict, MachineName,
    PointDocument, Repository, SessionName,
};
use serde::Serialize;

use crate::boot_check::{watch, Findings, Forward, Goal, Machine, Reached, Rung};
use crate::disk_server::{DiskServer, Protocol};
use crate::hardware::{Hardware, HardwareOptions, Network};
use crate::invocation::Invocation;
use crate::qemu::{self, Console};
use crate::report::Report;
use crate::signals::ChildSignals;
use crate::targets::tell_newer;
use crate::units::{parse_duration, show_count, show_duration, show_size, unix_ms};

/// Memory for decoded chunks: a boot reads little twice.
const CACHE_BYTES: u64 = 64 << 20;
/// QEMU's own memory, in bytes.
const QEMU_BYTES: u64 = 128 << 20;
/// The end of the session's name. A session of this name is discarded without a question.
const SESSION_SUFFIX: &str = "-check-boot-throwaway";
/// Maximum length of a session's name, in bytes.
const MAX_SESSION_BYTES: usize = 63;
/// After a check was killed, its servers may take so long to end. Before a check's server opens
/// the session, it may be published and unused for so long.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(10);
const LEFTOVER_INTERVAL: Duration = Duration::from_millis(100);

/// Boot a restore point in isolation and prove that the machine comes up.
///
/// The point is published as a session MACHINE-check-boot-throwaway, which is discarded at the end;
/// after a kill the next check of the machine removes it. The machine runs in QEMU without a
/// display. Its network answers DHCP and leads nowhere.
///
/// The check looks at the screen, the serial port, the disks, the network and QEMU's events, and
/// prints each rung with its proof: started, firmware (it found a system), kernel, userspace,
/// login, service. It ends at the rung of --until. It fails if something proves a failure: a
/// message of the firmware or the boot loader, a kernel panic, an emergency shell, a disk error, a
/// power-off, three restarts. Without either proof the boot is "not proven" when the time is over;
/// that is no success and no failure. Login is proved by a text prompt only: for machines with a
/// graphical login use --check-port or --until userspace.
///
/// The result is stored with the point, with the last picture of the screen: list and show show
/// it. The exit code is 0 if the rung is reached, 13 if the machine failed and 14 if nothing is
/// proven. It is 3 if this host has too little memory now: nothing was started.
#[derive(Debug, Args)]
pub(crate) struct CheckBootArguments {
    /// MACHINE/POINT.
    #[arg(value_name = "MACHINE/POINT")]
    address: Address,

    /// The rung to reach. Default: login, or service with --check-port.
    #[arg(long, value_enum, value_name = "RUNG")]
    until: Option<Rung>,

    /// Time for the boot, such as 90s, 15m or 1h.
    ///
    /// Default: 10 minutes, without KVM 20. Once the kernel lives, at least 20 times the time to
    /// that, and at most an hour.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    time_limit: Option<Duration>,

    /// Write the last picture of the screen to this file.
    #[arg(long, value_name = "FILE.png")]
    screenshot: Option<PathBuf>,

    /// A TCP port of the machine that has to accept connections. The machine has to use DHCP.
    ///
    /// During the check a port of this host's loopback leads to it.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    check_port: Option<u16>,

    #[command(flatten)]
    hardware: HardwareOptions,
}

#[derive(Serialize)]
struct Checked<'a> {
    address: String,
    #[serde(flatten)]
    document: &'a BootCheckDocument,
    /// The highest one.
    rung: Option<&'a str>,
    screenshot: Option<&'a Path>,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &CheckBootArguments) -> Result<Report> {
    let until = arguments.until()?;
    let mut signals = ChildSignals::catch()?;
    let repository = invocation.open()?;
    let point = find(invocation, &repository, &arguments.address)?;
    let mut hardware = arguments.hardware.apply(invocation, point.configuration.as_ref())?;
    // Never with a connected network: the machine gets an isolated one of its own.
    hardware.network = Network::None;
    qemu::check(&hardware, point.disks.len())?;
    check_memory(&hardware)?;
    if let Some(path) = &arguments.screenshot {
        // Now, not after the boot.
        write_private(path, &[])?;
    }
    let goal = Goal {
        until,
        time_limit: arguments.time_limit,
        forward: arguments.check_port.map(Forward::to).transpose()?,
        firmware: hardware.firmware,
    };
    let session = ThrowawaySession::publish(&repository, &point, &mut signals)?;
    let found = check(invocation, &mut signals, &session.document, &hardware, &goal);
    // However the check ended, the session goes.
    let ended = session.end();
    let findings = found?;
    ended?;
    report(invocation, &repository, arguments, &point, until, &findings)
}

impl CheckBootArguments {
    fn until(&self) -> Result<Rung> {
        let default = if self.check_port.is_some() { Rung::Service } else { Rung::Login };
        let until = self.until.unwrap_or(default);
        if until == Rung::Service && self.check_port.is_none() {
            let text = "--until service needs the service: give --check-port PORT";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(until)
    }
}

fn find(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    address: &Address,
) -> Result<PointDocument> {
    let Address::Point { machine, selector, disk: None } = address else {
        let text = format!("{address}: whole restore points are checked: give MACHINE/POINT");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    };
    let catalog = Catalog::new(repository);
    let point = catalog.point(machine, selector)?;
    tell_newer(invocation, &catalog, selector, &point);
    check_offered(point)
}

/// A machine that the kernel kills for its memory says nothing about the backup.
fn check_memory(hardware: &Hardware) -> Result<()> {
    let needed = (hardware.memory_mib << 20).saturating_add(QEMU_BYTES);
    match available_memory_bytes() {
        Some(available) if available < needed => Err(Error::new(
            ErrorKind::Incomplete,
            format!(
                "not checked: the machine needs {} of memory and {} are available now: try again \
                 later, or give it less with --memory",
                show_size(needed),
                show_size(available)
            ),
        )),
        _ => Ok(()),
    }
}

/// Boots the session until there is a verdict.
fn check(
    invocation: &Invocation,
    signals: &mut ChildSignals,
    session: &SessionDocument,
    hardware: &Hardware,
    goal: &Goal,
) -> Result<Findings> {
    let scratch = tempfile::Builder::new()
        .prefix("coldrise-check-")
        .tempdir()
        .context(|| "making a private folder for the machine")?;
    let scratch = scratch.path();
    let mut server = DiskServer::start(Protocol::Nbd, invocation, scratch, CACHE_BYTES, signals)?;
    let disks = session.disks.iter().map(|disk| server.node(&session.name, &disk.name));
    let words = qemu::arguments(hardware, Console::Observed, disks.collect(), scratch)?;
    if let Err(why) = qemu::kvm_works() {
        invocation.remark(&format!("without KVM the machine is slow: {why}"));
    }
    invocation.remark(&format!(
        "checking {}/{}: {}, {} MiB",
        session.machine,
        session.point,
        show_count(u64::from(hardware.cpus), "processor"),
        hardware.memory_mib
    ));
    let watched = Machine::start(words, hardware, goal.forward, scratch, signals)
        .and_then(|mut machine| watch(invocation, &mut machine, &mut server, signals, goal));
    let was_asked_to_end = signals.was_asked_to_end();
    let stopped = server.stop();
    match watched {
        Ok(findings) => stopped.map(|()| findings),
        // Ctrl-C reaches the server, too, and its end may be seen first.
        Err(error) if was_asked_to_end && error.kind() != ErrorKind::Interrupted => {
            Err(Error::with_source(ErrorKind::Interrupted, "interrupted", error))
        }
        Err(error) => Err(error),
    }
}

/// A session whose captured writes are never kept. Dropping it discards it.
struct ThrowawaySession<'a> {
    repository: &'a Arc<Repository>,
    document: SessionDocument,
    has_ended: bool,
}

impl<'a> ThrowawaySession<'a> {
    /// Publishes the point. A session that a killed check left is removed first.
    ///
    /// # Errors
    /// `Busy` if another check of the machine runs; the errors of `publish`; `Interrupted`.
    fn publish(
        repository: &'a Arc<Repository>,
        point: &PointDocument,
        signals: &mut ChildSignals,
    ) -> Result<ThrowawaySession<'a>> {
        let name = session_name(&point.machine)?;
        remove_leftover(repository, &name, &point.machine, signals)?;
        let document = coldrise_session::publish(repository, point, Some(name))?;
        Ok(ThrowawaySession { repository, document, has_ended: false })
    }

    fn end(mut self) -> Result<()> {
        self.has_ended = true;
        coldrise_session::unpublish(self.repository, &self.document.name, true).map(|_| ())
    }
}

impl Drop for ThrowawaySession<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let _ = coldrise_session::unpublish(self.repository, &self.document.name, true);
        }
    }
}

fn session_name(machine: &MachineName) -> Result<SessionName> {
    let machine = machine.as_str();
    let kept = machine.len().min(MAX_SESSION_BYTES - SESSION_SUFFIX.len());
    SessionName::parse(&format!("{}{SESSION_SUFFIX}", machine.get(..kept).unwrap_or(machine)))
}

fn remove_leftover(
    repository: &Arc<Repository>,
    name: &SessionName,
    machine: &MachineName,
    signals: &mut ChildSignals,
) -> Result<()> {
    let began = Instant::now();
    loop {
        let state = match coldrise_session::session(repository, name) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            state => state?,
        };
        let age_ms = unix_ms().saturating_sub(state.document.created_at_ms);
        let is_old = u128::from(age_ms) >= LEFTOVER_PATIENCE.as_millis();
        let is_patient = began.elapsed() < LEFTOVER_PATIENCE;
        if state.document.machine != *machine || (state.is_served && !is_patient) {
            let text =
                format!("another check of {} runs, as session {name}", state.document.machine);
            return Err(Error::new(ErrorKind::Busy, text));
        }
        if !state.is_served && (is_old || !is_patient) {
            match coldrise_session::unpublish(repository, name, true) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                ended => return ended.map(|_| ()),
            }
        }
        if signals.was_asked_to_end() {
            return Err(Error::new(ErrorKind::Interrupted, "interrupted before the boot"));
        }
        std::thread::sleep(LEFTOVER_INTERVAL);
    }
}

/// A picture of a machine is for its owner only.
fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(bytes))
        .context(|| format!("writing the screenshot {}", path.display()))
}

fn report(
    invocation: &Invocation,
    repository: &Repository,
    arguments: &CheckBootArguments,
    point: &PointDocument,
    until: Rung,
    findings: &Findings,
) -> Result<Report> {
    let mut screenshot = None;
    if let Some(path) = &arguments.screenshot {
        match &findings.screenshot {
            Some(picture) => {
                write_private(path, picture)?;
                screenshot = Some(path.as_path());
            }
            None => {
                let _ = std::fs::remove_file(path);
                invocation.remark("warning: QEMU could not make a screenshot");
            }
        }
    }
    let document = document(until, findings);
    store(invocation, repository, point, &document, findings);
    let checked = Checked {
        address: format!("{}/{}", point.machine, point.point),
        rung: document.rungs.last().map(|reached| reached.rung.as_str()),
        document: &document,
        screenshot,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let mut report = Report::answer(&checked, text(invocation, &checked));
    report.exit_code = match findings.verdict {
        BootVerdict::Ok => 0,
        BootVerdict::Failed => ErrorKind::BootFailed.exit_code(),
        BootVerdict::NotProven => ErrorKind::BootNotProven.exit_code(),
    };
    Ok(report)
}

fn document(until: Rung, findings: &Findings) -> BootCheckDocument {
    let rung = |reached: &Reached| BootRung {
        rung: reached.rung.word().to_owned(),
        after_ms: reached.after_ms,
        evidence: reached.evidence.clone(),
    };
    BootCheckDocument {
        checked_at_ms: unix_ms(),
        verdict: findings.verdict,
        until: until.word().to_owned(),
        rungs: findings.rungs.iter().map(rung).collect(),
        failure: findings.failure.clone(),
        screen_text: findings.screen_text.clone(),
        serial_tail: findings.serial_tail.clone(),
    }
}

/// Stores the result with the point. The verdict counts even if that fails.
fn store(
    invocation: &Invocation,
    repository: &Repository,
    point: &PointDocument,
    document: &BootCheckDocument,
    findings: &Findings,
) {
    let picture = findings.screenshot.as_deref();
    if let Err(error) = repository.put_boot_check(&point.machine, &point.point, document, picture) {
        let text = format!("warning: the result is not stored: {}", error.full_message());
        invocation.remark(&text);
    }
}

fn text(invocation: &Invocation, checked: &Checked<'_>) -> String {
    let (address, document) = (&checked.address, checked.document);
    let until = &document.until;
    let elapsed = show_duration(invocation.elapsed());
    let highest = checked.rung.unwrap_or("nothing");
    let mut text = match document.verdict {
        BootVerdict::Ok => return format!("{address} boots: {until} reached ({elapsed})"),
        BootVerdict::Failed => {
            let failure = document.failure.as_deref().unwrap_or("no reason");
            format!("{address} does not boot: {failure}; it reached {highest} ({elapsed})")
        }
        BootVerdict::NotProven => format!(
            "{address}: not proven that it boots: it reached {highest}, not {until}, in {elapsed}"
        ),
    };
    let screen = document.screen_text.as_deref().unwrap_or_default();
    let serial = document.serial_tail.join("\n");
    for (title, lines) in [("screen", screen), ("serial port", &serial)] {
        let lines = lines.lines().filter(|line| !line.trim().is_empty());
        let lines: String = lines.map(|line| format!("\n  | {line}")).collect();
        if !lines.is_empty() {
            text.push_str(&format!("\n{title}:{lines}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_session_says_what_it_is() {
        let machine = MachineName::parse("web01").unwrap();
        assert_eq!(session_name(&machine).unwrap().as_str(), "web01-check-boot-throwaway");
        let machine = MachineName::parse(&"a".repeat(63)).unwrap();
        assert!(session_name(&machine).unwrap().as_str().ends_with("a-check-boot-throwaway"));
    }
}
