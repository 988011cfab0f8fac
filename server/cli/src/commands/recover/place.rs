//! Where a recovered machine finds its disks, and the end of a recovery.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_hypervisors::libvirt::{DomainState, RecoveryNote};
use coldrise_hypervisors::moves::move_state;
use coldrise_hypervisors::vsphere::recovery_note;
use coldrise_session::{SealReport, SessionNotes};
use coldrise_store::{Address, Repository, SessionName};
use serde_json::json;

use super::{vsphere, RecoverArguments};
use crate::coming::check_can_seal;
use crate::commands::skipped_files;
use crate::invocation::Invocation;
use crate::report::Report;
use coldrise_hosting::socket_access::SocketOwner;

/// Maximum length of a socket's path, in bytes.
const MAX_SOCKET_BYTES: usize = 107;
/// How long the server of an ended machine may take to close the session.
const CLOSE_PATIENCE: Duration = Duration::from_secs(30);

/// The path of the NBD server's socket, in a folder that QEMU's user can enter: that of the unit of systemd, else
/// the system's for root, else the user's.
///
/// # Errors
/// `InvalidInput` if it is too long; errors of the operating system.
pub(super) fn socket(chosen: Option<&Path>, session: &SessionName) -> Result<PathBuf> {
    let path = match chosen {
        Some(path) => std::path::absolute(path).context(|| "finding the socket's folder")?,
        None => {
            let variable = |name: &str| std::env::var_os(name).filter(|text| !text.is_empty());
            let of_user = || variable("XDG_RUNTIME_DIR").filter(|_| !is_root());
            let folder = match (variable("RUNTIME_DIRECTORY"), of_user()) {
                (Some(folder), _) => PathBuf::from(folder),
                (None, Some(folder)) => PathBuf::from(folder).join("coldrise"),
                (None, None) if is_root() => PathBuf::from("/run/coldrise"),
                (None, None) => {
                    let text =
                        "XDG_RUNTIME_DIR is not set: give the path of a socket with --socket";
                    return Err(Error::new(ErrorKind::InvalidInput, text));
                }
            };
            let made = std::fs::DirBuilder::new().mode(0o711).recursive(true).create(&folder);
            made.context(|| format!("creating {}", folder.display()))?;
            folder.join(format!("{session}.nbd"))
        }
    };
    if path.as_os_str().len() > MAX_SOCKET_BYTES {
        let text = format!("{} is too long for a socket: give another --socket", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(path)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Who may connect to the disks: the user as whom libvirt runs QEMU, by the names of Debian and Fedora. Only
/// root can give it the socket; other users give it to QEMU's group.
///
/// # Errors
/// `InvalidInput` for a user who is not in QEMU's group: the machine could not open its disks.
pub(super) fn default_owner(uri: &str) -> Result<Option<SocketOwner>> {
    let mut names = ["libvirt-qemu", "qemu"].into_iter();
    if !uri.contains(":///system") {
        return Ok(None);
    }
    if is_root() {
        return Ok(names.find_map(|name| SocketOwner::from_str(name).ok()));
    }
    let groups = rustix::process::getgroups().unwrap_or_default();
    let mut own = names.filter_map(SocketOwner::of_group);
    let owner = own.find(|owner| groups.iter().any(|group| owner.is_group(group.as_raw())));
    owner.map(Some).ok_or_else(|| {
        let text = "libvirt runs QEMU as another user, who could not open the disks";
        Error::new(ErrorKind::InvalidInput, text)
            .advise("add this user to the groups libvirt and libvirt-qemu, or give --socket-owner")
    })
}

/// `recover --undo`.
pub(super) fn undo(invocation: &Invocation, arguments: &RecoverArguments) -> Result<Report> {
    let (address, discard) = (&arguments.address, arguments.discard);
    let Address::Live { session, disk: None } = address else {
        let text = format!("{address}: --undo takes live/SESSION");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    };
    let repository = invocation.open()?;
    if !discard {
        check_can_seal(&repository, session)?;
    }
    if recovery_note(&repository, session)?.is_some() {
        return vsphere::undo(invocation, &repository, session, arguments);
    }
    if let Some(moved) = move_state(&repository, session)? {
        moved.check_session_counts()?;
    }
    let notes = SessionNotes::of(&repository, session)?;
    let Some(note) = RecoveryNote::read(&notes)? else {
        let text = format!("no machine was recovered on session {session}");
        let advice = format!("coldrise unpublish {session} ends a session");
        return Err(Error::new(ErrorKind::NotFound, text).advise(advice));
    };
    let end = match note.state(session)? {
        Some(DomainState::Off) => MachineEnd::NotThere,
        Some(_) => note.domain().destroy().map(|()| MachineEnd::Ended)?,
        None => {
            invocation.remark(&format!(
                "the domain {} is another machine, without a disk of this session: it is left alone",
                note.name
            ));
            MachineEnd::NotThere
        }
    };
    remove_variables(invocation, &note);
    let sealed = end_session(&repository, session, discard, CLOSE_PATIENCE)?;
    let _ = std::fs::remove_file(&note.socket);
    Ok(undone(invocation, session, (&note.name, end), sealed, discard))
}

/// Removes the firmware variables of a recovered machine that is off, before its session ends: after a kill in between, the
/// session is still there to be ended.
pub(crate) fn remove_variables(invocation: &Invocation, note: &RecoveryNote) {
    if let Err(error) = note.remove_variables() {
        let text = error.full_message();
        invocation.remark(&format!("warning: the machine's firmware variables stay: {text}"));
    }
}

/// Ends a session. Its server closes it when the machine is gone, within `patience`.
///
/// # Errors
/// As [`coldrise_session::unpublish`].
pub(super) fn end_session(
    repository: &Arc<Repository>,
    session: &SessionName,
    discard: bool,
    patience: Duration,
) -> Result<Option<SealReport>> {
    let start = Instant::now();
    loop {
        match coldrise_session::unpublish(repository, session, discard) {
            Err(error) if error.kind() == ErrorKind::Busy && start.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(50));
            }
            ended => return ended,
        }
    }
}

/// What an undo did to the machine.
pub(super) enum MachineEnd {
    Ended,
    /// It was off, or there was none.
    NotThere,
    /// This server was not asked.
    Unknown(String),
}

/// The answer of `recover --undo`.
pub(super) fn undone(
    invocation: &Invocation,
    session: &SessionName,
    (machine, end): (&str, MachineEnd),
    sealed: Option<SealReport>,
    discard: bool,
) -> Report {
    if let Some(sealed) = &sealed {
        skipped_files::tell(&sealed.left_out);
    }
    let address = sealed.map(|sealed| format!("{}/{}", sealed.point.machine, sealed.point.point));
    let object = json!({ "session": session.as_str(), "domain": machine, "address": address,
                         "machine_ended": matches!(end, MachineEnd::Ended), "discarded": discard,
                         "elapsed_ms": invocation.elapsed_ms() });
    let end = match end {
        MachineEnd::Ended => format!("{machine} was ended"),
        MachineEnd::NotThere => format!("session {session} was ended; {machine} did not run on it"),
        MachineEnd::Unknown(server) => {
            format!("session {session} was ended; {machine} at {server} was left as it is")
        }
    };
    let text = match (&address, discard) {
        (Some(address), _) => format!("{end}; its writes are {address}"),
        (None, true) => format!("{end}; its writes were discarded"),
        (None, false) => format!("{end}; it wrote nothing"),
    };
    Report::done(&object, text)
}
