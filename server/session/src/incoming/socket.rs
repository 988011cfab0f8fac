//! The socket of the process that receives a point: front ends ask it for what has not arrived.
//!
//! ```text
//! front end                            receiver
//!   {"nonce"}                  ─▶      ◀─ {"nonce", "proof"}
//!   proof (32 bytes)           ─▶
//!   disk (2), offset (8), length (4)  ─▶      ◀─ status (1), length (4), bytes      many times
//! ```
//!
//! Numbers are little endian. Both sides prove that they know the repository's key, as at `writer.control`: plaintext
//! goes only to processes that can read the repository anyway, and comes only from those that can write it.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::Repository;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::partial::{PartialCopy, folder};
use crate::sockets::local_socket::{Answers, LocalSocket, send};
use crate::sockets::writer_messages::{Nonce, is_proof, nonce};

/// Front ends that are connected at once, each with several connections.
const MAX_CONNECTIONS: usize = 1024;
/// How long a front end may take for its proof, or to read an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The kind of an answer.
pub(super) mod status {
    pub(crate) const CONTENT: u8 = 0;
    /// The source cannot read it: what it says.
    pub(crate) const DAMAGED: u8 = 1;
    /// The other site is not connected, or the point is not on its way any more.
    pub(crate) const AWAY: u8 = 2;
}

/// Maximum length of a request, in bytes.
pub(super) const MAX_FETCH_BYTES: u64 = 256 << 10;

/// Fetches what has not arrived.
pub trait PieceSource: Send + Sync + 'static {
    /// The content of a range of a disk: whole pieces, at most 256 KiB.
    ///
    /// # Errors
    /// `Io` if the other side is not connected any more; any other error is the source's about this range.
    fn fetch(&self, disk: usize, offset_bytes: u64, length_bytes: u64) -> Result<Vec<u8>>;
}

/// The listening side. Dropping it ends the listening and all connections.
pub struct FetchSocket {
    _socket: LocalSocket,
    streams: Arc<Streams>,
}

#[derive(Default)]
struct Streams {
    open: Mutex<HashMap<u64, UnixStream>>,
    next: AtomicU64,
}

impl FetchSocket {
    /// Answers front ends. The caller has claimed the machine.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn listen(
        repository: &Repository,
        partial: &PartialCopy,
        source: Arc<dyn PieceSource>,
    ) -> Result<FetchSocket> {
        let streams = Arc::new(Streams::default());
        let note = partial.path(repository);
        let answers =
            FetchAnswers { key: key(repository, &note), source, streams: Arc::clone(&streams) };
        let socket = LocalSocket::listen(&folder(repository), &socket_name(&note), answers)?;
        Ok(FetchSocket { _socket: socket, streams })
    }
}

impl Drop for FetchSocket {
    fn drop(&mut self) {
        for stream in self.streams.open.lock().values() {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The name of the socket beside a note.
pub(super) fn socket_name(note: &Path) -> String {
    format!("{}.socket", note.file_name().unwrap_or_default().to_string_lossy())
}

#[derive(Serialize, Deserialize)]
pub(super) struct Greeting {
    pub(super) nonce: Nonce,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Welcome {
    pub(super) nonce: Nonce,
    pub(super) proof: [u8; 32],
}

/// The key with which both sides prove themselves.
pub(super) fn key(repository: &Repository, note: &Path) -> [u8; 32] {
    *repository.derive_key("fetch socket", socket_name(note).as_bytes())
}

/// The proof of one side.
pub(super) fn proof(key: &[u8; 32], side: u8, front_end: &Nonce, receiver: &Nonce) -> [u8; 32] {
    *blake3::keyed_hash(key, &[&[side], &front_end[..], &receiver[..]].concat()).as_bytes()
}

pub(super) const OF_RECEIVER: u8 = 1;
pub(super) const OF_FRONT_END: u8 = 2;

struct FetchAnswers {
    key: [u8; 32],
    source: Arc<dyn PieceSource>,
    streams: Arc<Streams>,
}

impl Answers for FetchAnswers {
    fn answer(&self, request: &str, stream: UnixStream) -> Result<()> {
        let what = || "answering a front end";
        let greeting: Greeting = serde_json::from_str(request)
            .map_err(|error| Error::with_source(ErrorKind::InvalidInput, what(), error))?;
        stream.set_read_timeout(Some(PATIENCE)).context(what)?;
        stream.set_write_timeout(Some(PATIENCE)).context(what)?;
        let id = self.streams.next.fetch_add(1, Ordering::Relaxed);
        let mut open = self.streams.open.lock();
        if open.len() >= MAX_CONNECTIONS {
            return Err(Error::new(ErrorKind::Busy, "too many connections of front ends"));
        }
        open.insert(id, stream.try_clone().context(what)?);
        drop(open);
        let (key, source) = (self.key, Arc::clone(&self.source));
        let streams = Arc::clone(&self.streams);
        let serve = move || {
            if let Err(error) = serve(&key, &greeting, &*source, &stream) {
                tracing::debug!("a front end: {}", error.full_message());
            }
            streams.open.lock().remove(&id);
        };
        let spawned = std::thread::Builder::new().name("fetch".into()).spawn(serve);
        spawned.map(drop).context(what)
    }

    fn decline(&self, _stream: &UnixStream) -> Result<()> {
        // The end of the connection says it.
        Ok(())
    }
}

/// Answers one front end until it leaves.
fn serve(
    key: &[u8; 32],
    greeting: &Greeting,
    source: &dyn PieceSource,
    mut stream: &UnixStream,
) -> Result<()> {
    let what = || "answering a front end";
    let own = nonce()?;
    let own_proof = proof(key, OF_RECEIVER, &greeting.nonce, &own);
    send(stream, &Welcome { nonce: own, proof: own_proof })?;
    let mut given = [0; 32];
    stream.read_exact(&mut given).context(what)?;
    if !is_proof(given, proof(key, OF_FRONT_END, &greeting.nonce, &own)) {
        return Err(Error::new(ErrorKind::WrongPassphrase, "it does not have the repository key"));
    }
    stream.set_read_timeout(None).context(what)?;
    let mut request = [0; 14];
    loop {
        match stream.read_exact(&mut request) {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read.context(what)?,
        }
        let number =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let (disk, offset) = (number(&request[..2]), number(&request[2..10]));
        let length = number(&request[10..]);
        if length == 0 || length > MAX_FETCH_BYTES {
            return Err(Error::new(ErrorKind::InvalidInput, "a request of an impossible length"));
        }
        let (status, bytes) = match source.fetch(disk as usize, offset, length) {
            Ok(content) => (status::CONTENT, content),
            Err(error) => {
                let is_away = error.kind() == ErrorKind::Io;
                let status = if is_away { status::AWAY } else { status::DAMAGED };
                (status, error.full_message().into_bytes())
            }
        };
        let mut answer = Vec::with_capacity(5 + bytes.len());
        answer.push(status);
        answer.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        answer.extend_from_slice(&bytes);
        stream.write_all(&answer).context(what)?;
    }
}
