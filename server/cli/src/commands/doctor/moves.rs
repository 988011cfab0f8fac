//! Moves of running machines: which side counts. Machines under vCenter and ESXi: what is registered there.

use std::sync::Arc;

use coldrise_hosts::Hosts;
use coldrise_hypervisors::libvirt::left_on;
use coldrise_hypervisors::moves::{MovePhase, move_state};
use coldrise_hypervisors::vsphere::recovery_note;
use coldrise_recovery::unserved;
use coldrise_store::Repository;

use super::{Findings, Status, has_ended};

/// Names the machines that were left on hosts when their sessions ended.
fn check_left(found: &mut Findings, repository: &Arc<Repository>) {
    let hosts = match Hosts::of(repository).all() {
        Ok(hosts) => hosts,
        Err(error) => return found.error("hosts", &error),
    };
    for host in hosts.into_iter().map(|host| host.name) {
        match left_on(repository, &host) {
            Ok(machines) => machines.iter().for_each(|machine| {
                let text = format!("{} was left on host {host}", machine.name());
                let advice = format!("coldrise host check {host} removes it when the host is back");
                found.add("recoveries", Status::Warn, text, &advice);
            }),
            Err(error) => found.error("recoveries", &error),
        }
    }
}

/// Names each session whose disks are moved, or were, and each on which a machine of another server runs.
pub(super) fn check(found: &mut Findings, repository: &Arc<Repository>) {
    const CHECK: &str = "moves";
    check_left(found, repository);
    // Reported by the check of the sessions.
    let Ok(sessions) = coldrise_session::sessions(repository) else { return };
    for session in &sessions {
        let name = &session.document.name;
        match recovery_note(repository, name) {
            Ok(None) => {}
            Ok(Some(note)) => {
                let status = if note.is_unfinished() { Status::Warn } else { Status::Ok };
                found.add("recoveries", status, note.sentence(name), "");
            }
            Err(_) if has_ended(repository, name) => continue,
            Err(error) => found.error("recoveries", &error),
        }
        match unserved(repository, session) {
            Ok(None) => {}
            Ok(Some(sentence)) => found.add("recoveries", Status::Warn, sentence, ""),
            Err(_) if has_ended(repository, name) => continue,
            Err(error) => found.error("recoveries", &error),
        }
        match move_state(repository, &session.document.name) {
            Ok(None) => {}
            Ok(Some(state)) => {
                let is_settled = state.note.phase == MovePhase::Settled && !state.note.is_held;
                let is_quiet = state.is_running || is_settled;
                let status = if is_quiet { Status::Ok } else { Status::Warn };
                found.add(CHECK, status, state.sentence, "");
            }
            Err(_) if has_ended(repository, name) => {}
            Err(error) => found.error(CHECK, &error),
        }
    }
}
