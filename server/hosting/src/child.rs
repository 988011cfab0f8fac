//! Child processes that serve, and how they end.

use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::signals::ChildSignals;

/// How often an ending child is polled.
const INTERVAL: Duration = Duration::from_millis(5);

/// The end of a child.
pub struct Ended {
    /// Its exit code or signal.
    pub status: ExitStatus,
    /// It had to be killed.
    pub(crate) was_killed: bool,
}

/// Asks a child to end.
///
/// # Errors
/// `Io` if the system refuses.
pub(crate) fn terminate(child: &Child) -> Result<()> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let Some(pid) = pid else { return Ok(()) };
    match kill_process(pid, Signal::TERM) {
        Err(rustix::io::Errno::SRCH) => Ok(()),
        sent => sent.map_err(std::io::Error::from).context(|| "ending a child process"),
    }
}

/// Asks the child called `name` to end and waits for it. Kills it if that takes
/// longer than `patience`, or if this program is asked to end again.
///
/// # Errors
/// `Io` if the system refuses.
pub fn end(
    child: &mut Child,
    name: &str,
    patience: Duration,
    mut signals: Option<&mut ChildSignals>,
) -> Result<Ended> {
    let waiting = || format!("waiting for {name}");
    if child.try_wait().context(waiting)?.is_none() {
        terminate(child)?;
    }
    let asked = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context(waiting)? {
            return Ok(Ended { status, was_killed: false });
        }
        let is_pressed = signals.as_mut().is_some_and(|signals| signals.was_asked_to_end());
        if is_pressed || asked.elapsed() > patience {
            child.kill().context(|| format!("ending {name}"))?;
            let status = child.wait().context(waiting)?;
            return Ok(Ended { status, was_killed: true });
        }
        std::thread::sleep(INTERVAL);
    }
}

/// The error for a server that ended by itself.
pub(crate) fn ended_error(name: &str, status: ExitStatus) -> Error {
    Error::new(ErrorKind::ToolFailed, format!("{name} ended ({status}); the lines above say why"))
}
