//! The points of a bucket.

use std::collections::BTreeMap;

use coldrise_block::{Error, ErrorKind, Result};

use super::BucketRepository;
use super::in_parallel::in_parallel;
use super::keys::NAME_BYTES;
use super::pack_reader::REQUESTS;
use coldrise_block::hex;
use coldrise_store::format::document;
use coldrise_store::{MachineName, PointDocument, PointFiles, PointName};

pub(super) const FOLDER: &str = "points/";
pub(super) const FILES_FOLDER: &str = "files/";
pub(super) const TRACES_FOLDER: &str = "traces/";
/// The time and number of a point, in bytes.
const TIME_BYTES: usize = 12;
const MOST_DOCUMENT_BYTES: u64 = document::MAX_BYTES as u64 + 64;

impl BucketRepository {
    /// The machines that have points, in the order of their names.
    ///
    /// # Errors
    /// Errors of reaching the store.
    pub fn machines(&self) -> Result<Vec<MachineName>> {
        // One document of each folder says whose it is.
        let mut folders: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for name in self.names_below(FOLDER)? {
            if let Some((folder, _)) = name.rsplit_once('/') {
                folders.entry(folder.to_owned()).or_default().push(name);
            }
        }
        let folders: Vec<_> = folders.into_values().collect();
        let machines = in_parallel(&folders, REQUESTS, |names| {
            for name in names.iter().rev() {
                if let Some(point) = self.read_listed(name)? {
                    return Ok(Some(point.machine));
                }
            }
            Ok(None)
        })?;
        let mut machines: Vec<_> = machines.into_iter().flatten().collect();
        machines.sort();
        Ok(machines)
    }

    /// The points of a machine, oldest first; none if it is not known. Damaged ones are left out, and noted.
    ///
    /// # Errors
    /// As for [`BucketRepository::machines`].
    pub fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        self.points_below(&format!("{FOLDER}{}/", self.reader.keys.folder_of(machine)))
    }

    /// All points, those of one machine together, oldest first. Damaged ones are left out, and noted.
    ///
    /// # Errors
    /// As for [`BucketRepository::machines`].
    pub fn all_points(&self) -> Result<Vec<PointDocument>> {
        self.points_below(FOLDER)
    }

    fn points_below(&self, prefix: &str) -> Result<Vec<PointDocument>> {
        let names = self.names_below(prefix)?;
        let points = in_parallel(&names, REQUESTS, |name| self.read_listed(name))?;
        Ok(points.into_iter().flatten().collect())
    }

    /// The names of documents of points. Other objects there are not ours.
    fn names_below(&self, prefix: &str) -> Result<Vec<String>> {
        let listed = self.reader.objects.list(prefix)?;
        Ok(listed.into_iter().map(|listed| listed.name).filter(|name| is_name(name)).collect())
    }

    /// A listed point; `None` if it was removed meanwhile, or is damaged: then it is noted.
    fn read_listed(&self, name: &str) -> Result<Option<PointDocument>> {
        match self.read_point(name) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.damaged.lock().insert(name.to_owned(), error.full_message());
                Ok(None)
            }
            read => {
                self.damaged.lock().remove(name);
                read
            }
        }
    }

    /// The documents of points that could not be read so far, by the names of their objects, and why.
    pub fn damaged_points(&self) -> BTreeMap<String, String> {
        self.damaged.lock().clone()
    }

    /// Removes the documents that cannot be read. Returns their number.
    ///
    /// # Errors
    /// `Corrupt` if none can be read: then the key may be the wrong one, and nothing is removed; errors of reaching the
    /// store, and its refusals.
    pub fn remove_damaged_points(&self) -> Result<u64> {
        let is_any_whole = !self.all_points()?.is_empty();
        let names = self.damaged_points();
        if !is_any_whole && !names.is_empty() {
            let text = format!("{}: none of {} points can be read", self.place(), names.len());
            return Err(Error::new(ErrorKind::Corrupt, text).advise(
                "nothing was removed. Check that repository.json belongs to this repository; if it does, remove the objects below points/ with the tools of the store",
            ));
        }
        for name in names.keys() {
            self.reader.objects.delete(name)?;
            self.damaged.lock().remove(name);
        }
        Ok(names.len() as u64)
    }

    pub(super) fn name_of_point(&self, machine: &MachineName, point: &PointName) -> String {
        self.name_of(FOLDER, machine, point)
    }

    /// `None` if it was removed meanwhile.
    fn read_point(&self, name: &str) -> Result<Option<PointDocument>> {
        let content = match self.reader.objects.get(name, MOST_DOCUMENT_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read?,
        };
        let opened = self.reader.keys.decrypt(&purpose(name), &content).and_then(|text| {
            serde_json::from_slice::<PointDocument>(&text).map_err(|error| {
                let text = "the point's document has an unknown form";
                Error::with_source(ErrorKind::Corrupt, text, error)
            })
        });
        let point = opened.map_err(|error| error.context(name))?;
        match self.name_of(FOLDER, &point.machine, &point.point) == name {
            true => Ok(Some(point)),
            false => {
                let text = format!("{name} is the document of another point");
                Err(Error::new(ErrorKind::Corrupt, text))
            }
        }
    }

    /// A point; `None` if it is not there.
    ///
    /// # Errors
    /// As for [`BucketRepository::machines`].
    pub fn point(&self, machine: &MachineName, point: &PointName) -> Result<Option<PointDocument>> {
        self.read_point(&self.name_of(FOLDER, machine, point))
    }

    /// The files that a point carries, encoded.
    ///
    /// # Errors
    /// `Corrupt` if they are missing or damaged; errors of reaching the store.
    pub fn point_files(&self, point: &PointDocument) -> Result<Option<Vec<u8>>> {
        if point.files.is_none() {
            return Ok(None);
        }
        let name = self.name_of(FILES_FOLDER, &point.machine, &point.point);
        let content = self.reader.objects.get(&name, MOST_DOCUMENT_BYTES);
        let content = content.map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(ErrorKind::Corrupt, format!("{name} is missing")),
            _ => error,
        })?;
        let opened = self.reader.keys.decrypt(&purpose(&name), &content);
        opened.map(Some).map_err(|error| error.context(name))
    }

    /// The files in a point's document.
    pub fn facts_of_files(&self, count: usize, size_bytes: u64, files: &[u8]) -> PointFiles {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        PointFiles { count, size_bytes, hash: self.reader.keys.hash_of_files(files) }
    }

    pub(super) fn put_point(&self, point: &PointDocument, files: Option<&[u8]>) -> Result<()> {
        point.check()?;
        if let Some(files) = files {
            let name = self.name_of(FILES_FOLDER, &point.machine, &point.point);
            self.reader.objects.put(&name, self.reader.keys.encrypt(&purpose(&name), files)?)?;
        }
        let text = serde_json::to_vec(point).map_err(|error| {
            Error::with_source(ErrorKind::Internal, "writing a point's document", error)
        })?;
        let name = self.name_of(FOLDER, &point.machine, &point.point);
        self.reader.objects.put(&name, self.reader.keys.encrypt(&purpose(&name), &text)?)
    }

    /// Removes a point. Its data stays until the bucket is compacted.
    ///
    /// # Errors
    /// Errors of reaching the store, and its refusals.
    pub fn remove_point(&self, point: &PointDocument) -> Result<()> {
        self.reader.objects.delete(&self.name_of(FOLDER, &point.machine, &point.point))?;
        match point.files {
            Some(_) => {
                let name = self.name_of(FILES_FOLDER, &point.machine, &point.point);
                self.reader.objects.delete(&name)
            }
            None => Ok(()),
        }
    }

    /// Keeps what a machine reads first at a boot.
    ///
    /// # Errors
    /// Errors of reaching the store, and its refusals.
    pub fn put_boot_trace(&self, machine: &MachineName, trace: &[u8]) -> Result<()> {
        let name = self.trace_of(machine);
        self.reader.objects.put(&name, self.reader.keys.encrypt(&purpose(&name), trace)?)
    }

    /// The boot trace of a machine, if there is one.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged; errors of reaching the store.
    pub fn boot_trace(&self, machine: &MachineName) -> Result<Option<Vec<u8>>> {
        let name = self.trace_of(machine);
        match self.reader.objects.get(&name, MOST_DOCUMENT_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            read => self.reader.keys.decrypt(&purpose(&name), &read?).map(Some),
        }
    }

    fn trace_of(&self, machine: &MachineName) -> String {
        format!("{TRACES_FOLDER}{}", self.reader.keys.folder_of(machine))
    }

    fn name_of(&self, folder: &str, machine: &MachineName, point: &PointName) -> String {
        let machine = self.reader.keys.folder_of(machine);
        format!("{folder}{machine}/{}", hex::encode(&point.sort_key()))
    }
}

/// Whether an object has the name of a point's document.
fn is_name(name: &str) -> bool {
    let parts = name.strip_prefix(FOLDER).and_then(|name| name.split_once('/'));
    let is_hex = |text: &str, bytes: usize| {
        text.len() == 2 * bytes && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    parts.is_some_and(|(machine, time)| is_hex(machine, NAME_BYTES) && is_hex(time, TIME_BYTES))
}

fn purpose(name: &str) -> String {
    format!("bucket {name}")
}
