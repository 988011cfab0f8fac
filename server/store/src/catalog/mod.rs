//! The catalog: the index of machines and points.
//!
//! Keys of the `catalog` family reveal no names. `H` is the first 16 bytes of the keyed BLAKE3 of
//! the machine's name:
//!
//! ```text
//! "m" H                          the machine
//! "p" H seconds(8) number(4)     a point; both big endian, so the points of a
//!                                machine lie together and in order
//! "q" H seconds(8) number(4)     the files that a point carries, if any
//! ```
//!
//! Values are sealed documents (JSON). Their purpose contains the key, so a document does not open
//! under another key.

mod changes;

pub(crate) use changes::*;

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::{BTreeMap, HashMap};

use crate::documents::Flag;
use crate::repository::Repository;
use crate::rocks::{Batch, Family, ReadMode};
use crate::{MachineName, PointDocument, PointName, Quarantine};
use coldrise_block::hex;
use twox_hash::XxHash3_64;

const MACHINE: u8 = b'm';
const POINT: u8 = b'p';
const FILES: u8 = b'q';

#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct MachineDocument {
    machine: MachineName,
    /// The backup stored last, even if it has been removed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last_backup: Option<PointName>,
    /// The highest number of the removed points, per time (seconds since 1970-01-01T00:00:00Z) that
    /// still has points. A name is never given twice.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    retired: BTreeMap<u64, u32>,
}

impl MachineDocument {
    fn of(repository: &Repository, machine: &MachineName) -> Result<Option<MachineDocument>> {
        let key = prefix(repository, MACHINE, machine);
        let stored = repository.database().get(Family::Catalog, &key, ReadMode::Cached)?;
        stored.map(|value| open(repository, &key, &value)).transpose()
    }

    /// Reads the machine's document; a damaged one counts as missing. The machine's points stay
    /// changeable then, and the next change writes a new document.
    fn readable(repository: &Repository, machine: &MachineName) -> Result<Option<Self>> {
        match MachineDocument::of(repository, machine) {
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(None),
            known => known,
        }
    }

    fn put(&self, repository: &Repository, batch: &mut Batch<'_>) -> Result<()> {
        let key = prefix(repository, MACHINE, &self.machine);
        batch.put(Family::Catalog, &key, &seal(repository, &key, self)?)
    }
}

fn prefix(repository: &Repository, kind: u8, machine: &MachineName) -> Vec<u8> {
    let hash = blake3::keyed_hash(&repository.keys().name_hash, machine.as_str().as_bytes());
    let mut key = vec![kind];
    key.extend_from_slice(&hash.as_bytes()[..16]);
    key
}

fn point_key(repository: &Repository, machine: &MachineName, point: &PointName) -> Vec<u8> {
    let mut key = prefix(repository, POINT, machine);
    key.extend_from_slice(&point.sort_key());
    key
}

fn files_key(repository: &Repository, machine: &MachineName, point: &PointName) -> Vec<u8> {
    let mut key = prefix(repository, FILES, machine);
    key.extend_from_slice(&point.sort_key());
    key
}

fn purpose(key: &[u8]) -> String {
    format!("catalog {}", hex::encode(key))
}

fn seal<T: Serialize>(repository: &Repository, key: &[u8], document: &T) -> Result<Vec<u8>> {
    let text = serde_json::to_vec(document)
        .map_err(|e| Error::with_source(ErrorKind::Internal, "writing a catalog document", e))?;
    repository.encrypt_document(&purpose(key), &text)
}

fn open<T: DeserializeOwned>(repository: &Repository, key: &[u8], value: &[u8]) -> Result<T> {
    let text = repository.decrypt_document(&purpose(key), value)?;
    serde_json::from_slice(&text).map_err(|e| {
        Error::with_source(ErrorKind::Corrupt, "a catalog document has an unknown form", e)
    })
}

/// Calls `each` with the entries whose keys start with `prefix`, in key order.
fn for_each_with_prefix(
    repository: &Repository,
    prefix: &[u8],
    mut each: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    let mut cursor = repository.database().cursor(Family::Catalog, ReadMode::Cached)?;
    cursor.seek(prefix)?;
    while let Some((key, value)) = cursor.entry().filter(|(key, _)| key.starts_with(prefix)) {
        each(key, value)?;
        cursor.next()?;
    }
    Ok(())
}

/// A document of the catalog that is opened on demand.
pub(crate) struct Document<'a> {
    repository: &'a Repository,
    key: &'a [u8],
    value: &'a [u8],
}

impl Document<'_> {
    /// A hash of what is stored. Without encryption, only the content and its tag differ.
    pub(crate) fn version(&self) -> u64 {
        XxHash3_64::oneshot(self.value)
    }

    /// The machine's hash and, for a point, the sort key of its name; `None` for other documents.
    pub(crate) fn place(&self) -> Option<([u8; 16], Option<[u8; 12]>)> {
        let (kind, rest) = self.key.split_first()?;
        let (machine, rest) = rest.split_first_chunk::<16>()?;
        match *kind {
            MACHINE if rest.is_empty() => Some((*machine, None)),
            POINT => Some((*machine, Some(rest.try_into().ok()?))),
            _ => None,
        }
    }

    pub(crate) fn machine(&self) -> Result<(MachineName, Option<PointName>)> {
        let document = open::<MachineDocument>(self.repository, self.key, self.value)?;
        Ok((document.machine, document.last_backup))
    }

    pub(crate) fn point(&self) -> Result<PointDocument> {
        open(self.repository, self.key, self.value)
    }
}

/// Calls `each` with every machine, then with every point.
pub(crate) fn for_each_document(
    repository: &Repository,
    mut each: impl FnMut(Document<'_>) -> Result<()>,
) -> Result<()> {
    for kind in [MACHINE, POINT] {
        for_each_with_prefix(repository, &[kind], |key, value| {
            each(Document { repository, key, value })
        })?;
    }
    Ok(())
}

/// A readable entry of the catalog.
pub(crate) enum CatalogEntry {
    Machine,
    Point(Box<PointDocument>),
    Files,
}

/// Calls `each` with every entry or its error, and with the entry's name as far as the key shows
/// it.
pub(crate) fn for_each_entry(
    repository: &Repository,
    mut each: impl FnMut(String, Result<CatalogEntry>) -> Result<()>,
) -> Result<()> {
    // Machines come before points and their files.
    let mut names: HashMap<Vec<u8>, MachineName> = HashMap::new();
    for_each_with_prefix(repository, &[], |key, value| match key.split_first() {
        Some((&MACHINE, hash)) => {
            let machine = open::<MachineDocument>(repository, key, value);
            let entry = machine.map(|document| {
                names.insert(hash.to_vec(), document.machine);
                CatalogEntry::Machine
            });
            each("a machine of the catalog".to_owned(), entry)
        }
        Some((&POINT, rest)) => {
            let point = open::<PointDocument>(repository, key, value);
            let entry = point.map(|point| CatalogEntry::Point(Box::new(point)));
            each(point_of_key(rest, &names), entry)
        }
        Some((&FILES, rest)) => {
            let opened = repository.decrypt_document(&purpose(key), value);
            let what = format!("the files of {}", point_of_key(rest, &names));
            each(what, opened.map(|_| CatalogEntry::Files))
        }
        _ => {
            let unknown = Error::new(ErrorKind::Corrupt, "nothing of the catalog has such a key");
            each("an entry of the catalog".to_owned(), Err(unknown))
        }
    })
}

/// The names of all points, taken from their keys and their machines' documents.
pub(crate) fn point_names(repository: &Repository) -> Result<Vec<(MachineName, PointName)>> {
    let mut machines: HashMap<Vec<u8>, MachineName> = HashMap::new();
    for_each_with_prefix(repository, &[MACHINE], |key, value| {
        let machine = open::<MachineDocument>(repository, key, value)?.machine;
        machines.insert(key[1..].to_vec(), machine);
        Ok(())
    })?;
    let mut names = Vec::new();
    for_each_with_prefix(repository, &[POINT], |key, _| {
        let (hash, key) = key[1..].split_last_chunk::<12>().unwrap_or((&[], &[0; 12]));
        let point = PointName::from_sort_key(key);
        names.extend(machines.get(hash).cloned().zip(point));
        Ok(())
    })?;
    Ok(names)
}

fn point_of_key(rest: &[u8], names: &HashMap<Vec<u8>, MachineName>) -> String {
    let Some((hash, key)) = rest.split_last_chunk::<12>() else {
        return "a point of the catalog".to_owned();
    };
    let machine = names.get(hash).map_or("a machine whose name is lost", MachineName::as_str);
    match PointName::from_sort_key(key) {
        Some(point) => format!("{machine}/{point}"),
        None => format!("a point of {machine}"),
    }
}

/// A point's document, with the flags beside its marker.
fn open_point(repository: &Repository, key: &[u8], value: &[u8]) -> Result<PointDocument> {
    let mut document = open::<PointDocument>(repository, key, value)?;
    let has = |flag| repository.has_flag(&document.machine, &document.point, flag);
    let is_protected = document.is_protected || has(Flag::Protected)?;
    if document.quarantine.is_none() && has(Flag::Quarantined)? {
        document.quarantine = Some(Quarantine::Chosen);
    }
    document.is_protected = is_protected;
    Ok(document)
}

impl Repository {
    /// The machines of the catalog, sorted.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn machines(&self) -> Result<Vec<MachineName>> {
        let mut machines = Vec::new();
        for_each_with_prefix(self, &[MACHINE], |key, value| {
            machines.push(open::<MachineDocument>(self, key, value)?.machine);
            Ok(())
        })?;
        machines.sort_unstable();
        Ok(machines)
    }

    /// Whether the catalog has a machine. Reads no other.
    ///
    /// # Errors
    /// `Corrupt` if its document does not authenticate.
    pub fn has_machine(&self, machine: &MachineName) -> Result<bool> {
        Ok(MachineDocument::of(self, machine)?.is_some())
    }

    /// The backup of a machine that was stored last, even if it has been removed since. A source's
    /// dirty bitmap counts from this backup. `None` if it is not known.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn last_backup(&self, machine: &MachineName) -> Result<Option<PointName>> {
        Ok(MachineDocument::of(self, machine)?.and_then(|document| document.last_backup))
    }

    /// The highest number that a point of this point's time ever had, as far as the catalog knows.
    /// The next synthetic point takes a higher one.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn highest_number(&self, machine: &MachineName, point: &PointName) -> Result<u32> {
        let time = point.unix_seconds();
        let mut end = prefix(self, POINT, machine);
        end.extend_from_slice(&time.to_be_bytes());
        end.extend_from_slice(&u32::MAX.to_be_bytes());
        let mut cursor = self.database().cursor(Family::Catalog, ReadMode::Cached)?;
        cursor.seek_for_previous(&end)?;
        // `end` without its number: the machine's points of this time.
        let newest = cursor.entry().filter(|(key, _)| key.starts_with(&end[..end.len() - 4]));
        let newest = newest.and_then(|(key, _)| key.last_chunk::<12>());
        let there = newest.and_then(PointName::from_sort_key).map(|name| name.lineage().1);
        let document = MachineDocument::of(self, machine)?;
        let retired = document.and_then(|document| document.retired.get(&time).copied());
        Ok(there.max(retired).unwrap_or(0))
    }

    /// The points of a machine, oldest first. Empty for an unknown machine.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        let mut points = Vec::new();
        for_each_with_prefix(self, &prefix(self, POINT, machine), |key, value| {
            points.push(open_point(self, key, value)?);
            Ok(())
        })?;
        Ok(points)
    }

    /// The points of this point's time with a higher number than `number`, the lowest first. Reads only those.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn points_after(
        &self,
        machine: &MachineName,
        point: &PointName,
        number: u32,
    ) -> Result<Vec<PointDocument>> {
        let Some(first) = number.checked_add(1) else { return Ok(Vec::new()) };
        let mut time = prefix(self, POINT, machine);
        time.extend_from_slice(&point.unix_seconds().to_be_bytes());
        let mut cursor = self.database().cursor(Family::Catalog, ReadMode::Cached)?;
        cursor.seek(&[time.as_slice(), &first.to_be_bytes()].concat())?;
        let mut points = Vec::new();
        while let Some((key, value)) = cursor.entry().filter(|(key, _)| key.starts_with(&time)) {
            points.push(open_point(self, key, value)?);
            cursor.next()?;
        }
        Ok(points)
    }

    /// The names of a machine's points in the catalog, oldest first. Opens none of them.
    ///
    /// # Errors
    /// Errors of reading the database.
    pub fn point_names_of(&self, machine: &MachineName) -> Result<Vec<PointName>> {
        let mut names = Vec::new();
        for_each_with_prefix(self, &prefix(self, POINT, machine), |key, _| {
            names.extend(key.last_chunk::<12>().and_then(PointName::from_sort_key));
            Ok(())
        })?;
        Ok(names)
    }

    /// The newest `count` points of a machine, oldest first, or all if there are fewer. Reads only
    /// those.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn newest_points(&self, machine: &MachineName, count: usize) -> Result<Vec<PointDocument>> {
        let mut newest = Vec::new();
        if count > 0 {
            self.newest_point_that(machine, |point| {
                newest.push(point.clone());
                newest.len() == count
            })?;
        }
        newest.reverse();
        Ok(newest)
    }

    /// The newest point of a machine for which `is_meant` returns true. Opens that and newer ones.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn newest_point_that(
        &self,
        machine: &MachineName,
        mut is_meant: impl FnMut(&PointDocument) -> bool,
    ) -> Result<Option<PointDocument>> {
        let prefix = prefix(self, POINT, machine);
        let end = [prefix.as_slice(), &[u8::MAX; 12]].concat();
        let mut cursor = self.database().cursor(Family::Catalog, ReadMode::Cached)?;
        cursor.seek_for_previous(&end)?;
        while let Some((key, value)) = cursor.entry().filter(|(key, _)| key.starts_with(&prefix)) {
            let point = open_point(self, key, value)?;
            if is_meant(&point) {
                return Ok(Some(point));
            }
            cursor.previous()?;
        }
        Ok(None)
    }

    /// One point of a machine.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` if the document does not authenticate.
    pub fn point(&self, machine: &MachineName, point: &PointName) -> Result<PointDocument> {
        let key = point_key(self, machine, point);
        match self.database().get(Family::Catalog, &key, ReadMode::Cached)? {
            Some(value) => open_point(self, &key, &value),
            None => Err(no_point(machine, point)),
        }
    }

    /// Whether the catalog has a document of this point, sound or damaged.
    pub(crate) fn has_point(&self, machine: &MachineName, point: &PointName) -> Result<bool> {
        let key = point_key(self, machine, point);
        Ok(self.database().get(Family::Catalog, &key, ReadMode::Cached)?.is_some())
    }

    /// The files that a point of the catalog carries, byte for byte as they were stored with it;
    /// `None` if it carries none.
    ///
    /// # Errors
    /// `Corrupt` if the document does not authenticate.
    pub fn point_files(&self, machine: &MachineName, point: &PointName) -> Result<Option<Vec<u8>>> {
        let key = files_key(self, machine, point);
        match self.database().get(Family::Catalog, &key, ReadMode::Cached)? {
            Some(value) => self.decrypt_document(&purpose(&key), &value).map(Some),
            None => Ok(None),
        }
    }
}

fn no_point(machine: &MachineName, point: &PointName) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!("there is no point {machine}/{point}: see coldrise list {machine}"),
    )
}
