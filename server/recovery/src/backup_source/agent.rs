//! The guest agent: file systems frozen for the instant, and thawed in any case.
//!
//! A thread of its own freezes and thaws, so that a QEMU that does not answer cannot keep the guest
//! frozen: after [`LIMIT`] the thread thaws by itself. A process that is killed meanwhile leaves the
//! guest frozen; the next backup with the agent thaws it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{channel, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use serde_json::{json, Value};

/// The guest's file systems are frozen for at most this time, and freezing takes at most this time.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);
/// Time limit of other questions.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum length of an answer, in bytes.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// A guest with frozen file systems. Dropping it thaws them.
pub(crate) struct FrozenGuest {
    release: Option<Sender<()>>,
    thread: Option<JoinHandle<Result<bool>>>,
}

/// Freezes the guest's file systems.
///
/// # Errors
/// If the agent does not freeze in time; then it was told to thaw.
pub(super) fn freeze(socket: &Path) -> Result<FrozenGuest> {
    let socket = socket.to_owned();
    FrozenGuest::hold(move || {
        let mut agent = Agent::connect(&socket).and_then(Agent::freeze)?;
        Ok(move || agent.thaw())
    })
}

impl FrozenGuest {
    /// Freezes in a thread of its own. `freeze` returns what thaws, which the thread calls when the
    /// guest is thawed or dropped, or after [`LIMIT`].
    ///
    /// # Errors
    /// Those of `freeze`.
    pub(crate) fn hold<T: FnOnce() -> Result<()>>(
        freeze: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<FrozenGuest> {
        let (frozen, is_frozen) = channel();
        let (release, released) = channel();
        let thread = std::thread::spawn(move || {
            let thaw = match freeze() {
                Ok(thaw) => thaw,
                Err(error) => {
                    let _ = frozen.send(Err(error));
                    return Ok(false);
                }
            };
            let _ = frozen.send(Ok(()));
            let is_in_time = released.recv_timeout(LIMIT) != Err(RecvTimeoutError::Timeout);
            thaw().map(|()| is_in_time)
        });
        let guest = FrozenGuest { release: Some(release), thread: Some(thread) };
        let ended = || Error::new(ErrorKind::Internal, "the thread of the guest agent ended");
        is_frozen.recv().map_err(|_| ended())??;
        Ok(guest)
    }

    /// Thaws. Returns whether the guest was frozen until now.
    ///
    /// # Errors
    /// If the agent does not answer: the guest may still be frozen.
    pub(crate) fn thaw(mut self) -> Result<bool> {
        self.end()
    }

    fn end(&mut self) -> Result<bool> {
        drop(self.release.take());
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(thawed)) => thawed,
            _ => Ok(false),
        }
    }
}

impl Drop for FrozenGuest {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!("{}", error.full_message());
        }
    }
}

/// Thaws what a killed backup left frozen. Returns whether it did.
///
/// # Errors
/// If the agent does not answer.
pub(super) fn thaw_leftover(socket: &Path) -> Result<bool> {
    let mut agent = Agent::connect(socket)?;
    if agent.ask("guest-fsfreeze-status", PATIENCE)? != json!("frozen") {
        return Ok(false);
    }
    agent.thaw().map(|()| true)
}

/// The guest's mounted file systems, as `guest-get-fsinfo` lists them.
///
/// # Errors
/// If the agent does not answer.
pub(crate) fn file_systems(socket: &Path) -> Result<Value> {
    Agent::connect(socket)?.ask("guest-get-fsinfo", PATIENCE)
}

struct Agent {
    stream: UnixStream,
    pending: Vec<u8>,
}

impl Agent {
    fn connect(socket: &Path) -> Result<Agent> {
        let what = || format!("connecting to the guest agent at {}", socket.display());
        let stream = UnixStream::connect(socket).context(what)?;
        let mut agent = Agent { stream, pending: Vec::new() };
        agent.synchronize()?;
        Ok(agent)
    }

    /// Passes over answers to earlier clients. The agent begins this answer with 0xff.
    fn synchronize(&mut self) -> Result<()> {
        let number = u64::from(std::process::id());
        let question = json!({ "execute": "guest-sync-delimited", "arguments": { "id": number } });
        self.send(&question)?;
        let until = Instant::now() + PATIENCE;
        loop {
            if self.answer(until)?["return"] == json!(number) {
                return Ok(());
            }
        }
    }

    fn freeze(mut self) -> Result<Agent> {
        match self.ask("guest-fsfreeze-freeze", LIMIT) {
            Ok(_) => Ok(self),
            Err(error) => {
                // It may still freeze, after our time limit.
                let thawed = self.synchronize().and_then(|()| self.thaw());
                Err(match thawed {
                    Ok(()) => error,
                    Err(_) => error.advise("the guest may still be frozen: look at it"),
                })
            }
        }
    }

    fn thaw(&mut self) -> Result<()> {
        self.ask("guest-fsfreeze-thaw", LIMIT).map(drop).map_err(|error| {
            error
                .context("the guest may still be frozen")
                .advise("send guest-fsfreeze-thaw to its agent, or reset it")
        })
    }

    fn ask(&mut self, command: &str, patience: Duration) -> Result<Value> {
        self.send(&json!({ "execute": command }))?;
        let mut answer = self.answer(Instant::now() + patience)?;
        match answer.get_mut("return") {
            Some(value) => Ok(value.take()),
            None => {
                let text = answer["error"]["desc"].as_str().unwrap_or("an odd answer");
                let text: String = text.chars().filter(|c| !c.is_control()).take(200).collect();
                let text = format!("the guest agent refuses {command}: {text}");
                Err(Error::new(ErrorKind::ToolFailed, text))
            }
        }
    }

    fn send(&mut self, question: &Value) -> Result<()> {
        let what = || "asking the guest agent";
        self.stream.set_write_timeout(Some(PATIENCE)).context(what)?;
        // 0xff ends what an earlier client began.
        let line = [b"\xff".as_slice(), question.to_string().as_bytes(), b"\n"].concat();
        self.stream.write_all(&line).context(what)
    }

    /// The next line that is JSON.
    fn answer(&mut self, until: Instant) -> Result<Value> {
        let silent = || Error::new(ErrorKind::ToolFailed, "the guest agent does not answer");
        let mut piece = [0; 4096];
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let rest = self.pending.split_off(end + 1);
                let line = std::mem::replace(&mut self.pending, rest);
                let line = line.rsplit(|byte| *byte == 0xff).next().unwrap_or_default();
                if let Ok(answer) = serde_json::from_slice(line) {
                    return Ok(answer);
                }
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.pending.len() > MAX_ANSWER_BYTES {
                return Err(silent());
            }
            let what = || "reading from the guest agent";
            self.stream.set_read_timeout(Some(left)).context(what)?;
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(silent()),
                Ok(count) => self.pending.extend(piece.iter().take(count)),
                Err(error) => match error.kind() {
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {}
                    std::io::ErrorKind::Interrupted => {}
                    _ => return Err(error).context(what),
                },
            }
        }
    }
}
