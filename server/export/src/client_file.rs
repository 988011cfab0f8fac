//! A client's file, opened for reading.

use crate::open_sessions::OpenSessions;
use coldrise_block::{Disk, Extent, ReadContext, Result, check_range};
use coldrise_session::{ClientFilesReader, FileId, SessionDocument};
use coldrise_store::SessionName;
use parking_lot::Mutex;
use std::sync::Arc;

/// If this process writes the session, it shows what this process has written; otherwise it
/// shows what is stable. It keeps no other process from writing or ending the session.
pub(crate) struct ReadClientFile {
    sessions: Arc<OpenSessions>,
    session: SessionName,
    created_at_ms: u64,
    id: FileId,
    reader: Arc<ClientFilesReader>,
    /// Opened at the first use.
    stable: Mutex<Option<Arc<dyn Disk>>>,
}

impl ReadClientFile {
    pub(crate) fn open(
        sessions: &Arc<OpenSessions>,
        session: &SessionDocument,
        id: FileId,
        reader: Arc<ClientFilesReader>,
    ) -> Result<ReadClientFile> {
        let file = ReadClientFile {
            sessions: Arc::clone(sessions),
            session: session.name.clone(),
            created_at_ms: session.created_at_ms,
            id,
            reader,
            stable: Mutex::new(None),
        };
        file.now()?;
        Ok(file)
    }

    fn now(&self) -> Result<Arc<dyn Disk>> {
        let here = self.sessions.files(&self.session);
        let here = here.filter(|files| files.session_created_at_ms() == self.created_at_ms);
        if let Some(files) = here {
            return files.file(self.id).map(|file| file as Arc<dyn Disk>);
        }
        let mut stable = self.stable.lock();
        if let Some(file) = &*stable {
            return Ok(Arc::clone(file));
        }
        let file = self.reader.file(self.id)?;
        *stable = Some(Arc::clone(&file));
        Ok(file)
    }
}

impl Disk for ReadClientFile {
    fn size_bytes(&self) -> u64 {
        // The next reader gets the error.
        self.now().map_or(1, |file| file.size_bytes())
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        context.begin_wait()?;
        self.now()?.read(buffer, offset_bytes, context)
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        self.now()?.extents(offset_bytes, length_bytes, limit)
    }
}

/// Stands in for a disk if the caller only holds the session.
pub(crate) struct NoContent;

impl Disk for NoContent {
    fn size_bytes(&self) -> u64 {
        0
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
        check_range(0, offset_bytes, buffer.len() as u64)
    }

    fn extents(&self, _offset: u64, _length: u64, _limit: usize) -> Result<Vec<Extent>> {
        Ok(Vec::new())
    }
}
