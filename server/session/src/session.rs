//! An open session: the one process that writes it.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use coldrise_block::{Context, Disk, Error, ErrorKind, Result};
use coldrise_store::{DiskName, Repository, SessionName};
use parking_lot::Mutex;

use crate::client_files::{carry, ClientFiles, FilesFolder, LeftOut};
use crate::control::ControlSocket;
use crate::disk::{LayeredDisk, Stack};
use crate::document::{SessionDisk, SessionDocument};
use crate::layer::{Layer, Poison, SUPERBLOCK_AREA_BYTES};
use crate::live::{base_disk, sealed_layers};
use crate::lock::FileLock;
use crate::place::{layer_keys, layer_path, map_path, mark, remove_file, Place};
use crate::progress_mark::SessionProgress;
use crate::publish::create_tops;
use crate::seal::{commit, new_tops, Sealed};
use crate::side_file::{forget_old_maps, SideFile, SideFileKey};
use crate::verify::point_name;

/// A session open for writing, by this process alone. Dropping it, and every
/// disk taken from it, flushes, closes the layers cleanly and lets others in.
pub struct Session {
    // Dropped in this order: no more seals, then the disks, then the lock.
    control: Mutex<Option<ControlSocket>>,
    /// What the disks are now; held for the length of a seal.
    document: Mutex<SessionDocument>,
    disks: Vec<Arc<LayeredDisk>>,
    /// Of the image files that were opened, by name.
    side_files: Mutex<HashMap<String, Arc<SideFile>>>,
    /// Of clients.
    files: Arc<ClientFiles>,
    poison: Poison,
    repository: Arc<Repository>,
    place: Place,
    writing: Arc<FileLock>,
}

impl Session {
    /// Opens a session for writing. After a crash this puts the layers in order,
    /// in time proportional to the captured blocks' records.
    ///
    /// # Errors
    /// `NotFound`; `Busy` when another process writes it; `Corrupt` when a
    /// layer is missing, foreign or damaged.
    pub fn open(repository: &Arc<Repository>, name: &SessionName) -> Result<Arc<Session>> {
        let place = Place::of(repository, name);
        SessionDocument::of(repository, name)?;
        let Some(writing) = FileLock::take(&place)? else {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "session {name} is being written by another process: use that one, or stop \
                     it first (only one front end writes a session)"
                ),
            ));
        };
        // Left by a process that was killed: until we listen, nobody does.
        remove_file(&place.control())?;
        forget_old_maps(&place)?;
        // It may have been sealed or ended until the lock was ours.
        let document = SessionDocument::of(repository, name)?;
        let poison = Poison::default();
        let writing = Arc::new(writing);
        let disks = document
            .disks
            .iter()
            .map(|disk| {
                let opened = open_disk(repository, disk, &poison, &writing);
                opened.context(|| format!("session {name}, disk {}", disk.name)).map(Arc::new)
            })
            .collect::<Result<Vec<_>>>()?;
        let files = ClientFiles::open(
            FilesFolder::of(repository, &document),
            &document,
            poison.clone(),
            Arc::clone(&writing),
        );
        let files = Arc::new(files.context(|| format!("session {name}"))?);
        let session = Arc::new(Session {
            control: Mutex::new(None),
            document: Mutex::new(document),
            disks,
            side_files: Mutex::new(HashMap::new()),
            files,
            poison,
            repository: Arc::clone(repository),
            place: place.clone(),
            writing,
        });
        let control = ControlSocket::listen(&place, Arc::downgrade(&session))?;
        *session.control.lock() = Some(control);
        Ok(session)
    }

    /// What the session consists of now.
    pub fn document(&self) -> SessionDocument {
        self.document.lock().clone()
    }

    /// One of its disks, for reading and writing.
    ///
    /// # Errors
    /// `NotFound`, naming the disks that are there.
    pub fn disk(&self, name: &DiskName) -> Result<Arc<dyn Disk>> {
        let document = self.document.lock();
        document.disk(name)?;
        let index = document.disks.iter().position(|disk| disk.name == *name);
        let disk = index
            .and_then(|i| self.disks.get(i))
            .ok_or_else(|| Error::new(ErrorKind::Internal, format!("disk {name} is not open")))?;
        Ok(Arc::clone(disk) as Arc<dyn Disk>)
    }

    /// What clients write into an image file of one of the disks, around the disk:
    /// `size_bytes` that read as `below` until they are written. Everyone who asks
    /// for `name` gets the same one. It stays until the session ends.
    ///
    /// # Errors
    /// `Corrupt` where it is damaged, or was made with another size.
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

    /// The files that clients keep in it.
    pub fn files(&self) -> &Arc<ClientFiles> {
        &self.files
    }

    /// True once it refuses writes: what was not flushed may be lost.
    pub fn has_stopped(&self) -> bool {
        self.poison.check().is_err()
    }

    /// Refuses writes, flushes and seals from now on: for whoever caught a defect
    /// and cannot trust what is in memory. What was flushed stays readable, and
    /// the next opening, by another process, recovers it.
    pub fn stop(&self) {
        self.poison.set();
    }

    /// Takes no more requests of the command line, and waits for one that is being
    /// answered. Called before the last holder lets go: a request under way holds
    /// the session too, and would close it later than its owner believes.
    pub fn stop_listening(&self) {
        let control = self.control.lock().take();
        drop(control);
    }

    /// Seals all disks at once, while they go on being used: requests wait for
    /// the moment of the swap.
    ///
    /// # Errors
    /// `Poisoned` after a failed sync. Where it fails nothing has changed.
    pub fn seal(&self) -> Result<Sealed> {
        self.seal_if(&|| Ok(()))
    }

    /// The same, unless `may_commit` fails: see [`commit`].
    pub(crate) fn seal_if(&self, may_commit: &dyn Fn() -> Result<()>) -> Result<Sealed> {
        let mut document = self.document.lock();
        self.poison.check()?;
        let tops = new_tops(&document)?;
        create_tops(&self.repository, tops.iter())?;
        // Where it fails the new layers stay: the document may already name them.
        // What nothing names is removed by the next writer.
        self.seal_onto(&mut document, &tops, may_commit)
    }

    /// Remembers how far the layers have come, for whoever opens them next.
    fn note_progress(&self) -> Result<()> {
        self.poison.check()?;
        let document = self.document.lock();
        let mut reached = Vec::with_capacity(self.disks.len());
        for (disk, described) in self.disks.iter().zip(&document.disks) {
            let stack = disk.pause();
            let top = stack.layers.last().ok_or_else(no_top)?;
            reached.push((described.top, top.seal_facts()?.sequence));
        }
        let _documents = FileLock::documents(&self.repository)?;
        SessionProgress::note(&self.repository, &self.place, 0, &reached, &document)
    }

    /// A commit can fail after its rename, when the folder is synced: then the old
    /// tops belong to a restore point and must take no more writes.
    fn stop_unless_unchanged(&self, before: &SessionDocument) {
        let tops = |document: &SessionDocument| {
            document.disks.iter().map(|disk| disk.top).collect::<Vec<_>>()
        };
        match SessionDocument::read(&self.repository, &self.place) {
            Ok(Some(now)) if tops(&now) == tops(before) => {}
            _ => self.poison.set(),
        }
    }

    fn seal_onto(
        &self,
        document: &mut SessionDocument,
        tops: &[SessionDisk],
        may_commit: &dyn Fn() -> Result<()>,
    ) -> Result<Sealed> {
        let fresh = tops
            .iter()
            .map(|disk| open_top(&self.repository, disk, &self.poison, &self.writing))
            .collect::<Result<Vec<_>>>()?;
        // Most of the flushing happens before anybody has to wait for it.
        for disk in &self.disks {
            disk.flush()?;
        }
        let carried = carry(&self.repository, &self.files)?;
        let mut stacks: Vec<_> = self.disks.iter().map(|disk| disk.pause()).collect();
        let mut facts = Vec::with_capacity(stacks.len());
        for stack in &stacks {
            let top = stack.layers.last().ok_or_else(no_top)?;
            facts.push(top.seal_facts()?);
        }
        let repository = &self.repository;
        let committed = commit(repository, &self.place, &facts, &carried, Some(tops), may_commit);
        let (point, next) = committed.inspect_err(|_| self.stop_unless_unchanged(document))?;
        let emptied: Vec<_> = document.disks.iter().map(|disk| disk.top).collect();
        *document = next;
        for (i, (stack, top)) in stacks.iter_mut().zip(fresh).enumerate() {
            if let Some(old) = stack.layers.last() {
                old.announce_seal();
            }
            if facts[i].sequence == 0 {
                // Nothing was captured: the empty layer is in no point.
                stack.layers.pop();
                let _ = remove_file(&layer_path(&self.repository, &emptied[i]));
            }
            stack.layers.push(top);
        }
        drop(stacks);
        mark(&self.repository, &point_name(&point));
        for file in &carried.left_out {
            tell_left_out(document, file);
        }
        Ok(Sealed { point, left_out: carried.left_out })
    }
}

fn tell_left_out(document: &SessionDocument, file: &LeftOut) {
    let LeftOut { path, size_bytes, is_snapshot } = file;
    let name = &document.name;
    match is_snapshot {
        false => tracing::warn!("session {name}: {path} ({size_bytes} bytes) is not in the sealed point: it is too large"),
        true => tracing::error!(
            "session {name}: {path} ({size_bytes} bytes) is not in the sealed point. It looks like a snapshot of the hypervisor: the point lacks what the machine wrote there"
        ),
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Err(error) = self.files.flush() {
            tracing::error!(error = %error.full_message(), "files of a session were not stored when it was closed");
        }
        self.files.stop_ahead();
        if let Err(error) = self.note_progress() {
            tracing::warn!(error = %error.full_message(), "an older layer of the session would not be noticed");
        }
        // A layer's own thread may be syncing it: it must let go before the lock
        // does, or the next opening finds the session busy.
        for disk in &self.disks {
            disk.stop_ahead();
        }
        for file in self.side_files.get_mut().values() {
            file.stop_ahead();
        }
    }
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
        layer_keys(repository, &disk.top),
        &map_path(&disk.top),
        poison.clone(),
        Some(Arc::clone(writing)),
    )?;
    layer.check_not_older(disk.least_sequence)?;
    Ok(layer)
}

fn open_disk(
    repository: &Arc<Repository>,
    disk: &SessionDisk,
    poison: &Poison,
    writing: &Arc<FileLock>,
) -> Result<LayeredDisk> {
    let mut layers = sealed_layers(repository, &disk.layers, disk.size_bytes)?;
    layers.push(open_top(repository, disk, poison, writing)?);
    let base = base_disk(repository, disk.root, disk.size_bytes);
    Ok(LayeredDisk::new(disk.size_bytes, false, Stack { base, layers }))
}

/// A session as a list shows it.
#[derive(Clone, Debug)]
pub struct SessionState {
    /// What it consists of.
    pub document: SessionDocument,
    /// True while a process has it open for writing.
    pub is_served: bool,
    /// Space that its top layers take on the repository's disk.
    pub captured_bytes: u64,
}

/// Every session, by name.
///
/// # Errors
/// `Corrupt` when a document does not authenticate.
pub fn sessions(repository: &Arc<Repository>) -> Result<Vec<SessionState>> {
    let mut states = Vec::new();
    for (place, document) in SessionDocument::readable(repository)? {
        if !document.is_ended {
            states.extend(state(repository, &place, document)?);
        }
    }
    states.sort_by(|a, b| a.document.name.cmp(&b.document.name));
    Ok(states)
}

/// One session.
///
/// # Errors
/// `NotFound`, naming the sessions that are there.
pub fn session(repository: &Arc<Repository>, name: &SessionName) -> Result<SessionState> {
    let document = SessionDocument::of(repository, name)?;
    match state(repository, &Place::of(repository, name), document)? {
        Some(state) => Ok(state),
        // It ended just now: this tells which others there are.
        None => SessionDocument::of(repository, name).and_then(|_| session(repository, name)),
    }
}

/// `None` when the session ended meanwhile.
fn state(
    repository: &Repository,
    place: &Place,
    mut document: SessionDocument,
) -> Result<Option<SessionState>> {
    loop {
        match captured_bytes(repository, &document) {
            Ok(captured_bytes) => {
                let is_served = FileLock::is_held(&place.lock())?;
                return Ok(Some(SessionState { is_served, document, captured_bytes }));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let now = SessionDocument::read(repository, place)?.filter(|now| !now.is_ended);
                match now {
                    None => return Ok(None),
                    // A seal removed an empty layer.
                    Some(now) if now != document => document = now,
                    Some(_) => return Err(error),
                }
            }
            Err(error) => return Err(error),
        }
    }
}

fn captured_bytes(repository: &Repository, document: &SessionDocument) -> Result<u64> {
    let mut bytes = 0;
    for disk in &document.disks {
        let path = layer_path(repository, &disk.top);
        let metadata = std::fs::metadata(&path)
            .context(|| format!("session {}: the layer {}", document.name, path.display()))?;
        // Without a segment it holds no captured block.
        if metadata.len() > SUPERBLOCK_AREA_BYTES {
            bytes += metadata.blocks() * 512;
        }
    }
    Ok(bytes)
}
