//! `coldrise gc`: frees the space of unreferenced data.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::Args;
use coldrise_block::{Context, Error, ErrorKind, Phase, Progress, ProgressState, Result};
use coldrise_session::{BackgroundLock, GcAnswer, InUse, ask_for_gc, collect_garbage};
use coldrise_store::{GcOptions, GcProgress, MaxUnused};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::Report;
use crate::units::{show_count, show_duration, show_size};
use coldrise_hosting::leftovers;
use coldrise_hosting::signals::cancel_flag;

/// Free the space of unreferenced data.
///
/// Deletes chunks, pages of chunk maps and layers that no restore point, session or running
/// program needs. Machines, front ends and backups keep running; during a backup, the backup's
/// process does the gc. A gc can be interrupted at any time, and the next one continues. Files
/// of which more than half is in use are left alone. Backups may reuse the unreferenced data in
/// them; coldrise stats shows how much there is.
#[derive(Debug, Args)]
pub(crate) struct GcArguments {
    /// Delete nothing; show about how much space a gc would free.
    #[arg(long, short = 'n')]
    dry_run: bool,

    /// Rewrite files that are at least PERCENT unreferenced. 0 frees everything, and may
    /// rewrite the whole repository. 100 rewrites nothing, and deletes only files that are
    /// completely unreferenced.
    #[arg(long, value_name = "PERCENT", default_value = "50")]
    max_unused: MaxUnused,
}

/// Time after which a new backup accepts requests.
const BEGINNING_PATIENCE: Duration = Duration::from_secs(2);
/// Time after which an ending backup is gone.
const ENDING_PATIENCE: Duration = Duration::from_secs(60);
/// Interval of the checks for the end of a backup.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The result of a gc.
#[derive(Serialize)]
pub(super) struct Collected {
    chunks_deleted: u64,
    pages_deleted: u64,
    layers_deleted: u64,
    /// Space freed on the file system: the size of database and layers before, minus the
    /// size after; during a backup an estimate.
    bytes_returned: u64,
    chunks_kept_unreferenced: u64,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct Estimate {
    is_dry_run: bool,
    chunks_to_delete: u64,
    pages_to_delete: u64,
    layers_to_delete: u64,
    bytes_to_return: u64,
    chunks_kept_unreferenced: u64,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &GcArguments) -> Result<Report> {
    if arguments.dry_run {
        return estimate(invocation, arguments.max_unused);
    }
    let collected = collect(invocation, arguments.max_unused)?;
    let text = collected.text();
    Ok(Report::done(&collected, text))
}

/// Does the gc here, or in the process of a running backup.
///
/// # Errors
/// `Busy` if another process than a backup writes to the repository; `Corrupt`;
/// `Interrupted`.
pub(super) fn collect(invocation: &Invocation, max_unused: MaxUnused) -> Result<Collected> {
    let started = invocation.elapsed_ms();
    let cancel = cancel_flag()?;
    let view = ProgressView::new(invocation);
    let progress = |now: GcProgress| {
        view.update(&ProgressState {
            phase: Phase::Reclaiming,
            disk: "files",
            done_bytes: now.done_bytes,
            total_bytes: now.total_bytes,
            read_bytes: 0,
            stored_bytes: 0,
        });
    };
    let options = GcOptions { max_unused, cancel: &cancel, progress: &progress };
    let collected = collect_somewhere(invocation, &options);
    drop(view);
    let (collected, bytes_returned) = collected.map_err(|error| match error.kind() {
        ErrorKind::Interrupted => Error::new(
            ErrorKind::Interrupted,
            "cancelled: deleted data stays deleted, and the next gc continues",
        ),
        _ => error,
    })?;
    let reclaimed = collected.reclaimed;
    if let Some(first) = reclaimed.damaged_files.first() {
        return Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "{} damaged and unchanged; everything else was done; run \
                 coldrise verify to see what it affects; the first: {first}",
                match reclaimed.damaged_files.len() {
                    1 => "1 file of the database is".to_owned(),
                    more => format!("{more} files of the database are"),
                }
            ),
        ));
    }
    Ok(Collected {
        chunks_deleted: reclaimed.chunks,
        pages_deleted: reclaimed.pages,
        layers_deleted: collected.layers,
        bytes_returned,
        chunks_kept_unreferenced: reclaimed.kept_chunks,
        elapsed_ms: invocation.elapsed_ms().saturating_sub(started),
    })
}

/// Returns the result and the bytes that the file system got back.
fn collect_somewhere(
    invocation: &Invocation,
    options: &GcOptions<'_>,
) -> Result<(coldrise_session::Collected, u64)> {
    let path = invocation.repository_path()?;
    let mut patience = BEGINNING_PATIENCE;
    let mut asked_at = Instant::now();
    loop {
        let busy = match collect_alone(invocation, options) {
            Err(error) if error.kind() == ErrorKind::Busy => error,
            // A backup was about to start; it does the rest.
            Err(error)
                if error.kind() == ErrorKind::Interrupted
                    && !options.cancel.load(Ordering::Relaxed) =>
            {
                asked_at = Instant::now();
                continue;
            }
            collected => return collected,
        };
        match ask_for_gc(path, options)? {
            // A concurrent backup takes space, so the difference would mean nothing.
            GcAnswer::Done(collected) => {
                let bytes = collected.reclaimed.bytes;
                return Ok((collected, bytes));
            }
            // A new backup does not accept requests yet.
            GcAnswer::Nobody => {}
            GcAnswer::Ending => patience = ENDING_PATIENCE,
        }
        if options.cancel.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        if asked_at.elapsed() > patience {
            return Err(busy);
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// Runs the gc in this process and yields to every waiting writer. A starting backup
/// continues the gc.
fn collect_alone(
    invocation: &Invocation,
    options: &GcOptions<'_>,
) -> Result<(coldrise_session::Collected, u64)> {
    let path = invocation.repository_path()?;
    let ((turn, before), writer) = invocation.access()?.open_in_background(|| {
        let turn = BackgroundLock::begin_gc(path, options.cancel)?;
        // An open database takes additional space.
        Ok((turn, space(path)?))
    })?;
    if let Some(removed) = leftovers::remove(writer.repository()) {
        invocation.remark(&removed);
    }
    let collected = turn.run(options.cancel, |cancel| {
        collect_garbage(&writer, &GcOptions { cancel, ..*options })
    })?;
    // The database deletes its last files at close.
    drop(writer);
    Ok((collected, before.saturating_sub(space(path)?)))
}

impl Collected {
    /// The result in one line.
    pub(super) fn text(&self) -> String {
        format!(
            "deleted {}, {} and {} in {}: {} returned{}",
            show_count(self.chunks_deleted, "chunk"),
            show_count(self.pages_deleted, "page"),
            show_count(self.layers_deleted, "layer"),
            show_duration(Duration::from_millis(self.elapsed_ms)),
            show_size(self.bytes_returned),
            kept(self.chunks_kept_unreferenced),
        )
    }
}

/// This works during a backup, too.
fn estimate(invocation: &Invocation, max_unused: MaxUnused) -> Result<Report> {
    let cancel = cancel_flag()?;
    let repository = invocation.open()?;
    let in_use = InUse::collect(&repository)?;
    let (layers, layer_bytes) = in_use.unneeded_layers(&repository)?;
    let reachable = repository.reachable(in_use.roots, &cancel)?;
    let sums = repository.estimate_gc(&reachable, max_unused)?;
    let estimate = Estimate {
        is_dry_run: true,
        chunks_to_delete: sums.chunks,
        pages_to_delete: sums.pages,
        layers_to_delete: layers,
        bytes_to_return: sums.bytes.saturating_add(layer_bytes),
        chunks_kept_unreferenced: sums.kept_chunks,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = format!(
        "a gc would delete {}, {} and {}: about {} would return{}",
        show_count(estimate.chunks_to_delete, "chunk"),
        show_count(estimate.pages_to_delete, "page"),
        show_count(estimate.layers_to_delete, "layer"),
        show_size(estimate.bytes_to_return),
        kept(sums.kept_chunks),
    );
    Ok(Report::answer(&estimate, text))
}

fn kept(chunks: u64) -> String {
    match chunks {
        0 => String::new(),
        _ => format!(
            "; {} stay unreferenced in files in use (see --max-unused)",
            show_count(chunks, "chunk")
        ),
    }
}

/// The space that database and layers take on the file system, in bytes.
fn space(repository: &Path) -> Result<u64> {
    let mut bytes: u64 = 0;
    for part in ["db", "layers"] {
        let folder = repository.join(part);
        let what = || format!("reading {}", folder.display());
        for entry in std::fs::read_dir(&folder).context(what)? {
            match entry.context(what)?.metadata() {
                Ok(metadata) => bytes = bytes.saturating_add(metadata.blocks().saturating_mul(512)),
                // Removed since the listing.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).context(what),
            }
        }
    }
    Ok(bytes)
}
