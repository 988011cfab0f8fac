//! The files of sealed points until the points are in the catalog: `live/HASH/sealed/`.
//!
//! They are stored before the session's document names the point, and removed when it no longer
//! names it. Files that a crash leaves in between belong to no point.

use std::collections::HashSet;
use std::path::PathBuf;

use coldrise_block::{
    Context, Error, ErrorKind, Result, path_exists, remove_if_present, replace_file, sync_directory,
};
use coldrise_store::{PointDocument, Repository};

use crate::client_files::{CarriedFiles, hash};
use crate::paths::SessionPaths;

/// Largest set that is read, in bytes.
const MAX_STORED_BYTES: u64 = 17 << 20;

fn name(repository: &Repository, point: &PointDocument) -> String {
    let address = format!("{}/{}", point.machine, point.point);
    let hash = repository.derive_key("sealed files", address.as_bytes());
    coldrise_block::hex::encode(&hash[..16])
}

fn path(repository: &Repository, place: &SessionPaths, point: &PointDocument) -> PathBuf {
    place.sealed_files().join(name(repository, point))
}

fn purpose(repository: &Repository, place: &SessionPaths, point: &PointDocument) -> String {
    format!("sealed files {} {}", place.purpose(), name(repository, point))
}

/// Stores the files of a point, durably.
pub(crate) fn write(
    repository: &Repository,
    place: &SessionPaths,
    point: &PointDocument,
    files: &[u8],
) -> Result<()> {
    let folder = place.sealed_files();
    if !path_exists(&folder)? {
        SessionPaths::make_folder(&folder)?;
        sync_directory(place.directory())?;
    }
    let stored = repository.encrypt_document(&purpose(repository, place, point), files)?;
    replace_file(&path(repository, place, point), &stored)
}

/// The files of a point; `None` if they do not exist (any more).
pub(crate) fn read(
    repository: &Repository,
    place: &SessionPaths,
    point: &PointDocument,
) -> Result<Option<Vec<u8>>> {
    let path = path(repository, place, point);
    let what = || format!("reading {}", path.display());
    match std::fs::metadata(&path) {
        Ok(found) if found.len() > MAX_STORED_BYTES => {
            return Err(Error::new(ErrorKind::Corrupt, format!("{} is too large", path.display())));
        }
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context(what),
    }
    match std::fs::read(&path) {
        Ok(stored) => {
            let purpose = purpose(repository, place, point);
            repository.decrypt_document(&purpose, &stored).context(what).map(Some)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context(what),
    }
}

/// Removes files that belong to none of these points.
pub(crate) fn remove_others(
    repository: &Repository,
    place: &SessionPaths,
    sealed: &[PointDocument],
) -> Result<()> {
    let folder = place.sealed_files();
    let what = || format!("reading {}", folder.display());
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.context(what)?,
    };
    let owned: HashSet<_> = sealed.iter().map(|point| name(repository, point)).collect();
    for entry in entries {
        let entry = entry.context(what)?;
        let is_owned = entry.file_name().to_str().is_some_and(|name| owned.contains(name));
        if !is_owned {
            remove_if_present(&entry.path())?;
        }
    }
    Ok(())
}

/// Decodes the set of a point, and checks that it belongs to the point.
pub(crate) fn decode(
    repository: &Repository,
    point: &PointDocument,
    bytes: &[u8],
) -> Result<CarriedFiles> {
    let is_own = point.files.as_ref().is_some_and(|facts| facts.hash == hash(repository, bytes));
    if is_own {
        CarriedFiles::decode(bytes)
    } else {
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "{}/{}: its files are not those it was sealed with",
                point.machine, point.point
            ),
        ))
    }
    .context(|| format!("{}/{}", point.machine, point.point))
}
