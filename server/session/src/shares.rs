//! Shares: what every machine and every restore point holds, and what would go with it.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

use coldrise_block::{Context, Result};
use coldrise_store::{
    CatalogDamage, Holdings, LayerId, MachineAttribution, MachineName, PointDocument, Repository,
    Share,
};

use crate::document::SessionDisk;
use crate::held::Held;
use crate::place::layer_path;

/// What the repository holds, and for whom.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    /// The machines, sorted by their names.
    pub machines: Vec<MachineShares>,
    /// How many sessions there are.
    pub sessions: u64,
    /// Documents that are lost or damaged: what they stood for is not counted.
    pub damaged: Vec<CatalogDamage>,
}

/// What one machine holds.
#[derive(Clone, Debug)]
pub struct MachineShares {
    /// The machine.
    pub machine: MachineName,
    /// What no other machine refers to, and would go with all its points: bytes of
    /// chunks, estimated, and of captured writes.
    pub unique: StoredBytes,
    /// How many chunks those are.
    pub unique_chunks: u64,
    /// Different chunks that its points refer to, shared ones included.
    pub chunks: u64,
    /// Its points, oldest first.
    pub points: Vec<PointShares>,
}

/// What one point holds.
#[derive(Clone, Debug)]
pub struct PointShares {
    /// The point.
    pub document: PointDocument,
    /// What its chunk maps refer to, in bytes: holes left out, captured writes not
    /// counted.
    pub recoverable_bytes: u64,
    /// What no other point and no session refers to, and would go with it.
    pub unique: StoredBytes,
}

/// Space on the repository's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredBytes {
    /// Of chunks: an estimate.
    pub chunks_bytes: u64,
    /// Of layers.
    pub captured_bytes: u64,
}

impl StoredBytes {
    fn new(
        repository: &Repository,
        share: &Share,
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

    /// Both.
    pub fn sum(&self) -> u64 {
        self.chunks_bytes.saturating_add(self.captured_bytes)
    }
}

/// What a layer takes on the repository's disk; nothing where it is gone.
fn occupied_bytes(repository: &Repository, layer: &LayerId) -> Result<u64> {
    let path = layer_path(repository, layer);
    match std::fs::metadata(&path) {
        Ok(metadata) => Ok(metadata.blocks().saturating_mul(512)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error).context(|| format!("reading {}", path.display())),
    }
}

/// What every machine holds. Reads every page of every chunk
/// map, a few times at most. `program` is told to people: what is read is leased.
///
/// # Errors
/// `Corrupt` where a page does not authenticate.
pub fn shares(repository: &Arc<Repository>, program: &str) -> Result<Shares> {
    let (inventory, _held) = Held::everything(repository, program, &AtomicBool::new(false))?;
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
            shared.push(PointShares {
                document,
                recoverable_bytes: point.recoverable_bytes,
                unique: StoredBytes::new(repository, &point.alone, &mut known)?,
            });
        }
        let unique = StoredBytes::new(repository, &alone, &mut known)?;
        let unique_chunks = alone.chunks;
        shares.push(MachineShares { machine, unique, unique_chunks, chunks, points: shared });
    }
    // A session outlives its machine's last point: it is no machine of its own.
    shares.retain(|machine| !machine.points.is_empty());
    Ok(Shares { machines: shares, sessions, damaged: inventory.damaged })
}
