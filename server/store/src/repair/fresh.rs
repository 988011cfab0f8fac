//! Makes a fresh database from the readable content of a damaged one, beside it, and then removes
//! the damaged one. Only RocksDB writes database files.
//!
//! - Sound files of chunks, pages and the index are taken over unchanged, by links.
//! - Readable, authentic entries of all other files are written again: chunks to a file in place of
//!   theirs, the rest through batches.
//! - The log is replayed without damaged records.
//! - Documents count unless something shows that they were removed: see [`super::redundancy`],
//!   which also restores the catalog, the counters and the pages from their other sources.
//!
//! The folder determines which files exist. RocksDB's manifest is trusted only if it is whole; then
//! files that it does not name are leftovers.
//!
//! # Order, and what a crash leaves
//!
//! 1. `repair-unfinished` is made: from now on only a repair opens the database for writing.
//! 2. `db.new` is made and filled. A crash leaves the old database; the next open for writing
//!    removes `db.new`.
//! 3. `db.new` and `db` exchange their names, in one step. A crash leaves the new database.
//! 4. The old one is removed. A crash leaves the same as after step 2.
//!
//! Only links and rewritten entries take space: at most the size of the damaged files, and one map
//! page or document for each in them.
//!
//! Readers that have the old database open follow the new one: its files have higher numbers than
//! the old files, and its changes have higher sequence numbers than the old changes.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, ErrorKind, Result, sync_directory};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::ReopenReport;
use crate::high_water::{self, HighWater, Mark};
use crate::keys::Keys;
use crate::log_directory::LogDirectory;
use crate::map::{MAX_LEVELS, parse_page_value};
use crate::passphrase::ReadOnce;
use crate::repair_flag::FRESH_NAME;
use crate::repair_flag::is_flagged;
use crate::repair_flag::raise_flag;
use crate::repository::{Access, KeyCheck};
use crate::repository_config::{RepositoryConfig, database_path};
use crate::rocks::{
    self, Batch, Database, Entry, Family, ReadMode, SstWriter, is_sound, read_what_is_left, table,
    table_files,
};
use crate::writer::{STAGING_NAME, remove_folder};
use crate::writer_lock::lock_for_writing;
use crate::{OpenOptions, Repository, catalog, dedup};

/// Folder in the new database for links to files that are taken over.
const LINKS_NAME: &str = "coldrise-links";
/// Extension of files without any readable entry. They are kept in case another tool can read them.
const LOST_ENDING: &str = "lost";
/// Upper bound of the changes since the mark was written.
const UNMARKED_CHANGES: u64 = 1 << 32;
/// The sequence number if there is no mark.
const UNKNOWN_SEQUENCE: u64 = 1 << 48;
/// Bytes of entries that are written together.
const MAX_BATCH_BYTES: usize = 4 << 20;

/// Makes a fresh database for a repository if any part of the present one is damaged.
///
/// # Errors
/// `Busy`; `NoSpace`; `WrongPassphrase`; errors of the operating system on the drive. After an
/// error the database is unchanged.
pub(super) fn make_where_needed(path: &Path, passphrase: &ReadOnce<'_>) -> Result<ReopenReport> {
    make(path, passphrase, Found::look).map(Option::unwrap_or_default).map_err(|error| match error
        .kind()
    {
        ErrorKind::NoSpace => error.context(
            "the drive is full, and a repair takes as much space as the damaged files have",
        ),
        _ => error,
    })
}

/// Makes a fresh database by links alone, if the only fault is missing files of chunks that no
/// commit names. If the drive fails while the database ingests such a file, RocksDB leaves it
/// listed and deletes it. Returns whether this was the case.
///
/// # Errors
/// Those of a repair.
pub(crate) fn leave_out_uncommitted(path: &Path, passphrase: &ReadOnce<'_>) -> Result<bool> {
    if is_flagged(path)? {
        return Ok(false);
    }
    match make(path, passphrase, Found::without_uncommitted) {
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => Ok(false),
        made => Ok(made?.is_some()),
    }
}

/// `None` if the database stays.
fn make(
    path: &Path,
    passphrase: &ReadOnce<'_>,
    look: impl FnOnce(&Path, &Path, Option<&Mark>) -> Result<Found>,
) -> Result<Option<ReopenReport>> {
    let mut found = Found::default();
    let options = OpenOptions { cache_bytes: 0 };
    let fresh = path.join(FRESH_NAME);
    let open = |config: &RepositoryConfig, keys: Option<&Keys>| {
        let lock = lock_for_writing(path)?;
        let log = LogDirectory::create()?;
        // Without the folder nothing can be read, and the points are reported as lost.
        make_folder(&database_path(path))?;
        remove_folder(&fresh)?;
        let mark = keys.and_then(|keys| high_water::read(path, &config.id, keys));
        found = look(path, log.path(), mark.as_ref())?;
        let database = if found.is_whole {
            rocks::open_as_listed(&database_path(path), log.path())?
        } else {
            found.begin(path, log.path(), mark.as_ref())?
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
    // This releases the lock. The flag keeps other writers out, and another repair does the same
    // work.
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

/// The files of a database, and how each is used.
#[derive(Default)]
struct Found {
    is_whole: bool,
    /// Taken over unchanged.
    linked: Vec<(Family, PathBuf)>,
    /// Their entries are written again; the flag says whether the file is sound.
    read: Vec<(PathBuf, bool)>,
    /// Number of files that are listed and missing.
    missing: u64,
    is_list_new: bool,
}

/// The properties and the footer of a file fit into its last bytes.
const END_BYTES: u64 = 4096;

impl Found {
    fn look(path: &Path, log: &Path, mark: Option<&Mark>) -> Result<Found> {
        let folder = database_path(path);
        let listed = believed_list(&folder, log, mark)?;
        let mut found = Found { is_list_new: listed.is_none(), ..Found::default() };
        found.is_whole = !is_flagged(path)? && listed.is_some() && is_as_listed(&folder, log)?;
        if found.is_whole {
            // Then only the log may have lost its end.
            found.is_whole =
                mark.is_none_or(|mark| matches!(mark.rolled_back(&folder, log), Ok(None)));
        }
        let there = table_files(&folder)?;
        if let Some(listed) = &listed {
            let there: HashSet<&PathBuf> = there.iter().collect();
            found.missing = listed.iter().filter(|path| !there.contains(path)).count() as u64;
        }
        let mut ends = HashSet::new();
        for path in there {
            // An unlisted file may hold entries that are lost elsewhere.
            let is_leftover = listed.as_ref().is_some_and(|listed| !listed.contains(&path));
            if is_leftover && found.missing == 0 {
                continue;
            }
            // RocksDB ends the process if it meets the same entries in two files.
            if !ends.insert(length_and_end(&path)?) {
                found.is_whole = false;
                found.missing += 1;
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

    /// Finds only faults that show without reading the files.
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

    /// The part of step 2 that RocksDB does alone. Opens the new database.
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
        // Higher than the old manifest's number too, because the manifest may be missing.
        let highest = highest_number(&folder)?.max(mark.map_or(0, |mark| mark.manifest.number));
        let above = rocks::Above { sequence, file_number: highest + 1 };
        let left_out = rocks::make_database(&fresh, log, above, &links, &files)?;
        self.read.extend(left_out.iter().map(|name| (folder.join(name), true)));
        let mut next = highest_number(&fresh)?;
        let logs = rocks::usable_logs(&folder)?;
        self.missing += logs.dropped;
        for file in logs.paths {
            next += 1;
            link(&file, &fresh, Some(format!("{next:06}.log")))?;
        }
        remove_folder(&links)?;
        Database::open_for_repair(&fresh, log)
    }

    /// The rest of step 2.
    fn fill(&self, repository: &Repository) -> Result<ReopenReport> {
        let mut filler = Filler {
            repository,
            batch: repository.database().batch(),
            documents: BTreeMap::new(),
            plain: Vec::new(),
        };
        let mut reopened = ReopenReport {
            dropped_files: self.missing,
            is_list_new: self.is_list_new,
            ..ReopenReport::default()
        };
        for (path, is_sound) in &self.read {
            let (lost, entries) = filler.take_file(path)?;
            if *is_sound {
                continue;
            }
            if entries == 0 {
                let name = path.with_extension(LOST_ENDING);
                let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
                link(path, repository.database().path(), Some(name))?;
                reopened.dropped_files += 1;
            } else {
                reopened.mended_files += 1;
                reopened.lost_blocks += lost;
            }
        }
        filler.finish()?;
        Ok(reopened)
    }
}

/// The files that the manifest names; `None` if it cannot be read or is older than the mark.
fn believed_list(
    folder: &Path,
    log: &Path,
    mark: Option<&Mark>,
) -> Result<Option<HashSet<PathBuf>>> {
    let read = || -> Result<_> {
        let is_cut = mark.is_some_and(|mark| match rocks::sound_manifest(folder) {
            Ok(end) => end < mark.manifest,
            Err(_) => true,
        });
        let opened = rocks::open_as_listed(folder, log)?;
        let paths = rocks::listed_in(&opened)?.into_iter().map(|file| file.path).collect();
        // A log that has lost its end loses no files.
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

/// Links a file into a folder, under `name` or its own name. Returns the name.
fn link(file: &Path, folder: &Path, name: Option<String>) -> Result<String> {
    let own = || file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let name = name.unwrap_or_else(own);
    let target = folder.join(&name);
    std::fs::hard_link(file, &target)
        .context(|| format!("linking {} to {}", file.display(), target.display()))?;
    Ok(name)
}

/// The length and the last bytes of a file of the database, which hold its unique id: only copies
/// have both in common.
fn length_and_end(path: &Path) -> Result<(u64, Vec<u8>)> {
    let what = || format!("reading {}", path.display());
    let file = File::open(path).context(what)?;
    let length = file.metadata().context(what)?.len();
    let end_bytes = length.min(END_BYTES);
    let mut end = vec![0; end_bytes as usize];
    file.read_exact_at(&mut end, length - end_bytes).context(what)?;
    Ok((length, end))
}

/// The highest number in a file name; 0 if there is none.
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

/// Whether the key is of the counters' family, and the key.
type DocumentKey = (bool, Vec<u8>);
/// Sequence number and value; `None` for a deletion.
type Newest = (u64, Option<Vec<u8>>);

/// Writes entries of files that are not taken over to the new database.
struct Filler<'a> {
    repository: &'a Repository,
    batch: Batch<'a>,
    /// The newest value of each key of the catalog and the counters.
    documents: BTreeMap<DocumentKey, Newest>,
    plain: Vec<u8>,
}

impl Filler<'_> {
    /// Returns the number of unreadable stretches of a file and of its readable entries.
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
        let (codec, aead) = (self.repository.codec(), &self.repository.keys().chunks);
        codec.authenticate(aead, id, value, &mut self.plain).is_ok()
    }

    /// Takes an entry. Returns false if it is not one of ours.
    fn take(&mut self, entry: &Entry<'_>) -> Result<bool> {
        let repository = self.repository;
        if let (Ok(id), Some(value)) = (entry.key.try_into().map(u64::from_be_bytes), entry.value) {
            let level = value.get(1).copied().filter(|level| *level < MAX_LEVELS);
            let aead = &repository.keys().pages;
            let is_page = level.is_some_and(|level| {
                parse_page_value(repository.id(), aead, id, level, value).is_ok()
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
        let is_state = crate::state::is_key(entry.key) || crate::damage_list::is_key(entry.key);
        let known = self.documents.entry((is_state, entry.key.to_vec())).or_insert((0, None));
        if entry.sequence >= known.0 {
            *known = (entry.sequence, entry.value.map(<[u8]>::to_vec));
        }
        Ok(true)
    }

    fn put_if_absent(&mut self, family: Family, key: &[u8], value: &[u8]) -> Result<()> {
        // The log has the newer value.
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
            if is_state {
                self.put_if_absent(Family::State, &key, &value)?;
            } else if catalog::may_count(self.repository, &key, &value) {
                self.put_if_absent(Family::Catalog, &key, &value)?;
            }
        }
        self.repository.database().write(self.batch, true)
    }
}
