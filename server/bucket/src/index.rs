//! The local index of a bucket: which contents its packs have.
//!
//! It is a database in the directory of the repository that is copied, and a cache: without it, it is rebuilt from the
//! packs' names. A copy begins by comparing it with the list of packs.
//!
//! When a pack has vanished, or has another size or time, a compaction was there, or something was lost. Then what points lead to is looked at
//! before one of them becomes a base: the generation grows, and a point counts as whole for one generation only.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, HeldLock, Result};

use super::in_parallel::in_parallel;
use super::keys::{NAME_BYTES, Name};
use super::pack::{FOLDER, Pack, PackNumber, Table, Tables, id_of, number_of, parts_of};
use super::pack_reader::{PackReader, REQUESTS};
use coldrise_objects::Listed;
use coldrise_store::format::LogDirectory;
use coldrise_store::format::{Database, Family, ReadMode};

/// Packs whose names are read at once.
const STEP_PACKS: usize = 64;
const NO_NAME: Name = [0; NAME_BYTES];
/// The format of the entries.
const VERSION_KEY: &[u8] = b"version";
const VERSION: &[u8] = b"2";
const GENERATION_KEY: &[u8] = b"generation";

/// A pack as a list shows it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ListedPack {
    size_bytes: u64,
    /// By the server's clock; 0 if it is not known yet.
    modified_ms: u64,
}

impl ListedPack {
    /// Whether this is what was shown before, as far as that is known.
    fn is_same(self, before: ListedPack) -> bool {
        self.size_bytes == before.size_bytes
            && (before.modified_ms == 0 || self.modified_ms == before.modified_ms)
    }
}

/// The index. One process has it.
///
/// `dedup` has the number of the value and a tag for each name. `default` has, for the number of each pack whose names are there, how it
/// was shown and whether it has changed; and for each point the generation in which it was whole. docs/on-disk-format.md has
/// the bytes.
pub(super) struct Index {
    database: Database,
    /// The packs in the bucket that can be read.
    packs: HashSet<PackNumber>,
    /// Those of which values are missing, or may be: they were rewritten.
    changed: HashSet<PackNumber>,
    generation: u64,
    _log: LogDirectory,
    _lock: HeldLock,
}

impl Index {
    /// Opens or makes the index in `folder`, and brings it up to date.
    ///
    /// # Errors
    /// `Busy` if another process has it; errors of reaching the store, and of the drive.
    pub(super) fn open(folder: &Path, reader: &PackReader) -> Result<Index> {
        let what = || format!("making {}", folder.display());
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).context(what)?;
        let lock = std::fs::File::create(folder.join("lock")).context(what)?;
        let Some(lock) = HeldLock::take(lock).context(what)? else {
            let text = format!("another copy to {} runs here", reader.objects.place());
            return Err(Error::new(ErrorKind::Busy, text).advise("wait for its end"));
        };
        let log = LogDirectory::create()?;
        let path = folder.join("db");
        let database = match usable(&path, &log) {
            Some(database) => database,
            None => {
                if path.exists() {
                    tracing::warn!("the index of {} is rebuilt", reader.objects.place());
                    std::fs::remove_dir_all(&path).context(what)?;
                }
                let database = Database::open_primary(&path, log.path(), true)?;
                let mut batch = database.batch();
                batch.put(Family::State, VERSION_KEY, VERSION)?;
                database.write(batch, true)?;
                database
            }
        };
        let (packs, changed) = Default::default();
        let mut index = Index { database, packs, changed, generation: 0, _log: log, _lock: lock };
        index.update(reader)?;
        Ok(index)
    }

    /// Compares with the packs that are there.
    fn update(&mut self, reader: &PackReader) -> Result<()> {
        let listed = reader.objects.list(FOLDER)?;
        let shown = |listed: Listed| {
            let Listed { name, size_bytes, modified_ms } = listed;
            Some((number_of(&name)?, ListedPack { size_bytes, modified_ms }))
        };
        let there: HashMap<PackNumber, ListedPack> = listed.into_iter().filter_map(shown).collect();
        let known = self.known()?;
        let has_changed = |(pack, (before, _)): (&PackNumber, &(ListedPack, bool))| {
            there.get(pack).is_none_or(|found| !found.is_same(*before))
        };
        self.generation = self.number(GENERATION_KEY)?;
        let mut batch = self.database.batch();
        if known.iter().any(has_changed) {
            self.generation += 1;
            batch.put(Family::State, GENERATION_KEY, &self.generation.to_be_bytes())?;
        }
        for pack in known.keys().filter(|pack| !there.contains_key(pack)) {
            batch.delete(Family::State, &pack.to_be_bytes())?;
        }
        self.database.write(batch, true)?;
        let (mut news, mut batch) = (Vec::new(), self.database.batch());
        for (pack, shown) in &there {
            match known.get(pack) {
                Some((before, is_changed)) if shown.is_same(*before) => {
                    if before.modified_ms == 0 {
                        put_pack(&mut batch, *pack, *shown, *is_changed)?;
                    }
                    self.packs.insert(*pack);
                    if *is_changed {
                        self.changed.insert(*pack);
                    }
                }
                known => news.push((*pack, *shown, known.is_some())),
            }
        }
        self.database.write(batch, false)?;
        for news in news.chunks(STEP_PACKS) {
            self.learn(reader, news)?;
        }
        if self.packs.is_empty() && !news.is_empty() {
            let text = format!(
                "{}: none of its {} packs opens with its repository.json: it may be another repository's",
                reader.objects.place(),
                news.len()
            );
            return Err(Error::new(ErrorKind::Corrupt, text).advise("put the right one back"));
        }
        Ok(())
    }

    /// Takes over the names of packs. Each as it is shown, and whether it was another one before.
    fn learn(
        &mut self,
        reader: &PackReader,
        news: &[(PackNumber, ListedPack, bool)],
    ) -> Result<()> {
        let tables = in_parallel(news, REQUESTS, |(pack, ..)| match reader.tables(*pack) {
            // Its content is stored again. A verify reports it.
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!("{}", error.full_message());
                Ok(None)
            }
            read => read.map(Some),
        })?;
        for ((pack, shown, is_changed), tables) in news.iter().zip(tables) {
            let Some(Tables { table, names }) = tables else { continue };
            let has = |place| has_value(&table, place, shown.size_bytes);
            let mut batch = self.database.batch();
            for (place, name) in names.iter().flatten().enumerate() {
                if *name != NO_NAME && has(place) {
                    self.put(&mut batch, reader, name, id_of(*pack, place))?;
                }
            }
            // If there was no index before, the pack may have been rewritten, too.
            let is_changed = *is_changed || !(0..table.count()).all(has);
            put_pack(&mut batch, *pack, *shown, is_changed)?;
            self.database.write(batch, false)?;
            self.packs.insert(*pack);
            if is_changed {
                self.changed.insert(*pack);
            }
        }
        Ok(())
    }

    /// The packs whose names are there, as they were shown, and whether they have changed.
    fn known(&self) -> Result<HashMap<PackNumber, (ListedPack, bool)>> {
        let mut known = HashMap::new();
        let mut cursor = self.database.cursor(Family::State, ReadMode::Cached)?;
        cursor.seek(&[])?;
        while let Some((key, value)) = cursor.entry() {
            let pack = key.try_into().ok().map(u64::from_be_bytes);
            if let (Some(pack), Some(entry)) = (pack, parse_pack(value)) {
                known.insert(pack, entry);
            }
            cursor.next()?;
        }
        Ok(known)
    }

    /// A stored number; 0 if there is none.
    fn number(&self, key: &[u8]) -> Result<u64> {
        let stored = self.database.get(Family::State, key, ReadMode::Cached)?;
        let number = stored.and_then(|stored| Some(u64::from_be_bytes((*stored).try_into().ok()?)));
        Ok(number.unwrap_or(0))
    }

    /// Whether all that a point leads to was there, and nothing has changed since.
    pub(super) fn is_whole(&self, point: &str) -> Result<bool> {
        Ok(self.number(&whole_key(point))? == self.generation + 1)
    }

    /// Notes that all that a point leads to is there.
    pub(super) fn note_whole(&self, point: &str) -> Result<()> {
        let mut batch = self.database.batch();
        batch.put(Family::State, &whole_key(point), &(self.generation + 1).to_be_bytes())?;
        self.database.write(batch, false)
    }

    /// Whether a value is there, as far as lists and tables say.
    pub(super) fn has(&self, reader: &PackReader, id: u64) -> Result<bool> {
        let (pack, place) = parts_of(id);
        if !self.packs.contains(&pack) {
            return Ok(false);
        }
        if !self.changed.contains(&pack) {
            return Ok(true);
        }
        Ok(has_value(&*reader.table(pack)?, place, self.size_of(pack)?))
    }

    fn size_of(&self, pack: PackNumber) -> Result<u64> {
        let stored = self.database.get(Family::State, &pack.to_be_bytes(), ReadMode::Cached)?;
        let entry = stored.and_then(|stored| parse_pack(&stored));
        Ok(entry.map_or(0, |(shown, _)| shown.size_bytes))
    }

    fn put(
        &self,
        batch: &mut coldrise_store::format::Batch<'_>,
        reader: &PackReader,
        name: &Name,
        id: u64,
    ) -> Result<()> {
        let mut entry = [0; 16];
        entry[..8].copy_from_slice(&id.to_be_bytes());
        entry[8..].copy_from_slice(&reader.keys.index_tag(name, id));
        batch.put(Family::Dedup, name, &entry)
    }

    /// The value with that content, if it is there.
    pub(super) fn find(&self, reader: &PackReader, name: &Name) -> Result<Option<u64>> {
        match self.entry(reader, name)? {
            Some(id) => Ok(self.has(reader, id)?.then_some(id)),
            None => Ok(None),
        }
    }

    /// The entry of a content. A damaged one is none.
    fn entry(&self, reader: &PackReader, name: &Name) -> Result<Option<u64>> {
        let Some(entry) = self.database.get(Family::Dedup, name, ReadMode::Cached)? else {
            return Ok(None);
        };
        let Some((id, tag)) = entry.split_first_chunk::<8>() else { return Ok(None) };
        let id = u64::from_be_bytes(*id);
        Ok((*tag == reader.keys.index_tag(name, id)).then_some(id))
    }

    /// Adds a pack that is in the bucket now.
    pub(super) fn add(&mut self, reader: &PackReader, pack: &Pack) -> Result<()> {
        let mut batch = self.database.batch();
        for (place, name) in pack.names.iter().enumerate().filter(|(_, name)| **name != NO_NAME) {
            self.put(&mut batch, reader, name, id_of(pack.number, place))?;
        }
        let shown = ListedPack { size_bytes: pack.size_bytes, modified_ms: 0 };
        put_pack(&mut batch, pack.number, shown, false)?;
        self.database.write(batch, false)?;
        self.packs.insert(pack.number);
        Ok(())
    }
}

fn put_pack(
    batch: &mut coldrise_store::format::Batch<'_>,
    pack: PackNumber,
    shown: ListedPack,
    is_changed: bool,
) -> Result<()> {
    let mut value = shown.size_bytes.to_be_bytes().to_vec();
    value.extend_from_slice(&shown.modified_ms.to_be_bytes());
    value.push(u8::from(is_changed));
    batch.put(Family::State, &pack.to_be_bytes(), &value)
}

fn parse_pack(value: &[u8]) -> Option<(ListedPack, bool)> {
    let (size_bytes, rest) = value.split_first_chunk::<8>()?;
    let (modified_ms, flag) = rest.split_first_chunk::<8>()?;
    let size_bytes = u64::from_be_bytes(*size_bytes);
    let modified_ms = u64::from_be_bytes(*modified_ms);
    Some((ListedPack { size_bytes, modified_ms }, flag == [1]))
}

/// Whether a pack of that size has the value at a place.
fn has_value(table: &Table, place: usize, size_bytes: u64) -> bool {
    table.range(place).is_some_and(|range| range.end <= size_bytes)
}

fn whole_key(point: &str) -> Vec<u8> {
    [b"whole ", point.as_bytes()].concat()
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
