//! Retention: which of a machine's points the rules keep, and why.
//!
//! A pure function: no clock, no store. Rules do not know of each other: a point
//! stays where at least one keeps it, and the same rules over what stayed keep all
//! of it again. Everything is UTC, where every day has 24 hours.
//!
//! ```text
//! --keep-last 2     the 2 newest points
//! --keep-daily 7    the newest point of each of the 7 newest days that have one
//! --keep-within 7d  the points less than 7 days older than the newest
//! ```
//!
//! Time counts back from the machine's newest point and not from the clock: a
//! machine that makes no backups for a month, or a clock that jumps ahead, deletes
//! nothing by itself. Points that are dated later than the clock says, left by a clock
//! that was wrong, stay, and no rule counts them: otherwise one of them would be the
//! newest for years. The same goes for points that are set aside (quarantine).

mod period;
mod span;

use std::collections::HashSet;
use std::fmt;
use std::num::NonZeroU32;

pub use period::Period;
pub use span::RetentionSpan;

use crate::{PointName, SessionName};

/// Which points are to be kept. Without any rule [`retained`] keeps every point.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetentionRules {
    /// The newest points.
    pub last: Option<NonZeroU32>,
    /// Everything that is not older than this, counted from the newest point.
    pub within: Option<RetentionSpan>,
    /// The newest point of each of the newest so many periods that have one.
    pub periods: Vec<(Period, NonZeroU32)>,
}

impl RetentionRules {
    /// True where there is no rule.
    pub fn is_empty(&self) -> bool {
        self.last.is_none() && self.within.is_none() && self.periods.is_empty()
    }
}

/// What retention has to know of a point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionPoint {
    /// Its name, which tells its time.
    pub name: PointName,
    /// It was protected by its owner.
    pub is_protected: bool,
    /// It is set aside: it stays, and no rule counts it.
    pub is_quarantined: bool,
    /// The sessions that are published from it.
    pub sessions: Vec<SessionName>,
}

/// Why a point stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeepReason {
    /// Of the newest points it is number so and so, from 1 on.
    Last(u32),
    /// It is not older than the rule allows.
    Within(RetentionSpan),
    /// The newest of its period, which is written out.
    Newest(Period, String),
    /// The newest backup: what changes since is counted from it.
    NewestBackup,
    /// It is dated later than the clock says.
    Future,
    /// It is protected.
    Protected,
    /// It is set aside.
    Quarantined,
    /// A session is published from it.
    Published(SessionName),
    /// There is no rule.
    NoRule,
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeepReason::Last(number) => write!(f, "last {number}"),
            KeepReason::Within(span) => write!(f, "within {span}"),
            KeepReason::Newest(period, which) => write!(f, "{period} {which}"),
            KeepReason::NewestBackup => f.write_str("newest backup"),
            KeepReason::Future => f.write_str("dated in the future"),
            KeepReason::Protected => f.write_str("protected"),
            KeepReason::Quarantined => f.write_str("quarantined"),
            KeepReason::Published(session) => write!(f, "published as {session}"),
            KeepReason::NoRule => f.write_str("no rule"),
        }
    }
}

/// For every one of a machine's points, in the order given, why it stays; nothing
/// where it does not. No name may be there twice. `now_seconds` is the clock, in
/// seconds since 1970-01-01T00:00:00Z: it only tells which points are not counted.
///
/// The newest backup that is not set aside always stays, so a machine never loses its
/// last good one.
pub fn retained(
    rules: &RetentionRules,
    points: &[RetentionPoint],
    now_seconds: u64,
) -> Vec<Vec<KeepReason>> {
    let mut reasons: Vec<Vec<KeepReason>> = points.iter().map(beside_the_rules).collect();
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by(|a, b| points[*b].name.cmp(&points[*a].name));
    // What cannot be relied on must not push out what can.
    order.retain(|at| !points[*at].is_quarantined);
    let (future, counted): (Vec<usize>, Vec<usize>) =
        order.iter().partition(|at| points[**at].name.unix_seconds() > now_seconds);
    for at in future {
        reasons[at].push(KeepReason::Future);
    }
    if rules.is_empty() {
        reasons.iter_mut().for_each(|reasons| reasons.push(KeepReason::NoRule));
    }
    let newest_first = || counted.iter().map(|at| (*at, &points[*at].name));
    if let Some(count) = rules.last {
        for (number, (at, _)) in (1..=count.get()).zip(newest_first()) {
            reasons[at].push(KeepReason::Last(number));
        }
    }
    if let (Some(span), Some((_, newest))) = (rules.within, newest_first().next()) {
        let since = span.before(newest.unix_seconds());
        let young = |name: &PointName| since.is_none_or(|since| name.unix_seconds() > since);
        for (at, _) in newest_first().filter(|(_, name)| young(name)) {
            reasons[at].push(KeepReason::Within(span));
        }
    }
    for (period, count) in &rules.periods {
        let mut seen = HashSet::new();
        for (at, name) in newest_first() {
            let number = period.number(name.unix_seconds());
            if seen.len() as u64 == u64::from(count.get()) {
                break;
            }
            if seen.insert(number) {
                let which = period.describe(name.unix_seconds());
                reasons[at].push(KeepReason::Newest(*period, which));
            }
        }
    }
    if let Some(at) = order.into_iter().find(|at| !points[*at].name.is_synthetic()) {
        reasons[at].push(KeepReason::NewestBackup);
    }
    reasons
}

/// What no rule has to say.
fn beside_the_rules(point: &RetentionPoint) -> Vec<KeepReason> {
    let quarantined = point.is_quarantined.then_some(KeepReason::Quarantined);
    let protected = point.is_protected.then_some(KeepReason::Protected);
    quarantined
        .into_iter()
        .chain(protected)
        .chain(point.sessions.iter().cloned().map(KeepReason::Published))
        .collect()
}

#[cfg(test)]
mod tests;
