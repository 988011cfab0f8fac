//! The backup of one machine: which hypervisor it runs under, the instant, and the end.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::{Host, default_scratch};
use coldrise_hypervisors::virsh::Virsh;
use coldrise_ingest::{BackupRequest, BackupStart, Location, Proof};
use coldrise_inventory::configured_uuid;
use coldrise_store::{DisplayName, MachineName, Repository};

use crate::libvirt::{self, DomainOptions};
use crate::qemu::{MachineOptions, RunningMachine};
use crate::{DiskPick, Instant, LiveMachine, Mode, Since};

/// How a running machine is backed up.
#[derive(Clone)]
pub struct LiveOptions {
    /// `libvirt`, `libvirt:DOMAIN` or `qmp:SOCKET`. Default for DOMAIN: the machine's name.
    pub from: String,
    /// The host of the machine.
    pub host: Host,
    /// The URI of libvirt on that host.
    pub connect: Option<String>,
    /// The folder of the scratch files, on that host. Default: $TMPDIR there, else /var/tmp.
    pub scratch: Option<PathBuf>,
    /// How the content leaves QEMU.
    pub mode: Mode,
    /// Whether the guest's file systems are to be frozen for the instant.
    pub is_quiesced: bool,
    /// The socket of the guest agent; libvirt knows its own.
    pub agent: Option<PathBuf>,
}

/// A running machine during its backup.
pub struct LiveBackup {
    machine: Box<dyn LiveMachine>,
    /// The name from which that of the machine was derived.
    derived_from: Option<DisplayName>,
    instant: Option<Instant>,
    /// How often the machine was taken again.
    repeats: u32,
}

/// How often a machine is taken again that is started or changed while it is read.
const MAX_REPEATS: u32 = 3;

/// An error of reading the disks, with its cause as far as the hypervisor knows it.
pub(crate) fn explained(error: Error, lost: Option<(String, &'static str)>, is_off: bool) -> Error {
    match lost {
        Some((why, advice)) => error.context(why).advise(advice),
        None if error.kind() == ErrorKind::Io && !is_off => error.advise(
            "the scratch files may have been full or too slow: make space in their \
             folder, or name another one with --scratch DIR; or the machine's own disks fail",
        ),
        None => error,
    }
}

/// Connects to the machine that `options` name, by default the domain `domain`. `disks` has DISK=DEVICE for each disk; none
/// stands for all.
///
/// # Errors
/// `InvalidInput` for options that do not fit together; errors of the connection.
pub(crate) fn connect(
    options: LiveOptions,
    domain: &str,
    disks: &[String],
) -> Result<Box<dyn LiveMachine>> {
    let LiveOptions { from, host, connect, scratch, mode, is_quiesced, agent } = options;
    let invalid = |text: &str| Err(Error::new(ErrorKind::InvalidInput, text.to_owned()));
    let picks = DiskPick::parse_all(disks)?;
    Ok(match from.split_once(':').unwrap_or((&from, domain)) {
        ("qmp", socket) if !socket.is_empty() && from.contains(':') => {
            if is_quiesced && agent.is_none() {
                return invalid(
                    "--quiesce needs the socket of the guest agent: add --agent SOCKET",
                );
            }
            if connect.is_some() {
                return invalid("--connect is for --from libvirt");
            }
            if host.name().is_some() {
                return invalid("--on is for --from libvirt");
            }
            let socket = PathBuf::from(socket);
            let scratch = scratch.unwrap_or_else(default_scratch);
            let options = MachineOptions { socket, picks, scratch, mode, agent };
            Box::new(RunningMachine::connect(options)?)
        }
        ("libvirt", domain) if !domain.is_empty() => {
            if agent.is_some() {
                return invalid("--agent: libvirt knows the agent's socket; leave it out");
            }
            let virsh = Virsh::on(host, connect.as_deref())?;
            let domain = domain.to_owned();
            let options = DomainOptions { virsh, domain, picks, scratch, mode, is_quiesced };
            libvirt::connect(options)?
        }
        _ => {
            let text = format!("--from {from}: write libvirt, libvirt:DOMAIN or qmp:SOCKET");
            return invalid(&text);
        }
    })
}

impl LiveBackup {
    /// Connects to the machine. The hypervisor's name for it is `derived_from`, from which the machine's name was derived;
    /// else the machine's own, unless --from names another one. `disks` has DISK=DEVICE for each disk; none stands for all.
    ///
    /// # Errors
    /// `InvalidInput` for options that do not fit together; errors of the connection.
    pub fn connect(
        options: LiveOptions,
        machine: &MachineName,
        derived_from: Option<DisplayName>,
        disks: &[String],
    ) -> Result<LiveBackup> {
        let domain = derived_from.as_ref().map_or(machine.as_str(), DisplayName::as_str);
        let machine = connect(options, domain, disks)?;
        Ok(LiveBackup { machine, derived_from, instant: None, repeats: 0 })
    }

    /// Takes the instant, and enters its disks and name into the request.
    ///
    /// # Errors
    /// Those of the hypervisor, after which nothing is left in it.
    pub fn take(
        &mut self,
        repository: &Arc<Repository>,
        request: &mut BackupRequest,
        cancel: &AtomicBool,
    ) -> Result<&Instant> {
        let is_new = match &self.derived_from {
            Some(name) => self.check_derived(repository, &request.machine, name)?,
            None => false,
        };
        if let Some(before) = self.instant.take() {
            request.point = None;
            request.configuration.take_if(|given| before.configuration.as_ref() == Some(given));
        }
        let start = BackupStart::choose(repository, request, cancel)?;
        let mut restarts = Vec::new();
        let mut instant = loop {
            let since = Since::Backup { repository, machine: &request.machine, start: &start };
            match self.machine.take(&since, cancel) {
                Ok(instant) => break instant,
                Err(error) => restarts.push(self.take_again(error)?),
            };
        };
        instant.remarks.splice(0..0, restarts);
        for source in &mut instant.sources {
            let compared = start.is_another_disk(repository, source, cancel);
            if let Some(why) = compared.map_err(|error| {
                explained(error, self.machine.why_disks_are_lost(), instant.is_off)
            })? {
                instant.remarks.push(format!("{}: {why}: everything is read", source.disk));
                if let Location::Live { bitmap, .. } = &mut source.location {
                    *bitmap = None;
                }
            }
        }
        if let Some(name) = self.derived_from.as_ref().filter(|_| is_new) {
            let text = format!("{name} is stored as the machine {}", request.machine);
            instant.remarks.insert(0, text);
        }
        request.disks.clone_from(&instant.sources);
        request.point = Some(start.point().clone());
        request.parts.clone_from(&instant.parts);
        if request.configuration.is_none() {
            request.configuration.clone_from(&instant.configuration);
        }
        Ok(self.instant.insert(instant))
    }

    /// Makes the machine ready to be taken again, after `error`. Returns the error as a remark.
    ///
    /// # Errors
    /// `error`, if that would not help.
    fn take_again(&mut self, error: Error) -> Result<String> {
        let again = match self.repeats < MAX_REPEATS {
            true => self.machine.again()?,
            false => None,
        };
        let Some(machine) = again else { return Err(error) };
        self.machine = machine;
        self.repeats += 1;
        let why = error.full_message();
        Ok(format!("the backup of the machine that was off starts again: {why}"))
    }

    /// Reads and stores the disks with `work`, which gets a flag that is set when it has to end, and the proof without which no
    /// point may be added.
    ///
    /// # Errors
    /// Those of `work`; why the proof failed.
    pub fn read<T>(
        &self,
        cancel: &AtomicBool,
        work: impl FnOnce(&AtomicBool, Proof<'_>) -> Result<T>,
    ) -> Result<T> {
        let Some(still) = self.machine.stillness() else { return work(cancel, &|| Ok(())) };
        let stop = AtomicBool::new(false);
        let (end, ended) = std::sync::mpsc::channel();
        let done = std::thread::scope(|scope| {
            let stop = &stop;
            scope.spawn(move || still.watch(cancel, stop, &ended));
            // Dropped in any case: the thread ends.
            let _end = end;
            work(stop, &|| still.prove())
        });
        match still.broken() {
            Some(why) if done.is_err() && !cancel.load(Ordering::Relaxed) => {
                Err(Error::new(ErrorKind::Incomplete, why)
                    .advise("back up again while nothing changes the images"))
            }
            _ => done,
        }
    }

    /// Checks that a name that was derived from that of a domain belongs to no other machine. Returns whether the machine is new.
    ///
    /// # Errors
    /// `AlreadyExists` if it is another machine's; errors of the catalog, and of libvirt.
    fn check_derived(
        &self,
        repository: &Repository,
        machine: &MachineName,
        name: &DisplayName,
    ) -> Result<bool> {
        let latest = repository.newest_points(machine, 1)?.pop();
        let stored = latest.as_ref().and_then(|point| point.configuration.as_ref());
        let is_same = match (stored.and_then(configured_uuid), &latest) {
            (Some(uuid), _) => self.machine.uuid() == Some(&uuid),
            (None, Some(point)) => point.display_name.as_ref() == Some(name),
            (None, None) => true,
        };
        if is_same && !self.machine.is_named_by_another(machine.as_str())? {
            return Ok(latest.is_none());
        }
        let text =
            format!("{name} would be stored as {machine}, which is the name of another machine");
        let advice = format!("choose a name: coldrise backup MACHINE --from 'libvirt:{name}'");
        Err(Error::new(ErrorKind::AlreadyExists, text).advise(advice))
    }

    /// Removes everything from the machine. A point that is stored counts even if that fails: then `warn` gets the
    /// reason. `None` if the machine has to be taken and read again, because it was started meanwhile.
    ///
    /// # Errors
    /// That of `stored`, with what the machine's side says about it.
    pub fn end<T>(&mut self, stored: Result<T>, warn: &dyn Fn(&str)) -> Result<Option<T>> {
        let is_off = self.instant.as_ref().is_some_and(|instant| instant.is_off);
        let lost = stored.as_ref().err().and_then(|_| self.machine.why_disks_are_lost());
        let closed = self.machine.close(stored.is_ok());
        if let Err(left) = &closed {
            warn(&format!("warning: {}", left.full_message()));
        }
        let stored = stored.map_err(|error| match lost {
            // The machine's side has just said why.
            None if closed.is_err() => error,
            lost => explained(error, lost, is_off),
        });
        match stored {
            Err(error) if error.kind() == ErrorKind::Incomplete => {
                self.take_again(error).map(|why| warn(&why))?;
                Ok(None)
            }
            stored => stored.map(Some),
        }
    }

    /// The instant, once it is taken.
    pub fn instant(&self) -> Option<&Instant> {
        self.instant.as_ref()
    }
}
