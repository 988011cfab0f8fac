//! Folds in the background after each seal.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{ErrorKind, Result};
use coldrise_session::{BackgroundLock, BackgroundWork, Folded};
use coldrise_store::{MachineName, PointName, Repository, WriteOptions};

use super::{Done, chosen};
use crate::invocation::Invocation;

/// Interval of the checks for waiting writers and for a request to end.
const LOOK: Duration = Duration::from_millis(50);

type Name = (MachineName, PointName);

/// The result of one turn.
enum Turn {
    /// There may be more points to fold.
    Folded,
    /// There are no points to fold.
    Idle,
    /// Another process writes to the repository, or waits to.
    GaveWay,
}

/// Folds existing points, then new ones, until it receives a signal to end.
pub(super) fn watch(
    invocation: &Invocation,
    interval: Duration,
    end: &Arc<AtomicBool>,
    done: &mut Done,
) -> Result<()> {
    // All other programs have priority on the processor.
    if let Err(error) = rustix::process::nice(19) {
        tracing::debug!(%error, "the priority stays");
    }
    let repository = invocation.open()?;
    let mut failed = HashSet::new();
    while !end.load(Ordering::Relaxed) {
        let pause = match turn(invocation, &repository, end, &mut failed, done)? {
            Turn::Folded => continue,
            Turn::GaveWay => interval.min(Duration::from_secs(1)),
            Turn::Idle => interval,
        };
        let started = Instant::now();
        while started.elapsed() < pause && !end.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK.min(pause));
        }
    }
    Ok(())
}

/// Folds the points that there are, until another process wants to write.
fn turn(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    end: &AtomicBool,
    failed: &mut HashSet<Name>,
    done: &mut Done,
) -> Result<Turn> {
    let mut points = match chosen(repository, &[]) {
        // verify reports damage; the watch continues.
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            tracing::warn!(error = %error.full_message(), "nothing can be folded now");
            return Ok(Turn::Idle);
        }
        points => points?.0,
    };
    points.retain(|point| !failed.contains(&(point.machine.clone(), point.point.clone())));
    if points.is_empty() {
        return Ok(Turn::Idle);
    }
    let Some(turn) = BackgroundLock::begin(repository.path(), BackgroundWork::Fold)? else {
        return Ok(Turn::GaveWay);
    };
    let ((), writer) = match invocation.access()?.open_in_background(|| Ok(())) {
        Err(error) if error.kind() == ErrorKind::Busy => return Ok(Turn::GaveWay),
        writer => writer?,
    };
    let folded = turn.run(end, |cancel| {
        let options = WriteOptions { threads: 1 };
        coldrise_session::fold(&writer, &points, options, &|_, _, _| {}, cancel)
    });
    let failed_at = match &folded {
        Ok(folded) => {
            done.add(&points, folded);
            for point in &points[..folded.points.len()] {
                tracing::info!("folded {}/{}", point.machine, point.point);
            }
            folded.points.len()
        }
        Err(_) => 0,
    };
    let (error, point) = match (folded, points.get(failed_at)) {
        (Err(error), Some(point)) => (error, point),
        (Ok(Folded { failed: Some(error), .. }), Some(point)) => (error, point),
        _ => return Ok(Turn::Folded),
    };
    match error.kind() {
        ErrorKind::Interrupted => Ok(Turn::GaveWay),
        ErrorKind::NotFound => Ok(Turn::Folded),
        kind => {
            let address = format!("{}/{}", point.machine, point.point);
            tracing::warn!(%address, error = %error.full_message(), "was not folded");
            if kind != ErrorKind::NoSpace {
                failed.insert((point.machine.clone(), point.point.clone()));
            }
            Ok(Turn::Idle)
        }
    }
}
