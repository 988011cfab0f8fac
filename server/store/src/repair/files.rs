//! Files of chunks and of map pages with damage inside are written anew, without what is
//! damaged.
//!
//! A damaged value hurts nobody but who reads it, until RocksDB compacts its file: that
//! fails, and with it everything that is written afterwards. So the file goes: what is
//! readable of it is written to a new one, which the database takes over (durable, and
//! newer than the old one, so that it is read first), and then the old one is deleted.
//! A crash in between leaves both, and reads find the new one.

use coldrise_block::{Context, ErrorKind, Result};

use crate::map::parse_page_value;
use crate::repository::Repository;
use crate::rocks::{Family, LiveFile, ReadMode, SstWriter};
use crate::verify::Damaged;
use crate::writer::Shared;

/// Replaces the files that hold damaged chunks or pages; how many, and how many stay
/// because RocksDB deletes only what has nothing below it.
pub(super) fn replace(shared: &Shared, family: Family, damaged: &[Damaged]) -> Result<(u64, u64)> {
    let repository = &*shared.repository;
    let database = repository.database();
    // What is not there at all is in no file.
    let is_there =
        |id: &u64| !matches!(database.get(family, &id.to_be_bytes(), ReadMode::Payload), Ok(None));
    let damaged: Vec<u64> = damaged.iter().map(|damaged| damaged.id).filter(is_there).collect();
    if damaged.is_empty() {
        return Ok((0, 0));
    }
    // What is only in the log or a memtable is in none of the files.
    database.flush()?;
    let (mut replaced, mut kept) = (0, 0);
    for file in database.live_files(family)? {
        let Some((first, last)) = ids(&file) else { continue };
        if !damaged.iter().any(|id| (first..=last).contains(id)) {
            continue;
        }
        if file.level == 0 {
            kept += 1;
            continue;
        }
        match replace_one(shared, family, &file, first, last)? {
            true => replaced += 1,
            false => kept += 1,
        }
    }
    Ok((replaced, kept))
}

fn ids(file: &LiveFile) -> Option<(u64, u64)> {
    let id = |key: &[u8]| key.try_into().ok().map(u64::from_be_bytes);
    Some((id(&file.smallest)?, id(&file.largest)?))
}

fn replace_one(
    shared: &Shared,
    family: Family,
    file: &LiveFile,
    first: u64,
    last: u64,
) -> Result<bool> {
    let repository = &*shared.repository;
    let database = repository.database();
    let staging = shared.staging();
    std::fs::create_dir_all(&staging).context(|| format!("making {}", staging.display()))?;
    let path = staging.join(format!("repair-{first}.sst"));
    let mut new: Option<SstWriter<'_>> = None;
    let mut scratch = Vec::new();
    for id in first..=last {
        let key = id.to_be_bytes();
        let value = match database.get(family, &key, ReadMode::Payload) {
            Ok(Some(value)) => value,
            Ok(None) => continue,
            Err(error) if error.kind() == ErrorKind::Corrupt => continue,
            // The drive may come to its senses: nothing is given up because of it.
            Err(error) => return Err(error).context(|| drive_fails(repository)),
        };
        if !is_sound(repository, family, id, &value, &mut scratch) {
            continue;
        }
        if new.is_none() {
            new = Some(SstWriter::create_for(database, family, &path)?);
        }
        if let Some(new) = &mut new {
            new.put(&key, &value)?;
        }
    }
    if let Some(new) = new {
        let path = new.finish()?;
        database.ingest(family, &path)?;
        let _ = std::fs::remove_file(&path);
    }
    database.delete_file(&file.name)?;
    let files = database.live_files(family)?;
    Ok(files.iter().all(|there| there.name != file.name))
}

fn is_sound(
    repository: &Repository,
    family: Family,
    id: u64,
    value: &[u8],
    scratch: &mut Vec<u8>,
) -> bool {
    if family == Family::Maps {
        let Some(level) = value.get(1).copied() else { return false };
        let sealer = &repository.keys().pages;
        return parse_page_value(repository.id(), sealer, id, level, value).is_ok();
    }
    let (codec, sealer) = (repository.codec(), &repository.keys().chunks);
    codec.authenticate(sealer, id, value, scratch).is_ok()
}

fn drive_fails(repository: &Repository) -> String {
    format!(
        "the drive of {} fails to read: copy the repository to another one before it is repaired",
        repository.path().display()
    )
}
