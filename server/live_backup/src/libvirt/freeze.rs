//! The guest's file systems, frozen through libvirt's connection to the guest agent.

use std::time::Instant;

use coldrise_block::Result;

use coldrise_qmp::FREEZE_LIMIT;

use crate::frozen_guest::FrozenGuest;
use coldrise_hypervisors::virsh::Virsh;

/// Freezes the file systems, until the result is thawed or dropped, at most 10 s.
///
/// # Errors
/// If the agent does not freeze in time; then it got the command to thaw.
pub(super) fn freeze(virsh: &Virsh, uuid: &str) -> Result<FrozenGuest> {
    let (virsh, uuid) = (virsh.clone(), uuid.to_owned());
    FrozenGuest::hold(move || {
        let started = Instant::now();
        match virsh.run(&["domfsfreeze", &uuid], FREEZE_LIMIT) {
            Ok(_) => Ok(move || thaw(&virsh, &uuid).map(drop)),
            Err(error) => {
                // It may still freeze, after our time limit.
                let is_late = started.elapsed() >= FREEZE_LIMIT;
                let thawed = thaw(&virsh, &uuid);
                Err(match thawed {
                    Err(_) if is_late => error.advise("the guest may still be frozen: look at it"),
                    _ => error,
                })
            }
        }
    })
}

/// Thaws. Returns whether anything was frozen.
///
/// # Errors
/// If the agent does not answer.
pub(super) fn thaw(virsh: &Virsh, uuid: &str) -> Result<bool> {
    let answer = virsh.run(&["domfsthaw", uuid], FREEZE_LIMIT).map_err(|error| {
        error
            .context("the guest may still be frozen")
            .advise("virsh domfsthaw DOMAIN, or virsh reset DOMAIN")
    })?;
    // `Thawed 2 filesystem(s)`
    let count = answer.split_whitespace().find_map(|word| word.parse::<u64>().ok());
    Ok(count.is_some_and(|count| count > 0))
}
