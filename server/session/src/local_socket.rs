//! A socket in a folder of the repository, by which the command line asks a process
//! that holds something for work only that process can do.
//!
//! One request per connection, a line of JSON, and lines of JSON as its answer. Only
//! the repository's owner can enter the folder.

use std::fs::Permissions;
use std::io::ErrorKind::{TimedOut, WouldBlock};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::{connect, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::de::DeserializeOwned;
use serde::Serialize;

use crate::place::remove_file;

/// Longest line of an answer that is read, in bytes.
const MAX_ANSWER_BYTES: u64 = 16 << 20;
/// Longest request, in bytes.
const MAX_REQUEST_BYTES: u64 = 4096;
/// A request comes at once.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The listening side; it ends when it is dropped.
pub(crate) struct LocalSocket {
    folder: PathBuf,
    name: &'static str,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What is said to who asks.
pub(crate) trait Answers: Send + 'static {
    /// Answers one request, here or in a thread of its own: the next one waits until this
    /// returns. An error is logged.
    fn answer(&self, request: &str, stream: UnixStream) -> Result<()>;
    /// Says that the holder is about to end and has done nothing.
    fn decline(&self, stream: &UnixStream) -> Result<()>;
}

/// A short name for the socket, whatever the folder's path: socket addresses hold only
/// 107 bytes. The folder has to stay open.
fn short_path(folder: &Path, name: &str) -> Result<(std::fs::File, PathBuf)> {
    let opened = std::fs::File::open(folder).context(|| format!("opening {}", folder.display()))?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", opened.as_raw_fd()));
    Ok((opened, path))
}

impl LocalSocket {
    /// Listens at `folder/name`, in the place of whoever was killed while it listened
    /// there. The caller holds what makes it the only one. Its mode is 0600: connecting takes
    /// the right to write.
    pub(crate) fn listen(
        folder: &Path,
        name: &'static str,
        answers: impl Answers,
    ) -> Result<LocalSocket> {
        let what = || format!("listening at {}", folder.join(name).display());
        remove_file(&folder.join(name))?;
        let (_folder, path) = short_path(folder, name)?;
        let listener = UnixListener::bind(&path).context(what)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).context(what)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("local-socket".into())
            .spawn(move || serve(&listener, &answers, &stopped))
            .context(what)?;
        Ok(LocalSocket { folder: folder.to_owned(), name, stop, thread: Some(thread) })
    }

    /// Moves the socket aside, where nobody new finds it, and wakes the thread
    /// out of its wait for a connection.
    fn withdraw(&self) -> Result<UnixStream> {
        let (_folder, path) = short_path(&self.folder, self.name)?;
        let aside = path.with_extension("closing");
        std::fs::rename(&path, &aside).context(|| "withdrawing a control socket")?;
        let woken = UnixStream::connect(&aside).context(|| "waking a control thread");
        let _ = std::fs::remove_file(&aside);
        woken
    }
}

impl Drop for LocalSocket {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let woken = self.withdraw();
        if let (Some(thread), Ok(_)) = (self.thread.take(), woken) {
            // Who listens may be dropped by the thread itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

fn serve(listener: &UnixListener, answers: &impl Answers, stop: &AtomicBool) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        if stop.load(Ordering::SeqCst) {
            return dismiss(&stream, listener, answers);
        }
        let answered = read_request(&stream).and_then(|line| answers.answer(&line, stream));
        if let Err(error) = answered {
            tracing::warn!(error = %error.full_message(), "a request was not answered");
        }
    }
}

/// Tells whoever connected before the socket was withdrawn that nobody will answer.
fn dismiss(first: &UnixStream, listener: &UnixListener, answers: &impl Answers) {
    let _ = answers.decline(first);
    if listener.set_nonblocking(true).is_err() {
        return;
    }
    while let Ok((stream, _)) = listener.accept() {
        let _ = answers.decline(&stream);
    }
}

fn read_request(stream: &UnixStream) -> Result<String> {
    let what = || "reading a request";
    stream.set_read_timeout(Some(REQUEST_TIMEOUT)).context(what)?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_REQUEST_BYTES)).read_line(&mut line).context(what)?;
    Ok(line)
}

/// Connects to the process that listens at `folder/name`; `None` where none does. Waits at
/// most `patience` for one that does not run.
///
/// # Errors
/// `Busy` where that process lets so many requests wait that it can take no more; `Io`.
pub(crate) fn connect_within(
    folder: &Path,
    name: &str,
    patience: Duration,
) -> Result<Option<UnixStream>> {
    let what = || format!("asking at {}", folder.join(name).display());
    let (_folder, path) = short_path(folder, name)?;
    let failed = |errno: Errno| Error::io(what(), errno.into());
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let stream = UnixStream::from(stream.map_err(failed)?);
    // Connecting waits while the queue of a process that does not run is full.
    stream.set_write_timeout(Some(patience)).context(what)?;
    match connect(&stream, &SocketAddrUnix::new(path).map_err(failed)?) {
        Ok(()) => Ok(Some(stream)),
        // Nobody made the socket, or its process was killed.
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
        Err(Errno::AGAIN) => {
            let message = format!("{}: its process takes no more requests", what());
            Err(Error::new(ErrorKind::Busy, message))
        }
        Err(errno) => Err(failed(errno)),
    }
}

/// Sends one line.
///
/// # Errors
/// `Io` where the other side is gone.
pub(crate) fn send(mut stream: &UnixStream, line: &impl Serialize) -> Result<()> {
    let what = || "answering a request";
    let mut text = serde_json::to_vec(line)
        .map_err(|error| Error::with_source(ErrorKind::Internal, what(), error))?;
    text.push(b'\n');
    stream.write_all(&text).context(what)
}

/// Whether the other side has closed its end. Between requests it has nothing to say.
///
/// # Errors
/// What the operating system says of the socket itself.
pub(crate) fn has_left(mut stream: &UnixStream) -> Result<bool> {
    let what = || "looking at a request's sender";
    stream.set_nonblocking(true).context(what)?;
    let read = stream.read(&mut [0]);
    stream.set_nonblocking(false).context(what)?;
    Ok(match read {
        Ok(count) => count == 0,
        Err(error) => error.kind() != WouldBlock,
    })
}

/// The asking side.
pub(crate) struct Asked {
    answers: BufReader<UnixStream>,
    sent: Result<()>,
    /// The beginning of a line of which the rest has not come yet.
    line: Vec<u8>,
}

/// Asks the process that listens at `folder/name`; `None` where none does. `patience` is
/// the longest wait of [`Asked::next`].
///
/// # Errors
/// `Busy` where that process lets so many requests wait that it can take no more; `Io`.
pub(crate) fn ask(
    folder: &Path,
    name: &str,
    request: &impl Serialize,
    patience: Duration,
) -> Result<Option<Asked>> {
    let what = || format!("asking at {}", folder.join(name).display());
    let Some(stream) = connect_within(folder, name, patience)? else { return Ok(None) };
    stream.set_read_timeout(Some(patience)).context(what)?;
    // Whoever is about to stop answers without having read the request.
    let sent = send(&stream, request);
    Ok(Some(Asked { answers: BufReader::new(stream), sent, line: Vec::new() }))
}

impl Asked {
    /// The next line of the answer; `None` where it does not come within the patience.
    ///
    /// # Errors
    /// `Io` where the other side went away, or says what cannot be read.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let left = MAX_ANSWER_BYTES.saturating_sub(self.line.len() as u64);
        match (&mut self.answers).take(left).read_until(b'\n', &mut self.line) {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), WouldBlock | TimedOut) => return Ok(None),
            Err(error) => return Err(error).context(|| "waiting for an answer"),
        }
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            std::mem::replace(&mut self.sent, Ok(()))?;
        }
        serde_json::from_slice(&line)
            .map(Some)
            .map_err(|error| Error::with_source(ErrorKind::Io, "who was asked went away", error))
    }
}
