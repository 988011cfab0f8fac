//! The point that comes: its announcement, what has arrived of it, and the notes about it.

use std::time::Instant;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::{
    Differences, FetchSocket, IncomingContent, PartialCopy, PartialDisk, adopt_boot_trace,
};
use coldrise_store::{BackupTarget, MapRoot, PointDocument, WriteCounts, WriteOptions};

use super::disk::{OpenDisk, open_steps};
use super::fetch::{FetchedDisk, FetchedPiece, PointPieces};
use super::{NOTE_BYTES, NOTE_INTERVAL, Receiver};
use crate::remote::PartialMap;
use crate::remote::messages::{Details, broken};

/// The announced point.
pub(super) struct IncomingState {
    pub(super) partial: PartialCopy,
    /// The number of disks that were started.
    pub(super) started: usize,
    /// The first disk was started with the announcement. The source starts it otherwise if it cannot continue there.
    pub(super) is_presumed: bool,
    /// The files that were announced, for its end.
    pub(super) files: Vec<u8>,
    /// Front ends ask here. `None` if this process cannot listen.
    _socket: Option<FetchSocket>,
}

impl Receiver<'_, '_> {
    /// Prepares for a point. Returns what has arrived of each disk before.
    pub(super) fn announce(
        &mut self,
        number: u32,
        mut document: PointDocument,
        bases: &[Option<MapRoot>],
        attachment: &[u8],
    ) -> Result<Vec<Option<PartialMap>>> {
        self.incoming = None;
        self.fetches.forget();
        let details = Details::decode(attachment)?;
        let machine = self.claimed(&document.machine)?;
        let Some(made_in) = document.made_in.clone() else {
            return Err(broken("a point without its origin"));
        };
        document.machine = machine.clone();
        (document.is_protected, document.quarantine, document.files) = (false, None, None);
        for disk in &mut document.disks {
            (disk.root, disk.layers) = (MapRoot::EMPTY, Vec::new());
        }
        document.check().map_err(|error| broken(&error.full_message()))?;
        let count = document.disks.len();
        if bases.len() != count || details.differences.len() != count {
            return Err(broken("an announcement that does not describe each disk"));
        }
        let ends = details.differences.iter().map(|ranges| ranges.end_bytes());
        if ends.zip(&document.disks).any(|(end, disk)| end > disk.size_bytes) {
            return Err(broken("a difference behind the end of a disk"));
        }
        if !bases.iter().flatten().all(|base| self.is_kept(base)) {
            return Err(broken("the base disk is not in the retained point"));
        }
        self.check_absent(&machine, &document.point)?;
        let repository = self.remote.repository()?;
        let mut partial = PartialCopy {
            machine,
            made_in,
            point: document.point.clone(),
            created_at_ms: document.created_at_ms,
            disks: Vec::new(),
        };
        let known = PartialCopy::known(&repository, &partial)?.map(|known| known.disks);
        let known = known.unwrap_or_default();
        for (disk, base) in document.disks.iter().zip(bases) {
            let is_same = |known: &&PartialDisk| {
                (&known.name, known.size_bytes) == (&disk.name, disk.size_bytes)
            };
            let known = known.iter().find(is_same);
            let fresh = || {
                let fresh = PartialDisk::new(disk.name.clone(), disk.size_bytes, *base);
                // Fetched pieces belong to the disk whatever the base is.
                match known {
                    Some(PartialDisk { fetched, fetched_zeroes, .. }) => PartialDisk {
                        fetched: *fetched,
                        fetched_zeroes: fetched_zeroes.clone(),
                        ..fresh
                    },
                    None => fresh,
                }
            };
            partial
                .disks
                .push(known.filter(|known| known.base == *base).cloned().unwrap_or_else(fresh));
        }
        if !details.trace.is_empty() {
            if let Err(error) =
                adopt_boot_trace(&repository, &partial.machine, details.trace.as_bytes())
            {
                tracing::warn!(
                    "the boot trace is not used, so the machine's boot is not read ahead: {}",
                    error.full_message()
                );
            }
        }
        let differences =
            |(ranges, base): (_, &Option<MapRoot>)| Differences { base: *base, ranges };
        let differences: Vec<_> =
            details.differences.into_iter().zip(bases).map(differences).collect();
        let point = IncomingContent { document, differences, files: details.files };
        partial.save(&repository)?;
        // A process that finds the point then finds one that fetches.
        let socket = self.listen(number, &partial, &point)?;
        partial.announce(&repository, &point)?;
        partial.forget_others(&repository)?;
        self.last_note = Instant::now();
        let of = |disk: &PartialDisk| PartialMap { root: disk.root, end_bytes: disk.end_bytes };
        let answer =
            partial.disks.iter().map(|disk| (disk.end_bytes > 0).then(|| of(disk))).collect();
        let files = point.files;
        let first = partial
            .disks
            .first()
            .map(|disk| (disk.root, disk.base, disk.end_bytes, disk.size_bytes));
        let (started, is_presumed) = (0, false);
        self.incoming =
            Some(IncomingState { partial, started, is_presumed, files, _socket: socket });
        if let Some((root, base, end_bytes, size_bytes)) = first {
            self.start(if end_bytes > 0 { Some(root) } else { base }, size_bytes)?;
            self.incoming.iter_mut().for_each(|incoming| incoming.is_presumed = true);
        }
        Ok(answer)
    }

    /// Lets front ends ask for what has not arrived.
    fn listen(
        &self,
        number: u32,
        partial: &PartialCopy,
        point: &IncomingContent,
    ) -> Result<Option<FetchSocket>> {
        let repository = self.remote.repository()?;
        let disks =
            partial.disks.iter().zip(&point.differences).map(|(disk, differences)| FetchedDisk {
                size_bytes: disk.size_bytes,
                end_bytes: disk.end_bytes,
                differences: differences.ranges.clone(),
            });
        let chunk_bytes = u64::from(repository.chunk_size_bytes());
        self.fetches.begin(number, chunk_bytes, disks.collect());
        let pieces = PointPieces { fetches: self.fetches.clone(), number };
        let socket = FetchSocket::listen(&repository, partial, std::sync::Arc::new(pieces));
        if let Err(error) = &socket {
            tracing::warn!(
                "missing data cannot be fetched on demand, so machines can only read what has arrived: {}",
                error.full_message()
            );
        }
        Ok(socket.ok())
    }

    /// Makes durable what has arrived, now and then.
    pub(super) fn note_in_time(&mut self) -> Result<()> {
        if self.incoming.is_none() {
            return Ok(());
        }
        let unnoted_bytes = self.fetches.unnoted_bytes();
        let is_changed = self.disk.as_ref().is_some_and(|disk| disk.is_changed);
        let is_news = is_changed || self.has_finished || unnoted_bytes > 0;
        let is_time = is_news && self.last_note.elapsed() >= NOTE_INTERVAL;
        if !is_time && unnoted_bytes < NOTE_BYTES {
            return Ok(());
        }
        let steps = open_steps(&mut self.disk);
        let facts = |disk: &OpenDisk<'_>| {
            (disk.size_bytes, disk.chunk_bytes, disk.end_bytes, disk.index, disk.base.clone())
        };
        let open = self.disk.as_ref().map(facts);
        let (root, before) = self.note_disk()?;
        let (Some(open), Some(root)) = (open, root) else { return Ok(()) };
        let (size_bytes, chunk_bytes, end_bytes, index, base) = open;
        let target = self.remote.start_disk(Some(root), size_bytes, WriteOptions::default())?;
        self.disk = Some(OpenDisk {
            target,
            size_bytes,
            chunk_bytes,
            steps,
            end_bytes,
            is_changed: false,
            before,
            base,
            index,
        });
        Ok(())
    }

    /// Makes durable what has arrived, and gives up the open disk.
    pub(super) fn note(&mut self) -> Result<()> {
        self.note_disk().map(|_| ())
    }

    /// As [`Receiver::note`]. Returns the map and the figures of the disk that was open.
    fn note_disk(&mut self) -> Result<(Option<MapRoot>, WriteCounts)> {
        self.last_note = Instant::now();
        let open = self.disk.take();
        let Some(incoming) = &mut self.incoming else { return Ok((None, WriteCounts::default())) };
        let mut is_changed = false;
        let mut noted = (None, WriteCounts::default());
        if let Some(mut open) = open {
            let disk = open.index.and_then(|index| incoming.partial.disks.get_mut(index));
            if let Some(disk) = disk {
                open.keep_arrived()?;
                let (root, counts) = open.target.finish()?;
                noted = (Some(root), open.before + counts);
                if open.is_changed {
                    is_changed = true;
                    // The last piece of a disk may end behind it.
                    (disk.root, disk.end_bytes) = (root, open.end_bytes);
                }
            }
        }
        let fetched = self.fetches.take_unnoted();
        is_changed |= !fetched.is_empty();
        for pieces in fetched.chunk_by(|a, b| a.disk == b.disk) {
            let disk = pieces.first().and_then(|piece| incoming.partial.disks.get_mut(piece.disk));
            let Some(disk) = disk else { continue };
            store_fetched(self.remote, disk, pieces)?;
        }
        if is_changed || self.has_finished {
            incoming.partial.save(&*self.remote.repository()?)?;
            self.has_finished = false;
            for (index, disk) in incoming.partial.disks.iter().enumerate() {
                self.fetches.arrived(index, disk.end_bytes);
            }
        }
        Ok(noted)
    }

    /// Whether a map is a disk of the point that was kept last.
    pub(super) fn is_kept(&self, root: &MapRoot) -> bool {
        let disks = self.kept.iter().flat_map(|point| &point.disks);
        disks.into_iter().any(|disk| disk.root == *root && disk.layers.is_empty())
    }

    /// The content of a piece of a disk that was fetched before its turn.
    pub(super) fn fetched_piece(
        &self,
        index: Option<usize>,
        offset_bytes: u64,
        chunk: &mut [u8],
    ) -> Result<bool> {
        let (Some(incoming), Some(index)) = (&self.incoming, index) else { return Ok(false) };
        if let Some(content) = self.fetches.piece(index, offset_bytes) {
            chunk.fill(0);
            chunk[..content.len()].copy_from_slice(&content);
            return Ok(true);
        }
        let Some(disk) = incoming.partial.disks.get(index) else { return Ok(false) };
        if disk.fetched == MapRoot::EMPTY {
            return Ok(false);
        }
        let map = self.remote.repository()?.disk(disk.fetched, disk.size_bytes);
        let length = (chunk.len() as u64).min(disk.size_bytes - offset_bytes);
        let extents = map.extents(offset_bytes, length, 1)?;
        if extents.first().is_none_or(|extent| extent.kind.reads_zero()) {
            return Ok(false);
        }
        chunk.fill(0);
        match map.read_at(&mut chunk[..length as usize], offset_bytes) {
            // It is sent again.
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(false),
            read => read.map(|()| true),
        }
    }

    /// # Errors
    /// `AlreadyExists` if there is such a point.
    pub(super) fn check_absent(
        &self,
        machine: &coldrise_store::MachineName,
        point: &coldrise_store::PointName,
    ) -> Result<()> {
        match self.remote.repository()?.point(machine, point) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            found => {
                found?;
                let text = format!("{machine}/{point} is there already");
                Err(Error::new(ErrorKind::AlreadyExists, text))
            }
        }
    }
}

/// Writes fetched pieces, ascending, over those that were fetched before.
fn store_fetched(
    remote: &coldrise_session::SharedWriter<'_>,
    disk: &mut PartialDisk,
    pieces: &[FetchedPiece],
) -> Result<()> {
    let base = (disk.fetched != MapRoot::EMPTY).then_some(disk.fetched);
    let mut target = remote.start_disk(base, disk.size_bytes, WriteOptions::default())?;
    for piece in pieces {
        if piece.content.iter().all(|byte| *byte == 0) {
            let end = piece.offset_bytes + piece.content.len() as u64;
            disk.fetched_zeroes.add(piece.offset_bytes, end);
        } else {
            target.write(piece.offset_bytes, piece.content.to_vec())?;
        }
    }
    // Beyond this number, zeroes are fetched again.
    if disk.fetched_zeroes.count() > super::MAX_ZERO_RANGES {
        disk.fetched_zeroes = Default::default();
    }
    (disk.fetched, _) = target.finish()?;
    Ok(())
}
