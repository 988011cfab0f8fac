//! The remote side of a copy over a line: takes what a source sends, and stores it.
//!
//! # Invariants
//!
//! 1. Content is hashed here, before it is stored: the source's names are believed for nothing else.
//! 2. A link sees, names and adds to the machines only whose names begin with its prefix. That a piece is there already
//!    is said only of content that these machines' points refer to: a link cannot ask what others have. Who was asked for some machines
//!    (fetch.rs) adds no others.
//! 3. A base is a disk of the point that was kept last, or what had arrived of this very disk. The map of a new point's disk was finished on this line.
//! 4. Nothing is replaced or removed. A point appears when it is complete.
//! 5. Memory is bounded: by the line's credit, and by the batches that may be under way.
//! 6. Arrived parts of a point are made durable every 10 s and when the line ends, and noted (BegunCopy): the next copy of
//!    the same point, from the same base, continues there.

mod disk;
mod fetch;
mod partial;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_line::{Class, Frame, Line, Received};
use coldrise_session::{CarriedFiles, Catalog, PartialCopy, SharedWriter};
use coldrise_store::{Claim, MachineName, MapRoot, PointDocument, PointOrigin, Reachable};

use self::disk::{OpenDisk, Step};
use self::fetch::Fetches;
use self::partial::IncomingState;
use super::Remote;
use super::fetch::other_version;
use super::fetch_progress::FetchProgress;
use super::messages::{
    Answer, Ask, CONTENT, Failure, MESSAGE, NAMES, PART, Parts, VERSION, broken, send,
};
use super::unpack::Unpacker;

/// Interval of looking whether the server ends.
const INTERVAL: Duration = Duration::from_millis(200);
/// Interval of making durable what has arrived.
const NOTE_INTERVAL: Duration = Duration::from_secs(10);
/// Fetched bytes with which it does not wait for that.
const NOTE_BYTES: u64 = 16 << 20;
/// Maximum number of ranges of fetched zeroes in a note.
const MAX_ZERO_RANGES: usize = 4096;
/// Points in one message: with as many disks as points can have they are shorter than the longest message.
const POINTS_AT_ONCE: usize = 100;

/// The rights of the source.
pub(super) struct Terms<'a> {
    /// Begins the names of the machines that it may see.
    pub(super) prefix: &'a str,
    /// The names, without the prefix, of the only machines that it may see; empty: all.
    pub(super) only: &'a [MachineName],
}

/// Takes copies over `line` until it ends. `first` is a message that was received before; of a fetch, `fetch_progress` hears how it goes.
///
/// # Errors
/// Errors of the line and of the repository; `Interrupted` once `cancel` is set.
pub(super) fn receive(
    line: &dyn Line,
    remote: &SharedWriter<'_>,
    terms: Terms<'_>,
    first: Option<Ask>,
    fetch_progress: Option<&mut FetchProgress<'_>>,
    cancel: &AtomicBool,
) -> Result<()> {
    let allowed = match terms.prefix.is_empty() {
        true => None,
        false => Some(reachable_of(remote, terms.prefix, cancel)?),
    };
    let fetches = Arc::new(Fetches::default());
    let mut receiver = Receiver {
        line,
        remote,
        terms,
        allowed,
        claim: None,
        kept: None,
        disk: None,
        unpacker: Unpacker::default(),
        finished: Vec::new(),
        incoming: None,
        fetches: Arc::clone(&fetches),
        has_finished: false,
        last_note: Instant::now(),
        added: 0,
        fetch_progress,
    };
    if let Some(ask) = first {
        let answered = receiver.answer(ask, &[]);
        receiver.report(answered)?;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| fetches.send_reads(line));
        scope.spawn(|| fetches.take_content(line));
        let done = receiver.run(cancel);
        fetches.end();
        done
    })
}

/// The chunks to which the points of the link's machines refer.
fn reachable_of(remote: &SharedWriter<'_>, prefix: &str, cancel: &AtomicBool) -> Result<Reachable> {
    let repository = remote.repository()?;
    let catalog = Catalog::new(&repository);
    let mut roots = Vec::new();
    for machine in catalog.machines()?.iter().filter(|name| name.as_str().starts_with(prefix)) {
        let points = catalog.points(machine)?;
        roots.extend(points.iter().flat_map(|point| &point.disks).map(|disk| disk.root));
    }
    repository.reachable(roots, cancel)
}

struct Receiver<'a, 'h> {
    line: &'a dyn Line,
    remote: &'a SharedWriter<'a>,
    terms: Terms<'a>,
    allowed: Option<Reachable>,
    claim: Option<(MachineName, Claim)>,
    kept: Option<PointDocument>,
    disk: Option<OpenDisk<'a>>,
    unpacker: Unpacker,
    /// Maps that were written on this line, and the sizes of their disks.
    finished: Vec<(MapRoot, u64)>,
    /// The point that is being received.
    incoming: Option<IncomingState>,
    fetches: Arc<Fetches>,
    /// Whether a disk was finished since the last note.
    has_finished: bool,
    last_note: Instant,
    /// Points that were added on this line.
    added: usize,
    fetch_progress: Option<&'a mut FetchProgress<'h>>,
}

impl<'h> Receiver<'_, 'h> {
    fn run(mut self, cancel: &AtomicBool) -> Result<()> {
        let done = self.converse(cancel);
        if let Err(error) = self.note() {
            tracing::warn!(
                "data that has arrived of the point cannot be kept: {}",
                error.full_message()
            );
        }
        done
    }

    fn converse(&mut self, cancel: &AtomicBool) -> Result<()> {
        let mut parts = Parts::default();
        while !self.fetch_progress.as_ref().is_some_and(|fetch_progress| fetch_progress.is_over()) {
            if cancel.load(Ordering::Relaxed) {
                self.line.close();
                return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            }
            match self.line.receive(&[Class::Control, Class::Bulk], INTERVAL)? {
                Received::Nothing => self.note_in_time()?,
                Received::Closed => return Ok(()),
                Received::Frame { frame, .. } => self.take(&mut parts, frame)?,
            }
        }
        Ok(())
    }

    fn take(&mut self, parts: &mut Parts, frame: Frame) -> Result<()> {
        let done = match frame.kind {
            PART | MESSAGE => match parts.take::<Ask>(frame.kind, &frame.body) {
                Ok(Some((ask, attachment))) => self.answer(ask, &attachment),
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            },
            NAMES => self.take_names(&frame.body),
            CONTENT => self.take_content(frame),
            _ => Err(broken("an unknown frame")),
        };
        let done = done.and_then(|()| self.apply()).and_then(|()| self.note_in_time());
        self.report(done)
    }

    /// Tells the source what failed. Returns what ends the line.
    fn report(&mut self, done: Result<()>) -> Result<()> {
        let Err(error) = done else { return Ok(()) };
        let sent = send(self.line, &Answer::Failed(Failure::of(&error)), &[]);
        // The end of the line is not a failure of the disk: its arrived parts are kept.
        if sent.is_ok() || error.kind() != ErrorKind::Io {
            self.disk = None;
        }
        match error.kind() {
            // The source continues, with another machine or not.
            ErrorKind::Busy
            | ErrorKind::NotFound
            | ErrorKind::AlreadyExists
            | ErrorKind::InvalidInput
            | ErrorKind::NoSpace => {
                tracing::debug!("{}", error.full_message());
                sent
            }
            // A source that has closed the line already is not the reason.
            _ => {
                self.line.close();
                Err(error)
            }
        }
    }

    fn own(&self, machine: &MachineName) -> Result<MachineName> {
        if !self.terms.only.is_empty() && !self.terms.only.contains(machine) {
            return Err(broken(&format!("machine {machine} was not requested")));
        }
        format!("{}{machine}", self.terms.prefix).parse()
    }

    /// The name here of the machine that is claimed.
    fn claimed(&self, machine: &MachineName) -> Result<MachineName> {
        let machine = self.own(machine)?;
        match self.claim.as_ref().is_some_and(|(claimed, _)| *claimed == machine) {
            true => Ok(machine),
            false => Err(broken("the machine was not claimed")),
        }
    }

    fn fetch_progress(&mut self) -> Result<&mut FetchProgress<'h>> {
        self.fetch_progress.as_deref_mut().ok_or_else(|| broken("its progress was not requested"))
    }

    fn answer(&mut self, ask: Ask, attachment: &[u8]) -> Result<()> {
        let added = self.added;
        let answer = match ask {
            Ask::Hello { version, .. } if version != VERSION => return Err(other_version()),
            Ask::Hello { .. } => Answer::Welcome {
                repository: self.remote.id()?,
                chunk_size_bytes: self.remote.repository()?.chunk_size_bytes(),
            },
            Ask::Claim { machine } => {
                let machine = self.own(&machine)?;
                (self.claim, self.incoming) = (None, None);
                self.fetches.forget();
                let repository = self.remote.repository()?;
                let claim = repository.claim_machine(&machine)?;
                if let Some(allowed) = &mut self.allowed {
                    let all = PartialCopy::all(&repository)?.into_iter();
                    let own = all.filter(|partial| partial.machine == machine);
                    let disks = own.flat_map(|begun| begun.disks);
                    let roots = disks.flat_map(|disk| [disk.root, disk.fetched]);
                    allowed.join(&repository.reachable(roots, &AtomicBool::new(false))?);
                }
                self.claim = Some((machine, claim));
                Answer::Claimed
            }
            Ask::Points { machine } => return self.send_points(&machine),
            Ask::Keep { machine, point } => {
                let machine = self.own(&machine)?;
                let found = self.remote.repository()?.point(&machine, &point);
                self.kept = match found {
                    Err(error) if error.kind() == ErrorKind::NotFound => None,
                    found => Some(found?).filter(|found| self.remote.keep(found).unwrap_or(false)),
                };
                Answer::Kept { is_there: self.kept.is_some() }
            }
            Ask::Announce { number, document, bases } => {
                let begun = self.announce(number, *document, &bases, attachment)?;
                Answer::Announced { begun }
            }
            Ask::Start { base, size_bytes } => {
                self.start(base, size_bytes)?;
                Answer::Started
            }
            Ask::Hole { offset_bytes, length_bytes } => {
                return self.step(Step::Hole { offset_bytes, length_bytes });
            }
            Ask::Finish => return self.step(Step::Finish),
            Ask::Abandon => return self.note(),
            Ask::Put { document } => {
                self.put(*document, attachment)?;
                self.added += 1;
                Answer::Added
            }
            Ask::FetchProgress { report } => return self.fetch_progress()?.hear(report, added),
            Ask::Ended { result } => return self.fetch_progress()?.end(result),
            Ask::Fetch { .. } | Ask::Live { .. } => {
                return Err(broken("another opening in the middle of a copy"));
            }
        };
        send(self.line, &answer, &[])
    }

    /// The points of a machine, without what the source does not need.
    fn send_points(&self, machine: &MachineName) -> Result<()> {
        let mut points = self.remote.points(&self.own(machine)?)?;
        for point in &mut points {
            point.machine = machine.clone();
            point.configuration = None;
            point.parts.clear();
            point.files = None;
            if let PointOrigin::Backup { sources } = &mut point.origin {
                sources.clear();
            }
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

    fn put(&mut self, mut document: PointDocument, files: &[u8]) -> Result<()> {
        document.machine = self.claimed(&document.machine)?;
        for disk in &document.disks {
            if !disk.layers.is_empty() || !self.finished.contains(&(disk.root, disk.size_bytes)) {
                return Err(broken("the point has a disk that was not sent"));
            }
        }
        if document.made_in.is_none() {
            return Err(broken("the point does not say where it was made"));
        }
        document.is_protected = false;
        document.quarantine = None;
        document.files = None;
        self.check_absent(&document.machine, &document.point)?;
        let announced = self.incoming.as_ref().map(|incoming| incoming.files.as_slice());
        let files = if files.is_empty() { announced.unwrap_or_default() } else { files };
        let files = match files.is_empty() {
            true => CarriedFiles::default(),
            false => CarriedFiles::decode(files)?,
        };
        let stored = self.remote.add_point(document, &files)?;
        self.finished.clear();
        if let Some(incoming) = self.incoming.take() {
            // Front ends find the point in the catalog from now on.
            incoming.partial.remove(&*self.remote.repository()?)?;
            self.fetches.forget();
        }
        if let Some(allowed) = &mut self.allowed {
            let roots = stored.disks.iter().map(|disk| disk.root);
            allowed.join(&self.remote.repository()?.reachable(roots, &AtomicBool::new(false))?);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "receiver_tests.rs"]
mod tests;
