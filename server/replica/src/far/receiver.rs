//! The far side of a copy over a line: takes what a source sends, and stores it.
//!
//! # Invariants
//!
//! 1. Content is hashed here, before it is stored: the source's names are believed for nothing else.
//! 2. A link sees, names and adds to the machines only whose names begin with its prefix. That a piece is there already
//!    is said only of content that these machines' points refer to: a link cannot ask what others have.
//! 3. A base is a disk of the point that was kept last, or what had arrived of this very disk. The map of a new point's disk was finished on this line.
//! 4. Nothing is replaced or removed. A point appears when it is complete.
//! 5. Memory is bounded: by the line's credit, and by the batches that may be under way.
//!
//! 6. What has arrived of a point is made durable every 10 s and when the line ends, and noted (BegunCopy): the next copy of
//!    the same point, from the same base, goes on there.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_line::{Class, Frame, Line, Received};
use coldrise_session::{BegunCopy, BegunDisk, CarriedFiles, Catalog, SharedWriter};
use coldrise_store::{
    BackupTarget, DiskTarget, MachineClaim, MachineName, MapRoot, PointDocument, Reachable,
    WriteCounts, WriteOptions,
};

use super::messages::{
    broken, decode_places, encode_places, send, Answer, Ask, Name, Names, Parts, APPLIED,
    BATCH_BYTES, CONTENT, MAX_BATCHES, MESSAGE, NAMES, PART, VERSION, WANTED, ZEROES,
};
use super::{Begun, FarSide};

/// Interval of looking whether the server ends.
const INTERVAL: Duration = Duration::from_millis(200);
/// Interval of making durable what has arrived.
const NOTE_INTERVAL: Duration = Duration::from_secs(10);
/// Points in one message.
const POINTS_AT_ONCE: usize = 500;

/// Takes copies over `line` until it ends. `prefix` begins the names of the machines that it may see.
///
/// # Errors
/// Errors of the line and of the repository; `Interrupted` once `cancel` is set.
pub fn receive_copies(
    line: &dyn Line,
    far: &SharedWriter<'_>,
    prefix: &str,
    cancel: &AtomicBool,
) -> Result<()> {
    let allowed = match prefix.is_empty() {
        true => None,
        false => Some(reachable_of(far, prefix, cancel)?),
    };
    let receiver = Receiver {
        line,
        far,
        prefix,
        allowed,
        claim: None,
        kept: None,
        disk: None,
        finished: Vec::new(),
        begun: None,
        last_note: Instant::now(),
    };
    receiver.run(cancel)
}

/// The chunks to which the points of the link's machines refer.
fn reachable_of(far: &SharedWriter<'_>, prefix: &str, cancel: &AtomicBool) -> Result<Reachable> {
    let repository = far.repository()?;
    let catalog = Catalog::new(&repository);
    let mut roots = Vec::new();
    for machine in catalog.machines()?.iter().filter(|name| name.as_str().starts_with(prefix)) {
        let points = catalog.points(machine)?;
        roots.extend(points.iter().flat_map(|point| &point.disks).map(|disk| disk.root));
    }
    repository.reachable(roots, cancel)
}

/// A disk that is being written.
struct OpenDisk<'a> {
    target: Box<dyn DiskTarget + 'a>,
    size_bytes: u64,
    chunk_bytes: u64,
    steps: VecDeque<Step>,
    /// Everything before it is applied, in bytes.
    end_bytes: u64,
    /// Whether that has changed since the disk was started.
    is_changed: bool,
    /// Of the parts that were made durable before.
    before: WriteCounts,
}

/// What is to be done with the disk, in order.
enum Step {
    Batch(Arriving),
    Hole { offset_bytes: u64, length_bytes: u64 },
    Finish,
}

/// A batch whose content is arriving.
struct Arriving {
    names: Names,
    /// Of each piece; `None` until it has arrived. Empty for zeroes.
    contents: Vec<Option<Vec<u8>>>,
    missing: usize,
}

struct Receiver<'a> {
    line: &'a dyn Line,
    far: &'a SharedWriter<'a>,
    prefix: &'a str,
    allowed: Option<Reachable>,
    claim: Option<(MachineName, MachineClaim)>,
    kept: Option<PointDocument>,
    disk: Option<OpenDisk<'a>>,
    /// Maps that were written on this line, and the sizes of their disks.
    finished: Vec<(MapRoot, u64)>,
    /// The point that is coming; its last disk is the one that is started next, or is open.
    begun: Option<BegunCopy>,
    last_note: Instant,
}

impl Receiver<'_> {
    fn run(mut self, cancel: &AtomicBool) -> Result<()> {
        let done = self.converse(cancel);
        if let Err(error) = self.note() {
            tracing::warn!("what has arrived is not kept: {}", error.full_message());
        }
        done
    }

    fn converse(&mut self, cancel: &AtomicBool) -> Result<()> {
        let mut parts = Parts::default();
        loop {
            if cancel.load(Ordering::Relaxed) {
                self.line.close();
                return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            }
            match self.line.receive(&[Class::Control, Class::Bulk], INTERVAL)? {
                Received::Nothing => {}
                Received::Closed => return Ok(()),
                Received::Frame { frame, .. } => self.take(&mut parts, frame)?,
            }
        }
    }

    fn take(&mut self, parts: &mut Parts, frame: Frame) -> Result<()> {
        let done = match frame.kind {
            PART | MESSAGE => match parts.take::<Ask>(frame.kind, &frame.body)? {
                Some((ask, attachment)) => self.answer(ask, &attachment),
                None => Ok(()),
            },
            NAMES => self.take_names(&frame.body),
            CONTENT => self.take_content(&frame.body),
            _ => Err(broken("an unknown frame")),
        };
        let done = done.and_then(|()| self.apply()).and_then(|()| self.note_in_time());
        let Err(error) = done else { return Ok(()) };
        self.disk = None;
        let (kind, message) = (error.kind().word().to_owned(), error.full_message());
        send(self.line, &Answer::Failed { kind, message }, &[])?;
        match error.kind() {
            // The source goes on, with another machine or not.
            ErrorKind::Busy
            | ErrorKind::NotFound
            | ErrorKind::AlreadyExists
            | ErrorKind::InvalidInput
            | ErrorKind::NoSpace => {
                tracing::debug!("{}", error.full_message());
                Ok(())
            }
            _ => {
                self.line.close();
                Err(error)
            }
        }
    }

    fn own(&self, machine: &MachineName) -> Result<MachineName> {
        format!("{}{machine}", self.prefix).parse()
    }

    /// The name here of the machine that is claimed.
    fn claimed(&self, machine: &MachineName) -> Result<MachineName> {
        let machine = self.own(machine)?;
        match self.claim.as_ref().is_some_and(|(claimed, _)| *claimed == machine) {
            true => Ok(machine),
            false => Err(broken("the machine was not claimed")),
        }
    }

    /// Prepares the next disk of the point that comes. Returns what has arrived of it before.
    fn begin(
        &mut self,
        machine: &MachineName,
        mut coming: BegunCopy,
        mut disk: BegunDisk,
    ) -> Result<Option<Begun>> {
        let is_same = |known: &BegunCopy| {
            let facts = |copy: &BegunCopy| (copy.made_in.clone(), copy.point.clone());
            facts(known) == facts(&coming) && known.created_at_ms == coming.created_at_ms
        };
        let known = match self.begun.take().filter(is_same) {
            Some(begun) => Some(begun),
            None => {
                self.last_note = Instant::now();
                BegunCopy::of(&*self.far.repository()?, machine)?.filter(is_same)
            }
        };
        coming.disks = known.map(|known| known.disks).unwrap_or_default();
        let is_disk = |known: &BegunDisk| {
            (&known.name, known.size_bytes, known.base) == (&disk.name, disk.size_bytes, disk.base)
        };
        let found = coming.disks.iter().position(is_disk).map(|place| coming.disks.remove(place));
        coming.disks.retain(|known| known.name != disk.name);
        let begun = found
            .filter(|known| known.end_bytes > 0)
            .map(|known| Begun { root: known.root, end_bytes: known.end_bytes });
        if let Some(begun) = begun {
            (disk.root, disk.end_bytes) = (begun.root, begun.end_bytes);
        }
        coming.disks.push(disk);
        self.begun = Some(coming);
        Ok(begun)
    }

    /// Makes durable what has arrived, now and then.
    fn note_in_time(&mut self) -> Result<()> {
        if self.last_note.elapsed() < NOTE_INTERVAL || self.begun.is_none() {
            return Ok(());
        }
        let open = self.disk.as_mut().filter(|disk| disk.is_changed);
        let Some(OpenDisk { size_bytes, chunk_bytes, end_bytes, .. }) = open else { return Ok(()) };
        let (size_bytes, chunk_bytes, end_bytes) = (*size_bytes, *chunk_bytes, *end_bytes);
        let steps = open_steps(&mut self.disk);
        let Some((root, before)) = self.note_disk()? else { return Ok(()) };
        let target = self.far.start_disk(Some(root), size_bytes, WriteOptions::default())?;
        let is_changed = false;
        self.disk = Some(OpenDisk {
            target,
            size_bytes,
            chunk_bytes,
            steps,
            end_bytes,
            is_changed,
            before,
        });
        Ok(())
    }

    /// Makes durable what has arrived, and gives up the open disk.
    fn note(&mut self) -> Result<()> {
        self.note_disk().map(|_| ())
    }

    /// As [`Receiver::note`]. Returns the map and the figures of a disk that has begun.
    fn note_disk(&mut self) -> Result<Option<(MapRoot, WriteCounts)>> {
        self.last_note = Instant::now();
        let mut noted = None;
        let open = self.disk.take();
        let Some(begun) = &mut self.begun else { return Ok(None) };
        if let (Some(open), Some(disk)) = (open, begun.disks.last_mut()) {
            if open.is_changed {
                let (root, counts) = open.target.finish()?;
                // The last piece of a disk may end behind it.
                (disk.root, disk.end_bytes) = (root, open.end_bytes);
                noted = Some((root, open.before + counts));
            }
        }
        let (Some((machine, _)), true) =
            (&self.claim, begun.disks.iter().any(|disk| disk.end_bytes > 0))
        else {
            return Ok(noted);
        };
        let kept = BegunCopy {
            disks: begun.disks.iter().filter(|disk| disk.end_bytes > 0).cloned().collect(),
            ..begun.clone()
        };
        kept.save(&*self.far.repository()?, machine)?;
        Ok(noted)
    }

    fn answer(&mut self, ask: Ask, attachment: &[u8]) -> Result<()> {
        let answer = match ask {
            Ask::Hello { version, .. } if version != VERSION => {
                let text =
                    "the two sites run versions of Coldrise that do not understand each other";
                return Err(Error::new(ErrorKind::Unsupported, text)
                    .advise("install the same version at both"));
            }
            Ask::Hello { .. } => Answer::Welcome {
                repository: self.far.id()?,
                chunk_size_bytes: self.far.repository()?.chunk_size_bytes(),
            },
            Ask::Claim { machine } => {
                let machine = self.own(&machine)?;
                (self.claim, self.begun) = (None, None);
                let repository = self.far.repository()?;
                let claim = repository.claim_machine(&machine)?;
                if let (Some(allowed), Some(begun)) =
                    (&mut self.allowed, BegunCopy::of(&repository, &machine)?)
                {
                    let roots = begun.disks.iter().map(|disk| disk.root);
                    allowed.join(&repository.reachable(roots, &AtomicBool::new(false))?);
                }
                self.claim = Some((machine, claim));
                Answer::Claimed
            }
            Ask::Points { machine } => return self.send_points(&machine),
            Ask::Keep { machine, point } => {
                let machine = self.own(&machine)?;
                let found = self.far.repository()?.point(&machine, &point);
                self.kept = match found {
                    Err(error) if error.kind() == ErrorKind::NotFound => None,
                    found => Some(found?).filter(|found| self.far.keep(found).unwrap_or(false)),
                };
                Answer::Kept { is_there: self.kept.is_some() }
            }
            Ask::Begun { machine, made_in, point, created_at_ms, disk, size_bytes, base } => {
                let machine = self.claimed(&machine)?;
                let coming = BegunCopy { made_in, point, created_at_ms, disks: Vec::new() };
                let (root, end_bytes) = (base.unwrap_or(MapRoot::EMPTY), 0);
                let disk = BegunDisk { name: disk, size_bytes, base, root, end_bytes };
                Answer::Begun { begun: self.begin(&machine, coming, disk)? }
            }
            Ask::Start { base, size_bytes } => {
                let is_kept = |root: &MapRoot| {
                    let disks = self.kept.iter().flat_map(|point| &point.disks);
                    disks.into_iter().any(|disk| disk.root == *root && disk.layers.is_empty())
                };
                let begun = self.begun.as_ref().and_then(|begun| begun.disks.last());
                let begun =
                    begun.filter(|disk| disk.end_bytes > 0 && disk.size_bytes == size_bytes);
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
                Answer::Started
            }
            Ask::Hole { offset_bytes, length_bytes } => {
                return self.step(Step::Hole { offset_bytes, length_bytes })
            }
            Ask::Finish => return self.step(Step::Finish),
            Ask::Abandon => return self.note(),
            Ask::Put { document } => {
                self.put(*document, attachment)?;
                Answer::Added
            }
        };
        send(self.line, &answer, &[])
    }

    /// The points of a machine, without what the source does not need.
    fn send_points(&self, machine: &MachineName) -> Result<()> {
        let mut points = self.far.points(&self.own(machine)?)?;
        for point in &mut points {
            point.machine = machine.clone();
            point.configuration = None;
            point.files = None;
            // Whether there are layers is what matters.
            point.disks.iter_mut().for_each(|disk| disk.layers.truncate(1));
        }
        let mut rest = &points[..];
        loop {
            let (now, later) = rest.split_at(rest.len().min(POINTS_AT_ONCE));
            rest = later;
            let is_last = rest.is_empty();
            send(self.line, &Answer::Points { points: now.to_vec(), is_last }, &[])?;
            if is_last {
                return Ok(());
            }
        }
    }

    /// What still comes for a disk that was given up is passed over.
    fn step(&mut self, step: Step) -> Result<()> {
        if let Some(disk) = &mut self.disk {
            if disk.steps.len() > 2 * MAX_BATCHES {
                return Err(broken("too much at once"));
            }
            disk.steps.push_back(step);
        }
        Ok(())
    }

    fn take_names(&mut self, body: &[u8]) -> Result<()> {
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
        let mut first = std::collections::HashMap::<Name, usize>::new();
        for (place, name) in names.names.iter().enumerate() {
            if *name == ZEROES {
                contents.push(Some(Vec::new()));
                continue;
            }
            if first.contains_key(name) {
                contents.push(None);
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

    fn take_content(&mut self, body: &[u8]) -> Result<()> {
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
    fn apply(&mut self) -> Result<()> {
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
                    write(disk, batch)?;
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

    fn put(&mut self, mut document: PointDocument, files: &[u8]) -> Result<()> {
        document.machine = self.claimed(&document.machine)?;
        for disk in &document.disks {
            if !disk.layers.is_empty() || !self.finished.contains(&(disk.root, disk.size_bytes)) {
                return Err(broken("the point has a disk that was not sent"));
            }
        }
        document.is_protected = false;
        document.quarantine = None;
        document.files = None;
        let repository = self.far.repository()?;
        match repository.point(&document.machine, &document.point) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            found => {
                found?;
                let text = format!("{}/{} is there already", document.machine, document.point);
                return Err(Error::new(ErrorKind::AlreadyExists, text));
            }
        }
        let files = match files.is_empty() {
            true => CarriedFiles::default(),
            false => CarriedFiles::decode(files)?,
        };
        let stored = self.far.add_point(document, &files)?;
        self.finished.clear();
        self.begun = None;
        BegunCopy::remove(&repository, &stored.machine)?;
        if let Some(allowed) = &mut self.allowed {
            let roots = stored.disks.iter().map(|disk| disk.root);
            allowed.join(&self.far.repository()?.reachable(roots, &AtomicBool::new(false))?);
        }
        Ok(())
    }
}

/// Takes the steps that are still to be done.
fn open_steps(disk: &mut Option<OpenDisk<'_>>) -> VecDeque<Step> {
    disk.as_mut().map(|disk| std::mem::take(&mut disk.steps)).unwrap_or_default()
}

impl OpenDisk<'_> {
    /// Everything before `end_bytes` is applied. A part of a chunk comes again.
    fn arrived(&mut self, end_bytes: u64) {
        let end_bytes = match end_bytes >= self.size_bytes {
            true => self.size_bytes,
            false => end_bytes / self.chunk_bytes * self.chunk_bytes,
        };
        (self.end_bytes, self.is_changed) = (end_bytes.max(self.end_bytes), true);
    }
}

/// Writes a batch: neighbours together.
fn write(disk: &mut OpenDisk<'_>, batch: Arriving) -> Result<()> {
    let first: std::collections::HashMap<Name, usize> =
        batch.names.names.iter().enumerate().rev().map(|(place, name)| (*name, place)).collect();
    let mut run: Option<(u64, Vec<u8>)> = None;
    for (place, offset) in batch.names.offsets.iter().enumerate() {
        let name = batch.names.names[place];
        let length = disk.chunk_bytes.min(disk.size_bytes - offset) as usize;
        let source = first.get(&name).and_then(|first| batch.contents[*first].as_ref());
        let source = source.ok_or_else(|| broken("content is missing"))?;
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

#[cfg(test)]
#[path = "receiver_tests.rs"]
mod tests;
