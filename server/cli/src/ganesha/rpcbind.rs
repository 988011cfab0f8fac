//! rpcbind: by it NFSv3's clients find the server's ports.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::rpc;
use crate::child::terminate;

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
        if rpc::has_rpcbind() {
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
        command.args(["--pdeathsig", "TERM", "rpcbind", "-f"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        tracing::debug!(?command, "starting rpcbind");
        let child = command.spawn().map_err(|error| {
            let what = "starting rpcbind (Debian: apt install rpcbind)";
            Error::with_source(ErrorKind::ToolFailed, what, error)
        })?;
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

impl Drop for Rpcbind {
    fn drop(&mut self) {
        if terminate(&self.0).is_err() {
            let _ = self.0.kill();
        }
        let _ = self.0.wait();
    }
}
