//! The recently stored part of the data to verify.

use std::collections::{HashMap, HashSet};

use coldrise_store::{MachineName, PointDocument, PointOrigin, RecentDisks, VerifiedDisk};

use crate::points::inventory::{Inventory, disks_of_point};

/// The part of an [`Inventory`] that was stored since a given time.
pub(crate) struct RecentInventory {
    /// The points stored or sealed since then, and every session. Sealed layers that older points
    /// also have are omitted. Damage is included.
    pub(crate) inventory: Inventory,
    before: Vec<VerifiedDisk>,
    recent: Vec<VerifiedDisk>,
    all: Vec<VerifiedDisk>,
}

impl RecentInventory {
    /// Divides `inventory`. New data was stored at `since_ms` or later, in milliseconds since
    /// 1970-01-01T00:00:00Z.
    pub(crate) fn new(mut inventory: Inventory, since_ms: u64) -> RecentInventory {
        let all = inventory.disks();
        let (points, older): (Vec<_>, Vec<_>) =
            inventory.points.into_iter().partition(|point| point.created_at_ms >= since_ms);
        inventory.points = points;
        let mut recent = inventory.disks();
        // A synthetic point may have been folded since then.
        let synthetic = older.iter().filter(|point| !is_backup(point));
        recent.extend(synthetic.flat_map(disks_of_point));
        let before = newest_backups(&older).into_iter().flat_map(disks_of_point).collect();
        let disks = older.iter().flat_map(|point| &point.disks);
        let known: HashSet<_> = disks.flat_map(|disk| &disk.layers).map(|layer| layer.id).collect();
        let points = inventory.points.iter_mut().flat_map(|point| &mut point.disks);
        points.for_each(|disk| disk.layers.retain(|layer| !known.contains(&layer.id)));
        let sessions = inventory.sessions.iter_mut().flat_map(|session| &mut session.disks);
        sessions.for_each(|disk| disk.layers.retain(|layer| !known.contains(&layer.id)));
        RecentInventory { inventory, before, recent, all }
    }

    /// The chunk maps of the disks, for the store.
    pub(crate) fn disks(&self) -> RecentDisks<'_> {
        RecentDisks { before: &self.before, recent: &self.recent, all: &self.all }
    }
}

fn is_backup(point: &PointDocument) -> bool {
    matches!(point.origin, PointOrigin::Backup { .. })
}

/// The most recently stored backup of every machine.
fn newest_backups(points: &[PointDocument]) -> Vec<&PointDocument> {
    let mut newest: HashMap<&MachineName, &PointDocument> = HashMap::new();
    for point in points.iter().filter(|point| is_backup(point)) {
        let of_machine = newest.entry(&point.machine).or_insert(point);
        if point.created_at_ms > of_machine.created_at_ms {
            *of_machine = point;
        }
    }
    newest.into_values().collect()
}
