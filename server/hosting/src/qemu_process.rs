//! QEMU as a confined child process.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result, end_with_this_thread};
use coldrise_host::confinement::{NetworkReach, Reach, confine_this_thread};
use coldrise_host::installed_program;
use parking_lot::Mutex;
use rustix::process::Signal;

use crate::caller::Caller;
use crate::child;
use crate::qemu::PROGRAM;
use crate::serial_log::SerialLog;

/// The last messages of an ended QEMU may take this long.
const MESSAGE_PATIENCE: Duration = Duration::from_secs(1);
/// Number of QEMU's messages that are printed. A guest that broke out could write any number.
const MAX_MESSAGES: usize = 50;

/// A running QEMU. The thread that started it lives as long as this value: the kernel ends QEMU
/// together with that thread.
pub struct QemuProcess {
    child: Child,
    /// The last of its messages.
    messages: Arc<Mutex<SerialLog>>,
    /// Closed when QEMU has closed its messages and they are printed.
    printed: Receiver<()>,
    /// Dropping it ends the thread.
    _keeper: Sender<()>,
}

impl QemuProcess {
    /// Starts QEMU; without `reach` unconfined. When the returned value is dropped, or this program
    /// ends in any way, QEMU gets the signal `at_end`. If the command's stderr is piped, its lines are
    /// printed without control characters.
    ///
    /// # Errors
    /// `ToolFailed` if it cannot be started.
    pub fn start(
        mut command: Command,
        at_end: Signal,
        reach: Option<Reach>,
        print_message: fn(&str),
    ) -> Result<QemuProcess> {
        end_with_this_thread(&mut command, at_end);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("COLDRISE_") {
                command.env_remove(name);
            }
        }
        tracing::debug!(?command, ?reach, "starting QEMU");
        let (keeper, kept) = channel::<()>();
        let (started, start) = channel();
        let (printing, printed) = channel::<()>();
        let printer = MessagePrinter::new(print_message);
        let messages = Arc::clone(&printer.log);
        let start_and_keep = move || {
            if let Some(reach) = reach {
                confine_this_thread(&reach);
            }
            let mut spawned = command.spawn();
            let stderr = spawned.as_mut().ok().and_then(|child| child.stderr.take());
            let _ = started.send(spawned);
            if let Some(stderr) = stderr {
                print_messages(stderr, printer);
            }
            drop(printing);
            // Ends with the QemuProcess.
            let _ = kept.recv();
        };
        std::thread::Builder::new()
            .name("qemu".to_owned())
            .spawn(start_and_keep)
            .context(|| "starting a thread for QEMU")?;
        let spawned = start
            .recv()
            .map_err(|e| Error::with_source(ErrorKind::Internal, "the thread for QEMU ended", e))?;
        let child = spawned.map_err(|error| {
            let text = format!("starting {PROGRAM} (Debian: apt install qemu-system-x86)");
            Error::with_source(ErrorKind::ToolFailed, text, error)
        })?;
        Ok(QemuProcess { child, messages, printed, _keeper: keeper })
    }

    /// Starts QEMU for an untrusted machine: it reaches these files, the folder and the network,
    /// gets no environment, and is killed with this program. `output` is its standard output.
    ///
    /// # Errors
    /// As [`QemuProcess::start`].
    pub(crate) fn start_confined(
        caller: &Caller,
        words: Vec<OsString>,
        files: &[PathBuf],
        folder: &Path,
        network: NetworkReach,
        output: Stdio,
    ) -> Result<QemuProcess> {
        let mut command = Command::new(PROGRAM);
        // A Ctrl-C on the terminal is for this program, which then ends QEMU.
        // A path relative to the folder is short: addresses of sockets have at most 107 bytes.
        command.args(words).process_group(0).current_dir(folder);
        command.env_clear().env("LC_ALL", "C").env("TMPDIR", folder);
        command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        pipe_messages(&mut command);
        command.stdout(output);
        let reach = Reach {
            program: installed_program(PROGRAM),
            files: files.to_vec(),
            folders: vec![folder.to_owned()],
            network,
        };
        QemuProcess::start(command, Signal::KILL, Some(reach), caller.print_message)
    }

    /// The process itself.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Checks that QEMU still runs.
    ///
    /// # Errors
    /// `ToolFailed` if it has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.ended()? {
            None => Ok(()),
            Some(status) => Err(child::ended_error(PROGRAM, status)),
        }
    }

    /// How QEMU has ended, if it has.
    ///
    /// # Errors
    /// `Io` if the system refuses.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let ended = self.child.try_wait().context(|| "looking after QEMU")?;
        if ended.is_some() {
            // So that its messages stand above those of the caller.
            let _ = self.printed.recv_timeout(MESSAGE_PATIENCE);
        }
        Ok(ended)
    }

    /// At most `count` of its last messages.
    pub(crate) fn last_messages(&self, count: usize) -> Vec<String> {
        self.messages.lock().tail(count)
    }
}

/// Prints QEMU's messages, each line on its own, without control characters.
pub(crate) struct MessagePrinter {
    log: Arc<Mutex<SerialLog>>,
    /// Number of lines that may still be printed.
    left: usize,
    print_message: fn(&str),
}

impl MessagePrinter {
    pub(crate) fn new(print_message: fn(&str)) -> MessagePrinter {
        MessagePrinter { log: Arc::default(), left: MAX_MESSAGES, print_message }
    }

    /// Prints the lines that end in `bytes`.
    pub(crate) fn print(&mut self, bytes: &[u8]) {
        let MessagePrinter { log, left, print_message } = self;
        log.lock().feed(bytes, |line| print_line(left, *print_message, line));
    }

    /// Prints a last line without an end.
    pub(crate) fn finish(&mut self) {
        let pending = self.log.lock().pending();
        print_line(&mut self.left, self.print_message, &pending);
    }
}

fn print_line(left: &mut usize, print_message: fn(&str), line: &str) {
    if *left > 0 && !line.is_empty() {
        *left -= 1;
        print_message(&format!("{PROGRAM}: {line}"));
    }
}

/// Prints QEMU's messages until it closes them.
fn print_messages(mut messages: ChildStderr, mut printer: MessagePrinter) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = messages.read(&mut bytes) {
        printer.print(bytes.get(..count).unwrap_or_default());
    }
    printer.finish();
}

/// Prepares a command whose messages are printed by this program.
pub(crate) fn pipe_messages(command: &mut Command) {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
}
