//! One disk on its way to the holder of the writer, from one holder to the next.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{DiskTarget, DiskWriter, MapRoot, WriteCounts, WriteOptions};

use super::link::{Broken, Link};
use super::{Role, SharedWriter};
use crate::sockets::writer_messages::MAX_WRITE_BYTES;

/// Number of buffers kept for reuse.
const KEPT_BUFFERS: usize = 8;

pub(super) struct SharedDisk<'a> {
    pub(super) shared: &'a SharedWriter<'a>,
    pub(super) size_bytes: u64,
    pub(super) options: WriteOptions,
    /// The map below the disk. After a move it is the map with which the previous holder ended.
    pub(super) base: Option<MapRoot>,
    /// The sum of the previous holders' counts.
    pub(super) before: WriteCounts,
    pub(super) place: Option<Place>,
    pub(super) buffers: Vec<Vec<u8>>,
}

/// The holder that stores the disk.
pub(super) enum Place {
    Here(DiskWriter),
    There(Arc<Link>),
}

impl SharedDisk<'_> {
    /// Runs an operation where the disk is stored. If the holder changes, runs it again at the next
    /// one.
    pub(super) fn store<T>(
        &mut self,
        mut here: impl FnMut(&mut DiskWriter) -> Result<T>,
        mut there: impl FnMut(&Link, &AtomicBool) -> std::result::Result<T, Broken>,
    ) -> Result<T> {
        loop {
            if self.place.is_none() {
                self.start()?;
            }
            match &mut self.place {
                Some(Place::Here(disk)) => return here(disk),
                Some(Place::There(link)) => match there(link, self.shared.cancel) {
                    Ok(done) => return Ok(done),
                    Err(broken) => self.take_over(broken).map(|_| ())?,
                },
                None => {}
            }
        }
    }

    fn start(&mut self) -> Result<()> {
        match self.shared.role()? {
            Role::Host(hosting) => {
                let disk = hosting.writer.disk_writer(self.base, self.size_bytes, self.options)?;
                self.place = Some(Place::Here(disk));
            }
            Role::Guest(link) => {
                let (threads, cancel) = (self.options.threads, self.shared.cancel);
                match link.start(self.base, self.size_bytes, threads, cancel) {
                    Ok(()) => self.place = Some(Place::There(link)),
                    Err(broken) => self.take_over(broken).map(|_| ())?,
                }
            }
        }
        Ok(())
    }

    /// Takes over the previous holder's map and counts. Returns true if there were any.
    fn take_over(&mut self, broken: Broken) -> Result<bool> {
        let finished = self.shared.moved(broken)?;
        self.place = None;
        let Some((root, counts)) = finished else { return Ok(false) };
        self.base = Some(root);
        self.before = self.before + counts;
        Ok(true)
    }
}

impl DiskTarget for SharedDisk<'_> {
    fn buffer(&mut self) -> Vec<u8> {
        match &mut self.place {
            Some(Place::Here(disk)) => disk.buffer(),
            _ => self.buffers.pop().unwrap_or_default(),
        }
    }

    fn write(&mut self, offset_bytes: u64, bytes: Vec<u8>) -> Result<()> {
        if bytes.len() as u64 > MAX_WRITE_BYTES {
            return Err(Error::new(ErrorKind::Internal, "a write is too long to be sent"));
        }
        // A local write takes the bytes, a remote write borrows them.
        let bytes = Cell::new(bytes);
        self.store(
            |disk| disk.write(offset_bytes, bytes.take()),
            |link, cancel| {
                let sent = bytes.take();
                let done = link.write(offset_bytes, &sent, cancel);
                bytes.set(sent);
                done
            },
        )?;
        let mut buffer = bytes.into_inner();
        if buffer.capacity() > 0 && self.buffers.len() < KEPT_BUFFERS {
            buffer.clear();
            self.buffers.push(buffer);
        }
        Ok(())
    }

    fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.store(
            |disk| disk.write_hole(offset_bytes, length_bytes),
            |link, cancel| link.write_hole(offset_bytes, length_bytes, cancel),
        )
    }

    fn counts(&self) -> WriteCounts {
        match &self.place {
            Some(Place::Here(disk)) => self.before + disk.counts(),
            Some(Place::There(link)) => self.before + link.counts(),
            None => self.before,
        }
    }

    fn finish(mut self: Box<Self>) -> Result<(MapRoot, WriteCounts)> {
        loop {
            let finished = match self.place.take() {
                None => {
                    self.start()?;
                    continue;
                }
                Some(Place::Here(disk)) => disk.finish()?,
                Some(Place::There(link)) => match link.finish(self.shared.cancel) {
                    Ok(finished) => finished,
                    // All bytes were sent: that holder's map is the whole disk.
                    Err(broken) => {
                        if self.take_over(broken)? {
                            (self.base.unwrap_or(MapRoot::EMPTY), WriteCounts::default())
                        } else {
                            continue;
                        }
                    }
                },
            };
            return Ok((finished.0, self.before + finished.1));
        }
    }
}

impl Drop for SharedDisk<'_> {
    fn drop(&mut self) {
        // A host cancels a disk when its guest disconnects.
        if let Some(Place::There(_)) = self.place.take() {
            *self.shared.role.lock() = None;
        }
    }
}
