//! Usage: the data of every machine and every restore point, and the part that its removal would
//! free.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Context, Result};
use coldrise_store::{
    CatalogDamage, HeldAmount, Holdings, LayerId, MachineAttribution, MachineName, PointDocument,
    Repository,
};

use crate::paths::layer_path;
use crate::points::read_lease::ReadLease;
use crate::session_folder::document::SessionDisk;

/// The usage of a repository, by machine.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// The machines, sorted by their names.
    pub machines: Vec<MachineUsage>,
    /// Number of sessions.
    pub sessions: u64,
    /// Lost or damaged documents. Their points and sessions are not counted.
    pub damaged: Vec<CatalogDamage>,
}

/// The usage of one machine.
#[derive(Clone, Debug)]
pub struct MachineUsage {
    /// The machine.
    pub machine: MachineName,
    /// Data to which no other machine refers, and which the removal of all its points would free:
    /// bytes of chunks, estimated, and of captured writes.
    pub unique: StoredBytes,
    /// Number of these chunks.
    pub unique_chunks: u64,
    /// Number of different chunks to which its points refer, including shared ones.
    pub chunks: u64,
    /// Its points, oldest first.
    pub points: Vec<PointUsage>,
}

/// The usage of one point.
#[derive(Clone, Debug)]
pub struct PointUsage {
    /// The point.
    pub document: PointDocument,
    /// Data to which its chunk maps refer, in bytes, without holes and without captured writes.
    pub recoverable_bytes: u64,
    /// Data to which no other point and no session refers, and which its removal would free.
    pub unique: StoredBytes,
}

/// Space on the repository's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredBytes {
    /// Chunks, estimated.
    pub chunks_bytes: u64,
    /// Layers.
    pub captured_bytes: u64,
}

impl StoredBytes {
    fn new(
        repository: &Repository,
        share: &HeldAmount,
        known: &mut HashMap<LayerId, u64>,
    ) -> Result<Self> {
        let mut captured_bytes = 0u64;
        for layer in &share.layers {
            let bytes = match known.get(layer) {
                Some(bytes) => *bytes,
                None => {
                    let bytes = occupied_bytes(repository, layer)?;
                    known.insert(*layer, bytes);
                    bytes
                }
            };
            captured_bytes = captured_bytes.saturating_add(bytes);
        }
        Ok(StoredBytes { chunks_bytes: share.stored_bytes, captured_bytes })
    }

    /// The sum of both.
    pub fn sum(&self) -> u64 {
        self.chunks_bytes.saturating_add(self.captured_bytes)
    }
}

/// Space that a layer takes on the repository's disk, in bytes; 0 if it does not exist.
fn occupied_bytes(repository: &Repository, layer: &LayerId) -> Result<u64> {
    let path = layer_path(repository, layer);
    match std::fs::metadata(&path) {
        Ok(metadata) => Ok(metadata.blocks().saturating_mul(512)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error).context(|| format!("reading {}", path.display())),
    }
}

/// The usage of every machine. Reads every page of every chunk map, a few times at most. The data
/// is leased while it is read; `program` is shown to people.
///
/// # Errors
/// `Corrupt` if a page does not authenticate.
pub fn usage(repository: &Arc<Repository>, program: &str) -> Result<Usage> {
    let (inventory, _held) = ReadLease::everything(repository, program, &AtomicBool::new(false))?;
    let sessions = inventory.sessions.len() as u64;
    let mut machines: BTreeMap<MachineName, (Vec<PointDocument>, Vec<_>)> = BTreeMap::new();
    for point in inventory.points {
        machines.entry(point.machine.clone()).or_default().0.push(point);
    }
    for session in inventory.sessions {
        let disks = session.disks.iter().map(SessionDisk::sealed);
        machines.entry(session.machine).or_default().1.extend(disks);
    }
    let holdings: Vec<Holdings> = machines
        .values()
        .map(|(points, sessions)| Holdings {
            points: points.iter().map(|point| point.disks.clone()).collect(),
            sessions: sessions.clone(),
        })
        .collect();
    let attributed = repository.attribute(&holdings)?;
    let mut known = HashMap::new();
    let mut shares = Vec::with_capacity(machines.len());
    for ((machine, (points, _)), MachineAttribution { alone, points: of_points }) in
        machines.into_iter().zip(attributed)
    {
        let disks = points.iter().flat_map(|point| point.disks.iter().map(|disk| disk.root));
        let chunks = repository.reachable(disks, &AtomicBool::new(false))?.chunks();
        let mut shared = Vec::with_capacity(points.len());
        for (document, point) in points.into_iter().zip(of_points) {
            shared.push(PointUsage {
                document,
                recoverable_bytes: point.recoverable_bytes,
                unique: StoredBytes::new(repository, &point.alone, &mut known)?,
            });
        }
        let unique = StoredBytes::new(repository, &alone, &mut known)?;
        let unique_chunks = alone.chunks;
        shares.push(MachineUsage { machine, unique, unique_chunks, chunks, points: shared });
    }
    // A session outlives its machine's last point. It does not count as a machine.
    shares.retain(|machine| !machine.points.is_empty());
    Ok(Usage { machines: shares, sessions, damaged: inventory.damaged })
}
