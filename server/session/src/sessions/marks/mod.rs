//! Time marks of a session: states of all its disks at one time, to which it can go back.
//!
//! While a process serves the session it makes a mark at each interval in which clients wrote (see
//! `keeper`). A mark is in the layers of all disks under one time. It counts if all of them have
//! it. A mark in a sealed layer stays there until the layer is folded.
//!
//! A mark that is used becomes a restore point: `seal` names the layers up to the mark's cell. So a
//! mark that was published, restored or booted is a point like any other, and the session may
//! remove the mark. If the mark is in the layer that takes the writes, that layer is sealed first:
//! from then on nothing in it is overwritten.

mod clock;
mod keeper;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result, now_ms};
use coldrise_store::{
    DiskDocument, LayerId, LayerReference, MarkRules, PointName, Repository, SessionName,
    SessionTime,
};
use serde::{Deserialize, Serialize};

use crate::disks::point_disk::sealed_layers;
use crate::layer::{Layer, LayerKeys, ReadMode, TimeMark, layer_damage};
use crate::locks::file_lock::{FileLock, PASSING_PATIENCE};
use crate::paths::{SessionPaths, layer_path};
use crate::session_folder::document::{SessionDisk, SessionDocument};
use crate::session_folder::notes::SessionNotes;
use crate::sessions::control::ask_for_marks;
use crate::sessions::follow::{FollowProgress, Round};

use clock::noted_grace;
pub(crate) use keeper::{MarkKeeper, marks_in};

const NS_PER_SECOND: u64 = 1_000_000_000;
/// Interval of looking at a session that a process opens.
const PAUSE: Duration = Duration::from_millis(50);

/// A state of all disks of a session at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionMark {
    /// Nanoseconds since 1970-01-01T00:00:00Z. Grows from mark to mark, also if the clock is set
    /// back.
    pub time_ns: u64,
    /// For each disk, in the document's order: the layer, and the sequence number of its cell.
    pub(crate) places: Vec<(LayerId, u64)>,
    /// The round in which the state was read, if the session follows a machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<Round>,
}

/// The marks of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionMarks {
    /// The oldest first.
    pub marks: Vec<SessionMark>,
    /// Space of the blocks that only marks need, in bytes. `None` if no process serves the session.
    pub held_bytes: Option<u64>,
    /// The most that they may take, in bytes. `None` if no process serves the session.
    pub held_bytes_limit: Option<u64>,
    /// The rule that is followed instead of the session's, because of the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduced_rule: Option<MarkRules>,
    /// How far the session follows its machine, if it follows one and a process does that now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<FollowProgress>,
}

impl SessionMarks {
    fn idle(marks: Vec<SessionMark>) -> SessionMarks {
        SessionMarks {
            marks,
            held_bytes: None,
            held_bytes_limit: None,
            reduced_rule: None,
            progress: None,
        }
    }
}

impl SessionMark {
    /// The time in whole seconds since 1970.
    pub fn unix_seconds(&self) -> u64 {
        self.time_ns / NS_PER_SECOND
    }

    /// Whether none of its layers takes writes.
    pub(crate) fn is_sealed(&self, document: &SessionDocument) -> bool {
        document.disks.iter().all(|disk| self.places.iter().all(|(id, _)| *id != disk.top))
    }

    /// Its second, as in an address.
    ///
    /// # Errors
    /// `InvalidInput` after the year 9999.
    pub fn name(&self) -> Result<PointName> {
        let seconds = i64::try_from(self.unix_seconds()).unwrap_or(i64::MAX);
        let time = jiff::Timestamp::from_second(seconds).map_err(|error| {
            Error::with_source(ErrorKind::InvalidInput, "the time of a mark", error)
        })?;
        PointName::from_time(time)
    }

    /// The disks as they were at the mark. Sealed layers keep their later writes: the last
    /// reference ends at the mark.
    ///
    /// # Errors
    /// `NotFound` if a layer of the mark was folded meanwhile.
    pub(crate) fn disks(&self, disks: &[SessionDisk]) -> Result<Vec<DiskDocument>> {
        let marked = |(disk, (id, sequence)): (&SessionDisk, &(LayerId, u64))| {
            let mut marked = disk.sealed();
            let found = marked.layers.iter().position(|layer| layer.id == *id);
            let Some(place) = found.filter(|_| self.places.len() == disks.len()) else {
                let text = "the mark is gone: its layer was folded meanwhile";
                return Err(Error::new(ErrorKind::NotFound, text));
            };
            marked.layers.truncate(place + 1);
            if let Some(last) = marked.layers.last_mut().filter(|l| *sequence < l.sealed_sequence) {
                *last = LayerReference {
                    sealed_sequence: *sequence,
                    layer_sequence: Some(last.layer_sequence.unwrap_or(last.sealed_sequence)),
                    ..last.clone()
                };
            }
            Ok(marked)
        };
        disks.iter().zip(&self.places).map(marked).collect()
    }
}

/// The marks that all disks have. Each disk has the marks of its layers, the lowest layer first.
pub(crate) fn whole_marks(disks: &[Vec<(LayerId, Vec<TimeMark>)>]) -> Vec<SessionMark> {
    let mut found: BTreeMap<u64, (u64, Vec<(LayerId, u64)>)> = BTreeMap::new();
    for (number, layers) in disks.iter().enumerate() {
        for (id, marks) in layers {
            for mark in marks {
                let (round, places) = found.entry(mark.time_ns).or_default();
                if places.len() == number {
                    *round = mark.round;
                    places.push((*id, mark.sequence));
                }
            }
        }
    }
    let whole = found.into_iter().filter(|(_, (_, places))| places.len() == disks.len());
    let mark =
        |(time_ns, (round, places))| SessionMark { time_ns, places, round: Round::decode(round) };
    whole.map(mark).collect()
}

/// The marks that the rule keeps now, and those of the times that are `held`.
pub(crate) fn kept_marks(
    marks: Vec<SessionMark>,
    rules: &MarkRules,
    now_ns: u64,
    held: &HashSet<u64>,
) -> Vec<SessionMark> {
    let times: Vec<u64> = marks.iter().map(|mark| mark.time_ns).collect();
    let kept = rules.kept(&times, now_ns).into_iter();
    let kept = marks.into_iter().zip(kept);
    let is_kept = |(mark, is_kept): &(SessionMark, bool)| *is_kept || held.contains(&mark.time_ns);
    kept.filter(is_kept).map(|(mark, _)| mark).collect()
}

/// Sets which marks of a session are kept. A process that serves it follows the rule from its next
/// opening on.
///
/// # Errors
/// `NotFound`.
pub fn set_mark_rules(
    repository: &Arc<Repository>,
    name: &SessionName,
    rules: MarkRules,
) -> Result<()> {
    let _documents = FileLock::documents(repository)?;
    let mut document = SessionDocument::of(repository, name)?;
    document.marks = Some(rules);
    document.write(repository, &SessionPaths::of(repository, name))
}

/// The sealed layers with marks to which sessions may go back.
///
/// # Errors
/// `Corrupt` if a session's document does not authenticate.
pub fn layers_with_marks(repository: &Repository) -> Result<HashSet<LayerId>> {
    let now_ms = now_ms();
    let documents = SessionDocument::readable(repository)?.into_iter();
    let disks = documents.filter(|(_, d)| !d.is_ended).flat_map(|(_, document)| document.disks);
    let layers = disks.flat_map(|disk| disk.layers);
    let reachable = layers.filter(|layer| layer.marks_until_ms.is_some_and(|end| end > now_ms));
    Ok(reachable.map(|layer| layer.id).collect())
}

/// The marks of a session: those that its process knows, or those in its layers if no process
/// serves it. The latter takes time in proportion to the captured blocks' records.
///
/// # Errors
/// `NotFound`; `Busy` if its process does not answer; `Corrupt` if a layer is damaged.
pub fn session_marks(repository: &Arc<Repository>, name: &SessionName) -> Result<SessionMarks> {
    let place = SessionPaths::of(repository, name);
    let document = SessionDocument::of(repository, name)?;
    let start = Instant::now();
    loop {
        if let Some(marks) = ask_for_marks(&place, name)? {
            return Ok(marks);
        }
        match idle_marks(repository, &document) {
            // A process opens the session, and answers when it has.
            Err(error) if error.kind() == ErrorKind::Busy && start.elapsed() < PASSING_PATIENCE => {
                std::thread::sleep(PAUSE);
            }
            found => return found,
        }
    }
}

/// The marks of a session that no process serves.
fn idle_marks(repository: &Arc<Repository>, document: &SessionDocument) -> Result<SessionMarks> {
    let marks = marks_in_layers(repository, document)?;
    // While no process serves the session, nothing changes: its marks do not age.
    let now_ns = marks.last().map_or(0, |mark| mark.time_ns);
    if now_ns < noted_grace(&SessionNotes::of(repository, &document.name)?).end_ns {
        return Ok(SessionMarks::idle(marks));
    }
    let marks = kept_marks(marks, &document.mark_rules(), now_ns, &HashSet::new());
    Ok(SessionMarks::idle(marks))
}

/// All marks in the layers of a session that no process serves.
pub(crate) fn marks_in_layers(
    repository: &Arc<Repository>,
    document: &SessionDocument,
) -> Result<Vec<SessionMark>> {
    let disk = |disk: &SessionDisk| {
        let sealed = sealed_layers(repository, &disk.layers, disk.size_bytes)?;
        let top = Layer::open_for_reading(
            &layer_path(repository, &disk.top),
            &disk.top_superblock(),
            LayerKeys::of(repository, &disk.top),
            ReadMode::Idle(disk.least_sequence),
        );
        let top = top.map_err(layer_damage)?;
        let layers = sealed.iter().chain([&top]).map(|layer| layer.time_marks());
        let ids = disk.layers.iter().map(|layer| layer.id).chain([disk.top]);
        Ok(ids.zip(layers).collect())
    };
    let disks = document.disks.iter().map(disk).collect::<Result<Vec<_>>>()?;
    Ok(whole_marks(&disks))
}

/// # Errors
/// `NotFound` if the mark is not among `marks` any more.
pub(crate) fn check_there(mark: &SessionMark, marks: &[SessionMark]) -> Result<()> {
    if marks.contains(mark) {
        return Ok(());
    }
    let text = "the mark has just ended: its blocks are being given back. Choose a later one";
    Err(Error::new(ErrorKind::NotFound, text))
}

/// Checks that a session has the mark that `time` means.
///
/// # Errors
/// `NotFound`, naming the nearest marks before and after; those of [`session_marks`].
pub fn check_mark(
    repository: &Arc<Repository>,
    name: &SessionName,
    time: &SessionTime,
) -> Result<()> {
    choose(&session_marks(repository, name)?.marks, time, name).map(|_| ())
}

/// The mark that `time` means.
///
/// # Errors
/// `NotFound`, naming the nearest marks before and after.
pub(crate) fn choose<'a>(
    marks: &'a [SessionMark],
    time: &SessionTime,
    name: &SessionName,
) -> Result<&'a SessionMark> {
    let (before, found) = match time {
        SessionTime::At(second) => {
            let seconds = second.unix_seconds();
            // An older version made two marks in one second, sometimes.
            let first = marks.partition_point(|mark| mark.unix_seconds() < seconds);
            (
                first,
                Some(first).filter(|i| marks.get(*i).is_some_and(|m| m.unix_seconds() == seconds)),
            )
        }
        SessionTime::Ago(age) => {
            // After the clock was set back, marks are made ahead of it.
            let newest_ms = marks.last().map_or(0, |mark| mark.time_ns / 1_000_000);
            let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
            let until = now_ms().max(newest_ms).saturating_sub(age_ms);
            let end = marks.partition_point(|mark| mark.time_ns / 1_000_000 <= until);
            (end, end.checked_sub(1))
        }
        SessionTime::LastGood(second) => {
            let end = marks.partition_point(|mark| mark.unix_seconds() < second.unix_seconds());
            (end, end.checked_sub(1))
        }
    };
    if let Some(found) = found {
        return Ok(&marks[found]);
    }
    let nearest = |mark: Option<&SessionMark>| mark.and_then(|mark| mark.name().ok());
    let near = |time: PointName| format!("live/{name}@{time}");
    let earlier = nearest(before.checked_sub(1).map(|i| &marks[i])).map(near);
    let later = nearest(marks.get(before)).map(near);
    let what = match (earlier, later) {
        (Some(earlier), Some(later)) => format!("the nearest are {earlier} and {later}"),
        (Some(last), None) => format!("the last one is {last}"),
        (None, Some(first)) => format!("the oldest is {first}"),
        (None, None) => "it has none".to_owned(),
    };
    let message = format!("session {name} has no mark {time}: {what}");
    let advice = format!("coldrise marks live/{name} lists them");
    Err(Error::new(ErrorKind::NotFound, message).advise(advice))
}

#[cfg(test)]
pub(crate) mod tests;
