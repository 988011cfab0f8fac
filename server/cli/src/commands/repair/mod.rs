//! `coldrise repair`: finds damaged chunks, and heals them from sources that still have
//! their content.

mod other;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use coldrise_block::{ErrorKind, Result};
use coldrise_ingest::source::SourceOptions;
use coldrise_ingest::{SourceSpec, check_source, heal};
use coldrise_session::{InUse, Inventory, ProgressSum, QuarantineReport, apply_quarantine, joined};
use coldrise_store::{
    Affected, CatalogDamage, Coverage, Reachable, ReopenReport, RepairReport, Repository,
    RepositoryWriter, VerifyOptions,
};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::Report;
use crate::units::{show_count, show_duration, show_size};
use coldrise_hosting::signals::cancel_flag;

/// Find damaged data, and restore it from any source that still has the content.
///
/// Reads all chunks and captured blocks, as verify does, and records the damaged chunks. Those
/// heal when their content appears again: in the next backup of a machine that still has it, or
/// now, from --from and --from-repo. A damaged database is rebuilt from the readable parts of
/// its files, so that backups work again; this takes as much space as the damaged files.
/// Missing entries of the deduplication index are added, and entries that lead to damaged
/// unreferenced chunks are removed. No readable data is lost. Missing markers of restore points
/// and sessions are recreated. The exit code is 1 if damage remains.
#[derive(Debug, Args)]
pub(crate) struct RepairArguments {
    /// A source that may still have the content: [FORMAT:]FILE or an NBD URI, as for backup.
    /// Examples: a copy of the disk, an older image of it, a disk served from another
    /// repository.
    #[arg(long, value_name = "SOURCE", value_parser = parse_source)]
    from: Vec<SourceSpec>,

    /// Allow images given with --from to open their backing files.
    #[arg(long)]
    follow_backing: bool,

    #[command(flatten)]
    other: other::OtherArguments,

    /// Quarantine every restore point that stays damaged: it is not served and is never latest,
    /// no backup builds on it, and prune keeps it without counting it.
    ///
    /// Every repair, with or without this option, releases such points when they are complete
    /// again. See coldrise quarantine.
    #[arg(long)]
    quarantine: bool,
}

/// The name of a source in progress and errors.
const SOURCE_NAME: &str = "source";

fn parse_source(text: &str) -> std::result::Result<SourceSpec, String> {
    SourceSpec::parse(&format!("{SOURCE_NAME}={text}")).map_err(|error| error.to_string())
}

#[derive(Serialize)]
struct Repaired {
    damaged_chunks: u64,
    healed_chunks: u64,
    /// Unreferenced chunks; no later backup reuses them. Not counted above.
    unreferenced_chunks: u64,
    /// Still damaged; they heal if a backup or a source has their content.
    healable_chunks: u64,
    /// Database files with damage inside, and the unreadable ranges in them.
    mended_files: u64,
    lost_blocks: u64,
    /// Database files that are missing or completely unreadable.
    dropped_files: u64,
    /// Rebuilt lists of the database's files.
    is_list_new: bool,
    /// Entries of the deduplication index.
    removed_entries: u64,
    added_entries: u64,
    /// Recreated markers of points and sessions: they were missing or unreadable.
    made_markers: u64,
    /// Points that the catalog had lost, restored from their markers.
    restored_points: u64,
    /// Damage in chunks and captured blocks that nothing can heal.
    lost: Vec<Affected>,
    damaged_documents: Vec<CatalogDamage>,
    /// Points that were quarantined, and points that are complete again.
    quarantined: Vec<String>,
    released: Vec<String>,
    is_clean: bool,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &RepairArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    // A missing source is reported before hours of reading.
    let sources =
        SourceOptions { follow_backing: arguments.follow_backing, ..SourceOptions::default() };
    for source in &arguments.from {
        check_source(source, &sources, &cancel)?;
    }
    let other = arguments.other.open(invocation)?;
    let (writer, reopened, entered) = invocation.access()?.open_for_repair()?;
    let mut done = Done { reopened, made_markers: entered.markers, ..Done::default() };
    match repair(invocation, arguments, &writer, other.as_ref(), &mut done, &cancel) {
        Ok(report) => Ok(report),
        Err(error) => {
            // The completed part stays done.
            done.lines().iter().for_each(|line| invocation.remark(line));
            Err(error)
        }
    }
}

/// The repairs before the healing of chunks.
#[derive(Default)]
struct Done {
    reopened: ReopenReport,
    made_markers: u64,
    report: RepairReport,
}

fn repair(
    invocation: &Invocation,
    arguments: &RepairArguments,
    writer: &RepositoryWriter,
    other: Option<&Arc<Repository>>,
    done: &mut Done,
    cancel: &AtomicBool,
) -> Result<Report> {
    let inventory = Inventory::take(writer.repository(), cancel)?;
    let in_use = in_use(writer, cancel)?;
    let view = ProgressView::new(invocation);
    let progress = |part, now| view.verifying(part, now);
    let sum = ProgressSum::new(inventory.captured_bytes(writer.repository()), &progress);
    let progress = |now| sum.chunks(now);
    let coverage = Coverage::Everything;
    let options = VerifyOptions { coverage, threads: 0, cancel, progress: &progress };
    done.report = writer.find_damage(&inventory.disks(), in_use.as_ref(), &options)?;
    let report = &done.report;
    let mut healed_chunks = 0;
    let sources =
        SourceOptions { follow_backing: arguments.follow_backing, ..SourceOptions::default() };
    for source in &arguments.from {
        healed_chunks += heal(writer, source, &sources, &view, cancel)?.healed_chunks;
    }
    if let Some(other) = other {
        let affected = &report.found.affected;
        healed_chunks += other::heal(writer, other, affected, &view, cancel)?;
    }
    let progress = |now| sum.captured_blocks(now);
    let options = VerifyOptions { progress: &progress, ..options };
    let layers = inventory.verify_layers(writer.repository(), &options)?;
    let lost = joined([&report.lost[..], &layers.affected].concat());
    let marked = mark_points(writer, &inventory, &lost, arguments.quarantine, cancel)?;
    drop(view);
    let healable_chunks = writer.damaged_chunks();
    let damaged_documents = [inventory.damaged, layers.damaged].concat();
    let is_clean = healable_chunks == 0 && lost.is_empty() && damaged_documents.is_empty();
    let repaired = Repaired {
        damaged_chunks: report.healable_chunks,
        healed_chunks,
        unreferenced_chunks: report.unreferenced_chunks,
        healable_chunks,
        mended_files: done.reopened.mended_files,
        lost_blocks: done.reopened.lost_blocks,
        dropped_files: done.reopened.dropped_files,
        is_list_new: done.reopened.is_list_new,
        removed_entries: report.removed_entries,
        added_entries: report.added_entries,
        made_markers: done.made_markers,
        restored_points: done.reopened.restored_points,
        lost,
        damaged_documents,
        quarantined: marked.quarantined,
        released: marked.released,
        is_clean,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let sound = show_count(report.found.chunks, "chunk");
    let text = text(&repaired, done, &sound, invocation);
    let mut answer = Report::answer(&repaired, text);
    if !repaired.is_clean {
        answer.exit_code = coldrise_runs::exit_code(ErrorKind::Corrupt);
    }
    Ok(answer)
}

impl Done {
    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let report = &self.report;
        let ReopenReport { mended_files, lost_blocks, .. } = self.reopened;
        if mended_files > 0 {
            let files = show_count(mended_files, "damaged file");
            let how = match lost_blocks {
                0 => "all their data was read".to_owned(),
                lost => format!("{} in them cannot be read", show_count(lost, "block")),
            };
            lines.push(format!("{files} of the database rewritten: {how}"));
        }
        if report.unreferenced_chunks > 0 {
            let chunks = show_count(report.unreferenced_chunks, "damaged chunk");
            lines.push(format!("{chunks} that no point uses, no longer counted as damage"));
        }
        if report.removed_entries > 0 {
            let entries = report.removed_entries;
            lines.push(format!("{entries} damaged entries of the deduplication index removed"));
        }
        if report.added_entries > 0 {
            let entries = report.added_entries;
            lines.push(format!("{entries} missing entries of the deduplication index added"));
        }
        if self.made_markers > 0 {
            let markers = show_count(self.made_markers, "marker");
            lines.push(format!("{markers} of restore points and sessions recreated"));
        }
        if self.reopened.restored_points > 0 {
            let restored = self.reopened.restored_points;
            let points = show_count(restored, "restore point");
            let whose = if restored == 1 { "its marker" } else { "their markers" };
            lines.push(format!("{points} restored from {whose}"));
        }
        if self.reopened.is_list_new {
            lines.push("the list of the database's files was rebuilt from the files".to_owned());
        }
        if self.reopened.dropped_files > 0 {
            let files = show_count(self.reopened.dropped_files, "file");
            lines.push(format!("{files} of the database left out: missing or unreadable"));
        }
        lines
    }
}

/// The chunks that points, sessions and running programs refer to; `None` if damage
/// prevents the search.
fn in_use(writer: &RepositoryWriter, cancel: &AtomicBool) -> Result<Option<Reachable>> {
    let repository = writer.repository();
    let found = InUse::collect(repository);
    match found.and_then(|in_use| repository.reachable(in_use.roots, cancel)) {
        Ok(reachable) => Ok(Some(reachable)),
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The points to quarantine, and those to release.
fn mark_points(
    writer: &RepositoryWriter,
    inventory: &Inventory,
    lost: &[Affected],
    is_marking: bool,
    cancel: &AtomicBool,
) -> Result<QuarantineReport> {
    let mut affected = writer.unhealed(&inventory.disks(), cancel)?;
    affected.extend_from_slice(lost);
    apply_quarantine(writer, &affected, is_marking)
}

/// The session that the name of damage contains: `live/trial/vda`, `a layer of live/trial/vda`.
fn session_in(what: &str) -> Option<&str> {
    let session = what.split([' ', ',']).find_map(|word| word.strip_prefix("live/"))?;
    session.split('/').next()
}

fn text(repaired: &Repaired, done: &Done, read: &str, invocation: &Invocation) -> String {
    let took = show_duration(invocation.elapsed());
    let mut lines = Vec::new();
    if repaired.damaged_chunks > 0 {
        lines.push(format!(
            "{} damaged, {} healed",
            show_count(repaired.damaged_chunks, "chunk"),
            repaired.healed_chunks
        ));
    }
    lines.extend(done.lines());
    if repaired.healable_chunks > 0 {
        lines.push(format!(
            "still damaged: {}. They heal with the next backup of a machine that holds the same \
             content, or now from an image or export that does (--from) or from another repository (--from-repo). \
             Until then coldrise \
             verify names the restore points that need them",
            show_count(repaired.healable_chunks, "chunk")
        ));
    }
    for disk in &repaired.lost {
        let bytes = disk.ranges.iter().map(|range| range.end - range.start).sum();
        lines.push(format!("lost: {}: {}", disk.disk, show_size(bytes)));
    }
    for document in &repaired.damaged_documents {
        lines.push(format!("lost: {}: {}", document.what, document.reason));
    }
    let documents = &repaired.damaged_documents;
    let others = documents.iter().filter(|d| d.command().is_none()).map(|d| &d.what);
    let damaged: Vec<_> = repaired.lost.iter().map(|lost| &lost.disk).chain(others).collect();
    if damaged.iter().any(|what| session_in(what).is_none()) {
        lines.push("restore the readable parts of these points, and forget them".to_owned());
    }
    for session in damaged.iter().filter_map(|what| session_in(what)).collect::<BTreeSet<_>>() {
        lines.push(format!(
            "session {session}: do not seal it. Put the damaged files back from a copy of the \
             repository, or copy its readable data and end it: coldrise unpublish {session} --discard"
        ));
    }
    let ways_out: Vec<String> = documents.iter().filter_map(CatalogDamage::command).collect();
    if !ways_out.is_empty() {
        lines.push(format!(
            "no part of this repository still has it. If no copy of the repository has it either, \
             give it up:\n  {}\nUntil then gc returns no space",
            ways_out.join("\n  ")
        ));
    }
    for point in &repaired.quarantined {
        lines.push(format!("quarantined: {point}"));
    }
    for point in &repaired.released {
        lines.push(format!("released from quarantine: {point}"));
    }
    if lines.is_empty() {
        lines.push(format!("nothing to repair in {read}"));
    }
    format!("{} ({took})", lines.join("\n"))
}
