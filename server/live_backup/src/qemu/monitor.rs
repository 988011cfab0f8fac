//! Questions to QEMU as the backup asks them.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_qmp::Monitor;
use serde_json::{Value, json};

/// The beginning of the names of all our objects in QEMU.
pub(super) const OURS: &str = "coldrise-";
/// Time limit of one command. Draining a busy disk takes its time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit of the greeting: QEMU greets only one client at a time.
const GREETING: Duration = Duration::from_secs(5);
/// Interval of asking for a state that must soon be there; an event wakes earlier.
const INTERVAL: Duration = Duration::from_millis(100);

/// The monitor of one machine.
pub(super) struct Qemu {
    socket: PathBuf,
    /// `None` only while it is connected again.
    monitor: Option<Monitor>,
}

impl Qemu {
    /// # Errors
    /// Says what to do if QEMU does not listen or serves another client.
    pub(super) fn connect(socket: &Path) -> Result<Qemu> {
        let monitor = Monitor::connect(socket, GREETING).map_err(|error| {
            let advice = match error.kind() {
                ErrorKind::ToolFailed => {
                    "the monitor serves one client at a time: end the other one, or give QEMU \
                     another socket with -qmp unix:PATH,server=on,wait=off"
                }
                _ => "is the machine running, with -qmp unix:PATH,server=on,wait=off?",
            };
            error.advise(advice)
        })?;
        Ok(Qemu { socket: socket.to_owned(), monitor: Some(monitor) })
    }

    /// Connects again: QEMU or another client may have ended the connection meanwhile.
    pub(super) fn connect_again(&mut self) -> Result<()> {
        // QEMU greets no client as long as the old connection is there.
        self.monitor = None;
        *self = Qemu::connect(&self.socket)?;
        Ok(())
    }

    fn monitor(&mut self) -> Result<&mut Monitor> {
        let lost = || Error::new(ErrorKind::ToolFailed, "the connection to QEMU's monitor is lost");
        self.monitor.as_mut().ok_or_else(lost)
    }

    /// The connection, for a process that sends commands without an id.
    pub(super) fn share(&mut self) -> Result<BorrowedFd<'_>> {
        self.monitor().map(Monitor::share)
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        // The events are not read: they only wake.
        let monitor = self.monitor()?;
        monitor.take_events();
        monitor.execute(command, arguments, PATIENCE)
    }

    pub(super) fn ask_with_file(
        &mut self,
        command: &str,
        arguments: Value,
        file: BorrowedFd<'_>,
    ) -> Result<Value> {
        self.monitor()?.execute_with_file(command, arguments, file, PATIENCE)
    }

    /// The entries of a list that QEMU returns.
    pub(super) fn list(&mut self, command: &str, arguments: Value) -> Result<Vec<Value>> {
        match self.ask(command, arguments)? {
            Value::Array(entries) => Ok(entries),
            _ => Err(Error::new(ErrorKind::ToolFailed, format!("QEMU answers {command} oddly"))),
        }
    }

    /// All actions, or none.
    pub(super) fn transaction(&mut self, actions: Vec<Value>) -> Result<()> {
        if actions.is_empty() {
            return Ok(());
        }
        self.ask("transaction", json!({ "actions": actions })).map(drop)
    }

    /// Waits until `is_done`, woken by events.
    ///
    /// # Errors
    /// `ToolFailed` after `patience`.
    pub(super) fn wait_until(
        &mut self,
        what: &str,
        patience: Duration,
        is_done: &mut dyn FnMut(&mut Qemu) -> Result<bool>,
    ) -> Result<()> {
        let until = Instant::now() + patience;
        while !is_done(self)? {
            if Instant::now() >= until {
                let text = format!("QEMU does not finish: {what}");
                return Err(Error::new(ErrorKind::ToolFailed, text));
            }
            self.monitor()?.wait(INTERVAL)?;
        }
        Ok(())
    }

    /// `major`, `minor`.
    pub(super) fn version(&mut self) -> Result<(u64, u64)> {
        let version = self.ask("query-version", Value::Null)?;
        let number = |name: &str| version["qemu"][name].as_u64().unwrap_or(0);
        Ok((number("major"), number("minor")))
    }

    /// Such as `running` or `paused`.
    pub(super) fn status(&mut self) -> Result<String> {
        let status = self.ask("query-status", Value::Null)?;
        Ok(status["status"].as_str().unwrap_or_default().to_owned())
    }
}

/// A text field of QEMU's answer; empty if it is absent.
pub(super) fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}
