//! A backup at the same time as others of the same repository.

use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Progress, Result};
use coldrise_session::SharedWriter;
use coldrise_store::BackupTarget;

use super::{BackupRequest, BackupStart, BackupSummary, StoredDisks, read_disks};

/// Called when the process that wrote the repository has ended unexpectedly, before the backup starts
/// again.
pub(super) type OnRestart<'a> = &'a dyn Fn();

/// Called when everything is read, before the point is added: fails if what was read may not be one instant.
pub type Proof<'a> = &'a dyn Fn() -> Result<()>;

/// Reads all disks of `request`, stores them through `writer`, and adds the point. Starts again, with what is
/// stored already, if the process that writes for it was killed. The point is added only after `proof`. `progress` makes a display for each attempt.
///
/// # Errors
/// As of [`read_disks`]; those of `proof` and of adding the point.
pub fn store_shared<P: Progress>(
    writer: &SharedWriter<'_>,
    request: &BackupRequest,
    progress: impl Fn() -> P,
    proof: Proof<'_>,
    on_restart: OnRestart<'_>,
    cancel: &AtomicBool,
) -> Result<BackupSummary> {
    let mut unanswered: Option<StoredDisks> = None;
    loop {
        // A killed writer may already have added the point.
        if let Some(stored) = unanswered.take() {
            let points = writer.repository()?.points(&request.machine)?;
            if points.contains(&stored.document) {
                return Ok(stored.summary);
            }
        }
        let start = BackupStart::choose(&*writer.repository()?, request, cancel)?;
        if let Some(base) = start.base() {
            if !writer.keep(base)? {
                continue;
            }
        }
        let view = progress();
        let stored = read_disks(writer, request, &start, &view, cancel);
        drop(view);
        let stored = stored.and_then(|stored| {
            proof()?;
            let added = writer.put_point(&stored.document, None);
            let summary = stored.summary.clone();
            unanswered = Some(stored);
            added.map(|()| summary)
        });
        match stored {
            Err(_) if writer.is_lost() && !cancel.load(Ordering::Relaxed) => {
                on_restart();
                writer.join_again()?;
            }
            stored => {
                let mut summary = stored?;
                let warnings = start.clock_warnings(&*writer.repository()?, request)?;
                summary.warnings.extend(warnings);
                return Ok(summary);
            }
        }
    }
}
