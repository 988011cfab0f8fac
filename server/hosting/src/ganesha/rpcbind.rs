//! rpcbind: NFSv3's clients ask it for the server's ports.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result, end_with_this_thread};
use rustix::process::Signal;

use super::rpc;
use crate::child::terminate;

/// When a process gives up its privileges, as rpcbind does, the kernel no longer ends it
/// together with its parent. So its parent is a shell, which keeps them, and which ends after it: a server that starts then
/// must not count on an rpcbind that is about to end. Ctrl-C is for this program alone.
const RUN: &str = "trap '' INT HUP; trap 'kill $!; wait $!; exit' TERM; rpcbind -f & wait $!";

const PATIENCE: Duration = Duration::from_secs(20);
const INTERVAL: Duration = Duration::from_millis(5);

/// An rpcbind that this program has started. Dropping it ends it.
pub(super) struct Rpcbind(Child);

impl Rpcbind {
    /// Starts rpcbind unless it runs.
    ///
    /// # Errors
    /// `ToolFailed` if it is missing, or if this user cannot start it.
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
        let mut command = Command::new("sh");
        end_with_this_thread(&mut command, Signal::TERM);
        command.args(["-c", RUN]).stdin(Stdio::null()).stdout(Stdio::null());
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

/// True if rpcbind runs, false if it is installed but does not run.
///
/// # Errors
/// `ToolFailed` if it is not installed.
pub fn check_there() -> Result<bool> {
    if rpc::has_rpcbind() {
        return Ok(true);
    }
    // It has no option without an effect; it refuses unknown options.
    let output = Command::new("rpcbind").arg("-?").stdin(Stdio::null()).output();
    output.map(|_| false).map_err(|error| {
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
