//! From which state the changes of a machine are read, and the name of the next one.
//!
//! Bitmaps and checkpoints have the name of the state from which they count, within a series: the backups of a
//! machine are one, the rounds of each session that follows it another. So no series believes, takes or removes those of another.

use coldrise_block::Result;
use coldrise_ingest::BackupStart;
use coldrise_session::{Follower, SessionDocument};
use coldrise_store::{DiskName, MachineName, PointName, Repository};

use crate::Mode;

/// Between a machine's name and that of a session: names of machines have no capital letters, and those of checkpoints no
/// other signs.
const LIVE: &str = ".LIVE.";

/// The series of the rounds of a session.
pub(crate) fn series_of(session: &SessionDocument) -> String {
    format!("{}{LIVE}{}.{}", session.machine, session.name, session.created_at_ms)
}

/// The state from which changes are read.
pub(crate) enum Since<'a> {
    /// The machine's latest backup.
    Backup { repository: &'a Repository, machine: &'a MachineName, start: &'a BackupStart },
    /// The last round of a session.
    Round(RoundStart<'a>),
}

/// The state of a session that follows a machine, before its next round.
pub(crate) struct RoundStart<'a> {
    pub(crate) repository: &'a Repository,
    pub(crate) machine: &'a MachineName,
    /// The session's series.
    pub(crate) series: String,
    pub(crate) disks: Vec<(DiskName, u64)>,
    /// The last round; before the first one, the point that was published.
    pub(crate) base: PointName,
    pub(crate) next: PointName,
    /// Whether the session is as it was published.
    pub(crate) is_first: bool,
}

impl<'a> Since<'a> {
    pub(crate) fn repository(&self) -> &'a Repository {
        match self {
            Since::Backup { repository, .. } => repository,
            Since::Round(round) => round.repository,
        }
    }

    /// The name of the series.
    pub(crate) fn series(&self) -> String {
        match self {
            Since::Backup { machine, .. } => machine.to_string(),
            Since::Round(round) => round.series.clone(),
        }
    }

    /// The series of the backups, and the one of them that the session shows before its first round.
    pub(crate) fn backup(&self) -> Option<(String, &PointName)> {
        match self {
            Since::Round(round) if round.is_first => Some((round.machine.to_string(), &round.base)),
            _ => None,
        }
    }

    fn machine(&self) -> &'a MachineName {
        match self {
            Since::Backup { machine, .. } => machine,
            Since::Round(round) => round.machine,
        }
    }

    /// Those of the series that are of rounds of sessions that have ended.
    ///
    /// # Errors
    /// Errors of reading the sessions' folder.
    pub(crate) fn ended<'n>(&self, series: impl Iterator<Item = &'n str>) -> Result<Vec<&'n str>> {
        let prefix = format!("{}{LIVE}", self.machine());
        let mut found: Vec<&str> = series.filter(|name| name.starts_with(&prefix)).collect();
        if !found.is_empty() {
            let sessions = Follower::all(self.repository(), self.machine())?;
            let kept: Vec<String> = sessions.iter().map(series_of).collect();
            found.retain(|name| !kept.iter().any(|kept| kept == name));
        }
        Ok(found)
    }

    /// The name of the state that is read now.
    pub(crate) fn next(&self) -> &PointName {
        match self {
            Since::Backup { start, .. } => start.point(),
            Since::Round(round) => &round.next,
        }
    }

    /// Least bytes that a bit of a bitmap stands for.
    pub(crate) fn granularity_bytes(&self) -> u64 {
        match self {
            // At least a chunk, so that a chunk never is partly marked.
            Since::Backup { repository, .. } => {
                u64::from(repository.chunk_size_bytes()).max(64 << 10)
            }
            Since::Round(_) => coldrise_block::BLOCK_SIZE_BYTES,
        }
    }

    /// Whether only the disks are read, as of a machine that was read before.
    pub(crate) fn is_round(&self) -> bool {
        matches!(self, Since::Round(_))
    }

    /// The state from which the changes of a disk count. A push copies only what is marked as changed: not the rest of
    /// a disk that has grown. A smaller disk was recreated.
    pub(crate) fn base(
        &self,
        mode: Mode,
        disk: &DiskName,
        size_bytes: u64,
    ) -> Result<Option<PointName>> {
        let (repository, start) = match self {
            Since::Backup { repository, start, .. } => (repository, start),
            Since::Round(round) => {
                let is_same = |(name, size): &(DiskName, u64)| name == disk && *size == size_bytes;
                return Ok(round.disks.iter().any(is_same).then(|| round.base.clone()));
            }
        };
        let base = start.bitmap_base(repository, disk)?.filter(|(_, stored)| match mode {
            Mode::Pull => stored.size_bytes <= size_bytes,
            Mode::Push => stored.size_bytes == size_bytes,
        });
        Ok(base.map(|(point, _)| point.clone()))
    }

    /// The state from which a bitmap would have to count, for a remark; `None` if none is to be expected.
    pub(crate) fn expected(&self) -> Option<String> {
        match self {
            Since::Backup { start, .. } => {
                start.base().map(|latest| format!("{}/{}", latest.machine, latest.point))
            }
            Since::Round(round) if round.is_first => {
                Some(format!("{}/{}", round.machine, round.base))
            }
            Since::Round(_) => Some("the last round".to_owned()),
        }
    }
}
