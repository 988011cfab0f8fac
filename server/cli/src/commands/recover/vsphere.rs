//! `coldrise recover --to vcenter:HOST` and `--to esxi:HOST`.

mod answer;
mod options;
mod serving;

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::vsphere::{
    datastore_name, lock, recovery_note, Steps, Vsphere, VsphereNote, VspherePhase,
};
use coldrise_session::{check_offered, SessionNotes};
use coldrise_store::{default_cache_bytes, Address, Repository, SessionName};

use answer::{report, tell_running};
pub(super) use options::VsphereOptions;

use super::place::MachineEnd;
use super::{place, NetworkChoice, RecoverArguments};
use crate::coming::Origin;
use crate::invocation::Invocation;
use crate::report::Report;
use coldrise_hosting::ganesha::{Ganesha, NfsOptions, PATH};
use coldrise_hosting::signals::ChildSignals;

/// The only port that ESXi uses.
const NFS_PORT: u16 = 2049;
const MOUNT_PORT: u16 = 20048;
/// Idle time after which the server closes a file.
const IDLE: Duration = Duration::from_secs(60);
/// How long a server may take to close the session of a machine that is gone: the idle time, and some more.
const CLOSE_PATIENCE: Duration = Duration::from_secs(90);

/// A machine that starts.
struct Recovery<'a> {
    session: SessionName,
    note: VsphereNote,
    vsphere: Vsphere<'a>,
    addresses: Vec<IpAddr>,
    /// Published just now: it ends if the machine cannot be started.
    is_new: bool,
}

pub(super) fn run(
    invocation: &Invocation,
    server: &str,
    arguments: &RecoverArguments,
) -> Result<Report> {
    let signals = RefCell::new(ChildSignals::catch()?);
    let was_cancelled = Cell::new(false);
    let is_cancelled = || {
        was_cancelled.set(was_cancelled.get() || signals.borrow_mut().was_asked_to_end());
        was_cancelled.get()
    };
    let repository = invocation.open()?;
    let mut recovery = match &arguments.address {
        Address::Point { machine, selector, disk: None } => {
            let origin = Origin::find(invocation, &repository, machine, selector)?;
            check_offered(origin.document().clone())?;
            publish(invocation, &repository, server, arguments, &origin, &is_cancelled)?
        }
        Address::Live { session, disk: None } => {
            go_on(&repository, server, arguments, session, &is_cancelled)?
        }
        other => {
            let text = format!("{other}: a machine is recovered with all its disks");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
    };
    let started = start(invocation, &repository, arguments, &mut recovery, &signals, &is_cancelled);
    let ganesha = started.map_err(|error| withdraw(invocation, &repository, &recovery, error))?;
    // Logs out: the machine can run for long.
    let Recovery { session, note, vsphere, .. } = recovery;
    drop(vsphere);
    tell_running(invocation, &session, &note, ganesha.is_some());
    let Some(ganesha) = ganesha else {
        return Ok(report(invocation, &session, &note, "running"));
    };
    let mut signals = signals.borrow_mut();
    serving::serve(invocation, &repository, (session, note), ganesha, &mut signals)
}

/// Checks everything that can be checked, then publishes and writes the note.
fn publish<'a>(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    server: &str,
    arguments: &RecoverArguments,
    origin: &Origin,
    is_cancelled: &'a dyn Fn() -> bool,
) -> Result<Recovery<'a>> {
    let options = &arguments.vsphere;
    let has_network = match &arguments.network {
        NetworkChoice::None => false,
        NetworkChoice::Same => true,
        NetworkChoice::Named(name) => {
            let text = format!(
                "--network {name}: give none or same; choose networks in the vSphere client"
            );
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
    };
    let access = options.access(server)?;
    let vsphere = Vsphere::login(&access, is_cancelled)?;
    let hosts = vsphere.choose_hosts(&options.host)?;
    let nfs_host = options.nfs_host(&hosts)?.to_string();
    let session = origin.publish(invocation, repository, arguments.name.clone())?.name;
    let name = match &arguments.name {
        Some(name) => name.to_string(),
        // The lost machine usually is in the inventory still.
        None => format!("{}-recovered", origin.document().machine),
    };
    let note = VsphereNote {
        access,
        name,
        machine: None,
        hosts: hosts.names,
        datastore: datastore_name(&nfs_host),
        nfs_host,
        nfs_path: format!("{PATH}/live"),
        has_network,
        has_new_uuid: arguments.new_uuid,
        phase: VspherePhase::Starting,
    };
    match SessionNotes::of(repository, &session).and_then(|notes| note.write(&notes)) {
        Ok(()) => {
            let addresses = hosts.addresses;
            Ok(Recovery { session, note, vsphere, addresses, is_new: true })
        }
        Err(error) => {
            let _ = coldrise_session::unpublish(repository, &session, true);
            Err(error)
        }
    }
}

/// A session on which a machine was recovered.
fn go_on<'a>(
    repository: &Arc<Repository>,
    server: &str,
    arguments: &RecoverArguments,
    session: &SessionName,
    is_cancelled: &'a dyn Fn() -> bool,
) -> Result<Recovery<'a>> {
    let mut note = recovery_note(repository, session)?.ok_or_else(|| {
        let text = format!("no machine was recovered under vCenter or ESXi on session {session}");
        Error::new(ErrorKind::NotFound, text).advise("recover MACHINE/POINT")
    })?;
    if note.access.server != server {
        let text = format!("the machine of session {session} is at {}", note.access.server);
        return Err(Error::new(ErrorKind::InvalidInput, text)
            .advise("to change the server, undo this recovery first"));
    }
    if note.is_moved() || matches!(note.phase, VspherePhase::Moving { .. }) {
        return Err(Error::new(ErrorKind::Busy, note.sentence(session)));
    }
    arguments.vsphere.override_access(&mut note.access)?;
    let vsphere = Vsphere::login(&note.access, is_cancelled)?;
    let addresses = vsphere.choose_hosts(&note.hosts)?.addresses;
    Ok(Recovery { session: session.clone(), note, vsphere, addresses, is_new: false })
}

/// Starts the NFS server, if none serves already, and the machine.
fn start(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    arguments: &RecoverArguments,
    recovery: &mut Recovery<'_>,
    signals: &RefCell<ChildSignals>,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<Option<Ganesha>> {
    let notes = SessionNotes::of(repository, &recovery.session)?;
    let _lock = lock(&notes, &recovery.session)?;
    let ganesha = serve_nfs(invocation, arguments, recovery, &mut signals.borrow_mut())?;
    let tell = |text: &str| invocation.remark(text);
    let session = &recovery.session;
    let steps = Steps { session, notes: &notes, tell: &tell, is_cancelled };
    recovery.vsphere.start(&steps, &mut recovery.note)?;
    Ok(ganesha)
}

/// One NFS server serves all sessions of a repository, so that of another command is used.
fn serve_nfs(
    invocation: &Invocation,
    arguments: &RecoverArguments,
    recovery: &Recovery<'_>,
    signals: &mut ChildSignals,
) -> Result<Option<Ganesha>> {
    let address: IpAddr = recovery.note.nfs_host.parse().map_err(|_| {
        Error::new(ErrorKind::Internal, "the note of a recovery has no address of the NFS server")
    })?;
    let listen = SocketAddr::new(address, NFS_PORT);
    let mut allowed = arguments.vsphere.allow.clone();
    if allowed.is_empty() {
        let hosts = recovery.addresses.iter();
        allowed = hosts.map(|address| address.to_string().parse()).collect::<Result<_>>()?;
    }
    let options = NfsOptions {
        listen,
        mount_port: MOUNT_PORT,
        allowed,
        serves_v3: true,
        serves_v4: false,
        idle: IDLE,
        cache_bytes: default_cache_bytes(),
        is_read_only: false,
    };
    Ganesha::find_or_start(invocation.caller()?, &options, signals)
}

/// Undoes a recovery whose machine did not start.
fn withdraw(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    recovery: &Recovery<'_>,
    error: Error,
) -> Error {
    let Recovery { session, note, vsphere, is_new, .. } = recovery;
    let kept = || format!("session {session} is kept: coldrise recover live/{session} --undo");
    // The same text twice would hide the reason.
    let keep = |error: Error| {
        if error.is_advised() {
            invocation.remark(&kept());
            error
        } else {
            error.advise(kept())
        }
    };
    if !is_new {
        return error;
    }
    let undone = SessionNotes::of(repository, session).and_then(|notes| {
        let _lock = lock(&notes, session)?;
        let tell = |text: &str| invocation.remark(text);
        let steps = Steps { session, notes: &notes, tell: &tell, is_cancelled: &|| false };
        vsphere.undo(&steps, note).map(drop)
    });
    match undone.and_then(|()| place::end_session(repository, session, true, CLOSE_PATIENCE)) {
        Ok(_) => error,
        Err(why) => {
            invocation.remark(&format!("cleaning up failed: {}", why.full_message()));
            keep(error)
        }
    }
}

/// `recover --undo`.
pub(super) fn undo(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    session: &SessionName,
    arguments: &RecoverArguments,
) -> Result<Report> {
    let notes = SessionNotes::of(repository, session)?;
    let lock = lock(&notes, session)?;
    let missing =
        || Error::new(ErrorKind::NotFound, format!("session {session} was undone meanwhile"));
    let mut note = VsphereNote::read(&notes)?.ok_or_else(missing)?;
    if note.is_moved() {
        return Err(Error::new(ErrorKind::Busy, note.sentence(session)));
    }
    arguments.vsphere.override_access(&mut note.access)?;
    let mut end = MachineEnd::Unknown(note.access.server.clone());
    if !arguments.vsphere.without_server {
        let tell = |text: &str| invocation.remark(text);
        let steps = Steps { session, notes: &notes, tell: &tell, is_cancelled: &|| false };
        end = match Vsphere::login(&note.access, steps.is_cancelled)?.undo(&steps, &note)? {
            true => MachineEnd::Ended,
            false => MachineEnd::NotThere,
        };
    }
    drop(lock);
    let discard = arguments.discard;
    let sealed = place::end_session(repository, session, discard, CLOSE_PATIENCE)?;
    Ok(place::undone(invocation, session, (&note.name, end), sealed, discard))
}
