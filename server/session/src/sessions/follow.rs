//! Sessions that follow a machine which runs elsewhere: its changes are read in rounds.
//!
//! ```text
//!   round n:  take the instant ─▶ write what has changed ─▶ mark of all disks ─▶ sync ─▶ give up the bitmap of round n-1
//! ```
//!
//! The mark of a round names it, and the bitmap at the source has the same name. So the newest mark
//! says from which bitmap the next round counts, whenever either side was killed:
//!
//! - before the mark is durable, round n-1 is the newest one, and its bitmap and that of round n together have all changes;
//! - after that, the bitmap of round n has them;
//! - if there is no mark, or no such bitmap, everything is read and compared.
//!
//! Between two marks the disks are a mixture of two states. So clients get none but marks, and no other process writes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Disk, Error, ErrorKind, Result, now_ms};
use coldrise_store::{
    DiskName, MachineName, MarkRules, PointDocument, PointName, Repository, SessionName,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::marks::SessionMark;
use crate::session_folder::document::SessionDocument;
use crate::sessions::publish::publish_following;
use crate::sessions::session::{Session, Use};

/// A round in which the changes of a machine were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    /// Names the round: later rounds of a session have higher numbers. About when it began, in seconds since 1970.
    number: u64,
    /// Whether the guest's file systems were frozen at its instant.
    pub is_consistent: bool,
}

impl Round {
    /// The round, whose state is of frozen file systems or not.
    #[must_use]
    pub fn consistent(self, is_consistent: bool) -> Round {
        Round { is_consistent, ..self }
    }

    pub(crate) fn encode(self) -> u64 {
        self.number << 1 | u64::from(self.is_consistent)
    }

    /// `None` if clients wrote the state.
    pub(crate) fn decode(code: u64) -> Option<Round> {
        (code > 1).then_some(Round { number: code >> 1, is_consistent: code & 1 == 1 })
    }

    /// Its name, as the bitmaps have it.
    ///
    /// # Errors
    /// `InvalidInput` after the year 9999.
    pub fn name(self) -> Result<PointName> {
        let seconds = i64::try_from(self.number).unwrap_or(i64::MAX);
        let time = jiff::Timestamp::from_second(seconds).map_err(|error| {
            Error::with_source(ErrorKind::InvalidInput, "the number of a round", error)
        })?;
        PointName::from_time(time)
    }
}

/// How far a session follows its machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FollowProgress {
    /// The newest mark has everything that the machine wrote until then, in milliseconds since 1970; 0 before the first
    /// round.
    pub current_ms: u64,
    /// Why the last round failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// When the state of a round was taken: not before it.
#[derive(Clone, Copy, Debug)]
pub struct RoundTime {
    pub(crate) time_ns: u64,
    pub(crate) at: Instant,
}

impl RoundTime {
    /// In milliseconds since 1970.
    pub fn unix_ms(self) -> u64 {
        self.time_ns / 1_000_000
    }
}

/// A session, open to follow its machine.
pub struct Follower {
    session: Arc<Session>,
    next: Mutex<u64>,
}

impl Follower {
    /// Publishes a point as a session that follows the machine at `source`. Without a name, uses the machine's
    /// name and the first free number.
    ///
    /// # Errors
    /// As for [`crate::publish`]; `InvalidInput` for a rule that keeps no marks.
    pub fn publish(
        repository: &Arc<Repository>,
        point: &PointDocument,
        name: Option<SessionName>,
        source: &str,
        rules: MarkRules,
    ) -> Result<SessionDocument> {
        if rules.is_off() {
            let text =
                "a session that follows a machine is reached by its marks: they cannot be off";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        publish_following(repository, point, name, source, rules)
    }

    /// The newest session that follows `machine`, or the one with this name; `None` if there is none.
    ///
    /// # Errors
    /// `InvalidInput` if the session of this name does not follow the machine; errors of reading the sessions' folder.
    pub fn find(
        repository: &Repository,
        machine: &MachineName,
        name: Option<&SessionName>,
    ) -> Result<Option<SessionDocument>> {
        let mut followers = Self::all(repository, machine)?.into_iter();
        let Some(name) = name else {
            return Ok(followers.max_by_key(|document| document.created_at_ms));
        };
        if let Some(found) = followers.find(|document| document.name == *name) {
            return Ok(Some(found));
        }
        let documents = SessionDocument::readable(repository)?;
        if documents.iter().any(|(_, other)| !other.is_ended && other.name == *name) {
            let text = format!("session {name} does not follow machine {machine}");
            return Err(Error::new(ErrorKind::InvalidInput, text).advise("choose another name"));
        }
        Ok(None)
    }

    /// The sessions that follow `machine`.
    ///
    /// # Errors
    /// Errors of reading the sessions' folder.
    pub fn all(repository: &Repository, machine: &MachineName) -> Result<Vec<SessionDocument>> {
        let documents = SessionDocument::readable(repository)?.into_iter().map(|(_, found)| found);
        let follows = |document: &SessionDocument| {
            let is_here = document.follows.is_some() && document.received.is_none();
            !document.is_ended && is_here && document.machine == *machine
        };
        Ok(documents.filter(follows).collect())
    }

    /// Opens the session. Its machine is at `source` from now on.
    ///
    /// # Errors
    /// As for [`Session::open`]; `Busy` if another process follows the machine.
    pub fn open(
        repository: &Arc<Repository>,
        name: &SessionName,
        source: &str,
    ) -> Result<Follower> {
        let session = Session::open_for(repository, name, Use::Follow)?;
        let follower = Follower { session, next: Mutex::new(0) };
        follower.session.follow_at(source)?;
        Ok(follower)
    }

    /// The session's document.
    pub fn document(&self) -> SessionDocument {
        self.session.document()
    }

    /// One of its disks.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn disk(&self, name: &DiskName) -> Result<Arc<dyn Disk>> {
        self.session.disk(name)
    }

    /// The newest complete round.
    pub fn last_round(&self) -> Option<Round> {
        let marks = self.session.marks_of(&self.session.document());
        marks.last().and_then(|mark| mark.round)
    }

    /// A round with a number that no earlier one has.
    pub fn new_round(&self) -> Round {
        let mut next = self.next.lock();
        // Before the first round, the bitmap of the point counts, under its name.
        let point = self.session.document().point.unix_seconds();
        let last = self.last_round().map_or(point, |round| round.number.max(point));
        *next = (now_ms() / 1000).max(last + 1).max(*next + 1);
        Round { number: *next, is_consistent: false }
    }

    /// The present time, for the mark of a round whose instant has just been taken. Grows from call to call, also if the
    /// clock is set back.
    pub fn now(&self) -> RoundTime {
        self.session.round_time()
    }

    /// Makes the disks, which are as the machine's were at `time`, the state of `round`: durably.
    ///
    /// # Errors
    /// `Poisoned` after a failed sync; `NoSpace`.
    pub fn finish_round(&self, round: Round, time: RoundTime) -> Result<()> {
        self.session.mark_round(Some(round), Some(time))?;
        self.session.flush_time_marks()
    }

    /// Notes how far the session follows its machine, for those who ask.
    pub fn note(&self, progress: FollowProgress) {
        self.session.note_progress_of_rounds(progress);
    }

    /// True once the session refuses writes.
    pub fn has_stopped(&self) -> bool {
        self.session.has_stopped()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.session.stop_listening();
    }
}

/// The newest of these marks, which is what a session that follows a machine shows.
///
/// # Errors
/// `NotFound` without one.
pub(crate) fn newest<'a>(marks: &'a [SessionMark], name: &SessionName) -> Result<&'a SessionMark> {
    marks.last().ok_or_else(|| {
        let text = format!("session {name} has no complete state of its machine yet");
        Error::new(ErrorKind::NotFound, text)
            .advise("wait for the first round of coldrise protect-live, or discard the session")
    })
}

/// The refusal to serve a session that follows a machine.
pub(crate) fn not_served(document: &SessionDocument) -> Error {
    let name = &document.name;
    let machine = &document.machine;
    let text = match &document.received {
        Some(received) => format!(
            "session {name} gets the marks of machine {machine} from site {}: nothing else may write it",
            received.link
        ),
        None => format!(
            "session {name} follows machine {machine}, which runs elsewhere: nothing else may write it"
        ),
    };
    Error::new(ErrorKind::Busy, text)
        .advise(format!("publish a time of it: coldrise publish live/{name}@-1s"))
}

/// How long a request to seal such a session waits for its process.
pub(crate) const SEAL_PATIENCE: Duration = Duration::from_secs(60);

#[cfg(test)]
#[path = "follow_tests.rs"]
mod tests;
