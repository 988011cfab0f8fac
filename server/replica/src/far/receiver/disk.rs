//! The disk that is being written: its batches, from their names until they are applied.

use std::collections::{HashMap, VecDeque};

use coldrise_block::Result;
use coldrise_line::{Class, Frame};
use coldrise_store::{BackupTarget, DiskTarget, MapRoot, WriteCounts, WriteOptions};

use super::Receiver;
use crate::far::messages::{
    broken, decode_places, encode_places, send, Answer, Name, Names, APPLIED, BATCH_BYTES,
    MAX_BATCHES, WANTED, ZEROES,
};

/// A disk that is being written.
pub(super) struct OpenDisk<'a> {
    pub(super) target: Box<dyn DiskTarget + 'a>,
    pub(super) size_bytes: u64,
    pub(super) chunk_bytes: u64,
    pub(super) steps: VecDeque<Step>,
    /// Everything before it is applied, in bytes.
    pub(super) end_bytes: u64,
    /// Whether that has changed since the disk was started.
    pub(super) is_changed: bool,
    /// Of the parts that were made durable before.
    pub(super) before: WriteCounts,
}

/// What is to be done with the disk, in order.
pub(super) enum Step {
    Batch(Arriving),
    Hole { offset_bytes: u64, length_bytes: u64 },
    Finish,
}

/// A batch whose content is arriving.
pub(super) struct Arriving {
    names: Names,
    /// Of each piece; `None` until it has arrived. Empty for zeroes.
    contents: Vec<Option<Vec<u8>>>,
    missing: usize,
}

impl Receiver<'_, '_> {
    /// Begins to write a disk, over a base or over what has arrived of it.
    pub(super) fn start(&mut self, base: Option<MapRoot>, size_bytes: u64) -> Result<()> {
        let is_kept = |root: &MapRoot| {
            let disks = self.kept.iter().flat_map(|point| &point.disks);
            disks.into_iter().any(|disk| disk.root == *root && disk.layers.is_empty())
        };
        let begun = self.begun.as_ref().and_then(|begun| begun.disks.last());
        let begun = begun.filter(|disk| disk.end_bytes > 0 && disk.size_bytes == size_bytes);
        let is_begun = begun.is_some_and(|disk| base == Some(disk.root));
        if !is_begun && base.as_ref().is_some_and(|base| !is_kept(base)) {
            return Err(broken("the base is no disk of the point that was kept"));
        }
        self.disk = None;
        let target = self.far.start_disk(base, size_bytes, WriteOptions::default())?;
        let chunk_bytes = u64::from(self.far.repository()?.chunk_size_bytes());
        self.disk = Some(OpenDisk {
            target,
            size_bytes,
            chunk_bytes,
            steps: VecDeque::new(),
            end_bytes: begun.filter(|_| is_begun).map_or(0, |disk| disk.end_bytes),
            is_changed: false,
            before: WriteCounts::default(),
        });
        Ok(())
    }

    /// What still comes for a disk that was given up is passed over.
    pub(super) fn step(&mut self, step: Step) -> Result<()> {
        if let Some(disk) = &mut self.disk {
            if disk.steps.len() > 2 * MAX_BATCHES {
                return Err(broken("too much at once"));
            }
            disk.steps.push_back(step);
        }
        Ok(())
    }

    pub(super) fn take_names(&mut self, body: &[u8]) -> Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let (chunk_bytes, size_bytes) = (disk.chunk_bytes, disk.size_bytes);
        let names = Names::decode(body, chunk_bytes)?;
        if names.offsets.iter().any(|offset| *offset >= size_bytes) {
            return Err(broken("a piece behind the end of the disk"));
        }
        let repository = self.far.repository()?;
        let mut contents: Vec<Option<Vec<u8>>> = Vec::with_capacity(names.names.len());
        let mut wanted = Vec::new();
        // The first of equal pieces brings the content for all.
        let mut first = HashMap::<Name, usize>::new();
        for (place, name) in names.names.iter().enumerate() {
            if *name == ZEROES {
                contents.push(Some(Vec::new()));
                continue;
            }
            if first.contains_key(name) {
                // Its own content is neither wanted nor used.
                contents.push(Some(Vec::new()));
                continue;
            }
            first.insert(*name, place);
            let mut chunk = vec![0; chunk_bytes as usize];
            let is_there = repository.read_named(name, self.allowed.as_ref(), &mut chunk)?;
            contents.push(is_there.then_some(chunk));
            if !is_there {
                wanted.push(u16::try_from(place).map_err(|_| broken("too many names"))?);
            }
        }
        let missing = wanted.len();
        if missing > 0 {
            let body = encode_places(names.number, &wanted);
            self.line.send(Class::Control, Frame { stream: 0, kind: WANTED, body })?;
        }
        self.step(Step::Batch(Arriving { names, contents, missing }))
    }

    pub(super) fn take_content(&mut self, body: &[u8]) -> Result<()> {
        let (number, places, packed) = decode_places(body)?;
        let Some(disk) = &mut self.disk else { return Ok(()) };
        let mut batches = disk.steps.iter_mut().filter_map(|step| match step {
            Step::Batch(batch) => Some(batch),
            Step::Hole { .. } | Step::Finish => None,
        });
        // One of a disk that was given up is unknown.
        let Some(batch) = batches.find(|batch| batch.names.number == number) else {
            return Ok(());
        };
        let chunk_bytes = disk.chunk_bytes as usize;
        let length = places.len() * chunk_bytes;
        if length > BATCH_BYTES {
            return Err(broken("too much content in a frame"));
        }
        let plain = zstd::bulk::decompress(packed, length)
            .map_err(|_| broken("content that cannot be decompressed"))?;
        if plain.len() != length {
            return Err(broken("content of another length"));
        }
        for (place, content) in places.iter().zip(plain.chunks_exact(chunk_bytes)) {
            let place = usize::from(*place);
            let name = batch.names.names.get(place).ok_or_else(|| broken("no such piece"))?;
            if blake3::hash(content).as_bytes() != name {
                return Err(broken("content that does not have its name"));
            }
            if batch.contents[place].replace(content.to_vec()).is_some() {
                return Err(broken("content that is there already"));
            }
            batch.missing -= 1;
        }
        Ok(())
    }

    /// Writes what is complete, in order.
    pub(super) fn apply(&mut self) -> Result<()> {
        let Some(disk) = &mut self.disk else { return Ok(()) };
        while let Some(step) = disk.steps.front() {
            if matches!(step, Step::Batch(batch) if batch.missing > 0) {
                return Ok(());
            }
            match disk.steps.pop_front() {
                Some(Step::Batch(batch)) => {
                    let number = batch.names.number;
                    disk.arrived(
                        batch.names.offsets.last().map_or(0, |last| last + disk.chunk_bytes),
                    );
                    write(disk, batch, Pieces::All)?;
                    let body = encode_places(number, &[]);
                    self.line.send(Class::Control, Frame { stream: 0, kind: APPLIED, body })?;
                }
                Some(Step::Hole { offset_bytes, length_bytes }) => {
                    disk.target.write_hole(offset_bytes, length_bytes)?;
                    disk.arrived(offset_bytes.saturating_add(length_bytes));
                }
                Some(Step::Finish) => {
                    let Some(disk) = self.disk.take() else { return Ok(()) };
                    let (root, counts) = disk.target.finish()?;
                    let counts = disk.before + counts;
                    self.finished.push((root, disk.size_bytes));
                    if let Some(begun) =
                        self.begun.as_mut().and_then(|begun| begun.disks.last_mut())
                    {
                        (begun.root, begun.end_bytes) = (root, disk.size_bytes);
                    }
                    return send(self.line, &Answer::Finished { root, counts }, &[]);
                }
                None => return Ok(()),
            }
        }
        Ok(())
    }
}

/// Takes the steps that are still to be done.
pub(super) fn open_steps(disk: &mut Option<OpenDisk<'_>>) -> VecDeque<Step> {
    disk.as_mut().map(|disk| std::mem::take(&mut disk.steps)).unwrap_or_default()
}

impl OpenDisk<'_> {
    /// Writes what has arrived of batches that are not complete. All of it lies behind `end_bytes`: a copy that goes on
    /// there names it again, and finds that it is there.
    pub(super) fn keep_arrived(&mut self) -> Result<()> {
        for step in std::mem::take(&mut self.steps) {
            if let Step::Batch(batch) = step {
                self.is_changed |= batch.contents.iter().flatten().any(|piece| !piece.is_empty());
                write(self, batch, Pieces::Arrived)?;
            }
        }
        Ok(())
    }

    /// Everything before `end_bytes` is applied. A part of a chunk comes again.
    fn arrived(&mut self, end_bytes: u64) {
        let end_bytes = match end_bytes >= self.size_bytes {
            true => self.size_bytes,
            false => end_bytes / self.chunk_bytes * self.chunk_bytes,
        };
        (self.end_bytes, self.is_changed) = (end_bytes.max(self.end_bytes), true);
    }
}

/// Which pieces of a batch are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pieces {
    All,
    Arrived,
}

/// Writes a batch: neighbours together.
fn write(disk: &mut OpenDisk<'_>, batch: Arriving, pieces: Pieces) -> Result<()> {
    let first: HashMap<Name, usize> =
        batch.names.names.iter().enumerate().rev().map(|(place, name)| (*name, place)).collect();
    let mut run: Option<(u64, Vec<u8>)> = None;
    for (place, offset) in batch.names.offsets.iter().enumerate() {
        let name = batch.names.names[place];
        let length = disk.chunk_bytes.min(disk.size_bytes - offset) as usize;
        let source = first.get(&name).and_then(|first| batch.contents[*first].as_ref());
        let source = match source {
            Some(source) => source,
            None if pieces == Pieces::Arrived => continue,
            None => return Err(broken("content is missing")),
        };
        let is_next =
            run.as_ref().is_some_and(|(start, bytes)| start + bytes.len() as u64 == *offset);
        if !is_next {
            if let Some((start, bytes)) = run.take() {
                disk.target.write(start, bytes)?;
            }
            run = Some((*offset, disk.target.buffer()));
        }
        let Some((_, bytes)) = &mut run else { continue };
        match source.is_empty() {
            true => bytes.resize(bytes.len() + length, 0),
            false => bytes.extend_from_slice(&source[..length]),
        }
    }
    match run {
        Some((start, bytes)) => disk.target.write(start, bytes),
        None => Ok(()),
    }
}
