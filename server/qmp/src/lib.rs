//! Clients of QEMU's monitor protocol (QMP) and of the guest agent (QGA).
//!
//! ```text
//!   QEMU ──greeting──▶ Monitor ──qmp_capabilities──▶ QEMU
//!   Monitor::execute ──{execute, arguments, id}──▶ QEMU ──{return | error, id}──▶ result
//!                                                       ──{event, timestamp}────▶ take_events
//! ```
//!
//! One thread uses one [`Monitor`]; there are no locks. A socket of QEMU's monitor serves one
//! client at a time, and a second one waits without an answer.
//!
//! QEMU runs a hostile guest, so its answers are hostile, too: a line has at most
//! [`MAX_LINE_BYTES`], at most [`MAX_EVENTS`] events of [`MAX_EVENT_BYTES`] are kept, and every wait has a time limit.
#![forbid(unsafe_code)]

mod connect;
mod descriptors;
mod guest_agent;
mod lines;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use serde_json::{Value, json};

pub use guest_agent::{FREEZE_LIMIT, GuestAgent};
use lines::Lines;

/// Maximum length of one message of QEMU, in bytes.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Maximum number of events that wait for [`Monitor::take_events`]. Later ones are dropped.
pub const MAX_EVENTS: usize = 1024;
/// Maximum length of an event, in bytes; QEMU's own have some hundred. The fields of longer ones
/// are dropped, and their name.
pub const MAX_EVENT_BYTES: usize = 4 << 10;
/// Maximum length of QEMU's text in an error message, in characters.
const MAX_SHOWN_CHARS: usize = 300;

/// An event of the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Such as `SHUTDOWN`.
    pub name: String,
    /// QEMU's clock: milliseconds since 1970. 0 if QEMU could not read its clock.
    pub unix_ms: u64,
    /// The event's own fields; `Null` if it has none.
    pub fields: Value,
}

/// A connection to QEMU's monitor.
pub struct Monitor {
    stream: UnixStream,
    lines: Lines,
    next_id: u64,
    /// Other processes may use the connection, too: answers that are not for this one are left out.
    is_shared: bool,
    events: VecDeque<Event>,
}

impl Monitor {
    /// Connects to a socket on which QEMU listens.
    ///
    /// # Errors
    /// `NotFound` or `Io` if there is no listener; otherwise as [`Monitor::greet`].
    pub fn connect(path: &Path, patience: Duration) -> Result<Monitor> {
        let stream = connect::connect(path)
            .context(|| format!("connecting to QEMU's monitor {}", path.display()))?;
        Monitor::greet(stream, patience)
    }

    /// Reads the greeting on a new connection and leaves the negotiation mode.
    ///
    /// # Errors
    /// `ToolFailed` if QEMU closes the connection, does not answer within `patience`, or
    /// answers with something else.
    pub fn greet(stream: UnixStream, patience: Duration) -> Result<Monitor> {
        let mut monitor = Monitor {
            stream,
            lines: Lines::default(),
            next_id: 1,
            is_shared: false,
            events: VecDeque::new(),
        };
        let until = Instant::now() + patience;
        let greeting = monitor.message(until)?.ok_or_else(|| late("its greeting"))?;
        if !greeting["QMP"].is_object() {
            return Err(unexpected("the greeting", &greeting));
        }
        monitor.execute("qmp_capabilities", Value::Null, patience)?;
        Ok(monitor)
    }

    /// Executes a command and returns its result. `Null` arguments are left out.
    ///
    /// # Errors
    /// `ToolFailed` if QEMU refuses the command, closes the connection or does not answer
    /// within `patience`. After any but a refusal, do not use the monitor again.
    pub fn execute(
        &mut self,
        command: &str,
        arguments: Value,
        patience: Duration,
    ) -> Result<Value> {
        self.execute_with(command, arguments, None, patience)
    }

    /// Executes a command that takes an open file, such as `add-fd` or `getfd`. QEMU then needs
    /// no right to open it.
    ///
    /// # Errors
    /// As for [`Monitor::execute`].
    pub fn execute_with_file(
        &mut self,
        command: &str,
        arguments: Value,
        file: BorrowedFd<'_>,
        patience: Duration,
    ) -> Result<Value> {
        self.execute_with(command, arguments, Some(file), patience)
    }

    fn execute_with(
        &mut self,
        command: &str,
        arguments: Value,
        file: Option<BorrowedFd<'_>>,
        patience: Duration,
    ) -> Result<Value> {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        let sending = || format!("sending {command} to QEMU");
        self.stream.set_write_timeout(Some(patience.max(MIN_WAIT))).context(sending)?;
        let line = format!("{request}\n");
        let sent =
            file.map_or(Ok(0), |file| descriptors::send(&self.stream, line.as_bytes(), file));
        let rest = line.as_bytes().get(sent.context(sending)?..).unwrap_or_default();
        self.stream.write_all(rest).context(sending)?;
        let until = Instant::now() + patience;
        loop {
            let mut answer = self.message(until)?.ok_or_else(|| late(command))?;
            if self.keep_event(&answer) {
                continue;
            }
            if self.is_shared && answer["id"].is_null() {
                continue;
            }
            if answer["id"] != json!(id) {
                return Err(unexpected(command, &answer));
            }
            if let Some(error) = answer.get("error") {
                let text = error["desc"].as_str().unwrap_or("no reason");
                let text = format!("QEMU refuses {command}: {}", shown(text));
                return Err(Error::new(ErrorKind::ToolFailed, text));
            }
            return match answer.get_mut("return") {
                Some(result) => Ok(result.take()),
                None => Err(unexpected(command, &answer)),
            };
        }
    }

    /// The connection, for another process that sends commands without an id.
    pub fn share(&mut self) -> BorrowedFd<'_> {
        self.is_shared = true;
        self.stream.as_fd()
    }

    /// Waits until an event arrives or `patience` has passed, whichever is first.
    ///
    /// # Errors
    /// `ToolFailed` if QEMU closes the connection or sends anything else.
    pub fn wait(&mut self, patience: Duration) -> Result<()> {
        if !self.events.is_empty() {
            return Ok(());
        }
        let Some(message) = self.message(Instant::now() + patience)? else { return Ok(()) };
        let is_of_another = self.is_shared && message["id"].is_null();
        if self.keep_event(&message) || is_of_another {
            return Ok(());
        }
        Err(unexpected("a wait for events", &message))
    }

    /// The events since the last call, in order.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.events.drain(..).collect()
    }

    /// Whether the message is an event.
    fn keep_event(&mut self, message: &Value) -> bool {
        let Some(name) = message["event"].as_str() else { return false };
        if self.events.len() < MAX_EVENTS {
            let time = &message["timestamp"];
            let seconds = time["seconds"].as_u64().unwrap_or(0);
            let microseconds = time["microseconds"].as_u64().unwrap_or(0);
            self.events.push_back(Event {
                name: name.to_owned(),
                unix_ms: seconds.saturating_mul(1000).saturating_add(microseconds / 1000),
                fields: message["data"].clone(),
            });
        }
        true
    }

    /// The next message; `None` at the deadline.
    fn message(&mut self, until: Instant) -> Result<Option<Value>> {
        let Some(line) = self.lines.next(&mut self.stream, until)? else { return Ok(None) };
        match serde_json::from_slice::<Value>(&line) {
            Ok(mut message) if message.is_object() => {
                // Many large events would fill the memory.
                if line.len() > MAX_EVENT_BYTES && message["event"].is_string() {
                    message["event"] = TOO_LONG.into();
                    message["data"] = Value::Null;
                }
                Ok(Some(message))
            }
            _ => {
                let text = shown(&String::from_utf8_lossy(&line));
                Err(Error::new(ErrorKind::ToolFailed, format!("QEMU's monitor sent {text:?}")))
            }
        }
    }
}

/// The name of an event that is too long.
const TOO_LONG: &str = "TOO_LONG";
/// A socket's time limit of zero would mean none.
const MIN_WAIT: Duration = Duration::from_millis(1);

fn late(what: &str) -> Error {
    Error::new(ErrorKind::ToolFailed, format!("QEMU's monitor does not answer ({what})"))
}

fn unexpected(what: &str, message: &Value) -> Error {
    let text = shown(&message.to_string());
    Error::new(ErrorKind::ToolFailed, format!("QEMU's monitor answers {what} with {text}"))
}

/// The beginning of a foreign text, without control characters.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_SHOWN_CHARS).collect()
}
