//! Copies in other repositories: which fail, and which are far behind.

use std::sync::Arc;

use coldrise_replica::{CopyState, StatusReader, TargetCopies};
use coldrise_store::Repository;

use super::{Findings, Status};
use crate::commands::copies::sentence;
use crate::units::now_ms;

/// A point that was not copied for longer than this is a warning: copies of each day leave no more.
const FAR_BEHIND_MS: u64 = 26 * 3600 * 1000;

pub(super) fn check(found: &mut Findings, repository: &Arc<Repository>) {
    const CHECK: &str = "copies";
    let targets = match StatusReader::default().targets(repository) {
        Ok(targets) => targets,
        Err(error) => return found.error(CHECK, &error),
    };
    let now_ms = now_ms();
    for target in &targets {
        let (status, advice) = match target.state {
            CopyState::Failing | CopyState::Unknown => (Status::Warn, "see coldrise copies"),
            _ if is_far_behind(target, now_ms) => (
                Status::Warn,
                "coldrise copy --to, or coldrise copies TARGET --forget if it is not wanted",
            ),
            _ => (Status::Ok, ""),
        };
        let message = format!("{}: {}", target.target, sentence(target, now_ms));
        found.add(CHECK, status, message, advice);
    }
}

fn is_far_behind(target: &TargetCopies, now_ms: u64) -> bool {
    let since_ms = target.behind_since_ms.unwrap_or(now_ms);
    now_ms.saturating_sub(since_ms) > FAR_BEHIND_MS
}
