//! Starting recoveries into production: machines under a hypervisor, moves, rollbacks, attached disks.
//!
//! What writes to a path of the host, or connects to a socket that the caller names, is for administrators of
//! all machines: a path of one machine can be another's disk.

use std::collections::BTreeMap;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::{attach, libvirt, moves};
use coldrise_store::{Address, DiskName, PointName, SessionName};
use serde::Deserialize;

use super::starts::{disk, live, new_session, point, show, Command};
use super::vsphere_starts::{vsphere_note_of, with_known_access};
use crate::access::{Identity, Permission};
use crate::hypervisors::vsphere_note;
use crate::invalid::invalid;
use crate::service::Service;

/// libvirt's connections that operators may use. Others name sockets of the host.
const CONNECTIONS: [&str; 2] = ["qemu:///system", "qemu:///session"];
/// Maximum length of a text that is passed on, in bytes.
const MAX_TEXT_BYTES: usize = 1024;

/// A machine to run under its own hypervisor.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Recover {
    /// MACHINE/POINT, which is published first; or live/SESSION, to serve a recovered machine again.
    pub(super) address: String,
    /// The hypervisor: libvirt on the service's host; vcenter:NAME or esxi:NAME, a server of GET /hypervisors.
    /// Required unless `undo` is given.
    to: Option<String>,
    /// Under vCenter and ESXi: names of hosts in the inventory. The first one runs the machine, all get the datastore.
    #[serde(default)]
    #[schema(max_items = 64)]
    pub(super) hosts: Vec<String>,
    /// Name of the machine, and of the session; as stored if absent, under vCenter and ESXi with -recovered.
    pub(super) name: Option<String>,
    /// A new UUID and new network addresses, so that it can run beside the original.
    #[serde(default)]
    pub(super) new_uuid: bool,
    /// `none` (cards without a link), `same` (as stored), or, under libvirt, the name of a network; none if absent.
    pub(super) network: Option<String>,
    /// URI of libvirt; qemu:///system if absent. Others than that and qemu:///session are for administrators.
    pub(super) connect: Option<String>,
    /// End the machine of live/SESSION at once, and its session. Its writes become a restore point.
    #[serde(default)]
    undo: bool,
    /// With `undo`: discard the writes. Administrators only.
    #[serde(default)]
    discard: bool,
    /// With `undo`: vCenter or ESXi is gone for good, so change nothing there. Administrators only.
    #[serde(default)]
    without_server: bool,
}

impl Recover {
    pub(super) fn command(self, service: &Service, caller: &Identity) -> Result<Command> {
        if self.undo {
            return self.undo(service, caller);
        }
        if self.discard || self.without_server {
            return Err(invalid("discard, without_server: go with undo"));
        }
        match self.to.as_deref().map(|to| to.split_once(':').unwrap_or((to, ""))) {
            Some(("libvirt", "")) => self.under_libvirt(service, caller),
            Some(("vcenter" | "esxi", _)) => {
                let to = self.to.clone().unwrap_or_default();
                self.under_vsphere(service, caller, &to)
            }
            _ => Err(invalid("to: name the hypervisor: libvirt, vcenter:NAME or esxi:NAME")),
        }
    }

    fn under_libvirt(self, service: &Service, caller: &Identity) -> Result<Command> {
        if !self.hosts.is_empty() {
            return Err(invalid("hosts: libvirt runs on the service's host only"));
        }
        let connect = self.connect.as_deref().unwrap_or(CONNECTIONS[0]);
        if !CONNECTIONS.contains(&connect) {
            caller.allow_all(Permission::Administer)?;
        }
        for text in self.connect.iter().chain(&self.network) {
            check_text(text)?;
        }
        let (machine, address) = self.subject(service, caller)?;
        let name = new_session(service, self.name)?;
        if let Some(name) = &name {
            // It must not take the name of a machine that the caller does not see.
            caller.allow_machine(Permission::Operate, name.as_str())?;
        }
        // A session goes on where it was started.
        let missing = (!address.starts_with("live/")).then(|| libvirt::missing(connect)).flatten();
        if let Some(missing) = missing {
            return Err(Error::new(ErrorKind::Unsupported, missing));
        }
        Ok(Command::new("recover", Some(machine))
            .option("to", Some("libvirt"))
            .option("connect", self.connect)
            .option("name", name)
            .flag("new-uuid", self.new_uuid)
            .option("network", self.network)
            .words([address]))
    }

    /// The machine and the address.
    pub(super) fn subject(&self, service: &Service, caller: &Identity) -> Result<(String, String)> {
        let Address::Live { session, disk: None } = self.address.parse::<Address>()? else {
            return point(caller, Permission::Operate, &self.address);
        };
        let has_options = self.name.is_some() || self.network.is_some() || self.connect.is_some();
        if has_options || self.new_uuid || !self.hosts.is_empty() {
            let text =
                "live/SESSION continues with the options it was started with: give no others";
            return Err(invalid(text));
        }
        let found = live(service, caller, Permission::Operate, &session)?;
        // Under vCenter and ESXi another NFS server may serve them.
        if found.is_served && vsphere_note(service, &session)?.is_none() {
            let text = format!("session {session} is in use: its machine has its disks");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        Ok((found.machine, format!("live/{session}")))
    }

    fn undo(self, service: &Service, caller: &Identity) -> Result<Command> {
        let has_choices = self.to.is_some() || self.name.is_some() || self.network.is_some();
        if has_choices || self.new_uuid || !self.hosts.is_empty() {
            return Err(invalid("undo: goes with address, discard and without_server only"));
        }
        // What a session has captured exists nowhere else.
        let permission = match self.discard || self.without_server {
            true => Permission::Administer,
            false => Permission::Operate,
        };
        let session = session_of(&self.address)?;
        let found = live(service, caller, permission, &session)?;
        let command = Command::new("recover", Some(found.machine))
            .flag("undo", true)
            .flag("discard", self.discard)
            .flag("without-server", self.without_server);
        let command = match vsphere_note(service, &session)? {
            Some(note) if !self.without_server => {
                with_known_access(service, command, &note.access.server)?
            }
            _ => command,
        };
        Ok(command.words([format!("live/{session}")]))
    }
}

/// A machine whose disks move to production storage while it runs. To paths of the service's host: administrators of
/// all machines only.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Move {
    /// live/SESSION.
    address: String,
    /// DISK=PATH, DISK=qcow2:PATH or DISK=raw:PATH for each disk, or one folder; absolute paths of the service's
    /// host. Without any, an interrupted move is settled.
    #[serde(default)]
    #[schema(max_items = 256)]
    pub(super) targets: Vec<String>,
    /// In place of `targets`: a datastore, for a machine that was recovered under vCenter.
    pub(super) to: Option<String>,
    /// Bytes per second that it copies at most, all disks together; no limit if absent.
    #[schema(minimum = 65536)]
    pub(super) rate_bytes_per_second: Option<u64>,
    /// Overwrite existing files.
    #[serde(default)]
    pub(super) replace: bool,
}

impl Move {
    pub(super) fn command(self, service: &Service, caller: &Identity) -> Result<Command> {
        let session = session_of(&self.address)?;
        if vsphere_note_of(service, caller, &session)?.is_some() {
            return self.datastore_command(service, caller, &session);
        }
        caller.allow_all(Permission::Administer)?;
        let found = live(service, caller, Permission::Administer, &session)?;
        if self.to.is_some() {
            let text = format!("to: no machine was recovered under vCenter on session {session}");
            return Err(invalid(text));
        }
        crate::jobs::check_rate(self.rate_bytes_per_second)?;
        let targets = self.targets.iter().map(|text| move_target(service, text));
        let targets = targets.collect::<Result<Vec<_>>>()?;
        if !targets.is_empty() {
            let repository = service.inventory()?.repository()?;
            let checked = moves::check_targets(&repository, &session, &targets, self.replace);
            checked.map_err(|error| match error.kind() {
                // Its advice is an option of the command.
                ErrorKind::AlreadyExists => Error::new(error.kind(), error.message())
                    .advise("choose another name, or overwrite it: replace"),
                _ => error,
            })?;
        }
        Ok(Command::new("move", Some(found.machine))
            .option("rate", self.rate_bytes_per_second)
            .flag("force", self.replace)
            .words(std::iter::once(format!("live/{session}")).chain(self.targets)))
    }
}

/// A target of a move, in none of the service's own folders.
fn move_target(service: &Service, text: &str) -> Result<moves::Target> {
    check_text(text)?;
    let path = text.split_once('=').map_or(text, |(_, path)| path);
    let path = path.strip_prefix("qcow2:").or_else(|| path.strip_prefix("raw:")).unwrap_or(path);
    check_absolute(service, path)?;
    moves::parse_target(text)
}

/// Existing disks to make equal to a point. Administrators of all machines only.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Rollback {
    /// MACHINE/POINT or MACHINE/POINT/DISK.
    address: String,
    /// Targets by disk: a block device, a raw image file, or the NBD URI of a writable export.
    #[serde(default)]
    disks: BTreeMap<String, String>,
    /// The target of the only disk, or of the one that the address names.
    onto: Option<String>,
    /// The targets export a dirty bitmap with all writes since this point.
    since: Option<String>,
    /// The bitmap's name; coldrise-POINT if absent.
    bitmap: Option<String>,
    /// Write nothing: the answer of the run says how much differs.
    #[serde(default)]
    dry_run: bool,
    /// Do not store the present state first. The rollback can then not be undone.
    #[serde(default)]
    no_safety_point: bool,
    /// Compare the whole disks at the end.
    #[serde(default)]
    verify: bool,
}

impl Rollback {
    pub(super) fn command(self, service: &Service, caller: &Identity) -> Result<Command> {
        caller.allow_all(Permission::Administer)?;
        let Address::Point { machine, selector, disk } = self.address.parse::<Address>()? else {
            return Err(invalid("give MACHINE/POINT or MACHINE/POINT/DISK"));
        };
        let address = show(&machine, &selector);
        let address = disk.map_or(address.clone(), |disk| format!("{address}/{disk}"));
        if self.disks.is_empty() == self.onto.is_none() {
            return Err(invalid("disks, onto: give the targets in one of them"));
        }
        for target in self.disks.values().chain(&self.onto) {
            check_in_place(service, target)?;
        }
        let mut words = vec![address];
        for (disk, target) in &self.disks {
            words.push(format!("{}={target}", disk.parse::<DiskName>()?));
        }
        let since = self.since.map(|point| point.parse::<PointName>()).transpose()?;
        self.bitmap.as_deref().map(check_text).transpose()?;
        Ok(Command::new("rollback", Some(machine.to_string()))
            .option("onto", self.onto)
            .option("since", since)
            .option("bitmap", self.bitmap)
            .flag("dry-run", self.dry_run)
            .flag("no-safety-point", self.no_safety_point)
            .flag("verify", self.verify)
            .words(words))
    }
}

/// Checks a target that is written in place.
fn check_in_place(service: &Service, target: &str) -> Result<()> {
    crate::jobs::check_source(target)?;
    match target.contains("://") {
        true => service.options.refuse_own_files(target),
        false => check_absolute(service, target),
    }
}

/// How the guest sees an attached disk.
#[derive(Clone, Copy, Debug, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum AttachedAs {
    Virtio,
    Scsi,
}

/// A disk for a running machine. Administrators of all machines only.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Attach {
    /// MACHINE/POINT/DISK, read-only; or live/SESSION/DISK, writable.
    address: String,
    /// libvirt:DOMAIN, or qmp:SOCKET with the socket of QEMU's monitor, on the service's host.
    to: String,
    /// Its name, at most 20 characters; MACHINE-DISK or SESSION-DISK if absent.
    name: Option<String>,
    /// virtio if absent.
    device: Option<AttachedAs>,
}

impl Attach {
    pub(super) fn command(self, service: &Service, caller: &Identity) -> Result<Command> {
        caller.allow_all(Permission::Administer)?;
        let (machine, address) = disk(service, caller, &self.address)?;
        check_running(service, &self.to)?;
        self.name.as_deref().map(attach::check_name).transpose()?;
        let device = self.device.map(|device| match device {
            AttachedAs::Virtio => "virtio",
            AttachedAs::Scsi => "scsi",
        });
        Ok(Command::new("attach", Some(machine))
            .option("to", Some(self.to))
            .option("as", self.name)
            .option("device", device)
            .words([address]))
    }
}

/// An attached disk that is taken away. Administrators of all machines only.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Detach {
    /// Its name.
    name: String,
    /// The machine, as it was attached.
    from: String,
}

impl Detach {
    pub(super) fn command(self, service: &Service, caller: &Identity) -> Result<Command> {
        caller.allow_all(Permission::Administer)?;
        attach::check_name(&self.name)?;
        check_running(service, &self.from)?;
        Ok(Command::new("detach", None).option("from", Some(self.from)).words([self.name]))
    }
}

/// Checks a running machine. Those that the service boots have their monitors in its own folder: it uses them.
fn check_running(service: &Service, text: &str) -> Result<()> {
    check_text(text)?;
    match text.split_once(':') {
        Some(("qmp", path)) => check_absolute(service, path),
        Some(("libvirt", name)) if !name.is_empty() && !name.starts_with('-') => Ok(()),
        _ => Err(invalid("give libvirt:DOMAIN, or qmp:SOCKET with the socket of QEMU's monitor")),
    }
}

/// Checks a path of the host: absolute, and none of the service's own.
fn check_absolute(service: &Service, path: &str) -> Result<()> {
    if !path.starts_with('/') {
        return Err(invalid(format!("{path:?}: give an absolute path of the service's host")));
    }
    service.options.refuse_own_files(path)
}

pub(super) fn check_text(text: &str) -> Result<()> {
    if text.is_empty() || text.len() > MAX_TEXT_BYTES || text.chars().any(char::is_control) {
        let text = format!("give 1 to {MAX_TEXT_BYTES} bytes without control characters");
        return Err(invalid(text));
    }
    Ok(())
}

/// The session of live/SESSION.
fn session_of(text: &str) -> Result<SessionName> {
    match text.parse::<Address>()? {
        Address::Live { session, disk: None } => Ok(session),
        _ => Err(invalid("address: give live/SESSION")),
    }
}
