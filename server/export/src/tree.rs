//! Maps names to disks and image files.

use crate::client_file::{NoContent, ReadClientFile};
use crate::export::{Content, Export};
use crate::image;
use crate::image_file::ImageFile;
use crate::image_name::{self, ImageOwner, ImagePart, Named};
use crate::listing::{
    ExportEntry, Listed, point_description, point_entries, point_export_name, session_description,
    session_entries, session_export_name,
};
use crate::open_sessions::OpenSessions;
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_formats::{Access, Format};
use coldrise_session::{
    Catalog, ClientFiles, ClientFilesReader, FileId, Lease, LeaseHold, PointOfMark, Served,
    SessionDocument, check_offered, open_live_disk, open_live_side_file, open_point_disk,
};
use coldrise_store::{
    Address, CatchUpThread, DiskName, MachineName, PointDocument, PointSelector, Repository,
    SessionName, SessionTime,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Maximum length of an export's name, in bytes. Two names, a point with its number and the
/// extension of an image are shorter; a longer name cannot exist.
pub const MAX_EXPORT_NAME_BYTES: usize = 255;

/// Options for serving a repository.
#[derive(Clone, Copy, Debug)]
pub struct TreeOptions<'a> {
    /// The name of the server in the lease, for people: `nbdkit`, `ganesha`.
    pub program: &'a str,
    /// Size in bytes of the repository's cache of decoded chunks: a prefetch stops there.
    pub cache_bytes: u64,
    /// The absolute path of the folder under which clients of this front end see the tree,
    /// if they do: a qcow2 image with an external data file then names that file by its
    /// absolute path.
    pub folder: Option<&'a Path>,
}

/// Every disk of a repository by name. All calls may come from many threads.
pub struct ExportTree {
    repository: Arc<Repository>,
    catalog: Catalog,
    sessions: Arc<OpenSessions>,
    lease: Arc<Lease>,
    cache_bytes: u64,
    folder: Option<PathBuf>,
    _catch_up: CatchUpThread,
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
            folder: options.folder.map(Path::to_owned),
            _catch_up: repository.catch_up_in_background(),
        })
    }

    /// Disks of published sessions, then of restore points, each sorted by name. Above
    /// `limit` exports the list keeps the sessions and the newest points.
    pub fn list(&self, limit: usize, listed: Listed) -> Result<Vec<ExportEntry>> {
        self.repository.catch_up()?;
        let mut live = Vec::new();
        for state in coldrise_session::sessions(&self.repository)? {
            live.extend(session_entries(&self.repository, &state.document, listed));
        }
        live.sort_by(|a, b| a.name.cmp(&b.name));
        live.truncate(limit);

        let mut points = Vec::new();
        for machine in self.catalog.machines()? {
            points.extend(self.catalog.offered(&machine)?);
        }
        points.sort_by(|a, b| (&b.point, &a.machine).cmp(&(&a.point, &b.machine)));
        let entries = points.iter().flat_map(|p| point_entries(&self.repository, p, listed));
        let mut stored: Vec<_> = entries.take(limit - live.len()).collect();
        stored.sort_by(|a, b| a.name.cmp(&b.name));
        live.append(&mut stored);
        Ok(live)
    }

    /// The default export: there is one if the repository has exactly one export.
    pub fn default_name(&self) -> Result<Option<String>> {
        let mut entries = self.list(2, Listed::Disks)?;
        if entries.len() != 1 {
            return Ok(None);
        }
        Ok(entries.pop().map(|entry| entry.name))
    }

    /// Opens `MACHINE/POINT/DISK` or `live/SESSION/DISK`, or an image file of the disk,
    /// such as `vda.vhdx` instead of `vda`. A point is always read-only. A session is
    /// writable unless `read_only` is set; it opens for reading even while another process
    /// writes it.
    ///
    /// `ErrorKind::InvalidInput`: no export can have this name. `ErrorKind::NotFound`:
    /// there is no such machine, point, session, disk or image. `ErrorKind::Busy`: another
    /// process writes the session. `ErrorKind::Unsupported`: that format cannot hold the
    /// disk.
    pub fn open(&self, name: &str, read_only: bool) -> Result<Export> {
        if name.len() > MAX_EXPORT_NAME_BYTES {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "an export name of {} bytes is longer than the maximum ({MAX_EXPORT_NAME_BYTES})",
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
        let Some((folder, file)) = name.rsplit_once('/').filter(|(f, _)| f.contains('/')) else {
            Address::parse(name)?;
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "it names no disk; add /DISK to its end",
            ));
        };
        let address = Address::parse(folder)?;
        image_name::check(file)?;
        match address {
            Address::Point { machine, selector, disk: None } => {
                self.open_point(&machine, &selector, file)
            }
            Address::Live { session, disk: None } => self.open_session(&session, file, read_only),
            Address::Marked { time: SessionTime::Ago(_), .. } => {
                let text = format!("{name} would be another time with each connection");
                let advice = "name the time of a mark: coldrise marks SESSION lists them";
                Err(Error::new(ErrorKind::InvalidInput, text).advise(advice))
            }
            Address::Marked { disk: None, .. } => {
                let point = PointOfMark::of(&self.repository, &address)?;
                let export = self.open_address(&format!("{}/{file}", point.address), read_only)?;
                point.keep();
                Ok(export)
            }
            // One part too many: the error says which form a name has.
            Address::Point { .. } | Address::Live { .. } | Address::Marked { .. } => {
                Err(Address::parse(name).err().unwrap_or_else(malformed))
            }
        }
    }

    fn open_point(
        &self,
        machine: &MachineName,
        selector: &PointSelector,
        file: &str,
    ) -> Result<Export> {
        let (point, lease) = self.hold_point(machine, selector, file)?;
        let names: Vec<_> = point.disks.iter().map(|disk| &disk.name).collect();
        let Named { disk, image } = image_name::find(file, &names)?;
        let document = point.disk(disk).ok_or_else(malformed)?;
        let name = point_export_name(&point, file);
        let opened = open_point_disk(&self.repository, &point, disk)?;
        let content = match image {
            None => Content::Disk(opened),
            Some(part) => {
                let shape = image::point_shape(&self.repository, &point, document);
                let folder = self.folder_of(&name);
                image::check_start(part, disk, &*opened)?;
                let layout = image::lay_out(part, disk, &shape, &*opened, folder.as_deref())?;
                Content::Image(ImageFile::read_only(layout, opened))
            }
        };
        Ok(Export {
            content,
            session: None,
            _lease: Some(lease),
            description: point_description(&point, disk, file),
            name,
            chunk_size_bytes: self.repository.chunk_size_bytes(),
            cache_bytes: self.cache_bytes,
            poisoned: Arc::new(AtomicBool::new(false)),
        })
    }

    /// A point with a lease on its layers and pages. It is looked up again after the lease
    /// is written: until then it may have been removed or folded.
    fn hold_point(
        &self,
        machine: &MachineName,
        selector: &PointSelector,
        file: &str,
    ) -> Result<(PointDocument, LeaseHold)> {
        let mut point = self.find_point(machine, selector)?;
        loop {
            let names: Vec<_> = point.disks.iter().map(|disk| &disk.name).collect();
            let disk = image_name::find(file, &names)?.disk;
            let disk = point.disk(disk).ok_or_else(malformed)?.clone();
            let name = point_export_name(&point, file);
            let lease = self.lease.hold(Served { name, disk: Some(disk) })?;
            if lease.is_confirmed() {
                return Ok((point, lease));
            }
            let now = self.catalog.confirm(&point)?;
            if now.disks == point.disks {
                lease.confirm();
                return Ok((point, lease));
            }
            point = now;
        }
    }

    /// A known exact point needs no catching up. `latest` must see newer points, and an
    /// unknown point may be new.
    fn find_point(&self, machine: &MachineName, selector: &PointSelector) -> Result<PointDocument> {
        if let PointSelector::Exact(_) = selector {
            match self.catalog.point(machine, selector) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                result => return result.and_then(check_offered),
            }
        }
        self.repository.catch_up()?;
        check_offered(self.catalog.point(machine, selector)?)
    }

    fn open_session(&self, session: &SessionName, file: &str, read_only: bool) -> Result<Export> {
        let document = coldrise_session::session(&self.repository, session)?.document;
        let names: Vec<_> = document.disks.iter().map(|disk| &disk.name).collect();
        let Named { disk, image } = image_name::find(file, &names)?;
        if let Some(part) = image.filter(|part| !ImageOwner::Session.has(part.format)) {
            return Err(no_live_image(session, disk, file, part));
        }
        let name = session_export_name(session, file);
        // The opening below checks whether the session still exists. Its document keeps the layers
        // that this process writes; a lease would also keep folded ones.
        let sealed = document.disk(disk)?.sealed();
        let served = Served { name: name.clone(), disk: read_only.then_some(sealed) };
        let lease = self.lease.hold(served)?;
        let hold = if read_only { None } else { Some(self.sessions.hold(session)?) };
        let opened = match &hold {
            Some(hold) => hold.disk(disk)?,
            None => open_live_disk(&self.repository, session, disk)?,
        };
        let content = match image {
            None => Content::Disk(opened),
            Some(part) => {
                let shape = image::session_shape(&self.repository, &document, document.disk(disk)?);
                let folder = self.folder_of(&name);
                image::check_start(part, disk, &*opened)?;
                let layout = image::lay_out(part, disk, &shape, &*opened, folder.as_deref())?;
                Content::Image(ImageFile::live(layout, opened, |size_bytes, below| match &hold {
                    Some(hold) => hold.side_file(file, size_bytes, below),
                    None => open_live_side_file(&self.repository, session, file, size_bytes, below),
                })?)
            }
        };
        Ok(Export {
            content,
            poisoned: match &hold {
                Some(hold) => Arc::clone(hold.poisoned()),
                None => Arc::new(AtomicBool::new(false)),
            },
            session: hold,
            _lease: Some(lease),
            description: session_description(&document, disk, file),
            name,
            chunk_size_bytes: self.repository.chunk_size_bytes(),
            cache_bytes: self.cache_bytes,
        })
    }

    /// The files of clients in a session that this process writes now.
    pub(crate) fn client_files(&self, session: &SessionName) -> Option<Arc<ClientFiles>> {
        self.sessions.files(session)
    }

    /// Opens a session for writing, and optionally a client's file in it; `path` is for
    /// people. Errors as of [`ExportTree::open`].
    pub(crate) fn open_client_file(
        &self,
        session: &SessionName,
        path: &str,
        id: Option<FileId>,
    ) -> Result<Export> {
        let lease = self.lease.hold(Served { name: path.to_owned(), disk: None })?;
        let hold = self.sessions.hold(session)?;
        let content = match id {
            Some(id) => Content::ClientFile(hold.files()?.file(id)?),
            None => Content::Disk(Arc::new(NoContent)),
        };
        Ok(Export {
            content,
            poisoned: Arc::clone(hold.poisoned()),
            session: Some(hold),
            _lease: Some(lease),
            description: String::new(),
            name: path.to_owned(),
            chunk_size_bytes: self.repository.chunk_size_bytes(),
            cache_bytes: self.cache_bytes,
        })
    }

    /// Opens a client's file for reading: writes of this process show at once, writes of
    /// another process once they are stable.
    pub(crate) fn read_client_file(
        &self,
        session: &SessionDocument,
        path: &str,
        id: FileId,
        reader: Arc<ClientFilesReader>,
    ) -> Result<Export> {
        let file = ReadClientFile::open(&self.sessions, session, id, reader)?;
        Ok(Export::of_disk(path, "", Arc::new(file)))
    }

    /// The path under which clients see the file's folder.
    fn folder_of(&self, name: &str) -> Option<PathBuf> {
        let (folder, _) = name.rsplit_once('/')?;
        self.folder.as_ref().map(|root| root.join(folder))
    }
}

/// A compact image leaves out empty blocks; in a session these change.
fn no_live_image(session: &SessionName, disk: &DiskName, file: &str, part: ImagePart) -> Error {
    let what = match part.format.access() {
        Access::Streamed => "is compressed and can only be restored to a file",
        _ => "would not contain later writes of the session's machine",
    };
    let there: Vec<_> = Format::ALL
        .into_iter()
        .filter(|format| ImageOwner::Session.has(*format))
        .map(|format| format!("{disk}{}", format.suffix()))
        .collect();
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "{file} {what}; use one of live/{session}/{{{}}}, or seal the session and use {file} \
             of the point that this makes",
            there.join(",")
        ),
    )
}

fn malformed() -> Error {
    Error::new(ErrorKind::Internal, "a name was taken for another one")
}
