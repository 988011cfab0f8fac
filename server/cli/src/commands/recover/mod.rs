//! `coldrise recover`: a machine runs under its own hypervisor, from the backup.

mod place;
mod server;
mod unserved;
mod vsphere;

pub(crate) use place::remove_variables;
pub(crate) use unserved::unserved;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::libvirt::{
    default_domain, rewrite, Domain, DomainOptions, DomainState, DomainXml, NetworkChoice,
    RecoveryNote, VariablesPlace,
};
use coldrise_hypervisors::moves::move_state;
use coldrise_hypervisors::virsh::Virsh;
use coldrise_session::{check_offered, SessionDocument, SessionNotes};
use coldrise_store::{Address, PointDocument, Repository, SessionName, LIBVIRT_XML};
use serde::Serialize;
use serde_json::json;

use crate::coming::Origin;
use crate::hardware::Hardware;
use crate::invocation::Invocation;
use crate::report::{print_line, Report};
use crate::units::show_duration;
use coldrise_hosting::qemu;
use coldrise_hosting::signals::ChildSignals;
use coldrise_hosting::socket_access::SocketOwner;

/// What to do about another machine of the name.
const BESIDE: &str = "end it first; or recover beside it with --new-uuid, and --name if you like";

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
        return place::undo(invocation, &arguments);
    }
    if let Some(Hypervisor::Vsphere(server)) = &arguments.to {
        return vsphere::run(invocation, server, &arguments);
    }
    Virsh::local(Some(&arguments.connect))?;
    let mut signals = ChildSignals::catch()?;
    let owner_for = |connect: &str| match arguments.socket_owner {
        Some(owner) => Ok(Some(owner)),
        None => place::default_owner(connect),
    };
    let repository = invocation.open()?;
    let (prepared, owner) = match &arguments.address {
        Address::Point { machine, selector, disk: None } => {
            let origin = Origin::find(invocation, &repository, machine, selector)?;
            check_offered(origin.document().clone())?;
            // Before anything is published.
            let owner = owner_for(&arguments.connect)?;
            (publish(invocation, &repository, &arguments, &origin)?, owner)
        }
        Address::Live { session, disk: None } => {
            let prepared = go_on(&repository, session)?;
            let owner = owner_for(&prepared.note.connect)?;
            (prepared, owner)
        }
        other => {
            let text = format!("{other}: a machine is recovered with all its disks");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
    };
    let mut server =
        server::RecoveryServer::start(invocation, &repository, prepared, owner, &mut signals)?;
    tell_running(invocation, &server);
    let state = server.serve(invocation, &mut signals)?;
    let (session, note) = (&server.session.name, &server.note);
    let recovered = Recovered {
        session: session.as_str(),
        domain: &note.name,
        connect: &note.connect,
        state,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = match state {
        "paused" => format!(
            "{} is paused; nothing is lost\n  go on     coldrise recover live/{session} --to libvirt\n  \
             end it    coldrise recover live/{session} --undo",
            note.name
        ),
        "moved" if coldrise_session::session(&repository, session).is_err() => {
            format!("{} runs on production storage; its session has ended", note.name)
        }
        "moved" => format!("{} runs on production storage; coldrise sessions says where", note.name),
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

/// A session and its note. The note may not be written yet.
struct Prepared {
    session: SessionDocument,
    note: RecoveryNote,
    /// Published just now: it ends if the machine cannot be started.
    is_new: bool,
}

/// Checks everything that can be checked, then publishes.
fn publish(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    arguments: &RecoverArguments,
    origin: &Origin,
) -> Result<Prepared> {
    let point = origin.document();
    let virsh = Virsh::new(&arguments.connect);
    let free = |domain: &DomainXml| check_free(&virsh, domain);
    // A first pass: the session has no name yet.
    let nowhere = VariablesPlace { file: PathBuf::new(), template: PathBuf::new() };
    free(&domain(arguments, point, "x", std::path::Path::new("/x"), nowhere)?)?;
    let session = origin.publish(invocation, repository, arguments.name.clone())?;
    let done = place::socket(arguments.socket.as_deref(), &session.name).and_then(|socket| {
        let variables = VariablesPlace::of(&arguments.connect, &session, &socket);
        let domain = domain(arguments, point, session.name.as_str(), &socket, variables)?;
        domain.remarks.iter().for_each(|remark| invocation.remark(remark));
        let note = RecoveryNote {
            connect: arguments.connect.clone(),
            name: domain.name,
            socket,
            xml: domain.text,
            variables: domain.variables,
        };
        note.write(&SessionNotes::of(repository, &session.name)?)?;
        if let Err(why) = qemu::kvm_works() {
            invocation.remark(&format!("without KVM the machine is slow: {why}"));
        }
        Ok(note)
    });
    match done {
        Ok(note) => Ok(Prepared { session, note, is_new: true }),
        Err(error) => {
            let _ = coldrise_session::unpublish(repository, &session.name, true);
            Err(error)
        }
    }
}

/// The domain of a point, on the exports of a session.
fn domain(
    arguments: &RecoverArguments,
    point: &PointDocument,
    session: &str,
    socket: &std::path::Path,
    variables: VariablesPlace,
) -> Result<DomainXml> {
    let has_kvm = qemu::kvm_works();
    let uefi = coldrise_firmware::installed();
    let disks = point.disks.iter();
    let options = DomainOptions {
        name: arguments.name.as_ref().map(SessionName::as_str),
        has_new_uuid: arguments.new_uuid,
        network: &arguments.network,
        disks: disks.map(|d| (d.name.clone(), format!("live/{session}/{}", d.name))).collect(),
        socket,
        has_kvm: has_kvm.is_ok(),
        uefi: &uefi,
        variables,
    };
    let stored = point.configuration.as_ref().filter(|_| !arguments.default_hardware);
    match stored.filter(|stored| stored.format == LIBVIRT_XML) {
        Some(stored) => rewrite(&stored.text, &options).map_err(|error| {
            error.advise("start it with plain hardware in place of the stored: --default-hardware")
        }),
        None => {
            let mut hardware = Hardware::of(stored).unwrap_or_default();
            if let Ok(known) = Hardware::of(point.configuration.as_ref()) {
                hardware.firmware = known.firmware;
            }
            Ok(default_domain(point.machine.as_str(), &hardware, &options))
        }
    }
}

/// No machine is started beside itself: both would have the same network addresses and write to the same services.
fn check_free(virsh: &Virsh, domain: &DomainXml) -> Result<()> {
    let by_uuid = domain.uuid.as_ref().map(|uuid| (uuid, format!("a domain with the UUID {uuid}")));
    let by_name = (&domain.name, format!("the domain {}", domain.name));
    for (name, what) in by_uuid.into_iter().chain([by_name]) {
        if Domain::new(virsh, name).state()? != DomainState::Off {
            let text = format!("{what} runs already (virsh list --uuid --name)");
            return Err(Error::new(ErrorKind::Busy, text).advise(BESIDE));
        }
    }
    Ok(())
}

/// A session on which a domain was recovered.
fn go_on(repository: &Arc<Repository>, name: &SessionName) -> Result<Prepared> {
    let state = coldrise_session::session(repository, name)?;
    if let Some(moved) = move_state(repository, name)? {
        moved.check_session_counts()?;
    }
    let notes = SessionNotes::of(repository, name)?;
    let note = RecoveryNote::read(&notes)?.ok_or_else(|| {
        let text = format!("no machine was recovered on session {name}");
        Error::new(ErrorKind::NotFound, text).advise("recover MACHINE/POINT, or boot live/SESSION")
    })?;
    Ok(Prepared { session: state.document, note, is_new: false })
}

fn tell_running(invocation: &Invocation, server: &server::RecoveryServer) {
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
