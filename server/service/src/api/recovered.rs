//! The state of a session's machine that runs under a hypervisor, or whose disks were moved.

use coldrise_block::Result;
use coldrise_hypervisors::libvirt::RecoveryNote;
use coldrise_hypervisors::moves::{MovePhase, MoveState, move_state};
use coldrise_runs::RunRecord;
use coldrise_session::SessionNotes;
use coldrise_store::SessionName;
use serde::Serialize;
use serde_json::Value;

use crate::service::Service;

/// A machine that was recovered under a hypervisor.
#[derive(Serialize, utoipa::ToSchema)]
pub(super) struct Recovered {
    /// `libvirt`.
    hypervisor: &'static str,
    /// The host of libvirt that runs it; absent: the service's.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    /// URI of the hypervisor.
    connect: String,
    /// The machine's name there.
    name: String,
    /// The run that serves its disks. Absent: nothing does, so the machine waits or is off.
    run: Option<String>,
    /// `running`, `paused`, `io-error`, or `unreachable` while its host is, as the run saw it last.
    state: Option<String>,
    /// Since when it runs, in milliseconds since 1970.
    since_ms: Option<u64>,
}

/// How far a move is.
#[derive(Clone, Copy, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum MoveStage {
    /// All writes are in the session.
    Copying,
    /// The disks switch.
    Switching,
    /// Each disk says where its writes are.
    Settled,
}

/// A move of a session's disks.
#[derive(Serialize, utoipa::ToSchema)]
pub(super) struct Moved {
    phase: MoveStage,
    /// A process works on it.
    is_running: bool,
    /// For people: where the machine's disks are, and what to do.
    sentence: String,
    disks: Vec<MovedDisk>,
    /// In milliseconds since 1970.
    started_at_ms: u64,
    /// Since when the machine could be used, in milliseconds since 1970.
    usable_since_ms: u64,
    /// When the disks had switched, in milliseconds since 1970.
    settled_at_ms: Option<u64>,
    /// The restore point of the session's last state.
    point: Option<String>,
}

#[derive(Serialize, utoipa::ToSchema)]
struct MovedDisk {
    disk: String,
    target: String,
    /// `qcow2` or `raw`.
    format: &'static str,
    /// Its writes are in the target. Valid in the phase `settled`.
    is_moved: bool,
}

/// Reads both of a session.
///
/// # Errors
/// `Corrupt` if a note does not authenticate; those of reading runs.
pub(super) fn read(
    service: &Service,
    session: &SessionName,
) -> Result<(Option<Recovered>, Option<Moved>)> {
    let repository = service.inventory()?.repository()?;
    let moved = move_state(&repository, session)?.map(Moved::from);
    let notes = SessionNotes::of(&repository, session)?;
    let Some(note) = RecoveryNote::read(&notes)? else { return Ok((None, moved)) };
    let run = serving_run(service, session)?;
    let recovered = Recovered {
        hypervisor: "libvirt",
        host: note.host.map(|host| host.to_string()),
        connect: note.connect,
        name: note.name,
        state: run.as_ref().and_then(|run| field(run, "state").map(str::to_owned)),
        since_ms: run.as_ref().and_then(|run| run.progress.as_ref()?.get("since_ms")?.as_u64()),
        run: run.map(|run| run.id),
    };
    Ok((Some(recovered), moved))
}

/// The run of `recover` that serves a session's disks.
///
/// # Errors
/// Those of reading runs.
pub(super) fn serving_run(service: &Service, session: &SessionName) -> Result<Option<RunRecord>> {
    let is_of_session = |run: &RunRecord| field(run, "session") == Some(session.as_str());
    Ok(service.runs.running("recover")?.into_iter().find(is_of_session))
}

/// A word of the last progress of a run.
fn field<'a>(run: &'a RunRecord, name: &str) -> Option<&'a str> {
    run.progress.as_ref()?.get(name).and_then(Value::as_str)
}

impl From<MoveState> for Moved {
    fn from(state: MoveState) -> Moved {
        let note = state.note;
        let disks = note.disks.iter().map(|disk| MovedDisk {
            disk: disk.disk.to_string(),
            target: disk.target.display().to_string(),
            format: disk.format.word(),
            is_moved: disk.is_moved,
        });
        Moved {
            phase: match note.phase {
                MovePhase::Copying => MoveStage::Copying,
                MovePhase::Switching => MoveStage::Switching,
                MovePhase::Settled => MoveStage::Settled,
            },
            is_running: state.is_running,
            sentence: state.sentence,
            disks: disks.collect(),
            started_at_ms: note.started_at_ms,
            usable_since_ms: note.usable_since_ms,
            settled_at_ms: note.settled_at_ms,
            point: note.point,
        }
    }
}
