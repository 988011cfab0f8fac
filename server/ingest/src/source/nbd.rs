//! Exports of NBD servers, including local children that serve foreign images.

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};

use coldrise_block::{Context, Error, ErrorKind, Extent, ExtentKind, Result, push_extent};

use super::{DirtyRun, Reader, Source};
use crate::libnbd::{BASE_ALLOCATION, Connection, Endpoint, ExportFacts, StatusRun};

/// Bytes of one read: two requests of the usual limit, both in flight.
const READ_BYTES: u64 = 2 << 20;
/// Connections that read, if the server supports several per export.
const READERS: usize = 2;
/// `base:allocation`: reads as zeroes.
const FLAG_ZERO: u32 = 2;
/// `base:allocation`: nothing is allocated.
const FLAG_HOLE: u32 = 1;
/// `qemu:dirty-bitmap:*`: written since the bitmap was started.
const FLAG_DIRTY: u32 = 1;

/// What the server's status of ranges (`base:allocation`) is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// It belongs to the content: zeroes and holes are not read.
    Believed,
    /// It is that of a later time than the content, as of QEMU's snapshot-access: everything is read, and in whole replies,
    /// because the server takes the zeroes of others from the status, too.
    Late,
}

/// An export.
pub(crate) struct NbdSource<'c> {
    /// The connection for queries, and for reads if the server supports only one.
    control: Mutex<Connection<'c>>,
    endpoint: Endpoint,
    /// The server's name for messages.
    name: String,
    facts: ExportFacts,
    status: Status,
    has_allocation: bool,
    bitmap_context: Option<String>,
    cancel: &'c AtomicBool,
}

impl<'c> NbdSource<'c> {
    /// Connects to the server that `uri` names.
    pub(crate) fn open_uri(
        uri: &str,
        bitmap: Option<&str>,
        cancel: &'c AtomicBool,
    ) -> Result<NbdSource<'c>> {
        let endpoint = Endpoint::Uri(uri.to_string());
        NbdSource::open(endpoint, uri.to_string(), bitmap, Status::Believed, cancel)
    }

    /// Connects to `endpoint`; messages call it `name`.
    pub(crate) fn open(
        endpoint: Endpoint,
        name: String,
        bitmap: Option<&str>,
        status: Status,
        cancel: &'c AtomicBool,
    ) -> Result<NbdSource<'c>> {
        let bitmap_context = bitmap.map(|bitmap| format!("qemu:dirty-bitmap:{bitmap}"));
        let mut contexts = vec![BASE_ALLOCATION];
        contexts.extend(bitmap_context.as_deref());
        let mut control = Connection::open(&endpoint, &contexts, cancel)?;
        if status == Status::Late {
            control.read_whole()?;
        }
        if let (Some(bitmap), Some(context)) = (bitmap, &bitmap_context) {
            if !control.has_context(context)? {
                return Err(Error::new(
                    ErrorKind::NotFound,
                    format!(
                        "the server exports no dirty bitmap '{bitmap}': export it with \
                         qemu-nbd --bitmap={bitmap}, or in QEMU with block-export-add and \
                         \"bitmaps\": [\"{bitmap}\"]; or leave out --bitmap for a full read"
                    ),
                ));
            }
        }
        let facts = *control.facts();
        let has_allocation = status == Status::Believed && control.has_context(BASE_ALLOCATION)?;
        Ok(NbdSource {
            control: Mutex::new(control),
            endpoint,
            name,
            facts,
            status,
            has_allocation,
            bitmap_context,
            cancel,
        })
    }

    /// A thread that panicked with the connection left it closed or intact.
    fn control(&self) -> MutexGuard<'_, Connection<'c>> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The export's properties.
    pub(crate) fn facts(&self) -> &ExportFacts {
        &self.facts
    }

    /// True if several connections are possible. A server that does not announce this may
    /// leave a second client waiting forever.
    fn is_shared(&self) -> bool {
        self.facts.can_multi_conn
    }

    /// A connection for one thread, or the source's own if the server supports only one.
    pub(crate) fn connect(&self) -> Result<NbdReader<'_, 'c>> {
        let connection = if self.is_shared() {
            let mut connection =
                Connection::open(&self.endpoint, &[], self.cancel).context(|| self.name.clone())?;
            if self.status == Status::Late {
                connection.read_whole()?;
            }
            if connection.facts().size_bytes != self.facts.size_bytes {
                return Err(Error::new(
                    ErrorKind::Incomplete,
                    format!("{} changed its size while it was read", self.name),
                ));
            }
            Some(connection)
        } else {
            None
        };
        Ok(NbdReader { source: self, connection })
    }

    /// Makes all writes durable. Call it when no other connection writes.
    pub(crate) fn flush(&self) -> Result<()> {
        if self.facts.can_flush {
            self.control().flush().context(|| self.name.clone())?;
        }
        Ok(())
    }

    fn status(&self, context: &str, offset: u64, length: u64) -> Result<Vec<StatusRun>> {
        self.control()
            .status(context, offset, length)
            .context(|| format!("{} at offset {offset}", self.name))
    }
}

impl Source for NbdSource<'_> {
    fn size_bytes(&self) -> u64 {
        self.facts.size_bytes
    }

    fn alignment_bytes(&self) -> u64 {
        self.facts.minimum_block_bytes
    }

    fn useful_readers(&self) -> usize {
        if self.is_shared() { READERS } else { 1 }
    }

    fn useful_read_bytes(&self) -> u64 {
        READ_BYTES
    }

    fn reader(&self) -> Result<Box<dyn Reader + '_>> {
        Ok(Box::new(self.connect()?))
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<Extent>> {
        if !self.has_allocation {
            return Ok(vec![Extent { offset_bytes, length_bytes, kind: ExtentKind::Stored }]);
        }
        let mut at = offset_bytes;
        let mut extents = Vec::new();
        for run in self.status(BASE_ALLOCATION, offset_bytes, length_bytes)? {
            let kind = match (run.flags & FLAG_ZERO != 0, run.flags & FLAG_HOLE != 0) {
                (true, true) => ExtentKind::Hole,
                (true, false) => ExtentKind::Zero,
                // A hole that is not known to read as zeroes must be read.
                (false, _) => ExtentKind::Stored,
            };
            let next = Extent { offset_bytes: at, length_bytes: run.length_bytes, kind };
            push_extent(&mut extents, next);
            at += run.length_bytes;
        }
        Ok(extents)
    }

    fn dirty_runs(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<DirtyRun>> {
        let Some(context) = &self.bitmap_context else {
            return Err(Error::new(ErrorKind::Internal, "no bitmap was asked for"));
        };
        let mut at = offset_bytes;
        let runs = self.status(context, offset_bytes, length_bytes)?;
        let dirty_run = |run: StatusRun| {
            let from = at;
            at += run.length_bytes;
            let is_dirty = run.flags & FLAG_DIRTY != 0;
            DirtyRun { offset_bytes: from, length_bytes: run.length_bytes, is_dirty }
        };
        Ok(runs.into_iter().map(dirty_run).collect())
    }

    fn check_after_reading(&self) -> Result<Option<String>> {
        Ok(None)
    }
}

/// A connection for one thread.
pub(crate) struct NbdReader<'s, 'c> {
    source: &'s NbdSource<'c>,
    /// `None`: reads through the source's own connection.
    connection: Option<Connection<'c>>,
}

impl<'c> NbdReader<'_, 'c> {
    /// Runs `call` on the connection; errors name the server and the offset.
    pub(crate) fn with_connection<T>(
        &mut self,
        offset_bytes: u64,
        call: impl FnOnce(&mut Connection<'c>) -> Result<T>,
    ) -> Result<T> {
        match &mut self.connection {
            Some(connection) => call(connection),
            None => call(&mut self.source.control()),
        }
        .context(|| format!("{} at offset {offset_bytes}", self.source.name))
    }

    /// The export's properties.
    pub(crate) fn facts(&self) -> &ExportFacts {
        &self.source.facts
    }
}

impl Reader for NbdReader<'_, '_> {
    fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.with_connection(offset_bytes, |connection| connection.read_at(buffer, offset_bytes))
    }
}
