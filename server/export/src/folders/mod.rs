//! The tree as front ends with folders show it: a FUSE mount, an NFS server.
//!
//! ```text
//!   /web01/20261120T100000Z/vda.raw, vda.vhdx, …, domain.xml     never changes
//!   /web01/latest ─▶ 20261120T100000Z                            a link
//!   /live/trial/vda.raw, vda.vhdx, …                             a session
//!   /live/trial/trial.vmx, .lck-…, vmware.log, …                 what clients keep there
//!   /live/trial@-90s ─▶ ../web01/20261120T100000Z+1              a link, found by name only
//! ```
//!
//! A front end starts at [`Folders::root`], steps down with [`Folders::find`] and
//! [`Folders::entries`], and opens files with [`Folders::open`]. It keeps [`Node`]s, never
//! paths. Every call looks up the present state, so backups, publications and seals show at
//! once.
//!
//! A point never changes, so the content of its folder is found once and cached.
//!
//! Locks: the table of open files, then the slot of one file (held during opening, so that
//! other callers for the same file wait and share it), then those of the tree.

mod attributes;
mod client_changes;
mod client_files;
mod folder_cache;
mod node;
mod open_file;
mod seek;
mod sizes;
mod stored_map;

pub use attributes::{Attributes, Space};
pub use node::{Node, NodeKey, NodeType};
pub use open_file::OpenFile;

use crate::image;
use crate::image_name::{self, ImageOwner};
use crate::{ExportTree, TreeOptions};
use client_files::ClientFolders;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_formats::{Access, DiskShape};
use coldrise_session::{
    Catalog, PointOfMark, SessionDocument, check_mark, check_offered, read_leases,
};
use coldrise_store::{
    Address, COLDRISE_JSON, Configuration, DiskName, LIBVIRT_XML, MachineName, OVF, PointDocument,
    PointName, PointSelector, Repository, SessionName, SessionTime, VMX,
};
use folder_cache::FolderCache;
use node::{Content, FolderFile, Kind, LATEST, LIVE};
use open_file::{Intent, OpenFiles};
use sizes::Measured;
use std::sync::Arc;
use std::time::SystemTime;

/// One name in a folder.
#[derive(Clone, Debug)]
pub struct FolderEntry {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub node_type: NodeType,
    /// [`Node::file_id`] of it.
    pub file_id: u64,
    /// The node, as [`Folders::find`] returns it.
    pub node: Node,
}

/// A repository as folders and files. All calls may come from many threads.
pub struct Folders {
    repository: Arc<Repository>,
    catalog: Catalog,
    tree: ExportTree,
    open_files: OpenFiles,
    measured: Measured,
    known: FolderCache,
    clients: ClientFolders,
    is_read_only: bool,
    started: SystemTime,
}

impl Folders {
    /// Starts to serve a repository, with this process's lease. With `is_read_only`,
    /// sessions are read-only too.
    pub fn new(
        repository: &Arc<Repository>,
        options: &TreeOptions,
        is_read_only: bool,
    ) -> Result<Folders> {
        Ok(Folders {
            repository: Arc::clone(repository),
            catalog: Catalog::new(repository),
            tree: ExportTree::new(repository, options)?,
            open_files: OpenFiles::default(),
            measured: Measured::default(),
            known: FolderCache::default(),
            clients: ClientFolders::default(),
            is_read_only,
            started: SystemTime::now(),
        })
    }

    /// The root of the tree.
    pub fn root(&self) -> Node {
        Node::root()
    }

    /// The node of that name in a folder; `ErrorKind::NotFound` if there is none.
    pub fn find(&self, folder: &Node, name: &str) -> Result<Node> {
        let missing = || Error::new(ErrorKind::NotFound, format!("{}/{name}", folder.path()));
        if let Some(node) = self.find_of_clients(folder, name)? {
            return Ok(node);
        }
        match &folder.kind {
            Kind::Client(..) | Kind::Carried(..) if folder.node_type() == NodeType::Folder => {
                Err(missing())
            }
            Kind::Root if name == LIVE => Ok(self.child(folder, name, Kind::Live, 0)),
            Kind::Root => {
                let machine = MachineName::parse(name).map_err(|_| missing())?;
                if !self.has_machine(&machine)? {
                    return Err(missing());
                }
                Ok(self.child(folder, name, Kind::Machine(machine), 0))
            }
            Kind::Machine(machine) if name == LATEST => {
                Ok(self.child(folder, name, Kind::Latest(machine.clone()), 0))
            }
            Kind::Machine(machine) => {
                let point = PointName::parse(name).map_err(|_| missing())?;
                let point = Arc::new(self.point(machine, &point)?);
                let made_at_ms = point.created_at_ms;
                Ok(self.child(folder, name, Kind::Point(point), made_at_ms))
            }
            Kind::Live if name.contains('@') => {
                let address = Address::parse(&format!("{LIVE}/{name}")).map_err(|_| missing())?;
                let Address::Marked { session, time, .. } = address else { return Err(missing()) };
                if matches!(time, SessionTime::Ago(_)) {
                    // It would be another folder, and another point, with each look at it.
                    return Err(missing());
                }
                check_mark(&self.repository, &session, &time)?;
                Ok(self.child(folder, name, Kind::Marked(session, time), 0))
            }
            Kind::Live => {
                let session = SessionName::parse(name).map_err(|_| missing())?;
                let session = coldrise_session::session(&self.repository, &session)?.document;
                let made_at_ms = session.created_at_ms;
                Ok(self.child(folder, name, Kind::Session(Arc::new(session)), made_at_ms))
            }
            Kind::Point(point) => {
                let files = self.point_files(folder, point);
                let file = files.iter().find(|file| file.name == name).cloned();
                let kind = Kind::PointFile(Arc::clone(point), file.ok_or_else(missing)?);
                Ok(self.child(folder, name, kind, point.created_at_ms))
            }
            Kind::Session(session) => {
                let file = self.session_files(session).into_iter().find(|file| file.name == name);
                let kind = Kind::SessionFile(Arc::clone(session), file.ok_or_else(missing)?);
                Ok(self.child(folder, name, kind, session.created_at_ms))
            }
            _ => Err(no_folder(folder)),
        }
    }

    /// The entries of a folder, sorted by name.
    pub fn entries(&self, folder: &Node) -> Result<Vec<FolderEntry>> {
        let entry = |name: &str, kind: Kind, made_at_ms: u64| {
            let node = self.child(folder, name, kind, made_at_ms);
            let (node_type, file_id) = (node.node_type(), node.file_id());
            FolderEntry { name: name.to_owned(), node_type, file_id, node }
        };
        let mut entries: Vec<FolderEntry> = match &folder.kind {
            Kind::Root => {
                let mut entries = vec![entry(LIVE, Kind::Live, 0)];
                for machine in self.catalog.machines()? {
                    entries.push(entry(machine.as_str(), Kind::Machine(machine.clone()), 0));
                }
                entries
            }
            Kind::Machine(machine) => {
                let points = self.catalog.offered(machine)?;
                let latest = points.last().map(|_| Kind::Latest(machine.clone()));
                let latest = latest.map(|kind| entry(LATEST, kind, 0));
                let points = points.into_iter().map(|point| {
                    let (name, made_at_ms) = (point.point.to_string(), point.created_at_ms);
                    entry(&name, Kind::Point(Arc::new(point)), made_at_ms)
                });
                latest.into_iter().chain(points).collect()
            }
            Kind::Live => coldrise_session::sessions(&self.repository)?
                .into_iter()
                .map(|state| {
                    let (name, made_at_ms) =
                        (state.document.name.to_string(), state.document.created_at_ms);
                    entry(&name, Kind::Session(Arc::new(state.document)), made_at_ms)
                })
                .collect(),
            Kind::Point(point) => self
                .point_files(folder, point)
                .iter()
                .map(|file| {
                    let kind = Kind::PointFile(Arc::clone(point), file.clone());
                    entry(&file.name, kind, point.created_at_ms)
                })
                .collect(),
            Kind::Session(session) => self
                .session_files(session)
                .into_iter()
                .map(|file| {
                    let name = file.name.clone();
                    let kind = Kind::SessionFile(Arc::clone(session), file);
                    entry(&name, kind, session.created_at_ms)
                })
                .collect(),
            _ if folder.is_of_clients() && folder.node_type() == NodeType::Folder => Vec::new(),
            _ => return Err(no_folder(folder)),
        };
        self.add_of_clients(folder, &mut entries)?;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// The target of a link, from the link's own folder. The time mark of a session becomes a
    /// restore point.
    pub fn target(&self, link: &Node) -> Result<String> {
        match &link.kind {
            Kind::Latest(machine) => Ok(self.newest(machine)?.point.to_string()),
            Kind::Marked(session, time) => {
                let (session, time) = (session.clone(), time.clone());
                let address = Address::Marked { session, time, disk: None };
                Ok(format!("../{}", PointOfMark::of(&self.repository, &address)?.kept()))
            }
            _ => Err(Error::new(ErrorKind::InvalidInput, format!("{}: no link", link.path()))),
        }
    }

    /// Opens a file, or shares it with its present users.
    ///
    /// `ErrorKind::ReadOnly` for writing a point's file or a compact image;
    /// `ErrorKind::Busy`, naming the other process, if it writes the session; otherwise as
    /// [`ExportTree::open`].
    pub fn open(&self, file: &Node, for_writing: bool) -> Result<Arc<OpenFile>> {
        if for_writing && !self.is_writable(file) {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                format!("{}: this file is read-only", file.path()),
            ));
        }
        let intent = if for_writing { Intent::Write } else { Intent::Read };
        match &file.kind {
            Kind::PointFile(point, FolderFile { content: Content::Configuration, .. }) => {
                OpenFile::text(file.path(), configuration(&point.configuration)?)
            }
            Kind::SessionFile(session, FolderFile { content: Content::Configuration, .. }) => {
                OpenFile::text(file.path(), configuration(&session.configuration)?)
            }
            Kind::PointFile(point, _) => {
                self.open_files.open(&file.key, file.path(), intent, || {
                    let opened = self.tree.open(file.path(), true)?;
                    self.check_same_point(point)?;
                    Ok(opened)
                })
            }
            Kind::SessionFile(session, _) => {
                self.open_files.open(&file.key, file.path(), intent, || {
                    self.check_same(session)?;
                    let opened = self.tree.open(file.path(), !for_writing);
                    opened.map_err(|error| self.tell_who(error, &session.name))
                })
            }
            Kind::Client(..) | Kind::Carried(..) | Kind::Session(_) => {
                self.open_of_clients(file, intent)
            }
            _ => Err(Error::new(ErrorKind::InvalidInput, format!("{}: no file", file.path()))),
        }
    }

    /// Files that are open now, by path.
    pub fn open_paths(&self) -> Vec<String> {
        self.open_files.paths()
    }

    /// Makes all writes through open files durable.
    pub fn flush_all(&self) -> Result<()> {
        self.open_files.flush_all()
    }

    fn child(&self, folder: &Node, name: &str, kind: Kind, made_at_ms: u64) -> Node {
        folder.child(&self.repository, name, kind, made_at_ms)
    }

    fn is_writable(&self, file: &Node) -> bool {
        if file.takes_files() || matches!(file.kind, Kind::Client(..)) {
            return !self.is_read_only;
        }
        let Kind::SessionFile(_, file) = &file.kind else { return false };
        let Content::Image { part, .. } = file.content else { return false };
        !self.is_read_only && part.format.access() == Access::Writable
    }

    /// The name may belong to another point by now: a backup may get that of a removed one. Call
    /// this after the opening.
    fn check_same_point(&self, point: &PointDocument) -> Result<()> {
        let now = self.point(&point.machine, &point.point)?;
        if now.created_at_ms == point.created_at_ms {
            return Ok(());
        }
        let text = format!(
            "the point {}/{} was removed, and there is a new one",
            point.machine, point.point
        );
        Err(Error::new(ErrorKind::NotFound, text))
    }

    /// The name may belong to another session by now.
    fn check_same(&self, session: &SessionDocument) -> Result<()> {
        let now = coldrise_session::session(&self.repository, &session.name)?.document;
        if now.created_at_ms == session.created_at_ms {
            return Ok(());
        }
        let text = format!("that session {} has ended, and there is a new one", session.name);
        Err(Error::new(ErrorKind::NotFound, text))
    }

    /// Known entries exist without catching up; others need a look-up.
    fn has_machine(&self, machine: &MachineName) -> Result<bool> {
        let is_known = self.repository.has_machine(machine)?;
        Ok(is_known || self.catalog.machines()?.contains(machine))
    }

    /// A point in the catalog costs one look-up; a sealed point may still be only in its
    /// session's document.
    fn point(&self, machine: &MachineName, point: &PointName) -> Result<PointDocument> {
        match self.repository.point(machine, point) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                check_offered(self.catalog.point(machine, &PointSelector::Exact(point.clone()))?)
            }
            found => found.and_then(check_offered),
        }
    }

    fn newest(&self, machine: &MachineName) -> Result<PointDocument> {
        self.catalog.point(machine, &PointSelector::Latest(0))
    }

    fn point_files(&self, folder: &Node, point: &PointDocument) -> Arc<[FolderFile]> {
        self.known.point_files(&folder.key, || {
            let disks: Vec<_> = point
                .disks
                .iter()
                .map(|disk| (&disk.name, image::point_shape(&self.repository, point, disk)))
                .collect();
            folder_files(ImageOwner::Point, &point.machine, &disks, point.configuration.as_ref())
        })
    }

    fn session_files(&self, session: &SessionDocument) -> Vec<FolderFile> {
        let disks: Vec<_> = session
            .disks
            .iter()
            .map(|disk| (&disk.name, image::session_shape(&self.repository, session, disk)))
            .collect();
        // In a session the .vmx is a client file: clients change it.
        let configuration = session.configuration.as_ref().filter(|c| c.format != VMX);
        folder_files(ImageOwner::Session, &session.machine, &disks, configuration)
    }

    /// Adds the process that has the session open to a refusal.
    fn tell_who(&self, error: Error, session: &SessionName) -> Error {
        if error.kind() != ErrorKind::Busy {
            return error;
        }
        let folder = format!("{LIVE}/{session}/");
        let leases = read_leases(&self.repository).unwrap_or_default();
        let holders: Vec<_> = leases
            .iter()
            .filter(|lease| lease.process_id != std::process::id())
            .filter(|lease| lease.served.iter().any(|served| served.name.starts_with(&folder)))
            .map(|lease| format!("{} (process {})", lease.program, lease.process_id))
            .collect();
        if holders.is_empty() {
            return error;
        }
        error.context(format!("it is open in {}", holders.join(", ")))
    }
}

/// The files of a point or session: its disks' images, and its configuration unless a disk
/// has that name.
fn folder_files(
    shown: ImageOwner,
    machine: &MachineName,
    disks: &[(&DiskName, DiskShape)],
    configuration: Option<&Configuration>,
) -> Vec<FolderFile> {
    let names: Vec<_> = disks.iter().map(|(name, _)| *name).collect();
    let mut files = Vec::new();
    for (disk, shape) in disks {
        for name in image_name::images(shown, disk, shape, &names) {
            let Ok(named) = image_name::find(&name, &names) else { continue };
            let Some(part) = named.image else { continue };
            let content = Content::Image { disk: (*disk).clone(), part };
            files.push(FolderFile { name, content });
        }
    }
    if let Some(configuration) = configuration {
        let name = configuration_name(machine, configuration);
        if files.iter().all(|file| file.name != name) {
            files.push(FolderFile { name, content: Content::Configuration });
        }
    }
    files
}

/// Under the name that the configuration's programs expect.
fn configuration_name(machine: &MachineName, configuration: &Configuration) -> String {
    match configuration.format.as_str() {
        LIBVIRT_XML => "domain.xml".to_owned(),
        VMX => format!("{machine}.vmx"),
        OVF => format!("{machine}.ovf"),
        COLDRISE_JSON => "machine.json".to_owned(),
        _ => "configuration.txt".to_owned(),
    }
}

fn configuration(configuration: &Option<Configuration>) -> Result<&Configuration> {
    let gone = || Error::new(ErrorKind::NotFound, "the configuration no longer exists");
    configuration.as_ref().ok_or_else(gone)
}

fn no_folder(node: &Node) -> Error {
    Error::new(ErrorKind::NotAFolder, format!("{}: no folder", node.path()))
}
