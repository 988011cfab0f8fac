//! The repository's contents, savings and reclaimable space, as `stats` shows them.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use coldrise_block::{ErrorKind, Result};
use coldrise_session::{MachineUsage, PointUsage, StoredBytes, Usage, usage};
use coldrise_store::{CatalogDamage, IndexMemory, MaxUnused, Quarantine, Repository};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::gc_estimate::estimate_gc;
use crate::occupied::Occupied;
use crate::schema::{DamageSchema, IndexMemorySchema, QuarantineSchema};

/// The whole repository. All sizes on disk are in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// Number of machines.
    pub machines: u64,
    /// Number of restore points.
    pub points: u64,
    /// Number of published sessions.
    pub sessions: u64,
    /// Sum of the sizes of all disks of all points.
    pub virtual_bytes: u64,
    /// The plaintext that the chunk maps of all points refer to: the total of restoring
    /// each point, without holes and captured writes.
    pub recoverable_bytes: u64,
    /// The plaintext of the referenced chunks: the rest after deduplication.
    pub unique_bytes: u64,
    /// The stored size of these chunks: compressed, encrypted and padded.
    pub stored_bytes: u64,
    /// All stored chunks, unreferenced ones included.
    pub chunks: u64,
    /// Saved by deduplication.
    pub deduplication_percent: f64,
    /// Saved by compression of the rest.
    pub compression_percent: f64,
    /// Saved by both.
    pub reduction_percent: f64,
    /// Everything in the repository's directory.
    pub occupied_bytes: u64,
    /// The database: chunks, maps, index, catalog.
    pub database_bytes: u64,
    /// Layers of captured writes.
    pub captured_bytes: u64,
    /// Documents of sessions, side files, leases and other files.
    pub other_bytes: u64,
    /// About the space that a gc would free; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaimable_bytes: Option<u64>,
    /// About the unreferenced data that a gc leaves in files that are mostly in use;
    /// absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_unreferenced_bytes: Option<u64>,
    /// Memory for the indexes.
    #[schema(value_type = IndexMemorySchema)]
    pub index_memory: IndexMemory,
    /// Each machine, sorted by name.
    pub by_machine: Vec<MachineStats>,
    /// Lost or damaged points and sessions, which are not counted.
    #[schema(value_type = Vec<DamageSchema>)]
    pub damaged_documents: Vec<CatalogDamage>,
    /// How long counting took, in milliseconds.
    pub elapsed_ms: u64,
}

/// The share of one machine, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineStats {
    /// The machine's name.
    pub machine: String,
    /// Sum of the sizes of all disks of its points.
    pub virtual_bytes: u64,
    /// The plaintext that the chunk maps of its points refer to.
    pub recoverable_bytes: u64,
    /// The deduplication between the points of this machine.
    pub deduplication_percent: f64,
    /// The compression of the chunks that only this machine refers to; absent if there are
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression_percent: Option<f64>,
    /// The space freed by removing all points of the machine: only this machine refers to
    /// it.
    #[serde(flatten)]
    pub unique: Unique,
    /// Its points, oldest first.
    pub points: Vec<PointStats>,
}

/// The share of one restore point, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PointStats {
    /// MACHINE/POINT.
    pub address: String,
    /// Sum of the sizes of its disks.
    pub virtual_bytes: u64,
    /// The plaintext that its chunk maps refer to.
    pub recoverable_bytes: u64,
    /// Neither forget nor prune removes it.
    pub is_protected: bool,
    /// Why it is in quarantine; absent for a normal point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<QuarantineSchema>)]
    pub quarantine: Option<Quarantine>,
    /// The space freed by removing the point: no other point and no session refers to it.
    #[serde(flatten)]
    pub unique: Unique,
}

/// Space that nothing else refers to, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Unique {
    /// Chunks (estimated) and captured writes.
    pub unique_stored_bytes: u64,
    /// The captured writes among them.
    pub unique_captured_bytes: u64,
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
    /// Reads every page of every chunk map. Also returns what the shares were counted from.
    ///
    /// # Errors
    /// `Corrupt` if a page does not authenticate.
    pub fn read_all(repository: &Arc<Repository>) -> Result<(Vec<MachineStats>, Usage)> {
        let usage = usage(repository, "stats")?;
        let chunk_size_bytes = u64::from(repository.chunk_size_bytes());
        let machines = usage.machines.iter();
        let shares = machines.map(|machine| MachineStats::new(machine, chunk_size_bytes)).collect();
        Ok((shares, usage))
    }

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

impl Stats {
    /// Counts the whole repository. Reads every page of every chunk map, and no chunk. Also returns
    /// the reason why the space that a gc would free is unknown, if it is.
    ///
    /// # Errors
    /// `Corrupt` if a page does not authenticate; `Interrupted` once `cancel` is set; errors of the
    /// operating system.
    pub fn read(
        repository: &Arc<Repository>,
        cancel: &AtomicBool,
    ) -> Result<(Stats, Option<String>)> {
        let started = Instant::now();
        let (by_machine, usage) = MachineStats::read_all(repository)?;
        let store = repository.stored_chunks()?;
        let estimate = estimate_gc(repository, &HashSet::new(), MaxUnused::default(), cancel);
        let (space, unknown) = match estimate {
            Ok(space) => (Some(space), None),
            Err(error) if error.kind() == ErrorKind::Corrupt => (None, Some(error.full_message())),
            Err(error) => return Err(error),
        };
        // Data that waits for a gc does not count against deduplication.
        let chunks = space.map_or(store.chunks, |space| space.chunks_in_use.min(store.chunks));
        let unique_bytes = chunks.saturating_mul(u64::from(repository.chunk_size_bytes()));
        let stored_bytes = u128::from(store.stored_bytes) * u128::from(chunks);
        let stored_bytes = (stored_bytes / u128::from(store.chunks.max(1))) as u64;
        let occupied = Occupied::measure(repository)?;
        let recoverable_bytes = sum(by_machine.iter().map(|machine| machine.recoverable_bytes));
        let stats = Stats {
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
            reclaimable_bytes: space.map(|space| space.reclaimable_bytes),
            kept_unreferenced_bytes: space.map(|space| space.kept_bytes),
            index_memory: repository.index_memory()?,
            by_machine,
            damaged_documents: usage.damaged,
            elapsed_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        };
        Ok((stats, unknown))
    }
}

/// The saved share of `whole` if only `part` of it is left, in percent; 0 if nothing was saved.
pub fn saved_percent(part: u64, whole: u64) -> f64 {
    if whole == 0 || part >= whole {
        return 0.0;
    }
    (1.0 - part as f64 / whole as f64) * 100.0
}

#[cfg(test)]
mod tests {
    use super::saved_percent;

    #[test]
    fn saved_percent_is_zero_for_empty_and_grown_content() {
        assert_eq!(saved_percent(0, 0), 0.0);
        assert_eq!(saved_percent(5, 4), 0.0);
        assert_eq!(saved_percent(1, 4), 75.0);
    }
}
