//! A disk of a point that is still on its way: it lies below a session's layers until the point is complete.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, ReadContext, ReadSource, Result, Waiting,
    check_range, push_extent, would_wait,
};
use coldrise_store::{DiskDocument, MapRoot, Repository};
use parking_lot::{Mutex, RwLock};

use super::arrival::arrived;
use super::client::{FetchClient, Fetched};
use super::partial::{PartialCopy, PartialDisk};
use super::ranges::ByteRanges;
use super::socket::MAX_FETCH_BYTES;
use crate::disks::point_disk::{base_disk, sealed_layers};
use crate::locks::lease::{Lease, LeaseHold, Served};
use crate::session_folder::document::{SessionDisk, SessionDocument};

/// Pause between two attempts to reach the receiver.
const PAUSE: Duration = Duration::from_millis(100);

/// Reads what is here from the noted maps, and the rest through the receiver's socket. Reading alone moves it to newer
/// notes, and at last to the complete point.
pub(super) struct IncomingDisk {
    repository: Arc<Repository>,
    session: SessionDocument,
    described: SessionDisk,
    /// Its place in the point.
    index: usize,
    chunk_bytes: u64,
    lease: Arc<Lease>,
    client: FetchClient,
    note: PathBuf,
    view: RwLock<Arc<View>>,
    moving: Mutex<()>,
}

/// The content that is here.
struct View {
    /// The stamp of the note.
    stamp: Option<Stamp>,
    content: Content,
    _hold: Option<LeaseHold>,
}

enum Content {
    Part(Part),
    /// The point's disk.
    Whole(Arc<dyn Disk>),
    /// There is no note.
    Nothing,
}

struct Part {
    map: Arc<dyn Disk>,
    end_bytes: u64,
    /// The ranges that may differ from the base, and so from the map behind `end_bytes`; `None`: all.
    differences: Option<ByteRanges>,
    fetched: Option<Arc<dyn Disk>>,
    fetched_zeroes: ByteRanges,
}

/// Tells two notes apart: each is a file of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp(u64, i64, i64);

enum Place<'a> {
    In(&'a Arc<dyn Disk>),
    Zeroes,
    Missing,
}

impl IncomingDisk {
    /// # Errors
    /// Errors of the drive; those of a lease.
    pub(super) fn open(
        repository: &Arc<Repository>,
        session: &SessionDocument,
        described: &SessionDisk,
    ) -> Result<IncomingDisk> {
        let index = session.disks.iter().position(|disk| disk.name == described.name);
        let note = PartialCopy::path_of_session(repository, session)
            .ok_or_else(|| Error::new(ErrorKind::Internal, "the session's point is complete"))?;
        let disk = IncomingDisk {
            repository: Arc::clone(repository),
            session: session.clone(),
            described: described.clone(),
            index: index.unwrap_or_default(),
            chunk_bytes: u64::from(repository.chunk_size_bytes()),
            lease: Lease::take(repository, "coming")?,
            client: FetchClient::new(repository, &note),
            note,
            view: RwLock::new(Arc::new(View {
                stamp: None,
                content: Content::Nothing,
                _hold: None,
            })),
            moving: Mutex::default(),
        };
        disk.look_again()?;
        Ok(disk)
    }

    /// Moves to the present note, or to the complete point. Returns true if that is another one.
    fn look_again(&self) -> Result<bool> {
        let before = Arc::clone(&self.view.read());
        if matches!(before.content, Content::Whole(_)) {
            return Ok(false);
        }
        if before.stamp.is_some() && before.stamp == self.stamp() {
            return Ok(false);
        }
        let _one = self.moving.lock();
        if !Arc::ptr_eq(&before, &self.view.read()) {
            return Ok(true);
        }
        let next = loop {
            let stamp = self.stamp();
            let Some(partial) = PartialCopy::of_session(&self.repository, &self.session)? else {
                // Its point is in the catalog before the note ends.
                match self.whole()? {
                    Some(view) => break view,
                    None => return Ok(false),
                }
            };
            let Some(disk) = partial.disks.iter().find(|disk| disk.name == self.described.name)
            else {
                return Ok(false);
            };
            let hold = self.hold([disk.root, disk.fetched])?;
            // A gc that did not see the lease has seen this note.
            if stamp != self.stamp() {
                continue;
            }
            self.repository.catch_up()?;
            let content = Content::Part(self.part(&partial, disk)?);
            break View { stamp, content, _hold: Some(hold) };
        };
        *self.view.write() = Arc::new(next);
        Ok(true)
    }

    fn stamp(&self) -> Option<Stamp> {
        let file = self.note.metadata().ok()?;
        Some(Stamp(file.ino(), file.mtime(), file.mtime_nsec()))
    }

    fn hold<const N: usize>(&self, roots: [MapRoot; N]) -> Result<LeaseHold> {
        let served = roots.into_iter().map(|root| Served {
            name: format!("live/{}/{}", self.session.name, self.described.name),
            disk: Some(DiskDocument {
                name: self.described.name.clone(),
                size_bytes: self.described.size_bytes,
                root,
                layers: Vec::new(),
            }),
        });
        self.lease.hold_all(served.collect())
    }

    fn part(&self, partial: &PartialCopy, disk: &PartialDisk) -> Result<Part> {
        let size_bytes = self.described.size_bytes;
        let announced = partial.announced(&self.repository)?;
        let differences = announced.and_then(|point| point.differences_of(partial, disk).cloned());
        let map = |root| base_disk(&self.repository, root, size_bytes);
        Ok(Part {
            map: map(disk.root),
            end_bytes: disk.end_bytes,
            differences,
            fetched: (disk.fetched != MapRoot::EMPTY).then(|| map(disk.fetched)),
            fetched_zeroes: disk.fetched_zeroes.clone(),
        })
    }

    /// The complete point's disk.
    fn whole(&self) -> Result<Option<View>> {
        loop {
            let Some(point) = arrived(&self.repository, &self.session)? else { return Ok(None) };
            let Some(disk) = point.disk(&self.described.name) else { return Ok(None) };
            let hold = self.hold([disk.root])?;
            // A fold may have moved it meanwhile.
            if arrived(&self.repository, &self.session)?.as_ref() != Some(&point) {
                continue;
            }
            let base = base_disk(&self.repository, disk.root, disk.size_bytes);
            if !sealed_layers(&self.repository, &disk.layers, disk.size_bytes)?.is_empty() {
                let text = format!("{}/{} has layers", point.machine, point.point);
                return Err(Error::new(ErrorKind::Internal, text));
            }
            return Ok(Some(View {
                stamp: None,
                content: Content::Whole(base),
                _hold: Some(hold),
            }));
        }
    }

    /// Fetches the beginning of a range that is not here. Returns the number of bytes; 0: look again where they are.
    /// `away` is when the request began to wait for a process that fetches them.
    fn fetch(&self, buffer: &mut [u8], at: u64, away: &mut Option<Instant>) -> Result<usize> {
        if self.look_again()? {
            return Ok(0);
        }
        let start = at - at % self.chunk_bytes;
        let end = (at + buffer.len() as u64).next_multiple_of(self.chunk_bytes);
        let most = MAX_FETCH_BYTES.max(self.chunk_bytes);
        let end = end.min(start + most).min(self.described.size_bytes);
        match self.client.fetch(self.index, start, end - start)? {
            Fetched::Content(content) => {
                let length = ((end - at) as usize).min(buffer.len());
                let skipped = (at - start) as usize;
                buffer[..length].copy_from_slice(&content[skipped..skipped + length]);
                *away = None;
                Ok(length)
            }
            // The point may be complete, or noted meanwhile.
            Fetched::Away if self.look_again()? => Ok(0),
            Fetched::Away if self.client.is_patient(*away.get_or_insert_with(Instant::now)) => {
                std::thread::sleep(PAUSE);
                Ok(0)
            }
            Fetched::Away => Err(self.away(at)),
        }
    }

    fn away(&self, at: u64) -> Error {
        let SessionDocument { name, machine, point, .. } = &self.session;
        let text = format!(
            "session {name}, disk {}: the bytes at {at} have not arrived, and nothing fetches them: no copy of \
             {machine}/{point} is running, or the other site cannot be reached",
            self.described.name
        );
        Error::new(ErrorKind::Io, text)
    }
}

impl View {
    /// Where the bytes at `at` are, and up to where that holds.
    fn locate(&self, at: u64, end: u64, waiting: Waiting) -> Result<(Place<'_>, u64)> {
        let part = match &self.content {
            Content::Whole(disk) => return Ok((Place::In(disk), end)),
            Content::Nothing => return Ok((Place::Missing, end)),
            Content::Part(part) => part,
        };
        if at < part.end_bytes {
            return Ok((Place::In(&part.map), end.min(part.end_bytes)));
        }
        let (differs, end) = match &part.differences {
            Some(ranges) => ranges.at(at, end),
            None => (true, end),
        };
        if !differs {
            return Ok((Place::In(&part.map), end));
        }
        let (is_zero, end) = part.fetched_zeroes.at(at, end);
        if is_zero {
            return Ok((Place::Zeroes, end));
        }
        let Some(fetched) = &part.fetched else { return Ok((Place::Missing, end)) };
        if waiting == Waiting::Refused {
            // Pages of its map may be on the drive only.
            return Err(would_wait());
        }
        let extents = fetched.extents(at, end - at, 1)?;
        let Some(extent) = extents.first() else { return Ok((Place::Missing, end)) };
        let end = end.min(extent.end_behind(at)?);
        match extent.kind {
            ExtentKind::Stored => Ok((Place::In(fetched), end)),
            _ => Ok((Place::Missing, end)),
        }
    }
}

impl Disk for IncomingDisk {
    fn size_bytes(&self) -> u64 {
        self.described.size_bytes
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        check_range(self.size_bytes(), offset_bytes, buffer.len() as u64)?;
        let end = offset_bytes + buffer.len() as u64;
        let (mut at, mut away) = (offset_bytes, None);
        while at < end {
            let view = Arc::clone(&self.view.read());
            let done = (at - offset_bytes) as usize;
            let (place, stop) = view.locate(at, end, context.waiting())?;
            let piece = &mut buffer[done..(stop - offset_bytes) as usize];
            let length = piece.len();
            match place {
                Place::In(disk) => disk.read(piece, at, context)?,
                Place::Zeroes => {
                    piece.fill(0);
                    context.add(ReadSource::Zero, at, length as u64);
                }
                Place::Missing => {
                    context.begin_wait()?;
                    let length = self.fetch(piece, at, &mut away)?;
                    context.add(ReadSource::Backup, at, length as u64);
                    at += length as u64;
                    continue;
                }
            }
            at = stop;
        }
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        let view = Arc::clone(&self.view.read());
        let (mut at, end) = (offset_bytes, offset_bytes + length_bytes);
        let mut extents = Vec::new();
        while at < end && extents.len() < limit.max(1) {
            let (place, stop) = view.locate(at, end, Waiting::Allowed)?;
            let kind = match place {
                Place::In(disk) => {
                    for extent in disk.extents(at, stop - at, limit)? {
                        at = extent.end_behind(at)?;
                        push_extent(&mut extents, extent);
                    }
                    continue;
                }
                Place::Zeroes => ExtentKind::Zero,
                Place::Missing => ExtentKind::Stored,
            };
            push_extent(&mut extents, Extent { offset_bytes: at, length_bytes: stop - at, kind });
            at = stop;
        }
        Ok(extents)
    }
}
