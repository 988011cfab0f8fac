//! Estimates the space that a gc would free.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use coldrise_block::Result;
use coldrise_session::InUse;
use coldrise_store::{MachineName, MaxUnused, PointName, Repository};

/// Used and unused space. Bytes are estimates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes that a gc would free.
    pub reclaimable_bytes: u64,
    /// Unreferenced bytes that a gc would keep, because most of their files is in use.
    pub kept_bytes: u64,
    /// Distinct chunks that points, sessions and running programs refer to.
    pub chunks_in_use: u64,
}

/// The space that a gc with `max_unused` would free if the points in `gone` were forgotten,
/// including other unreferenced data, and the space that it would keep.
///
/// # Errors
/// `Corrupt` if damage prevents an estimate; `Interrupted` once `cancel` is set; errors of the
/// operating system.
pub fn estimate_gc(
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
    let estimate = repository.estimate_gc(&reachable, max_unused)?;
    Ok(Space {
        reclaimable_bytes: estimate.bytes.saturating_add(layer_bytes),
        kept_bytes: estimate.kept_bytes,
        chunks_in_use: reachable.chunks(),
    })
}
