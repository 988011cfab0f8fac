//! An open session, in the one process that writes it.

mod rebase;

use std::collections::HashMap;
use std::sync::Arc;

use coldrise_block::{Context, Disk, Error, ErrorKind, Result, remove_if_present};
use coldrise_store::{DiskName, Repository, SessionName};
use parking_lot::{Mutex, MutexGuard};

use crate::activity::{ActiveDisk, ActivitySocket, Served};
use crate::boot_trace::{TraceReadAhead, TraceRecorder};
use crate::client_files::{ClientFiles, FilesFolder, SkippedFile, carry};
use crate::disks::layered_disk::{LayeredDisk, Stack};
use crate::disks::point_disk::sealed_layers;
use crate::incoming::{check_arrived, finish_arrival, session_base};
use crate::layer::{Layer, LayerKeys, Poison, layer_damage};
use crate::locks::file_lock::FileLock;
use crate::paths::{SessionPaths, layer_path, map_path};
use crate::session_folder::document::{SessionDisk, SessionDocument};
use crate::session_folder::notes::SessionNotes;
use crate::session_folder::rollback_guard::check_not_older;
use crate::session_folder::side_file::{SideFile, SideFileKey, forget_old_maps};
use crate::session_folder::top_layers::with_new_tops;
use crate::sessions::changes::HeldMarks;
use crate::sessions::control::{ControlSocket, ServedSession, lock_for_serving};
use crate::sessions::follow::{FollowProgress, not_served};
use crate::sessions::marks::{MarkKeeper, SessionMark, SessionMarks, check_there, marks_in};
use crate::sessions::seal::{Sealed, check_layers, commit, commit_sealed};
use crate::sessions::seal_report::SealReport;

/// Who writes a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Clients.
    Serve,
    /// The process that follows a machine which runs elsewhere.
    Follow,
    /// A process that makes a mark. It answers nothing: others that open the session wait for its end.
    Mark,
}

/// A session open for writing, by this process alone. Dropping it, and every disk taken from it,
/// flushes, closes the layers cleanly and releases the session's lock.
pub struct Session {
    // Fields are dropped in this order: first the sockets, then the disks, then the lock.
    keeper: MarkKeeper,
    /// How far it follows its machine, if it follows one.
    rounds: Option<Mutex<FollowProgress>>,
    control: Mutex<Option<ControlSocket>>,
    /// `None` if the process could not listen: it serves the session all the same.
    _activity: Option<ActivitySocket>,
    /// `None` if there is no trace.
    _read_ahead: Option<TraceReadAhead>,
    trace: Arc<TraceRecorder>,
    /// The current description of the disks; held during a whole seal.
    document: Mutex<SessionDocument>,
    disks: Vec<Arc<ActiveDisk>>,
    /// The side files of the opened image files, by name.
    side_files: Mutex<HashMap<String, Arc<SideFile>>>,
    /// The files of clients.
    files: Arc<ClientFiles>,
    poison: Poison,
    repository: Arc<Repository>,
    place: SessionPaths,
    writing: Arc<FileLock>,
}

impl Session {
    /// Opens a session for writing. After a crash this recovers the layers, in time proportional to
    /// the captured blocks' records.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if another process writes the session, or if it follows a machine; `Corrupt` if a layer is
    /// missing, foreign or damaged.
    pub fn open(repository: &Arc<Repository>, name: &SessionName) -> Result<Arc<Session>> {
        Session::open_for(repository, name, Use::Serve)
    }

    pub(crate) fn open_for(
        repository: &Arc<Repository>,
        name: &SessionName,
        purpose: Use,
    ) -> Result<Arc<Session>> {
        let place = SessionPaths::of(repository, name);
        let found = SessionDocument::of(repository, name)?;
        if purpose != Use::Follow && found.follows.is_some() {
            return Err(not_served(&found));
        }
        let Some(writing) = lock_for_serving(&place)? else {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "session {name} is being written by another process: use that one, or stop \
                     it first (only one front end writes a session)"
                ),
            ));
        };
        // A killed process left this socket: no process listens until this one does.
        remove_if_present(&place.control())?;
        forget_old_maps(&place)?;
        // The session may have been sealed or ended before this process got the lock.
        let document = SessionDocument::of(repository, name)?;
        check_not_older(repository, &document)?;
        let document = finish_arrival(repository, &place, document)?;
        let poison = Poison::default();
        let writing = Arc::new(writing);
        let disks = document
            .disks
            .iter()
            .map(|disk| {
                let opened = open_disk(repository, &document, disk, &poison, &writing);
                let opened = opened.map(|disk| disk.keeping_marks(purpose == Use::Follow));
                opened.map(Arc::new).context(|| format!("session {name}, disk {}", disk.name))
            })
            .collect::<Result<Vec<_>>>()?;
        let is_fresh = disks.iter().all(|disk| disk.top().is_some_and(|top| top.is_unwritten()));
        let trace = Arc::new(TraceRecorder::new(is_fresh));
        let read_ahead = match purpose {
            Use::Mark => None,
            _ => TraceReadAhead::start(repository, &document, &disks, &trace),
        };
        let count = disks.len();
        let active = |(disk, index)| ActiveDisk::new(disk, count, (Arc::clone(&trace), index));
        let disks: Vec<_> = disks.into_iter().zip(0..).map(active).map(Arc::new).collect();
        let files = ClientFiles::open(
            FilesFolder::of(repository, &document),
            &document,
            poison.clone(),
            Arc::clone(&writing),
        );
        let files = Arc::new(files.context(|| format!("session {name}"))?);
        let newest_ns = newest_mark(disks.iter().map(|disk| disk.layered()));
        let session = Arc::new(Session {
            keeper: MarkKeeper::new(document.mark_rules(), newest_ns, document.received.is_none()),
            rounds: (purpose == Use::Follow).then(|| Mutex::new(FollowProgress::default())),
            control: Mutex::new(None),
            _activity: listen_for_watchers(repository, &place, &document, &disks),
            _read_ahead: read_ahead,
            trace,
            document: Mutex::new(document),
            disks,
            side_files: Mutex::new(HashMap::new()),
            files,
            poison,
            repository: Arc::clone(repository),
            place: place.clone(),
            writing,
        });
        session.continue_marks();
        if purpose == Use::Mark {
            return Ok(session);
        }
        let served: Arc<dyn ServedSession> = Arc::clone(&session) as _;
        let control = ControlSocket::listen(&place, Arc::downgrade(&served))?;
        *session.control.lock() = Some(control);
        session.keeper.start(Arc::downgrade(&session));
        Ok(session)
    }

    /// The current document of the session.
    pub fn document(&self) -> SessionDocument {
        self.document.lock().clone()
    }

    /// One of its disks, for reading and writing.
    ///
    /// # Errors
    /// `NotFound`, naming the existing disks.
    pub fn disk(&self, name: &DiskName) -> Result<Arc<dyn Disk>> {
        let document = self.document.lock();
        document.disk(name)?;
        let index = document.disks.iter().position(|disk| disk.name == *name);
        let disk = index
            .and_then(|i| self.disks.get(i))
            .ok_or_else(|| Error::new(ErrorKind::Internal, format!("disk {name} is not open")))?;
        Ok(Arc::clone(disk) as Arc<dyn Disk>)
    }

    /// The writes of clients into an image file of one of the disks, around the disk. It has
    /// `size_bytes`, which read as `below` until they are written. All callers with the same `name`
    /// share one instance. The side file stays until the session ends.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged, or was made with another size.
    pub fn side_file(
        &self,
        name: &str,
        size_bytes: u64,
        below: Arc<dyn Disk>,
    ) -> Result<Arc<dyn Disk>> {
        let mut files = self.side_files.lock();
        if let Some(file) = files.get(name) {
            return Ok(Arc::clone(file) as Arc<dyn Disk>);
        }
        let key = SideFileKey::new(&self.repository, &self.document.lock(), name, size_bytes);
        let (poison, writing) = (self.poison.clone(), Arc::clone(&self.writing));
        let file = Arc::new(SideFile::open(key, below, poison, writing)?);
        files.insert(name.to_owned(), Arc::clone(&file));
        Ok(file)
    }

    /// The files that clients keep in the session.
    pub fn files(&self) -> &Arc<ClientFiles> {
        &self.files
    }

    /// True once the session refuses writes: unflushed writes may be lost.
    pub fn has_stopped(&self) -> bool {
        self.poison.check().is_err()
    }

    /// Refuses writes, flushes and seals from now on. For a caller that detected a defect and
    /// cannot trust the memory. Flushed data stays readable, and the next opening, by another
    /// process, recovers it.
    pub fn stop(&self) {
        self.poison.set();
    }

    /// Accepts no more requests of the command line, and waits for a request that is being
    /// answered. Call this before the last reference is dropped: a running request also holds the
    /// session, and would close it later than its owner expects.
    pub fn stop_listening(&self) {
        self.keeper.stop();
        let control = self.control.lock().take();
        drop(control);
    }

    /// Seals all disks at once while they stay in use. Requests wait only during the swap of the
    /// layers.
    ///
    /// # Errors
    /// `Poisoned` after a failed sync; `Corrupt` if the file of a sealed layer is missing or
    /// damaged. If this fails, nothing has changed.
    pub fn seal(&self) -> Result<SealReport> {
        self.seal_if(None, &|| Ok(()))
    }

    /// Like [`Session::seal`], or as it was at `mark`, unless `may_commit` fails: see [`commit`].
    pub(crate) fn seal_if(
        &self,
        mark: Option<&SessionMark>,
        may_commit: &dyn Fn() -> Result<()>,
    ) -> Result<SealReport> {
        let mut document = self.document.lock();
        self.poison.check()?;
        // The disks below read the complete point already, or move to it with the next read that needs it.
        *document = finish_arrival(&self.repository, &self.place, document.clone())?;
        check_arrived(&document)?;
        if self.is_following() && mark.is_none() {
            return Err(not_served(&document));
        }
        let before = document.clone();
        check_layers(&self.repository, &before)?;
        if mark.is_some_and(|mark| mark.is_sealed(&before)) {
            let (repository, place) = (&self.repository, &self.place);
            let carried = carry(repository, &self.files)?;
            let committed = commit_sealed(repository, place, &before, &carried, mark, may_commit);
            let (point, after) = committed?.mark(repository, &carried);
            *document = after;
            return Ok(SealReport { point, left_out: carried.left_out });
        }
        with_new_tops(&self.repository, &before, |tops| {
            self.seal_onto(&mut document, tops, mark, may_commit)
        })
    }

    pub(crate) fn is_following(&self) -> bool {
        self.rounds.is_some()
    }

    pub(crate) fn follow_progress(&self) -> Option<FollowProgress> {
        self.rounds.as_ref().map(|progress| progress.lock().clone())
    }

    pub(crate) fn note_progress_of_rounds(&self, progress: FollowProgress) {
        if let Some(rounds) = &self.rounds {
            *rounds.lock() = progress;
        }
    }

    /// Notes where its machine is.
    pub(crate) fn follow_at(&self, source: &str) -> Result<()> {
        let mut document = self.document.lock();
        if document.follows.as_deref() == Some(source) {
            return Ok(());
        }
        let _documents = FileLock::documents(&self.repository)?;
        let mut now = SessionDocument::of(&self.repository, &document.name)?;
        now.follows = Some(source.to_owned());
        now.write(&self.repository, &self.place)?;
        *document = now;
        Ok(())
    }

    /// Makes all writes and marks durable, so that the marks count after a crash.
    pub(crate) fn flush_time_marks(&self) -> Result<()> {
        self.layered().filter_map(|disk| disk.top()).try_for_each(|top| top.flush_time_marks())
    }

    pub(super) fn keeper(&self) -> &MarkKeeper {
        &self.keeper
    }

    /// The disks without their counters.
    pub(super) fn layered(&self) -> impl Iterator<Item = &Arc<LayeredDisk>> {
        self.disks.iter().map(|disk| disk.layered())
    }

    /// The current document; `None` during a seal.
    pub(super) fn try_document(&self) -> Option<MutexGuard<'_, SessionDocument>> {
        self.document.try_lock()
    }

    pub(super) fn repository(&self) -> &Arc<Repository> {
        &self.repository
    }

    pub(super) fn notes(&self) -> SessionNotes {
        SessionNotes::at(&self.repository, &self.place)
    }

    /// Records the layers' last sequence numbers in the document, so that an older version of a
    /// layer is detected.
    fn note_progress(&self) -> Result<()> {
        self.poison.check()?;
        let document = self.document.lock();
        let mut reached = Vec::with_capacity(self.disks.len());
        for (disk, described) in self.disks.iter().zip(&document.disks) {
            let stack = disk.layered().pause();
            let top = stack.layers.last().ok_or_else(no_top)?;
            reached.push((described.top, top.seal_facts()?.sequence));
        }
        drop(document);
        let _documents = FileLock::documents(&self.repository)?;
        let now = SessionDocument::read(&self.repository, &self.place)?;
        let Some(mut now) = now else { return Ok(()) };
        let mut is_changed = false;
        for (disk, (top, sequence)) in now.disks.iter_mut().zip(reached) {
            if disk.top == top && disk.least_sequence < sequence {
                disk.least_sequence = sequence;
                is_changed = true;
            }
        }
        if is_changed {
            now.write(&self.repository, &self.place)?;
        }
        Ok(())
    }

    /// A commit can fail after its rename, during the sync of the folder. Then the old tops belong
    /// to a restore point and must take no more writes, or the document no longer names layers that
    /// are read here.
    fn stop_unless_unchanged(&self, before: &SessionDocument) {
        let disks = |document: &SessionDocument| {
            document.disks.iter().map(|disk| (disk.sealed(), disk.top)).collect::<Vec<_>>()
        };
        match SessionDocument::read(&self.repository, &self.place) {
            Ok(Some(now)) if disks(&now) == disks(before) => {}
            _ => self.poison.set(),
        }
    }

    fn seal_onto(
        &self,
        document: &mut SessionDocument,
        tops: &[SessionDisk],
        mark: Option<&SessionMark>,
        may_commit: &dyn Fn() -> Result<()>,
    ) -> Result<SealReport> {
        let fresh = tops
            .iter()
            .map(|disk| open_top(&self.repository, disk, &self.poison, &self.writing))
            .collect::<Result<Vec<_>>>()?;
        // Flush now, so that most of the flush happens before requests wait for it.
        for disk in &self.disks {
            disk.layered().flush()?;
        }
        let carried = carry(&self.repository, &self.files)?;
        let mut stacks: Vec<_> = self.disks.iter().map(|disk| disk.layered().pause()).collect();
        if let Some(mark) = mark {
            // From here on no mark is removed from these layers.
            check_there(mark, &marks_in(stacks.iter().map(|stack| &**stack), document))?;
        }
        let mut facts = Vec::with_capacity(stacks.len());
        for stack in &stacks {
            let top = stack.layers.last().ok_or_else(no_top)?;
            facts.push(top.seal_facts()?);
        }
        let repository = &self.repository;
        let sealed = Sealed { facts: &facts, carried: &carried, mark };
        let committed = commit(repository, &self.place, &sealed, Some(tops), may_commit);
        let committed = committed.inspect_err(|_| self.stop_unless_unchanged(document))?;
        let emptied: Vec<_> = document.disks.iter().map(|disk| disk.top).collect();
        *document = committed.document.clone();
        self.keep_unmarked(stacks.iter().filter_map(|stack| stack.layers.last()));
        for (i, (stack, top)) in stacks.iter_mut().zip(fresh).enumerate() {
            if let Some(old) = stack.layers.last() {
                old.announce_seal();
            }
            if facts[i].sequence == 0 {
                // Nothing was captured: the empty layer is in no point.
                stack.layers.pop();
                let _ = remove_if_present(&layer_path(&self.repository, &emptied[i]));
            }
            // A layer that another thread still uses stays open until the next seal.
            for layer in stack.layers.iter_mut().filter_map(Arc::get_mut) {
                if let Err(error) = layer.close_until_read() {
                    tracing::warn!(error = %error.full_message(), "a sealed layer stays open");
                }
            }
            stack.layers.push(top);
        }
        drop(stacks);
        let (point, _) = committed.mark(&self.repository, &carried);
        for file in &carried.left_out {
            warn_of_skipped(document, file);
        }
        Ok(SealReport { point, left_out: carried.left_out })
    }
}

fn warn_of_skipped(document: &SessionDocument, file: &SkippedFile) {
    let SkippedFile { path, size_bytes, is_snapshot } = file;
    let name = &document.name;
    if *is_snapshot {
        tracing::error!(
            "session {name}: {path} ({size_bytes} bytes) is not in the sealed point. It looks like a snapshot of the hypervisor: the point lacks what the machine wrote there"
        )
    } else {
        tracing::warn!(
            "session {name}: {path} ({size_bytes} bytes) is not in the sealed point: it is too large"
        )
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.trace.store(&self.repository, &self.document.lock());
        if let Err(error) = self.files.flush() {
            tracing::error!(error = %error.full_message(), "files of a session were not stored when it was closed");
        }
        if let Err(error) = self.note_progress() {
            tracing::warn!(error = %error.full_message(), "the state of a session was not noted: verify would not find that its layer was replaced by an older copy");
        }
    }
}

/// Answers other processes that ask what clients do.
fn listen_for_watchers(
    repository: &Arc<Repository>,
    place: &SessionPaths,
    document: &SessionDocument,
    disks: &[Arc<ActiveDisk>],
) -> Option<ActivitySocket> {
    let names = document.disks.iter().map(|disk| disk.name.clone());
    let counters = disks.iter().map(|disk| Arc::clone(disk.counters()));
    let socket = ActivitySocket::listen(Served {
        repository: Arc::clone(repository),
        place: place.clone(),
        disks: names.zip(counters).collect(),
    });
    if let Err(error) = &socket {
        tracing::warn!(error = %error.full_message(), "the session's activity cannot be seen");
    }
    socket.ok()
}

/// The time of the newest time mark of a disk, in nanoseconds since 1970.
pub(super) fn newest_mark<'d>(disks: impl Iterator<Item = &'d Arc<LayeredDisk>>) -> Option<u64> {
    let newest = |disk: &Arc<LayeredDisk>| {
        let stack = disk.hold();
        stack.layers.iter().flat_map(|layer| layer.time_marks()).map(|mark| mark.time_ns).max()
    };
    disks.filter_map(newest).max()
}

fn no_top() -> Error {
    Error::new(ErrorKind::Internal, "a session's disk without a layer")
}

fn open_top(
    repository: &Arc<Repository>,
    disk: &SessionDisk,
    poison: &Poison,
    writing: &Arc<FileLock>,
) -> Result<Arc<Layer>> {
    let layer = Layer::open_for_writing(
        &layer_path(repository, &disk.top),
        &disk.top_superblock(),
        LayerKeys::of(repository, &disk.top),
        &map_path(&disk.top),
        poison.clone(),
        Some(Arc::clone(writing)),
    )?;
    layer.check_not_older(disk.least_sequence)?;
    if let Some(bytes) = disk.captured_bytes_limit {
        layer.bound(bytes);
    }
    Ok(layer)
}

fn open_disk(
    repository: &Arc<Repository>,
    document: &SessionDocument,
    disk: &SessionDisk,
    poison: &Poison,
    writing: &Arc<FileLock>,
) -> Result<LayeredDisk> {
    let mut layers = sealed_layers(repository, &disk.layers, disk.size_bytes)?;
    layers.push(open_top(repository, disk, poison, writing).map_err(layer_damage)?);
    let base = session_base(repository, document, disk)?;
    Ok(LayeredDisk::new(disk.size_bytes, false, Stack { base, layers }))
}

impl ServedSession for Session {
    fn seal_if(
        &self,
        mark: Option<&SessionMark>,
        may_commit: &dyn Fn() -> Result<()>,
    ) -> Result<SealReport> {
        Session::seal_if(self, mark, may_commit)
    }

    fn marks(&self) -> SessionMarks {
        Session::marks(self)
    }

    fn hold(&self, holder: u64, times_ns: &[u64]) -> HeldMarks {
        Session::hold(self, holder, times_ns)
    }

    fn rebase(&self, folded: &[u8], may_commit: &dyn Fn() -> Result<()>) -> Result<bool> {
        Session::rebase(self, folded, may_commit)
    }
}
