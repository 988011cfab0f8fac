//! Leftovers of killed boot checks and machines: sessions and folders of temporary files.

use std::sync::Arc;

use coldrise_block::remove_abandoned_folders;
use coldrise_fuse::end_abandoned_mounts;
use coldrise_session::discard_abandoned_sessions;
use coldrise_store::Repository;

use coldrise_block::units::show_count;

/// Removes them, and returns what was removed, if anything. Whatever cannot be removed now stays for
/// the next command: it is not an error of this one.
pub fn remove(repository: &Arc<Repository>) -> Option<String> {
    let sessions = discard_abandoned_sessions(repository).unwrap_or_else(|error| {
        tracing::debug!("sessions of killed checks: {}", error.full_message());
        Vec::new()
    });
    // A folder with a dead mount in it cannot be removed.
    let mounts = end_abandoned_mounts() as u64;
    let folders = remove_abandoned_folders() as u64;
    if sessions.is_empty() && folders == 0 && mounts == 0 {
        return None;
    }
    let names: Vec<_> = sessions.iter().map(ToString::to_string).collect();
    let count = show_count(sessions.len() as u64, "session");
    let names = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
    let folders = show_count(folders, "temporary folder");
    let mounts =
        if mounts == 0 { String::new() } else { format!(", {}", show_count(mounts, "mount")) };
    Some(format!("removed what a killed command left: {count}{names}, {folders}{mounts}"))
}
