//! A folder, file or link that the host holds, with its path and its handle.

pub(crate) mod attributes;
pub(crate) mod files;
mod flush;
pub(crate) mod listing;

use crate::Shared;
use crate::held_files::HeldFiles;
use attributes::Remembered;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_export::{Node, NodeType};
use flush::FlushQueue;
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Levels below the root: machine, point, file.
const MAX_DEPTH: usize = 3;
/// Levels of a session's or point's folder. A client's file id follows theirs, whatever
/// folder the file is in, so its handle stays the same after a rename.
const CLIENT_FOLDER_DEPTH: usize = 2;
/// Version of the handles' form. Clients keep handles for long, so another form needs
/// another number, and this form must stay readable.
const HANDLE_VERSION: u8 = 1;
/// Version, depth, and the file ids from below the root down.
const HANDLE_ID_BYTES: usize = size_of::<u64>();
/// Maximum length of a handle. ESXi takes 56 bytes, of which nfs-ganesha uses 5.
pub const MAX_HANDLE_BYTES: usize = 32;
const _: () = assert!(2 + MAX_DEPTH * HANDLE_ID_BYTES <= MAX_HANDLE_BYTES);

/// Interval in milliseconds at which the existence of a node is checked again.
const CHECK_INTERVAL_MS: u64 = 250;

/// A folder, file or link. It stays a valid value after that is gone: calls on it then fail
/// with `ErrorKind::NotFound`. Many threads may use it at once.
pub struct OpenNode {
    pub(crate) shared: Arc<Shared>,
    pub(crate) node: Node,
    /// File ids from below the root down to this one.
    ids: Vec<u64>,
    pub(crate) held: RwLock<HeldFiles>,
    pub(crate) used_at_ms: AtomicU64,
    checked_at_ms: AtomicU64,
    is_gone: AtomicBool,
    /// Number of changes through this node.
    pub(crate) changes: AtomicU64,
    pub(crate) remembered: Mutex<Option<Remembered>>,
    /// Whether the host will get an upcall to discard its attributes.
    pub(crate) is_noted: AtomicBool,
    is_released: AtomicBool,
    pub(crate) flush_queue: FlushQueue,
}

/// The result of a look-up of a name in an existing folder.
pub type Named<T> = std::result::Result<T, MissingName>;

/// The folder exists, the name does not.
#[derive(Debug)]
pub struct MissingName(pub Error);

/// Distinguishes a missing name from a missing folder.
pub(crate) fn named<T>(found: Result<T>) -> Result<Named<T>> {
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Err(MissingName(error))),
        found => found.map(Ok),
    }
}

impl OpenNode {
    pub(crate) fn root(shared: &Arc<Shared>) -> Arc<OpenNode> {
        OpenNode::new(shared, shared.folders.root(), Vec::new())
    }

    fn new(shared: &Arc<Shared>, node: Node, ids: Vec<u64>) -> Arc<OpenNode> {
        Arc::new(OpenNode {
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
            flush_queue: FlushQueue::default(),
        })
    }

    /// Its kind.
    pub fn node_type(&self) -> NodeType {
        self.node.node_type()
    }

    /// Its file id; never 0, the root's is 1.
    pub fn id(&self) -> u64 {
        self.node.file_id()
    }

    /// Its address, such as `web01/20261120T100000Z/vda.raw`.
    pub fn path(&self) -> &str {
        self.node.path()
    }

    /// Whether it may change at any moment: true for sessions and their content.
    pub fn is_live(&self) -> bool {
        self.node.is_live()
    }

    /// The node of that name in this folder. `ErrorKind::NotAFolder`.
    pub fn find(&self, name: &str) -> Result<Named<Arc<OpenNode>>> {
        self.check_folder()?;
        self.check()?;
        named(self.shared.folders.find(&self.node, name).map(|node| self.child(node)))
    }

    /// A node that was found, made or listed in this folder.
    pub(crate) fn child(&self, node: Node) -> Arc<OpenNode> {
        let mut ids = self.ids.clone();
        if node.is_of_clients() {
            ids.truncate(CLIENT_FOLDER_DEPTH);
        }
        ids.push(node.file_id());
        OpenNode::new(&self.shared, node, ids)
    }

    /// Its folder; for the root the root itself.
    pub fn parent(&self) -> Result<Arc<OpenNode>> {
        let node = self.shared.folders.parent(&self.node)?;
        let mut ids = self.ids.clone();
        ids.pop();
        if node.is_of_clients() {
            ids.push(node.file_id());
        }
        Ok(OpenNode::new(&self.shared, node, ids))
    }

    /// The target of a link: a name in the link's own folder.
    pub fn target(&self) -> Result<String> {
        self.shared.folders.target(&self.node)
    }

    /// Its handle for clients: at most [`MAX_HANDLE_BYTES`], the same in every process and
    /// after every restart.
    pub fn handle(&self) -> Vec<u8> {
        // At most MAX_DEPTH.
        let mut handle = vec![HANDLE_VERSION, self.ids.len() as u8];
        self.ids.iter().for_each(|id| handle.extend_from_slice(&id.to_le_bytes()));
        handle
    }

    pub(crate) fn of_handle(shared: &Arc<Shared>, handle: &[u8]) -> Result<Arc<OpenNode>> {
        let ids = ids_of_handle(handle)
            .ok_or_else(|| Error::new(ErrorKind::InvalidInput, "not a handle of this version"))?;
        let node = shared.resolve(&ids)?;
        Ok(OpenNode::new(shared, node, ids))
    }

    /// Fails with `NotFound` if the node is gone. Its name may belong to another node by
    /// now. A node that is open for writing cannot go.
    pub(crate) fn check(&self) -> Result<()> {
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
        match self.shared.folders.again(&self.node) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.is_gone.store(true, Ordering::Relaxed);
                self.close_all();
                Err(self.gone())
            }
            found => found.map(drop),
        }
    }

    fn gone(&self) -> Error {
        Error::new(ErrorKind::NotFound, format!("{} is gone", self.node.path()))
    }

    pub(crate) fn check_folder(&self) -> Result<()> {
        if self.node_type() != NodeType::Folder {
            return Err(Error::new(ErrorKind::NotAFolder, format!("{}: no folder", self.path())));
        }
        Ok(())
    }

    /// The host releases it: closes everything.
    pub fn release(&self) {
        self.is_released.store(true, Ordering::SeqCst);
        self.close_all();
    }

    pub(crate) fn is_released(&self) -> bool {
        self.is_released.load(Ordering::SeqCst)
    }
}

fn ids_of_handle(handle: &[u8]) -> Option<Vec<u64>> {
    let [HANDLE_VERSION, depth, ids @ ..] = handle else { return None };
    let depth = usize::from(*depth);
    if depth > MAX_DEPTH || ids.len() != depth * HANDLE_ID_BYTES {
        return None;
    }
    let id =
        |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    Some(ids.chunks_exact(HANDLE_ID_BYTES).map(id).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_handles_of_this_version_are_handles() {
        let handle = |version: u8, depth: u8, length: usize| {
            let mut bytes = vec![version, depth];
            bytes.extend((0..length).map(|byte| byte as u8));
            ids_of_handle(&bytes)
        };
        assert_eq!(handle(1, 0, 0), Some(vec![]));
        assert_eq!(handle(1, 1, 8), Some(vec![0x0706050403020100]));
        assert_eq!(handle(1, 3, 24).unwrap().len(), 3);
        for (version, depth, length) in [(0, 0, 0), (2, 1, 8), (1, 1, 7), (1, 2, 8), (1, 4, 32)] {
            assert_eq!(handle(version, depth, length), None);
        }
        assert_eq!(ids_of_handle(&[]), None);
    }
}
