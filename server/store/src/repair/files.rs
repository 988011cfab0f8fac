//! Files of chunks with damage inside are written anew, without what is damaged.
//!
//! A damaged value hurts nobody but who reads it, until RocksDB compacts its file: that
//! fails, and with it everything that is written afterwards. So the file goes: what is
//! readable of it is written to a new one, which the database takes over (durable, and
//! newer than the old one, so that it is read first), and then the old one is deleted.
//! A crash in between leaves both, and reads find the new one.

use coldrise_block::{Context, ErrorKind, Result};

use crate::chunk::ChunkId;
use crate::repository::Repository;
use crate::rocks::{Family, LiveFile, ReadMode, SstWriter};
use crate::verify::Damaged;
use crate::writer::Shared;

/// Replaces the files that hold damaged chunks; how many, and how many stay because
/// RocksDB deletes only what has nothing below it.
pub(super) fn replace(shared: &Shared, damaged: &[Damaged]) -> Result<(u64, u64)> {
    let repository = &*shared.repository;
    // What is only in the log or a memtable is in none of the files.
    repository.database().flush()?;
    let (mut replaced, mut kept) = (0, 0);
    for file in repository.database().live_files(Family::Chunks)? {
        let Some((first, last)) = ids(&file) else { continue };
        if !damaged.iter().any(|chunk| (first..=last).contains(&chunk.id)) {
            continue;
        }
        if file.level == 0 {
            kept += 1;
            continue;
        }
        match replace_one(shared, &file, first, last)? {
            true => replaced += 1,
            false => kept += 1,
        }
    }
    Ok((replaced, kept))
}

fn ids(file: &LiveFile) -> Option<(ChunkId, ChunkId)> {
    let id = |key: &[u8]| key.try_into().ok().map(ChunkId::from_be_bytes);
    Some((id(&file.smallest)?, id(&file.largest)?))
}

fn replace_one(shared: &Shared, file: &LiveFile, first: ChunkId, last: ChunkId) -> Result<bool> {
    let repository = &*shared.repository;
    let database = repository.database();
    let staging = shared.staging();
    std::fs::create_dir_all(&staging).context(|| format!("making {}", staging.display()))?;
    let path = staging.join(format!("repair-{first}.sst"));
    let mut new: Option<SstWriter<'_>> = None;
    let mut scratch = Vec::new();
    for id in first..=last {
        let key = id.to_be_bytes();
        let value = match database.get(Family::Chunks, &key, ReadMode::Payload) {
            Ok(Some(value)) => value,
            Ok(None) => continue,
            Err(error) if error.kind() == ErrorKind::Corrupt => continue,
            // The drive may come to its senses: nothing is given up because of it.
            Err(error) => return Err(error).context(|| drive_fails(repository)),
        };
        let (codec, sealer) = (repository.codec(), &repository.keys().chunks);
        if codec.authenticate(sealer, id, &value, &mut scratch).is_err() {
            continue;
        }
        if new.is_none() {
            new = Some(SstWriter::create(database, &path)?);
        }
        if let Some(new) = &mut new {
            new.put(&key, &value)?;
        }
    }
    if let Some(new) = new {
        let path = new.finish()?;
        database.ingest_chunks(&path)?;
        let _ = std::fs::remove_file(&path);
    }
    database.delete_file(&file.name)?;
    let files = database.live_files(Family::Chunks)?;
    Ok(files.iter().all(|there| there.name != file.name))
}

fn drive_fails(repository: &Repository) -> String {
    format!(
        "the drive of {} fails to read: copy the repository to another one before it is repaired",
        repository.path().display()
    )
}
