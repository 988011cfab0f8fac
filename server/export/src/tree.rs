//! Names to disks.

use crate::export::Export;
use crate::lease::{Lease, Served};
use crate::open_sessions::OpenSessions;
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_session::{open_live_disk, open_point_disk, Catalog, SessionDocument};
use coldrise_store::{
    Address, DiskName, MachineName, PointDocument, PointSelector, Repository, SessionName,
};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

/// Longest name of an export, in bytes. Two names and a point with its number
/// are at most 63 + 1 + 63 + 1 + 63; what is longer cannot exist.
pub const MAX_EXPORT_NAME_BYTES: usize = 255;

/// How to serve a repository.
#[derive(Clone, Copy, Debug)]
pub struct TreeOptions<'a> {
    /// Who serves, for people who read the lease: `nbdkit`, `ganesha`.
    pub program: &'a str,
    /// Size of the cache of decoded chunks that the repository was opened with,
    /// in bytes: a prefetch stops there.
    pub cache_bytes: u64,
}

/// One name that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportEntry {
    /// `MACHINE/POINT/DISK` or `live/SESSION/DISK`.
    pub name: String,
    /// One line for people.
    pub description: String,
    /// True for the disks of restore points.
    pub is_read_only: bool,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
}

/// Every disk of a repository by name. All calls may come from many threads.
pub struct ExportTree {
    repository: Arc<Repository>,
    catalog: Catalog,
    sessions: Arc<OpenSessions>,
    lease: Arc<Lease>,
    cache_bytes: u64,
}

impl ExportTree {
    /// Starts to serve a repository: takes this process's lease.
    pub fn new(repository: &Arc<Repository>, options: &TreeOptions) -> Result<ExportTree> {
        Ok(ExportTree {
            repository: Arc::clone(repository),
            catalog: Catalog::new(repository),
            sessions: OpenSessions::new(repository),
            lease: Lease::take(repository, options.program)?,
            cache_bytes: options.cache_bytes,
        })
    }

    /// Disks of published sessions, then of restore points, each in the order of
    /// their names. Of more than `limit` exports the sessions and the newest
    /// points are listed.
    pub fn list(&self, limit: usize) -> Result<Vec<ExportEntry>> {
        self.repository.catch_up()?;
        let mut live = Vec::new();
        for state in coldrise_session::sessions(&self.repository)? {
            live.extend(session_entries(&state.document));
        }
        live.sort_by(|a, b| a.name.cmp(&b.name));
        live.truncate(limit);

        let mut points = Vec::new();
        for machine in self.catalog.machines()? {
            points.extend(self.catalog.points(&machine)?);
        }
        points.sort_by(|a, b| (&b.point, &a.machine).cmp(&(&a.point, &b.machine)));
        let mut stored: Vec<_> = points.iter().flat_map(point_entries).collect();
        stored.truncate(limit - live.len());
        stored.sort_by(|a, b| a.name.cmp(&b.name));
        live.append(&mut stored);
        Ok(live)
    }

    /// The name that stands for no name: there is one when the repository has
    /// exactly one export.
    pub fn default_name(&self) -> Result<Option<String>> {
        let mut entries = self.list(2)?;
        if entries.len() != 1 {
            return Ok(None);
        }
        Ok(entries.pop().map(|entry| entry.name))
    }

    /// Opens `MACHINE/POINT/DISK`, always read-only, or `live/SESSION/DISK`. A
    /// session's disk is writable unless `read_only` asks otherwise; for reading
    /// it is opened even while another process writes it.
    ///
    /// `ErrorKind::InvalidInput`: it cannot be a name of an export.
    /// `ErrorKind::NotFound`: there is no such machine, point, session or disk.
    /// `ErrorKind::Busy`: another process writes the session.
    pub fn open(&self, name: &str, read_only: bool) -> Result<Export> {
        if name.len() > MAX_EXPORT_NAME_BYTES {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "an export name of {} bytes is longer than any can be ({MAX_EXPORT_NAME_BYTES})",
                    name.len()
                ),
            ));
        }
        self.open_address(name, read_only).context(|| format!("export {name:?}"))
    }

    fn open_address(&self, name: &str, read_only: bool) -> Result<Export> {
        if name.is_empty() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "no name was given; a disk is named MACHINE/POINT/DISK or live/SESSION/DISK",
            ));
        }
        match Address::parse(name)? {
            Address::Point { machine, selector, disk: Some(disk) } => {
                self.open_point(&machine, &selector, &disk)
            }
            Address::Live { session, disk: Some(disk) } => {
                self.open_session(&session, &disk, read_only)
            }
            Address::Point { disk: None, .. } | Address::Live { disk: None, .. } => {
                Err(Error::new(ErrorKind::InvalidInput, "it names no disk; add /DISK to its end"))
            }
        }
    }

    fn open_point(
        &self,
        machine: &MachineName,
        selector: &PointSelector,
        disk: &DiskName,
    ) -> Result<Export> {
        let point = self.find_point(machine, selector)?;
        let Some(document) = point.disks.iter().find(|d| d.name == *disk) else {
            return Err(no_such_disk(disk, point.disks.iter().map(|d| &d.name)));
        };
        let name = point_export_name(&point, disk);
        let lease = self.lease.hold(Served { name: name.clone(), disk: Some(document.clone()) })?;
        if !lease.is_confirmed() {
            self.repository.catch_up()?;
            self.catalog.point(machine, &PointSelector::Exact(point.point.clone()))?;
            lease.confirm();
        }
        Ok(Export {
            disk: open_point_disk(&self.repository, &point, disk)?,
            session: None,
            _lease: Some(lease),
            description: point_description(&point, disk),
            name,
            chunk_size_bytes: self.repository.chunk_size_bytes(),
            cache_bytes: self.cache_bytes,
            poisoned: Arc::new(AtomicBool::new(false)),
        })
    }

    /// An exact point that is known is found at once. `latest` has to see what
    /// was stored meanwhile, and so has a point that is not known.
    fn find_point(&self, machine: &MachineName, selector: &PointSelector) -> Result<PointDocument> {
        if let PointSelector::Exact(_) = selector {
            match self.catalog.point(machine, selector) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                result => return result,
            }
        }
        self.repository.catch_up()?;
        self.catalog.point(machine, selector)
    }

    fn open_session(
        &self,
        session: &SessionName,
        disk: &DiskName,
        read_only: bool,
    ) -> Result<Export> {
        let document = coldrise_session::session(&self.repository, session)?.document;
        if !document.disks.iter().any(|d| d.name == *disk) {
            return Err(no_such_disk(disk, document.disks.iter().map(|d| &d.name)));
        }
        let name = session_export_name(session, disk);
        let lease = self.lease.hold(Served { name: name.clone(), disk: None })?;
        let (opened, hold) = if read_only {
            (open_live_disk(&self.repository, session, disk)?, None)
        } else {
            let hold = self.sessions.hold(session)?;
            (hold.disk(disk)?, Some(hold))
        };
        Ok(Export {
            disk: opened,
            poisoned: match &hold {
                Some(hold) => Arc::clone(hold.poisoned()),
                None => Arc::new(AtomicBool::new(false)),
            },
            session: hold,
            _lease: Some(lease),
            description: session_description(&document, disk),
            name,
            chunk_size_bytes: self.repository.chunk_size_bytes(),
            cache_bytes: self.cache_bytes,
        })
    }
}

fn no_such_disk<'a>(disk: &DiskName, there: impl Iterator<Item = &'a DiskName>) -> Error {
    let names: Vec<_> = there.map(DiskName::as_str).collect();
    Error::new(ErrorKind::NotFound, format!("there is no disk {disk}, only {}", names.join(", ")))
}

fn point_export_name(point: &PointDocument, disk: &DiskName) -> String {
    format!("{}/{}/{disk}", point.machine, point.point)
}

fn point_description(point: &PointDocument, disk: &DiskName) -> String {
    format!("disk {disk} of {} at restore point {}, read-only", point.machine, point.point)
}

fn point_entries(point: &PointDocument) -> impl Iterator<Item = ExportEntry> + '_ {
    point.disks.iter().map(|disk| ExportEntry {
        name: point_export_name(point, &disk.name),
        description: point_description(point, &disk.name),
        is_read_only: true,
        size_bytes: disk.size_bytes,
    })
}

fn session_export_name(session: &SessionName, disk: &DiskName) -> String {
    format!("live/{session}/{disk}")
}

fn session_description(session: &SessionDocument, disk: &DiskName) -> String {
    format!(
        "disk {disk} of session {}, published from {}/{}",
        session.name, session.machine, session.point
    )
}

fn session_entries(session: &SessionDocument) -> impl Iterator<Item = ExportEntry> + '_ {
    session.disks.iter().map(|disk| ExportEntry {
        name: session_export_name(&session.name, &disk.name),
        description: session_description(session, &disk.name),
        is_read_only: false,
        size_bytes: disk.size_bytes,
    })
}
