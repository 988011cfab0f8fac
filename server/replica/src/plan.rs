//! Which points are copied, in which order, and from which base.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    ClockGuard, MAX_CAME_BY, MachineName, MadeIn, PointDocument, PointName, PointOrigin,
    RepositoryId,
};

/// The identity of a point, equal in different repositories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    made_in: MadeIn,
    point: PointName,
    created_at_ms: u64,
}

impl Identity {
    /// The identity of a point of `repository`.
    pub fn of(repository: &RepositoryId, point: &PointDocument) -> Identity {
        Identity {
            made_in: made_in(repository, point),
            point: point.point.clone(),
            created_at_ms: point.created_at_ms,
        }
    }
}

/// Where a point of `repository` was made.
pub(crate) fn made_in(repository: &RepositoryId, point: &PointDocument) -> MadeIn {
    let own = || MadeIn { repository: *repository, machine: point.machine.clone() };
    point.made_in.clone().unwrap_or_else(own)
}

/// Where a point of another repository was before it came to this one: made there, or a copy. Empty if it was made in this one.
pub(crate) fn places_before(point: &PointDocument) -> Vec<MadeIn> {
    point.made_in.iter().chain(&point.came_by).cloned().collect()
}

/// The same for a copy of a point of `repository`, without where it was made.
pub(crate) fn came_by(repository: &RepositoryId, point: &PointDocument) -> Vec<MadeIn> {
    if point.made_in.is_none() {
        return Vec::new();
    }
    let here = MadeIn { repository: *repository, machine: point.machine.clone() };
    let places: Vec<MadeIn> = point.came_by.iter().cloned().chain([here]).collect();
    places[places.len().saturating_sub(MAX_CAME_BY)..].to_vec()
}

/// Whether a point was in `remote`, and would come back there under another name. Sites that copy to each other with prefixes, or in a
/// ring, would send all points round without end.
pub(crate) fn comes_back(
    before: &[MadeIn],
    remote: &RepositoryId,
    far_machine: &MachineName,
) -> bool {
    let mut there = before.iter().filter(|place| place.repository == *remote).peekable();
    there.peek().is_some() && there.all(|place| place.machine != *far_machine)
}

/// One side of a copy: the points of a machine.
pub(crate) struct Side<'a> {
    pub(crate) repository: &'a RepositoryId,
    pub(crate) machine: &'a MachineName,
    pub(crate) points: &'a [PointDocument],
}

/// Which of the points that are not there are copied.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted {
    /// Also those that are older than the youngest one that is there.
    pub(crate) is_all: bool,
    /// Only the newest.
    pub(crate) last: Option<usize>,
    /// Of the source's machine: points that its `latest` skips are not the youngest one that is there. A
    /// clock that was wrong once must not keep later points here for years.
    pub(crate) clock_guard: Option<ClockGuard>,
}

/// The plan for one machine. Numbers are places in the source's list.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// To copy, oldest first.
    pub(crate) missing: Vec<usize>,
    /// Points that both sides have and that can be a base: here, and there.
    pub(crate) common: Vec<(usize, usize)>,
    /// Already there.
    pub(crate) there: usize,
    /// The youngest of these.
    pub(crate) youngest: Option<usize>,
    /// Already there, and dated in the future.
    pub(crate) ahead: Vec<usize>,
    /// Missing there and older than its newest point there: pruned, or never copied.
    pub(crate) passed_over: Vec<usize>,
    /// In quarantine here.
    pub(crate) quarantined: Vec<usize>,
}

impl Plan {
    /// # Errors
    /// `AlreadyExists` if the remote side has another point under a name that is to be copied.
    pub(crate) fn make(source: &Side<'_>, remote: &Side<'_>, wanted: Wanted) -> Result<Plan> {
        let there: Vec<_> =
            remote.points.iter().map(|p| Identity::of(remote.repository, p)).collect();
        let mut plan = Plan::default();
        let mut youngest_ms = None;
        let mut order: Vec<usize> = (0..source.points.len()).collect();
        order
            .sort_by_key(|at| (source.points[*at].created_at_ms, source.points[*at].point.clone()));
        for at in order {
            let point = &source.points[at];
            let identity = Identity::of(source.repository, point);
            let is_good = point.quarantine.is_none();
            match there.iter().position(|known| *known == identity) {
                Some(place) => {
                    plan.there += 1;
                    if wanted.clock_guard.is_some_and(|now| now.is_passed_over(&point.point)) {
                        plan.ahead.push(at);
                    } else {
                        plan.youngest = Some(at);
                        youngest_ms = Some(point.created_at_ms);
                    }
                    if is_good && remote.points[place].quarantine.is_none() {
                        plan.common.push((at, place));
                    }
                }
                None if is_good => plan.missing.push(at),
                None => plan.quarantined.push(at),
            }
        }
        if let Some(youngest_ms) = youngest_ms.filter(|_| !wanted.is_all) {
            let is_older = |at: &usize| source.points[*at].created_at_ms < youngest_ms;
            let (older, missing) = plan.missing.into_iter().partition(is_older);
            (plan.passed_over, plan.missing) = (older, missing);
        }
        if let Some(last) = wanted.last {
            let skipped = plan.missing.len().saturating_sub(last);
            plan.passed_over.extend(plan.missing.drain(..skipped));
        }
        let is_taken = |at: &&usize| {
            remote.points.iter().any(|point| point.point == source.points[**at].point)
        };
        match plan.missing.iter().find(is_taken) {
            None => Ok(plan),
            Some(at) => {
                let name = &source.points[*at].point;
                let text = format!(
                    "the other repository has another point {}/{name}, which is not a copy of {}/{name}",
                    remote.machine, source.machine
                );
                Err(Error::new(ErrorKind::AlreadyExists, text)
                    .advise("choose another name there with --prefix or --as"))
            }
        }
    }
}

/// The best base for `point`: what it was published from, or else the youngest point before it. Places in `candidates`.
pub(crate) fn base_of(point: &PointDocument, candidates: &[&PointDocument]) -> Option<usize> {
    if let PointOrigin::Synthetic { base, .. } = &point.origin {
        if let Some(place) = candidates.iter().position(|candidate| candidate.point == *base) {
            return Some(place);
        }
    }
    let age = |place: &usize| {
        let created_at_ms = candidates[*place].created_at_ms;
        (created_at_ms > point.created_at_ms, created_at_ms.abs_diff(point.created_at_ms))
    };
    (0..candidates.len()).min_by_key(age)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
