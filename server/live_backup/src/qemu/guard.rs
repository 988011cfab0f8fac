//! Resumes a machine that stands still for the instant, whatever happens to this process meanwhile.

use std::io::Write;
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use coldrise_block::{Context, Error, ErrorKind, Result};

/// How long the machine may stand still, in seconds.
const LIMIT_S: u32 = 1;

/// Reads a line within the limit, and ends with 0. If none comes, because the other side was killed, stopped or is too slow,
/// resumes the machine through the monitor's connection, and ends with 1.
const SCRIPT: &str =
    r#"timeout "$0" sh -c 'read line' || { printf '\n{"execute":"cont"}\n' >&1; exit 1; }"#;

/// A process of its own, which has the monitor's connection.
pub(super) struct Guard(Child);

impl Guard {
    /// Start it before the machine is stopped.
    ///
    /// # Errors
    /// Errors of the system.
    pub(super) fn start(monitor: BorrowedFd<'_>) -> Result<Guard> {
        let connection = monitor.try_clone_to_owned().context(|| "sharing QEMU's monitor")?;
        let child = Command::new("sh")
            .args(["-c", SCRIPT, &LIMIT_S.to_string()])
            .stdin(Stdio::piped())
            .stdout(connection)
            .stderr(Stdio::null())
            // A Ctrl-C is for this process alone.
            .process_group(0)
            .spawn();
        child.map(Guard).context(|| "starting sh")
    }

    /// Call it after the machine was resumed.
    ///
    /// # Errors
    /// `ToolFailed` if it stood still too long: it was resumed before the instant was taken of all disks, perhaps.
    pub(super) fn end(mut self) -> Result<()> {
        if let Some(mut input) = self.0.stdin.take() {
            let _ = input.write_all(b"\n");
        }
        match self.0.wait() {
            Ok(status) if status.success() => Ok(()),
            _ => {
                let text =
                    format!("the machine stood still for more than {LIMIT_S} s, and was resumed");
                Err(Error::new(ErrorKind::ToolFailed, text)
                    .advise("this host is too busy: try again"))
            }
        }
    }
}
