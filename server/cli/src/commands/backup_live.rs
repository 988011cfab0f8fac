//! The part of `coldrise backup` for machines that run: --from.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{BackupRequest, BackupStart};
use coldrise_recovery::backup_domain::{DomainOptions, RunningDomain};
use coldrise_recovery::backup_source::{DiskPick, Instant, MachineOptions, Mode, RunningMachine};
use coldrise_recovery::virsh::Virsh;
use coldrise_requests::BackupOptions;
use coldrise_store::{MachineName, Repository};
use serde::Serialize;

use crate::invocation::Invocation;

/// A running machine during its backup.
pub(super) struct LiveBackup {
    machine: Source,
    instant: Option<Instant>,
}

/// Where the machine runs.
enum Source {
    Qemu(RunningMachine),
    Libvirt(RunningDomain),
}

/// Not /tmp: it may be memory.
fn default_scratch() -> PathBuf {
    std::env::var_os("TMPDIR").filter(|path| !path.is_empty()).unwrap_or("/var/tmp".into()).into()
}

impl LiveBackup {
    /// Connects to the machine, if there is one.
    ///
    /// # Errors
    /// `InvalidInput` for options that do not fit together; errors of the connection.
    pub(super) fn connect(
        options: BackupOptions,
        scratch: Option<PathBuf>,
        machine: &MachineName,
        disks: &[String],
    ) -> Result<Option<LiveBackup>> {
        let Some(from) = &options.from else { return Ok(None) };
        let invalid = |text: &str| Err(Error::new(ErrorKind::InvalidInput, text.to_owned()));
        let picks = DiskPick::parse_all(disks)?;
        let scratch = scratch.unwrap_or_else(default_scratch);
        let mode = if options.push { Mode::Push } else { Mode::Pull };
        let machine = match from.split_once(':').unwrap_or((from, machine.as_str())) {
            ("qmp", socket) if !socket.is_empty() && from.contains(':') => {
                if options.quiesce && options.agent.is_none() {
                    return invalid(
                        "--quiesce needs the socket of the guest agent: add --agent SOCKET",
                    );
                }
                if options.connect.is_some() {
                    return invalid("--connect is for --from libvirt");
                }
                let (socket, agent) = (PathBuf::from(socket), options.agent);
                Source::Qemu(RunningMachine::connect(MachineOptions {
                    socket,
                    picks,
                    scratch,
                    mode,
                    agent,
                })?)
            }
            ("libvirt", domain) if !domain.is_empty() => {
                if options.agent.is_some() {
                    return invalid("--agent: libvirt knows the agent's socket; leave it out");
                }
                Source::Libvirt(RunningDomain::connect(DomainOptions {
                    virsh: Virsh::local(options.connect.as_deref())?,
                    domain: domain.to_owned(),
                    picks,
                    scratch,
                    mode,
                    is_quiesced: options.quiesce,
                })?)
            }
            _ => {
                let text = format!("--from {from}: write libvirt, libvirt:DOMAIN or qmp:SOCKET");
                return invalid(&text);
            }
        };
        Ok(Some(LiveBackup { machine, instant: None }))
    }

    /// Takes the instant, and enters its disks and name into the request.
    pub(super) fn take(
        &mut self,
        invocation: &Invocation,
        repository: &Repository,
        request: &mut BackupRequest,
        cancel: &AtomicBool,
    ) -> Result<()> {
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
