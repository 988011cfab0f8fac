//! Why a machine that reads file systems has ended.
//!
//! Its kernel says nothing on the console unless it crashes, or our init cannot continue. Both end QEMU with exit
//! status 0. Everything else is not a file system error: this host killed QEMU, or QEMU failed.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdout, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::process::Signal;

use crate::qemu::PROGRAM;
use crate::serial_log::SerialLog;

/// The kernel's line about its end. A trace of calls follows.
const PANIC: &str = "Kernel panic";
/// Number of lines of the console that an error has.
const LINES: usize = 3;
/// Maximum length of them, in characters.
const MAX_CHARS: usize = 600;
/// After QEMU's end, what it wrote is read within this time.
const PATIENCE: Duration = Duration::from_secs(1);

/// The last lines of a machine's console.
pub(super) struct Console {
    log: Arc<Mutex<SerialLog>>,
    /// Closed when QEMU has closed it.
    closed: Receiver<()>,
}

impl Console {
    /// Reads what QEMU writes to its standard output, until it ends.
    ///
    /// # Errors
    /// `Io` if no thread can be started.
    pub(super) fn of(mut output: ChildStdout) -> Result<Console> {
        let log = Arc::<Mutex<SerialLog>>::default();
        let (closing, closed) = channel();
        let fed = Arc::clone(&log);
        let read = move || {
            let _closing = closing;
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                fed.lock().feed(bytes.get(..count).unwrap_or_default(), |_| {});
            }
        };
        let thread = std::thread::Builder::new().name("console".to_owned()).spawn(read);
        thread.context(|| "starting a thread for a machine's console")?;
        Ok(Console { log, closed })
    }

    /// The lines up to the kernel's end, after QEMU has ended.
    fn last_lines(&self) -> String {
        let _ = self.closed.recv_timeout(PATIENCE);
        let mut lines = self.log.lock().tail(usize::MAX);
        lines.retain(|line| !line.is_empty());
        if let Some(end) = lines.iter().position(|line| line.contains(PANIC)) {
            lines.truncate(end + 1);
        }
        let first = lines.len().saturating_sub(LINES);
        lines.get(first..).unwrap_or_default().join(" / ").chars().take(MAX_CHARS).collect()
    }
}

/// The error for a machine whose QEMU has ended by itself.
pub(super) fn end_error(status: ExitStatus, console: &Console, messages: &[String]) -> Error {
    let machine = "the machine that reads the file systems";
    if status.success() {
        let lines = match console.last_lines() {
            lines if lines.is_empty() => "its kernel said nothing".to_owned(),
            lines => lines,
        };
        let text = format!(
            "{machine} crashed ({lines}): a damaged file system does that, or one made to attack readers"
        );
        return Error::new(ErrorKind::ToolFailed, text).advise(
            "name another file system (MACHINE/POINT:vda2/PATH), or boot the point in isolation",
        );
    }
    let said = messages.join(" / ");
    let said = if said.is_empty() { said } else { format!(": {said}") };
    let text = format!("{machine} is gone: {PROGRAM} ended ({status}){said}");
    let error = Error::new(ErrorKind::ToolFailed, text);
    match status.signal() {
        Some(signal) if signal == Signal::KILL.as_raw() => error.advise(
            "this host has killed it, as it does when memory is short (dmesg): run the command again",
        ),
        _ => error.advise("run the command again"),
    }
}
