//! Files of the database with damage inside are mended: see `rocks::mend`.
//!
//! Before the database is opened: all that is not chunks, and what leads to chunks; files
//! that are lost are given up, see `rocks::give_up`. Where something is left out the
//! counters of the store may be lost, or older ones may show, and a writer removes what is
//! beyond them. Chunks may be missing that the index knows: a backup would refer to them.
//! So [`FLAG_NAME`] is made, durably, before the first file changes; as long as it is there
//! only a repair opens the repository for writing; and it goes when the counters are right
//! again and the missing chunks are listed.
//!
//! Once it is known which chunks are damaged: their files, and files of chunks that not
//! everything is read of. A chunk that is sound again is stored once more under its id, so
//! that whoever has the file open as it was reads it. This process has, too: it compacts no
//! files of chunks.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::Reopened;
use crate::chunk::ChunkId;
use crate::description::{database_path, sync_directory};
use crate::repository::Repository;
use crate::rocks::{
    give_up_lost, mend, mend_records, table_files, BlockBuffers, Extent, Family, Mended,
};
use crate::verify::IdSet;

/// In the repository's directory while a repair may have lost the counters, or chunks that
/// are in no list.
const FLAG_NAME: &str = "repair-unfinished";
/// Chunks that are sound again are stored in batches of about so many bytes.
const MAX_BATCH_BYTES: usize = 4 << 20;

/// Refuses a repository whose repair was interrupted.
///
/// # Errors
/// `Corrupt`.
pub(crate) fn refuse_unfinished(repository: &Path) -> Result<()> {
    match is_flagged(repository)? {
        false => Ok(()),
        true => Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "a repair of {} was interrupted: run coldrise repair again",
                repository.display()
            ),
        )),
    }
}

fn flag(repository: &Path) -> PathBuf {
    repository.join(FLAG_NAME)
}

pub(super) fn is_flagged(repository: &Path) -> Result<bool> {
    let path = flag(repository);
    path.try_exists().context(|| format!("looking for {}", path.display()))
}

/// Mends what is damaged in files that a database is opened with, and gives up those that
/// cannot be mended or are not there. The caller holds the writer's lock; `log` is a
/// directory for RocksDB's log.
pub(super) fn mend_all(repository: &Path, log: &Path) -> Result<Reopened> {
    let database = database_path(repository);
    let before = || raise_flag(repository);
    let mut reopened = Reopened { mended_files: mend_records(&database)?, ..Reopened::default() };
    let mut unreadable = HashSet::new();
    for path in table_files(&database)? {
        match give_up(mend(&path, Extent::NoChunks, before), &path)? {
            None => {
                unreadable.insert(path);
            }
            Some(done) => {
                reopened.mended_files += u64::from(!done.is_sound());
                reopened.lost_blocks += done.lost;
            }
        }
    }
    let given_up = give_up_lost(&database, log, &unreadable, before)?;
    (reopened.dropped_files, reopened.is_list_new) = (given_up.files, given_up.is_list_new);
    reopened.mended_files += given_up.mended;
    reopened.lost_blocks += given_up.lost_blocks;
    Ok(reopened)
}

/// None for a file that cannot be mended.
fn give_up(done: Result<Mended>, path: &Path) -> Result<Option<Mended>> {
    match done {
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => Ok(None),
        // The drive may come to its senses: nothing is given up because of it.
        Err(error) if error.kind() == ErrorKind::Io => Err(error).context(|| {
            let path = path.display();
            format!("{path}: copy the repository to another drive before it is repaired")
        }),
        done => done.map(Some),
    }
}

/// Makes the flag, durably.
pub(super) fn raise_flag(repository: &Path) -> Result<()> {
    let path = flag(repository);
    let what = || format!("making {}", path.display());
    std::fs::File::create(&path).and_then(|file| file.sync_all()).context(what)?;
    sync_directory(repository)
}

/// Removes the flag: the counters are right, and what is missing is listed.
pub(super) fn lower_flag(repository: &Path) -> Result<()> {
    let path = flag(repository);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).context(|| format!("removing {}", path.display())),
        Ok(()) => sync_directory(repository),
    }
}

/// What mending the files of damaged chunks did.
#[derive(Default)]
pub(super) struct MendedChunks {
    pub(super) files: u64,
    /// Blocks that are left out.
    pub(super) lost: u64,
    /// Chunks that are sound again.
    pub(super) corrected: Vec<ChunkId>,
}

/// Mends the files of damaged chunks, and those of which RocksDB reads more than anybody
/// else: damage in a value that was stored anew shows when they are compacted.
pub(super) fn mend_chunks(repository: &Repository, damaged: &IdSet) -> Result<MendedChunks> {
    let mut done = MendedChunks::default();
    let database = repository.database();
    // What is only in the log or a memtable is in none of the files.
    database.flush()?;
    let superseded = database.superseded_chunk_files()?;
    for file in database.listed_files(Family::Chunks)? {
        let path = database.path_of(&file);
        if superseded.contains(&path)
            || damaged.any_in(id_of(&file.smallest)..=id_of(&file.largest))
        {
            let mended = mend(&path, Extent::Everything, || Ok(()));
            let mended = give_up(mended, &path)?.unwrap_or_default();
            done.files += u64::from(!mended.is_sound());
            done.lost += mended.lost;
        }
    }
    let files = database.chunk_files()?;
    let (codec, sealer) = (repository.codec(), &repository.keys().chunks);
    let (mut buffers, mut plain) = (BlockBuffers::default(), Vec::new());
    let mut batch = database.batch();
    for id in damaged.ids() {
        let (key, end) = (id.to_be_bytes(), id.saturating_add(1).to_be_bytes());
        if !files.cover(&key, &end) {
            continue;
        }
        let mut sound = None;
        let read = files.read(
            (&key, &end),
            &mut buffers,
            |_, _| true,
            |_, value| {
                if codec.authenticate(sealer, id, value, &mut plain).is_ok() {
                    sound = Some(value.to_vec());
                }
                Ok(())
            },
        );
        if let (Ok(()), Some(value)) = (read, sound) {
            batch.put(Family::Chunks, &key, &value)?;
            done.corrected.push(id);
        }
        if batch.bytes() > MAX_BATCH_BYTES {
            database.write(std::mem::replace(&mut batch, database.batch()), true)?;
        }
    }
    database.write(batch, true)?;
    Ok(done)
}

/// Of a key that is too short or too long, as far as it goes.
fn id_of(key: &[u8]) -> ChunkId {
    let mut bytes = [0; 8];
    bytes.iter_mut().zip(key).for_each(|(byte, stored)| *byte = *stored);
    ChunkId::from_be_bytes(bytes)
}
