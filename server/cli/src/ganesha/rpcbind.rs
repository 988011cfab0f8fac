//! rpcbind: by it NFSv3's clients find the server's ports.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::rpc;
use crate::child::terminate;

/// The kernel forgets that a process is to end with its parent when that gives up its
/// rights, as rpcbind does: so it has a shell as its parent, which does not. Ctrl-C is for
/// this program alone.
const RUN: &str = "trap '' INT HUP; trap 'kill $!; exit' TERM; rpcbind -f & wait $!";

const PATIENCE: Duration = Duration::from_secs(5);
const INTERVAL: Duration = Duration::from_millis(5);

/// An rpcbind that this program has started. Dropped, it is ended.
pub(super) struct Rpcbind(Child);

impl Rpcbind {
    /// Starts one where none runs.
    ///
    /// # Errors
    /// `ToolFailed` where it is missing, or cannot be started by this user.
    pub(super) fn make_sure() -> Result<Option<Rpcbind>> {
        if check_there()? {
            return Ok(None);
        }
        if !rustix::process::geteuid().is_root() {
            return Err(Error::new(
                ErrorKind::ToolFailed,
                "NFSv3 needs rpcbind, which does not run and which only root can start (systemctl \
                 start rpcbind); or give --versions 4",
            ));
        }
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM", "sh", "-c", RUN]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        tracing::debug!(?command, "starting rpcbind");
        let child = command.spawn().context(|| "starting the parent of rpcbind")?;
        let mut rpcbind = Rpcbind(child);
        let asked = Instant::now();
        while !rpc::has_rpcbind() {
            let ended = rpcbind.0.try_wait().context(|| "looking after rpcbind")?;
            if ended.is_some() || asked.elapsed() > PATIENCE {
                return Err(Error::new(
                    ErrorKind::ToolFailed,
                    "rpcbind was started and does not answer on port 111; start it as this system \
                     does (systemctl start rpcbind), or give --versions 4",
                ));
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(Some(rpcbind))
    }
}

/// True where rpcbind runs, false where it is there to be started.
///
/// # Errors
/// `ToolFailed` where it is neither.
pub(crate) fn check_there() -> Result<bool> {
    if rpc::has_rpcbind() {
        return Ok(true);
    }
    // It has no option that does nothing; one that it does not know it refuses.
    let told = Command::new("rpcbind").arg("-?").stdin(Stdio::null()).output();
    told.map(|_| false).map_err(|error| {
        let what = "starting rpcbind, by which clients of NFSv3 find the server (Debian: apt \
                    install rpcbind)";
        Error::with_source(ErrorKind::ToolFailed, what, error)
    })
}

impl Drop for Rpcbind {
    fn drop(&mut self) {
        if terminate(&self.0).is_err() {
            let _ = self.0.kill();
        }
        let _ = self.0.wait();
    }
}
