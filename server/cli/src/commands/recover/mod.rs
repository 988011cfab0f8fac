//! `coldrise recover`: a machine runs under its own hypervisor, from the backup.

mod undo;
mod vsphere;

use std::path::PathBuf;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::libvirt::NetworkChoice;
use coldrise_hypervisors::virsh::Virsh;
use coldrise_recovery::{DomainRequest, Prepared, RecoveryEnd, RecoveryServer};
use coldrise_session::check_offered;
use coldrise_store::{Address, SessionName};
use serde::Serialize;
use serde_json::json;

use crate::invocation::Invocation;
use crate::report::{print_line, Report};
use crate::units::show_duration;
use coldrise_hosting::signals::ChildSignals;
use coldrise_hosting::socket_access::SocketOwner;
use coldrise_hosting::Origin;

/// Run a machine from its backup under its own hypervisor, in seconds.
///
/// Publishes the point, serves the new session on a Unix socket, and starts a transient domain of
/// libvirt from the XML that was stored with the point. The command serves the disks while the
/// machine runs: leave it running. If it is ended or killed, the machine is paused and sees no
/// error; coldrise recover live/SESSION continues. Nothing of the machine's old host is used:
/// host devices, files of drives and unknown devices are left out and named. The network cards
/// have no link unless --network is given.
///
/// With --to vcenter:HOST or esxi:HOST the hosts mount the session over NFS as a datastore, and the machine is
/// registered from it and powered on. An NFS server that runs already (coldrise serve nfs) is used;
/// otherwise this command serves, also until it is ended. See docs/recovery-esxi.md.
///
/// A point that is still on its way from another site can be recovered, too: what is missing is fetched when it is read.
///
/// When the machine is to stay, coldrise move moves its disks to production storage while it runs.
#[derive(Debug, Args)]
pub(crate) struct RecoverArguments {
    /// MACHINE/POINT; or live/SESSION, to go on with a recovered machine.
    #[arg(value_name = "MACHINE/POINT|live/SESSION")]
    address: Address,

    /// libvirt on this host; vcenter:HOST or esxi:HOST, with a port if it is not 443.
    #[arg(long, value_name = "HYPERVISOR", value_parser = parse_hypervisor, required_unless_present = "undo")]
    to: Option<Hypervisor>,

    /// End the machine of live/SESSION at once, and its session. Its writes become a restore point,
    /// unless --discard is given.
    #[arg(long, conflicts_with_all = ["to", "name", "new_uuid", "network", "socket", "socket_owner", "connect"])]
    undo: bool,

    /// With --undo: discard the machine's writes.
    #[arg(long, requires = "undo")]
    discard: bool,

    /// URI of libvirt on this host.
    #[arg(long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,

    /// Name of the machine, and of the session. Default: the stored name; under vCenter and ESXi with the
    /// ending -recovered.
    #[arg(long, value_name = "NAME")]
    name: Option<SessionName>,

    /// Give the machine a new UUID and new network addresses, so that it can run beside the original.
    /// Without --name its name gets the ending -recovered.
    #[arg(long)]
    new_uuid: bool,

    /// Leave the stored configuration alone but for the kind of firmware, and give the machine plain hardware: 2
    /// processors, 2 GiB.
    #[arg(long)]
    default_hardware: bool,

    /// Network cards: none (no link), same (as stored), or the name of a network of libvirt.
    #[arg(long, value_name = "none|same|NETWORK", default_value = "none", value_parser = parse_network)]
    network: NetworkChoice,

    /// Path of the NBD server's socket. Default: in /run/coldrise, or in the user's runtime folder.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Owner of the socket. Default for root: libvirt-qemu or qemu, if there is such a user.
    #[arg(long, value_name = "USER[:GROUP]")]
    socket_owner: Option<SocketOwner>,

    #[command(flatten)]
    vsphere: vsphere::VsphereOptions,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Hypervisor {
    /// QEMU under libvirt.
    Libvirt,
    /// vCenter or ESXi, at `HOST` or `HOST:PORT`.
    Vsphere(String),
}

fn parse_hypervisor(text: &str) -> Result<Hypervisor> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || ".-_:[]".contains(c);
    match text.split_once(':') {
        None if text == "libvirt" => Ok(Hypervisor::Libvirt),
        Some(("vcenter" | "esxi", server)) if !server.is_empty() && server.chars().all(is_part) => {
            Ok(Hypervisor::Vsphere(server.to_owned()))
        }
        _ => {
            let text = format!("{text}: give libvirt, vcenter:HOST or esxi:HOST");
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    }
}

fn parse_network(text: &str) -> Result<NetworkChoice> {
    match text {
        "none" => Ok(NetworkChoice::None),
        "same" => Ok(NetworkChoice::Same),
        "" => Err(Error::new(ErrorKind::InvalidInput, "give none, same or the name of a network")),
        name => Ok(NetworkChoice::Named(name.to_owned())),
    }
}

/// The answer when the machine is off, or the command was ended.
#[derive(Serialize)]
struct Recovered<'a> {
    session: &'a str,
    domain: &'a str,
    connect: &'a str,
    /// `off`, `paused` or `moved`.
    state: &'static str,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: RecoverArguments) -> Result<Report> {
    if arguments.undo {
        return undo::run(invocation, &arguments);
    }
    if let Some(Hypervisor::Vsphere(server)) = &arguments.to {
        return vsphere::run(invocation, server, &arguments);
    }
    Virsh::local(Some(&arguments.connect))?;
    let mut signals = ChildSignals::catch()?;
    let (repository, caller) = (invocation.open()?, invocation.caller()?);
    let prepared = match &arguments.address {
        Address::Point { machine, selector, disk: None } => {
            let origin = Origin::find(caller, &repository, machine, selector)?;
            check_offered(origin.document().clone())?;
            let request = DomainRequest {
                connect: &arguments.connect,
                name: arguments.name.as_ref(),
                has_new_uuid: arguments.new_uuid,
                has_default_hardware: arguments.default_hardware,
                network: &arguments.network,
                socket: arguments.socket.as_deref(),
                socket_owner: arguments.socket_owner,
            };
            Prepared::publish(caller, &repository, &request, &origin)?
        }
        Address::Live { session, disk: None } => {
            Prepared::of_session(&repository, session, arguments.socket_owner)?
        }
        other => return Err(no_single_disk(other)),
    };
    let mut server = RecoveryServer::start(caller, &repository, prepared, &mut signals)?;
    tell_running(invocation, &server);
    let state = server.serve(caller, &mut signals)?;
    let (session, note) = (&server.session.name, &server.note);
    let recovered = Recovered {
        session: session.as_str(),
        domain: &note.name,
        connect: &note.connect,
        state: state.word(),
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = match state {
        RecoveryEnd::Paused => format!(
            "{} is paused; nothing is lost\n  go on     coldrise recover live/{session} --to libvirt\n  \
             end it    coldrise recover live/{session} --undo",
            note.name
        ),
        RecoveryEnd::Moved if coldrise_session::session(&repository, session).is_err() => {
            format!("{} runs on production storage; its session has ended", note.name)
        }
        RecoveryEnd::Moved => format!("{} runs on production storage; coldrise sessions says where", note.name),
        _ if coldrise_session::session(&repository, session).is_err() => {
            format!("{} was ended, and its session", note.name)
        }
        _ => format!(
            "{} is off; session {session} holds its writes\n  start it again         coldrise recover \
             live/{session} --to libvirt\n  make a restore point   coldrise unpublish {session}",
            note.name
        ),
    };
    Ok(Report::done(&recovered, text))
}

fn no_single_disk(address: &Address) -> Error {
    let text = format!("{address}: a machine is recovered with all its disks");
    Error::new(ErrorKind::InvalidInput, text)
}

fn tell_running(invocation: &Invocation, server: &RecoveryServer) {
    let (note, session) = (&server.note, &server.session.name);
    let event = json!({ "event": "running", "session": session.as_str(), "domain": note.name,
                        "connect": note.connect, "elapsed_ms": invocation.elapsed_ms() });
    if invocation.is_json() {
        print_line(&event.to_string());
        return;
    }
    print_line(&format!(
        "{} runs from {}/{} as session {session}, after {} (transient; this command serves its disks)\n  \
         when calm   coldrise move live/{session} FOLDER\n  undo        coldrise recover \
         live/{session} --undo",
        note.name,
        server.session.machine,
        server.session.point,
        show_duration(invocation.elapsed())
    ));
}
