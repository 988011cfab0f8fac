//! Changes by clients in the folders of sessions.

use super::client_files::client_folder;
use super::node::{Content, Kind, LIVE, Node};
use super::open_file::OpenFile;
use super::{Folders, image_name};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::{ClientFiles, Creation, FileId, Removal, SessionDocument};
use std::sync::Arc;
use std::time::SystemTime;

/// The files of a session that is held open for writing.
struct HeldFiles {
    // Drop order: the files release the session before it closes.
    files: Arc<ClientFiles>,
    _session: Arc<OpenFile>,
}

/// Changes by clients in folders. Every call is durable on return.
impl Folders {
    /// Makes a file in a session's folder, or opens the existing one.
    ///
    /// `ErrorKind::AlreadyExists`; `ErrorKind::ReadOnly` if the folder accepts no files or
    /// the name belongs to the session itself; `ErrorKind::Busy` if another process writes
    /// the session; otherwise as [`ClientFiles::create`].
    pub fn create(&self, folder: &Node, name: &str, how: Creation, mode: u32) -> Result<Node> {
        let (session, parent, held) = self.change_in(folder)?;
        if let Some(there) = self.presented(folder, name)? {
            return match how {
                Creation::Unchecked => Ok(there),
                _ => {
                    let text = format!("{}/{name} already exists", folder.path());
                    Err(Error::new(ErrorKind::AlreadyExists, text))
                }
            };
        }
        self.check_free(session, parent, name)?;
        let (entry, _) = held.files.create(parent, name, how, mode)?;
        Ok(folder.client(session, &entry))
    }

    /// Makes a folder in a session's folder. Errors as of [`Folders::create`], guarded.
    pub fn make_folder(&self, folder: &Node, name: &str, mode: u32) -> Result<Node> {
        let (session, parent, held) = self.change_in(folder)?;
        if self.presented(folder, name)?.is_some() {
            let text = format!("{}/{name} already exists", folder.path());
            return Err(Error::new(ErrorKind::AlreadyExists, text));
        }
        self.check_free(session, parent, name)?;
        let entry = held.files.make_folder(parent, name, mode)?;
        Ok(folder.client(session, &entry))
    }

    /// Removes a file or an empty folder. Errors as of [`Folders::create`] and of
    /// [`ClientFiles::remove`].
    pub fn remove(&self, folder: &Node, name: &str, what: Removal) -> Result<()> {
        let (_, parent, held) = self.change_in(folder)?;
        match self.presented(folder, name)? {
            Some(there) => Err(fixed(&there)),
            None => held.files.remove(parent, name, what),
        }
    }

    /// Renames a file or folder within one session. Errors as of [`Folders::create`] and of
    /// [`ClientFiles::rename`]; `ErrorKind::Unsupported` between sessions.
    pub fn rename(&self, from: &Node, name: &str, to: &Node, new_name: &str) -> Result<()> {
        let (session, old_parent, held) = self.change_in(from)?;
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
        held.files.rename((old_parent, name), (new_parent, new_name))
    }

    /// Sets permissions and modification time of a client's file or folder.
    ///
    /// `ErrorKind::ReadOnly` for anything else; otherwise as [`ClientFiles::set`].
    pub fn set(&self, node: &Node, mode: Option<u32>, modified: Option<SystemTime>) -> Result<()> {
        let Kind::Client(session, entry) = &node.kind else { return Err(fixed(node)) };
        let held = self.files_for_writing(session)?;
        held.files.set(entry.id, mode, modified)
    }

    /// Whether a file of the session itself has that name in that folder.
    fn presented(&self, folder: &Node, name: &str) -> Result<Option<Node>> {
        let Kind::Session(session) = &folder.kind else { return Ok(None) };
        let file = self.session_files(session).into_iter().find(|file| file.name == name);
        let made_at_ms = session.created_at_ms;
        Ok(file.map(|file| {
            self.child(folder, name, Kind::SessionFile(Arc::clone(session), file), made_at_ms)
        }))
    }

    /// Refuses names of images, both those that the session shows and those that only its
    /// sealed points show.
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

    /// The session of the folder to change, the folder within it, and the session's files.
    fn change_in<'a>(
        &self,
        folder: &'a Node,
    ) -> Result<(&'a Arc<SessionDocument>, FileId, HeldFiles)> {
        let (session, parent) = client_folder(folder)?;
        Ok((session, parent, self.files_for_writing(session)?))
    }

    fn files_for_writing(&self, session: &Arc<SessionDocument>) -> Result<HeldFiles> {
        let node = self.session_node(session);
        if self.is_read_only {
            let text = format!("{}: this server changes nothing", node.path());
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        let open = self.open(&node, true)?;
        let closed = || Error::new(ErrorKind::Internal, "a session was opened without its files");
        let files = open.export().client_files()?.ok_or_else(closed)?;
        Ok(HeldFiles { files, _session: open })
    }
}

/// The reason why a node cannot be changed.
pub(super) fn fixed(node: &Node) -> Error {
    let what = match &node.kind {
        Kind::SessionFile(_, file) => match file.content {
            Content::Image { .. } => "it is the session's disk: it cannot be removed or renamed",
            Content::Configuration => "it is the stored configuration: it cannot be removed",
        },
        _ => "clients can create files only in the folder of a session",
    };
    Error::new(ErrorKind::ReadOnly, format!("{}: {what}", node.path()))
}
