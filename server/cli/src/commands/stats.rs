//! `coldrise stats`: what the repository holds, and what is saved.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use coldrise_block::{Context, Extent, ExtentKind, Result};
use coldrise_session::{Catalog, SessionState};
use coldrise_store::{diff, ChunkedDisk, DiskName, MapRoot, PointDocument, Repository};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::{saved_percent, show_count, show_size};

/// Extents that are asked for at once.
const EXTENTS: usize = 4096;

#[derive(Serialize)]
struct Stats {
    machines: u64,
    points: u64,
    sessions: u64,
    /// Sum of the sizes of all disks of all points.
    virtual_bytes: u64,
    /// What the chunk maps of all points refer to: what a restore of every one of
    /// them would read, holes left out, captured writes not counted.
    recoverable_bytes: u64,
    /// Plaintext of the stored chunks: what deduplication left of it.
    unique_bytes: u64,
    /// What those chunks take, compressed, encrypted and padded.
    stored_bytes: u64,
    chunks: u64,
    /// What the database takes on disk: chunks, maps, index, catalog.
    database_bytes: u64,
    /// What layers of captured writes take on disk.
    captured_bytes: u64,
    deduplication_percent: f64,
    compression_percent: f64,
    reduction_percent: f64,
}

pub(crate) fn run(invocation: &Invocation) -> Result<Report> {
    let repository = invocation.open()?;
    let catalog = Catalog::new(&repository);
    let store = repository.stats()?;
    let mut stats = Stats {
        machines: 0,
        points: 0,
        sessions: 0,
        virtual_bytes: 0,
        recoverable_bytes: 0,
        unique_bytes: store.unique_bytes,
        stored_bytes: store.stored_bytes,
        chunks: store.chunks,
        database_bytes: store.database_bytes,
        captured_bytes: captured_bytes(&repository)?,
        deduplication_percent: 0.0,
        compression_percent: 0.0,
        reduction_percent: 0.0,
    };
    let sessions: Vec<SessionState> = coldrise_session::sessions(&repository)?;
    stats.sessions = sessions.len() as u64;
    for machine in catalog.machines()? {
        stats.machines += 1;
        let mut referred = Referred::new(&repository);
        for point in catalog.points(&machine)? {
            stats.points += 1;
            for disk in &point.disks {
                stats.virtual_bytes = stats.virtual_bytes.saturating_add(disk.size_bytes);
            }
            let bytes = referred.by_point(&point)?;
            stats.recoverable_bytes = stats.recoverable_bytes.saturating_add(bytes);
        }
    }
    stats.deduplication_percent = saved_percent(stats.unique_bytes, stats.recoverable_bytes);
    stats.compression_percent = saved_percent(stats.stored_bytes, stats.unique_bytes);
    stats.reduction_percent = saved_percent(stats.stored_bytes, stats.recoverable_bytes);
    let text = text(&stats);
    Ok(Report::answer(&stats, text))
}

fn text(stats: &Stats) -> String {
    let mut text = format!(
        "{}, {}, {}\n\n",
        show_count(stats.machines, "machine"),
        show_count(stats.points, "restore point"),
        show_count(stats.sessions, "session")
    );
    let rows = [
        ("sum of all disks", show_size(stats.virtual_bytes), String::new()),
        ("recoverable", show_size(stats.recoverable_bytes), "holes left out".to_owned()),
        (
            "after deduplication",
            show_size(stats.unique_bytes),
            format!("{:.1} % saved", stats.deduplication_percent),
        ),
        (
            "after compression",
            show_size(stats.stored_bytes),
            format!(
                "{:.1} % saved, {:.1} % in all",
                stats.compression_percent, stats.reduction_percent
            ),
        ),
        ("captured writes", show_size(stats.captured_bytes), "not yet folded in".to_owned()),
        ("database on disk", show_size(stats.database_bytes), show_count(stats.chunks, "chunk")),
    ];
    for (what, size, remark) in rows {
        text.push_str(format!("{what:<20}{size:>12}  {remark}").trim_end());
        text.push('\n');
    }
    text
}

/// What the layers take on the repository's disk.
fn captured_bytes(repository: &Repository) -> Result<u64> {
    let folder = repository.layers_dir();
    let what = || format!("reading {}", folder.display());
    let mut bytes: u64 = 0;
    for entry in std::fs::read_dir(&folder).context(what)? {
        match entry.context(what)?.metadata() {
            Ok(metadata) => bytes = bytes.saturating_add(metadata.blocks().saturating_mul(512)),
            // It was removed just now.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).context(what),
        }
    }
    Ok(bytes)
}

/// Counts what the chunk maps of one machine's points refer to. Each map is counted
/// by its difference to the one before, so the whole costs what the changes do.
struct Referred<'a> {
    repository: &'a Arc<Repository>,
    known: HashMap<(MapRoot, u64), u64>,
    latest: HashMap<DiskName, (ChunkedDisk, u64)>,
}

impl<'a> Referred<'a> {
    fn new(repository: &'a Arc<Repository>) -> Self {
        Referred { repository, known: HashMap::new(), latest: HashMap::new() }
    }

    fn by_point(&mut self, point: &PointDocument) -> Result<u64> {
        let mut sum: u64 = 0;
        for document in &point.disks {
            let key = (document.root, document.size_bytes);
            let bytes = match self.known.get(&key) {
                Some(bytes) => *bytes,
                None => {
                    let disk = self.repository.disk(document.root, document.size_bytes);
                    let bytes = match self.latest.get(&document.name) {
                        Some((before, bytes)) => changed(before, *bytes, &disk)?,
                        None => stored_bytes(&disk, 0, disk.size_bytes())?,
                    };
                    self.latest.insert(document.name.clone(), (disk, bytes));
                    self.known.insert(key, bytes);
                    bytes
                }
            };
            sum = sum.saturating_add(bytes);
        }
        Ok(sum)
    }
}

/// What `disk` refers to, where `before` refers to `bytes`.
fn changed(before: &ChunkedDisk, bytes: u64, disk: &ChunkedDisk) -> Result<u64> {
    if before.size_bytes() > disk.size_bytes() {
        return stored_bytes(disk, 0, disk.size_bytes());
    }
    let mut bytes = bytes;
    diff(before, disk, |range: Extent| {
        let end = range.offset_bytes.saturating_add(range.length_bytes);
        bytes = bytes
            .saturating_add(stored_bytes(disk, range.offset_bytes, end)?)
            .saturating_sub(stored_bytes(before, range.offset_bytes, end)?);
        Ok(())
    })?;
    Ok(bytes)
}

/// Bytes of a range that are stored, cut to the disk.
fn stored_bytes(disk: &ChunkedDisk, from: u64, end: u64) -> Result<u64> {
    let end = end.min(disk.size_bytes());
    let mut at = from;
    let mut stored: u64 = 0;
    while at < end {
        let extents = disk.extents(at, end - at, EXTENTS)?;
        let Some(last) = extents.last() else { break };
        at = last.offset_bytes.saturating_add(last.length_bytes);
        let bytes = extents.iter().filter(|e| e.kind == ExtentKind::Stored).map(|e| e.length_bytes);
        stored = bytes.fold(stored, u64::saturating_add);
    }
    Ok(stored)
}
