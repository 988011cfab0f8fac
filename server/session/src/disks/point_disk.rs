//! Disks of points: a chunk map, and the sealed layers over it.

use std::sync::Arc;

use coldrise_block::{Context, Disk, Error, ErrorKind, Result};
use coldrise_store::{DiskName, LayerReference, MapRoot, PointDocument, Repository};

use crate::disks::layered_disk::{LayeredDisk, Stack};
use crate::layer::{Layer, LayerKeys, ReadMode, SealFacts, Superblock, layer_damage};
use crate::paths::layer_path;

/// The chunk map of a disk, as the bottom of a disk view.
pub(crate) fn base_disk(
    repository: &Arc<Repository>,
    root: MapRoot,
    size_bytes: u64,
) -> Arc<dyn Disk> {
    Arc::new(repository.disk(root, size_bytes))
}

/// Errors: `Corrupt` if a layer is missing or does not match its reference.
pub(crate) fn sealed_layers(
    repository: &Arc<Repository>,
    references: &[LayerReference],
    disk_size_bytes: u64,
) -> Result<Vec<Arc<Layer>>> {
    let open = |reference: &LayerReference| {
        Layer::open_for_reading(
            &layer_path(repository, &reference.id),
            &Superblock { id: reference.id.0, disk_size_bytes },
            LayerKeys::of(repository, &reference.id),
            ReadMode::Sealed(
                SealFacts {
                    sequence: reference.layer_sequence.unwrap_or(reference.sealed_sequence),
                    slots: reference.sealed_slots,
                    cells: reference.sealed_cells,
                },
                reference.sealed_sequence,
            ),
        )
        .map_err(layer_damage)
    };
    references.iter().map(open).collect()
}

/// Opens a disk of a restore point, read-only.
///
/// # Errors
/// `NotFound` for an unknown disk, `Corrupt` if a sealed layer does not match the point's document.
pub fn open_point_disk(
    repository: &Arc<Repository>,
    point: &PointDocument,
    name: &DiskName,
) -> Result<Arc<dyn Disk>> {
    let Some(disk) = point.disk(name) else {
        let names: Vec<&str> = point.disks.iter().map(|disk| disk.name.as_str()).collect();
        return Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "{}/{} has no disk {name}, only {}",
                point.machine,
                point.point,
                names.join(", ")
            ),
        ));
    };
    let base = base_disk(repository, disk.root, disk.size_bytes);
    if disk.layers.is_empty() {
        return Ok(base);
    }
    let layers = sealed_layers(repository, &disk.layers, disk.size_bytes)
        .context(|| format!("{}/{}/{name}", point.machine, point.point))?;
    Ok(Arc::new(LayeredDisk::new(disk.size_bytes, true, Stack { base, layers })))
}
