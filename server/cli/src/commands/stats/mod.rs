//! `coldrise stats`: what the repository holds, and what is saved.

mod occupied;
mod text;

use std::collections::HashSet;
use std::sync::Arc;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::{shares, Catalog, MachineShares, PointShares, StoredBytes};
use coldrise_store::{IndexMemory, MachineName, Quarantine, Repository};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::reclaimable::reclaimable_bytes;
use crate::report::Report;
use crate::signals::cancel_flag;
use crate::units::saved_percent;
use occupied::Occupied;

/// Say what the repository holds, what is saved, and what deleting would return.
///
/// Sizes of chunks are estimates where they say about: the average of the file that a
/// chunk lies in. The rest is counted. Every page of every chunk map is read, and no
/// chunk.
#[derive(Debug, Args)]
pub(crate) struct StatsArguments {
    /// The restore points of this machine, one by one.
    #[arg(value_name = "MACHINE")]
    machine: Option<MachineName>,
}

/// The repository. What takes space is in bytes on its disk.
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
    deduplication_percent: f64,
    compression_percent: f64,
    reduction_percent: f64,
    /// Everything in the repository's directory.
    occupied_bytes: u64,
    /// The database: chunks, maps, index, catalog.
    database_bytes: u64,
    /// Layers of captured writes.
    captured_bytes: u64,
    /// Documents of sessions, side files, leases and the rest.
    other_bytes: u64,
    /// What a gc would give back, about; absent where it cannot be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    reclaimable_bytes: Option<u64>,
    index_memory: IndexMemory,
    by_machine: Vec<MachineStats>,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct MachineStats {
    machine: String,
    virtual_bytes: u64,
    recoverable_bytes: u64,
    /// What goes with all points of the machine: no other machine refers to it.
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
    /// What goes with the point: no other point and no session refers to it.
    #[serde(flatten)]
    unique: Unique,
}

#[derive(Serialize)]
struct Unique {
    /// Chunks, about, and captured writes.
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
    fn new(point: &PointShares) -> PointStats {
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
    fn new(shares: &MachineShares) -> MachineStats {
        let points: Vec<PointStats> = shares.points.iter().map(PointStats::new).collect();
        MachineStats {
            machine: shares.machine.to_string(),
            virtual_bytes: sum(points.iter().map(|point| point.virtual_bytes)),
            recoverable_bytes: sum(points.iter().map(|point| point.recoverable_bytes)),
            unique: Unique::new(shares.unique),
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
        // Says which machines there are where this one is not.
        Catalog::new(&repository).check_machine(machine)?;
    }
    let by_machine: Vec<MachineStats> =
        shares(&repository, "stats")?.iter().map(MachineStats::new).collect();
    let Some(machine) = &arguments.machine else {
        let stats = of_repository(invocation, &repository, by_machine)?;
        let text = text::of_repository(&stats);
        return Ok(Report::answer(&stats, text));
    };
    let mut by_machine = by_machine.into_iter();
    let Some(stats) = by_machine.find(|stats| stats.machine == machine.as_str()) else {
        let text = format!("the last restore point of {machine} was forgotten just now");
        return Err(Error::new(ErrorKind::NotFound, text));
    };
    Ok(Report::answer(&stats, text::of_machine(&stats)))
}

fn of_repository(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    by_machine: Vec<MachineStats>,
) -> Result<Stats> {
    let store = repository.stats()?;
    let occupied = Occupied::measure(repository)?;
    let recoverable_bytes = sum(by_machine.iter().map(|machine| machine.recoverable_bytes));
    Ok(Stats {
        machines: by_machine.len() as u64,
        points: sum(by_machine.iter().map(|machine| machine.points.len() as u64)),
        sessions: coldrise_session::sessions(repository)?.len() as u64,
        virtual_bytes: sum(by_machine.iter().map(|machine| machine.virtual_bytes)),
        recoverable_bytes,
        unique_bytes: store.unique_bytes,
        stored_bytes: store.stored_bytes,
        chunks: store.chunks,
        deduplication_percent: saved_percent(store.unique_bytes, recoverable_bytes),
        compression_percent: saved_percent(store.stored_bytes, store.unique_bytes),
        reduction_percent: saved_percent(store.stored_bytes, recoverable_bytes),
        occupied_bytes: occupied.sum(),
        database_bytes: occupied.database_bytes,
        captured_bytes: occupied.captured_bytes,
        other_bytes: occupied.other_bytes,
        reclaimable_bytes: reclaimable_bytes(
            invocation,
            repository,
            &HashSet::new(),
            &*cancel_flag()?,
        )?,
        index_memory: repository.index_memory()?,
        by_machine,
        elapsed_ms: invocation.elapsed_ms(),
    })
}
