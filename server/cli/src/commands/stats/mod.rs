//! `coldrise stats`: the repository's contents, savings and reclaimable space.

mod occupied;
mod text;

use std::collections::HashSet;
use std::sync::Arc;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::{usage, Catalog, MachineUsage, PointUsage, StoredBytes, Usage};
use coldrise_store::{CatalogDamage, IndexMemory, MachineName, MaxUnused, Quarantine, Repository};
use serde::Serialize;

use crate::gc_estimate::estimate_gc;
use crate::invocation::Invocation;
use crate::report::Report;
use crate::signals::cancel_flag;
use crate::units::saved_percent;
use occupied::Occupied;

/// Show the contents of the repository, its savings, and the space that deletions would free.
///
/// Chunk sizes marked "about" are estimates: the average of the file that contains the chunk.
/// Everything else is counted. The command reads every page of every chunk map, and no chunk.
/// Lost or damaged restore points and sessions are named and not counted; the exit code is then
/// 1.
#[derive(Debug, Args)]
pub(crate) struct StatsArguments {
    /// Show each restore point of this machine.
    #[arg(value_name = "MACHINE")]
    machine: Option<MachineName>,
}

/// The whole repository. All sizes on disk are in bytes.
#[derive(Serialize)]
struct Stats {
    machines: u64,
    points: u64,
    sessions: u64,
    /// Sum of the sizes of all disks of all points.
    virtual_bytes: u64,
    /// The plaintext that the chunk maps of all points refer to: the total of restoring
    /// each point, without holes and captured writes.
    recoverable_bytes: u64,
    /// The plaintext of the referenced chunks: the rest after deduplication.
    unique_bytes: u64,
    /// The stored size of these chunks: compressed, encrypted and padded.
    stored_bytes: u64,
    /// All stored chunks, unreferenced ones included.
    chunks: u64,
    deduplication_percent: f64,
    compression_percent: f64,
    reduction_percent: f64,
    /// Everything in the repository's directory.
    occupied_bytes: u64,
    /// The database: chunks, maps, index, catalog.
    database_bytes: u64,
    /// Layers of captured writes.
    captured_bytes: u64,
    /// Documents of sessions, side files, leases and other files.
    other_bytes: u64,
    /// About the space that a gc would free; absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    reclaimable_bytes: Option<u64>,
    /// About the unreferenced data that a gc leaves in files that are mostly in use;
    /// absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_unreferenced_bytes: Option<u64>,
    index_memory: IndexMemory,
    by_machine: Vec<MachineStats>,
    /// Lost or damaged points and sessions, which are not counted.
    damaged_documents: Vec<CatalogDamage>,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct MachineStats {
    machine: String,
    virtual_bytes: u64,
    recoverable_bytes: u64,
    /// The deduplication between the points of this machine.
    deduplication_percent: f64,
    /// The compression of the chunks that only this machine refers to; absent if there are
    /// none.
    #[serde(skip_serializing_if = "Option::is_none")]
    compression_percent: Option<f64>,
    /// The space freed by removing all points of the machine: only this machine refers to
    /// it.
    #[serde(flatten)]
    unique: Unique,
    points: Vec<PointStats>,
}

#[derive(Serialize)]
struct PointStats {
    address: String,
    virtual_bytes: u64,
    recoverable_bytes: u64,
    is_protected: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    quarantine: Option<Quarantine>,
    /// The space freed by removing the point: no other point and no session refers to it.
    #[serde(flatten)]
    unique: Unique,
}

#[derive(Serialize)]
struct Unique {
    /// Chunks (estimated) and captured writes.
    unique_stored_bytes: u64,
    /// The captured writes among them.
    unique_captured_bytes: u64,
}

impl Unique {
    fn new(stored: StoredBytes) -> Unique {
        let unique_captured_bytes = stored.captured_bytes;
        Unique { unique_stored_bytes: stored.sum(), unique_captured_bytes }
    }
}

impl PointStats {
    fn new(point: &PointUsage) -> PointStats {
        let document = &point.document;
        let sizes = document.disks.iter().map(|disk| disk.size_bytes);
        PointStats {
            address: format!("{}/{}", document.machine, document.point),
            virtual_bytes: sizes.fold(0, u64::saturating_add),
            recoverable_bytes: point.recoverable_bytes,
            is_protected: document.is_protected,
            quarantine: document.quarantine,
            unique: Unique::new(point.unique),
        }
    }
}

impl MachineStats {
    fn new(usage: &MachineUsage, chunk_size_bytes: u64) -> MachineStats {
        let points: Vec<PointStats> = usage.points.iter().map(PointStats::new).collect();
        let recoverable_bytes = sum(points.iter().map(|point| point.recoverable_bytes));
        let different_bytes = usage.chunks.saturating_mul(chunk_size_bytes);
        let own_bytes = usage.unique_chunks.saturating_mul(chunk_size_bytes);
        let compression_percent =
            (own_bytes > 0).then(|| saved_percent(usage.unique.chunks_bytes, own_bytes));
        MachineStats {
            machine: usage.machine.to_string(),
            virtual_bytes: sum(points.iter().map(|point| point.virtual_bytes)),
            recoverable_bytes,
            deduplication_percent: saved_percent(different_bytes, recoverable_bytes),
            compression_percent,
            unique: Unique::new(usage.unique),
            points,
        }
    }
}

fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

pub(crate) fn run(invocation: &Invocation, arguments: &StatsArguments) -> Result<Report> {
    let repository = invocation.open()?;
    if let Some(machine) = &arguments.machine {
        // An error for an unknown machine names the existing ones.
        Catalog::new(&repository).check_machine(machine)?;
    }
    let usage = usage(&repository, "stats")?;
    let chunk_size_bytes = u64::from(repository.chunk_size_bytes());
    let machines = usage.machines.iter();
    let by_machine: Vec<MachineStats> =
        machines.map(|machine| MachineStats::new(machine, chunk_size_bytes)).collect();
    let exit_code = if usage.damaged.is_empty() { 0 } else { ErrorKind::Corrupt.exit_code() };
    let Some(machine) = &arguments.machine else {
        let stats = of_repository(invocation, &repository, by_machine, usage)?;
        let text = text::of_repository(&stats);
        let mut answer = Report::answer(&stats, text);
        answer.exit_code = exit_code;
        return Ok(answer);
    };
    let mut by_machine = by_machine.into_iter();
    let Some(stats) = by_machine.find(|stats| stats.machine == machine.as_str()) else {
        let text = format!("the last restore point of {machine} was forgotten a moment ago");
        return Err(Error::new(ErrorKind::NotFound, text));
    };
    for damaged in &usage.damaged {
        invocation.remark(&text::damage(damaged));
    }
    let mut answer = Report::answer(&stats, text::of_machine(&stats));
    answer.exit_code = exit_code;
    Ok(answer)
}

fn of_repository(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    by_machine: Vec<MachineStats>,
    usage: Usage,
) -> Result<Stats> {
    let store = repository.stored_chunks()?;
    let nothing = HashSet::new();
    let (max_unused, cancel) = (MaxUnused::default(), cancel_flag()?);
    let space = estimate_gc(invocation, repository, &nothing, max_unused, &cancel)?;
    // Data that waits for a gc does not count against deduplication.
    let chunks = space.as_ref().map_or(store.chunks, |space| space.chunks_in_use.min(store.chunks));
    let unique_bytes = chunks.saturating_mul(u64::from(repository.chunk_size_bytes()));
    let stored_bytes = u128::from(store.stored_bytes) * u128::from(chunks);
    let stored_bytes = (stored_bytes / u128::from(store.chunks.max(1))) as u64;
    let occupied = Occupied::measure(repository)?;
    let recoverable_bytes = sum(by_machine.iter().map(|machine| machine.recoverable_bytes));
    Ok(Stats {
        machines: by_machine.len() as u64,
        points: sum(by_machine.iter().map(|machine| machine.points.len() as u64)),
        sessions: usage.sessions,
        virtual_bytes: sum(by_machine.iter().map(|machine| machine.virtual_bytes)),
        recoverable_bytes,
        unique_bytes,
        stored_bytes,
        chunks: store.chunks,
        deduplication_percent: saved_percent(unique_bytes, recoverable_bytes),
        compression_percent: saved_percent(stored_bytes, unique_bytes),
        reduction_percent: saved_percent(stored_bytes, recoverable_bytes),
        occupied_bytes: occupied.sum(),
        database_bytes: occupied.database_bytes,
        captured_bytes: occupied.captured_bytes,
        other_bytes: occupied.other_bytes,
        reclaimable_bytes: space.as_ref().map(|space| space.reclaimable_bytes),
        kept_unreferenced_bytes: space.as_ref().map(|space| space.kept_bytes),
        index_memory: repository.index_memory()?,
        by_machine,
        damaged_documents: usage.damaged,
        elapsed_ms: invocation.elapsed_ms(),
    })
}
