//! Prune: applies the retention rules to the points of a machine.

use coldrise_store::{
    KeepReason, MachineName, PointDocument, PointName, RetentionPoint, RetentionRules,
    order_states, retained,
};

use crate::points::forget::Published;

/// The verdict on one point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PointVerdict {
    /// The point.
    pub document: PointDocument,
    /// The reasons to keep it; empty if it is to be removed.
    pub reasons: Vec<KeepReason>,
}

impl PointVerdict {
    /// True if the point is kept.
    pub fn is_kept(&self) -> bool {
        !self.reasons.is_empty()
    }

    /// Machine and name of the point.
    pub fn address(&self) -> (MachineName, PointName) {
        (self.document.machine.clone(), self.document.point.clone())
    }
}

/// Judges the points of one machine; the verdicts are in the order of the states, the oldest first. `now_seconds` is the current time, in seconds since
/// 1970-01-01T00:00:00Z.
pub fn judge(
    rules: &RetentionRules,
    mut points: Vec<PointDocument>,
    published: &Published,
    now_seconds: u64,
) -> Vec<PointVerdict> {
    points.sort_by(|a, b| a.point.cmp(&b.point));
    // The point of an old mark must not take the place of a newer state.
    let points = order_states(points.into_iter(), PointDocument::state_time);
    let known: Vec<RetentionPoint> = points
        .iter()
        .map(|point| RetentionPoint {
            name: point.point.clone(),
            is_protected: point.is_protected,
            is_quarantined: point.quarantine.is_some(),
            sessions: published.from(&point.machine, &point.point).to_vec(),
        })
        .collect();
    let reasons = retained(rules, &known, now_seconds);
    points
        .into_iter()
        .zip(reasons)
        .map(|(document, reasons)| PointVerdict { document, reasons })
        .collect()
}
