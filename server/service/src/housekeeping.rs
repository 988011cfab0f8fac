//! Removes what killed commands left, and notes how large the repository is.
//!
//! Folders of temporary files are removed here. Only runs write the repository, so sessions of killed boot
//! checks are ended by a run each (`unpublish SESSION --discard`).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use coldrise_block::{Result, remove_abandoned_folders};
use coldrise_requests::{CommandLine, Unpublish};

use crate::jobs::NewRun;
use crate::service::Service;
use crate::{copies, growth};

const INTERVAL: Duration = Duration::from_secs(60);
/// A session that is still there after its run is tried again after this time.
const SESSION_INTERVAL: Duration = Duration::from_secs(600);
/// Whom the runs name.
const REQUESTED_BY: &str = "coldrised";

/// When what was done.
#[derive(Default)]
pub(crate) struct Housekeeping {
    last: Option<Instant>,
    sessions: HashMap<String, Instant>,
}

impl Housekeeping {
    /// Does what is due. Errors are logged: the next time is soon.
    pub(crate) fn step(&mut self, service: &Service) {
        let now = Instant::now();
        if self.last.is_some_and(|last| now - last < INTERVAL) {
            return;
        }
        self.last = Some(now);
        match remove_abandoned_folders() {
            0 => {}
            count => tracing::info!("removed temporary folders of killed commands: {count}"),
        }
        if let Err(error) = self.end_sessions(service, now) {
            tracing::warn!("sessions of killed boot checks: {}", error.full_message());
        }
        if let Err(error) = growth::sample(service) {
            tracing::warn!("the space of the repository: {}", error.full_message());
        }
        if let Err(error) = copies::sample(service) {
            tracing::warn!("recording how far copies are behind: {}", error.full_message());
        }
    }

    fn end_sessions(&mut self, service: &Service, now: Instant) -> Result<()> {
        self.sessions.retain(|_, asked| now - *asked < SESSION_INTERVAL);
        for session in service.inventory()?.sessions()?.sessions {
            let is_due = session.is_abandoned && !session.is_served;
            if !is_due || self.sessions.contains_key(&session.session) {
                continue;
            }
            let name = session.session;
            tracing::info!("session {name} was left by a killed boot check: a run discards it");
            let discarded = Unpublish { session: name.clone(), discard: true };
            service.queue.enqueue(NewRun {
                kind: "unpublish".to_owned(),
                machine: Some(session.machine),
                arguments: CommandLine::new("unpublish").with(&discarded).words(),
                requested_by: Some(REQUESTED_BY.to_owned()),
                job: None,
            })?;
            self.sessions.insert(name, now);
        }
        Ok(())
    }
}
