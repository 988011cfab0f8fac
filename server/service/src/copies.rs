//! Follows where copies are, and what is on its way here: tells clients, keeps the rates of the last minutes, and how far behind each day was.
//!
//! The state is that of `coldrise copies`: from the records that copies leave and the points that are here. So it does not
//! matter who copies, a job or a user on the command line.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use coldrise_block::Result;
use coldrise_inventory::IncomingDetails;
use coldrise_replica::{CopiesStamp, CopyState, StatusReader, TargetCopies};
use coldrise_session::IncomingPoint;
use coldrise_store::MachineName;
use parking_lot::Mutex;
use rusqlite::params;
use serde::Serialize;
use tokio::sync::broadcast::error::TryRecvError;

use crate::clock::now_ms;
use crate::database::Database;
use crate::events::What;
use crate::jobs::MachineNames;
use crate::service::{Service, SharedService};

/// Interval of looking whether anything changed.
const INTERVAL: Duration = Duration::from_secs(1);
/// While a copy runs, the state is read again after this time: a copy that was killed leaves no mark.
const RUNNING_INTERVAL: Duration = Duration::from_secs(10);
/// Rates are kept this long, in milliseconds.
const KEPT_MS: i64 = 15 * 60 * 1000;
/// Maximum number of rates of one target: if the clock was set back, none is old for a while.
const MAX_RATES: usize = 200;
const DAY_MS: i64 = 24 * 3600 * 1000;
/// Days that are kept of each target.
const MAX_DAYS: i64 = 400;

/// The rates of the copies to a target at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct CopyRate {
    /// When, in milliseconds since 1970.
    at_ms: i64,
    /// Bytes of content in each second; 0 if no copy runs.
    bytes_per_second: u64,
    /// Bytes on the line in each second; 0 if no copy runs.
    sent_bytes_per_second: u64,
    bytes_behind: Option<u64>,
}

/// How far behind a target was at most on one day.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct BehindDay {
    /// The beginning of the day (UTC), in milliseconds since 1970.
    at_ms: i64,
    points: i64,
    /// Absent if it was never known on that day.
    bytes: Option<i64>,
    /// The age of the oldest point that was not there, in milliseconds.
    age_ms: i64,
}

/// The state of the copies.
#[derive(Default)]
pub(crate) struct Copies {
    reader: StatusReader,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// `None` until the repository was read.
    targets: Option<Arc<Vec<TargetCopies>>>,
    rates: HashMap<String, VecDeque<CopyRate>>,
    incoming: Arc<Vec<IncomingDetails>>,
}

impl Copies {
    /// The points that were on their way here at the last look.
    pub(crate) fn incoming(&self) -> Arc<Vec<IncomingDetails>> {
        self.known.lock().incoming.clone()
    }

    /// Keeps what is on its way now. Returns the machines of points that changed, appeared or went.
    fn keep_incoming(&self, incoming: Vec<IncomingDetails>) -> BTreeSet<String> {
        let incoming = Arc::new(incoming);
        let before = std::mem::replace(&mut self.known.lock().incoming, Arc::clone(&incoming));
        let differing =
            |some: &[IncomingDetails], others: &[IncomingDetails]| -> BTreeSet<String> {
                let is_other = |one: &&IncomingDetails| !others.contains(one);
                some.iter().filter(is_other).map(|one| one.machine.clone()).collect()
            };
        &differing(&before, &incoming) | &differing(&incoming, &before)
    }

    /// The state at the last look; `None` if the repository was not there since the start.
    pub(crate) fn targets(&self) -> Option<Arc<Vec<TargetCopies>>> {
        self.known.lock().targets.clone()
    }

    /// The rates of a target, the oldest first.
    pub(crate) fn rates(&self, target: &str) -> Vec<CopyRate> {
        self.known.lock().rates.get(target).into_iter().flatten().cloned().collect()
    }

    /// Keeps a new state. Returns the targets that changed, appeared or went.
    fn keep(&self, targets: Vec<TargetCopies>, now_ms: i64) -> Vec<String> {
        let mut known = self.known.lock();
        let before = known.targets.replace(Arc::new(targets.clone())).unwrap_or_default();
        let name = |target: &TargetCopies| target.target.clone();
        let is_new = |target: &&TargetCopies| !before.contains(target);
        let mut changed: Vec<String> = targets.iter().filter(is_new).map(name).collect();
        let is_gone =
            |old: &&TargetCopies| !targets.iter().any(|target| target.target == old.target);
        changed.extend(before.iter().filter(is_gone).map(name));
        known.rates.retain(|target, _| targets.iter().any(|known| known.target == *target));
        for target in &targets {
            known.add_rate(target, now_ms);
        }
        changed
    }
}

impl Known {
    /// Adds what a running copy has reached, and once that none runs any more.
    fn add_rate(&mut self, target: &TargetCopies, now_ms: i64) {
        let rate = CopyRate {
            at_ms: now_ms,
            bytes_per_second: target.bytes_per_second.unwrap_or(0),
            sent_bytes_per_second: target.sent_bytes_per_second.unwrap_or(0),
            bytes_behind: target.bytes_behind,
        };
        let is_running = target.state == CopyState::Copying;
        let kept = self.rates.entry(target.target.clone()).or_default();
        let was_running = kept.back().is_some_and(|last| last.bytes_per_second > 0);
        if is_running || was_running {
            kept.push_back(rate);
        }
        let old = kept.iter().take_while(|rate| rate.at_ms < now_ms - KEPT_MS).count();
        kept.drain(..old.max(kept.len().saturating_sub(MAX_RATES)));
    }
}

/// Follows the copies until the service stops.
pub(crate) fn run(service: &SharedService) {
    let mut events = service.events.subscribe(None).receiver;
    let (mut last, mut last_incoming) = (None, None);
    let mut last_error = None;
    while !*service.stop.borrow() {
        let mut is_due = false;
        loop {
            match events.try_recv() {
                Ok(event) => is_due |= forget(&service.copies.reader, &event.what),
                Err(TryRecvError::Lagged(_)) => {
                    service.copies.reader.forget_all_points();
                    is_due = true;
                }
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        let looked = look(service, &mut last, is_due);
        match looked.and_then(|()| look_at_incoming(service, &mut last_incoming)) {
            Ok(()) => last_error = None,
            // While the repository is away another thread reports that.
            Err(error) => {
                let text = error.full_message();
                if last_error.as_ref() != Some(&text)
                    && service.inventory().is_ok_and(|i| i.repository().is_ok())
                {
                    tracing::warn!("the state of copies: {text}");
                }
                last_error = Some(text);
                (last, last_incoming) = (None, None);
            }
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Forgets what an event says has changed. Returns whether that matters.
fn forget(reader: &StatusReader, what: &What) -> bool {
    match what {
        What::Machine { machine } => match MachineName::parse(machine) {
            Ok(machine) => reader.forget_points(&machine),
            Err(_) => return false,
        },
        // The repository came back.
        What::Settings => reader.forget_all_points(),
        // A copy may be due again.
        What::Job { .. } => {}
        _ => return false,
    }
    true
}

fn look(service: &Service, last: &mut Option<(CopiesStamp, Instant)>, is_due: bool) -> Result<()> {
    let repository = service.inventory()?.repository()?;
    let stamp = StatusReader::stamp(&repository)?;
    let targets = service.copies.targets();
    let is_running =
        targets.iter().flat_map(|all| all.iter()).any(|t| t.state == CopyState::Copying);
    let is_same = last.as_ref().is_some_and(|(before, at)| {
        *before == stamp && !(is_running && at.elapsed() >= RUNNING_INTERVAL)
    });
    if !is_same || is_due {
        let targets = service.copies.reader.targets(&repository)?;
        for target in service.copies.keep(targets, now_ms()) {
            service.events.send(What::Copies { target });
        }
        *last = Some((stamp, Instant::now()));
    }
    if let Some(targets) = service.copies.targets() {
        let known = service.inventory()?.last_known_machines();
        let names: Vec<MachineNames> = known.iter().map(MachineNames::from).collect();
        service.queue.follow_points(&targets, &names, now_ms())?;
    }
    Ok(())
}

fn look_at_incoming(
    service: &Service,
    last: &mut Option<(Option<SystemTime>, Instant)>,
) -> Result<()> {
    let repository = service.inventory()?.repository()?;
    let stamp = IncomingPoint::stamp(&repository)?;
    // Whether the other site is connected leaves no mark if its process was killed.
    let is_running = !service.copies.incoming().is_empty();
    let is_same = last.is_some_and(|(before, at)| {
        before == stamp && !(is_running && at.elapsed() >= RUNNING_INTERVAL)
    });
    if !is_same {
        // Before the reading: what changes meanwhile is read again.
        *last = Some((stamp, Instant::now()));
        for machine in service.copies.keep_incoming(IncomingDetails::all(&repository, None)?) {
            service.events.send(What::Incoming { machine });
        }
    }
    Ok(())
}

/// Notes how far behind the targets are today.
///
/// # Errors
/// Errors of the repository and of the database.
pub(crate) fn sample(service: &Service) -> Result<()> {
    let Some(targets) = service.copies.targets() else { return Ok(()) };
    let (id, now) = (service.inventory()?.id()?, now_ms());
    for target in targets.iter() {
        // An unknown value is not a sample.
        let Some(points) = target.points_behind else { continue };
        let since_ms = target.behind_since_ms.and_then(|since| i64::try_from(since).ok());
        let day = BehindDay {
            at_ms: now / DAY_MS * DAY_MS,
            points: i64::try_from(points).unwrap_or(i64::MAX),
            bytes: target.bytes_behind.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)),
            age_ms: since_ms.map_or(0, |since| (now - since).max(0)),
        };
        service.database.add_behind(&id, &target.target, &day)?;
    }
    Ok(())
}

impl Database {
    /// Adds to the day of a target what is worse than what it had before.
    fn add_behind(&self, repository: &str, target: &str, sample: &BehindDay) -> Result<()> {
        let day = sample.at_ms / DAY_MS;
        let known = self.read(|sql| {
            let mut found = sql.prepare_cached(
                "SELECT points, bytes, age_ms FROM copies_behind
                 WHERE repository = ?1 AND target = ?2 AND day = ?3",
            )?;
            let mut rows = found.query(params![repository, target, day])?;
            let known: Option<(i64, Option<i64>, i64)> = match rows.next()? {
                Some(row) => Some((row.get(0)?, row.get(1)?, row.get(2)?)),
                None => None,
            };
            Ok(known)
        })?;
        // An age that grows is written every ten minutes.
        let is_worse = known.is_none_or(|(points, bytes, age_ms)| {
            sample.points > points || sample.bytes > bytes || sample.age_ms > age_ms + 600_000
        });
        if !is_worse {
            return Ok(());
        }
        self.change(|sql| {
            sql.execute(
                "INSERT INTO copies_behind (repository, target, day, points, bytes, age_ms)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)
                 ON CONFLICT (repository, target, day) DO UPDATE
                 SET points = max(points, excluded.points), age_ms = max(age_ms, excluded.age_ms),
                     bytes = max(ifnull(bytes, 0), ifnull(excluded.bytes, 0))",
                params![repository, target, day, sample.points, sample.bytes, sample.age_ms],
            )?;
            // By number and not by age: a wrong clock must not cost the past.
            sql.execute(
                "DELETE FROM copies_behind WHERE repository = ?1 AND target = ?2 AND day NOT IN
                 (SELECT day FROM copies_behind WHERE repository = ?1 AND target = ?2
                  ORDER BY day DESC LIMIT ?3)",
                params![repository, target, MAX_DAYS],
            )
        })?;
        Ok(())
    }

    /// The days of a target up to now, the oldest first.
    pub(crate) fn behind(
        &self,
        repository: &str,
        target: &str,
        now_ms: i64,
    ) -> Result<Vec<BehindDay>> {
        self.read(|sql| {
            let mut found = sql.prepare_cached(
                "SELECT day, points, bytes, age_ms FROM copies_behind
                 WHERE repository = ?1 AND target = ?2 AND day <= ?3 ORDER BY day",
            )?;
            let found = found.query_map(params![repository, target, now_ms / DAY_MS], |row| {
                let day: i64 = row.get(0)?;
                let (points, bytes, age_ms) = (row.get(1)?, row.get(2)?, row.get(3)?);
                Ok(BehindDay { at_ms: day * DAY_MS, points, bytes, age_ms })
            })?;
            found.collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{BehindDay, DAY_MS, Database};

    #[test]
    fn the_worst_of_each_day_stays() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(folder.path()).unwrap();
        let day = |points, bytes, age_ms| BehindDay { at_ms: 9 * DAY_MS, points, bytes, age_ms };
        let add = |sample: &BehindDay| database.add_behind("a", "far", sample).unwrap();
        add(&day(2, None, 5));
        add(&day(1, Some(4), 3));
        assert_eq!(database.behind("a", "far", 10 * DAY_MS).unwrap(), [day(2, Some(4), 5)]);
        add(&BehindDay { at_ms: 10 * DAY_MS, ..day(0, Some(0), 0) });
        let known = |now_ms| database.behind("a", "far", now_ms).unwrap().len();
        // A clock that was ahead is not a part of the past.
        assert_eq!((known(9 * DAY_MS), known(10 * DAY_MS)), (1, 2));
        assert!(database.behind("a", "other", 10 * DAY_MS).unwrap().is_empty());
    }
}
