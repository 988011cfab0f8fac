//! A socket in a folder of the repository. The command line uses it to ask a process for work that
//! only this process can do, because it holds a lock.
//!
//! Each connection has one request, a line of JSON. The answer is lines of JSON. Only the
//! repository's owner can enter the folder.

use std::fs::Permissions;
use std::io::ErrorKind::{TimedOut, WouldBlock};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result, remove_if_present};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum length of a request, and of a line of an answer, in bytes. A request can name all layers
/// of a session.
const MAX_LINE_BYTES: u64 = 16 << 20;
/// Longest wait for a request after the connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a connection could not be accepted: the process has no free descriptor.
const NO_DESCRIPTOR_PAUSE: Duration = Duration::from_millis(50);

/// The listening side. Dropping it ends the listening.
pub(crate) struct LocalSocket {
    folder: PathBuf,
    name: String,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Answers the requests of a socket.
pub(crate) trait Answers: Send + 'static {
    /// Answers one request, here or in a thread of its own. The next request waits until this
    /// returns. An error is logged.
    fn answer(&self, request: &str, stream: UnixStream) -> Result<()>;
    /// Reports that the holder is about to end and has done nothing.
    fn decline(&self, stream: &UnixStream) -> Result<()>;
}

/// A short name for the socket, independent of the folder's path: socket addresses hold only 107
/// bytes. The returned folder must stay open.
fn short_path(folder: &Path, name: &str) -> Result<(std::fs::File, PathBuf)> {
    let opened = std::fs::File::open(folder).context(|| format!("opening {}", folder.display()))?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", opened.as_raw_fd()));
    Ok((opened, path))
}

impl LocalSocket {
    /// Listens at `folder/name`, and replaces the socket of a killed process. The caller holds a
    /// lock that makes it the only listener. The mode is 0600: connecting requires write
    /// permission.
    pub(crate) fn listen(folder: &Path, name: &str, answers: impl Answers) -> Result<LocalSocket> {
        let what = || format!("listening at {}", folder.join(name).display());
        remove_if_present(&folder.join(name))?;
        let (_folder, path) = short_path(folder, name)?;
        let listener = UnixListener::bind(&path).context(what)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).context(what)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("local-socket".into())
            .spawn(move || serve(&listener, &answers, &stopped))
            .context(what)?;
        Ok(LocalSocket {
            folder: folder.to_owned(),
            name: name.to_owned(),
            stop,
            thread: Some(thread),
        })
    }

    /// Renames the socket so that no new client finds it, and wakes the thread that waits for a
    /// connection.
    fn withdraw(&self) -> Result<UnixStream> {
        let (_folder, path) = short_path(&self.folder, &self.name)?;
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
            // The thread itself may drop the listener.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

fn serve(listener: &UnixListener, answers: &impl Answers, stop: &AtomicBool) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            if stop.load(Ordering::SeqCst) {
                return;
            }
            std::thread::sleep(NO_DESCRIPTOR_PAUSE);
            continue;
        };
        if stop.load(Ordering::SeqCst) {
            return dismiss(&stream, listener, answers);
        }
        let answered = read_request(&stream).and_then(|line| answers.answer(&line, stream));
        if let Err(error) = answered {
            tracing::warn!(error = %error.full_message(), "a request was not answered");
        }
    }
}

/// Declines all connections that were made before the socket was withdrawn.
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
    BufReader::new(stream.take(MAX_LINE_BYTES)).read_line(&mut line).context(what)?;
    Ok(line)
}

/// Connects to the process that listens at `folder/name`; `None` if none does. Waits at most
/// `patience` for a process that is stopped.
///
/// # Errors
/// `Busy` if the request queue of that process is full; `Io`.
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
    // Connecting waits while the queue of a stopped process is full.
    stream.set_write_timeout(Some(patience)).context(what)?;
    match connect(&stream, &SocketAddrUnix::new(path).map_err(failed)?) {
        Ok(()) => Ok(Some(stream)),
        // No process created the socket, or its process was killed.
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
/// `Io` if the other side has disconnected.
pub(crate) fn send(mut stream: &UnixStream, line: &impl Serialize) -> Result<()> {
    let what = || "answering a request";
    let mut text = serde_json::to_vec(line)
        .map_err(|error| Error::with_source(ErrorKind::Internal, what(), error))?;
    text.push(b'\n');
    stream.write_all(&text).context(what)
}

/// True if the other side has closed its end. It sends nothing between requests.
///
/// # Errors
/// The operating system's error for the socket itself.
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
pub(crate) struct PendingAnswers {
    answers: BufReader<UnixStream>,
    sent: Result<()>,
    /// The beginning of an incomplete line.
    line: Vec<u8>,
}

/// Sends a request to the process that listens at `folder/name`; `None` if none does. `patience` is
/// the longest wait of [`PendingAnswers::next`].
///
/// # Errors
/// `Busy` if the request queue of that process is full; `Io`.
pub(crate) fn ask(
    folder: &Path,
    name: &str,
    request: &impl Serialize,
    patience: Duration,
) -> Result<Option<PendingAnswers>> {
    let what = || format!("asking at {}", folder.join(name).display());
    let Some(stream) = connect_within(folder, name, patience)? else { return Ok(None) };
    stream.set_read_timeout(Some(patience)).context(what)?;
    // A process that is about to end answers without having read the request.
    let sent = send(&stream, request);
    Ok(Some(PendingAnswers { answers: BufReader::new(stream), sent, line: Vec::new() }))
}

impl PendingAnswers {
    /// The next line of the answer; `None` if it does not come within the patience.
    ///
    /// # Errors
    /// `Io` if the other side has disconnected, or sends an invalid line.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let left = MAX_LINE_BYTES.saturating_sub(self.line.len() as u64);
        match (&mut self.answers).take(left).read_until(b'\n', &mut self.line) {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), WouldBlock | TimedOut) => return Ok(None),
            Err(error) => return Err(error).context(|| "waiting for an answer"),
        }
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            std::mem::replace(&mut self.sent, Ok(()))?;
        }
        serde_json::from_slice(&line).map(Some).map_err(|error| {
            Error::with_source(
                ErrorKind::Io,
                "the process that was asked has ended, or its answer is invalid",
                error,
            )
        })
    }
}
