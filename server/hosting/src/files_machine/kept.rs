//! A command's view of a machine that another process keeps.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use coldrise_block::{Context, Error, ErrorKind, HeldLock, Result, inherit_standard_streams_only};
use coldrise_files::point_with_disks;
use coldrise_store::{DiskName, PassphraseSource, PointDocument};

use super::background::MAY_STAY;
use super::place::{MachineDescription, Place};
use crate::caller::{Caller, PASSPHRASE_COMMAND, PASSPHRASE_FILE};
use crate::signals::ChildSignals;
use coldrise_host::confinement::warn_unless_confined;

const INTERVAL: Duration = Duration::from_millis(10);
/// Its end takes at most this long.
const END_PATIENCE: Duration = Duration::from_secs(20);
/// QEMU offers its socket within this time.
const PORT_PATIENCE: Duration = Duration::from_secs(30);

/// A machine that this command alone talks to.
pub(crate) struct KeptMachine {
    place: Place,
    /// Held while this command talks.
    _use: HeldLock,
    /// The background process, if this command has started it.
    background: Option<Child>,
    description: MachineDescription,
}

impl KeptMachine {
    /// Takes the machine of a point, or starts one. It stays for `idle` after its last use.
    ///
    /// # Errors
    /// Those of the machine's start; `Interrupted`.
    pub(crate) fn take(
        caller: &Caller,
        point: &PointDocument,
        only: &[DiskName],
        idle: Duration,
        signals: &mut ChildSignals,
    ) -> Result<KeptMachine> {
        let place = Place::new(caller, point, only)?;
        let mut has_waited = false;
        let in_use = loop {
            if let Some(lock) = place.try_use()? {
                break lock;
            }
            if !has_waited {
                let text = "another command reads files of this point: waiting for its end";
                caller.remark(text);
                has_waited = true;
            }
            wait(signals)?;
        };
        // For the bound of machines, which ends the one that is unused longest.
        let _ = in_use.file().set_modified(SystemTime::now());
        if let Some(description) = place.description()? {
            return Ok(KeptMachine { place, _use: in_use, background: None, description });
        }
        warn_unless_confined();
        // An earlier one may be ending.
        let until = Instant::now() + END_PATIENCE;
        while place.try_keep()?.is_none() && Instant::now() < until {
            wait(signals)?;
        }
        let background = start(caller, point, only, idle)?;
        match place.description()? {
            Some(description) => {
                Ok(KeptMachine { place, _use: in_use, background: Some(background), description })
            }
            None => Err(Error::new(ErrorKind::ToolFailed, "the machine ended at its start")),
        }
    }

    /// The names of its disks, in order.
    pub(crate) fn disks(&self) -> Vec<String> {
        self.description.disks.clone()
    }

    /// The length of its disks, in bytes.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.description.disk_bytes
    }

    /// A connection to its port.
    ///
    /// # Errors
    /// `ToolFailed` if it does not start; `Interrupted`.
    pub(crate) fn connect(&self, signals: &mut ChildSignals) -> Result<UnixStream> {
        let until = Instant::now() + PORT_PATIENCE;
        loop {
            match UnixStream::connect(&self.description.port) {
                Ok(stream) => return Ok(stream),
                Err(error) if Instant::now() > until || self.place.description()?.is_none() => {
                    let text = "the machine that reads the file systems did not start";
                    return Err(Error::with_source(ErrorKind::ToolFailed, text, error));
                }
                Err(_) => wait(signals)?,
            }
        }
    }

    /// Checks that the machine has not ended by itself. Call it while waiting.
    ///
    /// # Errors
    /// The reason.
    pub(crate) fn look_after(&self) -> Result<()> {
        self.place.reason().map_or(Ok(()), Err)
    }

    /// Leaves the machine for the next command.
    pub(crate) fn leave(mut self) {
        if let Some(mut stdin) = self.background.as_mut().and_then(|child| child.stdin.take()) {
            let _ = stdin.write_all(&[MAY_STAY]);
        }
    }

    /// Ends the machine, and returns when its session is gone.
    pub(crate) fn end(mut self) {
        self.place.ask_to_end();
        let own = self.background.take();
        let until = Instant::now() + END_PATIENCE;
        // The end of the lock makes the background process look.
        let KeptMachine { place, _use, .. } = self;
        drop(_use);
        match own {
            Some(mut background) => {
                drop(background.stdin.take());
                let _ = background.wait();
            }
            None => {
                while Instant::now() < until && place.try_keep().is_ok_and(|lock| lock.is_none()) {
                    std::thread::sleep(INTERVAL);
                }
            }
        }
    }
}

fn wait(signals: &mut ChildSignals) -> Result<()> {
    if signals.was_asked_to_end() {
        return Err(Error::new(ErrorKind::Interrupted, "interrupted"));
    }
    std::thread::sleep(INTERVAL);
    Ok(())
}

/// Starts a background process, and returns when its machine is there.
fn start(
    caller: &Caller,
    point: &PointDocument,
    only: &[DiskName],
    idle: Duration,
) -> Result<Child> {
    let program = std::env::current_exe().context(|| "finding this program")?;
    let point = point_with_disks(&format!("{}/{}", point.machine, point.point), only);
    let mut command = Command::new(program);
    command.args(["--json", "files", "keep"]);
    command.arg(point);
    command.arg(idle.as_millis().to_string());
    command.env_remove(PASSPHRASE_FILE).env_remove(PASSPHRASE_COMMAND);
    command.env_remove("COLDRISE_SERVER");
    match caller.passphrase() {
        PassphraseSource::None => {}
        PassphraseSource::File(path) => {
            let path = std::path::absolute(path).context(|| "finding the passphrase's file")?;
            command.env(PASSPHRASE_FILE, path);
        }
        // Not as an argument: every user can read those.
        PassphraseSource::Command(text) => {
            command.env(PASSPHRASE_COMMAND, text);
        }
    }
    command.env("COLDRISE_REPO", absolute_repository(caller)?);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    inherit_standard_streams_only(&mut command);
    let mut background = command.spawn().context(|| "starting a process in the background")?;
    let mut line = String::new();
    if let Some(stdout) = background.stdout.take() {
        let _ = BufReader::new(stdout).read_line(&mut line);
    }
    if line == "ready\n" {
        return Ok(background);
    }
    drop(background.stdin.take());
    let _ = background.wait();
    Err(error_of(&line))
}

fn absolute_repository(caller: &Caller) -> Result<std::path::PathBuf> {
    caller.repository_path().canonicalize().context(|| "finding the repository")
}

/// The error that a background process's last line tells.
fn error_of(line: &str) -> Error {
    let answer = serde_json::from_str::<serde_json::Value>(line).unwrap_or_default();
    let text = answer.pointer("/error/message").and_then(|message| message.as_str());
    let kind = answer.pointer("/error/kind").and_then(|kind| kind.as_str());
    let kind = kind.and_then(ErrorKind::from_word).unwrap_or(ErrorKind::ToolFailed);
    Error::new(kind, text.unwrap_or("the machine that reads file systems did not start"))
}
