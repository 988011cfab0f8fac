//! The guest: a backup whose disks are stored by the process that holds the writer.
//!
//! The backup's own thread sends. A second thread reads the host's messages, so that they are
//! received at once, even while the source keeps the first thread waiting. When the host is about
//! to end, the second thread finishes the open disk, protects the stored data from gcs, and
//! disconnects. The next write detects that and continues elsewhere.
//!
//! Lock order: `sending` (for one message), `state`.

use std::io::{
    BufReader, ErrorKind::Interrupted, ErrorKind::TimedOut, ErrorKind::WouldBlock, Write,
};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{MapRoot, PointDocument, Repository, WriteCounts};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::map_lease::MapLease;
use crate::sockets::local_socket::{connect_within, send};
use crate::sockets::point_change::PointChange;
use crate::sockets::writer_messages::SOCKET;
use crate::sockets::writer_messages::{
    Answer, Ask, MAX_WRITE_BYTES, Request, Side, is_proof, nonce, proof, read_line, remote_error,
};

/// Interval between two checks whether the backup was cancelled.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// If a host does not answer for this long, the guest tries again.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(5);

/// The reason why a host takes no more data.
pub(super) enum Broken {
    /// The host ends. The open disk ends with this map, which holds all sent data.
    Moved(Option<(MapRoot, WriteCounts)>),
    /// The host was killed: unfinished data is lost.
    Lost,
    /// Any other failure.
    Failed(Error),
}

/// A connection to the host.
pub(super) struct Link {
    inner: Arc<Inner>,
    listener: Option<JoinHandle<()>>,
}

struct Inner {
    stream: UnixStream,
    sending: Mutex<()>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    counts: WriteCounts,
    is_disk_open: bool,
    /// True while the guest waits for an answer.
    is_asked: bool,
    answer: Option<Answer>,
    is_moving: bool,
    broken: Option<Broken>,
}

impl Link {
    /// Connects to the host; `None` if no process listens, or if the host is about to end.
    ///
    /// # Errors
    /// `Io`; the host's error; `WrongPassphrase` if the host does not know the repository's key.
    pub(super) fn connect(
        folder: &Path,
        repository: &Repository,
        kept: &Arc<MapLease>,
    ) -> Result<Option<Link>> {
        let Some(stream) = connect_within(folder, SOCKET, WELCOME_TIMEOUT)? else {
            return Ok(None);
        };
        let what = || "asking the process that writes the repository";
        // The host takes data at its own speed, so writes have no timeout.
        stream.set_write_timeout(None).context(what)?;
        stream.set_read_timeout(Some(WELCOME_TIMEOUT)).context(what)?;
        let own = nonce()?;
        // A host that is about to end may have closed the connection without reading.
        if send(&stream, &Request::Backup { nonce: own }).is_err() {
            return Ok(None);
        }
        let mut answers = BufReader::new(&stream);
        let (of_host, given) = match read_line(&mut answers) {
            Ok(Some(Answer::Welcome { nonce, proof })) => (nonce, proof),
            Ok(Some(Answer::Failed { kind, message })) => return Err(remote_error(&kind, message)),
            // The host is about to end, has ended, or does not answer.
            _ => return Ok(None),
        };
        if !is_proof(given, proof(repository, Side::Host, &own, &of_host)) {
            return Err(Error::new(
                ErrorKind::WrongPassphrase,
                format!(
                    "the process that listens at {} does not have the repository key",
                    folder.join(SOCKET).display()
                ),
            ));
        }
        let proof = Ask::Proof(proof(repository, Side::Guest, &own, &of_host));
        match send(&stream, &proof).and_then(|()| read_line(&mut answers)) {
            Ok(Some(Answer::Accepted)) => {}
            Ok(Some(Answer::Failed { kind, message })) => return Err(remote_error(&kind, message)),
            _ => return Ok(None),
        }
        stream.set_read_timeout(None).context(what)?;
        stream.set_write_timeout(Some(LOOK_INTERVAL)).context(what)?;
        // Before the first disk, the only unsolicited message is that the host ends.
        let early = answers.buffer().to_vec();
        let inner = Arc::new(Inner {
            stream,
            sending: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        if !early.is_empty() {
            return Ok(None);
        }
        let (of_thread, kept) = (Arc::clone(&inner), Arc::clone(kept));
        let listener = std::thread::Builder::new()
            .name("host-answers".into())
            .spawn(move || of_thread.listen(&kept))
            .context(what)?;
        Ok(Some(Link { inner, listener: Some(listener) }))
    }

    pub(super) fn counts(&self) -> WriteCounts {
        self.inner.state.lock().counts
    }

    pub(super) fn start(
        &self,
        base: Option<MapRoot>,
        size_bytes: u64,
        threads: usize,
        cancel: &AtomicBool,
    ) -> std::result::Result<(), Broken> {
        self.inner.send(&Ask::Start { base, size_bytes, threads }, &[], cancel, |state| {
            state.counts = WriteCounts::default();
            state.is_disk_open = true;
        })
    }

    pub(super) fn write(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        cancel: &AtomicBool,
    ) -> std::result::Result<(), Broken> {
        debug_assert!(bytes.len() as u64 <= MAX_WRITE_BYTES);
        let ask = Ask::Write { offset_bytes, length_bytes: bytes.len() as u64 };
        self.inner.send(&ask, bytes, cancel, |_| {})
    }

    pub(super) fn write_hole(
        &self,
        offset_bytes: u64,
        length_bytes: u64,
        cancel: &AtomicBool,
    ) -> std::result::Result<(), Broken> {
        self.inner.send(&Ask::Hole { offset_bytes, length_bytes }, &[], cancel, |_| {})
    }

    pub(super) fn finish(
        &self,
        cancel: &AtomicBool,
    ) -> std::result::Result<(MapRoot, WriteCounts), Broken> {
        match self.inner.ask(&Ask::Finish, cancel)? {
            Answer::Finished { root, counts } => Ok((root, counts)),
            _ => Err(Broken::Failed(out_of_turn())),
        }
    }

    pub(super) fn put_point(
        &self,
        document: &PointDocument,
        files: Option<&[u8]>,
        cancel: &AtomicBool,
    ) -> std::result::Result<(), Broken> {
        let files_bytes = files.map(|files| files.len() as u64);
        let ask = Ask::PutPoint { document: Box::new(document.clone()), files_bytes };
        match self.inner.ask_with(&ask, files.unwrap_or_default(), cancel)? {
            Answer::Added => Ok(()),
            _ => Err(Broken::Failed(out_of_turn())),
        }
    }

    pub(super) fn change(
        &self,
        change: &PointChange,
        cancel: &AtomicBool,
    ) -> std::result::Result<(), Broken> {
        match self.inner.ask(&Ask::Change(change.clone()), cancel)? {
            Answer::Changed => Ok(()),
            _ => Err(Broken::Failed(out_of_turn())),
        }
    }
}

impl Drop for Link {
    /// Cancels the unfinished disk.
    fn drop(&mut self) {
        let _ = self.inner.stream.shutdown(Shutdown::Both);
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

impl Inner {
    /// Sends one message and changes the state with it.
    fn send(
        &self,
        ask: &Ask,
        bytes: &[u8],
        cancel: &AtomicBool,
        change: impl FnOnce(&mut State),
    ) -> std::result::Result<(), Broken> {
        let sending = self.sending.lock();
        let mut state = self.state.lock();
        let is_open = !state.is_moving && state.broken.is_none();
        if is_open {
            change(&mut state);
        }
        drop(state);
        if is_open {
            match self.transmit(ask, bytes, cancel) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {
                    return Err(Broken::Failed(error));
                }
                // The other thread receives the reason.
                Err(_) => {}
            }
        }
        drop(sending);
        Err(self.why(cancel))
    }

    /// Sends a message and waits for its answer.
    fn ask(&self, ask: &Ask, cancel: &AtomicBool) -> std::result::Result<Answer, Broken> {
        self.ask_with(ask, &[], cancel)
    }

    fn ask_with(
        &self,
        ask: &Ask,
        bytes: &[u8],
        cancel: &AtomicBool,
    ) -> std::result::Result<Answer, Broken> {
        self.send(ask, bytes, cancel, |state| {
            state.is_disk_open = false;
            state.is_asked = true;
        })?;
        let mut state = self.state.lock();
        loop {
            if let Some(answer) = state.answer.take() {
                return Ok(answer);
            }
            if state.broken.is_some() {
                drop(state);
                return Err(self.why(cancel));
            }
            self.wait(&mut state, cancel)?;
        }
    }

    fn wait(
        &self,
        state: &mut MutexGuard<'_, State>,
        cancel: &AtomicBool,
    ) -> std::result::Result<(), Broken> {
        self.changed.wait_for(state, LOOK_INTERVAL);
        if cancel.load(Ordering::Relaxed) {
            Err(Broken::Failed(Error::new(ErrorKind::Interrupted, "cancelled")))
        } else {
            Ok(())
        }
    }

    /// Waits until the reason for a failed send is known.
    fn why(&self, cancel: &AtomicBool) -> Broken {
        let mut state = self.state.lock();
        loop {
            match state.broken.take() {
                Some(Broken::Moved(finished)) => {
                    state.broken = Some(Broken::Moved(None));
                    return Broken::Moved(finished);
                }
                Some(broken) => {
                    state.broken = Some(Broken::Lost);
                    return broken;
                }
                None => {}
            }
            if let Err(cancelled) = self.wait(&mut state, cancel) {
                return cancelled;
            }
        }
    }

    fn transmit(&self, ask: &Ask, bytes: &[u8], cancel: &AtomicBool) -> Result<()> {
        let mut line = serde_json::to_vec(ask)
            .map_err(|error| Error::with_source(ErrorKind::Internal, "asking", error))?;
        line.push(b'\n');
        for mut left in [&line[..], bytes] {
            while !left.is_empty() {
                match (&self.stream).write(left) {
                    Ok(sent) => left = &left[sent..],
                    Err(error) if matches!(error.kind(), WouldBlock | TimedOut | Interrupted) => {}
                    Err(error) => return Err(Error::io("sending", error)),
                }
                if cancel.load(Ordering::Relaxed) {
                    return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
                }
            }
        }
        Ok(())
    }

    /// Receives the host's messages until it disconnects.
    fn listen(&self, kept: &MapLease) {
        let mut answers = BufReader::new(&self.stream);
        // True after this thread has finished the open disk.
        let mut is_ended = false;
        let broken = loop {
            let answer = match read_line(&mut answers) {
                Ok(Some(answer)) => answer,
                Ok(None) | Err(_) => break Broken::Lost,
            };
            match answer {
                Answer::Counts(counts) => self.state.lock().counts = counts,
                Answer::Failed { kind, message } => {
                    break Broken::Failed(remote_error(&kind, message));
                }
                Answer::Moving => {
                    // Wait for the end of a message that is being sent.
                    let _sending = self.sending.lock();
                    let mut state = self.state.lock();
                    state.is_moving = true;
                    let is_asked = state.is_asked;
                    is_ended = std::mem::take(&mut state.is_disk_open);
                    drop(state);
                    let never = AtomicBool::new(false);
                    if is_ended && self.transmit(&Ask::Finish, &[], &never).is_err() {
                        break Broken::Lost;
                    }
                    if !is_ended && !is_asked {
                        break leave(kept, None);
                    }
                }
                Answer::Finished { root, counts } if is_ended => {
                    break leave(kept, Some((root, counts)));
                }
                answer => {
                    let mut state = self.state.lock();
                    if let Answer::Finished { root, counts } = &answer {
                        state.counts = *counts;
                        kept.add(*root);
                    }
                    state.is_asked = false;
                    state.answer = Some(answer);
                    let is_moving = state.is_moving;
                    self.changed.notify_all();
                    drop(state);
                    if is_moving {
                        break leave(kept, None);
                    }
                }
            }
        };
        self.state.lock().broken = Some(broken);
        self.changed.notify_all();
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Protects the stored data from gcs while no process holds the writer.
fn leave(kept: &MapLease, finished: Option<(MapRoot, WriteCounts)>) -> Broken {
    if let Some((root, _)) = finished {
        kept.add(root);
    }
    match kept.lease() {
        Ok(()) => Broken::Moved(finished),
        Err(error) => Broken::Failed(error),
    }
}

fn out_of_turn() -> Error {
    Error::new(ErrorKind::Io, "the process that writes the repository gave an unknown answer")
}
