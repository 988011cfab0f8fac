//! A machine under vCenter or ESXi: its start from a session that an NFS server of this host serves, and its end.

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosting::ganesha::{Client, Ganesha, NfsOptions, PATH};
use coldrise_hosting::signals::ChildSignals;
use coldrise_hosting::{Caller, Origin};
use coldrise_hypervisors::libvirt::NetworkChoice;
use coldrise_hypervisors::vsphere::{
    AccessOptions, ChosenHosts, Steps, Vsphere, VsphereNote, VspherePhase, datastore_name, lock,
    recovery_note,
};
use coldrise_session::SessionNotes;
use coldrise_store::{MarkRules, Repository, SessionName, default_cache_bytes};

use crate::RecoveryEnd;
use crate::end::{MachineEnd, UndoRequest, Undone, end_session};
use crate::vsphere_server::{self, Recovered};

/// The only port that ESXi uses.
const NFS_PORT: u16 = 2049;
const MOUNT_PORT: u16 = 20048;
/// Idle time after which the server closes a file.
const IDLE: Duration = Duration::from_secs(60);
/// How long a server may take to close the session of a machine that is gone: the idle time, and some more.
const CLOSE_PATIENCE: Duration = Duration::from_secs(90);

/// How a machine is recovered under vCenter or ESXi.
pub struct VsphereRequest<'a> {
    /// `HOST` or `HOST:PORT`.
    pub server: &'a str,
    /// How to log in.
    pub access: AccessOptions,
    /// Hosts that get the datastore; the first one runs the machine.
    pub hosts: &'a [String],
    /// Address of this machine by which the hosts reach it.
    pub nfs_server: Option<IpAddr>,
    /// Clients that the NFS server accepts; none stands for the hosts.
    pub allowed: &'a [Client],
    /// Its network cards.
    pub network: &'a NetworkChoice,
    /// Give the machine a new UUID and new network addresses.
    pub has_new_uuid: bool,
    /// Name of the machine, and of the session.
    pub name: Option<&'a SessionName>,
    /// Which time marks of a new session are kept; `None` for the default.
    pub marks: Option<&'a MarkRules>,
}

/// A machine that runs from a session.
pub struct VsphereMachine {
    /// The session.
    pub session: SessionName,
    /// Its note.
    pub note: VsphereNote,
    /// The NFS server, if this process serves.
    ganesha: Option<Ganesha>,
}

impl VsphereMachine {
    /// Whether this process serves its disks.
    pub fn is_served_here(&self) -> bool {
        self.ganesha.is_some()
    }

    /// Serves until a signal ends this program, or the machine was undone or moved and no other one uses the server.
    /// Returns the machine that was served last, or the own one if it has ended. At once with `None` if another process
    /// serves.
    ///
    /// # Errors
    /// `ToolFailed` if the server ends.
    pub fn serve(
        self,
        caller: &Caller,
        repository: &Arc<Repository>,
        signals: &mut ChildSignals,
    ) -> Result<(Recovered, Option<RecoveryEnd>)> {
        let own = (self.session, self.note);
        let Some(ganesha) = self.ganesha else { return Ok((own, None)) };
        let (served, end) = vsphere_server::serve(caller, repository, own, ganesha, signals)?;
        Ok((served, Some(end)))
    }
}

/// A machine that starts.
pub struct VsphereRecovery<'a> {
    session: SessionName,
    note: VsphereNote,
    vsphere: Vsphere<'a>,
    addresses: Vec<IpAddr>,
    /// Published just now: it ends if the machine cannot be started.
    is_new: bool,
}

/// Checks everything that can be checked, then publishes and writes the note.
///
/// # Errors
/// `InvalidInput` for options that do not fit; those of the server and of the repository.
pub fn publish<'a>(
    caller: &Caller,
    repository: &Arc<Repository>,
    request: &VsphereRequest<'_>,
    origin: &Origin,
    is_cancelled: &'a dyn Fn() -> bool,
) -> Result<VsphereRecovery<'a>> {
    let has_network = match request.network {
        NetworkChoice::None => false,
        NetworkChoice::Same => true,
        NetworkChoice::Named(name) => {
            let text = format!(
                "--network {name}: give none or same; choose networks in the vSphere client"
            );
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
    };
    let access = request.access.access(request.server)?;
    let vsphere = Vsphere::login(&access, is_cancelled)?;
    let hosts = vsphere.choose_hosts(request.hosts)?;
    let nfs_host = nfs_host(request.nfs_server, &hosts)?.to_string();
    let session =
        origin.publish(caller, repository, request.name.cloned(), request.marks.cloned())?.name;
    let name = match request.name {
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
        has_new_uuid: request.has_new_uuid,
        phase: VspherePhase::Starting,
    };
    match SessionNotes::of(repository, &session).and_then(|notes| note.write(&notes)) {
        Ok(()) => {
            let addresses = hosts.addresses;
            Ok(VsphereRecovery { session, note, vsphere, addresses, is_new: true })
        }
        Err(error) => {
            let _ = coldrise_session::unpublish(repository, &session, true);
            Err(error)
        }
    }
}

/// A session on which a machine was recovered.
///
/// # Errors
/// `NotFound` without one; `InvalidInput` if it runs at another server; `Busy` if it was moved.
pub fn of_session<'a>(
    repository: &Arc<Repository>,
    request: &VsphereRequest<'_>,
    session: &SessionName,
    is_cancelled: &'a dyn Fn() -> bool,
) -> Result<VsphereRecovery<'a>> {
    let mut note = recovery_note(repository, session)?.ok_or_else(|| {
        let text = format!("no machine was recovered under vCenter or ESXi on session {session}");
        Error::new(ErrorKind::NotFound, text).advise("recover MACHINE/POINT")
    })?;
    if note.access.server != request.server {
        let text = format!("the machine of session {session} is at {}", note.access.server);
        return Err(Error::new(ErrorKind::InvalidInput, text)
            .advise("to change the server, undo this recovery first"));
    }
    if note.is_moved() || matches!(note.phase, VspherePhase::Moving { .. }) {
        return Err(Error::new(ErrorKind::Busy, note.sentence(session)));
    }
    request.access.apply(&mut note.access)?;
    let vsphere = Vsphere::login(&note.access, is_cancelled)?;
    let addresses = vsphere.choose_hosts(&note.hosts)?.addresses;
    Ok(VsphereRecovery { session: session.clone(), note, vsphere, addresses, is_new: false })
}

/// Starts the NFS server, if none serves already, and the machine. Undoes a new recovery whose machine does not start.
///
/// # Errors
/// Those of the servers.
pub fn start(
    caller: &Caller,
    repository: &Arc<Repository>,
    request: &VsphereRequest<'_>,
    mut recovery: VsphereRecovery<'_>,
    signals: &RefCell<ChildSignals>,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<VsphereMachine> {
    let started = start_machine(caller, repository, request, &mut recovery, signals, is_cancelled);
    let ganesha = started.map_err(|error| withdraw(caller, repository, &recovery, error))?;
    // Logs out: the machine can run for long.
    let VsphereRecovery { session, note, .. } = recovery;
    Ok(VsphereMachine { session, note, ganesha })
}

fn start_machine(
    caller: &Caller,
    repository: &Arc<Repository>,
    request: &VsphereRequest<'_>,
    recovery: &mut VsphereRecovery<'_>,
    signals: &RefCell<ChildSignals>,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<Option<Ganesha>> {
    let notes = SessionNotes::of(repository, &recovery.session)?;
    let _lock = lock(&notes, &recovery.session)?;
    let ganesha = serve_nfs(caller, request, recovery, &mut signals.borrow_mut())?;
    let tell = |text: &str| caller.remark(text);
    let session = &recovery.session;
    let steps = Steps { session, notes: &notes, tell: &tell, is_cancelled };
    recovery.vsphere.start(&steps, &mut recovery.note)?;
    Ok(ganesha)
}

/// One NFS server serves all sessions of a repository, so that of another command is used.
fn serve_nfs(
    caller: &Caller,
    request: &VsphereRequest<'_>,
    recovery: &VsphereRecovery<'_>,
    signals: &mut ChildSignals,
) -> Result<Option<Ganesha>> {
    let address: IpAddr = recovery.note.nfs_host.parse().map_err(|_| {
        Error::new(ErrorKind::Internal, "the note of a recovery has no address of the NFS server")
    })?;
    let listen = SocketAddr::new(address, NFS_PORT);
    let mut allowed = request.allowed.to_vec();
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
    Ganesha::find_or_start(caller, &options, signals)
}

/// Undoes a recovery whose machine did not start.
fn withdraw(
    caller: &Caller,
    repository: &Arc<Repository>,
    recovery: &VsphereRecovery<'_>,
    error: Error,
) -> Error {
    let VsphereRecovery { session, note, vsphere, is_new, .. } = recovery;
    let kept = || format!("session {session} is kept: coldrise recover live/{session} --undo");
    // The same text twice would hide the reason.
    let keep = |error: Error| {
        if error.is_advised() {
            caller.remark(&kept());
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
        let tell = |text: &str| caller.remark(text);
        let steps = Steps { session, notes: &notes, tell: &tell, is_cancelled: &|| false };
        vsphere.undo(&steps, note).map(drop)
    });
    match undone.and_then(|()| end_session(repository, session, true, CLOSE_PATIENCE)) {
        Ok(_) => error,
        Err(why) => {
            caller.remark(&format!("cleaning up failed: {}", why.full_message()));
            keep(error)
        }
    }
}

/// Ends a machine and its session.
pub(crate) fn undo(
    caller: &Caller,
    repository: &Arc<Repository>,
    session: &SessionName,
    request: &UndoRequest<'_>,
) -> Result<Undone> {
    let notes = SessionNotes::of(repository, session)?;
    let lock = lock(&notes, session)?;
    let missing =
        || Error::new(ErrorKind::NotFound, format!("session {session} was undone meanwhile"));
    let mut note = VsphereNote::read(&notes)?.ok_or_else(missing)?;
    if note.is_moved() {
        return Err(Error::new(ErrorKind::Busy, note.sentence(session)));
    }
    request.access.apply(&mut note.access)?;
    let mut end = MachineEnd::Unknown(note.access.server.clone());
    if !request.is_without_server {
        let tell = |text: &str| caller.remark(text);
        let steps = Steps { session, notes: &notes, tell: &tell, is_cancelled: &|| false };
        end = match Vsphere::login(&note.access, steps.is_cancelled)?.undo(&steps, &note)? {
            true => MachineEnd::Ended,
            false => MachineEnd::NotThere,
        };
    }
    drop(lock);
    let sealed = end_session(repository, session, request.discards, CLOSE_PATIENCE)?;
    Ok(Undone { machine: note.name, end, sealed })
}

/// The address of this machine by which the hosts reach it.
fn nfs_host(chosen: Option<IpAddr>, hosts: &ChosenHosts) -> Result<IpAddr> {
    if let Some(address) = chosen {
        return Ok(address);
    }
    let unknown = || {
        let text = "cannot determine the address by which the hosts reach this machine";
        Error::new(ErrorKind::InvalidInput, text).advise("give --nfs-server ADDRESS")
    };
    let first = *hosts.addresses.first().ok_or_else(unknown)?;
    let any: SocketAddr = match first {
        IpAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        IpAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    // Sends nothing.
    let found = UdpSocket::bind(any).and_then(|socket| {
        socket.connect((first, NFS_PORT))?;
        socket.local_addr()
    });
    found.map(|address| address.ip()).map_err(|_| unknown())
}
