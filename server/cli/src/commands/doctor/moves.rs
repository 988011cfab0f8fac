//! Moves of running machines: which side counts.

use std::sync::Arc;

use coldrise_recovery::relocation::{move_state, MovePhase};
use coldrise_store::Repository;

use super::{Findings, Status};

/// Names each session whose disks are moved, or were.
pub(super) fn check(found: &mut Findings, repository: &Arc<Repository>) {
    const CHECK: &str = "moves";
    // Reported by the check of the sessions.
    let Ok(sessions) = coldrise_session::sessions(repository) else { return };
    for session in &sessions {
        match move_state(repository, &session.document.name) {
            Ok(None) => {}
            Ok(Some(state)) => {
                let is_quiet = state.is_running || state.note.phase == MovePhase::Settled;
                let status = if is_quiet { Status::Ok } else { Status::Warn };
                found.add(CHECK, status, state.sentence, "");
            }
            Err(error) => found.error(CHECK, &error),
        }
    }
}
