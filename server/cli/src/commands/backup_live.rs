//! The part of `coldrise backup` for machines that run: --from.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{BackupRequest, BackupStart};
use coldrise_inventory::configured_uuid;
use coldrise_recovery::backup_domain::{DomainOptions, RunningDomain};
use coldrise_recovery::backup_source::{DiskPick, Instant, MachineOptions, Mode, RunningMachine};
use coldrise_recovery::virsh::Virsh;
use coldrise_store::{DisplayName, MachineName, Repository};
use serde::Serialize;

use crate::invocation::Invocation;

#[derive(Debug, Args)]
pub(super) struct LiveArguments {
    /// Back up a machine while it runs: libvirt, libvirt:DOMAIN, or qmp:SOCKET with the monitor of its
    /// QEMU (-qmp unix:SOCKET,...). Default for DOMAIN: MACHINE.
    ///
    /// All writable disks are backed up as they are at one instant. What the machine overwrites meanwhile is
    /// saved in scratch files. Checkpoints or dirty bitmaps are made and named for the point that they
    /// count from: the next backup reads only what has changed. See docs/recovery.md.
    #[arg(long, value_name = "SOURCE")]
    from: Option<String>,

    /// With --from libvirt: the URI of libvirt on this host. Default: $LIBVIRT_DEFAULT_URI, else
    /// qemu:///system.
    #[arg(long, value_name = "URI", requires = "from")]
    connect: Option<String>,

    /// With --from: the folder of the scratch files, which vanish with the backup. With libvirt it needs as
    /// much free space as the disks have. Default: $TMPDIR, else /var/tmp.
    #[arg(long, value_name = "DIR", requires = "from")]
    scratch: Option<PathBuf>,

    /// With --from: QEMU copies the disks, or what has changed, into scratch files before they are
    /// read.
    ///
    /// For disks with an iothread in a QEMU before 9.0, and for disks that are much slower to read
    /// over a longer time. The scratch files need as much space as is copied, which is allocated first.
    /// Meanwhile the machine's writes can wait for the scratch files.
    #[arg(long, requires = "from")]
    push: bool,

    /// With --from: freeze the guest's file systems for the instant, through its agent; at most
    /// 10 s. If the agent does not answer, the backup is made without.
    #[arg(long, requires = "from")]
    quiesce: bool,

    /// With --quiesce and qmp: the socket of the guest agent's port. libvirt knows its own.
    #[arg(long, value_name = "SOCKET", requires = "quiesce")]
    agent: Option<PathBuf>,
}

/// A running machine during its backup.
pub(super) struct LiveBackup {
    machine: Source,
    /// The name from which that of the machine was derived.
    derived_from: Option<DisplayName>,
    instant: Option<Instant>,
}

/// Where the machine runs.
enum Source {
    Qemu(RunningMachine),
    Libvirt(RunningDomain),
}

impl LiveArguments {
    /// Whether libvirt knows the machine.
    pub(super) fn is_libvirt(&self) -> bool {
        let from = self.from.as_deref();
        from.is_some_and(|from| from.split_once(':').map_or(from, |(kind, _)| kind) == "libvirt")
    }

    /// Connects to the machine, if there is one. libvirt's name for it is `domain`, unless --from names another one.
    /// `derived_from` is the name from which that of the machine was derived, if it was.
    ///
    /// # Errors
    /// `InvalidInput` for options that do not fit together; errors of the connection.
    pub(super) fn connect(
        self,
        domain: &str,
        derived_from: Option<&DisplayName>,
        disks: &[String],
    ) -> Result<Option<LiveBackup>> {
        let Some(from) = &self.from else { return Ok(None) };
        let invalid = |text: &str| Err(Error::new(ErrorKind::InvalidInput, text.to_owned()));
        let picks = DiskPick::parse_all(disks)?;
        let scratch = self.scratch.unwrap_or_else(default_scratch);
        let mode = if self.push { Mode::Push } else { Mode::Pull };
        let machine = match from.split_once(':').unwrap_or((from, domain)) {
            ("qmp", socket) if !socket.is_empty() && from.contains(':') => {
                if self.quiesce && self.agent.is_none() {
                    return invalid(
                        "--quiesce needs the socket of the guest agent: add --agent SOCKET",
                    );
                }
                if self.connect.is_some() {
                    return invalid("--connect is for --from libvirt");
                }
                let (socket, agent) = (PathBuf::from(socket), self.agent);
                let options = MachineOptions { socket, picks, scratch, mode, agent };
                Source::Qemu(RunningMachine::connect(options)?)
            }
            ("libvirt", domain) if !domain.is_empty() => {
                if self.agent.is_some() {
                    return invalid("--agent: libvirt knows the agent's socket; leave it out");
                }
                Source::Libvirt(RunningDomain::connect(DomainOptions {
                    virsh: Virsh::local(self.connect.as_deref())?,
                    domain: domain.to_owned(),
                    picks,
                    scratch,
                    mode,
                    is_quiesced: self.quiesce,
                })?)
            }
            _ => {
                let text = format!("--from {from}: write libvirt, libvirt:DOMAIN or qmp:SOCKET");
                return invalid(&text);
            }
        };
        Ok(Some(LiveBackup { machine, derived_from: derived_from.cloned(), instant: None }))
    }
}

/// Checks that a name that was derived from that of a domain belongs to no other machine. Returns whether the machine is new.
///
/// # Errors
/// `AlreadyExists` if it is another machine's; errors of the catalog, and of libvirt.
fn check_derived(
    repository: &Repository,
    machine: &MachineName,
    name: &DisplayName,
    domain: &RunningDomain,
) -> Result<bool> {
    let latest = repository.points(machine)?.pop();
    let stored = latest.as_ref().and_then(|point| point.configuration.as_ref());
    let is_same = match (stored.and_then(configured_uuid), &latest) {
        (Some(uuid), _) => uuid == domain.uuid(),
        (None, Some(point)) => point.display_name.as_ref() == Some(name),
        (None, None) => true,
    };
    if is_same && !domain.is_named_by_another(machine.as_str())? {
        return Ok(latest.is_none());
    }
    let text = format!("{name} would be stored as {machine}, which is the name of another machine");
    let advice = format!("choose a name: coldrise backup MACHINE --from 'libvirt:{name}'");
    Err(Error::new(ErrorKind::AlreadyExists, text).advise(advice))
}

/// Not /tmp: it may be memory.
fn default_scratch() -> PathBuf {
    std::env::var_os("TMPDIR").filter(|path| !path.is_empty()).unwrap_or("/var/tmp".into()).into()
}

impl LiveBackup {
    /// Takes the instant, and enters its disks and name into the request.
    pub(super) fn take(
        &mut self,
        invocation: &Invocation,
        repository: &Repository,
        request: &mut BackupRequest,
        cancel: &AtomicBool,
    ) -> Result<()> {
        if let (Some(name), Source::Libvirt(domain)) = (&self.derived_from, &self.machine) {
            let machine = &request.machine;
            if check_derived(repository, machine, name, domain)? {
                invocation.remark(&format!("{name} is stored as the machine {machine}"));
            }
        }
        let start = BackupStart::choose(repository, request, cancel)?;
        let instant = match &mut self.machine {
            Source::Qemu(machine) => machine.take(repository, &request.machine, &start, cancel),
            Source::Libvirt(domain) => domain.take(repository, &request.machine, &start, cancel),
        }?;
        for remark in &instant.remarks {
            invocation.remark(remark);
        }
        request.disks.clone_from(&instant.sources);
        request.point = Some(start.point().clone());
        if request.configuration.is_none() {
            request.configuration.clone_from(&instant.configuration);
        }
        self.instant = Some(instant);
        Ok(())
    }

    /// Removes everything from the machine. A point that is stored counts even if that fails.
    pub(super) fn end<T>(&mut self, invocation: &Invocation, stored: Result<T>) -> Result<T> {
        let (is_lost, closed) = match &mut self.machine {
            Source::Qemu(machine) => (false, machine.close(stored.is_ok())),
            Source::Libvirt(domain) => {
                let is_lost = stored.is_err() && domain.has_lost_its_job();
                (is_lost, domain.close(stored.is_ok()))
            }
        };
        let stored = match is_lost {
            true => stored.map_err(|error| {
                error.context("libvirt's backup job ended before everything was read").advise(
                    "the machine was shut off, or somebody ended the job (virsh domjobabort): back up again",
                )
            }),
            false => stored,
        };
        match closed {
            Err(left) => {
                invocation.remark(&format!("warning: {}", left.full_message()));
                stored
            }
            Ok(()) => stored.map_err(|error| match error.kind() {
                ErrorKind::Io if !is_lost => error.advise(
                    "the scratch files may have been full or too slow: make space in their \
                     folder, or name another one with --scratch DIR; or the machine's own disks fail",
                ),
                _ => error,
            }),
        }
    }

    /// The report's part about the instant.
    pub(super) fn made(&self) -> Option<MadeInstant<'_>> {
        self.instant.as_ref().map(|instant| MadeInstant {
            standstill_us: instant.standstill.map(|time| time.as_micros() as u64),
            is_quiesced: instant.is_quiesced,
            remarks: &instant.remarks,
        })
    }
}

#[derive(Serialize)]
pub(super) struct MadeInstant<'a> {
    /// How long the machine stood still, at most; absent if it did not.
    standstill_us: Option<u64>,
    is_quiesced: bool,
    remarks: &'a [String],
}

impl MadeInstant<'_> {
    /// For people.
    pub(super) fn sentence(&self) -> String {
        let kind = if self.is_quiesced { "with frozen file systems" } else { "crash-consistent" };
        let stood = match self.standstill_us {
            Some(time) => {
                format!("; the machine stood still for {:.1} ms", time as f64 / 1000.0)
            }
            None => String::new(),
        };
        format!(": all disks at one instant, {kind}{stood}")
    }
}
