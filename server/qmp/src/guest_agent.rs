//! A client of the guest agent of a machine (QGA).

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use serde_json::{Value, json};

/// Freezing or thawing the guest's file systems takes at most this time.
pub const FREEZE_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of other questions.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum length of an answer, in bytes.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// A connection to the guest agent.
pub struct GuestAgent {
    stream: UnixStream,
    pending: Vec<u8>,
}

impl GuestAgent {
    /// Connects, and passes over answers to earlier clients.
    ///
    /// # Errors
    /// If nothing listens at the socket or the agent does not answer.
    pub fn connect(socket: &Path) -> Result<GuestAgent> {
        let what = || format!("connecting to the guest agent at {}", socket.display());
        let stream = UnixStream::connect(socket).context(what)?;
        let mut agent = GuestAgent { stream, pending: Vec::new() };
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

    /// Freezes the guest's file systems.
    ///
    /// # Errors
    /// If the agent does not freeze in time; then it got the command to thaw.
    pub fn freeze(mut self) -> Result<GuestAgent> {
        match self.ask("guest-fsfreeze-freeze", FREEZE_LIMIT) {
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

    /// Whether the guest's file systems are frozen.
    ///
    /// # Errors
    /// If the agent does not answer.
    pub fn is_frozen(&mut self) -> Result<bool> {
        Ok(self.ask("guest-fsfreeze-status", PATIENCE)? == json!("frozen"))
    }

    /// The guest's mounted file systems, as `guest-get-fsinfo` lists them.
    ///
    /// # Errors
    /// If the agent does not answer.
    pub fn file_systems(&mut self) -> Result<Value> {
        self.ask("guest-get-fsinfo", PATIENCE)
    }

    /// Thaws them.
    ///
    /// # Errors
    /// If the agent does not answer: they may still be frozen.
    pub fn thaw(&mut self) -> Result<()> {
        self.ask("guest-fsfreeze-thaw", FREEZE_LIMIT).map(drop).map_err(|error| {
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
