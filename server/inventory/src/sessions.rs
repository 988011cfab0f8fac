//! Published sessions, as `sessions` and `show` show them.

use std::collections::BTreeSet;
use std::sync::Arc;

use coldrise_block::Result;
use coldrise_session::{ActivityDetail, DiskActivity, SessionState, session_activity};
use coldrise_store::{Repository, SessionName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The published sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionListing {
    /// Sorted by name.
    pub sessions: Vec<SessionDetails>,
}

/// A session.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct SessionDetails {
    /// The session's name.
    pub session: String,
    /// The point that was published.
    pub address: String,
    /// The machine of this point.
    pub machine: String,
    /// The name of this point.
    pub point: String,
    /// Time of the publish, in milliseconds since 1970-01-01T00:00:00Z.
    pub created_at_ms: u64,
    /// A front end has it open for writing.
    pub is_served: bool,
    /// A boot check published it, and it ends with that.
    #[serde(default)]
    pub is_owned: bool,
    /// A killed boot check left it. It is discarded soon.
    pub is_abandoned: bool,
    /// Where the machine runs whose changes the session takes; absent if clients write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follows: Option<String>,
    /// The link of the site whose session has the marks that come here; absent for other sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site: Option<String>,
    /// Space that the writes since the last seal take, in bytes.
    pub captured_bytes: u64,
    /// The process that serves it. Absent in lists, if it is not served, and with `activity_missing`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<SessionServer>,
    /// Why the activity of a served session is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activity_missing: Option<String>,
    /// The disks.
    pub disks: Vec<SessionDiskDetails>,
}

/// The process that serves a session.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct SessionServer {
    /// Its program, such as `nbdkit`.
    pub program: String,
    /// Its number on the host.
    pub process: u32,
    /// When it opened the session: the activity of the disks counts from then on.
    pub opened_at_ms: u64,
    /// The time of the activity below.
    pub sampled_at_ms: u64,
}

/// A disk of a session.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct SessionDiskDetails {
    /// The disk's name.
    pub disk: String,
    /// live/SESSION/DISK.
    pub export: String,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// What clients do with it; present if the session has a `server`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activity: Option<DiskActivity>,
}

impl SessionListing {
    /// Reads the sessions.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn read(repository: &Arc<Repository>) -> Result<SessionListing> {
        let states = coldrise_session::sessions(repository)?;
        Ok(SessionListing { sessions: states.iter().map(SessionDetails::new).collect() })
    }

    /// The names of the sessions that differ, sorted. Captured bytes do not count.
    pub(crate) fn changed_since(&self, before: &SessionListing) -> Vec<String> {
        let key =
            |session: &SessionDetails| SessionDetails { captured_bytes: 0, ..session.clone() };
        let one: BTreeSet<_> = self.sessions.iter().map(key).collect();
        let other: BTreeSet<_> = before.sessions.iter().map(key).collect();
        let mut names: Vec<_> =
            one.symmetric_difference(&other).map(|s| s.session.clone()).collect();
        names.dedup();
        names
    }
}

impl SessionDetails {
    /// A session as it is now, with what its clients do.
    ///
    /// # Errors
    /// `NotFound`, naming the existing sessions.
    pub fn read(
        repository: &Arc<Repository>,
        name: &SessionName,
        detail: ActivityDetail,
    ) -> Result<SessionDetails> {
        let state = coldrise_session::session(repository, name)?;
        let mut details = SessionDetails::new(&state);
        if !state.is_served {
            return Ok(details);
        }
        match session_activity(repository, &state.document, detail) {
            Ok(None) => {
                let why = "its server is opening or closing it, or is of an older version";
                details.activity_missing = Some(why.to_owned());
            }
            Ok(Some(activity)) => {
                details.server = Some(SessionServer {
                    program: activity.program,
                    process: activity.process,
                    opened_at_ms: activity.opened_at_ms,
                    sampled_at_ms: activity.sampled_at_ms,
                });
                for (disk, activity) in details.disks.iter_mut().zip(activity.disks) {
                    disk.activity = Some(activity);
                }
            }
            Err(error) => details.activity_missing = Some(error.full_message()),
        }
        Ok(details)
    }

    /// A session, without what its clients do.
    pub fn new(state: &SessionState) -> SessionDetails {
        let document = &state.document;
        SessionDetails {
            session: document.name.to_string(),
            address: format!("{}/{}", document.machine, document.point),
            machine: document.machine.to_string(),
            point: document.point.to_string(),
            created_at_ms: document.created_at_ms,
            is_served: state.is_served,
            is_owned: state.is_owned,
            is_abandoned: state.is_abandoned,
            follows: document.follows.clone(),
            site: document.received.as_ref().map(|received| received.link.to_string()),
            captured_bytes: state.captured_bytes,
            server: None,
            activity_missing: None,
            disks: document
                .disks
                .iter()
                .map(|disk| SessionDiskDetails {
                    disk: disk.name.to_string(),
                    export: format!("live/{}/{}", document.name, disk.name),
                    size_bytes: disk.size_bytes,
                    activity: None,
                })
                .collect(),
        }
    }
}
