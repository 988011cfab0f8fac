//! What coldrise gc would give back.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use coldrise_block::Result;
use coldrise_session::InUse;
use coldrise_store::{MachineName, PointName, Repository};

/// About how many bytes a gc would give back if the points in `gone` were forgotten:
/// with what nothing refers to already.
///
/// # Errors
/// `Corrupt` where a document or a page is damaged; `Interrupted` once `cancel` is set.
pub(crate) fn reclaimable_bytes(
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
