//! What coldrise gc would give back.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use coldrise_block::{ErrorKind, Result};
use coldrise_session::InUse;
use coldrise_store::{MachineName, MaxUnused, PointName, Repository};

use crate::invocation::Invocation;

/// What is in use, and what is not. Bytes are estimates.
pub(crate) struct Space {
    /// What a gc would give back.
    pub(crate) reclaimable_bytes: u64,
    /// What nothing refers to and a gc would leave: it lies in files that are mostly in
    /// use.
    pub(crate) kept_bytes: u64,
    /// Different chunks that points, sessions and running programs refer to.
    pub(crate) chunks_in_use: u64,
}

/// What a gc with `max_unused` would give back if the points in `gone` were forgotten, with what nothing
/// refers to already, and what it would leave. `None`, and a remark, where damage lets
/// nobody tell: that is no reason to fail.
///
/// # Errors
/// `Interrupted` once `cancel` is set; what the operating system says.
pub(crate) fn reclaimable(
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
            invocation.remark(&format!("what space a gc returns is not known: {why}"));
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
    let told = repository.reclaimable(&reachable, max_unused)?;
    Ok(Space {
        reclaimable_bytes: told.bytes.saturating_add(layer_bytes),
        kept_bytes: told.kept_bytes,
        chunks_in_use: reachable.chunks(),
    })
}
