//! A disk of a point or session, served to a machine that runs already.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind};
use coldrise_host::SocketAccess;
use coldrise_hosting::Caller;
use coldrise_hosting::nbdkit::{Endpoint, Nbdkit, ServeOptions};
use coldrise_hosting::signals::ChildSignals;
use coldrise_hypervisors::attach::{AttachMachine, MAX_NAME_CHARS};
use coldrise_store::default_cache_bytes;

/// How often the command looks after its server and its end.
const INTERVAL: Duration = Duration::from_millis(200);
/// The command ends if the machine has not been connected for this long.
const GONE: Duration = Duration::from_secs(5);

/// The name of an attached disk: `web01/20261120T100000Z/vda` becomes `web01-vda`.
pub fn default_disk_name(export: &str) -> String {
    let parts: Vec<&str> = export.split('/').collect();
    let (owner, disk) = match parts[..] {
        ["live", session, disk] => (session, disk),
        [machine, .., disk] => (machine, disk),
        _ => ("disk", export),
    };
    format!("{owner}-{disk}").chars().take(MAX_NAME_CHARS).collect()
}

/// The server of an attached disk.
pub struct AttachedDiskServer {
    server: Nbdkit,
    /// Its socket here.
    local: PathBuf,
    /// Its socket as the machine's QEMU finds it.
    pub socket: PathBuf,
    _scratch: ScratchFolder,
}

impl AttachedDiskServer {
    /// Serves an export on a socket that the machine's QEMU can open.
    ///
    /// # Errors
    /// As [`Nbdkit::start`].
    pub fn start(
        caller: &Caller,
        machine: &AttachMachine,
        export: &str,
        signals: &mut ChildSignals,
    ) -> Result<AttachedDiskServer> {
        let is_here = machine.is_here();
        let scratch = ScratchFolder::new(ScratchKind::Nbdkit)?;
        let local = scratch.path().join("disk");
        let group = machine.group()?;
        let access = if is_here { share(group, scratch.path())? } else { SocketAccess::default() };
        let options = ServeOptions {
            endpoint: Endpoint::Socket(local.clone(), access),
            tls: None,
            cache_bytes: default_cache_bytes(),
            is_read_only: false,
            lists_formats: false,
            // A killed command must not leave it: it would serve on until the guest disconnects.
            disconnects_at_end: true,
            only: vec![export.to_owned()],
        };
        let server = Nbdkit::start(caller, &options, signals)?;
        // The folder's name is known nowhere else.
        let folder = scratch.path().file_name().unwrap_or_default().to_string_lossy();
        let socket = machine.offer(&local, Path::new(&format!("{folder}.nbd")), group)?;
        Ok(AttachedDiskServer { server, local, socket, _scratch: scratch })
    }

    /// Serves the disk until it is detached. Returns how that came.
    ///
    /// # Errors
    /// `ToolFailed` if the server ends; those of a detach that is refused twice.
    pub fn serve(
        &mut self,
        caller: &Caller,
        machine: &AttachMachine,
        name: &str,
        signals: &mut ChildSignals,
    ) -> Result<&'static str> {
        let mut connected = Instant::now();
        let mut was_refused = false;
        loop {
            std::thread::sleep(INTERVAL);
            if signals.was_asked_to_end() {
                match machine.detach(name, false, &|text| caller.remark(text)) {
                    Ok(()) => break self.server.stop(None).map(|()| "detached"),
                    Err(error) if !was_refused => {
                        was_refused = true;
                        caller.remark(&format!(
                            "{}; the disk is still served: press Ctrl-C again to retry and then end anyway",
                            error.full_message()
                        ));
                    }
                    Err(error) => {
                        self.server.stop(None)?;
                        break Err(error.context("ended, and the guest's requests fail now"));
                    }
                }
                connected = Instant::now();
            }
            let before = Instant::now();
            if self.server.keep_up(caller, signals)?.is_some() {
                let text = "nbdkit ended while the disk was attached";
                break Err(Error::new(ErrorKind::ToolFailed, text));
            }
            if before.elapsed() > INTERVAL {
                // It was started again, after a pause: the machine needs a moment to connect.
                connected = Instant::now();
            }
            if is_connected(&self.local) {
                connected = Instant::now();
            } else if connected.elapsed() > GONE {
                break self.server.stop(None).map(|()| "the machine has disconnected");
            }
        }
    }
}

/// Lets the machine's QEMU enter the folder of the socket. Returns who may connect.
fn share(group: Option<u32>, folder: &Path) -> Result<SocketAccess> {
    let Some(group) = group else { return Ok(SocketAccess::default()) };
    let what = || format!("giving {} to QEMU's group", folder.display());
    std::os::unix::fs::chown(folder, None, Some(group)).context(what).map_err(|error| {
        error.advise(format!("run the command as root, or as a member of group {group}"))
    })?;
    std::fs::set_permissions(folder, Permissions::from_mode(0o710)).context(what)?;
    let owner = format!("{}:{group}", rustix::process::geteuid().as_raw());
    Ok(SocketAccess { owner: Some(owner.parse()?), mode: None })
}

/// Whether a client is connected to a Unix socket of this network namespace.
fn is_connected(socket: &Path) -> bool {
    let Ok(sockets) = std::fs::read_to_string("/proc/net/unix") else { return true };
    let path = socket.to_string_lossy();
    // The sixth column is the state; 03 is connected.
    sockets
        .lines()
        .filter(|line| line.ends_with(path.as_ref()))
        .any(|line| line.split_whitespace().nth(5) == Some("03"))
}

#[cfg(test)]
mod tests {
    use super::default_disk_name;

    #[test]
    fn default_disk_names_fit_into_a_serial_number() {
        assert_eq!(default_disk_name("web01/20261120T100000Z/vda"), "web01-vda");
        assert_eq!(default_disk_name("live/rescue/vdb"), "rescue-vdb");
        assert_eq!(
            default_disk_name(&format!("{}/20261120T100000Z/vda", "m".repeat(63))).len(),
            20
        );
    }
}
