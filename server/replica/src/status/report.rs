//! The state of all copies, from the records and the catalog of now.

use coldrise_block::now_ms;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::Catalog;
use coldrise_store::{MachineName, MadeIn, Repository, RepositoryId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::ALIVE_FOR;
use super::document::{
    CopyCounts, CopyRecords, CopyTarget, Cut, FailedCopy, MachineRecord, RecordStamp,
    TargetDocument, shown_name,
};
use super::sizes::{Bytes, Sizes};
use crate::links::Links;
use crate::plan::{comes_back, places_before};

/// How a target or a machine's copies are, in one word.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum CopyState {
    /// Everything that is wanted was there when the last copy looked, and nothing came since.
    Current,
    /// A copy runs.
    Copying,
    /// Points are not there.
    Behind,
    /// Nothing was ever copied.
    Never,
    /// The record or the machine's points cannot be read.
    Unknown,
    /// The last copy failed.
    Failing,
}

impl CopyState {
    /// The word for people and programs.
    pub fn word(self) -> &'static str {
        match self {
            CopyState::Current => "current",
            CopyState::Copying => "copying",
            CopyState::Behind => "behind",
            CopyState::Never => "never",
            CopyState::Unknown => "unknown",
            CopyState::Failing => "failing",
        }
    }
}

/// A copy that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct RunningCopy {
    /// Since when, in milliseconds since 1970.
    pub started_at_ms: u64,
    /// When the following was true, in milliseconds since 1970.
    pub updated_at_ms: u64,
    /// The point on its way.
    pub point: Option<String>,
    /// Bytes of `bytes_behind` that are done.
    pub done_bytes: u64,
    /// Bytes of `bytes_behind` in each second of the last minute.
    pub bytes_per_second: u64,
    /// Bytes sent over the line in each second of the last minute.
    pub sent_bytes_per_second: Option<u64>,
}

/// The copies of one machine at one target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct MachineCopies {
    /// The machine.
    pub machine: String,
    /// Its name there.
    pub far_machine: String,
    /// In one word.
    pub state: CopyState,
    /// Points here that are wanted there and are not there; absent if unknown.
    pub points_behind: Option<u64>,
    /// The bytes that a copy of these has to read.
    pub bytes_behind: Option<u64>,
    /// False if `bytes_behind` counts whole disks that were not compared: an upper bound.
    pub is_exact: bool,
    /// The time of the oldest of these points, in milliseconds since 1970.
    pub behind_since_ms: Option<u64>,
    /// The newest point that is there.
    pub last_cut: Option<Cut>,
    /// Its points that are there.
    pub points_there: u64,
    /// When the other repository was asked what it has, in milliseconds since 1970.
    pub seen_at_ms: Option<u64>,
    /// When everything that was wanted was there last, in milliseconds since 1970.
    pub succeeded_at_ms: Option<u64>,
    /// Why the last copy failed; absent if it did not.
    pub failure: Option<FailedCopy>,
    /// The copy that runs.
    pub running: Option<RunningCopy>,
    /// The counts of the last copy that had something to do, or of the one that runs.
    pub last: CopyCounts,
    /// The counts of all copies.
    pub total: CopyCounts,
}

/// The copies at one target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct TargetCopies {
    /// The link's name, or the directory.
    pub target: String,
    /// A link to another site; otherwise a directory of this host.
    pub is_link: bool,
    /// The most important state of its machines.
    pub state: CopyState,
    /// The sums over its machines; absent if one is unknown.
    pub points_behind: Option<u64>,
    /// Alike.
    pub bytes_behind: Option<u64>,
    /// False if one of the machines' numbers is an upper bound.
    pub is_exact: bool,
    /// The time of the oldest point that is not there, in milliseconds since 1970.
    pub behind_since_ms: Option<u64>,
    /// The time of the newest point that is there, in milliseconds since 1970.
    pub last_cut_ms: Option<u64>,
    /// Why the other repository could not be reached, or the record not be read.
    pub failure: Option<FailedCopy>,
    /// The rates of the copies that run, together.
    pub bytes_per_second: Option<u64>,
    /// Alike.
    pub sent_bytes_per_second: Option<u64>,
    /// Time until nothing is behind, at this rate; absent while no copy runs, or the rate is unknown.
    pub remaining_ms: Option<u64>,
    /// The counts of all copies.
    pub total: CopyCounts,
    /// Its machines, by name.
    pub machines: Vec<MachineCopies>,
}

/// A point of the catalog.
#[derive(Clone)]
struct KnownPoint {
    cut: Cut,
    is_quarantined: bool,
    before: Vec<MadeIn>,
}

impl KnownPoint {
    fn comes_back(&self, remote: Option<&RepositoryId>, far_machine: &MachineName) -> bool {
        remote.is_some_and(|remote| comes_back(&self.before, remote, far_machine))
    }
}

type KnownPoints = Arc<Vec<KnownPoint>>;

/// Two that are equal: no record and no link has changed in between.
#[derive(PartialEq)]
pub struct CopiesStamp {
    records: Vec<RecordStamp>,
    links: BTreeSet<String>,
}

/// Reads the state of all copies. One that is kept reads only what changed.
#[derive(Default)]
pub struct StatusReader {
    sizes: Mutex<Sizes>,
    points: Mutex<HashMap<MachineName, KnownPoints>>,
}

impl StatusReader {
    /// The points of this machine may have changed.
    pub fn forget_points(&self, machine: &MachineName) {
        self.points.lock().remove(machine);
    }

    /// The points of all machines may have changed.
    pub fn forget_all_points(&self) {
        self.points.lock().clear();
    }

    /// Changes with each record and link.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn stamp(repository: &Arc<Repository>) -> Result<CopiesStamp> {
        let links: BTreeSet<String> = paired(repository)?.iter().map(ToString::to_string).collect();
        Ok(CopiesStamp { records: CopyRecords::of(repository).stamps()?, links })
    }

    /// The state of the copies at all targets: links first, by name.
    ///
    /// # Errors
    /// Errors of the catalog and of the drive. What concerns one target or machine makes that one unknown.
    pub fn targets(&self, repository: &Arc<Repository>) -> Result<Vec<TargetCopies>> {
        let records = CopyRecords::of(repository);
        let links = Links::of(repository).all()?;
        let now_ms = now_ms();
        let mut found = BTreeMap::new();
        for (name, ..) in records.stamps()? {
            match records.read(&name) {
                // A copy that ran when its link was removed has recorded its end.
                Ok(TargetDocument { target: CopyTarget::Link(link), .. })
                    if !links.iter().any(|known| known.name == link) => {}
                Ok(document) => {
                    let target = document.target.clone();
                    found.insert(target, self.of_document(repository, document, now_ms)?);
                }
                // Removed just now.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    let target = CopyTarget::of_file_name(&name);
                    found.insert(target.clone(), unreadable(&target, &error, now_ms));
                }
            }
        }
        for name in paired(repository)? {
            let target = CopyTarget::Link(name);
            found
                .entry(target.clone())
                .or_insert_with(|| TargetCopies::new(&target, CopyState::Never));
        }
        self.sizes.lock().forget_unused();
        Ok(found.into_values().collect())
    }

    fn points(&self, repository: &Arc<Repository>, machine: &MachineName) -> Result<KnownPoints> {
        if let Some(known) = self.points.lock().get(machine) {
            return Ok(Arc::clone(known));
        }
        let points = match Catalog::new(repository).points(machine) {
            // All of them were forgotten.
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            points => points?,
        };
        let known = |point: coldrise_store::PointDocument| KnownPoint {
            before: places_before(&point),
            cut: Cut { created_at_ms: point.created_at_ms, point: point.point },
            is_quarantined: point.quarantine.is_some(),
        };
        let mut points: Vec<KnownPoint> = points.into_iter().map(known).collect();
        points.sort_by(|one, other| one.cut.cmp(&other.cut));
        let points = Arc::new(points);
        self.points.lock().insert(machine.clone(), Arc::clone(&points));
        Ok(points)
    }

    fn of_document(
        &self,
        repository: &Arc<Repository>,
        mut document: TargetDocument,
        now_ms: u64,
    ) -> Result<TargetCopies> {
        let remote = document.repository;
        if document.is_of_all {
            let recorded: BTreeSet<_> =
                document.machines.values().map(|record| record.machine.clone()).collect();
            let all = Catalog::new(repository).machines()?;
            for machine in all.into_iter().filter(|machine| !recorded.contains(machine)) {
                // Points that came from there do not go back.
                let points = self.points(repository, &machine).unwrap_or_default();
                let comes_back = |point: &KnownPoint| point.comes_back(remote.as_ref(), &machine);
                if points.is_empty() || !points.iter().all(comes_back) {
                    // Its name there is known when it is copied.
                    document.machines.entry(machine.clone()).or_insert(MachineRecord::new(machine));
                }
            }
        }
        let of_record = |(far_machine, record): (MachineName, MachineRecord)| {
            self.of_record(repository, remote.as_ref(), &far_machine, record, now_ms)
        };
        let mut machines: Vec<MachineCopies> =
            document.machines.into_iter().map(of_record).collect();
        machines.sort_by(|one, other| {
            (&one.machine, &one.far_machine).cmp(&(&other.machine, &other.far_machine))
        });
        let target = document.target.to_string();
        let is_link = matches!(document.target, CopyTarget::Link(_));
        Ok(TargetCopies { target, is_link, ..TargetCopies::of(document.failure, machines) })
    }

    fn of_record(
        &self,
        repository: &Arc<Repository>,
        remote: Option<&RepositoryId>,
        far_machine: &MachineName,
        record: MachineRecord,
        now_ms: u64,
    ) -> MachineCopies {
        let is_astray = record.newest.as_ref().is_some_and(|newest| {
            let clock_guard = repository.clock_guard(&record.machine);
            clock_guard.is_ok_and(|now| now.is_passed_over(&newest.point))
        });
        let points = self.points(repository, &record.machine);
        let missing = points.map(|points| {
            let goes_there = |point: &&KnownPoint| !point.comes_back(remote, far_machine);
            record.missing(points.iter().filter(goes_there), is_astray)
        });
        let bytes = missing.as_ref().ok().and_then(|missing| {
            let newest = record.newest.as_ref();
            self.sizes.lock().of(repository, &record.machine, newest, missing).ok()
        });
        let copies = record.into_copies(far_machine, missing, bytes, now_ms);
        MachineCopies { last_cut: copies.last_cut.filter(|_| !is_astray), ..copies }
    }
}

/// The links to which copies can go.
fn paired(repository: &Arc<Repository>) -> Result<Vec<MachineName>> {
    let links = Links::of(repository).all()?.into_iter();
    Ok(links.filter(|link| link.address.is_some()).map(|link| link.name).collect())
}

fn unreadable(target: &CopyTarget, error: &Error, now_ms: u64) -> TargetCopies {
    let mut copies = TargetCopies::new(target, CopyState::Unknown);
    copies.failure = Some(FailedCopy::of(error, now_ms));
    copies
}

impl CopyTarget {
    /// What people see of a file that cannot be read.
    fn of_file_name(name: &str) -> CopyTarget {
        match MachineName::parse(shown_name(name)) {
            Ok(link) if shown_name(name) != name => CopyTarget::Link(link),
            _ => CopyTarget::Directory(name.to_owned()),
        }
    }
}

impl MachineRecord {
    /// The points that are wanted there and are not there, oldest first. `is_astray`: the newest one there is dated
    /// in the future, so what came since the last look is not there.
    fn missing<'a>(
        &self,
        points: impl Iterator<Item = &'a KnownPoint>,
        is_astray: bool,
    ) -> Vec<Cut> {
        let is_missing = |point: &&KnownPoint| {
            let is_newer = match &self.newest {
                Some(newest) if is_astray => {
                    point.cut.point != newest.point
                        && self.seen_at_ms.is_none_or(|seen_ms| point.cut.created_at_ms > seen_ms)
                }
                newest => newest.as_ref().is_none_or(|newest| point.cut > *newest),
            };
            let is_there = self.ahead.contains(&point.cut.point);
            let is_wanted = is_newer || self.older.contains(&point.cut.point);
            !point.is_quarantined && !is_there && is_wanted
        };
        points.filter(is_missing).map(|point| point.cut.clone()).collect()
    }

    fn into_copies(
        self,
        far_machine: &MachineName,
        missing: Result<Vec<Cut>>,
        bytes: Option<Bytes>,
        now_ms: u64,
    ) -> MachineCopies {
        let (points_behind, behind_since_ms) = match &missing {
            Ok(missing) => {
                (Some(missing.len() as u64), missing.first().map(|cut| cut.created_at_ms))
            }
            Err(_) => (None, None),
        };
        let is_alive = self.last.started_at_ms > 0
            && self.last.ended_at_ms.is_none()
            && u128::from(now_ms.abs_diff(self.last.updated_at_ms)) < ALIVE_FOR.as_millis();
        let running = is_alive.then(|| RunningCopy {
            started_at_ms: self.last.started_at_ms,
            updated_at_ms: self.last.updated_at_ms,
            point: self.last.point.as_ref().map(ToString::to_string),
            done_bytes: self.last.done_bytes,
            bytes_per_second: self.last.bytes_per_second,
            sent_bytes_per_second: self.last.sent_bytes_per_second,
        });
        let state = match (&running, &self.failure, points_behind) {
            (Some(_), ..) => CopyState::Copying,
            (None, Some(_), _) => CopyState::Failing,
            (None, None, None) => CopyState::Unknown,
            (None, None, Some(_)) if self.seen_at_ms.is_none() => CopyState::Never,
            (None, None, Some(0)) => CopyState::Current,
            (None, None, Some(_)) if self.newest.is_none() => CopyState::Never,
            (None, None, Some(_)) => CopyState::Behind,
        };
        MachineCopies {
            machine: self.machine.to_string(),
            far_machine: far_machine.to_string(),
            state,
            points_behind,
            bytes_behind: bytes.map(|bytes| bytes.bytes),
            is_exact: bytes.is_some_and(|bytes| bytes.is_exact),
            behind_since_ms,
            last_cut: self.newest,
            points_there: self.points_there,
            seen_at_ms: self.seen_at_ms,
            succeeded_at_ms: self.succeeded_at_ms,
            failure: self
                .failure
                .or_else(|| missing.err().map(|error| FailedCopy::of(&error, now_ms))),
            running,
            last: self.last.counts,
            total: self.total,
        }
    }
}

impl TargetCopies {
    /// A target without machines.
    fn new(target: &CopyTarget, state: CopyState) -> TargetCopies {
        TargetCopies {
            target: target.to_string(),
            is_link: matches!(target, CopyTarget::Link(_)),
            state,
            points_behind: None,
            bytes_behind: None,
            is_exact: false,
            behind_since_ms: None,
            last_cut_ms: None,
            failure: None,
            bytes_per_second: None,
            sent_bytes_per_second: None,
            remaining_ms: None,
            total: CopyCounts::default(),
            machines: Vec::new(),
        }
    }

    /// The same of some of its machines.
    pub fn limited_to(&self, is_wanted: impl Fn(&str) -> bool) -> TargetCopies {
        let mut machines = self.machines.clone();
        machines.retain(|copies| is_wanted(&copies.machine));
        let (target, is_link) = (self.target.clone(), self.is_link);
        TargetCopies { target, is_link, ..TargetCopies::of(self.failure.clone(), machines) }
    }

    /// The sums, without the target's name.
    fn of(failure: Option<FailedCopy>, machines: Vec<MachineCopies>) -> TargetCopies {
        let has = |state: CopyState| machines.iter().any(|machine| machine.state == state);
        let is_never = machines.iter().all(|machine| machine.state == CopyState::Never);
        let state = match () {
            () if has(CopyState::Copying) => CopyState::Copying,
            () if failure.is_some() || has(CopyState::Failing) => CopyState::Failing,
            () if has(CopyState::Unknown) => CopyState::Unknown,
            () if is_never => CopyState::Never,
            () if has(CopyState::Behind) || has(CopyState::Never) => CopyState::Behind,
            () => CopyState::Current,
        };
        let running = || machines.iter().filter_map(|machine| machine.running.as_ref());
        let total = machines.iter().map(|machine| machine.total);
        TargetCopies {
            points_behind: machines.iter().map(|machine| machine.points_behind).sum(),
            bytes_behind: machines.iter().map(|machine| machine.bytes_behind).sum(),
            is_exact: machines.iter().all(|machine| machine.is_exact),
            behind_since_ms: machines.iter().filter_map(|m| m.behind_since_ms).min(),
            last_cut_ms: {
                let cuts = machines.iter().filter_map(|machine| machine.last_cut.as_ref());
                cuts.map(|cut| cut.created_at_ms).max()
            },
            failure,
            bytes_per_second: running()
                .map(|running| Some(running.bytes_per_second))
                .reduce(plus)
                .flatten(),
            sent_bytes_per_second: running()
                .map(|running| running.sent_bytes_per_second)
                .reduce(plus)
                .flatten(),
            remaining_ms: remaining_ms(&machines),
            total: total.fold(CopyCounts::default(), CopyCounts::plus),
            machines,
            target: String::new(),
            is_link: false,
            state,
        }
    }
}

/// Time to the end of everything that is behind, at the rate of the copies that run.
fn remaining_ms(machines: &[MachineCopies]) -> Option<u64> {
    let behind: u64 = machines.iter().map(|machine| machine.bytes_behind).sum::<Option<u64>>()?;
    let running = || machines.iter().filter_map(|machine| machine.running.as_ref());
    let rest = behind.saturating_sub(running().map(|running| running.done_bytes).sum());
    let rate: u64 = running().map(|running| running.bytes_per_second).sum();
    u64::try_from((u128::from(rest) * 1000).checked_div(u128::from(rate))?).ok()
}

fn plus(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (None, None) => None,
        _ => Some(one.unwrap_or(0) + other.unwrap_or(0)),
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
