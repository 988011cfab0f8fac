//! A private network namespace for this program.
//!
//! QEMU's NFS driver finds a server through the one rpcbind of its network. This program
//! restarts itself in a network and mount namespace that it shares only with its children.
//! So a machine can have its own NFS server, whatever else this host serves, and no other
//! process on this host can reach that server. The namespaces end with the last of these
//! processes.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use coldrise_block::{Error, ErrorKind, Result};

/// The environment variable for a restarted program: its process id.
const INSIDE: &str = "COLDRISE_OWN_NETWORK";

const UNSHARE: [&str; 2] = ["--net", "--mount"];

/// nfs-ganesha ignores a network whose only address is loopback's. rpcbind keeps its
/// socket and its lock in /run, so /run is replaced: all other entries are bound from the
/// old /run, which is still the shell's working directory. Entries that disappear
/// meanwhile are skipped.
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

/// Checks that a network can be set up.
///
/// # Errors
/// `ToolFailed` if `ip` is missing.
pub fn check_installed() -> Result<()> {
    let output = Command::new("ip").arg("-V").stdin(Stdio::null()).output();
    output.map(drop).map_err(|error| {
        let what =
            "starting ip, which sets up the machine's network (Debian: apt install iproute2)";
        Error::with_source(ErrorKind::ToolFailed, what, error)
    })
}

/// Restarts this program in its own network, with the same arguments, and does not return.
/// Returns true if the program is there already, and false if this user may not create
/// networks: the server then reports what it cannot serve in the host's network.
///
/// # Errors
/// `ToolFailed` if `ip` is missing.
pub fn enter(before_restart: impl FnOnce()) -> Result<bool> {
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
        tracing::debug!("cannot create a network namespace");
        return Ok(false);
    }
    check_installed()?;
    let program = std::env::current_exe()
        .map_err(|error| Error::io("finding this program's executable", error))?;
    let mut command = Command::new("unshare");
    command.args(UNSHARE).args(["--", "sh", "-c", SET_UP, "sh"]).arg(program);
    command.args(std::env::args_os().skip(1)).env(INSIDE, own_id);
    before_restart();
    // Returns only on failure.
    Err(Error::io("restarting in a network namespace", command.exec()))
}
