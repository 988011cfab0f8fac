//! One file of a client, open in the process that writes the session.
//!
//! A content of up to 1 MiB is in memory while it is used, and each flush stores it whole. A
//! content of up to 256 bytes is stored in the list of files, a longer one as one document. A file
//! that grows beyond 1 MiB becomes a layer. A stored content is always one that the file had, never
//! a mixture of two.
//!
//! # From the list to a document, and to a layer
//!
//! The document is stored first. Then the list names it and drops the content. A crash in between
//! leaves a document that the next opening removes.
//!
//! The content is written into a new layer and flushed. Then the list of files names the layer.
//! Then the document is removed. A crash before the list is replaced leaves the document in use,
//! and a layer that the next opening removes. A crash after it leaves the layer in use, and a
//! document that the next opening removes. A file never becomes a document again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::SystemTime;

use coldrise_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, Holes, ReadContext, ReplaceError, Result,
    check_range, path_exists,
};
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};

use super::clamp::clamp;
use super::folder::MAX_SMALL_BYTES;
use super::tree::{FileEntry, FileId, FileKind};
use super::writer::{Shared, looks, ns_since_1970, removed};
use crate::disks::length::Length;

use crate::session_folder::side_file::SideFile;

/// Maximum size of a file, in bytes.
pub(crate) const MAX_LARGE_BYTES: u64 = 1 << 40;
/// Limit of the memory for small files, in bytes.
const RESIDENT_LIMIT_BYTES: u64 = 64 << 20;

/// A file of a client. Lock order: `flushing`, then `content`, then the list's lock. `modified` is
/// held only briefly.
pub struct ClientFile {
    id: FileId,
    shared: Arc<Shared>,
    is_gone: AtomicBool,
    /// The version of the stored content. Held while a content is stored.
    flushing: Mutex<u64>,
    content: RwLock<Content>,
    /// Version of the content. Every change increments it.
    version: AtomicU64,
    stored_version: AtomicU64,
    modified: Mutex<SystemTime>,
}

enum Content {
    Small { length_bytes: u64, bytes: Option<Vec<u8>> },
    Large { side: Arc<SideFile>, length: Length },
}

impl ClientFile {
    pub(super) fn open(shared: &Arc<Shared>, entry: &FileEntry) -> Result<ClientFile> {
        let content = match entry.kind {
            FileKind::Folder => {
                let text = format!("{:?} is a folder", entry.name);
                return Err(Error::new(ErrorKind::IsAFolder, text));
            }
            FileKind::Listed { .. } | FileKind::Small => {
                let bytes = shared.load(entry.id)?;
                let length_bytes = bytes.len() as u64;
                let bytes = shared.keep(bytes);
                Content::Small { length_bytes, bytes }
            }
            FileKind::Large { capacity_bytes } => {
                if !path_exists(&shared.folder.layer_path(entry.id))? {
                    let text = format!("the content of {:?} is missing", entry.name);
                    return Err(Error::new(ErrorKind::Corrupt, text));
                }
                large(shared, entry.id, capacity_bytes)?
            }
        };
        Ok(ClientFile {
            id: entry.id,
            shared: Arc::clone(shared),
            is_gone: AtomicBool::new(false),
            flushing: Mutex::new(0),
            content: RwLock::new(content),
            version: AtomicU64::new(0),
            stored_version: AtomicU64::new(0),
            modified: Mutex::new(looks(&shared.folder, entry)?.0),
        })
    }

    /// Time of the last change of the content.
    pub fn modified(&self) -> SystemTime {
        *self.modified.lock()
    }

    pub(super) fn note_modified(&self, modified: SystemTime) {
        *self.modified.lock() = modified;
    }

    fn check(&self) -> Result<()> {
        if self.is_gone.load(Ordering::Acquire) {
            Err(Error::new(ErrorKind::NotFound, "the file was removed"))
        } else {
            Ok(())
        }
    }

    /// True if written bytes are not stored yet.
    pub(super) fn is_dirty(&self) -> bool {
        self.version.load(Ordering::Acquire) != self.stored_version.load(Ordering::Acquire)
    }

    /// Extends the file with zeroes, or truncates it.
    ///
    /// # Errors
    /// `OutOfRange` above 1 TiB; `NoSpace`.
    pub fn set_size_bytes(&self, size_bytes: u64) -> Result<()> {
        self.check()?;
        self.shared.poison.check()?;
        if size_bytes > MAX_LARGE_BYTES {
            return Err(too_large(size_bytes));
        }
        if size_bytes > MAX_SMALL_BYTES {
            self.make_large()?;
        }
        let mut content = self.content.write();
        self.note_modified(SystemTime::now());
        match &mut *content {
            Content::Large { length, .. } => length.set(size_bytes),
            Content::Small { .. } => self.change(&mut content, |bytes| {
                // At most MAX_SMALL_BYTES.
                bytes.resize(size_bytes as usize, 0);
            }),
        }
    }

    /// Changes a small content. Loads it first if necessary.
    fn change(
        &self,
        content: &mut RwLockWriteGuard<'_, Content>,
        change: impl FnOnce(&mut Vec<u8>),
    ) -> Result<()> {
        let Content::Small { length_bytes, bytes } = &mut **content else {
            return Err(Error::new(ErrorKind::Internal, "a layer taken for a document"));
        };
        let mut now = match bytes.take() {
            Some(bytes) => bytes,
            None => {
                let loaded = self.shared.load(self.id)?;
                self.shared.resident_bytes.fetch_add(loaded.len() as u64, Ordering::Relaxed);
                loaded
            }
        };
        self.shared.resident_bytes.fetch_sub(now.len() as u64, Ordering::Relaxed);
        change(&mut now);
        self.shared.resident_bytes.fetch_add(now.len() as u64, Ordering::Relaxed);
        *length_bytes = now.len() as u64;
        *bytes = Some(now);
        self.version.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Turns the document into a layer. Does nothing if it is a layer.
    fn make_large(&self) -> Result<()> {
        let mut stored = self.flushing.lock();
        let mut content = self.content.write();
        let Content::Small { bytes, .. } = &*content else { return Ok(()) };
        let loaded;
        let bytes = match bytes {
            Some(bytes) => bytes,
            None => {
                loaded = self.shared.load(self.id)?;
                &loaded
            }
        };
        // An earlier attempt may have left a layer.
        self.shared.folder.remove_layer(self.id)?;
        let capacity_bytes = Length::disk_bytes(MAX_LARGE_BYTES);
        let made = self.copied(bytes, capacity_bytes);
        let changed = made.and_then(|large| {
            self.check()?;
            self.shared.change_entry(self.id, |entry| {
                entry.kind = FileKind::Large { capacity_bytes };
                entry.content = Vec::new();
            })?;
            Ok(large)
        });
        let large = match changed {
            Ok(large) => large,
            Err(error) => {
                let _ = self.shared.folder.remove_layer(self.id);
                return Err(error);
            }
        };
        self.shared.forget(&content);
        *content = large;
        *stored = self.version.load(Ordering::Acquire);
        self.stored_version.store(*stored, Ordering::Release);
        // If this fails, the next opening removes it.
        let _ = self.shared.folder.remove_content(self.id);
        Ok(())
    }

    fn copied(&self, bytes: &[u8], capacity_bytes: u64) -> Result<Content> {
        let large = large(&self.shared, self.id, capacity_bytes)?;
        let Content::Large { side, length } = &large else { return Ok(large) };
        let copied = side
            .write_at(bytes, 0)
            .and_then(|()| length.set(bytes.len() as u64))
            .and_then(|()| side.flush());
        copied.map(|()| large)
    }

    /// Stores a small content, in the list or as a document. The caller holds `flushing`.
    fn store(&self, bytes: Vec<u8>) -> Result<()> {
        let modified = self.modified();
        let tree = self.shared.tree();
        let is_listed =
            matches!(tree.get(self.id).ok_or_else(removed)?.kind, FileKind::Listed { .. });
        if is_listed && tree.takes(&bytes) {
            return self.shared.change_entry(self.id, |entry| {
                entry.kind = FileKind::Listed { modified_ns: ns_since_1970(modified) };
                entry.content = bytes;
            });
        }
        match self.shared.folder.write_content(self.id, &bytes, modified) {
            Ok(()) => {}
            Err(ReplaceError::Unchanged(error)) => return Err(error),
            Err(ReplaceError::Unknown(error)) => {
                self.shared.poison.set();
                return Err(error);
            }
        }
        if !is_listed {
            return Ok(());
        }
        let named = self.shared.change_entry(self.id, |entry| {
            entry.kind = FileKind::Small;
            entry.content = Vec::new();
        });
        named.inspect_err(|_| {
            let _ = self.shared.folder.remove_content(self.id);
        })
    }

    /// Drops a small content from memory if it is stored.
    fn unload(&self) {
        let mut content = self.content.write();
        if self.is_dirty() {
            return;
        }
        self.shared.forget(&content);
        if let Content::Small { bytes, .. } = &mut *content {
            *bytes = None;
        }
    }

    fn make_room(&self) -> Result<()> {
        if self.shared.resident_bytes.load(Ordering::Relaxed) > RESIDENT_LIMIT_BYTES {
            self.flush()?;
            self.unload();
        }
        Ok(())
    }

    /// Marks the file as removed: releases its memory and makes every later call fail.
    pub(super) fn end(&self) {
        self.is_gone.store(true, Ordering::Release);
        let _flushing = self.flushing.lock();
        let mut content = self.content.write();
        self.shared.forget(&content);
        *content = Content::Small { length_bytes: 0, bytes: None };
    }
}

fn large(shared: &Arc<Shared>, id: FileId, capacity_bytes: u64) -> Result<Content> {
    let key = shared.folder.layer(id, capacity_bytes);
    let below = Arc::new(Holes(capacity_bytes));
    let (poison, writing) = (shared.poison.clone(), Arc::clone(&shared.writing));
    let side = Arc::new(SideFile::open(key, below, poison, writing)?);
    Ok(Content::Large { length: length_over(&(Arc::clone(&side) as Arc<dyn Disk>)), side })
}

/// The length of a large file over its layer.
pub(super) fn length_over(disk: &Arc<dyn Disk>) -> Length {
    Length::new(disk, MAX_LARGE_BYTES, 0)
}

fn too_large(size_bytes: u64) -> Error {
    let text = format!("{size_bytes} bytes: a file can have at most {MAX_LARGE_BYTES}");
    Error::new(ErrorKind::OutOfRange, text)
}

impl Disk for ClientFile {
    fn size_bytes(&self) -> u64 {
        match &*self.content.read() {
            Content::Small { length_bytes, .. } => *length_bytes,
            Content::Large { length, .. } => length.get(),
        }
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        self.check()?;
        let content = match self.content.try_read() {
            Some(content) => content,
            None => {
                context.begin_wait()?;
                self.content.read()
            }
        };
        let loaded;
        let bytes = match &*content {
            Content::Large { side, length } => {
                let part = clamp(buffer, offset_bytes, length.get());
                return side.read(part, offset_bytes, context);
            }
            Content::Small { bytes: Some(bytes), .. } => bytes,
            Content::Small { bytes: None, .. } => {
                context.begin_wait()?;
                loaded = self.shared.load(self.id)?;
                &loaded
            }
        };
        let part = clamp(buffer, offset_bytes, bytes.len() as u64);
        if !part.is_empty() {
            let start = offset_bytes as usize;
            part.copy_from_slice(&bytes[start..start + part.len()]);
        }
        Ok(())
    }

    /// A write beyond the end extends the file.
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.check()?;
        self.shared.poison.check()?;
        let end = offset_bytes.saturating_add(bytes.len() as u64);
        if end > MAX_LARGE_BYTES {
            return Err(too_large(end));
        }
        if end > MAX_SMALL_BYTES {
            self.make_large()?;
        }
        self.note_modified(SystemTime::now());
        // Other threads may write inside a large file at the same time.
        if let Content::Large { side, length } = &*self.content.read() {
            if length.get() >= end {
                return side.write_at(bytes, offset_bytes);
            }
        }
        let mut content = self.content.write();
        if let Content::Large { side, length } = &*content {
            side.write_at(bytes, offset_bytes)?;
            return length.reach(end);
        }
        self.change(&mut content, |now| {
            // At most MAX_SMALL_BYTES.
            let (start, end) = (offset_bytes as usize, end as usize);
            if now.len() < end {
                now.resize(end, 0);
            }
            now[start..end].copy_from_slice(bytes);
        })?;
        drop(content);
        self.make_room()
    }

    fn write_zeroes(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.check()?;
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        let mut content = self.content.write();
        self.note_modified(SystemTime::now());
        if let Content::Large { side, .. } = &*content {
            return side.write_zeroes(offset_bytes, length_bytes);
        }
        self.change(&mut content, |now| {
            let end = (offset_bytes + length_bytes).min(now.len() as u64) as usize;
            let start = (offset_bytes as usize).min(end);
            now[start..end].fill(0);
        })
    }

    /// A removed file has nothing to store.
    fn flush(&self) -> Result<()> {
        self.shared.poison.check()?;
        let mut stored = self.flushing.lock();
        let (version, bytes) = {
            let content = self.content.read();
            let version = self.version.load(Ordering::Acquire);
            match &*content {
                Content::Large { side, .. } => {
                    let side = Arc::clone(side);
                    drop((content, stored));
                    return side.flush();
                }
                _ if version == *stored => return Ok(()),
                Content::Small { bytes: Some(bytes), .. } => (version, bytes.clone()),
                Content::Small { bytes: None, .. } => return Ok(()),
            }
        };
        if self.is_gone.load(Ordering::Acquire) {
            return Ok(());
        }
        match self.store(bytes) {
            // The file was removed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            stored => stored?,
        }
        *stored = version;
        self.stored_version.store(version, Ordering::Release);
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        self.check()?;
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        match &*self.content.read() {
            Content::Large { side, .. } => side.extents(offset_bytes, length_bytes, limit),
            Content::Small { .. } => {
                Ok(vec![Extent { offset_bytes, length_bytes, kind: ExtentKind::Stored }])
            }
        }
    }
}

impl Shared {
    /// The stored content of a small file.
    fn load(&self, id: FileId) -> Result<Vec<u8>> {
        let tree = self.tree();
        let entry = tree.get(id).ok_or_else(removed)?;
        if matches!(entry.kind, FileKind::Listed { .. }) {
            return Ok(entry.content.clone());
        }
        self.folder.read_content(id)?.ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format!("the content of file {} is missing", id.0))
        })
    }

    /// Keeps the loaded content in memory if there is room.
    fn keep(&self, bytes: Vec<u8>) -> Option<Vec<u8>> {
        let length = bytes.len() as u64;
        if self.resident_bytes.load(Ordering::Relaxed) + length > RESIDENT_LIMIT_BYTES {
            return None;
        }
        self.resident_bytes.fetch_add(length, Ordering::Relaxed);
        Some(bytes)
    }

    fn forget(&self, content: &Content) {
        if let Content::Small { bytes: Some(bytes), .. } = content {
            self.resident_bytes.fetch_sub(bytes.len() as u64, Ordering::Relaxed);
        }
    }
}
