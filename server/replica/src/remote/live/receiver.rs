//! The remote side: writes what comes, and makes the marks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Disk, Error, ErrorKind, Result, now_ms};
use coldrise_line::{Class, Frame, Line, Received};
use coldrise_session::{Catalog, FollowProgress, ReceivedFrom, ReceivedSession};
use coldrise_store::{DiskName, MachineName, PointName, PointSelector, Repository};
use parking_lot::Mutex;

use super::frames::{CHANGES, Changed};
use super::{LiveAnswer, LiveAsk, LiveMark, LiveOpening};
use crate::remote::messages::{Failure, MESSAGE, PART, Parts, broken, send};

/// Interval of looking whether the server ends.
const INTERVAL: Duration = Duration::from_millis(200);
/// Interval of looking whether the link still exists.
const LINK_INTERVAL: Duration = Duration::from_secs(5);
/// How long an earlier connection of the same session has to end.
const HANDOVER: Duration = Duration::from_secs(20);
/// Most days by which the time of a mark may be ahead of the clock here: later marks come after it. A clock that was set forward and
/// back again leaves marks that are ahead by the step.
const MOST_DAYS_AHEAD: u64 = 366;
const NS_PER_DAY: u64 = 86_400 * NS_PER_SECOND;
const NS_PER_SECOND: u64 = 1_000_000_000;

/// The connections of a server that take marks, by the link and the session.
#[derive(Default)]
pub struct LiveReceivers(Mutex<HashMap<String, Arc<AtomicBool>>>);

/// The rights of the source.
pub struct LiveTerms<'a> {
    /// The link, by its name here.
    pub link: &'a MachineName,
    /// Begins the names of its machines here.
    pub prefix: &'a str,
    /// Whether the link still exists.
    pub is_valid: &'a dyn Fn() -> bool,
}

impl LiveReceivers {
    /// Takes the marks of a session over `line` until it ends. A newer connection of the same session ends it.
    ///
    /// # Errors
    /// Errors of the line and of the repository, which are sent to the other side; `Interrupted` once `cancel` is set.
    pub fn receive(
        &self,
        line: &dyn Line,
        repository: &Arc<Repository>,
        opening: &LiveOpening,
        terms: &LiveTerms<'_>,
        cancel: &AtomicBool,
    ) -> Result<()> {
        let key = format!("{} {}", terms.link, opening.session);
        let replaced = Arc::new(AtomicBool::new(false));
        if let Some(before) = self.0.lock().insert(key.clone(), Arc::clone(&replaced)) {
            before.store(true, Ordering::Relaxed);
        }
        let mut receiver = LiveReceiver {
            line,
            repository,
            opening,
            terms,
            received: None,
            disks: Vec::new(),
            is_ready: false,
            newest_ns: 0,
            changes: 0,
            mark: None,
            last_look: Instant::now(),
        };
        let done =
            receiver.run(&|| cancel.load(Ordering::Relaxed) || replaced.load(Ordering::Relaxed));
        let mut all = self.0.lock();
        if all.get(&key).is_some_and(|newest| Arc::ptr_eq(newest, &replaced)) {
            all.remove(&key);
        }
        drop(all);
        done.inspect_err(|error| {
            let _ = send(line, &LiveAnswer::Failed(Failure::of(error)), &[]);
        })
    }
}

struct LiveReceiver<'a> {
    line: &'a dyn Line,
    repository: &'a Arc<Repository>,
    opening: &'a LiveOpening,
    terms: &'a LiveTerms<'a>,
    received: Option<ReceivedSession>,
    disks: Vec<Arc<dyn Disk>>,
    /// The disks are as of a mark, or changes since then have come on this line.
    is_ready: bool,
    /// The time of the mark that came last on this line, or from which it began.
    newest_ns: u64,
    /// The changes that have come since the last mark.
    changes: u64,
    /// A mark whose changes have not all come.
    mark: Option<(LiveMark, u64, u64)>,
    last_look: Instant,
}

impl LiveReceiver<'_> {
    fn run(&mut self, is_over: &dyn Fn() -> bool) -> Result<()> {
        self.machine()?;
        let from = self.from();
        self.repository.catch_up()?;
        if let Some(found) = ReceivedSession::find(self.repository, &from)? {
            self.use_session(self.open(&found.name, is_over)?)?;
        }
        let times_ns = self.received.as_ref().map(ReceivedSession::times_ns).unwrap_or_default();
        let session = self.received.as_ref().map(|received| received.document().name);
        send(self.line, &LiveAnswer::State { session, times_ns }, &[])?;
        let mut parts = Parts::default();
        loop {
            if is_over() {
                let text = "the other site has ended the connection";
                return Err(Error::new(ErrorKind::Io, text));
            }
            self.look_at_link()?;
            match self.line.receive(&[Class::Control, Class::Bulk], INTERVAL)? {
                Received::Nothing => {}
                Received::Closed => return Ok(()),
                Received::Frame { frame, .. } => self.take(&mut parts, frame)?,
            }
        }
    }

    /// The session there, as it is known here.
    fn from(&self) -> ReceivedFrom {
        ReceivedFrom {
            link: self.terms.link.clone(),
            repository: self.opening.repository,
            session: self.opening.session.clone(),
            created_at_ms: self.opening.created_at_ms,
        }
    }

    /// The machine's name here.
    fn machine(&self) -> Result<MachineName> {
        format!("{}{}", self.terms.prefix, self.opening.machine).parse()
    }

    /// Opens the session, after a connection before this one has ended.
    fn open(
        &self,
        name: &coldrise_store::SessionName,
        is_over: &dyn Fn() -> bool,
    ) -> Result<ReceivedSession> {
        let began = Instant::now();
        loop {
            match ReceivedSession::open(self.repository, name) {
                Err(error)
                    if error.kind() == ErrorKind::Busy
                        && !is_over()
                        && began.elapsed() < HANDOVER =>
                {
                    std::thread::sleep(INTERVAL);
                }
                opened => return opened,
            }
        }
    }

    fn look_at_link(&mut self) -> Result<()> {
        if self.last_look.elapsed() < LINK_INTERVAL {
            return Ok(());
        }
        self.last_look = Instant::now();
        match (self.terms.is_valid)() {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Forbidden, "the link was removed there")),
        }
    }

    fn use_session(&mut self, received: ReceivedSession) -> Result<()> {
        let disks = received.disks()?;
        let document = received.document();
        self.check_disks(document.disks.iter().map(|disk| (&disk.name, disk.size_bytes)))?;
        (self.received, self.disks) = (Some(received), disks);
        Ok(())
    }

    fn check_disks<'d>(&'d self, disks: impl Iterator<Item = (&'d DiskName, u64)>) -> Result<()> {
        match disks.eq(self.opening.disks.iter().map(|(name, size_bytes)| (name, *size_bytes))) {
            true => Ok(()),
            false => Err(broken("other disks than the session has here")),
        }
    }

    fn take(&mut self, parts: &mut Parts, frame: Frame) -> Result<()> {
        match frame.kind {
            PART | MESSAGE => match parts.take::<LiveAsk>(frame.kind, &frame.body)? {
                Some((ask, _)) => self.answer(ask)?,
                None => return Ok(()),
            },
            CHANGES => self.write(&frame.body)?,
            _ => return Err(broken("an unknown frame")),
        }
        self.mark_if_complete()
    }

    fn answer(&mut self, ask: LiveAsk) -> Result<()> {
        if self.is_ready && matches!(ask, LiveAsk::Begin { .. } | LiveAsk::Back { .. }) {
            return Err(broken("a line begins twice"));
        }
        match ask {
            LiveAsk::Begin { point, mark } => {
                self.take_time(mark.time_ns)?;
                // The session before, of which nothing is known at the source any more, keeps its marks.
                (self.received, self.disks) = (None, Vec::new());
                let received = self.begin(&point, mark)?;
                self.use_session(received)?;
            }
            LiveAsk::Back { time_ns } => {
                let received = self.received()?;
                received.go_back(time_ns)?;
                // Marks of writes that were lost there stay, and have later times.
                self.newest_ns = received.times_ns().last().copied().unwrap_or(time_ns);
            }
            LiveAsk::Mark { mark, changes, current_ms } => {
                if !self.is_ready || self.mark.is_some() {
                    return Err(broken("a mark before its changes"));
                }
                self.take_time(mark.time_ns)?;
                self.mark = Some((mark, changes, current_ms));
                return Ok(());
            }
            LiveAsk::Current { current_ms } => {
                self.received()?.note(FollowProgress { current_ms, problem: None });
                return Ok(());
            }
        }
        (self.is_ready, self.changes) = (true, 0);
        let session = self.received()?.document().name;
        send(self.line, &LiveAnswer::Ready { session }, &[])
    }

    /// Takes the time of the next mark. An address names a second: it always means the same state.
    ///
    /// # Errors
    /// `Corrupt` if it is not later; `Busy` if it is too far ahead.
    fn take_time(&mut self, time_ns: u64) -> Result<()> {
        if time_ns / NS_PER_SECOND <= self.newest_ns / NS_PER_SECOND {
            return Err(broken("a mark that is not later than the one before"));
        }
        let ahead_ns = time_ns.saturating_sub(now_ms().saturating_mul(1_000_000));
        let days = ahead_ns / NS_PER_DAY;
        if days > MOST_DAYS_AHEAD {
            let text = format!("the time of a mark is {days} days ahead of the clock there");
            let advice =
                "set the clocks of both sites; if it was wrong here, publish a new session";
            return Err(Error::new(ErrorKind::Busy, text).advise(advice));
        }
        self.newest_ns = time_ns;
        Ok(())
    }

    fn begin(&self, point: &PointName, mark: LiveMark) -> Result<ReceivedSession> {
        self.repository.catch_up()?;
        let selector = PointSelector::Exact(point.clone());
        let point = Catalog::new(self.repository).point(&self.machine()?, &selector)?;
        self.check_disks(point.disks.iter().map(|disk| (&disk.name, disk.size_bytes)))?;
        ReceivedSession::publish(self.repository, &point, &self.from(), mark.time_ns, mark.round)
    }

    fn received(&self) -> Result<&ReceivedSession> {
        self.received.as_ref().ok_or_else(|| broken("no session"))
    }

    fn write(&mut self, body: &[u8]) -> Result<()> {
        if !self.is_ready {
            return Err(broken("changes of no mark"));
        }
        let sizes: Vec<u64> =
            self.opening.disks.iter().map(|(_, size_bytes)| *size_bytes).collect();
        let changed = Changed::decode(body, &sizes)?;
        let disk = &self.disks[usize::from(changed.disk)];
        let mut rest = changed.content.as_deref();
        for (offset_bytes, length_bytes) in changed.ranges {
            match rest {
                Some(content) => {
                    let (now, later) = content.split_at(length_bytes as usize);
                    disk.write_at(now, offset_bytes)?;
                    rest = Some(later);
                }
                None => disk.write_zeroes(offset_bytes, length_bytes)?,
            }
        }
        self.changes += 1;
        Ok(())
    }

    fn mark_if_complete(&mut self) -> Result<()> {
        let Some((mark, changes, current_ms)) = self.mark else { return Ok(()) };
        if self.changes > changes {
            return Err(broken("more changes than a mark has"));
        }
        if self.changes < changes {
            return Ok(());
        }
        let received = self.received()?;
        received.finish(mark.time_ns, mark.round)?;
        received.note(FollowProgress { current_ms, problem: None });
        (self.mark, self.changes) = (None, 0);
        send(self.line, &LiveAnswer::Done { time_ns: mark.time_ns }, &[])
    }
}

#[cfg(test)]
#[path = "receiver_tests.rs"]
mod tests;
