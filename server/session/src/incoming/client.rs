//! A front end's side of the socket through which it fetches what has not arrived.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::Repository;
use parking_lot::Mutex;

use super::partial::{PartialCopy, folder};
use super::socket::{
    Greeting, MAX_FETCH_BYTES, OF_FRONT_END, OF_RECEIVER, Welcome, key, proof, socket_name, status,
};
use crate::sockets::local_socket::{connect_within, send};
use crate::sockets::writer_messages::{is_proof, nonce};

/// Longest wait for the greeting.
const GREETING_PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for content: a line that is lost is noticed sooner.
const CONTENT_PATIENCE: Duration = Duration::from_secs(60);
/// How long a request waits for the receiver to come back, such as after a break of the line.
const RETURN_PATIENCE: Duration = Duration::from_secs(10);
/// After a request timed out, others fail at once for this time.
const FAIL_FAST: Duration = Duration::from_secs(1);
/// Idle connections that are kept.
const MAX_IDLE: usize = 64;

/// The result of a request.
pub(super) enum Fetched {
    Content(Vec<u8>),
    /// No process can fetch it now.
    Away,
}

/// Connections to the process that receives the point. Many threads use it at once, each with a connection of its own.
pub(super) struct FetchClient {
    folder: PathBuf,
    name: String,
    key: [u8; 32],
    idle: Mutex<Vec<UnixStream>>,
    /// When a request last timed out.
    timed_out: Mutex<Option<Instant>>,
}

impl FetchClient {
    pub(super) fn new(repository: &Repository, note: &Path) -> FetchClient {
        FetchClient {
            folder: folder(repository),
            name: socket_name(note),
            key: key(repository, note),
            idle: Mutex::default(),
            timed_out: Mutex::default(),
        }
    }

    /// Fetches a range: whole pieces, at most [`MAX_FETCH_BYTES`].
    ///
    /// # Errors
    /// The source's answer for this range.
    pub(super) fn fetch(&self, disk: usize, offset: u64, length: u64) -> Result<Fetched> {
        debug_assert!(length <= MAX_FETCH_BYTES);
        // A connection that was kept may have ended with its process.
        for _ in 0..=MAX_IDLE {
            let kept = self.idle.lock().pop();
            let is_kept = kept.is_some();
            let stream = match kept {
                Some(stream) => stream,
                None => match self.connect()? {
                    Some(stream) => stream,
                    None => break,
                },
            };
            match exchange(&stream, disk, offset, length) {
                Ok((status::CONTENT, content)) if content.len() as u64 == length => {
                    *self.timed_out.lock() = None;
                    let mut idle = self.idle.lock();
                    if idle.len() < MAX_IDLE {
                        idle.push(stream);
                    }
                    return Ok(Fetched::Content(content));
                }
                Ok((status::DAMAGED, text)) => {
                    let text = String::from_utf8_lossy(&text).into_owned();
                    return Err(Error::new(ErrorKind::Corrupt, format!("the other site: {text}")));
                }
                Ok(_) => break,
                Err(_) if is_kept => {}
                Err(error) => {
                    tracing::debug!("fetching: {}", error.full_message());
                    break;
                }
            }
        }
        Ok(Fetched::Away)
    }

    /// Whether a request that began to wait at `since` waits for the receiver to come back.
    pub(super) fn is_patient(&self, since: Instant) -> bool {
        let mut timed_out = self.timed_out.lock();
        if since.elapsed() >= RETURN_PATIENCE {
            *timed_out = Some(Instant::now());
        }
        timed_out.is_none_or(|at| at.elapsed() >= FAIL_FAST)
    }

    fn connect(&self) -> Result<Option<UnixStream>> {
        match connect(&self.folder, &self.name, &self.key) {
            Err(error) if error.kind() != ErrorKind::WrongPassphrase => {
                // A process is there, and slow.
                tracing::debug!("connecting: {}", error.full_message());
                Ok(None)
            }
            stream => stream,
        }
    }
}

fn connect(folder: &Path, name: &str, key: &[u8; 32]) -> Result<Option<UnixStream>> {
    let what = || "greeting the process that receives the point";
    if !folder.join(name).exists() {
        return Ok(None);
    }
    let Some(stream) = connect_within(folder, name, GREETING_PATIENCE)? else { return Ok(None) };
    stream.set_read_timeout(Some(GREETING_PATIENCE)).context(what)?;
    let own = nonce()?;
    send(&stream, &Greeting { nonce: own })?;
    let mut line = Vec::new();
    BufReader::new((&stream).take(4096)).read_until(b'\n', &mut line).context(what)?;
    if line.is_empty() {
        return Ok(None);
    }
    let welcome: Welcome = serde_json::from_slice(&line)
        .map_err(|error| Error::with_source(ErrorKind::Io, what(), error))?;
    if !is_proof(welcome.proof, proof(key, OF_RECEIVER, &own, &welcome.nonce)) {
        let text = format!(
            "the process that listens at {} does not have the repository key",
            folder.join(name).display()
        );
        return Err(Error::new(ErrorKind::WrongPassphrase, text));
    }
    let own_proof = proof(key, OF_FRONT_END, &own, &welcome.nonce);
    (&stream).write_all(&own_proof).context(what)?;
    stream.set_read_timeout(Some(CONTENT_PATIENCE)).context(what)?;
    Ok(Some(stream))
}

fn exchange(
    mut stream: &UnixStream,
    disk: usize,
    offset: u64,
    length: u64,
) -> Result<(u8, Vec<u8>)> {
    let what = || "fetching";
    let mut request = Vec::with_capacity(14);
    request.extend_from_slice(&(disk as u16).to_le_bytes());
    request.extend_from_slice(&offset.to_le_bytes());
    request.extend_from_slice(&(length as u32).to_le_bytes());
    stream.write_all(&request).context(what)?;
    let mut head = [0; 5];
    stream.read_exact(&mut head).context(what)?;
    let [status, length @ ..] = head;
    let length = u64::from(u32::from_le_bytes(length));
    if length > MAX_FETCH_BYTES {
        return Err(Error::new(ErrorKind::Io, "an answer is too long"));
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes).context(what)?;
    Ok((status, bytes))
}

/// Whether a process answers at the socket of a point.
pub(super) fn is_reachable(repository: &Repository, partial: &PartialCopy) -> bool {
    let note = partial.path(repository);
    let stream = connect(&folder(repository), &socket_name(&note), &key(repository, &note));
    matches!(stream, Ok(Some(_)))
}
