//! Estimates the space that coldrise gc would free.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use coldrise_block::{ErrorKind, Result};
use coldrise_session::InUse;
use coldrise_store::{MachineName, MaxUnused, PointName, Repository};

use crate::invocation::Invocation;

/// Used and unused space. Bytes are estimates.
pub(crate) struct Space {
    /// Bytes that a gc would free.
    pub(crate) reclaimable_bytes: u64,
    /// Unreferenced bytes that a gc would keep, because most of their files is in use.
    pub(crate) kept_bytes: u64,
    /// Distinct chunks that points, sessions and running programs refer to.
    pub(crate) chunks_in_use: u64,
}

/// The space that a gc with `max_unused` would free if the points in `gone` were forgotten,
/// including other unreferenced data, and the space that it would keep. Returns `None` with a
/// remark if damage prevents an estimate, because that must not fail the command.
///
/// # Errors
/// `Interrupted` once `cancel` is set; errors of the operating system.
pub(crate) fn estimate_gc(
    invocation: &Invocation,
    repository: &Repository,
    gone: &HashSet<(MachineName, PointName)>,
    max_unused: MaxUnused,
    cancel: &AtomicBool,
) -> Result<Option<Space>> {
    match estimate(repository, gone, max_unused, cancel) {
        Ok(space) => Ok(Some(space)),
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            let why = error.full_message();
            invocation.remark(&format!("the space that a gc would free is unknown: {why}"));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn estimate(
    repository: &Repository,
    gone: &HashSet<(MachineName, PointName)>,
    max_unused: MaxUnused,
    cancel: &AtomicBool,
) -> Result<Space> {
    let in_use = InUse::without(repository, |machine, point| {
        gone.contains(&(machine.clone(), point.clone()))
    })?;
    let (_, layer_bytes) = in_use.unneeded_layers(repository)?;
    let reachable = repository.reachable(in_use.roots, cancel)?;
    let told = repository.estimate_gc(&reachable, max_unused)?;
    Ok(Space {
        reclaimable_bytes: told.bytes.saturating_add(layer_bytes),
        kept_bytes: told.kept_bytes,
        chunks_in_use: reachable.chunks(),
    })
}
