//! The time marks of a session, as `marks` and the service show them.

use std::sync::Arc;

use coldrise_block::{Result, now_ms};
use coldrise_session::{FollowProgress, SessionMarks, SiteProgress, session_marks};
use coldrise_store::{Repository, SessionName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The time marks of a session: states of all its disks to which it can go back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MarksDetails {
    /// The session's name.
    pub session: String,
    /// Which marks are kept: `off`, or `INTERVAL=AGE,…`.
    pub rule: String,
    /// Space of the blocks that only marks need, in bytes; absent if the session is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes: Option<u64>,
    /// The most that they may take, in bytes: a tenth of the drive, and at most half of its free
    /// space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes_limit: Option<u64>,
    /// The rule that is followed instead, because of that limit: old marks become fewer first; absent if `rule` is followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduced_rule: Option<String>,
    /// The machine that the session follows while it runs elsewhere; absent if clients write the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follows: Option<Followed>,
    /// Other sites that get the marks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sites: Vec<SiteDetails>,
    /// Stretches of marks at about the same interval, the oldest first.
    pub stretches: Vec<MarkStretch>,
    /// The marks, the oldest first.
    pub marks: Vec<MarkDetails>,
}

/// A time mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MarkDetails {
    /// `live/SESSION@TIME`.
    pub address: String,
    /// Its time, in milliseconds since 1970-01-01T00:00:00Z.
    pub marked_at_ms: u64,
    /// The guest's file systems were frozen at that time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_consistent: bool,
}

/// A site that gets the time marks of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SiteDetails {
    /// The link.
    pub link: String,
    /// The session there; absent until it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// A process sends marks there now.
    pub is_running: bool,
    /// The newest mark there, in milliseconds since 1970-01-01T00:00:00Z; 0 without one.
    pub marked_at_ms: u64,
    /// It has everything that was written until then, in milliseconds since 1970-01-01T00:00:00Z; 0 without a mark.
    pub current_ms: u64,
    /// The time since then, in seconds; absent without a mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_s: Option<u64>,
    /// Changes of the mark that is being sent which are not there yet, in bytes.
    pub pending_bytes: u64,
    /// What the process has sent, in bytes on the line.
    pub sent_bytes: u64,
    /// Why nothing is sent at this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl SiteDetails {
    fn new(progress: SiteProgress) -> SiteDetails {
        let lag_s = progress.lag_s();
        let SiteProgress { link, session, is_running, marked_at_ms, current_ms, .. } = progress;
        let SiteProgress { pending_bytes, sent_bytes, problem, .. } = progress;
        SiteDetails {
            link,
            session,
            is_running,
            marked_at_ms,
            current_ms,
            lag_s,
            pending_bytes,
            sent_bytes,
            problem,
        }
    }
}

/// A machine that runs elsewhere, and whose changes a session takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Followed {
    /// Where it runs: `libvirt:DOMAIN` or `qmp:SOCKET`; or the session of another site whose marks come here.
    pub source: String,
    /// The link of that site.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site: Option<String>,
    /// A process follows it now.
    pub is_running: bool,
    /// The newest mark has everything that the machine wrote until then, in milliseconds since 1970-01-01T00:00:00Z; 0 without
    /// a mark.
    pub current_ms: u64,
    /// The time since then, in seconds; absent without a mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_s: Option<u64>,
    /// Why the last round failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl Followed {
    fn new(
        source: String,
        site: Option<String>,
        newest_ms: u64,
        progress: Option<FollowProgress>,
    ) -> Followed {
        let is_running = progress.is_some();
        let FollowProgress { current_ms, problem } = progress.unwrap_or_default();
        let current_ms = current_ms.max(newest_ms);
        let lag_s = (current_ms > 0).then(|| now_ms().saturating_sub(current_ms) / 1000);
        Followed { source, site, is_running, current_ms, lag_s, problem }
    }
}

/// Marks between which about the same time passes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MarkStretch {
    /// Time of the oldest mark, in milliseconds since 1970-01-01T00:00:00Z.
    pub from_ms: u64,
    /// Time of the newest mark.
    pub to_ms: u64,
    /// Number of marks.
    pub marks: u64,
    /// Shortest time between two neighbours, in seconds, rounded; 0 for a single mark.
    pub finest_step_s: u64,
}

impl MarksDetails {
    /// Reads the marks of a session. Takes time in proportion to the captured blocks if no process
    /// serves it.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if the process that serves it does not answer.
    pub fn read(repository: &Arc<Repository>, name: &SessionName) -> Result<MarksDetails> {
        let document = coldrise_session::session(repository, name)?.document;
        let SessionMarks { marks, held_bytes, held_bytes_limit, reduced_rule, progress } =
            session_marks(repository, name)?;
        let mut listed = Vec::with_capacity(marks.len());
        for mark in &marks {
            listed.push(MarkDetails {
                address: format!("live/{name}@{}", mark.name()?),
                marked_at_ms: mark.time_ns / 1_000_000,
                is_consistent: mark.round.is_some_and(|round| round.is_consistent),
            });
        }
        let newest_ms = listed.last().map_or(0, |mark| mark.marked_at_ms);
        let rule = document.mark_rules().to_string();
        let site = document.received.map(|received| received.link.to_string());
        let sites = SiteProgress::all(repository, name)?;
        Ok(MarksDetails {
            session: name.to_string(),
            rule,
            held_bytes,
            held_bytes_limit,
            reduced_rule: reduced_rule.map(|rule| rule.to_string()),
            follows: document
                .follows
                .map(|source| Followed::new(source, site, newest_ms, progress)),
            sites: sites.into_iter().map(SiteDetails::new).collect(),
            stretches: stretches(&listed, now_ms()),
            marks: listed,
        })
    }
}

/// Ends of the stretches, as ages in seconds: what the marks of the last minutes, hours and days
/// are is of different interest.
const AGES_S: [u64; 4] = [600, 3600, 86_400, u64::MAX];

fn stretches(marks: &[MarkDetails], now_ms: u64) -> Vec<MarkStretch> {
    let class = |mark: &MarkDetails| {
        let age_s = now_ms.saturating_sub(mark.marked_at_ms) / 1000;
        AGES_S.iter().position(|end| age_s <= *end)
    };
    let runs = marks.chunk_by(|a, b| class(a) == class(b));
    let stretch = |run: &[MarkDetails]| {
        let steps = run.windows(2).map(|pair| pair[1].marked_at_ms - pair[0].marked_at_ms);
        MarkStretch {
            from_ms: run[0].marked_at_ms,
            to_ms: run[run.len() - 1].marked_at_ms,
            marks: run.len() as u64,
            finest_step_s: steps.min().map_or(0, |step| ((step + 500) / 1000).max(1)),
        }
    };
    runs.map(stretch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_say_how_fine_the_marks_of_an_age_are() {
        let mark = |marked_at_ms| MarkDetails {
            address: String::new(),
            marked_at_ms,
            is_consistent: false,
        };
        let marks: Vec<_> = [0, 60, 120, 3000, 3010, 3020, 3990, 3991, 3993]
            .map(|seconds| mark(seconds * 1000))
            .to_vec();
        let found = stretches(&marks, 4_000_000);
        let steps: Vec<_> = found.iter().map(|s| (s.marks, s.finest_step_s)).collect();
        assert_eq!(steps, [(3, 60), (3, 10), (3, 1)]);
        assert_eq!((found[1].from_ms, found[1].to_ms), (3_000_000, 3_020_000));
        assert!(stretches(&[], 5).is_empty());
        assert_eq!(stretches(&marks[..1], 0)[0].finest_step_s, 0);
    }
}
