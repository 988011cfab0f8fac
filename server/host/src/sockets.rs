//! Unix sockets on a host through which its QEMU reaches disks of the backup server.
//!
//! sshd makes them and leaves them when it ends, so they are removed here: at the end of the connection, and before a new
//! connection makes the same one. A connection that was cut may live on here until its packets time out, and with
//! it QEMU's: the program of each connection is noted beside the socket, so that the next one can end it.

use std::fs::{DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use coldrise_block::{Context, Error, ErrorKind, Result, remove_if_present};
use rustix::process::{Pid, Signal, geteuid, getgroups, kill_process};

use crate::socket_access::{SocketAccess, SocketOwner};

/// Maximum length of a socket's path, in bytes.
const MAX_SOCKET_BYTES: usize = 107;
/// The system's folder for disks of machines. Only its user enters /run/coldrise, which is the service's.
const SYSTEM_FOLDER: &str = "/run/coldrise-machines";
/// The program that a socket belongs to.
const PROGRAM: &str = "coldrise-host";
/// Processes between that program and sshd's of its connection: a shell.
const MAX_PARENTS: usize = 4;

/// The path of a socket by its file name, in a folder that QEMU's user can enter: that of the unit of systemd, else
/// the system's for root, else the user's. A `name` with a folder is taken as it is.
///
/// # Errors
/// `InvalidInput` if it is too long; errors of the operating system.
pub fn socket_path(name: &Path) -> Result<PathBuf> {
    let has_folder = name.parent().is_some_and(|parent| parent != Path::new(""));
    let path = match has_folder {
        true => std::path::absolute(name).context(|| "finding the socket's folder")?,
        false => socket_folder()?.join(name),
    };
    if path.as_os_str().len() > MAX_SOCKET_BYTES {
        let text = format!("{} is too long for a socket: give another --socket", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(path)
}

fn socket_folder() -> Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|text| !text.is_empty());
    let is_root = geteuid().is_root();
    let of_user = || variable("XDG_RUNTIME_DIR").filter(|_| !is_root);
    let folder = match (variable("RUNTIME_DIRECTORY"), of_user()) {
        (Some(folder), _) => PathBuf::from(folder),
        (None, Some(folder)) => PathBuf::from(folder).join("coldrise"),
        (None, None) if is_root => PathBuf::from(SYSTEM_FOLDER),
        (None, None) => {
            let text = "XDG_RUNTIME_DIR is not set: give the path of a socket with --socket";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
    };
    make_entered(&folder).context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}

/// Makes a folder that other users can enter, whatever this process's umask is.
fn make_entered(folder: &Path) -> std::io::Result<()> {
    DirBuilder::new().mode(0o711).recursive(true).create(folder)?;
    let found = folder.metadata()?;
    if found.uid() == geteuid().as_raw() && found.mode() & 0o001 == 0 {
        std::fs::set_permissions(folder, Permissions::from_mode(0o711))?;
    }
    Ok(())
}

/// Who may connect to the disks: the user as whom libvirt runs QEMU, by the names of Debian and Fedora. Only
/// root can give it the socket; other users give it to QEMU's group.
///
/// # Errors
/// `InvalidInput` for a user who is not in QEMU's group: the machine could not open its disks.
pub fn default_owner(uri: &str) -> Result<Option<SocketOwner>> {
    let mut names = ["libvirt-qemu", "qemu"].into_iter();
    if !uri.contains(":///system") {
        return Ok(None);
    }
    if geteuid().is_root() {
        return Ok(names.find_map(|name| SocketOwner::from_str(name).ok()));
    }
    let groups = getgroups().unwrap_or_default();
    let mut own = names.filter_map(SocketOwner::of_group);
    let owner = own.find(|owner| groups.iter().any(|group| owner.is_group(group.as_raw())));
    owner.map(Some).ok_or_else(|| {
        let text = "libvirt runs QEMU as another user, who could not open the disks";
        Error::new(ErrorKind::InvalidInput, text)
            .advise("add this user to the groups libvirt and libvirt-qemu, or give --socket-owner")
    })
}

fn note_of(socket: &Path) -> PathBuf {
    let mut note = socket.as_os_str().to_owned();
    note.push(".connection");
    note.into()
}

fn noted(socket: &Path) -> Option<u32> {
    std::fs::read_to_string(note_of(socket)).ok()?.trim().parse().ok()
}

/// Makes room for a socket: one of an ended connection is removed, and a connection that still has it is ended.
///
/// # Errors
/// Errors of the operating system; `InvalidInput` if something other than a socket is there.
pub(crate) fn prepare(socket: &Path) -> Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let found = socket.symlink_metadata();
    if found.is_ok_and(|found| !found.file_type().is_socket()) {
        let text = format!("{} is there, and is not a socket", socket.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    if let Some(process) = noted(socket).filter(|process| is_program(*process)) {
        end_connection(process);
    }
    remove_if_present(socket)?;
    let note = note_of(socket);
    let written = std::fs::write(&note, format!("{}\n", std::process::id()));
    written.context(|| format!("writing {}", note.display()))
}

/// Gives a socket that SSH has made to QEMU's user.
///
/// # Errors
/// Errors of the operating system; `InvalidInput` for an unknown user.
pub(crate) fn share(socket: &Path, uri: &str, owner: Option<&str>) -> Result<()> {
    let owner = match owner {
        Some(owner) => Some(SocketOwner::from_str(owner)?),
        None => default_owner(uri)?,
    };
    SocketAccess { owner, mode: None }.apply(socket)
}

/// Removes a socket, unless another connection has made it meanwhile.
pub(crate) fn remove(socket: &Path) {
    if noted(socket) == Some(std::process::id()) {
        let _ = remove_if_present(socket);
        let _ = remove_if_present(&note_of(socket));
    }
}

fn is_program(process: u32) -> bool {
    let program = std::fs::read_link(format!("/proc/{process}/exe"));
    let is_own = process == std::process::id();
    !is_own && program.is_ok_and(|path| path.to_string_lossy().contains(PROGRAM))
}

/// Ends sshd's process of the connection that has started a process, and so the connection.
pub(crate) fn end_connection(process: u32) {
    let mut parent = process;
    for _ in 0..MAX_PARENTS {
        let Some((name, next)) = parent_of(parent) else { return };
        if name.starts_with("sshd") {
            let process = i32::try_from(parent).ok().and_then(Pid::from_raw);
            let _ = process.map(|process| kill_process(process, Signal::TERM));
            return;
        }
        parent = next;
    }
}

/// The name of a process, and its parent.
fn parent_of(process: u32) -> Option<(String, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let (name, rest) = text.split_once('(')?.1.rsplit_once(')')?;
    Some((name.to_owned(), rest.split_whitespace().nth(1)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_belongs_to_the_last_connection_that_made_it() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("a.nbd");
        prepare(&socket).unwrap();
        drop(UnixListener::bind(&socket).unwrap());
        // The listener has ended, and its file is there.
        prepare(&socket).unwrap();
        drop(UnixListener::bind(&socket).unwrap());
        std::fs::write(note_of(&socket), "1\n").unwrap();
        remove(&socket);
        assert!(socket.exists(), "process 1 has it");
        prepare(&socket).unwrap();
        drop(UnixListener::bind(&socket).unwrap());
        remove(&socket);
        assert!(!socket.exists() && !note_of(&socket).exists());
        std::fs::write(&socket, "a file").unwrap();
        assert_eq!(prepare(&socket).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(std::fs::read(&socket).unwrap(), b"a file");
    }

    #[test]
    fn a_process_is_found_with_its_parent() {
        let (_, parent) = parent_of(std::process::id()).unwrap();
        assert_eq!(parent, std::os::unix::process::parent_id());
        assert!(!is_program(1));
    }
}
