//! Sends the marks of a session to another site, one after the other, for as long as it is wanted.
//!
//! The last mark that is durable there is the cursor: what has changed since is sent with the next one. It is known on each new
//! connection, because the other site says which marks it has. If it has none of those that there are here, it
//! gets a restore point of the newest mark first, by a copy, and a new session.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{BLOCK_SIZE_BYTES, Error, ErrorKind, Result, now_ms};
use coldrise_line::{Class, Frame, Line, LineOptions, Received, TcpLine, connect};
use coldrise_session::{
    Change, SessionChanges, SessionMark, SessionNotes, SiteProgress, seal_mark_of,
};
use coldrise_store::{MachineName, PointDocument, Repository, SessionName};

use crate::attempts::{Site, Way, copy_over, pause};
use crate::remote::live::{CHANGES, Changed, LiveAnswer, LiveAsk, LiveMark, LiveOpening};
use crate::remote::messages::{Ask, MESSAGE, PART, Parts, VERSION, broken, send};
use crate::{CopyProgress, CopyRequest, Links};

/// Interval of looking for a new mark.
const LOOK: Duration = Duration::from_millis(200);
/// Interval of telling the other site that nothing has changed, and of the note here.
const TELL: Duration = Duration::from_secs(5);
/// Marks of the other site that are ahead of those here by more than this, in nanoseconds, are not waited for: a new session
/// begins there.
const MOST_AHEAD_NS: u64 = 120_000_000_000;
/// How long they are waited for.
const MOST_WAIT: Duration = Duration::from_secs(180);
const NS_PER_SECOND: u64 = 1_000_000_000;
/// Time without an answer after which the connection counts as lost. A mark there is durable when it is answered, and to go
/// back takes time in proportion to the captured blocks.
const SILENCE: Duration = Duration::from_secs(600);
/// Interval of asking again to hold the mark that is being sent: it is held for two minutes.
const HOLD_AGAIN: Duration = Duration::from_secs(30);
/// The first and the longest wait before the next connection.
const WAITS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How long a seal of the session may take.
const SEAL_PATIENCE: Duration = Duration::from_secs(60);

/// What has happened.
#[derive(Debug)]
pub enum LiveStep<'a> {
    /// The session has no mark yet: the first one is waited for.
    NoMark,
    /// A copy of a point begins: the two sites have no mark in common.
    Copy,
    /// The other site has these marks' session.
    Connected(&'a SiteProgress),
    /// It has the next mark.
    Mark(&'a SiteProgress),
    /// Nothing is sent, and why; it is tried again.
    Problem(&'a Error),
}

/// Who hears of it.
pub trait LiveProgress: CopyProgress {
    /// A step was reached.
    fn live(&self, step: &LiveStep<'_>);
}

/// The session whose marks are sent, and to where.
pub struct LiveRequest<'a> {
    /// The repository.
    pub repository: &'a Arc<Repository>,
    /// The session.
    pub session: &'a SessionName,
    /// The link, by its name here.
    pub link: &'a MachineName,
    /// Limit of what is sent, in bytes per second.
    pub rate_bytes_per_second: Option<u64>,
}

/// Sends the marks of a session to a site until `cancel` is set, or the session is ended: that is the end, without an error.
///
/// # Errors
/// `NotFound` if there is no such session; `Interrupted` once `cancel` is set; `Forbidden` and `Unsupported` if the site refuses.
pub fn send_live(
    request: &LiveRequest<'_>,
    site: &Site<'_>,
    progress: &dyn LiveProgress,
    cancel: &Arc<AtomicBool>,
) -> Result<()> {
    let changes = SessionChanges::of(request.repository, request.session)?;
    if changes.document().mark_rules().is_off() {
        let text = format!(
            "session {} has no time marks: it was published with --marks off",
            request.session
        );
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let _alone = SiteProgress::lock(request.repository, request.session, request.link)?;
    let link = request.link.to_string();
    // How far an earlier process came still counts.
    let before = SiteProgress::of(request.repository, request.session, request.link)?;
    let before = before.unwrap_or_default();
    let mut sender = Sender {
        request,
        site,
        progress,
        cancel,
        changes,
        state: SiteProgress { link, sent_bytes: 0, marks: 0, pending_bytes: 0, ..before },
        noted: None,
        looked: None,
        sending: None,
        cursor: None,
        first: None,
        is_apart: false,
    };
    let mut wait = WAITS.0;
    loop {
        let marks_before = sender.state.marks;
        let error = match sender.connection() {
            Err(error) => error,
            Ok(never) => match never {},
        };
        let ends = [
            ErrorKind::Interrupted,
            ErrorKind::Forbidden,
            ErrorKind::Unsupported,
            ErrorKind::InvalidInput,
        ];
        let is_ended = SessionNotes::of(request.repository, request.session)
            .is_err_and(|error| error.kind() == ErrorKind::NotFound);
        if cancel.load(Ordering::Relaxed) || is_ended || ends.contains(&error.kind()) {
            sender.state.problem = (!cancel.load(Ordering::Relaxed)).then(|| error.full_message());
            sender.note(true);
            return if is_ended { Ok(()) } else { Err(error) };
        }
        if error.kind() == ErrorKind::NotFound {
            // The point was forgotten, or a layer of its mark was folded.
            sender.first = None;
        }
        progress.live(&LiveStep::Problem(&error));
        sender.count_pending();
        sender.state.problem = Some(error.full_message());
        sender.note(true);
        if sender.state.marks > marks_before {
            wait = WAITS.0;
        }
        if !pause(wait, cancel) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        wait = (wait * 2).min(WAITS.1);
    }
}

struct Sender<'a> {
    request: &'a LiveRequest<'a>,
    site: &'a Site<'a>,
    progress: &'a dyn LiveProgress,
    cancel: &'a Arc<AtomicBool>,
    changes: SessionChanges,
    state: SiteProgress,
    noted: Option<Instant>,
    /// When it was last looked whether the link is there.
    looked: Option<Instant>,
    /// The mark that is being sent, and when it was last asked to be held.
    sending: Option<(u64, Instant)>,
    /// The newest mark there.
    cursor: Option<SessionMark>,
    /// The point of the first state there, and the mark that it shows: made once, however often its copy fails.
    first: Option<(PointDocument, SessionMark)>,
    /// The times of the marks there and here do not meet: a new session begins there.
    is_apart: bool,
}

/// A line on which marks are sent.
struct Connection {
    line: TcpLine,
    parts: Parts,
    sent_before: u64,
}

/// No value: a connection ends with an error only.
enum Never {}

impl Sender<'_> {
    /// Connects, and sends marks until something fails.
    fn connection(&mut self) -> Result<Never> {
        let rate = self.request.rate_bytes_per_second;
        let options = LineOptions { rate_bytes_per_second: rate, ..LineOptions::default() };
        self.check_cancel()?;
        let line = connect(self.site.address, &self.site.identity, self.site.peer, &options)?;
        let mut open =
            Connection { line, parts: Parts::default(), sent_before: self.state.sent_bytes };
        let sent = self.send_marks(&mut open);
        open.line.close();
        self.count(&open);
        sent
    }

    fn send_marks(&mut self, open: &mut Connection) -> Result<Never> {
        let document = self.changes.document();
        let opening = LiveOpening {
            machine: document.machine.clone(),
            repository: *self.request.repository.id(),
            session: document.name.clone(),
            created_at_ms: document.created_at_ms,
            disks: document.disks.iter().map(|d| (d.name.clone(), d.size_bytes)).collect(),
        };
        send(&open.line, &Ask::Live { version: VERSION, opening }, &[])?;
        let LiveAnswer::State { times_ns, .. } = self.answer(open)? else {
            return Err(broken("no state"));
        };
        let marks = self.changes.marks()?;
        // The site may have marks of writes that were lost here. Later ones get later times, soon unless the clock was wrong.
        let latest_ns = times_ns.last().copied().unwrap_or(0);
        let now_ns = now_ms().saturating_mul(1_000_000);
        let here_ns = marks.last().map_or(now_ns, |newest| newest.time_ns.max(now_ns));
        let is_near = latest_ns <= here_ns.saturating_add(MOST_AHEAD_NS);
        let common = marks.into_iter().rev().find(|mark| times_ns.contains(&mark.time_ns));
        let mut opening = None;
        let is_apart = std::mem::take(&mut self.is_apart) || !is_near;
        let mut cursor = match common.filter(|_| !is_apart) {
            Some(mark) => {
                let held = self.changes.hold(&[mark.time_ns])?;
                opening = held.held_ns.contains(&mark.time_ns).then_some(held.opening);
                self.ask(open, &LiveAsk::Back { time_ns: mark.time_ns })?;
                mark
            }
            None => self.begin(open)?,
        };
        self.state.marked_at_ms = cursor.time_ns / 1_000_000;
        self.state.current_ms = self.state.current_ms.max(self.state.marked_at_ms);
        self.state.problem = None;
        self.note(true);
        self.progress.live(&LiveStep::Connected(&self.state));
        let mut told = None::<Instant>;
        let mut waited = None::<Instant>;
        loop {
            self.cursor = Some(cursor.clone());
            self.check_cancel()?;
            let held = self.changes.hold(&[cursor.time_ns])?;
            if opening != Some(held.opening) && !held.held_ns.contains(&cursor.time_ns) {
                let text = "the newest mark of the other site was lost with the process that served the session";
                return Err(Error::new(ErrorKind::Io, text));
            }
            opening = Some(held.opening);
            match held.newest.filter(|newest| newest.time_ns > cursor.time_ns) {
                Some(newest) if newest.unix_seconds() <= latest_ns / NS_PER_SECOND => {
                    let text = "the other site has marks of lost writes with later times: waiting until times here are later";
                    if waited.get_or_insert_with(Instant::now).elapsed() > MOST_WAIT {
                        self.is_apart = true;
                        return Err(Error::new(ErrorKind::Io, text));
                    }
                    self.state.problem.get_or_insert_with(|| text.to_owned());
                    self.look(open)?;
                }
                Some(newest) => {
                    self.send_mark(open, &cursor, &newest, held.current_ms)?;
                    cursor = newest;
                    told = Some(Instant::now());
                }
                None => {
                    self.state.current_ms = self.state.current_ms.max(held.current_ms);
                    if told.is_none_or(|told| told.elapsed() >= TELL) {
                        let current_ms = self.state.current_ms;
                        send(&open.line, &LiveAsk::Current { current_ms }, &[])?;
                        told = Some(Instant::now());
                    }
                    self.look(open)?;
                }
            }
            self.count(open);
            self.note(false);
        }
    }

    /// A new session there, from a point of the newest mark.
    fn begin(&mut self, open: &mut Connection) -> Result<SessionMark> {
        let LiveRequest { repository, .. } = *self.request;
        let (point, newest) = match self.first.take() {
            Some(first) => first,
            None => self.first_state(open)?,
        };
        self.first = Some((point.clone(), newest.clone()));
        self.state.problem = None;
        self.note(true);
        self.progress.live(&LiveStep::Copy);
        let copy = CopyRequest {
            machines: vec![point.machine.clone()],
            only: Some(point.point.clone()),
            ..CopyRequest::default()
        };
        repository.catch_up()?;
        let way = Way::To { source: repository, request: &copy };
        let copied = copy_over(self.site, &way, self.progress, self.cancel)?.copied?;
        copied.machines.into_iter().find_map(|machine| machine.error).map_or(Ok(()), Err)?;
        let mark = LiveMark { time_ns: newest.time_ns, round: newest.round };
        self.ask(open, &LiveAsk::Begin { point: point.point, mark })?;
        self.first = None;
        Ok(newest)
    }

    /// A point of the newest mark.
    fn first_state(&mut self, open: &mut Connection) -> Result<(PointDocument, SessionMark)> {
        let LiveRequest { repository, session, .. } = *self.request;
        let mut is_told = false;
        let newest = loop {
            self.check_cancel()?;
            if let Some(newest) = self.changes.hold(&[])?.newest {
                break newest;
            }
            if !std::mem::replace(&mut is_told, true) {
                self.progress.live(&LiveStep::NoMark);
            }
            self.look(open)?;
        };
        let point = seal_mark_of(repository, session, &newest, SEAL_PATIENCE)?.point;
        Ok((point, newest))
    }

    fn send_mark(
        &mut self,
        open: &mut Connection,
        from: &SessionMark,
        to: &SessionMark,
        current_ms: u64,
    ) -> Result<()> {
        self.sending = Some((to.time_ns, Instant::now()));
        let disks = self.changes.between(from, to)?;
        let sizes: Vec<u64> = self.changes.document().disks.iter().map(|d| d.size_bytes).collect();
        self.state.pending_bytes = disks.iter().flatten().map(bytes_of).sum();
        let mut count = 0;
        for ((disk, changes), size_bytes) in (0..).zip(&disks).zip(&sizes) {
            count += self.send_changes(open, disk, changes, *size_bytes)?;
        }
        self.check_held(Duration::ZERO)?;
        let mark = LiveMark { time_ns: to.time_ns, round: to.round };
        send(&open.line, &LiveAsk::Mark { mark, changes: count, current_ms }, &[])?;
        match self.answer(open)? {
            LiveAnswer::Done { time_ns } if time_ns == to.time_ns => {}
            _ => return Err(broken("another mark is done")),
        }
        self.state.marks += 1;
        self.state.problem = None;
        self.state.marked_at_ms = to.time_ns / 1_000_000;
        self.state.current_ms = current_ms.max(self.state.marked_at_ms);
        self.state.pending_bytes = 0;
        self.progress.live(&LiveStep::Mark(&self.state));
        Ok(())
    }

    /// Holds the mark that is being sent for longer, if it was last asked for at least `age` ago. If it was removed meanwhile, a
    /// block may be missing.
    fn check_held(&mut self, age: Duration) -> Result<()> {
        let Some((time_ns, held)) = self.sending.filter(|(_, held)| held.elapsed() >= age) else {
            return Ok(());
        };
        if !self.changes.hold(&[time_ns])?.held_ns.contains(&time_ns) {
            let text = "the mark that was sent was removed meanwhile, for lack of space here";
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.sending = Some((time_ns, held + held.elapsed()));
        Ok(())
    }

    /// Sends the changes of a disk. Returns the number of frames.
    fn send_changes(
        &mut self,
        open: &mut Connection,
        disk: u16,
        changes: &[Change],
        size_bytes: u64,
    ) -> Result<u64> {
        let (mut zeroes, mut blocks) = (Changed::of(disk, false), Changed::of(disk, true));
        let (mut count, mut block) = (0, vec![0; BLOCK_SIZE_BYTES as usize]);
        for change in changes {
            // The last block may end behind the disk.
            let (changed, other, offset_bytes, length_bytes) = match *change {
                Change::Zeroes { offset_bytes, length_bytes } => {
                    (&mut zeroes, false, offset_bytes, length_bytes)
                }
                Change::Block { offset_bytes, place } => {
                    self.changes.read(place, offset_bytes, &mut block)?;
                    (&mut blocks, true, offset_bytes, BLOCK_SIZE_BYTES)
                }
            };
            let length_bytes = length_bytes.min(size_bytes - offset_bytes);
            let content = if other { &block[..length_bytes as usize] } else { &[] };
            if changed.is_full(content.len()) {
                count +=
                    self.send_frame(open, std::mem::replace(changed, Changed::of(disk, other)))?;
            }
            changed.push(offset_bytes, length_bytes, content);
        }
        Ok(count + self.send_frame(open, zeroes)? + self.send_frame(open, blocks)?)
    }

    fn send_frame(&mut self, open: &mut Connection, changed: Changed) -> Result<u64> {
        if changed.ranges.is_empty() {
            return Ok(0);
        }
        self.check_cancel()?;
        self.check_held(HOLD_AGAIN)?;
        let frame = Frame { stream: 0, kind: CHANGES, body: changed.encode()? };
        if let Err(lost) = open.line.send(Class::Bulk, frame) {
            // The other site may have said why.
            return Err(self.look(open).err().unwrap_or(lost));
        }
        let sent = changed.ranges.iter().map(|(_, length_bytes)| length_bytes).sum();
        self.state.pending_bytes = self.state.pending_bytes.saturating_sub(sent);
        self.count(open);
        self.note(false);
        Ok(1)
    }

    fn ask(&mut self, open: &mut Connection, ask: &LiveAsk) -> Result<()> {
        send(&open.line, ask, &[])?;
        let LiveAnswer::Ready { session } = self.answer(open)? else {
            return Err(broken("not ready"));
        };
        self.state.session = Some(session.to_string());
        Ok(())
    }

    /// Waits for an answer.
    fn answer(&mut self, open: &mut Connection) -> Result<LiveAnswer> {
        let began = Instant::now();
        loop {
            self.check_cancel()?;
            if let Some(answer) = self.receive(open)? {
                return Ok(answer);
            }
            if began.elapsed() > SILENCE {
                return Err(Error::new(ErrorKind::Io, "the other site does not answer"));
            }
            self.note(false);
        }
    }

    /// Waits a moment for an error of the other site.
    fn look(&mut self, open: &mut Connection) -> Result<()> {
        match self.receive(open)? {
            None => Ok(()),
            Some(_) => Err(broken("an answer to nothing")),
        }
    }

    fn receive(&mut self, open: &mut Connection) -> Result<Option<LiveAnswer>> {
        match open.line.receive(&[Class::Control], LOOK)? {
            Received::Nothing => Ok(None),
            Received::Closed => {
                Err(Error::new(ErrorKind::Io, "the other site has ended the connection"))
            }
            Received::Frame { frame, .. } if [PART, MESSAGE].contains(&frame.kind) => {
                match open.parts.take::<LiveAnswer>(frame.kind, &frame.body)? {
                    Some((LiveAnswer::Failed(failure), _)) => Err(failure.error()),
                    other => Ok(other.map(|(answer, _)| answer)),
                }
            }
            Received::Frame { .. } => Err(broken("an unknown frame")),
        }
    }

    /// # Errors
    /// `Interrupted` once the command is to end; `Forbidden` once the link was removed here.
    fn check_cancel(&mut self) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        if self.looked.is_none_or(|looked| looked.elapsed() >= TELL) {
            self.looked = Some(Instant::now());
            let found = Links::of(self.request.repository).find(self.request.link);
            if found.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
                let text = format!("link {} was removed here", self.request.link);
                return Err(Error::new(ErrorKind::Forbidden, text));
            }
        }
        Ok(())
    }

    /// Notes how much is not there while nothing is sent; what was known stays if the marks cannot be asked for.
    fn count_pending(&mut self) {
        let Some(cursor) = &self.cursor else { return };
        let newest = self.changes.hold(&[]).ok().and_then(|held| held.newest);
        let changed = newest.and_then(|newest| self.changes.between(cursor, &newest).ok());
        if let Some(disks) = changed {
            self.state.pending_bytes = disks.iter().flatten().map(bytes_of).sum();
        }
    }

    fn count(&mut self, open: &Connection) {
        self.state.sent_bytes = open.sent_before + open.line.statistics().sent_bytes;
    }

    /// Notes the state in the session's folder, every 5 seconds or `now`.
    fn note(&mut self, now: bool) {
        if !now && self.noted.is_some_and(|noted| noted.elapsed() < TELL) {
            return;
        }
        self.noted = Some(Instant::now());
        let noted = self.state.write(self.request.repository, self.request.session);
        if let Err(error) = noted {
            tracing::debug!("how far the other site is cannot be noted: {}", error.full_message());
        }
    }
}

fn bytes_of(change: &Change) -> u64 {
    match change {
        Change::Zeroes { .. } => 0,
        Change::Block { .. } => BLOCK_SIZE_BYTES,
    }
}
