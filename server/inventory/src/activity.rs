//! The I/O of clients on all served sessions, for a program that reports changes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use coldrise_block::Result;
use coldrise_session::{
    ActivityDetail, DiskActivity, OperationActivity, SessionActivity, SessionDocument,
    served_sessions, session_activity,
};
use coldrise_store::Repository;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A server that did not answer is asked again after this time: it may be stopped, and each question
/// takes up to a second.
const SILENCE: Duration = Duration::from_secs(30);

/// What clients did with all disks of a session since its server opened it. Differences of two such
/// documents with one `opened_at_ms` are rates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ActivityTotals {
    /// The session's name.
    pub session: String,
    /// The machine of its point.
    pub machine: String,
    /// When its server opened it.
    pub opened_at_ms: u64,
    /// The time of the counts.
    pub sampled_at_ms: u64,
    /// Completed reads.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Completed writes, zeroes included.
    pub writes: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Completed flushes.
    pub flushes: u64,
    /// Failed operations of all kinds.
    pub failed: u64,
    /// Bytes of reads from stored chunks.
    pub from_backup_bytes: u64,
    /// Bytes of reads from chunks in memory.
    pub from_cache_bytes: u64,
    /// Bytes of reads of captured blocks.
    pub from_captured_bytes: u64,
    /// Bytes of reads where the disks hold nothing.
    pub zero_bytes: u64,
}

impl ActivityTotals {
    fn new(session: &SessionDocument, activity: &SessionActivity) -> ActivityTotals {
        let sum = |count: &dyn Fn(&DiskActivity) -> u64| {
            activity.disks.iter().fold(0_u64, |sum, disk| sum.saturating_add(count(disk)))
        };
        let writes = |disk: &DiskActivity, count: fn(&OperationActivity) -> u64| {
            count(&disk.write).saturating_add(count(&disk.write_zeroes))
        };
        ActivityTotals {
            session: session.name.to_string(),
            machine: session.machine.to_string(),
            opened_at_ms: activity.opened_at_ms,
            sampled_at_ms: activity.sampled_at_ms,
            reads: sum(&|disk| disk.read.operations),
            read_bytes: sum(&|disk| disk.read.bytes),
            writes: sum(&|disk| writes(disk, |kind| kind.operations)),
            written_bytes: sum(&|disk| writes(disk, |kind| kind.bytes)),
            flushes: sum(&|disk| disk.flush.operations),
            failed: sum(&|disk| {
                let kinds = [&disk.read, &disk.write, &disk.write_zeroes, &disk.trim, &disk.flush];
                kinds.iter().fold(0, |sum, kind| sum.saturating_add(kind.failed))
            }),
            from_backup_bytes: sum(&|disk| disk.from_backup_bytes),
            from_cache_bytes: sum(&|disk| disk.from_cache_bytes),
            from_captured_bytes: sum(&|disk| disk.from_captured_bytes),
            zero_bytes: sum(&|disk| disk.zero_bytes),
        }
    }
}

/// Follows the served sessions.
#[derive(Default)]
pub struct ActivityWatch {
    /// The last totals, by session.
    known: HashMap<String, ActivityTotals>,
    /// Sessions whose server did not answer, and when.
    silent: HashMap<String, Instant>,
}

impl ActivityWatch {
    /// The totals that differ from those of the last call, by session. The first call returns all.
    ///
    /// # Errors
    /// Errors of the operating system. Servers that do not answer are left out.
    pub(crate) fn next(&mut self, repository: &Repository) -> Result<Vec<ActivityTotals>> {
        let served = served_sessions(repository)?;
        let mut now = HashMap::new();
        let mut changed = Vec::new();
        self.silent.retain(|_, since| since.elapsed() < SILENCE);
        for session in &served {
            let name = session.name.to_string();
            if self.silent.contains_key(&name) {
                continue;
            }
            match session_activity(repository, session, ActivityDetail::Totals) {
                Ok(Some(activity)) => {
                    let totals = ActivityTotals::new(session, &activity);
                    let sampled_at_ms = totals.sampled_at_ms;
                    let before = self.known.remove(&name);
                    let before = before.map(|old| ActivityTotals { sampled_at_ms, ..old });
                    if before.as_ref() != Some(&totals) {
                        changed.push(totals.clone());
                    }
                    now.insert(name, totals);
                }
                // It is opening or closing the session.
                Ok(None) => {}
                Err(_) => {
                    self.silent.insert(name, Instant::now());
                }
            }
        }
        self.known = now;
        changed.sort_by(|a, b| a.session.cmp(&b.session));
        Ok(changed)
    }
}
