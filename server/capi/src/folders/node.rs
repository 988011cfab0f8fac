//! A node that C holds.

use super::held_files::HeldFiles;
use super::later::Flushes;
use super::share_reservations::{Checked, Share, ShareDenied};
use super::Shared;
use crate::message::c_string;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_export::{Attributes, FolderEntry, Folders, Node, NodeType, OpenFile};
use parking_lot::{Mutex, RwLock};
use std::ffi::CString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Levels below the root: machine, point, file.
const MAX_DEPTH: usize = 3;
/// Those of a session or point. What clients keep there has its file id behind theirs,
/// in whichever folder it is: a handle is the same after a rename.
const CLIENT_FOLDER_DEPTH: usize = 2;
/// Version of the handles' form. They are in the hands of clients for long, so
/// another form needs another number, and this one goes on being understood.
const HANDLE_VERSION: u8 = 1;
/// Version, depth, and the file ids from below the root down.
const HANDLE_ID_BYTES: usize = size_of::<u64>();
/// `COLDRISE_HANDLE_MAX` of the header. ESXi takes 56 bytes, of which Ganesha uses 5.
pub(super) const HANDLE_MAX: usize = 32;
const _: () = assert!(2 + MAX_DEPTH * HANDLE_ID_BYTES <= HANDLE_MAX);

/// That a node is still there is looked up at most once in so many milliseconds.
const CHECK_INTERVAL_MS: u64 = 250;

/// What a session's file is like is found out at most once in so many milliseconds:
/// nfs-ganesha asks for it after every write. The size and the time that writes through
/// this node make show at once.
pub(super) const LIVE_ATTRIBUTES_MS: u64 = 10;

/// For how long attributes hold, in seconds: points never change, but may be deleted;
/// machines get points. Sessions change at any moment, through any front end; for their
/// images see [`forget`](super::forget).
const VALID_POINT_S: u32 = 60;
const VALID_MACHINE_S: u32 = 1;

/// `coldrise_node` of the header.
pub struct OpenNode {
    shared: Arc<Shared>,
    node: Node,
    /// File ids from below the root down to this one.
    ids: Vec<u64>,
    path: CString,
    held: RwLock<HeldFiles>,
    used_at_ms: AtomicU64,
    checked_at_ms: AtomicU64,
    is_gone: AtomicBool,
    /// Counts what was changed through this node.
    changes: AtomicU64,
    remembered: Mutex<Option<Remembered>>,
    /// The host will be told to forget its attributes.
    is_noted: AtomicBool,
    is_released: AtomicBool,
    flushes: Flushes,
}

/// Attributes of a session's file, from that moment, with so many changes.
#[derive(Clone, Copy)]
struct Remembered {
    at_ms: u64,
    changes: u64,
    shown: Shown,
}

/// What C gets to know of a node.
#[derive(Clone, Copy)]
pub(super) struct Shown {
    pub(super) attributes: Attributes,
    pub(super) modified: Duration,
    pub(super) changed: Duration,
    pub(super) mode: u32,
    pub(super) valid_s: u32,
}

impl Shown {
    /// Another number after every change. Of a file whose time a client has set neither time
    /// alone tells: the one may be far ahead of the other.
    pub(super) fn change(&self) -> u64 {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        nanoseconds(self.modified).wrapping_add(nanoseconds(self.changed))
    }
}

/// Why a file was not opened.
pub(super) enum OpenError {
    Denied(ShareDenied),
    Failed(Error),
}

pub(super) type Opened = std::result::Result<(), OpenError>;

impl From<ShareDenied> for OpenError {
    fn from(denied: ShareDenied) -> OpenError {
        OpenError::Denied(denied)
    }
}

impl From<Error> for OpenError {
    fn from(error: Error) -> OpenError {
        OpenError::Failed(error)
    }
}

impl OpenNode {
    pub(super) fn root(shared: &Arc<Shared>) -> Arc<OpenNode> {
        OpenNode::new(shared, shared.folders.root(), Vec::new())
    }

    fn new(shared: &Arc<Shared>, node: Node, ids: Vec<u64>) -> Arc<OpenNode> {
        Arc::new(OpenNode {
            path: c_string(node.path()),
            checked_at_ms: AtomicU64::new(shared.now_ms()),
            shared: Arc::clone(shared),
            node,
            ids,
            held: RwLock::default(),
            used_at_ms: AtomicU64::new(0),
            is_gone: AtomicBool::new(false),
            changes: AtomicU64::new(0),
            remembered: Mutex::new(None),
            is_noted: AtomicBool::new(false),
            is_released: AtomicBool::new(false),
            flushes: Flushes::default(),
        })
    }

    pub(super) fn node_type(&self) -> NodeType {
        self.node.node_type()
    }

    pub(super) fn id(&self) -> u64 {
        self.node.file_id()
    }

    pub(super) fn path(&self) -> &CString {
        &self.path
    }

    /// What has that name in this folder.
    pub(super) fn find(&self, name: &str) -> Result<Arc<OpenNode>> {
        Ok(self.child(self.shared.folders.find(&self.node, name)?))
    }

    /// What was found, made or listed in this folder.
    pub(super) fn child(&self, node: Node) -> Arc<OpenNode> {
        let mut ids = self.ids.clone();
        if node.is_of_clients() {
            ids.truncate(CLIENT_FOLDER_DEPTH);
        }
        ids.push(node.file_id());
        OpenNode::new(&self.shared, node, ids)
    }

    pub(super) fn parent(&self) -> Result<Arc<OpenNode>> {
        let node = self.shared.folders.parent(&self.node)?;
        let mut ids = self.ids.clone();
        ids.pop();
        if node.is_of_clients() {
            ids.push(node.file_id());
        }
        Ok(OpenNode::new(&self.shared, node, ids))
    }

    pub(super) fn folders(&self) -> &Folders {
        &self.shared.folders
    }

    pub(super) fn node(&self) -> &Node {
        &self.node
    }

    /// What is behind a cookie, in the cookies' order.
    pub(super) fn entries(&self, after: u64) -> Result<Vec<(u64, FolderEntry)>> {
        let entries = self.shared.folders.entries(&self.node)?;
        let mut found: Vec<_> = entries
            .into_iter()
            .map(|entry| (cookie(entry.file_id), entry))
            .filter(|(cookie, _)| *cookie > after)
            .collect();
        found.sort_unstable_by_key(|(cookie, _)| *cookie);
        Ok(found)
    }

    pub(super) fn target(&self) -> Result<String> {
        self.shared.folders.target(&self.node)
    }

    /// The bytes that name it to clients.
    pub(super) fn handle(&self) -> Vec<u8> {
        // No deeper than MAX_DEPTH.
        let mut handle = vec![HANDLE_VERSION, self.ids.len() as u8];
        self.ids.iter().for_each(|id| handle.extend_from_slice(&id.to_le_bytes()));
        handle
    }

    /// The node of a handle: `InvalidInput` where it is none, `NotFound` where it is gone.
    pub(super) fn of_handle(shared: &Arc<Shared>, handle: &[u8]) -> Result<Arc<OpenNode>> {
        let no_handle = || Error::new(ErrorKind::InvalidInput, "no handle of this version");
        let [HANDLE_VERSION, depth, ids @ ..] = handle else { return Err(no_handle()) };
        let depth = usize::from(*depth);
        if depth > MAX_DEPTH || ids.len() != depth * HANDLE_ID_BYTES {
            return Err(no_handle());
        }
        let ids: Vec<u64> = ids
            .chunks_exact(HANDLE_ID_BYTES)
            .map(|id| id.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
            .collect();
        let node = shared.resolve(&ids)?;
        Ok(OpenNode::new(shared, node, ids))
    }

    /// Fails with `NotFound` when what it stands for is gone. A name can be given
    /// again: then it is another node. What is open for writing cannot go.
    pub(super) fn check(&self) -> Result<()> {
        self.shared.check()?;
        if self.is_gone.load(Ordering::Relaxed) {
            return Err(self.gone());
        }
        let now_ms = self.shared.now_ms();
        let checked_ms = self.checked_at_ms.load(Ordering::Relaxed);
        if now_ms.saturating_sub(checked_ms) < CHECK_INTERVAL_MS
            || self.held.read().is_held_for_writing()
        {
            return Ok(());
        }
        self.check_now()?;
        self.checked_at_ms.store(now_ms, Ordering::Relaxed);
        Ok(())
    }

    fn check_now(&self) -> Result<()> {
        let is_there = match self.shared.folders.again(&self.node) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        if is_there {
            return Ok(());
        }
        self.is_gone.store(true, Ordering::Relaxed);
        self.close_all();
        Err(self.gone())
    }

    fn gone(&self) -> Error {
        Error::new(ErrorKind::NotFound, format!("{} is gone", self.node.path()))
    }

    pub(super) fn attributes(self: &Arc<Self>) -> Result<Shown> {
        let is_image = self.node_type() == NodeType::File && !self.node.is_of_clients();
        if !self.node.is_live() || !is_image {
            return self.look_at();
        }
        let valid_s = self.shared.remembering.note(self);
        Ok(Shown { valid_s, ..self.live_attributes()? })
    }

    fn live_attributes(&self) -> Result<Shown> {
        // Before it is looked at: a change that comes meanwhile makes this one too old.
        let (at_ms, changes) = (self.shared.now_ms(), self.changes.load(Ordering::Acquire));
        let known = *self.remembered.lock();
        if let Some(known) =
            known.filter(|known| at_ms.saturating_sub(known.at_ms) < LIVE_ATTRIBUTES_MS)
        {
            if known.changes == changes {
                return Ok(known.shown);
            }
            if let Some(shown) = self.written_since(known.shown) {
                return Ok(shown);
            }
        }
        let shown = self.look_at()?;
        *self.remembered.lock() = Some(Remembered { at_ms, changes, shown });
        Ok(shown)
    }

    /// What was seen a moment ago, after writes through this node: another time. `None`
    /// where more has changed.
    fn written_since(&self, mut shown: Shown) -> Option<Shown> {
        let file = self.held.read().get(true)?;
        if file.size_bytes() != shown.attributes.size_bytes {
            return None;
        }
        let modified = file.written_at()?.max(shown.attributes.modified);
        shown.attributes.modified = modified;
        shown.modified = since_1970(modified);
        shown.changed = shown.changed.max(shown.modified);
        Some(shown)
    }

    /// To be called after each change.
    pub(super) fn has_changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    fn look_at(&self) -> Result<Shown> {
        let attributes = self.shared.folders.attributes(&self.node)?;
        let (mut modified, mut changed) =
            (since_1970(attributes.modified), since_1970(attributes.changed));
        let node_type = self.node.node_type();
        if node_type == NodeType::Folder && !self.node.is_immutable() && !self.node.takes_files() {
            modified = self.folder_time(attributes.modified)?;
            changed = modified;
        }
        let valid_s = match (self.node.is_live(), self.node.is_immutable()) {
            (true, _) => 0,
            (_, true) => VALID_POINT_S,
            _ => VALID_MACHINE_S,
        };
        // Who may connect at all is a matter of the allow list: the users of a client
        // are its own matter.
        let least = match (node_type, attributes.is_writable) {
            (NodeType::Folder, _) if self.node.takes_files() => 0o777,
            (NodeType::Folder, _) if self.node.is_live() => 0o755,
            (NodeType::Folder, _) => 0o555,
            (NodeType::Link, _) => 0o777,
            (NodeType::File, true) => 0o666,
            (NodeType::File, false) => 0o444,
        };
        let given = match self.node.is_immutable() {
            true => attributes.mode.unwrap_or(0) & !0o222,
            false => attributes.mode.unwrap_or(0),
        };
        let mode = least | given & 0o777;
        Ok(Shown { attributes, modified, changed, mode, valid_s })
    }

    /// A folder's time, whose fraction of a second tells its entries apart: by the time
    /// alone clients see whether they have to read it again, and a point that is sealed
    /// from an older one does not make its machine any newer.
    fn folder_time(&self, modified: SystemTime) -> Result<Duration> {
        let mut hasher = DefaultHasher::new();
        for entry in self.shared.folders.entries(&self.node)? {
            entry.file_id.hash(&mut hasher);
        }
        let seconds = since_1970(modified).as_secs();
        // Below a billion, so it fits.
        Ok(Duration::new(seconds, (hasher.finish() % 1_000_000_000) as u32))
    }

    /// A file to read or write through, opened if need be.
    pub(super) fn file(self: &Arc<Self>, for_writing: bool) -> Result<Arc<OpenFile>> {
        self.check()?;
        self.used_at_ms.store(self.shared.now_ms(), Ordering::Relaxed);
        if let Some(file) = self.held.read().get(for_writing) {
            return Ok(file);
        }
        let opened = self.open_file(&mut self.held.write(), for_writing)?;
        self.is_now_in_use();
        Ok(opened)
    }

    /// The same, if it is open already and was looked at a moment ago.
    pub(super) fn opened(&self, for_writing: bool) -> Result<Option<Arc<OpenFile>>> {
        self.check()?;
        self.used_at_ms.store(self.shared.now_ms(), Ordering::Relaxed);
        Ok(self.held.try_read().and_then(|held| held.get(for_writing)))
    }

    /// Opens it for a client, until [`OpenNode::close`].
    pub(super) fn open(self: &Arc<Self>, share: Share) -> Opened {
        self.reopen(Share::default(), share)
    }

    /// Makes another one of a client's open; `held` is empty where there is none yet.
    pub(super) fn reopen(self: &Arc<Self>, held: Share, wanted: Share) -> Opened {
        self.check()?;
        let content = self.node.content_key();
        self.shared.shares.change(&content, held, wanted)?;
        if let Err(error) = self.pin(wanted.is_for_writing()) {
            self.shared.shares.put_back(&content, wanted, held);
            return Err(OpenError::Failed(error));
        }
        if held != Share::default() {
            self.unpin(held.is_for_writing());
        }
        Ok(())
    }

    /// Takes a client's open back. Where that was the last one, everything is closed at once:
    /// the client says that it has finished.
    pub(super) fn close(&self, held: Share) {
        self.shared.shares.put_back(&self.node.content_key(), held, Share::default());
        self.unpin(held.is_for_writing());
    }

    /// Whether a read or write that belongs to no open may be done.
    pub(super) fn check_share(&self, wanted: Share) -> Checked {
        self.shared.shares.check(|| self.node.content_key(), wanted)
    }

    /// Keeps open what clients have opened through another node of the same file, which is
    /// about to be released; their closes come through this one.
    pub(super) fn take_over(self: &Arc<Self>, other: &OpenNode) -> Result<()> {
        let (readers, writers) = {
            let held = other.held.read();
            (held.readers, held.writers)
        };
        (0..writers).try_for_each(|_| self.pin(true))?;
        (0..readers).try_for_each(|_| self.pin(false))
    }

    fn pin(self: &Arc<Self>, for_writing: bool) -> Result<()> {
        {
            let mut held = self.held.write();
            self.open_file(&mut held, for_writing)?;
            if for_writing {
                held.writers += 1;
            } else {
                held.readers += 1;
            }
        }
        self.used_at_ms.store(self.shared.now_ms(), Ordering::Relaxed);
        self.is_now_in_use();
        Ok(())
    }

    fn unpin(&self, for_writing: bool) {
        let mut held = self.held.write();
        if for_writing {
            held.writers = held.writers.saturating_sub(1);
        } else {
            held.readers = held.readers.saturating_sub(1);
        }
        self.close_unopened(&mut held);
    }

    fn open_file(&self, held: &mut HeldFiles, for_writing: bool) -> Result<Arc<OpenFile>> {
        if let Some(file) = held.get(for_writing) {
            return Ok(file);
        }
        let file = self.shared.folders.open(&self.node, for_writing)?;
        // It was opened by its path: was it this one? From here on it cannot end.
        self.shared.folders.again(&self.node)?;
        held.put(&file, for_writing);
        Ok(file)
    }

    fn is_now_in_use(self: &Arc<Self>) {
        let key = Arc::as_ptr(self) as usize;
        self.shared.in_use.lock().entry(key).or_insert_with(|| Arc::clone(self));
    }

    /// Whether what was written and not flushed may be lost, after a failure.
    pub(super) fn has_stopped(&self) -> bool {
        self.held.read().get(true).is_some_and(|file| file.has_stopped())
    }

    /// Flushes what was written to the session; nothing was where nothing is open,
    /// because closing flushes.
    pub(super) fn flush(&self) -> Result<()> {
        let file = self.held.read().get(true);
        file.map_or(Ok(()), |file| file.flush())
    }

    pub(super) fn close_if_idle(&self, limit_ms: u64) {
        let idle_ms = self.shared.now_ms().saturating_sub(self.used_at_ms.load(Ordering::Relaxed));
        if idle_ms >= limit_ms {
            self.close_unopened(&mut self.held.write());
        }
    }

    fn close_unopened(&self, held: &mut HeldFiles) {
        if let Err(error) = held.close_unopened() {
            eprintln!("coldrise: {}: {}", self.node.path(), error.full_message());
        }
        if held.is_empty() {
            self.shared.in_use.lock().remove(&(std::ptr::from_ref(self) as usize));
        }
    }

    /// Closes everything, opened or not.
    pub(super) fn close_all(&self) {
        self.held.write().clear();
        self.shared.in_use.lock().remove(&(std::ptr::from_ref(self) as usize));
    }

    /// The host gives it up.
    pub(super) fn release(&self) {
        self.is_released.store(true, Ordering::SeqCst);
        self.close_all();
    }

    pub(super) fn is_released(&self) -> bool {
        self.is_released.load(Ordering::SeqCst)
    }

    pub(super) fn flushes(&self) -> &Flushes {
        &self.flushes
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(super) fn is_noted(&self) -> &AtomicBool {
        &self.is_noted
    }

    /// Stops what is open of it for good, after a defect.
    pub(super) fn poison(&self) {
        self.held.read().poison();
    }

    pub(super) fn is_live(&self) -> bool {
        self.node.is_live()
    }
}

fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Below 2^63, because some clients count with a sign; from 3 on, because NFS has uses
/// for those before.
fn cookie(file_id: u64) -> u64 {
    (file_id & (u64::MAX >> 1)).max(3)
}
