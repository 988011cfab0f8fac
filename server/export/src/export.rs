//! One opened export: a disk, and everything that must stay held during its use.

use crate::image_file::ImageFile;
use crate::open_sessions::SessionHold;
use coldrise_block::{Disk, Error, ErrorKind, Result};
use coldrise_session::{ClientFile, ClientFiles, LeaseHold};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A disk, an image file or a client's file under one name. It stays open until it is
/// dropped.
///
/// Dropping the last export of a session closes the session, which makes its
/// captured writes durable and lets another process open it.
pub struct Export {
    // Drop order: the content releases its session, then the session closes, and only then
    // may its base be deleted.
    pub(crate) content: Content,
    pub(crate) session: Option<SessionHold>,
    pub(crate) _lease: Option<LeaseHold>,
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) chunk_size_bytes: u32,
    pub(crate) cache_bytes: u64,
    pub(crate) poisoned: Arc<AtomicBool>,
}

/// The content under the name.
pub(crate) enum Content {
    Disk(Arc<dyn Disk>),
    Image(ImageFile),
    ClientFile(Arc<ClientFile>),
}

impl Export {
    /// An export of a disk outside any repository: it has no lease, and a prefetch does
    /// nothing.
    pub fn of_disk(name: &str, description: &str, disk: Arc<dyn Disk>) -> Export {
        Export {
            content: Content::Disk(disk),
            session: None,
            _lease: None,
            name: name.to_owned(),
            description: description.to_owned(),
            chunk_size_bytes: 1,
            cache_bytes: 0,
            poisoned: Arc::new(AtomicBool::new(false)),
        }
    }

    /// The exact name: `latest` is resolved.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// One line for people.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The disk, or the image file as a disk. Call [`Export::check`] first if an earlier
    /// call may have ended in a defect.
    pub fn disk(&self) -> &dyn Disk {
        match &self.content {
            Content::Disk(disk) => &**disk,
            Content::Image(image) => image,
            Content::ClientFile(file) => &**file,
        }
    }

    /// Changes the length of an image file, as a truncate does. Added bytes are zeroes.
    ///
    /// `ErrorKind::ReadOnly`; `ErrorKind::Unsupported` if the disk determines the size: of
    /// images only the text of a flat VMDK changes, up to 64 KiB.
    pub fn set_size_bytes(&self, size_bytes: u64) -> Result<()> {
        match &self.content {
            Content::Image(image) => image.set_size_bytes(size_bytes),
            Content::ClientFile(file) => file.set_size_bytes(size_bytes),
            Content::Disk(disk) if size_bytes == disk.size_bytes() => Ok(()),
            Content::Disk(_) => Err(Error::new(
                ErrorKind::Unsupported,
                format!("{}: a disk does not change its size", self.name),
            )),
        }
    }

    /// The files of clients in its session; `None` unless it holds a session for writing.
    pub(crate) fn client_files(&self) -> Result<Option<Arc<ClientFiles>>> {
        self.session.as_ref().map(SessionHold::files).transpose()
    }

    /// True once its session refuses writes after a failure: unflushed writes may be lost.
    pub fn has_stopped(&self) -> bool {
        self.session.as_ref().is_some_and(SessionHold::has_stopped)
    }

    /// Fails with `ErrorKind::Internal` when a call on this export, or on
    /// another export of its session, ended in a defect.
    pub fn check(&self) -> Result<()> {
        if self.poisoned.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::Internal,
                format!(
                    "{}: stopped after a defect inside Coldrise; what was flushed is safe, \
                     restart the front end",
                    self.name
                ),
            ));
        }
        Ok(())
    }

    /// Stops this export and every other export of its session permanently. Called after a
    /// defect, because the state that the defect left in memory cannot be trusted. The
    /// session is not closed cleanly either; its next opening, by a new process, recovers
    /// it from its log.
    pub fn poison(&self) {
        self.poisoned.store(true, Ordering::Relaxed);
        if let Some(session) = &self.session {
            session.stop();
        }
    }

    /// Decodes a range into the cache of decoded chunks, up to the size of the cache. A
    /// range that leaves the disk is `ErrorKind::OutOfRange`.
    pub fn prefetch(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        let end = offset_bytes.checked_add(length_bytes).filter(|&e| e <= self.disk().size_bytes());
        let Some(end) = end else {
            return Err(Error::new(
                ErrorKind::OutOfRange,
                format!("{}: a prefetch leaves the disk", self.name),
            ));
        };
        let end = end.min(offset_bytes.saturating_add(self.cache_bytes));
        let Content::Image(image) = &self.content else {
            return self.decode(self.disk(), offset_bytes..end);
        };
        for range in image.disk_ranges(offset_bytes..end) {
            self.decode(image.disk(), range)?;
        }
        Ok(())
    }

    fn decode(&self, disk: &dyn Disk, range: Range<u64>) -> Result<()> {
        let chunk = u64::from(self.chunk_size_bytes);
        // One byte is enough: a chunk is decoded as a whole.
        let mut byte = [0];
        let mut next = range.start;
        while next < range.end {
            disk.read_at(&mut byte, next)?;
            next = (next / chunk + 1) * chunk;
        }
        Ok(())
    }
}
