//! What coldrise gc would give back.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use coldrise_block::{ErrorKind, Result};
use coldrise_session::InUse;
use coldrise_store::{MachineName, PointName, Repository};

use crate::invocation::Invocation;

/// About how many bytes a gc would give back if the points in `gone` were forgotten:
/// with what nothing refers to already. `None`, and a remark, where damage lets nobody
/// tell: that is no reason to fail.
///
/// # Errors
/// `Interrupted` once `cancel` is set; what the operating system says.
pub(crate) fn reclaimable_bytes(
    invocation: &Invocation,
    repository: &Repository,
    gone: &HashSet<(MachineName, PointName)>,
    cancel: &AtomicBool,
) -> Result<Option<u64>> {
    match estimate(repository, gone, cancel) {
        Ok(bytes) => Ok(Some(bytes)),
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
    cancel: &AtomicBool,
) -> Result<u64> {
    let in_use = InUse::without(repository, |machine, point| {
        gone.contains(&(machine.clone(), point.clone()))
    })?;
    let (_, layer_bytes) = in_use.unneeded_layers(repository)?;
    let reachable = repository.reachable(in_use.roots, cancel)?;
    Ok(repository.reclaimable(&reachable)?.bytes.saturating_add(layer_bytes))
}
