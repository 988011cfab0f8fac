//! Retention: the points of a machine that the rules keep, with the reasons.
//!
//! It is a pure function, without a clock or a store. Rules are independent: a point
//! stays if at least one rule keeps it, and applying the same rules to the kept points
//! keeps all of them. All times are UTC, where every day has 24 hours.
//!
//! ```text
//! --keep-last 2     the 2 newest points
//! --keep-daily 7    the newest point of each of the 7 newest days that have one
//! --keep-within 7d  the points less than 7 days older than the newest
//! ```
//!
//! Time is measured from the machine's newest point, not from the clock. So nothing is
//! deleted only because a machine makes no backups for a month, or because the clock
//! jumps ahead. Points dated later than the clock come from a clock that was wrong.
//! They stay, and no rule counts them: otherwise one of them would be the newest for
//! years. The same applies to points in quarantine.

mod period;
mod span;

use std::collections::HashSet;
use std::fmt;
use std::num::NonZeroU32;

pub use period::Period;
pub use span::RetentionSpan;

use crate::{PointName, SessionName};

/// The retention rules. Without any rule, [`retained`] keeps every point.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetentionRules {
    /// The newest points.
    pub last: Option<NonZeroU32>,
    /// All points that are not older than this, relative to the newest point.
    pub within: Option<RetentionSpan>,
    /// For each period kind, keep the newest point of each of the newest N periods
    /// with a point.
    pub periods: Vec<(Period, NonZeroU32)>,
}

impl RetentionRules {
    /// True if there is no rule.
    pub(crate) fn is_empty(&self) -> bool {
        self.last.is_none() && self.within.is_none() && self.periods.is_empty()
    }
}

/// The properties of a point that retention needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionPoint {
    /// Its name, which contains its time.
    pub name: PointName,
    /// Its owner has protected it.
    pub is_protected: bool,
    /// It is in quarantine: it stays, and no rule counts it.
    pub is_quarantined: bool,
    /// The sessions published from it.
    pub sessions: Vec<SessionName>,
}

/// The reason why a point stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeepReason {
    /// It is the Nth newest point, counted from 1.
    Last(u32),
    /// It is not older than the rule allows.
    Within(RetentionSpan),
    /// It is the newest point of its period; the text names the period.
    Newest(Period, String),
    /// It is the newest backup, the base of the next incremental backup.
    NewestBackup,
    /// It is dated later than the clock.
    Future,
    /// It is protected.
    Protected,
    /// It is in quarantine.
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

/// The reasons why each of a machine's points stays. They are in the order of their states, the oldest first (see
/// [`order_states`](crate::order_states)). A point without a reason does not stay. Names must be unique. `now_seconds` is the clock, in seconds since
/// 1970-01-01T00:00:00Z; it only decides which points are in the future and not counted.
///
/// The newest backup outside quarantine always stays, so a machine never loses its last good one.
pub fn retained(
    rules: &RetentionRules,
    points: &[RetentionPoint],
    now_seconds: u64,
) -> Vec<Vec<KeepReason>> {
    let mut reasons: Vec<Vec<KeepReason>> = points.iter().map(beside_the_rules).collect();
    let mut order: Vec<usize> = (0..points.len()).rev().collect();
    // Suspect points must not displace good ones.
    order.retain(|at| !points[*at].is_quarantined);
    let (future, counted): (Vec<usize>, Vec<usize>) =
        order.iter().partition(|at| points[**at].name.unix_seconds() > now_seconds);
    for at in &future {
        reasons[*at].push(KeepReason::Future);
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
    // One from the future is the newest only if there is no other.
    let mut newest = counted.iter().chain(&future);
    if let Some(at) = newest.find(|at| !points[**at].name.is_synthetic()) {
        reasons[*at].push(KeepReason::NewestBackup);
    }
    reasons
}

/// The reasons that come from no rule.
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
