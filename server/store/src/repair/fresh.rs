//! A damaged database is made anew from what can be read of its files, beside the old one, which
//! then goes. Nobody writes to a file of RocksDB's: RocksDB itself makes the new one.
//!
//! - Sound files of chunks, pages and the index are taken over as they are, by links.
//! - Of any other file the entries that can be read and authenticate are written once more:
//!   chunks to a file in the place of theirs, and the rest through batches.
//! - The log is replayed, without records that are damaged.
//! - Documents count where nothing says that they are gone: see [`super::redundancy`], which
//!   also knows what else the catalog, the counters and the pages are made of.
//!
//! Which files there are the folder tells. The list of them (RocksDB's manifest) is believed only
//! where it is whole: then files that it does not name are leftovers.
//!
//! # Order, and what a crash leaves
//!
//! 1. `repair-unfinished` is made: from now on only a repair opens the database for writing.
//! 2. `db.new` is made and filled. *Left:* the old database; the next one that opens it for
//!    writing removes `db.new`.
//! 3. `db.new` and `db` change their names, in one step. *Left:* the new database.
//! 4. The old one is removed. *Left:* as after 2.
//!
//! Links and what is written once more are all that takes space: at most as much as the damaged
//! files have, and one map page or document for each that is in them.
//!
//! Readers that have the old database open follow the new one: no file of it has a number that
//! the old one had, and its changes are numbered behind all of the old one's.

use std::collections::{BTreeMap, HashSet};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, ErrorKind, Result};
use rustix::fs::{renameat_with, RenameFlags, CWD};

use super::flag::{is_flagged, raise_flag};
use super::Reopened;
use crate::description::{database_path, sync_directory, Description};
use crate::high_water::{self, HighWater, Mark};
use crate::keys::Keys;
use crate::log_directory::LogDirectory;
use crate::map::{parse_page_value, MAX_LEVELS};
use crate::passphrase::ReadOnce;
use crate::repository::{Access, KeyCheck};
use crate::rocks::{
    self, is_sound, read_what_is_left, table, table_files, Batch, Database, Entry, Family,
    ReadMode, SstWriter,
};
use crate::writer::{lock_for_writing, remove_folder, STAGING_NAME};
use crate::{catalog, dedup, OpenOptions, Repository};

/// In the repository's directory: the database in the making.
pub(crate) const FRESH_NAME: &str = "db.new";
/// In there: links to files that are taken over.
const LINKS_NAME: &str = "coldrise-links";
/// Of files of which nothing can be read, in case that somebody can.
const LOST_ENDING: &str = "lost";
/// Changes that may have been made since the mark was written.
const UNMARKED_CHANGES: u64 = 1 << 32;
/// Where there is no mark.
const UNKNOWN_SEQUENCE: u64 = 1 << 48;
/// Entries that are written together, in bytes.
const MAX_BATCH_BYTES: usize = 4 << 20;

/// Makes the database of a repository anew if anything of it is damaged.
///
/// # Errors
/// `Busy`; `NoSpace`; `WrongPassphrase`; what the operating system says of the drive: then the
/// database is as it was.
pub(super) fn make_where_needed(path: &Path, passphrase: &ReadOnce<'_>) -> Result<Reopened> {
    make(path, passphrase, Found::look).map(Option::unwrap_or_default)
}

/// Makes the database of a repository anew, by links alone, if nothing is wrong with it but that
/// files of chunks are missing that no commit names: a drive that failed while the database took
/// one over has left it listed, and RocksDB has deleted it. Returns whether that was so.
///
/// # Errors
/// As of a repair.
pub(crate) fn leave_out_uncommitted(path: &Path, passphrase: &ReadOnce<'_>) -> Result<bool> {
    if is_flagged(path)? {
        return Ok(false);
    }
    match make(path, passphrase, Found::without_uncommitted) {
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => Ok(false),
        made => Ok(made?.is_some()),
    }
}

/// `None` where the database stays.
fn make(
    path: &Path,
    passphrase: &ReadOnce<'_>,
    look: impl FnOnce(&Path, &Path, Option<&Mark>) -> Result<Found>,
) -> Result<Option<Reopened>> {
    let mut found = Found::default();
    let options = OpenOptions { cache_bytes: 0 };
    let fresh = path.join(FRESH_NAME);
    let open = |description: &Description, keys: Option<&Keys>| {
        let lock = lock_for_writing(path)?;
        let log = LogDirectory::create()?;
        // Without it there is nothing to read, and the points are named.
        make_folder(&database_path(path))?;
        remove_folder(&fresh)?;
        let mark = keys.and_then(|keys| high_water::read(path, &description.id, keys));
        found = look(path, log.path(), mark.as_ref())?;
        let database = match found.is_whole {
            true => rocks::open_as_listed(&database_path(path), log.path())?,
            false => found.begin(path, log.path(), mark.as_ref())?,
        };
        let high_water = HighWater::new(mark.unwrap_or_default());
        Ok((database, Access { writer_lock: Some(lock), _log: log, high_water }))
    };
    let repository = Repository::open_with(path, passphrase, &options, KeyCheck::First, open)?;
    if found.is_whole {
        return Ok(None);
    }
    let reopened = found.fill(&repository)?;
    repository.database().flush()?;
    sync_directory(&fresh)?;
    // The lock goes with it. Whoever comes in between is kept out by the flag, or does the same.
    drop(repository);
    exchange(path)?;
    remove_folder(&fresh)?;
    tracing::warn!("the database was rebuilt from its files");
    Ok(Some(reopened))
}

fn exchange(path: &Path) -> Result<()> {
    let (fresh, folder) = (path.join(FRESH_NAME), database_path(path));
    let what = || format!("putting {} in the place of {}", fresh.display(), folder.display());
    make_folder(&folder)?;
    renameat_with(CWD, &fresh, CWD, &folder, RenameFlags::EXCHANGE)
        .map_err(std::io::Error::from)
        .context(what)?;
    sync_directory(path)
}

fn make_folder(path: &Path) -> Result<()> {
    let what = || format!("making {}", path.display());
    std::fs::DirBuilder::new().mode(0o700).recursive(true).create(path).context(what)
}

/// The files of a database, and what becomes of them.
#[derive(Default)]
struct Found {
    is_whole: bool,
    /// To be taken over as they are.
    linked: Vec<(Family, PathBuf)>,
    /// Of which the entries are written once more, and whether they are sound.
    read: Vec<(PathBuf, bool)>,
    /// Files that are listed and not there.
    missing: u64,
    is_list_new: bool,
}

impl Found {
    fn look(path: &Path, log: &Path, mark: Option<&Mark>) -> Result<Found> {
        let folder = database_path(path);
        let listed = believed_list(&folder, log, mark)?;
        let mut found = Found { is_list_new: listed.is_none(), ..Found::default() };
        found.is_whole = !is_flagged(path)? && listed.is_some() && is_as_listed(&folder, log)?;
        if found.is_whole {
            // Only the log may have lost its end then.
            found.is_whole =
                mark.is_none_or(|mark| matches!(mark.rolled_back(&folder, log), Ok(None)));
        }
        let there = table_files(&folder)?;
        if let Some(listed) = &listed {
            let there: HashSet<&PathBuf> = there.iter().collect();
            found.missing = listed.iter().filter(|path| !there.contains(path)).count() as u64;
        }
        for path in there {
            // What is not listed may hold what is lost.
            let is_leftover = listed.as_ref().is_some_and(|listed| !listed.contains(&path));
            if is_leftover && found.missing == 0 {
                continue;
            }
            let is_sound = is_sound(&path).context(|| {
                format!(
                    "{}: copy the repository to another drive before it is repaired",
                    path.display()
                )
            })?;
            found.is_whole &= is_sound;
            match table::family_of(&path).ok().filter(|_| is_sound) {
                Some((Family::State | Family::Catalog, _)) | None => {
                    found.read.push((path, is_sound));
                }
                Some((_, properties)) if properties.entries == 0 => {}
                Some((family, _)) => found.linked.push((family, path)),
            }
        }
        if !found.is_whole {
            raise_flag(path)?;
        }
        Ok(found)
    }

    /// Only what can be told without reading the files.
    fn without_uncommitted(path: &Path, log: &Path, mark: Option<&Mark>) -> Result<Found> {
        let folder = database_path(path);
        let whole = Found { is_whole: true, ..Found::default() };
        let Some(mark) =
            mark.filter(|mark| mark.rolled_back(&folder, log).is_ok_and(|why| why.is_none()))
        else {
            return Ok(whole);
        };
        let listed = rocks::listed_in(&rocks::open_as_listed(&folder, log)?)?;
        let (there, missing): (Vec<_>, Vec<_>) =
            listed.into_iter().partition(|file| file.path.exists());
        if missing.is_empty() || !missing.iter().all(|file| file.is_uncommitted(mark.next_chunk)) {
            return Ok(whole);
        }
        let mut found = Found::default();
        for file in there {
            match file.family {
                Family::State | Family::Catalog => found.read.push((file.path, true)),
                family => found.linked.push((family, file.path)),
            }
        }
        Ok(found)
    }

    /// Step 2, as far as RocksDB does it alone. Opens the new database.
    fn begin(&mut self, path: &Path, log: &Path, mark: Option<&Mark>) -> Result<Database> {
        let (folder, fresh) = (database_path(path), path.join(FRESH_NAME));
        let links = fresh.join(LINKS_NAME);
        make_folder(&links)?;
        let mut files = Vec::new();
        for (family, file) in &self.linked {
            files.push((*family, link(file, &links, None)?));
        }
        let sequence =
            mark.map_or(UNKNOWN_SEQUENCE, |mark| mark.sequence.saturating_add(UNMARKED_CHANGES));
        // Behind the old list of files, too, which may be gone.
        let highest = highest_number(&folder)?.max(mark.map_or(0, |mark| mark.manifest));
        let numbers = (sequence, highest + 1);
        let left_out = rocks::make_database(&fresh, log, numbers, &links, &files)?;
        self.read.extend(left_out.iter().map(|name| (folder.join(name), true)));
        let mut next = highest_number(&fresh)?;
        for file in files_with(&folder, "log")? {
            next += 1;
            link(&file, &fresh, Some(format!("{next:06}.log")))?;
        }
        remove_folder(&links)?;
        Database::open_for_repair(&fresh, log)
    }

    /// The rest of step 2.
    fn fill(&self, repository: &Repository) -> Result<Reopened> {
        let mut filler = Filler {
            repository,
            batch: repository.database().batch(),
            documents: BTreeMap::new(),
            plain: Vec::new(),
        };
        let mut reopened = Reopened {
            dropped_files: self.missing,
            is_list_new: self.is_list_new,
            ..Reopened::default()
        };
        for (path, is_sound) in &self.read {
            let (lost, entries) = filler.take_file(path)?;
            match *is_sound {
                true => {}
                false if entries == 0 => {
                    let name = path.with_extension(LOST_ENDING);
                    let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    link(path, repository.database().path(), Some(name))?;
                    reopened.dropped_files += 1;
                }
                false => {
                    reopened.mended_files += 1;
                    reopened.lost_blocks += lost;
                }
            }
        }
        filler.finish()?;
        Ok(reopened)
    }
}

/// The files that the list names; none where it cannot be read, or is older than the mark.
fn believed_list(
    folder: &Path,
    log: &Path,
    mark: Option<&Mark>,
) -> Result<Option<HashSet<PathBuf>>> {
    let read = || -> Result<_> {
        let is_cut = mark.is_some_and(|mark| match rocks::sound_manifest(folder) {
            Ok((number, bytes)) => mark.is_beyond(number, bytes),
            Err(_) => true,
        });
        let opened = rocks::open_as_listed(folder, log)?;
        let paths = rocks::listed_in(&opened)?.into_iter().map(|file| file.path).collect();
        // A log that has lost its end takes no files with it.
        Ok((!is_cut).then_some(paths))
    };
    match read() {
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => Ok(None),
        listed => listed,
    }
}

fn is_as_listed(folder: &Path, log: &Path) -> Result<bool> {
    match rocks::check_listed(folder, log) {
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => Ok(false),
        checked => checked.map(|()| true),
    }
}

/// Links a file into a folder, under its own name or another one, which is returned.
fn link(file: &Path, folder: &Path, name: Option<String>) -> Result<String> {
    let own = || file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let name = name.unwrap_or_else(own);
    let target = folder.join(&name);
    std::fs::hard_link(file, &target)
        .context(|| format!("linking {} to {}", file.display(), target.display()))?;
    Ok(name)
}

fn files_with(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let what = || format!("reading {}", folder.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).context(what)? {
        let path = entry.context(what)?.path();
        if path.extension().is_some_and(|extension| extension == ending) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The highest number in the name of a file; 0 where there is none.
fn highest_number(folder: &Path) -> Result<u64> {
    let what = || format!("reading {}", folder.display());
    let mut highest = 0;
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        entries => entries.context(what)?,
    };
    for entry in entries {
        let name = entry.context(what)?.file_name();
        let name = name.to_string_lossy();
        let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
        let digits = digits.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        highest = highest.max(digits.parse().unwrap_or(0));
    }
    Ok(highest)
}

/// Whether it is one of the counters' family, and the key.
type DocumentKey = (bool, Vec<u8>);
/// Sequence number and value; none where it was deleted.
type Newest = (u64, Option<Vec<u8>>);

/// Writes entries of files that are not taken over to the new database.
struct Filler<'a> {
    repository: &'a Repository,
    batch: Batch<'a>,
    /// Of the catalog and the counters, the newest value of each key.
    documents: BTreeMap<DocumentKey, Newest>,
    plain: Vec<u8>,
}

impl Filler<'_> {
    /// Stretches of a file that cannot be read, and entries that can.
    fn take_file(&mut self, path: &Path) -> Result<(u64, u64)> {
        let database = self.repository.database();
        let staging = database.path().join(STAGING_NAME);
        make_folder(&staging)?;
        let staged = staging.join("chunks.sst");
        let (mut chunks, mut entries) = (None, 0);
        let lost = read_what_is_left(path, |entry| {
            let Some(value) = entry.value.filter(|value| self.is_chunk(entry.key, value)) else {
                entries += u64::from(self.take(&entry)?);
                return Ok(());
            };
            if chunks.is_none() {
                chunks = Some(SstWriter::create(database, &staged)?);
            }
            entries += 1;
            chunks.as_mut().map_or(Ok(()), |file| file.put(entry.key, value))
        })?;
        if let Some(file) = chunks {
            database.ingest_chunks(&file.finish()?)?;
        }
        remove_folder(&staging)?;
        Ok((lost, entries))
    }

    fn is_chunk(&mut self, key: &[u8], value: &[u8]) -> bool {
        let Ok(id) = key.try_into().map(u64::from_be_bytes) else { return false };
        let (codec, sealer) = (self.repository.codec(), &self.repository.keys().chunks);
        codec.authenticate(sealer, id, value, &mut self.plain).is_ok()
    }

    /// Whether it is an entry of ours.
    fn take(&mut self, entry: &Entry<'_>) -> Result<bool> {
        let repository = self.repository;
        if let (Ok(id), Some(value)) = (entry.key.try_into().map(u64::from_be_bytes), entry.value) {
            let level = value.get(1).copied().filter(|level| *level < MAX_LEVELS);
            let sealer = &repository.keys().pages;
            let is_page = level.is_some_and(|level| {
                parse_page_value(repository.id(), sealer, id, level, value).is_ok()
            });
            if is_page {
                self.put(Family::Maps, entry.key, value)?;
            }
            return Ok(is_page);
        }
        if entry.key.len() == size_of::<dedup::ChunkHash>() {
            let value = entry.value.filter(|value| dedup::is_entry(repository, entry.key, value));
            value.map_or(Ok(()), |value| self.put_if_absent(Family::Dedup, entry.key, value))?;
            return Ok(value.is_some());
        }
        let is_state = crate::state::is_key(entry.key) || crate::damaged::is_key(entry.key);
        let known = self.documents.entry((is_state, entry.key.to_vec())).or_insert((0, None));
        if entry.sequence >= known.0 {
            *known = (entry.sequence, entry.value.map(<[u8]>::to_vec));
        }
        Ok(true)
    }

    fn put_if_absent(&mut self, family: Family, key: &[u8], value: &[u8]) -> Result<()> {
        // What the log says is newer.
        match self.repository.database().get(family, key, ReadMode::Cached)? {
            Some(_) => Ok(()),
            None => self.put(family, key, value),
        }
    }

    fn put(&mut self, family: Family, key: &[u8], value: &[u8]) -> Result<()> {
        self.batch.put(family, key, value)?;
        if self.batch.bytes() > MAX_BATCH_BYTES {
            let database = self.repository.database();
            database.write(std::mem::replace(&mut self.batch, database.batch()), false)?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        for ((is_state, key), (_, value)) in std::mem::take(&mut self.documents) {
            let Some(value) = value else { continue };
            match is_state {
                true => self.put_if_absent(Family::State, &key, &value)?,
                false if catalog::may_count(self.repository, &key, &value) => {
                    self.put_if_absent(Family::Catalog, &key, &value)?;
                }
                false => {}
            }
        }
        self.repository.database().write(self.batch, true)
    }
}
