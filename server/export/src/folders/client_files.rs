//! Shows clients' files and folders: those in sessions, and the copies that points carry.

use super::attributes::time;
use super::client_changes::fixed;
use super::node::{CarriedEntry, Kind, LIVE, Node, NodeType};
use super::open_file::{Intent, OpenFile};
use super::{Attributes, FolderEntry, Folders, image_name};
use coldrise_block::{Disk, Error, ErrorKind, Result};
use coldrise_session::{
    ClientFiles, ClientFilesReader, FileEntry, FileId, FileKind, FileTree, SessionDocument,
};
use coldrise_store::PointDocument;
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Number of points with a cached list of files; a list takes a few KiB.
const POINTS: usize = 256;
/// Number of other processes' sessions with cached names.
const SESSIONS: usize = 256;
/// Number of cached lists of other processes' sessions, of at most 1 MiB each.
const READ_FILES: usize = 64;

type CarriedList = Arc<Vec<Arc<CarriedEntry>>>;

/// The caches.
pub(super) struct ClientFolders {
    carried: Cache<String, CarriedList>,
    /// The key includes the time of publication.
    readers: Mutex<HashMap<(String, u64), Arc<ClientFilesReader>>>,
    read_files: Cache<FileId, Arc<dyn Disk>>,
}

impl Default for ClientFolders {
    fn default() -> ClientFolders {
        ClientFolders {
            carried: Cache::new(POINTS),
            readers: Mutex::default(),
            read_files: Cache::new(READ_FILES),
        }
    }
}

/// Look-ups.
impl Folders {
    /// The node in its present state; `ErrorKind::NotFound` if it is gone. A client's file
    /// stays the same node after a rename.
    pub fn again(&self, node: &Node) -> Result<Node> {
        if let Kind::Client(session, entry) = &node.kind {
            return self.client_node(session, entry.id);
        }
        let mut names = node.path().split('/').filter(|name| !name.is_empty());
        let found = names.try_fold(self.root(), |folder, name| self.find(&folder, name))?;
        if !found.is_same(node) {
            return Err(gone(node.path()));
        }
        Ok(found)
    }

    /// The folder that a node is in; the root's is the root.
    pub fn parent(&self, node: &Node) -> Result<Node> {
        if let Kind::Client(session, entry) = &node.kind {
            let tree = self.client_tree(session)?;
            let entry = tree.get(entry.id).ok_or_else(|| gone(node.path()))?;
            return match entry.parent {
                FileId::ROOT => Ok(self.session_node(session)),
                folder => self.client_node(session, folder),
            };
        }
        let (folder, _) = node.path().rsplit_once('/').unwrap_or_default();
        let mut names = folder.split('/').filter(|name| !name.is_empty());
        names.try_fold(self.root(), |folder, name| self.find(&folder, name))
    }

    /// The client file of that session or point with that [`Node::file_id`], in any of its
    /// folders; `None` if it is not a client file.
    pub fn find_of_clients_by_id(&self, folder: &Node, file_id: u64) -> Result<Option<Node>> {
        match &folder.kind {
            Kind::Session(session) => {
                let tree = self.client_tree(session)?;
                let id = tree.of_number(file_id).map(|entry| entry.id);
                id.map(|id| self.client_node(session, id)).transpose()
            }
            Kind::Point(point) => {
                let list = self.carried(point)?;
                let nodes = list.iter().map(|entry| self.carried_node(folder, point, entry));
                Ok(nodes.into_iter().find(|node| node.file_id() == file_id))
            }
            _ => Ok(None),
        }
    }

    /// The client file or folder of that name in a folder.
    pub(super) fn find_of_clients(&self, folder: &Node, name: &str) -> Result<Option<Node>> {
        if let (Kind::Session(session), _) | (Kind::Client(session, _), NodeType::Folder) =
            (&folder.kind, folder.node_type())
        {
            let (_, parent) = client_folder(folder)?;
            let tree = self.client_tree(session)?;
            return Ok(tree.find(parent, name).map(|entry| folder.client(session, entry)));
        }
        let Some((point, prefix)) = carried_folder(folder) else { return Ok(None) };
        let path = format!("{prefix}{name}");
        let list = self.carried(point)?;
        let Some(entry) = list.iter().find(|entry| entry.path == path) else { return Ok(None) };
        if prefix.is_empty() && self.is_image_of(point, name) {
            return Ok(None);
        }
        let root = self.point_node(folder, point);
        Ok(Some(self.carried_node(&root, point, entry)))
    }

    /// Adds the client files of a folder to its entries.
    pub(super) fn add_of_clients(
        &self,
        folder: &Node,
        entries: &mut Vec<FolderEntry>,
    ) -> Result<()> {
        let entry = |name: &str, node: Node| FolderEntry {
            name: name.to_owned(),
            node_type: node.node_type(),
            file_id: node.file_id(),
            node,
        };
        if folder.takes_files() {
            let (session, parent) = client_folder(folder)?;
            let tree = self.client_tree(session)?;
            let added = tree.entries(parent).map(|e| entry(&e.name, folder.client(session, e)));
            entries.extend(added);
            return Ok(());
        }
        let Some((point, prefix)) = carried_folder(folder) else { return Ok(()) };
        let root = self.point_node(folder, point);
        for carried in self.carried(point)?.iter() {
            let Some(name) = carried.path.strip_prefix(&prefix) else { continue };
            if name.contains('/') || (prefix.is_empty() && self.is_image_of(point, name)) {
                continue;
            }
            // It is newer than the configuration that was stored with the backup.
            entries.retain(|there| there.name != name);
            entries.push(entry(name, self.carried_node(&root, point, carried)));
        }
        Ok(())
    }

    fn is_image_of(&self, point: &PointDocument, name: &str) -> bool {
        let disks: Vec<_> = point.disks.iter().map(|disk| &disk.name).collect();
        image_name::find(name, &disks).is_ok()
    }

    /// Opens a client file, or a session's folder, which keeps the session open.
    pub(super) fn open_of_clients(&self, node: &Node, intent: Intent) -> Result<Arc<OpenFile>> {
        let (session, id) = match &node.kind {
            Kind::Carried(point, entry) => {
                let files = self.catalog.files(point)?;
                let file = files.files.into_iter().find(|file| file.path == entry.path);
                let content = file.and_then(|file| file.content);
                let content = content.ok_or_else(|| is_folder(node.path()))?;
                return OpenFile::bytes(node.path(), content);
            }
            Kind::Client(session, entry) if entry.kind != FileKind::Folder => {
                (session, Some(entry.id))
            }
            // A folder opened for writing stands for its session.
            Kind::Client(session, _) | Kind::Session(session) if intent == Intent::Write => {
                (session, None)
            }
            _ => return Err(is_folder(node.path())),
        };
        let root;
        let key = match id {
            Some(_) => &node.key,
            None => {
                root = self.session_node(session);
                &root.key
            }
        };
        self.open_files.open(key, node.path(), intent, || {
            self.check_same(session)?;
            match (intent, id) {
                (Intent::Read, Some(id)) => {
                    let reader = self.reader(session);
                    self.tree.read_client_file(session, node.path(), id, reader)
                }
                _ => {
                    let path = match id {
                        Some(_) => node.path().to_owned(),
                        None => format!("{LIVE}/{}/", session.name),
                    };
                    let opened = self.tree.open_client_file(&session.name, &path, id);
                    opened.map_err(|error| self.tell_who(error, &session.name))
                }
            }
        })
    }

    /// The last change of a session's folder.
    pub(super) fn session_folder_time(&self, session: &SessionDocument) -> Result<SystemTime> {
        let tree = self.client_tree(session)?;
        Ok(time(session.created_at_ms).max(since_1970(tree.changed_ns(FileId::ROOT))))
    }

    pub(super) fn client_attributes(
        &self,
        session: &SessionDocument,
        entry: &FileEntry,
    ) -> Result<Attributes> {
        let tree = self.client_tree(session)?;
        let entry = tree.get(entry.id).ok_or_else(|| gone(&entry.name))?;
        let mut attributes = Attributes {
            node_type: NodeType::Folder,
            size_bytes: 0,
            stored_bytes: 0,
            modified: since_1970(entry.changed_ns),
            changed: since_1970(entry.changed_ns),
            is_writable: !self.is_read_only,
            mode: Some(entry.mode),
            verifier: None,
        };
        if entry.kind == FileKind::Folder {
            return Ok(attributes);
        }
        attributes.node_type = NodeType::File;
        let here = self.client_files_here(session)?;
        let (modified, stored_bytes, size_bytes) = match here {
            Some(files) => {
                let (_, stored_bytes) = files.looks(entry)?;
                let file = files.file(entry.id)?;
                (file.modified(), stored_bytes, file.size_bytes())
            }
            None => {
                let reader = self.reader(session);
                let (modified, stored_bytes) = reader.looks(entry)?;
                let read = || reader.file(entry.id);
                let file = self.clients.read_files.get_or_insert_with(&entry.id, read)?;
                (modified, stored_bytes, file.size_bytes())
            }
        };
        (attributes.modified, attributes.size_bytes) = (modified, size_bytes);
        attributes.changed = attributes.changed.max(modified);
        attributes.stored_bytes = stored_bytes;
        attributes.verifier = entry.verifier.filter(|_| size_bytes == 0);
        Ok(attributes)
    }

    pub(super) fn session_node(&self, session: &Arc<SessionDocument>) -> Node {
        let live = self.child(&self.root(), LIVE, Kind::Live, 0);
        let kind = Kind::Session(Arc::clone(session));
        self.child(&live, session.name.as_str(), kind, session.created_at_ms)
    }

    /// With its present path.
    fn client_node(&self, session: &Arc<SessionDocument>, id: FileId) -> Result<Node> {
        let tree = self.client_tree(session)?;
        let missing = || gone(session.name.as_str());
        let entry = tree.get(id).ok_or_else(missing)?;
        let parent = match entry.parent {
            FileId::ROOT => self.session_node(session),
            folder => self.client_node(session, folder)?,
        };
        Ok(parent.client(session, entry))
    }

    /// The files of a session that this process writes now.
    fn client_files_here(&self, session: &SessionDocument) -> Result<Option<Arc<ClientFiles>>> {
        match self.tree.client_files(&session.name) {
            Some(files) if files.session_created_at_ms() != session.created_at_ms => {
                Err(gone(session.name.as_str()))
            }
            files => Ok(files),
        }
    }

    fn client_tree(&self, session: &SessionDocument) -> Result<Arc<FileTree>> {
        if let Some(files) = self.client_files_here(session)? {
            return Ok(files.tree());
        }
        self.reader(session).tree().map_err(|error| {
            // A later session of the same name has another list.
            self.check_same(session).err().unwrap_or(error)
        })
    }

    fn reader(&self, session: &SessionDocument) -> Arc<ClientFilesReader> {
        let mut readers = self.clients.readers.lock();
        if readers.len() >= SESSIONS {
            readers.clear();
        }
        let key = (session.name.to_string(), session.created_at_ms);
        let new = || Arc::new(ClientFilesReader::new(&self.repository, session));
        Arc::clone(readers.entry(key).or_insert_with(new))
    }

    /// The list of a point's client files, without contents.
    fn carried(&self, point: &PointDocument) -> Result<CarriedList> {
        if point.files.is_none() {
            return Ok(CarriedList::default());
        }
        let key = format!("{}/{}@{}", point.machine, point.point, point.created_at_ms);
        self.clients.carried.get_or_insert_with(&key, || {
            let files = self.catalog.files(point)?.files;
            let entries = files.into_iter().map(|file| {
                Arc::new(CarriedEntry {
                    size_bytes: file.content.as_ref().map(|content| content.len() as u64),
                    path: file.path,
                    mode: file.mode,
                    modified_ms: file.modified_ms,
                })
            });
            Ok(Arc::new(entries.collect()))
        })
    }

    fn point_node(&self, inside: &Node, point: &Arc<PointDocument>) -> Node {
        if let Kind::Point(_) = inside.kind {
            return inside.clone();
        }
        let machine = self.child(
            &self.root(),
            point.machine.as_str(),
            Kind::Machine(point.machine.clone()),
            0,
        );
        let kind = Kind::Point(Arc::clone(point));
        self.child(&machine, &point.point.to_string(), kind, point.created_at_ms)
    }

    fn carried_node(
        &self,
        point_node: &Node,
        point: &Arc<PointDocument>,
        entry: &Arc<CarriedEntry>,
    ) -> Node {
        let kind = |entry| Kind::Carried(Arc::clone(point), entry);
        self.child(point_node, &entry.path, kind(Arc::clone(entry)), point.created_at_ms)
    }
}

pub(super) fn carried_attributes(entry: &CarriedEntry) -> Attributes {
    let size_bytes = entry.size_bytes.unwrap_or(0);
    Attributes {
        node_type: if entry.size_bytes.is_some() { NodeType::File } else { NodeType::Folder },
        size_bytes,
        stored_bytes: size_bytes,
        modified: time(entry.modified_ms),
        changed: time(entry.modified_ms),
        is_writable: false,
        mode: Some(entry.mode),
        verifier: None,
    }
}

/// The session of a folder that accepts client files, and the folder within it.
pub(super) fn client_folder(folder: &Node) -> Result<(&Arc<SessionDocument>, FileId)> {
    match &folder.kind {
        Kind::Session(session) => Ok((session, FileId::ROOT)),
        Kind::Client(session, entry) if entry.kind == FileKind::Folder => Ok((session, entry.id)),
        _ if folder.node_type() != NodeType::Folder => {
            Err(Error::new(ErrorKind::NotAFolder, format!("{}: no folder", folder.path())))
        }
        _ => Err(fixed(folder)),
    }
}

/// The point of a folder with client files, and the prefix of their paths in it.
fn carried_folder(folder: &Node) -> Option<(&Arc<PointDocument>, String)> {
    match &folder.kind {
        Kind::Point(point) => Some((point, String::new())),
        Kind::Carried(point, entry) if entry.size_bytes.is_none() => {
            Some((point, format!("{}/", entry.path)))
        }
        _ => None,
    }
}

fn since_1970(nanoseconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(nanoseconds)
}

fn gone(what: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("{what} is gone"))
}

fn is_folder(path: &str) -> Error {
    Error::new(ErrorKind::IsAFolder, format!("{path} is a folder"))
}
