//! The disk that is being written: its batches, from their names until they are applied.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use coldrise_block::{Disk, ErrorKind, Result};
use coldrise_line::{Class, Frame};
use coldrise_session::open_point_disk;
use coldrise_store::{BackupTarget, DiskTarget, MapRoot, WriteCounts, WriteOptions};

use super::Receiver;
use crate::remote::content::add_base_piece;
use crate::remote::messages::{
    APPLIED, Answer, MAX_BATCHES, Name, Names, WANTED, WHOLE, ZEROES, broken, encode_places, send,
};
use crate::remote::unpack::{Bytes, Content, apply_delta};

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
    /// The counts of the parts that were made durable before.
    pub(super) before: WriteCounts,
    /// The base as the source knows it: deltas are made with it.
    pub(super) base: Option<Arc<dyn Disk>>,
    /// Its place in the announced point.
    pub(super) index: Option<usize>,
}

/// The steps for the disk, in order.
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
    /// Places that were asked for once more, because a delta could not be used.
    whole: HashSet<u16>,
}

impl Receiver<'_, '_> {
    /// Begins to write a disk, over a base or over what has arrived of it.
    pub(super) fn start(&mut self, base: Option<MapRoot>, size_bytes: u64) -> Result<()> {
        let is_open = self.disk.is_some();
        let index = self.incoming.as_mut().map(|incoming| {
            if std::mem::take(&mut incoming.is_presumed) && is_open {
                incoming.started = 0;
            }
            incoming.started += 1;
            incoming.started - 1
        });
        let incoming = self.incoming.as_ref().zip(index);
        let partial = incoming.and_then(|(incoming, index)| incoming.partial.disks.get(index));
        if index.is_some() && partial.is_none_or(|disk| disk.size_bytes != size_bytes) {
            return Err(broken("a disk that was not announced"));
        }
        let partial = partial.filter(|disk| disk.end_bytes > 0);
        let is_partial = partial.is_some_and(|disk| base == Some(disk.root));
        let end_bytes = partial.filter(|_| is_partial).map_or(0, |disk| disk.end_bytes);
        if !is_partial && base.as_ref().is_some_and(|base| !self.is_kept(base)) {
            return Err(broken("the base disk is not in the retained point"));
        }
        let compared = match is_partial {
            true => partial.and_then(|partial| partial.base),
            false => base,
        };
        let compared = compared.and_then(|root| self.compared(&root));
        self.disk = None;
        let target = self.remote.start_disk(base, size_bytes, WriteOptions::default())?;
        let chunk_bytes = u64::from(self.remote.repository()?.chunk_size_bytes());
        self.disk = Some(OpenDisk {
            target,
            size_bytes,
            chunk_bytes,
            steps: VecDeque::new(),
            end_bytes,
            is_changed: false,
            before: WriteCounts::default(),
            base: compared,
            index,
        });
        Ok(())
    }

    /// The disk of the point that was kept whose map is `root`. Without it deltas cannot be used, that is all.
    fn compared(&self, root: &MapRoot) -> Option<Arc<dyn Disk>> {
        let kept = self.kept.as_ref()?;
        let disk = kept.disks.iter().find(|disk| disk.root == *root && disk.layers.is_empty())?;
        let opened = self.remote.repository();
        let opened = opened.and_then(|repository| open_point_disk(&repository, kept, &disk.name));
        opened.inspect_err(|error| tracing::debug!("no base: {}", error.full_message())).ok()
    }

    /// Steps that still come for an abandoned disk are skipped.
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
        let (chunk_bytes, size_bytes, index) = (disk.chunk_bytes, disk.size_bytes, disk.index);
        let names = Names::decode(body, chunk_bytes)?;
        if names.offsets.iter().any(|offset| *offset >= size_bytes) {
            return Err(broken("a piece behind the end of the disk"));
        }
        let repository = self.remote.repository()?;
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
            let known = match repository.read_named(name, self.allowed.as_ref(), &mut chunk) {
                // Another process, or another line of this one, holds the writer and the index with it: the content
                // is sent, and stored once all the same.
                Err(error) if error.kind() == ErrorKind::ReadOnly => false,
                read => read?,
            };
            let is_there = known
                || (self.fetched_piece(index, names.offsets[place], &mut chunk)?
                    && blake3::hash(&chunk).as_bytes() == name);
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
        self.step(Step::Batch(Arriving { names, contents, missing, whole: HashSet::new() }))
    }

    pub(super) fn take_content(&mut self, frame: Frame) -> Result<()> {
        let chunk_bytes = self.remote.repository()?.chunk_size_bytes() as usize;
        let contents = self.unpacker.take(frame, chunk_bytes)?;
        contents.into_iter().try_for_each(|content| self.place(content))
    }

    /// Puts content into its batch.
    fn place(&mut self, content: Content) -> Result<()> {
        let Some(disk) = &mut self.disk else { return Ok(()) };
        let chunk_bytes = disk.chunk_bytes as usize;
        let mut batches = disk.steps.iter_mut().filter_map(|step| match step {
            Step::Batch(batch) => Some(batch),
            Step::Hole { .. } | Step::Finish => None,
        });
        // One of an abandoned disk is unknown.
        let Some(batch) = batches.find(|batch| batch.names.number == content.number) else {
            return Ok(());
        };
        let places = &content.places[..];
        if places.iter().any(|place| usize::from(*place) >= batch.contents.len()) {
            return Err(broken("no such piece"));
        }
        let plain = match content.bytes {
            Bytes::Plain(plain) => plain,
            Bytes::Delta(packed) => {
                if places.iter().any(|place| batch.whole.contains(place)) {
                    return Err(broken("a delta that could not be used came again"));
                }
                let base = batch.prefix(disk.base.as_deref(), places, chunk_bytes);
                let plain = base.and_then(|base| apply_delta(&packed, &base));
                // Pieces that do not have their names are asked for, too.
                let is_good = |plain: &Vec<u8>| batch.has_names(places, plain, chunk_bytes);
                match plain.filter(is_good) {
                    Some(plain) => plain,
                    None => {
                        batch.whole.extend(places);
                        let body = encode_places(content.number, places);
                        let frame = Frame { stream: 0, kind: WHOLE, body };
                        return self.line.send(Class::Control, frame);
                    }
                }
            }
        };
        if !batch.has_names(places, &plain, chunk_bytes) {
            return Err(broken("content that does not have its name"));
        }
        for (place, content) in places.iter().zip(plain.chunks_exact(chunk_bytes)) {
            if batch.contents[usize::from(*place)].replace(content.to_vec()).is_some() {
                return Err(broken("duplicate chunk content"));
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
                    let last = batch.names.offsets.last().copied();
                    write(disk, batch, Pieces::All)?;
                    disk.arrived(last.map_or(0, |last| last + disk.chunk_bytes));
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
                    let incoming =
                        self.incoming.as_mut().map(|incoming| &mut incoming.partial.disks);
                    let partial = incoming.zip(disk.index).and_then(|(all, at)| all.get_mut(at));
                    if let Some(partial) = partial {
                        (partial.root, partial.end_bytes) = (root, disk.size_bytes);
                        self.has_finished = true;
                    }
                    return send(self.line, &Answer::Finished { root, counts }, &[]);
                }
                None => return Ok(()),
            }
        }
        Ok(())
    }
}

impl Arriving {
    /// The content of the base at these places, if it can be read.
    fn prefix(
        &self,
        base: Option<&dyn Disk>,
        places: &[u16],
        chunk_bytes: usize,
    ) -> Option<Vec<u8>> {
        let mut prefix = Vec::with_capacity(places.len() * chunk_bytes);
        for place in places {
            let offset_bytes = self.names.offsets[usize::from(*place)];
            if let Err(error) = add_base_piece(base?, offset_bytes, chunk_bytes, &mut prefix) {
                tracing::debug!("the base cannot be read: {}", error.full_message());
                return None;
            }
        }
        Some(prefix)
    }

    fn has_names(&self, places: &[u16], plain: &[u8], chunk_bytes: usize) -> bool {
        let mut pieces = places.iter().zip(plain.chunks_exact(chunk_bytes));
        pieces.all(|(place, piece)| {
            *blake3::hash(piece).as_bytes() == self.names.names[usize::from(*place)]
        })
    }
}

/// Takes the steps that are still to be done.
pub(super) fn open_steps(disk: &mut Option<OpenDisk<'_>>) -> VecDeque<Step> {
    disk.as_mut().map(|disk| std::mem::take(&mut disk.steps)).unwrap_or_default()
}

impl OpenDisk<'_> {
    /// Writes what has arrived of batches that are not complete. All of it lies behind `end_bytes`: a copy that continues
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
