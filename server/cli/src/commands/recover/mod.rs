//! `coldrise recover`: a machine runs under its own hypervisor, from the backup.

mod undo;
mod vsphere;

use std::path::PathBuf;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosts::parse_host_name;
use coldrise_hypervisors::libvirt::NetworkChoice;
use coldrise_hypervisors::vsphere::recovery_note;
use coldrise_recovery::{DomainRequest, Prepared, RecoveryEnd, RecoveryServer};
use coldrise_requests::{Hypervisor, Recover, parse_network};
use coldrise_session::{PointOfMark, check_offered};
use coldrise_store::{Address, MachineName, SessionName};
use serde::Serialize;
use serde_json::json;

use super::marks::{mark_rules, set_rules};
use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use crate::units::show_duration;
use coldrise_hosting::Origin;
use coldrise_hosting::signals::ChildSignals;

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
/// A point that is still being copied from another site can be recovered, too: missing data is fetched when it is read.
///
/// To keep the machine, use coldrise move: it moves its disks to production storage while it runs.
#[derive(Debug, Args)]
pub(crate) struct RecoverArguments {
    #[command(flatten)]
    request: Recover,

    /// Ignore the stored configuration except for the kind of firmware, and give the machine plain hardware: 2
    /// processors, 2 GiB.
    #[arg(long, display_order = 6)]
    default_hardware: bool,

    /// Path of the NBD server's socket on the machine's host. Default: in /run/coldrise-machines, or in the user's runtime folder.
    #[arg(long, value_name = "PATH", conflicts_with = "undo")]
    socket: Option<PathBuf>,

    /// Owner of the socket. Default for root: libvirt-qemu or qemu, if there is such a user.
    #[arg(long, value_name = "USER[:GROUP]", conflicts_with = "undo")]
    socket_owner: Option<String>,

    #[command(flatten)]
    vsphere: vsphere::VsphereOptions,
}

impl RecoverArguments {
    fn name(&self) -> Result<Option<SessionName>> {
        self.request.name.as_deref().map(SessionName::parse).transpose()
    }

    fn network(&self) -> Result<NetworkChoice> {
        self.request.network.as_deref().map_or(Ok(NetworkChoice::None), parse_network)
    }
}

/// The answer when the machine is off, or the command was ended.
#[derive(Serialize)]
struct Recovered<'a> {
    session: &'a str,
    domain: &'a str,
    /// The host of --on.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<&'a str>,
    connect: &'a str,
    /// `off`, `paused` or `moved`.
    state: &'static str,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: RecoverArguments) -> Result<Report> {
    let address = arguments.request.address.parse()?;
    if arguments.request.undo {
        return undo::run(invocation, &address, &arguments);
    }
    let to = arguments.request.to.as_deref().map(str::parse).transpose()?;
    let to = match to {
        Some(to) => Some(to),
        None => known_hypervisor(invocation, &address)?,
    };
    if let Some(Hypervisor::Vsphere(server)) = to {
        return vsphere::run(invocation, &server, &address, &arguments);
    }
    if !arguments.request.hosts.is_empty() || arguments.request.without_server {
        let text = "--host requires --to vcenter or esxi (libvirt: --on), and --without-server requires --undo";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let connect = arguments.request.connect.as_deref().unwrap_or_default();
    let host = arguments.request.on.as_deref().map(parse_host_name).transpose()?;
    let mut signals = ChildSignals::catch()?;
    let (repository, caller) = (invocation.open()?, invocation.caller()?);
    let marks = mark_rules(arguments.request.marks.as_deref())?;
    let point = whole_point(invocation, &repository, &address)?;
    let prepared = match &point.address {
        Address::Point { machine, selector, disk: None } => {
            let origin = Origin::find(caller, &repository, machine, selector)?;
            check_offered(origin.document().clone())?;
            let (name, network) = (arguments.name()?, arguments.network()?);
            let request = DomainRequest {
                host: host.as_ref(),
                connect,
                name: name.as_ref(),
                marks: marks.as_ref(),
                has_new_uuid: arguments.request.new_uuid,
                has_default_hardware: arguments.default_hardware,
                network: &network,
                socket: arguments.socket.as_deref(),
                socket_owner: arguments.socket_owner.as_deref(),
            };
            Prepared::publish(caller, &repository, &request, &origin)?
        }
        Address::Live { session, disk: None } => {
            let prepared =
                Prepared::of_session(&repository, session, arguments.socket_owner.as_deref())?;
            set_rules(&repository, session, marks)?;
            prepared
        }
        other => return Err(no_single_disk(other)),
    };
    point.keep();
    let mut server = RecoveryServer::start(caller, &repository, prepared, &mut signals)?;
    tell_running(invocation, &server);
    let state = server.serve(caller, &mut signals)?;
    let (session, note) = (&server.session.name, &server.note);
    let recovered = Recovered {
        session: session.as_str(),
        domain: &note.name,
        host: note.host.as_ref().map(MachineName::as_str),
        connect: &note.connect,
        state: state.word(),
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = match state {
        RecoveryEnd::Paused => format!(
            "{} is paused; nothing is lost\n  continue  coldrise recover live/{session} --to libvirt\n  \
             end it    coldrise recover live/{session} --undo",
            note.name
        ),
        RecoveryEnd::Moved if coldrise_session::session(&repository, session).is_err() => {
            format!("{} runs on production storage; its session has ended", note.name)
        }
        RecoveryEnd::Moved => {
            format!("{} runs on production storage; coldrise sessions says where", note.name)
        }
        _ if coldrise_session::session(&repository, session).is_err() => {
            format!("session {session} of {} has ended", note.name)
        }
        _ => format!(
            "{} is off; session {session} holds its writes\n  start it again         coldrise recover \
             live/{session} --to libvirt\n  make a restore point   coldrise unpublish {session}",
            note.name
        ),
    };
    Ok(Report::done(&recovered, text))
}

/// Where the machine of a session runs; `None` for libvirt.
fn known_hypervisor(invocation: &Invocation, address: &Address) -> Result<Option<Hypervisor>> {
    let Address::Live { session, .. } = address else {
        let text = "name the hypervisor: --to libvirt, --to vcenter:HOST or --to esxi:HOST";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    };
    let note = recovery_note(&invocation.open()?, session)?;
    Ok(note.map(|note| Hypervisor::Vsphere(note.access.server)))
}

/// The point of an address with a time mark; any other address as it is.
fn whole_point(
    invocation: &Invocation,
    repository: &std::sync::Arc<coldrise_store::Repository>,
    address: &Address,
) -> Result<PointOfMark> {
    match address.disk() {
        None => invocation.point_of_mark(repository, address),
        Some(_) => Err(no_single_disk(address)),
    }
}

fn no_single_disk(address: &Address) -> Error {
    let text = format!("{address}: a machine is recovered with all its disks");
    Error::new(ErrorKind::InvalidInput, text)
}

fn tell_running(invocation: &Invocation, server: &RecoveryServer) {
    let (note, session) = (&server.note, &server.session.name);
    let event = json!({ "event": "running", "session": session.as_str(), "domain": note.name,
                        "host": note.host, "connect": note.connect, "elapsed_ms": invocation.elapsed_ms() });
    if invocation.is_json() {
        print_line(&event.to_string());
        return;
    }
    print_line(&format!(
        "{}{} runs from {}/{} as session {session}, after {} (transient; this command serves its disks)\n  \
         keep it     coldrise move live/{session} FOLDER\n  undo        coldrise recover \
         live/{session} --undo",
        note.name,
        note.host.as_ref().map(|host| format!(" on {host}")).unwrap_or_default(),
        server.session.machine,
        server.session.point,
        show_duration(invocation.elapsed())
    ));
}
