//! What coldrise gc would give back.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Context, Result};
use coldrise_session::InUse;
use coldrise_store::{LayerId, MachineName, PointName, Repository};

/// About how many bytes a gc would give back if the points in `gone` were forgotten:
/// with what nothing refers to already.
///
/// # Errors
/// `Corrupt` where a document or a page is damaged; `Interrupted` once `cancel` is set.
pub(crate) fn reclaimable_bytes(
    repository: &Repository,
    gone: &HashSet<(MachineName, PointName)>,
    cancel: &AtomicBool,
) -> Result<u64> {
    let in_use = InUse::without(repository, |machine, point| {
        gone.contains(&(machine.clone(), point.clone()))
    })?;
    let reachable = repository.reachable(in_use.roots.iter().copied(), cancel)?;
    let reclaimable = repository.reclaimable(&reachable)?;
    Ok(reclaimable.bytes.saturating_add(unused_layer_bytes(repository, &in_use.layers)?))
}

/// What the layers that nobody needs take on the repository's disk.
fn unused_layer_bytes(repository: &Repository, in_use: &HashSet<LayerId>) -> Result<u64> {
    let folder = repository.layers_dir();
    let what = || format!("reading {}", folder.display());
    let mut bytes = 0u64;
    for entry in std::fs::read_dir(&folder).context(what)? {
        let entry = entry.context(what)?;
        let name = entry.file_name();
        let Some(Ok(layer)) = name.to_str().map(LayerId::parse) else { continue };
        if in_use.contains(&layer) {
            continue;
        }
        match entry.metadata() {
            Ok(metadata) => bytes = bytes.saturating_add(metadata.blocks().saturating_mul(512)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).context(what),
        }
    }
    Ok(bytes)
}
