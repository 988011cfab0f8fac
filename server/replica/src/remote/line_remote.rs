//! A remote repository behind a line, from the source's side.
//!
//! ```text
//!   copy ── pieces ─▶ LineDisk ── NAMES ─▶ control      the batch stays here until it is applied there
//!            receiver thread ◀── WANTED, APPLIED, answers
//!            packer threads  ── CONTENT ─▶ bulk         what is wanted, see pack.rs
//! ```

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use coldrise_block::{Context, Disk, Error, ErrorKind, Result};
use coldrise_line::{Class, Frame, Line, LineStatistics, Received};
use coldrise_session::CarriedFiles;
use coldrise_store::{
    BackupTarget, DiskTarget, MachineName, MapRoot, PointDocument, RepositoryId, WriteOptions,
};
use parking_lot::{Condvar, Mutex};

use super::line_disk::LineDisk;
use super::messages::{
    APPLIED, Answer, Ask, BATCH_BYTES, Details, MAX_BATCHES, MESSAGE, PART, Parts, RATE, VERSION,
    WANTED, WHOLE, broken, decode_places, send,
};
use super::pack::{Batch, Packer, Wanted};
use super::reads::Reads;
use super::{Announced, Announcement, PartialMap, Remote, Traffic};

/// Interval of looking whether the copy was cancelled.
const INTERVAL: Duration = Duration::from_millis(100);
/// Maximum length of a point's files that are announced, in bytes.
const MAX_ANNOUNCED_FILES: usize = 4 << 20;
/// Threads that compress.
const PACKERS: u32 = 2;
/// Threads that answer reads out of turn. A drive or a bucket takes several at once.
const READERS: u32 = 4;
/// A batch whose names were sent.
struct Offered {
    batch: Arc<Batch>,
    /// The part of its content that was there.
    known_bytes: usize,
}

#[derive(Default)]
struct State {
    answers: VecDeque<Answer>,
    batches: HashMap<u32, Offered>,
    wanted: VecDeque<Wanted>,
    failure: Option<(ErrorKind, String)>,
    is_over: bool,
}

impl State {
    fn check(&self) -> Result<()> {
        match &self.failure {
            Some((kind, text)) => Err(Error::new(*kind, text.clone())),
            None => Ok(()),
        }
    }
}

struct Shared {
    line: Arc<dyn Line>,
    state: Mutex<State>,
    changed: Condvar,
    cancel: Arc<AtomicBool>,
    /// The remote side has asked for the copy: it limits the rate.
    is_fetch: bool,
    traffic: Mutex<Traffic>,
}

/// The remote repository. Dropping it closes the line.
pub struct LineRemote {
    shared: Arc<Shared>,
    repository: RepositoryId,
    chunk_size_bytes: u32,
    threads: Vec<JoinHandle<()>>,
    next_batch: AtomicU64,
    /// The ranges that the other side may read out of turn.
    reads: Arc<Reads>,
    /// The machine whose boot trace was sent last.
    trace_sent: Mutex<Option<MachineName>>,
    /// One question at a time.
    asking: Mutex<()>,
    /// One message at a time: a long one has several frames.
    telling: Mutex<()>,
    /// The points of the machine that was claimed.
    points: Mutex<Option<(MachineName, Vec<PointDocument>)>>,
    /// The map and the size with which the other side has started a disk already.
    started: Mutex<Option<(Option<MapRoot>, u64)>>,
    /// The arrived parts of the announced point's disks.
    begun: Mutex<Vec<PartialMap>>,
    /// Content of the disk that is not offered yet, in bytes.
    gathered_bytes: AtomicU64,
    /// The base of this disk, read here.
    base: Mutex<Option<Arc<dyn Disk>>>,
    is_paused: AtomicBool,
}

impl LineRemote {
    /// Greets the other side.
    ///
    /// # Errors
    /// Errors of the line, and of the other side; `Interrupted` once `cancel` is set.
    pub fn new(
        line: Arc<dyn Line>,
        repository: &RepositoryId,
        cancel: Arc<AtomicBool>,
    ) -> Result<LineRemote> {
        LineRemote::begin(line, repository, cancel, false)
    }

    /// Greets the other side, which has asked for the copy.
    ///
    /// # Errors
    /// As for [`LineRemote::new`].
    pub(crate) fn for_fetch(
        line: Arc<dyn Line>,
        repository: &RepositoryId,
        cancel: Arc<AtomicBool>,
    ) -> Result<LineRemote> {
        LineRemote::begin(line, repository, cancel, true)
    }

    fn begin(
        line: Arc<dyn Line>,
        repository: &RepositoryId,
        cancel: Arc<AtomicBool>,
        is_fetch: bool,
    ) -> Result<LineRemote> {
        let shared = Arc::new(Shared {
            line,
            state: Mutex::default(),
            changed: Condvar::new(),
            cancel,
            is_fetch,
            traffic: Mutex::default(),
        });
        let mut remote = LineRemote {
            shared: Arc::clone(&shared),
            repository: *repository,
            chunk_size_bytes: 0,
            threads: Vec::new(),
            next_batch: AtomicU64::new(0),
            reads: Arc::default(),
            trace_sent: Mutex::default(),
            asking: Mutex::new(()),
            telling: Mutex::new(()),
            points: Mutex::default(),
            started: Mutex::default(),
            begun: Mutex::default(),
            gathered_bytes: AtomicU64::new(0),
            base: Mutex::default(),
            is_paused: AtomicBool::new(false),
        };
        let start = |name: String, work: fn(&Shared, u32), number: u32| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(name.clone());
            thread
                .spawn(move || work(&shared, number))
                .context(|| format!("starting the thread {name}"))
        };
        remote.threads.push(start("copy-receiver".to_owned(), |shared, _| receive(shared), 0)?);
        for number in 0..PACKERS {
            remote.threads.push(start(format!("copy-packer-{number}"), pack, number)?);
        }
        for number in 0..READERS {
            let (reads, of_thread) = (Arc::clone(&remote.reads), Arc::clone(&shared.line));
            let thread = std::thread::Builder::new().name(format!("copy-reads-{number}"));
            let thread = thread.spawn(move || reads.answer_until_end(&*of_thread));
            remote.threads.push(thread.context(|| "starting a thread for reads")?);
        }
        match remote.ask(&Ask::Hello { version: VERSION, repository: *repository }, &[])? {
            Answer::Welcome { repository, chunk_size_bytes }
                if chunk_size_bytes.is_power_of_two()
                    && (1..=BATCH_BYTES as u32).contains(&chunk_size_bytes) =>
            {
                (remote.repository, remote.chunk_size_bytes) = (repository, chunk_size_bytes);
                Ok(remote)
            }
            _ => Err(broken("no welcome")),
        }
    }

    /// The traffic of the line.
    pub fn statistics(&self) -> LineStatistics {
        self.shared.line.statistics()
    }

    /// Adds to the counters.
    pub(super) fn count(&self, add: impl FnOnce(&mut Traffic)) {
        add(&mut self.shared.traffic.lock());
    }

    /// Why the line was lost, if it was: another one may do. Not if one of the sides ended it for a reason of its own.
    pub fn loss(&self) -> Option<Error> {
        self.shared.state.lock().check().err().filter(|error| error.kind() == ErrorKind::Io)
    }

    /// Closes the line: nothing is sent at this time. Another line continues later.
    pub fn pause(&self) {
        self.is_paused.store(true, Ordering::Relaxed);
        self.shared.line.close();
    }

    /// Asks, and waits for the answer.
    pub(super) fn ask(&self, ask: &Ask, attachment: &[u8]) -> Result<Answer> {
        let _one = self.asking.lock();
        self.tell(ask, attachment)?;
        self.answer()
    }

    /// Says what needs no answer.
    pub(crate) fn tell(&self, ask: &Ask, attachment: &[u8]) -> Result<()> {
        self.shared.state.lock().check()?;
        let _one = self.telling.lock();
        self.own_error(send(&*self.shared.line, ask, attachment))
    }

    fn answer(&self) -> Result<Answer> {
        let mut state = self.shared.state.lock();
        loop {
            match state.answers.pop_front() {
                Some(Answer::Failed(failure)) => return Err(failure.error()),
                Some(answer) => return Ok(answer),
                None => state.check()?,
            }
            self.shared.changed.wait(&mut state);
        }
    }

    /// The list of points that was asked for.
    fn listed(&self) -> Result<Vec<PointDocument>> {
        let mut all = Vec::new();
        loop {
            match self.answer()? {
                Answer::Points { points, is_last } => {
                    all.extend(points);
                    if is_last {
                        return Ok(all);
                    }
                }
                _ => return Err(broken("no list of points")),
            }
        }
    }

    /// Sends the names of a batch; waits while too many are not applied yet.
    pub(super) fn offer(&self, number: u32, batch: Batch, names: Vec<u8>) -> Result<()> {
        let mut state = self.shared.state.lock();
        while state.batches.len() >= MAX_BATCHES && state.answers.is_empty() {
            state.check()?;
            self.shared.changed.wait(&mut state);
        }
        // The other side says nothing now unless it failed.
        if let Some(Answer::Failed(failure)) = state.answers.pop_front() {
            return Err(failure.error());
        }
        state.check()?;
        let known_bytes = batch.bytes.len();
        state.batches.insert(number, Offered { batch: Arc::new(batch), known_bytes });
        self.gathered(0);
        drop(state);
        let frame = Frame { stream: 0, kind: super::messages::NAMES, body: names };
        self.own_error(self.shared.line.send(Class::Control, frame))
    }

    /// Notes how much content is not offered yet.
    pub(super) fn gathered(&self, bytes: usize) {
        self.gathered_bytes.store(bytes as u64, Ordering::Relaxed);
    }

    /// A number that no other batch of this line has.
    pub(super) fn next_number(&self) -> u32 {
        self.next_batch.fetch_add(1, Ordering::Relaxed) as u32
    }

    /// Forgets the batches of an abandoned disk.
    pub(super) fn forget_batches(&self) {
        let mut state = self.shared.state.lock();
        self.gathered(0);
        state.batches.clear();
        state.wanted.clear();
        self.shared.changed.notify_all();
    }

    /// The reason for which the line was ended, rather than its end.
    fn own_error<T>(&self, done: Result<T>) -> Result<T> {
        done.map_err(|error| self.shared.state.lock().check().err().unwrap_or(error))
    }
}

impl Drop for LineRemote {
    fn drop(&mut self) {
        self.shared.state.lock().is_over = true;
        self.reads.end();
        self.shared.changed.notify_all();
        self.shared.line.close();
        for thread in self.threads.drain(..) {
            // A panic there has failed the copy.
            let _ = thread.join();
        }
    }
}

/// The receiver thread.
fn receive(shared: &Shared) {
    let mut parts = Parts::default();
    let result = loop {
        if shared.state.lock().is_over {
            break Ok(());
        }
        if shared.cancel.load(Ordering::Relaxed) {
            break Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        let frame = match shared.line.receive(&[Class::Control], INTERVAL) {
            Ok(Received::Frame { frame, .. }) => frame,
            Ok(Received::Nothing) => continue,
            Ok(Received::Closed) => {
                let text = "the other site has ended the copy";
                break Err(Error::new(ErrorKind::Io, text).advise("run it again to continue"));
            }
            Err(error) => break Err(error),
        };
        if let Err(error) = take(shared, &mut parts, frame) {
            break Err(error);
        }
    };
    let mut state = shared.state.lock();
    if let Err(error) = result {
        state.failure.get_or_insert((error.kind(), error.full_message()));
    }
    drop(state);
    shared.changed.notify_all();
    // Ends all waits for credit.
    shared.line.close();
}

fn take(shared: &Shared, parts: &mut Parts, frame: Frame) -> Result<()> {
    match frame.kind {
        PART | MESSAGE => {
            if let Some((answer, _)) = parts.take::<Answer>(frame.kind, &frame.body)? {
                shared.state.lock().answers.push_back(answer);
            }
        }
        WANTED | WHOLE => {
            let (number, places, _) = decode_places(&frame.body)?;
            let mut state = shared.state.lock();
            // One of an abandoned disk is unknown.
            if let Some(offered) = state.batches.get_mut(&number) {
                let batch = Arc::clone(&offered.batch);
                let is_content = |place: &u16| {
                    batch.pieces.get(usize::from(*place)).is_some_and(|piece| !piece.is_empty())
                };
                if !places.iter().all(is_content) {
                    return Err(broken("it wants pieces that are not there"));
                }
                let is_whole = frame.kind == WHOLE;
                if !is_whole {
                    let wanted = places.iter().map(|place| batch.pieces[usize::from(*place)].len());
                    offered.known_bytes = offered.known_bytes.saturating_sub(wanted.sum());
                }
                state.wanted.push_back(Wanted { batch, number, places, is_whole });
            }
        }
        APPLIED => {
            let (number, ..) = decode_places(&frame.body)?;
            if let Some(offered) = shared.state.lock().batches.remove(&number) {
                shared.traffic.lock().known_bytes += offered.known_bytes as u64;
            }
        }
        RATE if shared.is_fetch => {
            let rate = frame.body.try_into().map_err(|_| broken("no rate"))?;
            let rate = u64::from_le_bytes(rate);
            shared.line.set_rate((rate > 0).then_some(rate));
        }
        _ => return Err(broken("an unknown frame")),
    }
    shared.changed.notify_all();
    Ok(())
}

/// A packer thread.
fn pack(shared: &Shared, stream: u32) {
    if let Err(error) = pack_until_end(shared, stream) {
        shared.state.lock().failure.get_or_insert((error.kind(), error.full_message()));
        shared.changed.notify_all();
    }
}

fn pack_until_end(shared: &Shared, stream: u32) -> Result<()> {
    let mut packer = Packer::new(stream)?;
    loop {
        let wanted = {
            let mut state = shared.state.lock();
            loop {
                if state.is_over || state.failure.is_some() {
                    return Ok(());
                }
                if let Some(wanted) = state.wanted.pop_front() {
                    break wanted;
                }
                shared.changed.wait(&mut state);
            }
        };
        packer.pack(&wanted, |pack| {
            let packed_bytes = pack.frame.body.len() as u64;
            shared.line.send(Class::Bulk, pack.frame)?;
            let mut traffic = shared.traffic.lock();
            traffic.packed_bytes += packed_bytes;
            // Content that is sent again counts once.
            if !wanted.is_whole {
                traffic.content_bytes += pack.content_bytes as u64;
                traffic.delta_bytes += pack.delta_bytes as u64;
            }
            Ok(())
        })?;
    }
}

impl BackupTarget for LineRemote {
    fn chunk_size_bytes(&self) -> u32 {
        self.chunk_size_bytes
    }

    fn start_disk(
        &self,
        base: Option<MapRoot>,
        size_bytes: u64,
        _options: WriteOptions,
    ) -> Result<Box<dyn DiskTarget + '_>> {
        let is_started = self.started.lock().take() == Some((base, size_bytes));
        let answer = match is_started {
            true => Answer::Started,
            false => self.ask(&Ask::Start { base, size_bytes }, &[])?,
        };
        match answer {
            Answer::Started => {
                let all = self.begun.lock();
                let begun = all.iter().find(|begun| Some(begun.root) == base);
                let end_bytes = begun.map_or(0, |begun| begun.end_bytes);
                let base = self.base.lock().take().filter(|_| base.is_some());
                Ok(Box::new(LineDisk::new(self, size_bytes, end_bytes, base)))
            }
            _ => Err(broken("no start")),
        }
    }

    fn put_point(&self, document: &PointDocument, files: Option<&[u8]>) -> Result<()> {
        let document = Box::new(document.clone());
        match self.ask(&Ask::Put { document }, files.unwrap_or_default())? {
            Answer::Added => Ok(()),
            _ => Err(broken("the point was not added")),
        }
    }
}

impl Remote for LineRemote {
    fn target(&self) -> &dyn BackupTarget {
        self
    }

    fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    fn id(&self) -> Result<RepositoryId> {
        Ok(self.repository)
    }

    fn claim(&self, machine: &MachineName) -> Result<Box<dyn Any>> {
        let _one = self.asking.lock();
        // Both at once: each question takes a round trip.
        self.tell(&Ask::Claim { machine: machine.clone() }, &[])?;
        self.tell(&Ask::Points { machine: machine.clone() }, &[])?;
        let claimed = self.answer();
        let points = self.listed();
        match claimed? {
            // The other side gives it up with the next claim, and with the line.
            Answer::Claimed => {
                *self.points.lock() = Some((machine.clone(), points?));
                Ok(Box::new(()))
            }
            _ => Err(broken("no claim")),
        }
    }

    fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        if let Some((_, points)) = self.points.lock().take().filter(|(known, _)| known == machine) {
            return Ok(points);
        }
        let _one = self.asking.lock();
        self.tell(&Ask::Points { machine: machine.clone() }, &[])?;
        self.listed()
    }

    fn keep_base(&self, base: &PointDocument) -> Result<bool> {
        let (machine, point) = (base.machine.clone(), base.point.clone());
        match self.ask(&Ask::Keep { machine, point }, &[])? {
            Answer::Kept { is_there } => Ok(is_there),
            _ => Err(broken("no word about the base")),
        }
    }

    fn announce(&self, announcement: &Announcement<'_>) -> Result<Announced> {
        let number = self.next_number();
        let files = announcement.files;
        let files = if files.files.is_empty() { Vec::new() } else { files.encode()? };
        let mut trace_sent = self.trace_sent.lock();
        let trace = announcement.trace.as_ref().filter(|_| {
            // It belongs to the machine: once per line is enough.
            trace_sent.replace(announcement.machine.clone()).as_ref() != Some(announcement.machine)
        });
        let trace = trace.map(|trace| String::from_utf8_lossy(trace).into_owned());
        drop(trace_sent);
        let details = Details {
            differences: announcement.disks.iter().map(|disk| disk.differences.clone()).collect(),
            trace: trace.unwrap_or_default(),
            // Larger ones are sent at the end.
            files: if files.len() <= MAX_ANNOUNCED_FILES { files } else { Vec::new() },
        };
        let ask = Ask::Announce {
            number,
            document: Box::new(announcement.document.clone()),
            bases: announcement.disks.iter().map(|disk| disk.base).collect(),
        };
        let disks = announcement.disks.iter().map(|disk| Arc::clone(&disk.content)).collect();
        let reads = self.reads.serve(number, disks);
        match self.ask(&ask, &details.encode()?)? {
            Answer::Announced { begun } if begun.len() == announcement.disks.len() => {
                *self.begun.lock() = begun.iter().flatten().copied().collect();
                // The other side has started the first disk.
                let first = announcement.disks.first().zip(begun.first());
                *self.started.lock() = first.map(|(disk, begun)| {
                    (begun.map(|begun| begun.root).or(disk.base), disk.content.size_bytes())
                });
                Ok(Announced { begun, _reads: Box::new(reads) })
            }
            _ => Err(broken("no word about what has begun")),
        }
    }

    fn compare_with(&self, base: Option<Arc<dyn Disk>>) {
        *self.base.lock() = base;
    }

    fn add_point(&self, document: PointDocument, files: &CarriedFiles) -> Result<PointDocument> {
        let files = if files.files.is_empty() { Vec::new() } else { files.encode()? };
        self.put_point(&document, Some(&files))?;
        Ok(document)
    }

    fn traffic(&self) -> Traffic {
        let sent_bytes = self.statistics().sent_bytes;
        Traffic { sent_bytes, ..*self.shared.traffic.lock() }
    }

    fn pending_bytes(&self) -> u64 {
        let state = self.shared.state.lock();
        let offered = state.batches.values().map(|offered| offered.batch.bytes.len() as u64);
        offered.sum::<u64>() + self.gathered_bytes.load(Ordering::Relaxed)
    }

    fn begin_again(&self) -> Result<bool> {
        Ok(false)
    }
}
