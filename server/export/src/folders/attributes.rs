//! Sizes and times of nodes.

use super::Folders;
use super::client_files::carried_attributes;
use super::node::{Content, FolderFile, Kind, Node, NodeType};
use super::sizes::Sizes;
use coldrise_block::{Context, ErrorKind, Result};
use coldrise_session::SessionDocument;
use coldrise_store::{Configuration, MachineName};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Size and time of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Its kind.
    pub node_type: NodeType,
    /// Size in bytes; 0 for a folder.
    pub size_bytes: u64,
    /// Its stored bytes; the rest is known to be zero without reading. For a session the
    /// value may be a moment old.
    pub stored_bytes: u64,
    /// The last change of the content.
    pub modified: SystemTime,
    /// The last change of content, mode or name.
    pub changed: SystemTime,
    /// Whether clients can open it for writing, provided that no other process writes it.
    pub is_writable: bool,
    /// Permissions that a client set; only for client files in sessions.
    pub mode: Option<u32>,
    /// The verifier of its exclusive creation, until the first write or the first change of
    /// its time.
    pub verifier: Option<u64>,
}

/// Space on the file system that the repository lies on, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// The total.
    pub total_bytes: u64,
    /// The free part.
    pub free_bytes: u64,
    /// The part that users other than root can fill.
    pub available_bytes: u64,
}

impl Folders {
    /// Size and time of a node. The first request for a file walks the extents of its disk,
    /// once for all files except compact ones: half a second per stored TiB. A session's
    /// disk is walked again after writes, at a limited rate; if no front end has it open,
    /// the index of its layer is read first.
    pub fn attributes(&self, node: &Node) -> Result<Attributes> {
        let of_folder = |modified| Attributes {
            node_type: NodeType::Folder,
            size_bytes: 0,
            stored_bytes: 0,
            modified,
            changed: modified,
            is_writable: false,
            mode: None,
            verifier: None,
        };
        match &node.kind {
            Kind::Root => Ok(of_folder(self.started)),
            Kind::Live => {
                let folder = self.repository.live_dir();
                let modified = std::fs::metadata(&folder).and_then(|found| found.modified());
                modified.context(|| format!("looking at {}", folder.display())).map(of_folder)
            }
            Kind::Machine(machine) => self.machine_folder_time(machine).map(of_folder),
            Kind::Point(point) => Ok(of_folder(time(point.created_at_ms))),
            Kind::Session(session) => self.session_folder_time(session).map(of_folder),
            Kind::Client(session, entry) => self.client_attributes(session, entry),
            Kind::Carried(_, entry) => Ok(carried_attributes(entry)),
            Kind::Latest(machine) => {
                let newest = self.newest(machine)?;
                let size_bytes = newest.point.to_string().len() as u64;
                let modified = time(newest.created_at_ms);
                Ok(Attributes { node_type: NodeType::Link, size_bytes, ..of_folder(modified) })
            }
            // The length of its target is known only when it is followed.
            Kind::Marked(session, _) => {
                let session = coldrise_session::session(&self.repository, session)?.document;
                let modified = time(session.created_at_ms);
                Ok(Attributes { node_type: NodeType::Link, ..of_folder(modified) })
            }
            Kind::PointFile(point, file) => {
                let sizes = match file.content {
                    Content::Configuration => text_sizes(&point.configuration),
                    Content::Image { ref disk, part } => {
                        self.point_sizes(node, point, disk, part)?
                    }
                };
                Ok(of_file(sizes, time(point.created_at_ms), false))
            }
            Kind::SessionFile(session, file) => self.live_attributes(node, session, file),
        }
    }

    /// The time of the newest point. With all points in quarantine the folder is empty.
    fn machine_folder_time(&self, machine: &MachineName) -> Result<SystemTime> {
        let newest = match self.newest(machine) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.catalog.points(machine)?.pop().ok_or(error)?
            }
            found => found?,
        };
        Ok(time(newest.created_at_ms))
    }

    /// Space on the file system that the repository lies on.
    pub fn space(&self) -> Result<Space> {
        let path = self.repository.path();
        let found = rustix::fs::statvfs(path)
            .map_err(std::io::Error::from)
            .context(|| format!("reading the free space of {}", path.display()))?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Ok(Space {
            total_bytes: bytes(found.f_blocks),
            free_bytes: bytes(found.f_bfree),
            available_bytes: bytes(found.f_bavail),
        })
    }

    fn live_attributes(
        &self,
        node: &Node,
        session: &SessionDocument,
        file: &FolderFile,
    ) -> Result<Attributes> {
        let published = time(session.created_at_ms);
        let Content::Image { disk, part } = &file.content else {
            return Ok(of_file(text_sizes(&session.configuration), published, false));
        };
        let disk = session.disk(disk)?;
        let captured = self.layer_looks(disk).map_or(published, |layer| layer.modified);
        let (sizes, written) = match self.open_files.find(&node.key) {
            Some(open) => (self.open_live_sizes(node, &open)?, time(open.written_at_ms())),
            None => (self.closed_live_sizes(session, disk, &file.name, *part)?, published),
        };
        Ok(of_file(sizes, captured.max(written).max(published), self.is_writable(node)))
    }
}

fn of_file(sizes: Sizes, modified: SystemTime, is_writable: bool) -> Attributes {
    let Sizes { size_bytes, stored_bytes } = sizes;
    Attributes {
        node_type: NodeType::File,
        size_bytes,
        stored_bytes,
        modified,
        changed: modified,
        is_writable,
        mode: None,
        verifier: None,
    }
}

fn text_sizes(configuration: &Option<Configuration>) -> Sizes {
    let bytes = configuration.as_ref().map_or(0, |configuration| configuration.text.len() as u64);
    Sizes { size_bytes: bytes, stored_bytes: bytes }
}

pub(super) fn time(unix_ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(unix_ms)
}
