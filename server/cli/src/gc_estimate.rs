//! Estimates the space that coldrise gc would free.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use coldrise_block::{ErrorKind, Result};
use coldrise_store::{MachineName, MaxUnused, PointName, Repository};

use crate::invocation::Invocation;

/// The bytes that a gc with `max_unused` would free if the points in `gone` were forgotten,
/// including other unreferenced data. Returns `None` with a remark if damage prevents an estimate,
/// because that must not fail the command.
///
/// # Errors
/// `Interrupted` once `cancel` is set; errors of the operating system.
pub(crate) fn reclaimable_bytes(
    invocation: &Invocation,
    repository: &Repository,
    gone: &HashSet<(MachineName, PointName)>,
    max_unused: MaxUnused,
    cancel: &AtomicBool,
) -> Result<Option<u64>> {
    match coldrise_inventory::estimate_gc(repository, gone, max_unused, cancel) {
        Ok(space) => Ok(Some(space.reclaimable_bytes)),
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            invocation.remark(&unknown_space(&error.full_message()));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The remark for an estimate that damage prevents.
pub(crate) fn unknown_space(why: &str) -> String {
    format!("the space that a gc would free is unknown: {why}")
}
