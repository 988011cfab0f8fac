//! The note that says on which side the newest state of a moved disk is.

use std::path::PathBuf;

use coldrise_block::Result;
use coldrise_session::{SessionDocument, SessionNotes};
use coldrise_store::{DiskName, SessionName};
use serde::{Deserialize, Serialize};

use super::target::{ImageFormat, Target};
use coldrise_block::now_ms;

const NAME: &str = "move";

/// How far a move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MovePhase {
    /// All writes are in the session.
    Copying,
    /// All writes are in the targets, once the jobs are finalized or QEMU is gone.
    Switching,
    /// Each disk says where its writes are.
    Settled,
}

/// The document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveNote {
    /// How far it is.
    pub phase: MovePhase,
    /// When the copy began, in milliseconds since 1970.
    pub started_at_ms: u64,
    /// When the session was published: since then the machine can be used.
    pub usable_since_ms: u64,
    /// When it was settled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settled_at_ms: Option<u64>,
    /// QEMU's monitor; absent for a machine under libvirt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitor: Option<PathBuf>,
    /// Whether the move has stopped the machine for the last part of the copy or, under libvirt, for the switch, or was
    /// about to: the process that finishes it lets it run on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_held: bool,
    /// The disks.
    pub disks: Vec<MovedDisk>,
    /// The restore point that was sealed after the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub point: Option<String>,
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedDisk {
    /// Its name.
    pub disk: DiskName,
    /// The file or block device.
    pub target: PathBuf,
    /// Its format.
    pub format: ImageFormat,
    /// Device and inode of the file, if the move has made it: an unfinished one is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<(u64, u64)>,
    /// Whether its writes are in the target. Valid in the phase `settled`.
    #[serde(default)]
    pub is_moved: bool,
}

impl MoveNote {
    /// The note of a move that begins.
    pub(super) fn begin(
        session: &SessionDocument,
        targets: &[Target],
        monitor: Option<PathBuf>,
    ) -> MoveNote {
        let disk = |target: &Target| MovedDisk {
            disk: target.disk.clone(),
            target: target.path.clone(),
            format: target.format(),
            made: None,
            is_moved: false,
        };
        MoveNote {
            phase: MovePhase::Copying,
            started_at_ms: now_ms(),
            usable_since_ms: session.created_at_ms,
            settled_at_ms: None,
            monitor,
            is_held: false,
            disks: targets.iter().map(disk).collect(),
            point: None,
        }
    }

    /// Reads the note of a session.
    ///
    /// # Errors
    /// `Corrupt` if it does not authenticate.
    pub fn read(notes: &SessionNotes) -> Result<Option<MoveNote>> {
        notes.read_json(NAME)
    }

    pub(super) fn write(&self, notes: &SessionNotes) -> Result<()> {
        notes.write_json(NAME, self)
    }

    pub(super) fn remove(notes: &SessionNotes) -> Result<()> {
        notes.remove(NAME)
    }

    /// The prefix of the ids of this move's jobs and nodes in QEMU: at most 22 characters.
    pub(super) fn prefix(&self) -> String {
        format!("coldrise-move-{:08x}", self.started_at_ms & 0xffff_ffff)
    }

    /// For people: which side counts, and what to do.
    pub fn sentence(&self, session: &SessionName, is_running: bool) -> String {
        let targets = |is_moved: bool| {
            let disks = self.disks.iter().filter(|disk| disk.is_moved == is_moved);
            let disks = disks.map(|disk| format!("{} to {}", disk.disk, disk.target.display()));
            disks.collect::<Vec<_>>().join(", ")
        };
        match (self.phase, is_running) {
            (MovePhase::Copying, true) => format!(
                "session {session} is being moved ({}); until the switch the session counts",
                targets(false)
            ),
            (MovePhase::Copying, false) => format!(
                "a move of session {session} ({}) was interrupted: the session counts, the targets are \
                 incomplete; {}repeat the move, or clean up with coldrise move live/{session}",
                targets(false),
                if self.is_held { "the machine may be suspended until then; " } else { "" }
            ),
            (MovePhase::Switching, true) => {
                format!("session {session} is being switched ({})", targets(false))
            }
            (MovePhase::Switching, false) => format!(
                "the switch of session {session} ({}) was interrupted: run coldrise move live/{session}, which \
                 completes it; start the machine from neither side before that",
                targets(false)
            ),
            (MovePhase::Settled, _) => {
                let end = match &self.point {
                    Some(point) => format!("the session ends with the point {point}"),
                    None => "the session's last state is not sealed yet".to_owned(),
                };
                let kept = match self.disks.iter().any(|disk| !disk.is_moved) {
                    true => format!(
                        "; still in the session, because the switch failed: {}",
                        targets(false)
                    ),
                    false => String::new(),
                };
                let held = match self.is_held {
                    true => {
                        format!("; it may be suspended: coldrise move live/{session} resumes it")
                    }
                    false => String::new(),
                };
                format!(
                    "the machine of session {session} was moved: {}{kept}; start it from there, not from the \
                     session; {end}{held}",
                    targets(true)
                )
            }
        }
    }
}
