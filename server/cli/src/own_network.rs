//! A network of this program's own.
//!
//! QEMU's NFS driver finds a server by the one rpcbind of its network. So that a machine
//! can have an NFS server of its own, whatever else this host serves, and so that nobody
//! else here reaches that server, this program starts itself anew in a network (and with
//! mounts) that it shares with its children alone. They go with the last of them.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use coldrise_block::{Error, ErrorKind, Result};

/// Set to its process id for a program that was started anew.
const INSIDE: &str = "COLDRISE_OWN_NETWORK";

const UNSHARE: [&str; 2] = ["--net", "--mount"];

/// To nfs-ganesha a network with no address but loopback's is none. rpcbind has its socket
/// and its lock in /run: everything else of that stays, bound from the old one, in which
/// the shell still stands when the new one is there. What goes meanwhile is left out.
const SET_UP: &str = "\
set -e
ip link set lo up
ip address add 192.0.2.1/32 dev lo
here=$PWD
cd /run
mount -t tmpfs -o mode=755 coldrise /run
for entry in * .[!.]*; do
    case $entry in rpcbind*) continue;; esac
    if [ -h \"$entry\" ]; then
        cp -P \"$entry\" \"/run/$entry\"
        continue
    elif [ -d \"$entry\" ]; then
        mkdir -p \"/run/$entry\"
    elif [ -e \"$entry\" ]; then
        : > \"/run/$entry\"
    else
        continue
    fi
    mount --no-canonicalize --rbind \"./$entry\" \"/run/$entry\" || :
done
cd \"$here\"
exec \"$@\"
";

/// Whether a network can be set up.
///
/// # Errors
/// `ToolFailed` where `ip` is missing.
pub(crate) fn check_installed() -> Result<()> {
    let told = Command::new("ip").arg("-V").stdin(Stdio::null()).output();
    told.map(drop).map_err(|error| {
        let what =
            "starting ip, which sets up the machine's network (Debian: apt install iproute2)";
        Error::with_source(ErrorKind::ToolFailed, what, error)
    })
}

/// Starts this program anew in a network of its own, with the same arguments, and does
/// not return; true where it is there already. False where this user may not make
/// networks: what cannot be served in the host's is told by the server.
///
/// # Errors
/// `ToolFailed` where `ip` is missing.
pub(crate) fn enter() -> Result<bool> {
    let own_id = std::process::id().to_string();
    if std::env::var_os(INSIDE).is_some_and(|inside| inside == OsString::from(&own_id)) {
        return Ok(true);
    }
    let can_make = rustix::process::geteuid().is_root()
        && Command::new("unshare")
            .args(UNSHARE)
            .arg("true")
            .stdin(Stdio::null())
            .output()
            .is_ok_and(|done| done.status.success());
    if !can_make {
        tracing::debug!("no network of our own can be made");
        return Ok(false);
    }
    check_installed()?;
    let program = std::env::current_exe()
        .map_err(|error| Error::io("finding this program's own file", error))?;
    let mut command = Command::new("unshare");
    command.args(UNSHARE).args(["--", "sh", "-c", SET_UP, "sh"]).arg(program);
    command.args(std::env::args_os().skip(1)).env(INSIDE, own_id);
    // Returns only where it failed.
    Err(Error::io("starting anew in a network of its own", command.exec()))
}
