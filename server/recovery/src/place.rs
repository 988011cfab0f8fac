//! Where a recovered machine finds its disks.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_hosting::socket_access::SocketOwner;
use coldrise_store::SessionName;

/// Maximum length of a socket's path, in bytes.
const MAX_SOCKET_BYTES: usize = 107;

/// The path of the NBD server's socket, in a folder that QEMU's user can enter: that of the unit of systemd, else
/// the system's for root, else the user's.
///
/// # Errors
/// `InvalidInput` if it is too long; errors of the operating system.
pub(crate) fn socket(chosen: Option<&Path>, session: &SessionName) -> Result<PathBuf> {
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
pub(crate) fn default_owner(uri: &str) -> Result<Option<SocketOwner>> {
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
