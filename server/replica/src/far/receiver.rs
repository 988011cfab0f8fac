//! The far side of a copy over a line: takes what a source sends, and stores it.
//!
//! # Invariants
//!
//! 1. Content is hashed here, before it is stored: the source's names are believed for nothing else.
//! 2. A link sees, names and adds to the machines only whose names begin with its prefix. That a piece is there already
//!    is said only of content that these machines' points refer to: a link cannot ask what others have.
//! 3. A base is a disk of the point that was kept last. The map of a new point's disk was finished on this line.
//! 4. Nothing is replaced or removed. A point appears when it is complete.
//! 5. Memory is bounded: by the line's credit, and by the batches that may be under way.
//!
//! When the line ends at any moment, the open disk is given up; its chunks stay until the next gc.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_line::{Class, Frame, Line, Received};
use coldrise_session::{CarriedFiles, Catalog, SharedWriter};
use coldrise_store::{
    BackupTarget, DiskTarget, MachineClaim, MachineName, MapRoot, PointDocument, Reachable,
    WriteOptions,
};

use super::messages::{
    broken, decode_places, encode_places, send, Answer, Ask, Name, Names, Parts, APPLIED,
    BATCH_BYTES, CONTENT, MAX_BATCHES, MESSAGE, NAMES, PART, VERSION, WANTED, ZEROES,
};
use super::FarSide;

/// Interval of looking whether the server ends.
const INTERVAL: Duration = Duration::from_millis(200);
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
}

impl Receiver<'_> {
    fn run(mut self, cancel: &AtomicBool) -> Result<()> {
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
        let done = done.and_then(|()| self.apply());
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
                self.claim = None;
                let claim = self.far.repository()?.claim_machine(&machine)?;
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
            Ask::Start { base, size_bytes } => {
                let is_kept = |root: &MapRoot| {
                    let disks = self.kept.iter().flat_map(|point| &point.disks);
                    disks.into_iter().any(|disk| disk.root == *root && disk.layers.is_empty())
                };
                if base.as_ref().is_some_and(|base| !is_kept(base)) {
                    return Err(broken("the base is no disk of the point that was kept"));
                }
                self.disk = None;
                let target = self.far.start_disk(base, size_bytes, WriteOptions::default())?;
                let chunk_bytes = u64::from(self.far.repository()?.chunk_size_bytes());
                let steps = VecDeque::new();
                self.disk = Some(OpenDisk { target, size_bytes, chunk_bytes, steps });
                Answer::Started
            }
            Ask::Hole { offset_bytes, length_bytes } => {
                return self.step(Step::Hole { offset_bytes, length_bytes })
            }
            Ask::Finish => return self.step(Step::Finish),
            Ask::Abandon => {
                self.disk = None;
                return Ok(());
            }
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
                    write(disk, batch)?;
                    let body = encode_places(number, &[]);
                    self.line.send(Class::Control, Frame { stream: 0, kind: APPLIED, body })?;
                }
                Some(Step::Hole { offset_bytes, length_bytes }) => {
                    disk.target.write_hole(offset_bytes, length_bytes)?;
                }
                Some(Step::Finish) => {
                    let Some(disk) = self.disk.take() else { return Ok(()) };
                    let (root, counts) = disk.target.finish()?;
                    self.finished.push((root, disk.size_bytes));
                    return send(self.line, &Answer::Finished { root, counts }, &[]);
                }
                None => return Ok(()),
            }
        }
        Ok(())
    }

    fn put(&mut self, mut document: PointDocument, files: &[u8]) -> Result<()> {
        document.machine = self.own(&document.machine)?;
        if self.claim.as_ref().map(|(machine, _)| machine) != Some(&document.machine) {
            return Err(broken("the machine was not claimed"));
        }
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
        if let Some(allowed) = &mut self.allowed {
            let roots = stored.disks.iter().map(|disk| disk.root);
            allowed.join(&self.far.repository()?.reachable(roots, &AtomicBool::new(false))?);
        }
        Ok(())
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
