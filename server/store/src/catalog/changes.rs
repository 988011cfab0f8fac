//! Changes of the catalog, each in the batch of its caller.

use super::{
    FILES, MACHINE, MachineDocument, POINT, files_key, for_each_with_prefix, no_point, open,
    point_key, prefix, purpose, seal,
};
use crate::repository::Repository;
use crate::rocks::{Batch, Family, ReadMode};
use crate::{MachineName, PointDocument, PointName, PointOrigin};
use coldrise_block::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};

/// Damages a point as a failed drive does.
#[cfg(test)]
pub(crate) fn put_damaged_point(
    repository: &Repository,
    batch: &mut Batch<'_>,
    machine: &MachineName,
    point: &PointName,
) {
    let key = point_key(repository, machine, point);
    batch.put(Family::Catalog, &key, b"damaged").unwrap();
}

/// Replaces an existing point, in `batch`.
///
/// # Errors
/// `NotFound` if the point does not exist; `InvalidInput` if the document is out of its bounds.
pub(crate) fn replace_point(
    repository: &Repository,
    batch: &mut Batch<'_>,
    document: &PointDocument,
) -> Result<()> {
    document.check()?;
    repository.point(&document.machine, &document.point)?;
    let key = point_key(repository, &document.machine, &document.point);
    batch.put(Family::Catalog, &key, &seal(repository, &key, document)?)
}

/// Adds to `batch` a point, the files it carries and, if the machine is new, the machine.
///
/// # Errors
/// `AlreadyExists` if the name is taken; `InvalidInput` if the document is out of its bounds.
pub(crate) fn add_point(
    repository: &Repository,
    batch: &mut Batch<'_>,
    document: &PointDocument,
    files: Option<&[u8]>,
) -> Result<()> {
    document.check()?;
    if document.files.is_some() != files.is_some() {
        let text = "a point is stored with the files that it carries, and with no others";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let database = repository.database();
    let key = point_key(repository, &document.machine, &document.point);
    if database.get(Family::Catalog, &key, ReadMode::Cached)?.is_some() {
        return Err(Error::new(
            ErrorKind::AlreadyExists,
            format!("there is already a point {}/{}", document.machine, document.point),
        ));
    }
    let known = MachineDocument::readable(repository, &document.machine)?;
    let is_backup = matches!(document.origin, PointOrigin::Backup { .. });
    if is_backup || known.is_none() {
        let last_backup = is_backup.then(|| document.point.clone());
        let retired = known.map(|known| known.retired).unwrap_or_default();
        let machine = MachineDocument { machine: document.machine.clone(), last_backup, retired };
        machine.put(repository, batch)?;
    }
    if let Some(files) = files {
        let key = files_key(repository, &document.machine, &document.point);
        batch.put(Family::Catalog, &key, &repository.encrypt_document(&purpose(&key), files)?)?;
    }
    batch.put(Family::Catalog, &key, &seal(repository, &key, document)?)
}

/// Restores a point, with the files it carries, if the catalog has lost it or has an older version.
/// Restores its machine too if that is lost.
pub(crate) fn restore_point(
    repository: &Repository,
    batch: &mut Batch<'_>,
    document: &PointDocument,
    files: Option<&[u8]>,
) -> Result<()> {
    let key = point_key(repository, &document.machine, &document.point);
    batch.put(Family::Catalog, &key, &seal(repository, &key, document)?)?;
    if let Some(files) = files {
        let key = files_key(repository, &document.machine, &document.point);
        batch.put(Family::Catalog, &key, &repository.encrypt_document(&purpose(&key), files)?)?;
    }
    if MachineDocument::readable(repository, &document.machine)?.is_none() {
        let machine = document.machine.clone();
        // Without a last backup, the next bitmap is refused. That is safe.
        MachineDocument { machine, last_backup: None, retired: BTreeMap::new() }
            .put(repository, batch)?;
    }
    Ok(())
}

/// Whether an entry found in an older file of the database may count: its point or machine must not
/// be known to be gone. Only its marker shows that a point exists. Machines and files count here;
/// [`remove_ownerless`] removes those without a point.
pub(crate) fn may_count(repository: &Repository, key: &[u8], value: &[u8]) -> bool {
    match key.first() {
        Some(&POINT) => open::<PointDocument>(repository, key, value).is_ok_and(|document| {
            repository.may_be_there(&format!("{}/{}", document.machine, document.point))
        }),
        Some(&MACHINE) => open::<MachineDocument>(repository, key, value).is_ok(),
        Some(&FILES) => repository.decrypt_document(&purpose(key), value).is_ok(),
        _ => false,
    }
}

/// Forgets the last backup of every machine. Older documents may be all that is left, and a bitmap
/// may count from a backup that they do not know. So the next bitmap is refused.
pub(crate) fn forget_last_backups(repository: &Repository, batch: &mut Batch<'_>) -> Result<()> {
    for_each_with_prefix(repository, &[MACHINE], |key, value| {
        match open::<MachineDocument>(repository, key, value) {
            Ok(known) => MachineDocument { last_backup: None, ..known }.put(repository, batch),
            Err(_) => Ok(()),
        }
    })
}

/// Removes machines and files that belong to no point.
pub(crate) fn remove_ownerless(repository: &Repository, batch: &mut Batch<'_>) -> Result<()> {
    let mut owned = BTreeSet::new();
    for_each_with_prefix(repository, &[POINT], |key, _| {
        owned.insert(key[1..].to_vec());
        owned.insert(key[1..].get(..16).unwrap_or_default().to_vec());
        Ok(())
    })?;
    for kind in [MACHINE, FILES] {
        for_each_with_prefix(repository, &[kind], |key, _| {
            if owned.contains(&key[1..]) { Ok(()) } else { batch.delete(Family::Catalog, key) }
        })?;
    }
    Ok(())
}

/// Adds to `batch` that a point is protected, or no longer protected.
///
/// # Errors
/// `NotFound`; `Corrupt` if the document does not authenticate.
pub(crate) fn set_protected(
    repository: &Repository,
    batch: &mut Batch<'_>,
    machine: &MachineName,
    point: &PointName,
    is_protected: bool,
) -> Result<()> {
    let mut document = repository.point(machine, point)?;
    document.is_protected = is_protected;
    replace_point(repository, batch, &document)
}

/// Adds to `batch` that a point lost from the catalog may have been the machine's last backup: a
/// bitmap may count from it.
///
/// # Errors
/// `Corrupt` if the machine's document does not authenticate.
pub(crate) fn retire_lost(
    repository: &Repository,
    batch: &mut Batch<'_>,
    machine: &MachineName,
    point: &PointName,
) -> Result<()> {
    let Some(mut document) = MachineDocument::readable(repository, machine)? else { return Ok(()) };
    if point.is_synthetic() {
        let highest = document.retired.entry(point.unix_seconds()).or_default();
        *highest = (*highest).max(point.lineage().1);
    } else {
        document.last_backup = Some(point.clone())
    }
    document.put(repository, batch)
}

/// Adds to `batch` the removal of points. A machine is removed with its last point.
///
/// # Errors
/// `NotFound` if a point does not exist.
pub(crate) fn remove_points(
    repository: &Repository,
    batch: &mut Batch<'_>,
    points: &[(MachineName, PointName)],
) -> Result<()> {
    let database = repository.database();
    let mut gone: BTreeMap<&MachineName, BTreeSet<&PointName>> = BTreeMap::new();
    for (machine, point) in points {
        let key = point_key(repository, machine, point);
        if database.get(Family::Catalog, &key, ReadMode::Cached)?.is_none() {
            return Err(no_point(machine, point));
        }
        batch.delete(Family::Catalog, &key)?;
        batch.delete(Family::Catalog, &files_key(repository, machine, point))?;
        gone.entry(machine).or_default().insert(point);
    }
    for (machine, gone) in gone {
        let kept = kept_times(repository, machine, &gone)?;
        if kept.is_empty() {
            batch.delete(Family::Catalog, &prefix(repository, MACHINE, machine))?;
            continue;
        }
        let known = MachineDocument::readable(repository, machine)?;
        let mut document = known.clone().unwrap_or_else(|| MachineDocument {
            machine: machine.clone(),
            // If the last backup was another one, the next bitmap is refused. That is safe.
            last_backup: gone.iter().rev().find(|point| !point.is_synthetic()).cloned().cloned(),
            retired: BTreeMap::new(),
        });
        for point in gone.iter().filter(|point| point.is_synthetic()) {
            let highest = document.retired.entry(point.unix_seconds()).or_default();
            *highest = (*highest).max(point.lineage().1);
        }
        // No session is sealed at a time without points.
        document.retired.retain(|time, _| kept.contains(time));
        if known.as_ref() != Some(&document) {
            document.put(repository, batch)?;
        }
    }
    Ok(())
}

/// The times of the machine's points that stay.
fn kept_times(
    repository: &Repository,
    machine: &MachineName,
    gone: &BTreeSet<&PointName>,
) -> Result<BTreeSet<u64>> {
    let mut kept = BTreeSet::new();
    for_each_with_prefix(repository, &prefix(repository, POINT, machine), |key, _| {
        let name = key.last_chunk::<12>().and_then(PointName::from_sort_key);
        if let Some(name) = name.filter(|name| !gone.contains(name)) {
            kept.insert(name.unix_seconds());
        }
        Ok(())
    })?;
    Ok(kept)
}
