//! The files of a session as other processes than its writer see them: the stored names, and the
//! contents that clients last made stable.

use std::sync::Arc;
use std::time::SystemTime;

use coldrise_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, Holes, ReadContext, Result, check_range,
    path_exists,
};
use coldrise_store::{Repository, SessionName};
use parking_lot::Mutex;

use super::clamp::clamp;
use super::file::length_over;
use super::folder::{FilesFolder, Mark};
use super::tree::{FileEntry, FileId, FileKind, FileTree};
use super::writer::{looks, lost_list, removed};
use crate::disks::length::Length;
use crate::live_disk::open_live_layer;
use crate::session_folder::document::SessionDocument;

/// The files of one session, for reading.
pub struct ClientFilesReader {
    folder: FilesFolder,
    session: SessionName,
    has_files: bool,
    tree: Mutex<Option<(Mark, Arc<FileTree>)>>,
}

impl ClientFilesReader {
    /// The files of this session. Nothing is read yet.
    pub fn new(repository: &Arc<Repository>, document: &SessionDocument) -> ClientFilesReader {
        ClientFilesReader {
            folder: FilesFolder::of(repository, document),
            session: document.name.clone(),
            has_files: document.files.is_some(),
            tree: Mutex::new(None),
        }
    }

    /// The current list.
    ///
    /// # Errors
    /// `Corrupt` if the list is damaged, or if it is missing in an existing session.
    pub fn tree(&self) -> Result<Arc<FileTree>> {
        let mut known = self.tree.lock();
        loop {
            // Read the mark before the list: a change in between makes this mark too old.
            let Some(mark) = self.folder.tree_mark()? else { return self.no_tree() };
            if let Some((_, tree)) = known.as_ref().filter(|(read, _)| *read == mark) {
                return Ok(Arc::clone(tree));
            }
            let Some(tree) = self.folder.read_tree()? else { continue };
            *known = Some((mark, Arc::new(tree)));
        }
    }

    fn no_tree(&self) -> Result<Arc<FileTree>> {
        if self.has_files {
            // If the session has ended, report that.
            SessionDocument::of(self.folder.repository(), &self.session)?;
            return Err(lost_list());
        }
        Ok(Arc::default())
    }

    fn entry(&self, id: FileId) -> Result<Arc<FileEntry>> {
        self.tree()?.get(id).map(Arc::clone).ok_or_else(removed)
    }

    /// The time of the last change of a file's content, and the space it takes, in bytes.
    ///
    /// # Errors
    /// `Corrupt` if the content is missing.
    pub fn looks(&self, entry: &FileEntry) -> Result<(SystemTime, u64)> {
        looks(&self.folder, entry)
    }

    /// The content of a file. Each read sees the current one.
    ///
    /// # Errors
    /// `NotFound`, `IsAFolder`, `Corrupt`.
    pub fn file(self: &Arc<Self>, id: FileId) -> Result<Arc<dyn Disk>> {
        let entry = self.entry(id)?;
        if entry.kind == FileKind::Folder {
            return Err(Error::new(ErrorKind::IsAFolder, format!("{:?} is a folder", entry.name)));
        }
        let file = ReadFile { files: Arc::clone(self), id, seen: Mutex::new(None) };
        file.seen()?;
        Ok(Arc::new(file))
    }
}

struct ReadFile {
    files: Arc<ClientFilesReader>,
    id: FileId,
    /// The content that was read last.
    seen: Mutex<Option<Seen>>,
}

#[derive(Clone)]
enum Seen {
    Listed(Arc<FileEntry>),
    Small(Mark, Arc<Vec<u8>>),
    Large(Arc<dyn Disk>, Arc<Length>),
}

impl Seen {
    fn size_bytes(&self) -> u64 {
        match self {
            Seen::Listed(entry) => entry.content.len() as u64,
            Seen::Small(_, bytes) => bytes.len() as u64,
            Seen::Large(_, length) => length.get(),
        }
    }
}

impl ReadFile {
    fn seen(&self) -> Result<Seen> {
        let folder = &self.files.folder;
        let mut seen = self.seen.lock();
        // A large file never becomes small again.
        if let Some(Seen::Large(..)) = &*seen {
            self.files.entry(self.id)?;
        } else {
            loop {
                let entry = self.files.entry(self.id)?;
                let kind = entry.kind;
                if let FileKind::Listed { .. } = kind {
                    *seen = Some(Seen::Listed(entry));
                    break;
                }
                if let FileKind::Large { capacity_bytes } = kind {
                    let key = folder.layer(self.id, capacity_bytes);
                    // The layer is created before the list names it.
                    if !path_exists(key.path())? && self.files.entry(self.id)?.kind == kind {
                        let text = format!("the content of file {} is missing", self.id.0);
                        return Err(Error::new(ErrorKind::Corrupt, text));
                    }
                    let below = Arc::new(Holes(capacity_bytes));
                    let session = &self.files.session;
                    let disk = open_live_layer(folder.repository(), session, key, below)?;
                    let length = Arc::new(length_over(&disk));
                    *seen = Some(Seen::Large(disk, length));
                    break;
                }
                let mark = folder.content_mark(self.id)?;
                if let (Some(Seen::Small(known, _)), Some(mark)) = (&*seen, mark) {
                    if *known == mark {
                        break;
                    }
                }
                match (mark, folder.read_content(self.id)?) {
                    (Some(mark), Some(bytes)) => {
                        *seen = Some(Seen::Small(mark, Arc::new(bytes)));
                        break;
                    }
                    // The file may have been removed, or become large, just now.
                    _ if self.files.entry(self.id)?.kind != kind => {}
                    _ => {
                        let text = format!("the content of file {} is missing", self.id.0);
                        return Err(Error::new(ErrorKind::Corrupt, text));
                    }
                }
            }
        }
        seen.clone().ok_or_else(removed)
    }
}

impl Disk for ReadFile {
    /// The last known size if the file cannot be examined. An invented size would truncate a file
    /// that can be read again later.
    fn size_bytes(&self) -> u64 {
        let seen = self.seen().ok().or_else(|| self.seen.lock().clone());
        seen.map_or(0, |seen| seen.size_bytes())
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        context.begin_wait()?;
        let seen = self.seen()?;
        let bytes = match &seen {
            Seen::Listed(entry) => &entry.content,
            Seen::Small(_, bytes) => &**bytes,
            Seen::Large(disk, length) => {
                let part = clamp(buffer, offset_bytes, length.get());
                return disk.read(part, offset_bytes, context);
            }
        };
        let part = clamp(buffer, offset_bytes, bytes.len() as u64);
        if !part.is_empty() {
            let start = offset_bytes as usize;
            part.copy_from_slice(&bytes[start..start + part.len()]);
        }
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        let seen = self.seen()?;
        check_range(seen.size_bytes(), offset_bytes, length_bytes)?;
        match seen {
            Seen::Listed(_) | Seen::Small(..) => {
                Ok(vec![Extent { offset_bytes, length_bytes, kind: ExtentKind::Stored }])
            }
            Seen::Large(disk, _) => disk.extents(offset_bytes, length_bytes, limit),
        }
    }
}
