//! The catalog: which machines and points there are.
//!
//! Keys of the `catalog` family reveal no names. `H` is the first 16 bytes of
//! the keyed BLAKE3 of the machine's name:
//!
//! ```text
//! "m" H                          the machine
//! "p" H seconds(8) number(4)     a point; both big endian, so that the points
//!                                of a machine lie together in their order
//! "q" H seconds(8) number(4)     the files that a point carries, where it does
//! ```
//!
//! Values are sealed documents (JSON) whose purpose holds the key: a document
//! that is moved to another key does not open.

use coldrise_block::{Error, ErrorKind, Result};
use serde::{de::DeserializeOwned, Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};

use crate::repository::Repository;
use crate::rocks::{Batch, Family, ReadMode};
use crate::{hex, MachineName, PointDocument, PointName};

const MACHINE: u8 = b'm';
const POINT: u8 = b'p';
const FILES: u8 = b'q';

#[derive(Serialize, Deserialize)]
struct MachineDocument {
    machine: MachineName,
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
    repository.seal_document(&purpose(key), &text)
}

fn open<T: DeserializeOwned>(repository: &Repository, key: &[u8], value: &[u8]) -> Result<T> {
    let text = repository.open_document(&purpose(key), value)?;
    serde_json::from_slice(&text).map_err(|e| {
        Error::with_source(ErrorKind::Corrupt, "a catalog document has an unknown form", e)
    })
}

/// Calls `each` with the entries whose keys start with `prefix`, in order.
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

/// A readable entry of the catalog.
pub(crate) enum CatalogEntry {
    Machine,
    Point(Box<PointDocument>),
    Files,
}

/// Calls `each` with every entry, or what is wrong with it, and what it is as far
/// as its key tells.
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
            let opened = repository.open_document(&purpose(key), value);
            let what = format!("the files of {}", point_of_key(rest, &names));
            each(what, opened.map(|_| CatalogEntry::Files))
        }
        _ => {
            let unknown = Error::new(ErrorKind::Corrupt, "nothing of the catalog has such a key");
            each("an entry of the catalog".to_owned(), Err(unknown))
        }
    })
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

impl Repository {
    /// The machines of the catalog, sorted.
    ///
    /// # Errors
    /// `Corrupt` where a document does not authenticate.
    pub fn machines(&self) -> Result<Vec<MachineName>> {
        let mut machines = Vec::new();
        for_each_with_prefix(self, &[MACHINE], |key, value| {
            machines.push(open::<MachineDocument>(self, key, value)?.machine);
            Ok(())
        })?;
        machines.sort_unstable();
        Ok(machines)
    }

    /// The points of a machine, oldest first; none for an unknown machine.
    ///
    /// # Errors
    /// `Corrupt` where a document does not authenticate.
    pub fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        let mut points = Vec::new();
        for_each_with_prefix(self, &prefix(self, POINT, machine), |key, value| {
            points.push(open::<PointDocument>(self, key, value)?);
            Ok(())
        })?;
        Ok(points)
    }

    /// The newest `count` points of a machine, oldest first; all, where there are
    /// fewer. Only those are decoded.
    ///
    /// # Errors
    /// `Corrupt` where a document does not authenticate.
    pub fn newest_points(&self, machine: &MachineName, count: usize) -> Result<Vec<PointDocument>> {
        let mut newest: VecDeque<(Vec<u8>, Vec<u8>)> = VecDeque::new();
        for_each_with_prefix(self, &prefix(self, POINT, machine), |key, value| {
            newest.push_back((key.to_vec(), value.to_vec()));
            if newest.len() > count {
                newest.pop_front();
            }
            Ok(())
        })?;
        newest.iter().map(|(key, value)| open(self, key, value)).collect()
    }

    /// One point of a machine.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` where the document does not authenticate.
    pub fn point(&self, machine: &MachineName, point: &PointName) -> Result<PointDocument> {
        let key = point_key(self, machine, point);
        match self.database().get(Family::Catalog, &key, ReadMode::Cached)? {
            Some(value) => open(self, &key, &value),
            None => Err(Error::new(
                ErrorKind::NotFound,
                format!("there is no point {machine}/{point}: see coldrise list {machine}"),
            )),
        }
    }

    /// The files that a point of the catalog carries, as they were given with it; `None`
    /// where there are none.
    ///
    /// # Errors
    /// `Corrupt` where the document does not authenticate.
    pub fn point_files(&self, machine: &MachineName, point: &PointName) -> Result<Option<Vec<u8>>> {
        let key = files_key(self, machine, point);
        match self.database().get(Family::Catalog, &key, ReadMode::Cached)? {
            Some(value) => self.open_document(&purpose(&key), &value).map(Some),
            None => Ok(None),
        }
    }
}

/// Adds a point with the files it carries, and its machine where that is new, to `batch`.
///
/// # Errors
/// `AlreadyExists` where the name is taken, `InvalidInput` for a document out
/// of its bounds.
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
    let machine_key = prefix(repository, MACHINE, &document.machine);
    if database.get(Family::Catalog, &machine_key, ReadMode::Cached)?.is_none() {
        let machine = MachineDocument { machine: document.machine.clone() };
        batch.put(Family::Catalog, &machine_key, &seal(repository, &machine_key, &machine)?)?;
    }
    if let Some(files) = files {
        let key = files_key(repository, &document.machine, &document.point);
        batch.put(Family::Catalog, &key, &repository.seal_document(&purpose(&key), files)?)?;
    }
    batch.put(Family::Catalog, &key, &seal(repository, &key, document)?)
}
