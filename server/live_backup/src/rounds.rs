//! Follows a machine that runs elsewhere: reads its changes in rounds, into a session.
//!
//! Each round is like a backup (see `LiveMachine`): one instant of all disks, what has changed is read, and if that fails the
//! changes count on. The session makes a mark of it, whose round names the bitmap (see `coldrise_session::Follower`). The
//! order makes a kill at any step safe: the mark is durable before the bitmap of the round before is removed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{Changes, Location, SourceSpec, unrecorded_difference, write_changes};
use coldrise_session::{FollowProgress, Follower, Round};
use coldrise_store::{MachineName, Repository};

use crate::live_backup::{LiveOptions, connect, explained};
use crate::since::{RoundStart, series_of};
use crate::{LiveMachine, Since};

/// How often the end is looked for between two rounds.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

/// A round that has ended.
#[derive(Clone, Debug)]
pub struct RoundReport {
    /// The session has everything that the machine wrote until then, in milliseconds since 1970.
    pub current_ms: u64,
    /// Bytes read and written.
    pub changes: Changes,
    /// Whether the state is marked: not if nothing was written since the last mark.
    pub is_marked: bool,
    /// How long the machine stood still, at most.
    pub standstill: Option<Duration>,
    /// Whether the guest's file systems were frozen.
    pub is_consistent: bool,
    /// Whether the machine is off.
    pub is_off: bool,
    /// How long the round took.
    pub took: Duration,
    /// Remarks for the user.
    pub remarks: Vec<String>,
}

/// Why rounds ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoundsEnd {
    /// Cancelled; with the warnings of a round that did not end, such as of a guest that may still be frozen.
    Cancelled(Vec<String>),
    /// The machine's disks are not those of the session any more; says how.
    OtherDisks(String),
}

/// The rounds of a machine and its session.
pub struct Rounds {
    repository: Arc<Repository>,
    machine: MachineName,
    /// The default for the domain's name.
    domain: String,
    options: LiveOptions,
    /// DISK=DEVICE for each disk; none stands for all.
    disks: Vec<String>,
    consistent_every: Option<Duration>,
    follower: Follower,
    /// The session's series.
    series: String,
    last_consistent: Option<Instant>,
    /// Whether the disks were compared with the session's since the machine was last out of reach.
    is_compared: bool,
    /// Whether the session has everything of a machine that is off.
    has_last_state: bool,
    /// The warnings of a round that has not ended.
    warnings: Vec<String>,
}

enum Outcome {
    Done(RoundReport),
    OtherDisks(String),
}

impl Rounds {
    /// The rounds of a session. `consistent_every`: how often the guest's file systems are frozen for the instant.
    pub fn new(
        repository: &Arc<Repository>,
        options: LiveOptions,
        domain: &str,
        disks: &[String],
        consistent_every: Option<Duration>,
        follower: Follower,
    ) -> Rounds {
        let document = follower.document();
        Rounds {
            repository: Arc::clone(repository),
            machine: document.machine.clone(),
            domain: domain.to_owned(),
            options,
            disks: disks.to_vec(),
            consistent_every,
            series: series_of(&document),
            follower,
            last_consistent: None,
            is_compared: false,
            has_last_state: false,
            warnings: Vec::new(),
        }
    }

    /// The session that takes the changes.
    pub fn follower(&self) -> &Follower {
        &self.follower
    }

    /// A round each `every`, until `cancel` is set. `watch` gets each result. A round that fails is repeated at the next
    /// time; the guest does not notice.
    ///
    /// # Errors
    /// The first round's, if the session has no state yet; contradictory options; the session's, if it takes no more writes.
    pub fn run(
        &mut self,
        every: Duration,
        watch: &mut dyn FnMut(&Result<RoundReport>),
        cancel: &AtomicBool,
    ) -> Result<RoundsEnd> {
        let mut current_ms = 0;
        let mut has_state = self.follower.last_round().is_some();
        loop {
            let begun = Instant::now();
            self.warnings.clear();
            let done = match self.round(cancel) {
                Ok(Outcome::OtherDisks(how)) => return Ok(RoundsEnd::OtherDisks(how)),
                Ok(Outcome::Done(report)) => Ok(report),
                Err(error) => Err(error),
            };
            if cancel.load(Ordering::Relaxed) && done.is_err() {
                return Ok(RoundsEnd::Cancelled(std::mem::take(&mut self.warnings)));
            }
            let done = done.map_err(|error| self.warnings.drain(..).fold(error, Error::context));
            if let Ok(report) = &done {
                current_ms = report.current_ms;
                has_state = true;
            }
            let is_useless = |error: &Error| {
                matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported)
            };
            match done {
                Err(error) if is_useless(&error) || !has_state || self.follower.has_stopped() => {
                    return Err(error);
                }
                Err(_) => self.is_compared = false,
                Ok(_) => {}
            }
            let problem = done.as_ref().err().map(Error::full_message);
            self.follower.note(FollowProgress { current_ms, problem });
            watch(&done);
            while begun.elapsed() < every {
                if cancel.load(Ordering::Relaxed) {
                    return Ok(RoundsEnd::Cancelled(Vec::new()));
                }
                std::thread::sleep(CANCEL_INTERVAL.min(every.saturating_sub(begun.elapsed())));
            }
            if cancel.load(Ordering::Relaxed) {
                return Ok(RoundsEnd::Cancelled(Vec::new()));
            }
        }
    }

    fn round(&mut self, cancel: &AtomicBool) -> Result<Outcome> {
        let begun = Instant::now();
        let is_due = |every: Duration| self.last_consistent.is_none_or(|at| at.elapsed() >= every);
        let is_quiesced = self.consistent_every.is_some_and(is_due);
        let agent = self.options.agent.clone().filter(|_| is_quiesced);
        let options = LiveOptions { is_quiesced, agent, ..self.options.clone() };
        let mut machine = connect(options, &self.domain, &self.disks)?;
        if machine.is_running() {
            // Its disks may have been exchanged while it was off.
            self.is_compared &= !self.has_last_state;
            self.has_last_state = false;
        } else if self.has_last_state {
            return Ok(Outcome::Done(self.nothing_new(begun)));
        }
        let document = self.follower.document();
        let last = self.follower.last_round();
        let round = self.follower.new_round();
        let since = Since::Round(RoundStart {
            repository: &self.repository,
            machine: &self.machine,
            series: self.series.clone(),
            disks: document.disks.iter().map(|d| (d.name.clone(), d.size_bytes)).collect(),
            base: last.map_or(Ok(document.point.clone()), Round::name)?,
            next: round.name()?,
            is_first: last.is_none(),
        });
        let instant = machine.take(&since, cancel)?;
        // Not before the instant: the last mark before a disaster must not contain it.
        let time = self.follower.now();
        let is_warning = |remark: &&String| remark.starts_with("warning: ");
        self.warnings = instant.remarks.iter().filter(is_warning).cloned().collect();
        let is_off = instant.is_off;
        let read = self.check_disks(&instant.sources).and_then(|other| match other {
            Some(how) => Ok(Err(how)),
            None => self.read(machine.as_ref(), &instant.sources, cancel),
        });
        let (changes, more) = match read {
            Ok(Ok(done)) => done,
            Ok(Err(how)) => {
                machine.close(false)?;
                return Ok(Outcome::OtherDisks(how));
            }
            Err(error) => {
                let error = explained(error, machine.why_disks_are_lost(), is_off);
                return Err(match machine.close(false) {
                    Ok(()) => error,
                    Err(left) => error.context(left.message()),
                });
            }
        };
        let is_incremental = instant
            .sources
            .iter()
            .all(|source| matches!(&source.location, Location::Live { bitmap: Some(_), .. }));
        let is_unchanged = is_incremental && changes.read_bytes == 0 && changes.written_bytes == 0;
        // The first round shows the machine's state even if that is the backup's.
        let is_marked = last.is_none() || !is_unchanged;
        if is_marked {
            let round = round.consistent(instant.is_quiesced);
            if let Err(error) = self.follower.finish_round(round, time) {
                let _ = machine.close(false);
                return Err(error);
            }
        }
        let mut remarks = instant.remarks;
        remarks.extend(more);
        if let Err(error) = machine.close(is_marked) {
            remarks.push(format!("warning: {}", error.full_message()));
        }
        self.is_compared = true;
        self.has_last_state = is_off;
        if is_quiesced {
            self.last_consistent = Some(Instant::now());
        }
        Ok(Outcome::Done(RoundReport {
            current_ms: time.unix_ms(),
            changes,
            is_marked,
            standstill: instant.standstill,
            is_consistent: instant.is_quiesced && is_marked,
            is_off,
            took: begun.elapsed(),
            remarks,
        }))
    }

    /// The machine is off, and the session has its last state.
    fn nothing_new(&self, begun: Instant) -> RoundReport {
        RoundReport {
            current_ms: self.follower.now().unix_ms(),
            changes: Changes::default(),
            is_marked: false,
            standstill: None,
            is_consistent: false,
            is_off: true,
            took: begun.elapsed(),
            remarks: Vec::new(),
        }
    }

    /// How the machine's disks differ from those of the session, if they do.
    fn check_disks(&self, sources: &[SourceSpec]) -> Result<Option<String>> {
        let document = self.follower.document();
        let mut there: Vec<&str> = sources.iter().map(|source| source.disk.as_str()).collect();
        let mut here: Vec<&str> = document.disks.iter().map(|disk| disk.name.as_str()).collect();
        there.sort_unstable();
        here.sort_unstable();
        Ok((there != here).then(|| {
            format!("the machine has the disks {}, not {}", there.join(", "), here.join(", "))
        }))
    }

    /// Reads the changes of all disks into the session. Also returns remarks; or how a disk differs from the session's.
    fn read(
        &self,
        machine: &dyn LiveMachine,
        sources: &[SourceSpec],
        cancel: &AtomicBool,
    ) -> Result<std::result::Result<(Changes, Vec<String>), String>> {
        let (mut sum, mut remarks) = (Changes::default(), Vec::new());
        for source in sources {
            let disk = self.follower.disk(&source.disk)?;
            let mut source = source.clone();
            if !self.is_compared {
                let chunk_bytes = u64::from(self.repository.chunk_size_bytes());
                let seed = self.follower.now().unix_ms();
                if unrecorded_difference(&source, disk.as_ref(), chunk_bytes, seed, cancel)?
                    .is_some()
                {
                    let text = "this is not the disk of the last round: everything is read";
                    remarks.push(format!("{}: {text}", source.disk));
                    if let Location::Live { bitmap, .. } = &mut source.location {
                        *bitmap = None;
                    }
                }
            }
            let changes = match write_changes(&source, disk.as_ref(), cancel) {
                Err(error) if error.kind() == ErrorKind::Incomplete => {
                    return Ok(Err(error.message()));
                }
                changes => changes.map_err(|error| error.context(&source.disk))?,
            };
            sum.read_bytes += changes.read_bytes;
            sum.written_bytes += changes.written_bytes;
        }
        if let Some(still) = machine.stillness() {
            still.prove()?;
        }
        Ok(Ok((sum, remarks)))
    }
}
