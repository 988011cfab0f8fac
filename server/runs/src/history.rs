//! Removes old runs: those beyond the newest 1,000 that are also older than 90 days.
//!
//! It looks at most once an hour, at the start of a run, and opens no files to decide: ids
//! carry their time. The time of the last complete look is the mtime of `.history`.

use std::path::Path;
use std::time::Duration;

use coldrise_block::{HeldLock, Result, create_private};

use crate::RunId;
use crate::folder::{RunsFolder, planned_id};
use crate::machine::remove_machine;
use crate::run_files::RunFiles;

/// Number of runs that are kept whatever their age.
const KEPT_RUNS: usize = 1000;
const KEPT_DAYS: i64 = 90;
const INTERVAL: Duration = Duration::from_secs(3600);
/// Maximum number of runs that one look removes. If there are more, the next run continues.
const MAX_REMOVED: usize = 200;
/// Every name that this crate gives to a file. A folder that holds others is kept.
const FILES: [&str; 10] = [
    "request.json",
    "plan.json",
    "control",
    "log",
    "log.1",
    "output",
    "output.1",
    "result.json.new",
    "result.json",
    "lock",
];

/// Removes old runs if a look is due.
///
/// # Errors
/// Errors of reading the folder.
pub(crate) fn clean(folder: &RunsFolder, now: jiff::Timestamp) -> Result<()> {
    let mark = folder.path().join(".history");
    let looked = std::fs::symlink_metadata(&mark).and_then(|found| found.modified()).ok();
    if looked.and_then(|at| at.elapsed().ok()).is_some_and(|age| age < INTERVAL) {
        return Ok(());
    }
    let limit = now - jiff::SignedDuration::from_hours(24 * KEPT_DAYS);
    let limit = limit.strftime("%Y%m%dT%H%M%SZ").to_string();
    let names = folder.names()?;
    let mut runs: Vec<RunId> = names.iter().filter_map(|name| name.parse().ok()).collect();
    runs.sort();
    let beyond = runs.len().saturating_sub(KEPT_RUNS);
    let old = runs.iter().take(beyond).filter(|run| run.time() < limit.as_str());
    // Folders of processes that were killed before their run began, and planned runs.
    let unbegun = names.iter().filter(|name| {
        let new = || name.strip_prefix('.')?.strip_suffix(".new")?.parse().ok();
        planned_id(name).or_else(new).is_some_and(|id| id.time() < limit.as_str())
    });
    let paths: Vec<_> =
        old.map(RunId::as_str).chain(unbegun.map(String::as_str)).take(MAX_REMOVED).collect();
    for name in &paths {
        remove(&folder.path().join(name));
    }
    if paths.len() < MAX_REMOVED {
        let _ = std::fs::remove_file(&mark);
        let _ = create_private(&mark);
    }
    Ok(())
}

/// Removes the folder of a run that has ended. On any doubt it stays.
fn remove(path: &Path) {
    let Ok(run) = RunFiles::open(path) else { return };
    let taken = run.file("lock").ok().map(HeldLock::take);
    if taken.as_ref().is_some_and(|taken| !matches!(taken, Ok(Some(_)))) {
        return;
    }
    remove_files(path);
}

/// Removes the files of a run, and its folder if it is empty then.
pub(crate) fn remove_files(path: &Path) {
    remove_machine(path);
    for name in FILES {
        let _ = std::fs::remove_file(path.join(name));
    }
    let _ = std::fs::remove_dir(path);
}
