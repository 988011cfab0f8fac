//! Starting recoveries into production: machines under a hypervisor, moves, rollbacks, attached disks.
//!
//! What writes to a path of the host, or connects to a socket that the caller names, is for administrators of
//! all machines: a path of one machine can be another's disk.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosts::{Hosts, host_of, parse_host_name};
use coldrise_hypervisors::libvirt::RecoveryNote;
use coldrise_hypervisors::{attach, libvirt, moves};
use coldrise_requests::{Attach, Detach, Move, Recover, Rollback};
use coldrise_session::SessionNotes;
use coldrise_store::{Address, DiskName, PointName, SessionName};

use super::starts::{Command, disk, live, new_session, origin};
use super::vsphere_starts::{known_login, to_datastore, under_vsphere, vsphere_note_of};
use crate::access::{Identity, Permission};
use crate::hypervisors::vsphere_note;
use crate::invalid::invalid;
use crate::service::Service;

/// libvirt's connections that operators may use. Others name sockets of the host.
const CONNECTIONS: [&str; 2] = ["qemu:///system", "qemu:///session"];
/// Maximum length of a text that is passed on, in bytes.
const MAX_TEXT_BYTES: usize = 1024;

/// A machine to run under its own hypervisor.
pub(super) fn recover(request: Recover, service: &Service, caller: &Identity) -> Result<Command> {
    if request.undo {
        return undo(&request, service, caller);
    }
    if request.discard || request.without_server {
        return Err(invalid("discard, without_server: only with undo"));
    }
    match request.to.as_deref().map(|to| to.split_once(':').unwrap_or((to, ""))) {
        Some(("libvirt", "")) => under_libvirt(&request, service, caller),
        Some(("vcenter" | "esxi", _)) if request.on.is_some() => {
            Err(invalid("on: only for libvirt; hosts names those of vcenter and esxi"))
        }
        Some(("vcenter" | "esxi", _)) => under_vsphere(request, service, caller),
        _ => Err(invalid("to: name the hypervisor: libvirt, vcenter:NAME or esxi:NAME")),
    }
}

fn under_libvirt(request: &Recover, service: &Service, caller: &Identity) -> Result<Command> {
    if !request.hosts.is_empty() {
        return Err(invalid("hosts: only for vcenter and esxi; on names a host of libvirt"));
    }
    let connect = request.connect.as_deref().unwrap_or(CONNECTIONS[0]);
    if request.on.is_some() && !connect.contains(":///system") {
        return Err(invalid("connect: with on, machines run under qemu:///system of that host"));
    }
    check_host(service, request.on.as_deref())?;
    if !CONNECTIONS.contains(&connect) {
        caller.allow_all(Permission::Administer)?;
    }
    for text in request.connect.iter().chain(&request.network) {
        check_text(text)?;
    }
    let machine = subject(request, service, caller)?;
    // A session continues where it was started.
    let is_new = !request.address.starts_with("live/") && request.on.is_none();
    if let Some(missing) = is_new.then(|| libvirt::missing(connect)).flatten() {
        return Err(Error::new(ErrorKind::Unsupported, missing));
    }
    Command::new("recover", machine, request)
}

/// The machine of a recovery, whose new name is free.
pub(super) fn subject(request: &Recover, service: &Service, caller: &Identity) -> Result<String> {
    let Address::Live { session, disk: None } = request.address.parse::<Address>()? else {
        let machine = origin(service, caller, &request.address)?;
        new_session(service, request.name.as_deref())?;
        if let Some(name) = &request.name {
            // It must not take the name of a machine that the caller does not see.
            caller.allow_machine(Permission::Operate, name)?;
        }
        return Ok(machine);
    };
    let has_options =
        request.name.is_some() || request.network.is_some() || request.connect.is_some();
    if has_options || request.new_uuid || request.on.is_some() || !request.hosts.is_empty() {
        let text = "live/SESSION continues with the options it was started with: give no others";
        return Err(invalid(text));
    }
    let found = live(service, caller, Permission::Operate, &session)?;
    // Under vCenter and ESXi another NFS server may serve them.
    if found.is_served && vsphere_note(service, &session)?.is_none() {
        let text = format!("session {session} is in use: its machine has its disks");
        return Err(Error::new(ErrorKind::Busy, text));
    }
    Ok(found.machine)
}

fn undo(request: &Recover, service: &Service, caller: &Identity) -> Result<Command> {
    let has_choices = request.to.is_some() || request.name.is_some() || request.network.is_some();
    if has_choices || request.new_uuid || request.on.is_some() || !request.hosts.is_empty() {
        return Err(invalid("undo: only with address, discard and without_server"));
    }
    // What a session has captured exists nowhere else.
    let permission = match request.discard || request.without_server {
        true => Permission::Administer,
        false => Permission::Operate,
    };
    let session = session_of(&request.address)?;
    let found = live(service, caller, permission, &session)?;
    // libvirt's note says where the machine is.
    let request = Recover { connect: None, ..request.clone() };
    let mut command = Command::new("recover", found.machine, &request)?;
    if let Some(note) = vsphere_note(service, &session)?.filter(|_| !request.without_server) {
        let login = known_login(service, &note.access.server)?;
        command.line = command.line.with(&login);
    }
    Ok(command)
}

/// A machine whose disks move to production storage while it runs.
pub(super) fn start_move(request: Move, service: &Service, caller: &Identity) -> Result<Command> {
    let session = session_of(&request.address)?;
    if vsphere_note_of(service, caller, &session)?.is_some() {
        return to_datastore(&request, service, caller, &session);
    }
    caller.allow_all(Permission::Administer)?;
    let found = live(service, caller, Permission::Administer, &session)?;
    if request.to.is_some() {
        let text = format!("to: no machine was recovered under vCenter on session {session}");
        return Err(invalid(text));
    }
    crate::jobs::check_rate(request.rate_bytes_per_second)?;
    let targets = request.targets.iter().map(|text| move_target(service, text));
    let targets = targets.collect::<Result<Vec<_>>>()?;
    if !targets.is_empty() {
        let repository = service.inventory()?.repository()?;
        let recovered = RecoveryNote::read(&SessionNotes::of(&repository, &session)?)?;
        let host = host_of(&repository, recovered.and_then(|note| note.host).as_ref())?;
        let checked = moves::check_targets(&host, &repository, &session, &targets, request.replace);
        checked.map_err(|error| match error.kind() {
            // Its advice is an option of the command.
            ErrorKind::AlreadyExists => Error::new(error.kind(), error.message())
                .advise("choose another name, or overwrite it: replace"),
            _ => error,
        })?;
    }
    Command::new("move", found.machine, &request)
}

/// A target of a move, in none of the service's own folders.
fn move_target(service: &Service, text: &str) -> Result<moves::Target> {
    check_text(text)?;
    let path = text.split_once('=').map_or(text, |(_, path)| path);
    let path = path.strip_prefix("qcow2:").or_else(|| path.strip_prefix("raw:")).unwrap_or(path);
    if !path.starts_with('/') {
        return Err(invalid(format!("{path:?}: give an absolute path of the machine's host")));
    }
    service.options.refuse_own_files(path)?;
    moves::parse_target(text)
}

/// Existing disks to make equal to a point.
pub(super) fn rollback(request: Rollback, service: &Service, caller: &Identity) -> Result<Command> {
    caller.allow_all(Permission::Administer)?;
    let Address::Point { machine, .. } = request.address.parse::<Address>()? else {
        return Err(invalid("give MACHINE/POINT or MACHINE/POINT/DISK"));
    };
    if request.disks.is_empty() == request.onto.is_none() {
        return Err(invalid("disks, onto: give the targets in one of them"));
    }
    let disks = request.disks.iter().filter_map(|word| word.split_once('='));
    for target in disks.clone().map(|(_, target)| target).chain(request.onto.as_deref()) {
        check_in_place(service, target)?;
    }
    check_host(service, request.on.as_deref())?;
    for (disk, _) in disks {
        disk.parse::<DiskName>()?;
    }
    request.since.as_deref().map(str::parse::<PointName>).transpose()?;
    request.bitmap.as_deref().map(check_text).transpose()?;
    Command::new("rollback", machine.to_string(), &request)
}

/// Checks a target that is written in place.
fn check_in_place(service: &Service, target: &str) -> Result<()> {
    crate::jobs::check_source(target)?;
    match target.contains("://") {
        true => service.options.refuse_own_files(target),
        false => check_absolute(service, target),
    }
}

/// A disk for a running machine.
pub(super) fn attach(request: Attach, service: &Service, caller: &Identity) -> Result<Command> {
    caller.allow_all(Permission::Administer)?;
    let machine = disk(service, caller, &request.address)?;
    check_running(service, &request.to)?;
    check_host(service, request.on.as_deref())?;
    request.name.as_deref().map(attach::check_name).transpose()?;
    Command::new("attach", machine, &request)
}

/// An attached disk to detach.
pub(super) fn detach(request: Detach, service: &Service, caller: &Identity) -> Result<Command> {
    caller.allow_all(Permission::Administer)?;
    attach::check_name(&request.name)?;
    check_running(service, &request.from)?;
    check_host(service, request.on.as_deref())?;
    Command::new("detach", None::<String>, &request)
}

/// Checks the name of a host.
pub(super) fn check_host(service: &Service, on: Option<&str>) -> Result<()> {
    let Some(name) = on.map(parse_host_name).transpose()? else { return Ok(()) };
    Hosts::of(&service.inventory()?.repository()?).find(&name).map(drop)
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
