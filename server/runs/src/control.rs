//! The control socket of a run: one request per connection, one line each way.
//!
//! `status` answers with the last progress, `cancel` asks the process to end, as Ctrl-C does.
//! Only the folder's owner and root can connect.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use serde_json::Value;

use crate::RunId;
use crate::folder::RunsFolder;

/// Maximum length of a request, in bytes. It is small: a client may send one byte per second.
const MAX_REQUEST_BYTES: u64 = 32;
/// Maximum length of an answer, in bytes.
const MAX_ANSWER_BYTES: u64 = 16 << 10;
/// Time for one request: a client that says nothing must not keep others out.
const REQUEST_PATIENCE: Duration = Duration::from_secs(1);
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// Interval of looking whether a run has ended.
const INTERVAL: Duration = Duration::from_millis(20);

/// Time to wait after an error, such as too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers requests until the listener is shut down, when `is_ended` is true.
pub(crate) fn serve(
    listener: &UnixListener,
    is_ended: impl Fn() -> bool,
    answer: impl Fn(&str) -> Value,
) {
    while !is_ended() {
        match listener.accept() {
            // A client that breaks off is its own loss.
            Ok((client, _)) => drop(serve_one(&client, &answer)),
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

fn serve_one(mut client: &UnixStream, answer: &impl Fn(&str) -> Value) -> std::io::Result<()> {
    client.set_read_timeout(Some(REQUEST_PATIENCE))?;
    client.set_write_timeout(Some(REQUEST_PATIENCE))?;
    let mut line = String::new();
    BufReader::new(client.take(MAX_REQUEST_BYTES)).read_line(&mut line)?;
    let answer = answer(line.trim_end());
    client.write_all(format!("{answer}\n").as_bytes())
}

impl RunsFolder {
    /// Asks a running process to end, as Ctrl-C does. Does not wait for its end.
    ///
    /// # Errors
    /// `NotFound` if there is no such run, or if it has ended; errors of the socket.
    pub fn cancel(&self, id: &RunId) -> Result<()> {
        self.request(id, "cancel").map(drop)
    }

    /// The status of a running process.
    ///
    /// # Errors
    /// As [`RunsFolder::cancel`].
    pub fn status(&self, id: &RunId) -> Result<Value> {
        self.request(id, "status")
    }

    fn request(&self, id: &RunId, word: &str) -> Result<Value> {
        let run = self.open(id)?;
        if !run.is_locked().context(|| format!("the lock of run {id}"))? {
            return Err(Error::new(ErrorKind::NotFound, format!("run {id} has ended")));
        }
        let asked = || -> std::io::Result<Vec<u8>> {
            if !run.has_control() {
                return Err(std::io::Error::other("there is no control socket"));
            }
            let mut server = UnixStream::connect(run.control_path())?;
            server.set_read_timeout(Some(ANSWER_PATIENCE))?;
            server.write_all(format!("{word}\n").as_bytes())?;
            let mut answer = Vec::new();
            server.take(MAX_ANSWER_BYTES).read_to_end(&mut answer)?;
            Ok(answer)
        };
        let answer = asked().context(|| format!("asking run {id}"))?;
        serde_json::from_slice(&answer).map_err(|error| {
            Error::with_source(ErrorKind::Corrupt, format!("the answer of run {id}"), error)
        })
    }

    /// Waits until a run has ended, at most for `patience`. Returns whether it has.
    ///
    /// # Errors
    /// `NotFound` if there is no such run.
    pub fn wait(&self, id: &RunId, patience: Duration) -> Result<bool> {
        let (run, started) = (self.open(id)?, Instant::now());
        while run.is_locked()? {
            if started.elapsed() >= patience {
                return Ok(false);
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(true)
    }
}
