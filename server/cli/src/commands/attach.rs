//! `coldrise attach` and `detach`: a disk beside those of a running machine.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use coldrise_block::Result;
use coldrise_host::Host;
use coldrise_hosts::{host_of, parse_host_name};
use coldrise_hypervisors::attach::{AttachMachine, AttachedDisk, Device, Machine, check_name};
use coldrise_recovery::{AttachedDiskServer, default_disk_name};
use coldrise_requests::{Attach, AttachedAs, Detach};
use coldrise_store::{Address, Repository};
use serde_json::json;

use super::restore::open_disk;
use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use coldrise_hosting::signals::ChildSignals;
use coldrise_runs::process_run;

/// The options that `attach` and `detach` share.
#[derive(Debug, Args)]
struct GuestArguments {
    /// With libvirt: the URI of libvirt on that host. Default: $LIBVIRT_DEFAULT_URI here, else qemu:///system.
    #[arg(long, value_name = "URI")]
    connect: Option<String>,

    /// With qmp: the socket of the guest agent's port. Before it is detached, the agent is asked
    /// whether the guest has mounted the disk. libvirt knows its own.
    #[arg(long, value_name = "SOCKET")]
    agent: Option<PathBuf>,
}

impl GuestArguments {
    fn find(&self, host: &Host, machine: &Machine) -> Result<AttachMachine> {
        AttachMachine::find(host, machine, self.connect.as_deref(), self.agent.as_deref())
    }
}

/// A host by the name that a user gave; `None` for this one.
pub(crate) fn named_host(repository: &Arc<Repository>, on: Option<&str>) -> Result<Host> {
    host_of(repository, on.map(parse_host_name).transpose()?.as_ref())
}

/// Attach a disk of a restore point or session to a running machine, until Ctrl-C or detach.
///
/// The guest sees a further disk, whose serial number is its name. A restore point's disk is
/// read-only; a session's disk is writable. Ctrl-C detaches it: unmount it in the guest first.
/// The command also ends when the machine ends. See docs/recovery.md.
#[derive(Debug, Args)]
pub(crate) struct AttachArguments {
    #[command(flatten)]
    request: Attach,

    #[command(flatten)]
    guest: GuestArguments,
}

/// Detach a disk that `attach` attached. Unmount it in the guest first.
///
/// Also removes what a killed `attach` left in the machine.
#[derive(Debug, Args)]
pub(crate) struct DetachArguments {
    #[command(flatten)]
    request: Detach,

    #[command(flatten)]
    guest: GuestArguments,

    /// Detach even if the guest has mounted the disk: its programs get errors, and unwritten data is lost.
    #[arg(long)]
    force: bool,
}

pub(crate) fn attach(invocation: &Invocation, arguments: &AttachArguments) -> Result<Report> {
    let mut signals = ChildSignals::catch()?;
    let Attach { address, to, name, on, device } = &arguments.request;
    let (address, to): (Address, Machine) = (address.parse()?, to.parse()?);
    let repository = invocation.open()?;
    let host = named_host(&repository, on.as_deref())?;
    let machine = arguments.guest.find(&host, &to)?;
    let opened = open_disk(invocation, &repository, &address)?;
    let export = opened.export;
    let name = name.clone().unwrap_or_else(|| default_disk_name(&export));
    check_name(&name)?;
    let caller = invocation.caller()?;
    drop(opened.disk);
    let mut server = AttachedDiskServer::start(caller, &machine, &export, &mut signals)?;
    let is_read_only = !matches!(address, Address::Live { .. });
    let device = match device.unwrap_or_default() {
        AttachedAs::Virtio => Device::VirtioBlk,
        AttachedAs::Scsi => Device::Scsi,
    };
    let disk =
        AttachedDisk { name: &name, socket: &server.socket, export: &export, is_read_only, device };
    // Before: doctor looks for what a killed command has left.
    process_run::progress(json!({ "phase": "attaching", "name": name, "address": export,
                                 "is_read_only": is_read_only, "machine": to.absolute()?.to_string(),
                                 "host": on, "connect": arguments.guest.connect }));
    machine.attach(&disk)?;
    opened.point.keep();
    let elapsed_ms = invocation.elapsed_ms();
    process_run::progress(json!({ "phase": "attached", "name": name, "address": export,
                                 "is_read_only": is_read_only }));
    if invocation.is_json() {
        let ready = json!({ "event": "ready", "name": name, "address": export,
                            "is_read_only": is_read_only, "elapsed_ms": elapsed_ms });
        print_line(&ready.to_string());
    } else {
        let kind = if is_read_only { "read-only" } else { "writable" };
        print_line(&format!(
            "ready: {export} is attached, {kind}, with the serial number {name} \
             (/dev/disk/by-id/…-{name}; Ctrl-C detaches it)"
        ));
    }
    let how = server.serve(caller, &machine, &name, &mut signals)?;
    let object = json!({ "name": name, "address": export, "end": how,
                         "elapsed_ms": invocation.elapsed_ms() });
    Ok(Report::done(&object, format!("{name}: {how}")))
}

pub(crate) fn detach(invocation: &Invocation, arguments: &DetachArguments) -> Result<Report> {
    let Detach { name, from, on } = &arguments.request;
    let host = match on {
        Some(_) => named_host(&invocation.open()?, on.as_deref())?,
        None => Host::here(),
    };
    let machine = arguments.guest.find(&host, &from.parse()?)?;
    machine.detach(name, arguments.force, &|text| invocation.remark(text))?;
    let object = json!({ "name": name, "elapsed_ms": invocation.elapsed_ms() });
    Ok(Report::done(&object, format!("detached {name}")))
}
