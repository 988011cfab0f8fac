//! The local index of a bucket: which contents its packs have.
//!
//! It is a database in the directory of the repository that is copied, and a cache: without it, it is made anew from the
//! packs' names. A copy begins by comparing it with the list of packs.

use std::collections::HashSet;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, HeldLock, Result};

use super::in_parallel::in_parallel;
use super::pack::{id_of, number_of, parts_of, Name, Pack, PackNumber, FOLDER, NAME_BYTES};
use super::shelf::{Shelf, REQUESTS};
use crate::log_directory::LogDirectory;
use crate::rocks::{Database, Family, ReadMode};

/// Packs whose names are read at once.
const STEP_PACKS: usize = 64;
const NO_NAME: Name = [0; NAME_BYTES];
/// The format of the entries.
const VERSION_KEY: &[u8] = b"version";
const VERSION: &[u8] = b"1";

/// The index. One process has it.
///
/// `dedup` has the number of the value (8, big endian) and a tag (8) for each name (16); `default` the size of each pack
/// (8, big endian) whose names are there, for its number (8, big endian).
pub(super) struct Index {
    database: Database,
    /// The packs in the bucket.
    packs: HashSet<PackNumber>,
    _log: LogDirectory,
    _lock: HeldLock,
}

impl Index {
    /// Opens or makes the index in `folder`, and brings it up to date.
    ///
    /// # Errors
    /// `Busy` if another process has it; errors of reaching the store, and of the drive.
    pub(super) fn open(folder: &Path, shelf: &Shelf) -> Result<Index> {
        let what = || format!("making {}", folder.display());
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).context(what)?;
        let lock = std::fs::File::create(folder.join("lock")).context(what)?;
        let Some(lock) = HeldLock::take(lock).context(what)? else {
            let text = format!("another copy to {} runs here", shelf.objects.place());
            return Err(Error::new(ErrorKind::Busy, text).advise("wait for its end"));
        };
        let log = LogDirectory::create()?;
        let path = folder.join("db");
        let database = match usable(&path, &log) {
            Some(database) => database,
            None => {
                if path.exists() {
                    tracing::warn!("the index of {} is made anew", shelf.objects.place());
                    std::fs::remove_dir_all(&path).context(what)?;
                }
                let database = Database::open_primary(&path, log.path(), true)?;
                let mut batch = database.batch();
                batch.put(Family::State, VERSION_KEY, VERSION)?;
                database.write(batch, true)?;
                database
            }
        };
        let mut index = Index { database, packs: HashSet::new(), _log: log, _lock: lock };
        index.update(shelf)?;
        Ok(index)
    }

    /// Compares with the packs that are there.
    fn update(&mut self, shelf: &Shelf) -> Result<()> {
        let mut news = Vec::new();
        for listed in shelf.objects.list(FOLDER)? {
            let Some(pack) = number_of(&listed.name) else { continue };
            self.packs.insert(pack);
            let known = self.database.get(Family::State, &pack.to_be_bytes(), ReadMode::Cached)?;
            if known.is_none_or(|known| *known != listed.size_bytes.to_be_bytes()) {
                news.push((pack, listed.size_bytes));
            }
        }
        for news in news.chunks(STEP_PACKS) {
            let names = in_parallel(news, REQUESTS, |(pack, _)| match shelf.names(*pack) {
                // What it has is stored again. A verify tells of it.
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::warn!("{}", error.full_message());
                    Ok(None)
                }
                read => read.map(Some),
            })?;
            for ((pack, size_bytes), names) in news.iter().zip(names) {
                let Some((table, names)) = names else { continue };
                let mut batch = self.database.batch();
                for (place, name) in names.iter().enumerate().filter(|(_, name)| **name != NO_NAME)
                {
                    let id = id_of(*pack, place);
                    match table.range(place) {
                        Some(_) => self.put(&mut batch, shelf, name, id)?,
                        None if self.find(shelf, name)? == Some(id) => {
                            batch.delete(Family::Dedup, name)?;
                        }
                        None => {}
                    }
                }
                batch.put(Family::State, &pack.to_be_bytes(), &size_bytes.to_be_bytes())?;
                self.database.write(batch, false)?;
            }
        }
        Ok(())
    }

    fn put(
        &self,
        batch: &mut crate::rocks::Batch<'_>,
        shelf: &Shelf,
        name: &Name,
        id: u64,
    ) -> Result<()> {
        let mut entry = [0; 16];
        entry[..8].copy_from_slice(&id.to_be_bytes());
        entry[8..].copy_from_slice(&shelf.seals.index_tag(name, id));
        batch.put(Family::Dedup, name, &entry)
    }

    /// The value with that content. A damaged entry is none.
    pub(super) fn find(&self, shelf: &Shelf, name: &Name) -> Result<Option<u64>> {
        let Some(entry) = self.database.get(Family::Dedup, name, ReadMode::Cached)? else {
            return Ok(None);
        };
        let Some((id, tag)) = entry.split_first_chunk::<8>() else { return Ok(None) };
        let id = u64::from_be_bytes(*id);
        let is_whole = *tag == shelf.seals.index_tag(name, id);
        Ok((is_whole && self.packs.contains(&parts_of(id).0)).then_some(id))
    }

    /// Adds a pack that is in the bucket now.
    pub(super) fn add(&mut self, shelf: &Shelf, pack: &Pack) -> Result<()> {
        let mut batch = self.database.batch();
        for (place, name) in pack.names.iter().enumerate().filter(|(_, name)| **name != NO_NAME) {
            self.put(&mut batch, shelf, name, id_of(pack.number, place))?;
        }
        let size_bytes = pack.size_bytes.to_be_bytes();
        batch.put(Family::State, &pack.number.to_be_bytes(), &size_bytes)?;
        self.database.write(batch, false)?;
        self.packs.insert(pack.number);
        Ok(())
    }
}

/// The database, if it is one of this version that can be opened.
fn usable(path: &Path, log: &LogDirectory) -> Option<Database> {
    if !path.exists() {
        return None;
    }
    let database = Database::open_primary(path, log.path(), false).ok()?;
    let is_known = {
        let version = database.get(Family::State, VERSION_KEY, ReadMode::Cached).ok()?;
        version.is_some_and(|version| *version == *VERSION)
    };
    is_known.then_some(database)
}
