//! What clients keep in a session, and what of it points carry, as files and folders.

use super::attributes::time;
use super::node::{CarriedEntry, Content, Kind, Node, NodeType, LIVE};
use super::open_file::{Intent, OpenFile};
use super::{image_name, Attributes, FolderEntry, Folders};
use coldrise_block::{Disk, Error, ErrorKind, Result};
use coldrise_session::{
    ClientFiles, ClientFilesReader, Creation, FileEntry, FileId, FileKind, FileTree, Removal,
    SessionDocument,
};
use coldrise_store::PointDocument;
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Points whose files are listed without a look; a list takes a few KiB.
const POINTS: usize = 256;
/// Sessions of other processes whose names are remembered.
const SESSIONS: usize = 256;
/// Files of other processes' sessions that are remembered, of at most 1 MiB each.
const READ_FILES: usize = 64;

type CarriedList = Arc<Vec<Arc<CarriedEntry>>>;

/// What was found out.
pub(super) struct ClientFolders {
    carried: Cache<String, CarriedList>,
    /// By when the session was published.
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

/// What clients change in folders. All of it is durable on return.
impl Folders {
    /// Makes a file in a session's folder, or finds the one that is there.
    ///
    /// `ErrorKind::AlreadyExists`; `ErrorKind::ReadOnly` where nothing can be made, and
    /// for names of the session's own files; `ErrorKind::Busy` where another process
    /// writes the session; otherwise as [`ClientFiles::create`].
    pub fn create(&self, folder: &Node, name: &str, how: Creation, mode: u32) -> Result<Node> {
        let (session, parent, _open, files) = self.change_in(folder)?;
        if let Some(there) = self.presented(folder, name)? {
            return match how {
                Creation::Unchecked => Ok(there),
                _ => {
                    let text = format!("{}/{name} is there already", folder.path());
                    Err(Error::new(ErrorKind::AlreadyExists, text))
                }
            };
        }
        self.check_free(session, parent, name)?;
        let (entry, _) = files.create(parent, name, how, mode)?;
        Ok(folder.client(session, &entry))
    }

    /// Makes a folder in a session's folder. Errors as of [`Folders::create`], guarded.
    pub fn make_folder(&self, folder: &Node, name: &str, mode: u32) -> Result<Node> {
        let (session, parent, _open, files) = self.change_in(folder)?;
        if self.presented(folder, name)?.is_some() {
            let text = format!("{}/{name} is there already", folder.path());
            return Err(Error::new(ErrorKind::AlreadyExists, text));
        }
        self.check_free(session, parent, name)?;
        let entry = files.make_folder(parent, name, mode)?;
        Ok(folder.client(session, &entry))
    }

    /// Removes a file or an empty folder. Errors as of [`Folders::create`] and of
    /// [`ClientFiles::remove`].
    pub fn remove(&self, folder: &Node, name: &str, what: Removal) -> Result<()> {
        let (_, parent, _open, files) = self.change_in(folder)?;
        match self.presented(folder, name)? {
            Some(there) => Err(fixed(&there)),
            None => files.remove(parent, name, what),
        }
    }

    /// Gives a file or folder another name, within one session. Errors as of
    /// [`Folders::create`] and of [`ClientFiles::rename`]; `ErrorKind::Unsupported`
    /// between sessions.
    pub fn rename(&self, from: &Node, name: &str, to: &Node, new_name: &str) -> Result<()> {
        let (session, old_parent, _open, files) = self.change_in(from)?;
        let (other, new_parent) = client_folder(to)?;
        if (&other.name, other.created_at_ms) != (&session.name, session.created_at_ms) {
            let text = format!("{} and {} are different sessions", from.path(), to.path());
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if let Some(there) = self.presented(from, name)? {
            return Err(fixed(&there));
        }
        if let Some(there) = self.presented(to, new_name)? {
            return Err(fixed(&there));
        }
        self.check_free(session, new_parent, new_name)?;
        files.rename((old_parent, name), (new_parent, new_name))
    }

    /// Sets permissions and the time of the last change of what a client made.
    ///
    /// `ErrorKind::ReadOnly` for anything else; otherwise as [`ClientFiles::set`].
    pub fn set(&self, node: &Node, mode: Option<u32>, modified: Option<SystemTime>) -> Result<()> {
        let Kind::Client(session, entry) = &node.kind else { return Err(fixed(node)) };
        let (_open, files) = self.files_for_writing(session)?;
        files.set(entry.id, mode, modified)
    }

    /// Whether the name in that folder is that of a file of the session itself.
    fn presented(&self, folder: &Node, name: &str) -> Result<Option<Node>> {
        let Kind::Session(session) = &folder.kind else { return Ok(None) };
        let file = self.session_files(session).into_iter().find(|file| file.name == name);
        let made_at_ms = session.created_at_ms;
        Ok(file.map(|file| {
            self.child(folder, name, Kind::SessionFile(Arc::clone(session), file), made_at_ms)
        }))
    }

    /// Refuses names that are those of images, shown in a session or only in the points
    /// that are made of it.
    fn check_free(&self, session: &SessionDocument, parent: FileId, name: &str) -> Result<()> {
        let disks: Vec<_> = session.disks.iter().map(|disk| &disk.name).collect();
        if parent == FileId::ROOT && image_name::find(name, &disks).is_ok() {
            let text = format!(
                "{LIVE}/{}/{name}: the name belongs to a disk of the session; use another one",
                session.name
            );
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        Ok(())
    }

    /// The session of a folder that is about to change, which folder it is, and the
    /// session's files, for as long as the open file is held.
    #[allow(clippy::type_complexity)]
    fn change_in<'a>(
        &self,
        folder: &'a Node,
    ) -> Result<(&'a Arc<SessionDocument>, FileId, Arc<OpenFile>, Arc<ClientFiles>)> {
        let (session, parent) = client_folder(folder)?;
        let (open, files) = self.files_for_writing(session)?;
        Ok((session, parent, open, files))
    }

    fn files_for_writing(
        &self,
        session: &Arc<SessionDocument>,
    ) -> Result<(Arc<OpenFile>, Arc<ClientFiles>)> {
        let node = self.session_node(session);
        if self.is_read_only {
            let text = format!("{}: this server changes nothing", node.path());
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        let open = self.open(&node, true)?;
        let closed = || Error::new(ErrorKind::Internal, "a session was opened without its files");
        let files = open.export().client_files()?.ok_or_else(closed)?;
        Ok((open, files))
    }
}

/// What is there.
impl Folders {
    /// The node as it is now: `ErrorKind::NotFound` where it is gone. What clients keep
    /// is the same under whatever name.
    pub fn again(&self, node: &Node) -> Result<Node> {
        if let Kind::Client(session, entry) = &node.kind {
            return self.client_node(session, entry.id);
        }
        let names = node.path().split('/').filter(|name| !name.is_empty());
        let found = names.fold(Ok(self.root()), |folder, name| self.find(&folder?, name))?;
        match found.is_same(node) {
            true => Ok(found),
            false => Err(gone(node.path())),
        }
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
        let names = folder.split('/').filter(|name| !name.is_empty());
        names.fold(Ok(self.root()), |folder, name| self.find(&folder?, name))
    }

    /// What clients keep in that session or point and has that [`Node::file_id`], in
    /// whichever folder; `None` where it is nothing of theirs.
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

    /// What of clients has that name in a folder.
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

    /// Adds to a folder's entries what clients keep there.
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

    /// Opens what is of clients, or a session's folder, which keeps the session open.
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
            // For writing a folder stands for its session.
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

    /// When a session's folder changed.
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
        attributes.stored_bytes = stored_bytes;
        attributes.verifier = entry.verifier.filter(|_| size_bytes == 0);
        Ok(attributes)
    }

    fn session_node(&self, session: &Arc<SessionDocument>) -> Node {
        let live = self.child(&self.root(), LIVE, Kind::Live, 0);
        let kind = Kind::Session(Arc::clone(session));
        self.child(&live, session.name.as_str(), kind, session.created_at_ms)
    }

    /// With the path that it has now.
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
            // Another session of that name has another list.
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

    /// What a point carries, without contents.
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
        is_writable: false,
        mode: Some(entry.mode),
        verifier: None,
    }
}

/// The session of a folder in which clients keep files, and which of its folders it is.
fn client_folder(folder: &Node) -> Result<(&Arc<SessionDocument>, FileId)> {
    match &folder.kind {
        Kind::Session(session) => Ok((session, FileId::ROOT)),
        Kind::Client(session, entry) if entry.kind == FileKind::Folder => Ok((session, entry.id)),
        _ if folder.node_type() != NodeType::Folder => {
            Err(Error::new(ErrorKind::NotAFolder, format!("{}: no folder", folder.path())))
        }
        _ => Err(fixed(folder)),
    }
}

/// The point of a folder that carries files, and what their paths in it begin with.
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

fn fixed(node: &Node) -> Error {
    let what = match &node.kind {
        Kind::SessionFile(_, file) => match file.content {
            Content::Image { .. } => "it is the session's disk: it stays, with its name",
            Content::Configuration => "it is the stored configuration: it stays",
        },
        _ => "clients keep files in the folder of a session, and nowhere else",
    };
    Error::new(ErrorKind::ReadOnly, format!("{}: {what}", node.path()))
}
