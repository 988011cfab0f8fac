//! The process that holds the writer: it takes the backups of other processes, does gcs, and
//! removes points.

use std::io::{BufReader, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{BackupTarget, DiskWriter, RepositoryWriter, WriteOptions};
use parking_lot::Mutex;
use serde::Serialize;

use crate::points::change::change_points;
use crate::sockets::local_socket::{Answers, LocalSocket, send};
use crate::sockets::writer_messages::SOCKET;
use crate::sockets::writer_messages::{
    Answer, Ask, MAX_WRITE_BYTES, Nonce, Request, Side, is_proof, nonce, proof, read_line,
};
use crate::writer::gc::answer_gc;

/// Maximum number of simultaneous connections.
const MAX_CONNECTIONS: usize = 256;
/// Longest wait for a guest's proof that it knows the key.
const PROOF_TIMEOUT: Duration = Duration::from_secs(5);
/// A guest that does not read for this long is disconnected.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for guests that got the request to move. After it they must begin again.
const MOVE_PATIENCE: Duration = Duration::from_secs(30);
/// Interval between two checks whether they have moved.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);
/// Interval between two messages with the stored counts.
const COUNTS_INTERVAL: Duration = Duration::from_millis(200);

/// Serves other processes until it is dropped. Dropping it interrupts gcs and sends its guests
/// away, each with the part that it has stored so far. Drop the writer afterwards.
pub(super) struct Host {
    socket: Option<LocalSocket>,
    service: Arc<Service>,
}

impl Host {
    /// Listens in the folder of the writer's repository.
    ///
    /// # Errors
    /// The operating system's error.
    pub(super) fn listen(writer: &Arc<RepositoryWriter>) -> Result<Host> {
        let service = Arc::new(Service {
            writer: Arc::clone(writer),
            is_ending: AtomicBool::new(false),
            gc_cancel: AtomicBool::new(false),
            gc: Mutex::default(),
            change: Mutex::default(),
            connections: Mutex::default(),
        });
        let answers = Door(Arc::clone(&service));
        let socket = LocalSocket::listen(writer.repository().path(), SOCKET, answers)?;
        Ok(Host { socket: Some(socket), service })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // This order matters; see `Service::gc`.
        self.service.is_ending.store(true, Ordering::SeqCst);
        self.service.gc_cancel.store(true, Ordering::SeqCst);
        self.socket = None;
        let connections = std::mem::take(&mut *self.service.connections.lock());
        for connection in &connections {
            if connection.peer.is_guest {
                let _ = connection.peer.send(&Answer::Moving);
            }
        }
        let given_up_at = Instant::now() + MOVE_PATIENCE;
        for connection in connections {
            while !connection.thread.is_finished() && Instant::now() < given_up_at {
                std::thread::sleep(LOOK_INTERVAL);
            }
            let _ = connection.peer.stream.shutdown(Shutdown::Both);
            let _ = connection.thread.join();
        }
    }
}

struct Service {
    writer: Arc<RepositoryWriter>,
    is_ending: AtomicBool,
    gc_cancel: AtomicBool,
    /// Allows only one gc at a time.
    gc: Mutex<()>,
    /// Allows only one change of points at a time.
    change: Mutex<()>,
    connections: Mutex<Vec<Connection>>,
}

struct Connection {
    peer: Arc<Peer>,
    thread: JoinHandle<()>,
}

/// The process at the other end. Several threads may send to it.
struct Peer {
    stream: UnixStream,
    is_guest: bool,
    sending: Mutex<()>,
}

impl Peer {
    fn send(&self, line: &impl Serialize) -> Result<()> {
        let _sending = self.sending.lock();
        send(&self.stream, line)
    }
}

struct Door(Arc<Service>);

impl Answers for Door {
    fn answer(&self, request: &str, stream: UnixStream) -> Result<()> {
        let request = serde_json::from_str::<Request>(request).map_err(|error| {
            Error::with_source(ErrorKind::InvalidInput, "an unknown request", error)
        });
        let request = match request {
            Ok(request) => request,
            Err(error) => return send(&stream, &Answer::failed(&error)),
        };
        let mut connections = self.0.connections.lock();
        connections.retain(|connection| !connection.thread.is_finished());
        if connections.len() >= MAX_CONNECTIONS {
            let message = format!("{MAX_CONNECTIONS} backups are running already: try again later");
            return send(&stream, &Answer::failed(&Error::new(ErrorKind::Busy, message)));
        }
        stream.set_write_timeout(Some(SEND_TIMEOUT)).context(|| "answering a request")?;
        let is_guest = matches!(request, Request::Backup { .. });
        let peer = Arc::new(Peer { stream, is_guest, sending: Mutex::default() });
        let (service, of_thread) = (Arc::clone(&self.0), Arc::clone(&peer));
        let thread = std::thread::Builder::new()
            .name("guest".into())
            .spawn(move || service.serve(request, &of_thread))
            .context(|| "answering a request")?;
        connections.push(Connection { peer, thread });
        Ok(())
    }

    fn decline(&self, stream: &UnixStream) -> Result<()> {
        send(stream, &Answer::Closing)
    }
}

impl Service {
    fn serve(&self, request: Request, peer: &Peer) {
        let served = match request {
            Request::Gc { max_unused } => self.gc(max_unused, &peer.stream),
            Request::Backup { nonce } => {
                let taken = self.take_backup(&nonce, peer);
                if let Err(error) = &taken {
                    let _ = peer.send(&Answer::failed(error));
                }
                taken
            }
        };
        // The stream stays in the list of connections, so the other side sees its end only after
        // this.
        let _ = peer.stream.shutdown(Shutdown::Both);
        if let Err(error) = served {
            tracing::debug!(error = %error.full_message(), "a request of another process ended");
        }
    }

    fn gc(&self, max_unused: coldrise_store::MaxUnused, stream: &UnixStream) -> Result<()> {
        let _one = self.gc.lock();
        self.gc_cancel.store(false, Ordering::SeqCst);
        if self.is_ending.load(Ordering::SeqCst) {
            return send(stream, &Answer::Closing);
        }
        answer_gc(&self.writer, max_unused, &self.gc_cancel, stream)
    }

    /// Stores the data of a guest until it disconnects. Then its unfinished disk is cancelled.
    fn take_backup(&self, of_guest: &Nonce, peer: &Peer) -> Result<()> {
        if self.writer.has_failed() {
            // This host is about to end. The next one opens the repository again.
            return peer.send(&Answer::Closing);
        }
        let mut stream = BufReader::new(&peer.stream);
        let repository = self.writer.repository();
        let of_host = nonce()?;
        let own = proof(repository, Side::Host, of_guest, &of_host);
        peer.send(&Answer::Welcome { nonce: of_host, proof: own })?;
        peer.stream.set_read_timeout(Some(PROOF_TIMEOUT)).context(|| "waiting for a proof")?;
        let expected = proof(repository, Side::Guest, of_guest, &of_host);
        match read_line(&mut stream)? {
            Some(Ask::Proof(proof)) if is_proof(proof, expected) => {}
            Some(_) => {
                let message = "the backup process has the wrong repository key";
                return Err(Error::new(ErrorKind::WrongPassphrase, message));
            }
            None => return Ok(()),
        }
        peer.stream.set_read_timeout(None).context(|| "waiting for a guest")?;
        peer.send(&Answer::Accepted)?;
        let mut disk = None;
        let mut told_at = Instant::now();
        while let Some(ask) = read_line(&mut stream)? {
            match ask {
                Ask::Start { base, size_bytes, threads } => {
                    let options = WriteOptions { threads };
                    disk = Some(self.writer.disk_writer(base, size_bytes, options)?);
                }
                Ask::Write { offset_bytes, length_bytes } => {
                    let disk = started(&mut disk)?;
                    let bytes = read_bytes(&mut stream, disk.buffer(), length_bytes)?;
                    disk.write(offset_bytes, bytes)?;
                }
                Ask::Hole { offset_bytes, length_bytes } => {
                    started(&mut disk)?.write_hole(offset_bytes, length_bytes)?;
                }
                Ask::Finish => {
                    let finished = disk.take().ok_or_else(out_of_turn)?.finish()?;
                    peer.send(&Answer::Finished { root: finished.0, counts: finished.1 })?;
                }
                Ask::PutPoint { document, files_bytes } => {
                    let read = |bytes| read_bytes(&mut stream, Vec::new(), bytes);
                    let files = files_bytes.map(read).transpose()?;
                    BackupTarget::put_point(&*self.writer, &document, files.as_deref())?;
                    peer.send(&Answer::Added)?;
                }
                Ask::Change(change) => {
                    // One of several must not undo what another one has read before.
                    let one = self.change.lock();
                    change_points(&self.writer, &change)?;
                    drop(one);
                    peer.send(&Answer::Changed)?;
                }
                Ask::Proof(_) => return Err(out_of_turn()),
            }
            if let Some(disk) = disk.as_ref().filter(|_| told_at.elapsed() >= COUNTS_INTERVAL) {
                told_at = Instant::now();
                peer.send(&Answer::Counts(disk.counts()))?;
            }
        }
        Ok(())
    }
}

fn started(disk: &mut Option<DiskWriter>) -> Result<&mut DiskWriter> {
    disk.as_mut().ok_or_else(out_of_turn)
}

fn out_of_turn() -> Error {
    Error::new(ErrorKind::InvalidInput, "a message of a guest came out of turn")
}

/// Reads the bytes of one write into `buffer`, which is empty.
fn read_bytes(
    stream: &mut BufReader<&UnixStream>,
    mut buffer: Vec<u8>,
    length_bytes: u64,
) -> Result<Vec<u8>> {
    if length_bytes > MAX_WRITE_BYTES {
        return Err(out_of_turn());
    }
    buffer.reserve_exact(length_bytes as usize);
    let read = stream.take(length_bytes).read_to_end(&mut buffer).context(|| "reading")?;
    if read as u64 == length_bytes {
        Ok(buffer)
    } else {
        Err(Error::new(ErrorKind::Io, "a guest went away in the middle of a write"))
    }
}
