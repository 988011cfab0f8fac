//! The socket by which the command line asks the serving process for a seal.
//!
//! One request and one answer per connection, each a line of JSON. The socket
//! lies in the session's folder, which only the repository's owner can enter.

use std::io::ErrorKind::{ConnectionRefused, NotFound};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::place::{remove_file, Place};
use crate::seal::Sealed;
use crate::session::Session;

/// Longest answer that is read, in bytes.
const MAX_LINE_BYTES: u64 = 16 << 20;
/// A flush of much unflushed data may take a while; an answer later than this is none.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    Seal,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Sealed(Box<Sealed>),
    Failed {
        message: String,
    },
    /// The session is being closed: nothing was done.
    Closing,
}

/// The listening side; it ends when it is dropped.
pub(crate) struct ControlSocket {
    place: Place,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// A short name for the socket, whatever the repository's path: socket
/// addresses hold only 107 bytes. The folder has to stay open.
fn short_path(place: &Place) -> Result<(std::fs::File, PathBuf)> {
    let folder = std::fs::File::open(place.directory())
        .context(|| format!("opening {}", place.directory().display()))?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/control", folder.as_raw_fd()));
    Ok((folder, path))
}

impl ControlSocket {
    /// Listens for requests to `session`.
    pub(crate) fn listen(place: &Place, session: Weak<Session>) -> Result<ControlSocket> {
        remove_file(&place.control())?;
        let (_folder, path) = short_path(place)?;
        let listener = UnixListener::bind(&path)
            .context(|| format!("listening at {}", place.control().display()))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("session-control".into())
            .spawn(move || serve(&listener, &session, &stopped))
            .context(|| "starting the session's control thread")?;
        Ok(ControlSocket { place: place.clone(), stop, thread: Some(thread) })
    }

    /// Moves the socket aside, where nobody new finds it, and wakes the thread
    /// out of its wait for a connection.
    fn withdraw(&self) -> Result<UnixStream> {
        let (_folder, path) = short_path(&self.place)?;
        let aside = path.with_extension("closing");
        std::fs::rename(&path, &aside).context(|| "withdrawing the control socket")?;
        let woken = UnixStream::connect(&aside).context(|| "waking the control thread");
        let _ = std::fs::remove_file(&aside);
        woken
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let woken = self.withdraw();
        if let (Some(thread), Ok(_)) = (self.thread.take(), woken) {
            // The session may be dropped by the thread itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

fn serve(listener: &UnixListener, session: &Weak<Session>, stop: &AtomicBool) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        if stop.load(Ordering::SeqCst) {
            dismiss(stream, listener);
            return;
        }
        if let Err(error) = answer(stream, session) {
            tracing::warn!(error = %error.full_message(), "a request to a session was not answered");
        }
    }
}

/// Tells whoever connected before the socket was withdrawn that the session is closing.
fn dismiss(first: UnixStream, listener: &UnixListener) {
    let _ = send(first, &Answer::Closing);
    if listener.set_nonblocking(true).is_err() {
        return;
    }
    while let Ok((stream, _)) = listener.accept() {
        let _ = send(stream, &Answer::Closing);
    }
}

fn answer(stream: UnixStream, session: &Weak<Session>) -> Result<()> {
    let what = || "speaking with the command line";
    stream.set_read_timeout(Some(Duration::from_secs(5))).context(what)?;
    let mut line = String::new();
    BufReader::new((&stream).take(4096)).read_line(&mut line).context(what)?;
    // Held only from here on: whoever asks nothing must not keep it open.
    let answer = match (serde_json::from_str::<Request>(&line), session.upgrade()) {
        (Ok(Request::Seal), Some(session)) => match session.seal() {
            Ok(sealed) => Answer::Sealed(Box::new(sealed)),
            Err(error) => Answer::Failed { message: error.full_message() },
        },
        (Ok(Request::Seal), None) => Answer::Closing,
        (Err(error), _) => Answer::Failed { message: format!("unknown request: {error}") },
    };
    send(stream, &answer).context(what)
}

fn send(mut stream: UnixStream, answer: &Answer) -> std::io::Result<()> {
    let mut text = serde_json::to_vec(answer)?;
    text.push(b'\n');
    stream.write_all(&text)
}

/// Asks the process that serves the session to seal it; `None` where none does,
/// or where it is about to stop.
pub(crate) fn ask_for_seal(place: &Place) -> Result<Option<Sealed>> {
    let (_folder, path) = short_path(place)?;
    let mut stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        // Nobody made the socket, or who made it was killed.
        Err(error) if matches!(error.kind(), NotFound | ConnectionRefused) => return Ok(None),
        Err(error) => return Err(Error::io("asking the process that serves the session", error)),
    };
    let what = || "waiting for the process that serves the session";
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).context(what)?;
    let mut request = serde_json::to_vec(&Request::Seal)
        .map_err(|error| Error::with_source(ErrorKind::Internal, "asking for a seal", error))?;
    request.push(b'\n');
    // Whoever is about to stop answers without having read the request.
    let sent = stream.write_all(&request);
    let mut line = String::new();
    BufReader::new(stream.take(MAX_LINE_BYTES)).read_line(&mut line).context(what)?;
    if line.is_empty() {
        sent.context(what)?;
    }
    match serde_json::from_str(&line) {
        Ok(Answer::Closing) => Ok(None),
        Ok(Answer::Sealed(sealed)) => Ok(Some(*sealed)),
        Ok(Answer::Failed { message }) => Err(Error::new(ErrorKind::Io, message)),
        Err(error) => Err(Error::with_source(
            ErrorKind::Io,
            "the process that serves the session went away before it answered; look with \
             `coldrise sessions` and `coldrise list` whether the point is there",
            error,
        )),
    }
}
